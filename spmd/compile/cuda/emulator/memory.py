"""Instructions on memory: parameters, global, shared and local, with what each mode adds.

An address of global memory is the device's: `delta` leads to the host's. Shared addresses count
from the beginning of the block's shared memory. Local memory is the thread's own, on the stack or
in its coroutine. PTX ISA, section 9.7.9 (ld, st).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from spmd.compile.cuda.emulator.native_functions import CHECK_GLOBAL, CHECK_SHARED, TRACE
from spmd.compile.cuda.emulator.ptx import Instruction
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
    place = _host_address(t, i, i.operands[1], nbytes * len(names), write=False)
    for k, name in enumerate(names):
        t.write(name, t.f.load(type, place, k * nbytes, align=nbytes), ptx[0] == "s")


def store(t: Thread, i: Instruction) -> None:
    """`st`, also of vectors."""
    type, names = llvm_type(i.opcode[-1]), _names(i.operands[1])
    nbytes = width(type) // 8
    place = _host_address(t, i, i.operands[0], nbytes * len(names), write=True)
    for k, name in enumerate(names):
        t.f.store(_stored(t, name, type), place, k * nbytes, align=nbytes)


def _stored(t: Thread, name: str, type: str) -> Value:
    """The lowest bits of a register that may be wider than what is stored."""
    if name in t.registers and width(t.registers[name][1]) > width(type):
        return t.cast(t.read(name, t.registers[name][1]), type)
    return t.read(name, type)


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.strip("{}").split(",")]


def _host_address(t: Thread, i: Instruction, text: str, nbytes: int, write: bool) -> Value:
    """The address on the host of an operand such as `[%rd1+8]`."""
    match = _ADDRESS.match(text)
    if match is None:
        raise UnknownPtxError(str(i))
    base, offset = match[1], int(match[2] or 0)
    space = next((word for word in i.opcode if word in SPACES), "generic")
    if space == "param":
        return _parameter(t, base, offset)
    wide = base not in t.registers or t.registers[base][1] == "i64"
    address = t.read(base, "i64") if wide else t.cast(t.read(base, "i32"), "i64")
    address = address + offset if offset else address
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
        number = t.constant("i64", len(t.accesses))
        t.accesses.append((space, write, nbytes, t.place))
        t.f.call(TRACE, "void", t.environment, number, address, t.cast(t.number, "i64"))
    start = t.word("shared") if space == "shared" else t.word("delta")
    return t.f.convert("inttoptr", address + start, "ptr")


def _parameter(t: Thread, name: str, offset: int) -> Value:
    if name not in t.slots:
        raise UnknownPtxError(f"the parameter {name}")
    return t.f.at(t.slots[name], offset)


def nothing(t: Thread, i: Instruction) -> None:
    """Fences: threads run one after the other, so what one wrote is there for the next."""


HANDLERS: dict[str, Callable[[Thread, Instruction], None]] = {
    "ld": load,
    "st": store,
    "membar": nothing,
    "fence": nothing,
    "prefetch": nothing,
}
