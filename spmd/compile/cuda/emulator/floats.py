"""Instructions on floating-point numbers with one right result, in any rounding direction.

Approximate ones are in `approximate.py`. PTX ISA, section 9.7.3.
"""

from __future__ import annotations

from collections.abc import Callable

from spmd.compile.cuda.emulator.ptx import Instruction
from spmd.compile.cuda.emulator.thread import Thread
from spmd.compile.cuda.emulator.types import UnknownPtxError, llvm_type, width
from spmd.compile.native.llvm.function_builder import Value

DIRECTED = ("rz", "rm", "rp")
_SMALLEST_NORMAL = 2.0**-126


def arithmetic(t: Thread, i: Instruction) -> None:
    """`add`, `sub`, `mul`, `fma`, `mad`, `div`, `rcp`, `sqrt`: exact and then rounded."""
    name = i.opcode[0]
    type = llvm_type(i.opcode[-1])
    operands = [flushed(t, i, t.read(each, type)) for each in i.operands[1:]]
    direction = next((word for word in i.opcode if word in DIRECTED), "")
    value = directed(t, i, operands, direction) if direction else _nearest(t, name, operands)
    value = flushed(t, i, value)
    t.write(i.operands[0], saturated(t, value) if "sat" in i.opcode else value)


def _nearest(t: Thread, name: str, operands: list[Value]) -> Value:
    if name in ("fma", "mad"):
        return t.intrinsic("fma", *operands)
    if name == "sqrt":
        return t.intrinsic("sqrt", *operands)
    if name == "rcp":
        return t.constant(operands[0].type, 1.0) // operands[0]
    x, y = operands
    return {"add": x.__add__, "sub": x.__sub__, "mul": x.__mul__, "div": x.__floordiv__}[name](y)


def directed(t: Thread, i: Instruction, operands: list[Value], direction: str) -> Value:
    """A result toward zero (rz), down (rm) or up (rp): the nearest one, moved if it is wrong.

    `high + low` is the exact result, and only the sign of what was lost in rounding counts.
    """
    f, name, type = t.f, i.opcode[0], operands[0].type
    if type == "double" and name not in ("add", "sub", "mul"):
        raise UnknownPtxError(str(i))
    wide = [f.convert("fpext", x, "double") if type == "float" else x for x in operands]
    zero = t.constant("double", 0.0)
    if name in ("add", "sub"):
        other = wide[1] if name == "add" else f.emit("double", f"fneg double {wide[1].text}")
        high, low = _two_sum(wide[0], other)
    elif name == "mul":
        high = wide[0] * wide[1]
        negative = f.emit("double", f"fneg double {high.text}")
        low = t.intrinsic("fma", wide[0], wide[1], negative)
    elif name in ("fma", "mad"):
        high, low = _two_sum(wide[0] * wide[1], wide[2])
    else:
        raise UnknownPtxError(str(i))
    near, lost = high, low
    if type == "float":
        near = f.convert("fptrunc", high, "float")
        difference = high - f.convert("fpext", near, "double")
        lost = t.choose(difference.differs(zero), difference, low)
    return moved(t, near, lost, direction)


def moved(t: Thread, near: Value, lost: Value, direction: str) -> Value:
    """The nearest number, one further where what was `lost` lies in the direction."""
    integer = f"i{width(near.type)}"
    more, less = lost > 0.0, lost < 0.0
    positive = near > 0.0
    bits = t.cast(near, integer)
    up = t.choose(positive, 1, t.constant(integer, -1))
    down = t.choose(positive, -1, t.constant(integer, 1))
    if direction == "rz":
        wrong = (positive & less) | ((near < 0.0) & more)
        step = t.choose(wrong, t.constant(integer, -1), 0)
    elif direction == "rm":
        step = t.choose(less, down, 0)
    else:
        step = t.choose(more, up, 0)
    value = t.cast(bits + step, near.type)
    if direction == "rz":
        return value
    # Next to zero is the smallest number with the direction's sign.
    smallest = 1 if direction == "rp" else (1 << width(near.type) - 1) | 1
    at_zero = near.equals(0.0) & (more if direction == "rp" else less)
    return t.choose(at_zero, t.cast(t.constant(integer, smallest), near.type), value)


def _two_sum(x: Value, y: Value) -> tuple[Value, Value]:
    """A rounded sum and exactly what it lacks (Knuth)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def extreme(t: Thread, i: Instruction) -> None:
    """`min`, `max`: a number wins over NaN, or with `.NaN` the other way round; -0 is below +0."""
    type = llvm_type(i.opcode[-1])
    operands = [flushed(t, i, t.read(each, type)) for each in i.operands[1:]]
    if "xorsign" in i.opcode or len(operands) != 2:
        raise UnknownPtxError(str(i))
    name = i.opcode[0] + "imum" + ("" if "NaN" in i.opcode else "num")
    t.write(i.operands[0], t.intrinsic(name, *operands))


def negate(t: Thread, i: Instruction) -> None:
    """`neg`."""
    x = flushed(t, i, t.read(i.operands[1], llvm_type(i.opcode[-1])))
    t.write(i.operands[0], t.f.emit(x.type, f"fneg {x.type} {x.text}"))


def absolute(t: Thread, i: Instruction) -> None:
    """`abs`."""
    x = flushed(t, i, t.read(i.operands[1], llvm_type(i.opcode[-1])))
    t.write(i.operands[0], t.intrinsic("fabs", x))


def copysign(t: Thread, i: Instruction) -> None:
    """`copysign d, a, b`: the sign of a, all else of b."""
    type = llvm_type(i.opcode[-1])
    sign, number = t.read(i.operands[1], type), t.read(i.operands[2], type)
    t.write(i.operands[0], t.intrinsic("copysign", number, sign))


def flushed(t: Thread, i: Instruction, x: Value) -> Value:
    """With `.ftz`: zero instead of a subnormal number of 32 bits, with its sign."""
    if "ftz" not in i.opcode or x.type != "float":
        return x
    small = t.intrinsic("fabs", x) < _SMALLEST_NORMAL
    return t.choose(small, t.intrinsic("copysign", t.constant("float", 0.0), x), x)


def saturated(t: Thread, x: Value) -> Value:
    """Between 0 and 1; NaN becomes 0."""
    low = t.intrinsic("maximumnum", x, t.constant(x.type, 0.0))
    return t.intrinsic("minimumnum", low, t.constant(x.type, 1.0))


HANDLERS: dict[str, Callable[[Thread, Instruction], None]] = {
    **dict.fromkeys(("add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt"), arithmetic),
    **dict.fromkeys(("min", "max"), extreme),
    "neg": negate,
    "abs": absolute,
    "copysign": copysign,
}
