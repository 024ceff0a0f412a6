"""Instructions that move, choose, compare and convert.

PTX ISA, sections 9.7.6 (comparison and selection) and 9.7.9 (data movement, conversion).
"""

from __future__ import annotations

from collections.abc import Callable

from spmd.compile.cuda.emulator.floats import flushed, moved, saturated
from spmd.compile.cuda.emulator.ptx import Instruction
from spmd.compile.cuda.emulator.thread import Thread
from spmd.compile.cuda.emulator.types import (
    FLOAT_COMPARISONS,
    UnknownPtxError,
    integer_comparison,
    is_float,
    is_type,
    llvm_type,
    width,
)
from spmd.compile.native.llvm.function_builder import Value

# To a whole number: nearest even, toward zero, down, up.
_WHOLE = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def move(t: Thread, i: Instruction) -> None:
    """`mov`, also of several registers into a wider one and back."""
    type = llvm_type(i.opcode[-1])
    into, source = i.operands
    if into.startswith("{"):
        value, parts = t.read(source, type), _parts(into)
        step = width(type) // len(parts)
        for k, part in enumerate(parts):
            shifted = t.f.emit(type, f"lshr {type} {value.text}, {k * step}")
            t.write(part, t.cast(shifted, f"i{step}"))
    elif source.startswith("{"):
        parts, value = _parts(source), t.constant(type, 0)
        step = width(type) // len(parts)
        for k, part in enumerate(parts):
            value = value | (t.cast(t.read(part, f"i{step}"), type) << k * step)
        t.write(into, value)
    else:
        t.write(into, t.read(source, type))


def _parts(text: str) -> list[str]:
    return [each.strip() for each in text.strip("{}").split(",")]


def address(t: Thread, i: Instruction) -> None:
    """`cvta`: in the emulator all addresses of global memory are generic ones, and no others."""
    if any(space in i.opcode for space in ("shared", "local", "const", "param")):
        raise UnknownPtxError(str(i))
    t.write(i.operands[0], t.read(i.operands[1], llvm_type(i.opcode[-1])))


def compare(t: Thread, i: Instruction) -> None:
    """`setp`: into one predicate, or two with opposite results; with `.and` etc. of a third."""
    how, ptx, into = i.opcode[1], i.opcode[-1], i.operands[0].split("|")
    type = llvm_type(ptx)
    x, y = (t.read(each, type) for each in i.operands[1:3])
    if is_float(ptx):
        x, y = flushed(t, i, x), flushed(t, i, y)
        result = t.compare(FLOAT_COMPARISONS[how], x, y)
    else:
        result = t.compare(integer_comparison(how, ptx[0] == "s"), x, y)
    both = [result, result ^ t.constant("i1", 1)]
    if len(i.operands) > 3:
        third = i.operands[3]
        value = t.read(third.removeprefix("!"), "i1")
        value = value ^ t.constant("i1", int(third.startswith("!")))
        combine = {"and": Value.__and__, "or": Value.__or__, "xor": Value.__xor__}[i.opcode[2]]
        both = [combine(each, value) for each in both]
    for name, each in zip(into, both, strict=False):
        t.write(name.strip(), each)


def select(t: Thread, i: Instruction) -> None:
    """`selp`."""
    type = llvm_type(i.opcode[-1])
    left, right = (t.read(each, type) for each in i.operands[1:3])
    t.write(i.operands[0], t.choose(t.read(i.operands[3], "i1"), left, right))


def convert(t: Thread, i: Instruction) -> None:
    """`cvt`, between any two types."""
    if i.opcode == ("cvt", "rna", "tf32", "f32"):
        _round_to_tf32(t, i)
        return
    types: list[str] = [word for word in i.opcode if is_type(word) or word == "bf16"]
    if len(types) != 2:
        raise UnknownPtxError(str(i))
    target, source = types
    into, text = i.operands
    if "bf16" in types:
        _convert_bf16(t, i, target, source)
    elif is_float(source):
        x = flushed(t, i, t.read(text, llvm_type(source)))
        whole = next((_WHOLE[word] for word in i.opcode if word in _WHOLE), "")
        x = t.intrinsic(whole, x) if whole else x
        if is_float(target):
            value = flushed(t, i, _resized(t, i, x, llvm_type(target)))
            t.write(into, saturated(t, value) if "sat" in i.opcode else value)
        else:
            # Out of range is the nearest number there is, NaN is 0.
            name = f"llvm.fpto{'si' if target[0] == 's' else 'ui'}.sat"
            type = llvm_type(target)
            suffix = {"float": "f32", "double": "f64", "half": "f16"}[x.type]
            t.write(into, t.f.call(f"{name}.{type}.{suffix}", type, x), target[0] == "s")
    else:
        x = _integer(t, text, source)
        if "sat" in i.opcode:
            raise UnknownPtxError(str(i))
        if is_float(target):
            how = "sitofp" if source[0] == "s" else "uitofp"
            t.write(into, t.f.convert(how, x, llvm_type(target)))
        else:
            value = t.cast(x, llvm_type(target), source[0] == "s")
            t.write(into, value, target[0] == "s")


def _integer(t: Thread, text: str, ptx: str) -> Value:
    """An operand that may stand in a wider register than its type."""
    type = llvm_type(ptx)
    if text in t.registers:
        return t.cast(t.read(text, t.registers[text][1]), type)
    return t.read(text, type)


def _resized(t: Thread, i: Instruction, x: Value, type: str) -> Value:
    """A float as another type of float, rounded as the opcode says."""
    if width(type) >= width(x.type):
        return x if type == x.type else t.f.convert("fpext", x, type)
    near = t.f.convert("fptrunc", x, type)
    direction = next((word for word in i.opcode if word in ("rz", "rm", "rp")), "")
    if not direction:
        return near
    if type != "float":
        raise UnknownPtxError(str(i))
    return moved(t, near, x - t.f.convert("fpext", near, x.type), direction)


def _round_to_tf32(t: Thread, i: Instruction) -> None:
    """Ten bits behind the point; a number in the middle goes away from zero."""
    into, text = i.operands
    x = t.read(text, "float")
    rounded = (t.cast(x, "i32") + (1 << 12)) & -(1 << 13)
    t.write(into, t.choose(t.compare("uno", x, x), 0x7FFFFFFF, rounded))


def _convert_bf16(t: Thread, i: Instruction, target: str, source: str) -> None:
    """Between bf16 and f32: a half of the bits, rounded to the nearest even."""
    f, into = t.f, i.operands[0]
    if (target, source) == ("f32", "bf16"):
        t.write(into, t.cast(t.cast(t.read(i.operands[1], "i16"), "i32") << 16, "float"))
    elif (target, source) == ("bf16", "f32") and "rn" in i.opcode:
        x = t.read(i.operands[1], "float")
        bits = t.cast(x, "i32")
        high = f.emit("i32", f"lshr i32 {bits.text}, 16")
        rounded = f.emit("i32", f"lshr i32 {(bits + 0x7FFF + (high & 1)).text}, 16")
        value = t.choose(t.compare("uno", x, x), 0x7FFF, rounded)
        t.write(into, t.cast(value, "i16"))
    else:
        raise UnknownPtxError(str(i))


HANDLERS: dict[str, Callable[[Thread, Instruction], None]] = {
    "mov": move,
    "cvta": address,
    "setp": compare,
    "selp": select,
    "cvt": convert,
}
