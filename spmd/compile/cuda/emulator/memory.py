"""Instructions on memory: parameters, global, shared and local, with what each mode adds.

An address of global memory is the device's: `delta` leads to the host's. Shared addresses count
from the beginning of the block's shared memory. Local memory is the thread's own, on the stack or
in its coroutine. PTX ISA, section 9.7.9 (ld, st, cp.async).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from spmd.compile.cuda.emulator.native_functions import (
    BEGIN_COPY,
    CHECK_GLOBAL,
    CHECK_SHARED,
    COMMIT_COPIES,
    LAND_COPIES,
    RESET_COPIES,
    TRACE,
)
from spmd.compile.cuda.emulator.ptx import Code, Instruction
from spmd.compile.cuda.emulator.thread import Thread
from spmd.compile.cuda.emulator.types import UnknownPtxError, llvm_type, width
from spmd.compile.native.llvm.function_builder import Value

SPACES = ("global", "shared", "local", "param", "const")
_ADDRESS = re.compile(r"^\[\s*([%\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]$")


def load(t: Thread, i: Instruction) -> None:
    """`ld`, also of vectors; narrow values fill their registers with zeros or their sign."""
    ptx = i.opcode[-1]
    type, names = llvm_type(ptx), _names(i.operands[0])
    nbytes = width(type) // 8
    place = host_address(t, i, i.operands[1], nbytes * len(names), write=False)
    for k, name in enumerate(names):
        t.write(name, t.f.load(type, place, k * nbytes, align=nbytes), ptx[0] == "s")


def store(t: Thread, i: Instruction) -> None:
    """`st`, also of vectors."""
    type, names = llvm_type(i.opcode[-1]), _names(i.operands[1])
    nbytes = width(type) // 8
    place = host_address(t, i, i.operands[0], nbytes * len(names), write=True)
    for k, name in enumerate(names):
        t.f.store(_stored(t, name, type), place, k * nbytes, align=nbytes)


def _stored(t: Thread, name: str, type: str) -> Value:
    """The lowest bits of a register that may be wider than what is stored."""
    if name in t.registers and width(t.registers[name][1]) > width(type):
        return t.cast(t.read(name, t.registers[name][1]), type)
    return t.read(name, type)


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.strip("{}").split(",")]


def copy_async(t: Thread, i: Instruction) -> None:
    """`cp.async` of 4, 8 or 16 bytes, with the bytes of the source if they are fewer; its waits."""
    name, how, *spaces = i.opcode[1:] if len(i.opcode) > 2 else ("", "")
    if name != "async":
        raise UnknownPtxError(str(i))
    number = t.cast(t.number, "i64")
    if how == "commit_group":
        t.f.call(COMMIT_COPIES, "void", t.environment, number)
    elif how in ("wait_group", "wait_all"):
        groups = -1 if how == "wait_all" else int(i.operands[0])
        _land(t, groups)
    elif spaces == ["shared", "global"] and _size_of(i) in _COPIED[how]:
        target, source = (_address(t, i, each) for each in i.operands[:2])
        nbytes, fewer = _size_of(i), i.operands[3:]
        size = t.constant("i64", nbytes)
        valid = t.cast(t.read(fewer[0], "i32"), "i64") if fewer else size
        if t.mode == "counted":
            with t.f.if_(valid > 0):
                _count(t, "global", False, nbytes, source)
            _count(t, "shared", True, nbytes, target)
        place = t.constant("i64", t.place)
        given = number, target, source, size, valid, place
        t.f.call(BEGIN_COPY[t.mode == "checked"], "void", t.environment, *given)
    else:
        raise UnknownPtxError(str(i))


# The sizes of copies that go through both caches, and past the first.
_COPIED = {"ca": (4, 8, 16), "cg": (16,)}


def _size_of(i: Instruction) -> int:
    _, _, size, *_ = i.operands
    return int(size)


def copies(code: Code) -> bool:
    """Whether threads of a function begin copies that land later."""
    return any(each.opcode[:2] == ("cp", "async") for each in code.instructions())


def begin_copies(t: Thread) -> None:
    """A thread that makes such copies begins, with none."""
    t.f.call(RESET_COPIES, "void", t.environment, t.cast(t.number, "i64"))


def end_copies(t: Thread) -> None:
    """It ends: all that is left lands."""
    _land(t, -1)


def _land(t: Thread, keep: int) -> None:
    land = LAND_COPIES[t.mode == "checked"]
    t.f.call(land, "void", t.environment, t.cast(t.number, "i64"), t.constant("i64", keep))


def host_address(t: Thread, i: Instruction, text: str, nbytes: int, write: bool) -> Value:
    """The address on the host of an operand such as `[%rd1+8]`."""
    space = next((word for word in i.opcode if word in SPACES), "generic")
    if space == "param":
        return _parameter(t, *_base_and_offset(i, text))
    address = _address(t, i, text)
    if space == "local":
        return t.f.convert("inttoptr", address, "ptr")
    if space == "generic":
        raise UnknownPtxError(str(i))
    if t.mode == "checked":
        check = CHECK_SHARED if space == "shared" else CHECK_GLOBAL
        arguments = [t.constant("i64", n) for n in (nbytes, t.place, int(write))]
        size, where, writes = arguments
        number = t.cast(t.number, "i64")
        return t.f.call(check, "ptr", t.environment, address, size, number, where, writes)
    if t.mode == "counted" and space != "const":
        _count(t, space, write, nbytes, address)
    start = t.word("shared") if space == "shared" else t.word("delta")
    return t.f.convert("inttoptr", address + start, "ptr")


def _address(t: Thread, i: Instruction, text: str) -> Value:
    """The address that an operand such as `[%rd1+8]` has on the device."""
    base, offset = _base_and_offset(i, text)
    wide = base not in t.registers or t.registers[base][1] == "i64"
    address = t.read(base, "i64") if wide else t.cast(t.read(base, "i32"), "i64")
    return address + offset if offset else address


def _base_and_offset(i: Instruction, text: str) -> tuple[str, int]:
    match = _ADDRESS.match(text)
    if match is None:
        raise UnknownPtxError(str(i))
    return match[1], int(match[2] or 0)


def _count(t: Thread, space: str, write: bool, nbytes: int, address: Value) -> None:
    """Note an access where accesses are counted."""
    number = t.constant("i64", len(t.accesses))
    t.accesses.append((space, write, nbytes, t.place))
    t.f.call(TRACE, "void", t.environment, number, address, t.cast(t.number, "i64"))


def _parameter(t: Thread, name: str, offset: int) -> Value:
    if name not in t.slots:
        raise UnknownPtxError(f"the parameter {name}")
    return t.f.at(t.slots[name], offset)


def nothing(t: Thread, i: Instruction) -> None:
    """Fences: threads run one after the other, so what one wrote is there for the next."""


HANDLERS: dict[str, Callable[[Thread, Instruction], None]] = {
    "ld": load,
    "st": store,
    "cp": copy_async,
    "membar": nothing,
    "fence": nothing,
    "prefetch": nothing,
}
