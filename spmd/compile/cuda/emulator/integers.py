"""Instructions on integers and bits: arithmetic that wraps, carries, shifts, bit fields.

PTX ISA, sections 9.7.1 (integers), 9.7.2 (carries), 9.7.8 (logic and shifts).
"""

from __future__ import annotations

from collections.abc import Callable

from spmd.compile.cuda.emulator.ptx import Instruction
from spmd.compile.cuda.emulator.thread import Thread
from spmd.compile.cuda.emulator.types import UnknownPtxError, llvm_type, width
from spmd.compile.native.llvm.function_builder import Value


def add_or_sub(t: Thread, i: Instruction) -> None:
    """`add`, `sub`; with `.cc` or as `addc`, `subc` also a carry."""
    name = i.opcode[0]
    if "sat" in i.opcode:
        raise UnknownPtxError(str(i))
    if "cc" in i.opcode or name in ("addc", "subc"):
        type = llvm_type(i.opcode[-1])
        _with_carry(t, i, name[:3], t.read(i.operands[1], type), t.read(i.operands[2], type))
        return
    x, y = _operands(t, i, 2)
    t.write(i.operands[0], x + y if name == "add" else x - y)


def multiply(t: Thread, i: Instruction) -> None:
    """`mul`, `mad`: the low half, the high half, or all bits of a product, and a sum with it."""
    name, ptx = i.opcode[0], i.opcode[-1]
    type, signed = llvm_type(ptx), ptx[0] == "s"
    x, y = t.read(i.operands[1], type), t.read(i.operands[2], type)
    if "lo" in i.opcode:
        product = x * y
    else:
        double = f"i{2 * width(type)}"
        product = t.cast(x, double, signed) * t.cast(y, double, signed)
        if "hi" in i.opcode:
            product = _high(t, product, type)
    if "cc" in i.opcode or name == "madc":
        _with_carry(t, i, "add", product, t.read(i.operands[3], type))
        return
    if name == "mad":
        product = product + t.read(i.operands[3], product.type)
    t.write(i.operands[0], product)


def dot_product(t: Thread, i: Instruction) -> None:
    """`dp4a`, `dp2a`: products of the parts of two numbers, added to a third.

    Four bytes by four bytes, or two halves by two bytes, the lower or the upper ones. The compiler
    makes them of sums of products of narrow integers, and of products whose ranges it knows.
    """
    *_, left, right = i.opcode
    into, *texts = i.operands
    x, y, total = (t.read(text, "i32") for text in texts)
    part, count = ("i16", 2) if i.opcode[0] == "dp2a" else ("i8", 4)
    skipped = 2 if "hi" in i.opcode else 0

    def factor(value: Value, type: str, at: int, ptx: str) -> Value:
        return t.cast(t.cast(value >> width(type) * at, type), "i32", ptx[0] == "s")

    for k in range(count):
        total = total + factor(x, part, k, left) * factor(y, "i8", skipped + k, right)
    t.write(into, total)


def divide(t: Thread, i: Instruction) -> None:
    """`div`, `rem`: where C++ has no value, neither has this, but it does not trap."""
    signed = i.opcode[-1][0] == "s"
    x, y = _operands(t, i, 2)
    unsafe = t.compare("eq", y, 0)
    if signed:
        unsafe = unsafe | t.compare("eq", y, -1)
    # By -1 the quotient is the negative number, which wraps, and nothing remains.
    safe = t.choose(unsafe, 1, y)
    how = ("s" if signed else "u") + i.opcode[0]
    value = t.f.emit(x.type, f"{how} {x.type} {x.text}, {safe.text}")
    if signed:
        by_minus_one = t.constant(x.type, 0) - x if i.opcode[0] == "div" else t.constant(x.type, 0)
        value = t.choose(t.compare("eq", y, -1), by_minus_one, value)
    t.write(i.operands[0], value)


def negate(t: Thread, i: Instruction) -> None:
    """`neg`."""
    (x,) = _operands(t, i, 1)
    t.write(i.operands[0], t.constant(x.type, 0) - x)


def absolute(t: Thread, i: Instruction) -> None:
    """`abs`."""
    (x,) = _operands(t, i, 1)
    t.write(i.operands[0], t.f.call(f"llvm.abs.{x.type}", x.type, x, t.constant("i1", 0)))


def extreme(t: Thread, i: Instruction) -> None:
    """`min`, `max`."""
    name = ("s" if i.opcode[-1][0] == "s" else "u") + i.opcode[0]
    t.write(i.operands[0], t.intrinsic(name, *_operands(t, i, 2)))


def logic(t: Thread, i: Instruction) -> None:
    """`and`, `or`, `xor`, `not`."""
    if i.opcode[0] == "not":
        (x,) = _operands(t, i, 1)
        ones = Value(t.f, x.type, "true" if x.type == "i1" else "-1")
        t.write(i.operands[0], x ^ ones)
        return
    x, y = _operands(t, i, 2)
    how = {"and": x.__and__, "or": x.__or__, "xor": x.__xor__}[i.opcode[0]]
    t.write(i.operands[0], how(y))


def lop3(t: Thread, i: Instruction) -> None:
    """`lop3`: any function of three bits, by its table."""
    x, y, z = _operands(t, i, 3)
    table = int(i.operands[4], 0)
    ones, value = t.constant("i32", -1), t.constant("i32", 0)
    for k in range(8):
        if table >> k & 1:
            terms = [v if k & bit else v ^ ones for v, bit in ((x, 4), (y, 2), (z, 1))]
            value = value | (terms[0] & terms[1] & terms[2])
    t.write(i.operands[0], value)


def shift(t: Thread, i: Instruction) -> None:
    """`shl`, `shr`: by any number of bits."""
    name, ptx = i.opcode[0], i.opcode[-1]
    type, signed = llvm_type(ptx), ptx[0] == "s"
    bits = width(type)
    x, by = t.read(i.operands[1], type), t.read(i.operands[2], "i32")
    too_far = t.compare("uge", by, bits)
    near = t.cast(t.choose(too_far, bits - 1, by), type)
    how = "shl" if name == "shl" else "ashr" if signed else "lshr"
    value = t.f.emit(type, f"{how} {type} {x.text}, {near.text}")
    t.write(i.operands[0], value if how == "ashr" else t.choose(too_far, 0, value))


def funnel(t: Thread, i: Instruction) -> None:
    """`shf`: 32 of 64 bits, `.wrap` or `.clamp`."""
    low, high, by = (t.read(each, "i32") for each in i.operands[1:4])
    if "clamp" in i.opcode:
        f, both = t.f, _joined(t, low, high)
        distance = t.cast(t.intrinsic("umin", by, t.constant("i32", 32)), "i64")
        how = "shl" if i.opcode[1] == "l" else "lshr"
        moved = f.emit("i64", f"{how} i64 {both.text}, {distance.text}")
        t.write(i.operands[0], _high(t, moved, "i32") if how == "shl" else t.cast(moved, "i32"))
        return
    name = "fshl" if i.opcode[1] == "l" else "fshr"
    t.write(i.operands[0], t.intrinsic(name, high, low, by))


def count(t: Thread, i: Instruction) -> None:
    """`popc`, `clz`: counts of bits, as 32 bits."""
    (x,) = _operands(t, i, 1)
    if i.opcode[0] == "popc":
        found = t.intrinsic("ctpop", x)
    else:
        found = t.f.call(f"llvm.ctlz.{x.type}", x.type, x, t.constant("i1", 0))
    t.write(i.operands[0], t.cast(found, "i32"))


def reverse(t: Thread, i: Instruction) -> None:
    """`brev`."""
    t.write(i.operands[0], t.intrinsic("bitreverse", *_operands(t, i, 1)))


def insert(t: Thread, i: Instruction) -> None:
    """`bfi`: some bits of one number at a place in another."""
    field, into = _operands(t, i, 2)
    start, length = _start_and_length(t, i, 3, field.type)
    bits = _mask(t, length) << start
    rest = into & (bits ^ -1)
    # A field that starts behind the end changes nothing.
    behind = t.compare("uge", start, width(field.type))
    t.write(i.operands[0], t.choose(behind, into, ((field << start) & bits) | rest))


def extract(t: Thread, i: Instruction) -> None:
    """`bfe`: some bits of a number, with zeros or their sign above."""
    ptx = i.opcode[-1]
    (x,) = _operands(t, i, 1)
    start, length = _start_and_length(t, i, 2, x.type)
    bits = width(x.type)
    f, behind = t.f, t.compare("uge", start, bits)
    near = t.choose(behind, bits - 1, start)
    how = "ashr" if ptx[0] == "s" else "lshr"
    moved = f.emit(x.type, f"{how} {x.type} {x.text}, {near.text}")
    if ptx[0] == "u":
        t.write(i.operands[0], t.choose(behind, 0, moved & _mask(t, length)))
        return
    rest = t.constant(x.type, bits) - length
    whole = t.compare("sle", rest, 0)
    rest = t.choose(whole, 0, t.choose(t.compare("eq", length, 0), bits - 1, rest))
    value = f.emit(x.type, f"ashr {x.type} {(moved << rest).text}, {rest.text}")
    t.write(i.operands[0], t.choose(t.compare("eq", length, 0), 0, value))


def permute(t: Thread, i: Instruction) -> None:
    """`prmt`: four bytes chosen from eight, or their signs."""
    if i.opcode[-1] != "b32":
        raise UnknownPtxError(str(i))
    low, high, selectors = (t.read(each, "i32") for each in i.operands[1:4])
    f, both, value = t.f, _joined(t, low, high), t.constant("i32", 0)
    for k in range(4):
        selector = f.emit("i32", f"lshr i32 {selectors.text}, {4 * k}")
        distance = t.cast((selector & 7) * 8, "i64")
        byte = t.cast(f.emit("i64", f"lshr i64 {both.text}, {distance.text}"), "i8")
        byte = t.choose((selector & 8).differs(0), byte >> 7, byte)
        value = value | (t.cast(byte, "i32") << 8 * k)
    t.write(i.operands[0], value)


def _operands(t: Thread, i: Instruction, count: int) -> list[Value]:
    type = llvm_type(i.opcode[-1])
    return [t.read(operand, type) for operand in i.operands[1 : 1 + count]]


def _with_carry(t: Thread, i: Instruction, how: str, x: Value, y: Value) -> None:
    """A sum or difference with the carry of the one before, or that leaves one."""
    type, bits = x.type, width(x.type)
    wide = f"i{2 * bits}"
    left, right = t.cast(x, wide), t.cast(y, wide)
    value = left + right if how == "add" else left - right
    if i.opcode[0].endswith("c") and i.opcode[0] != "sub":
        carry = t.cast(t.carry.get(), wide)
        value = value + carry if how == "add" else value - carry
    if "cc" in i.opcode:
        t.carry.set(t.cast(t.f.emit(wide, f"lshr {wide} {value.text}, {bits}"), "i1"))
    t.write(i.operands[0], t.cast(value, type))


def _high(t: Thread, value: Value, type: str) -> Value:
    moved = t.f.emit(value.type, f"lshr {value.type} {value.text}, {width(type)}")
    return t.cast(moved, type)


def _joined(t: Thread, low: Value, high: Value) -> Value:
    return t.cast(low, "i64") | (t.cast(high, "i64") << 32)


def _start_and_length(t: Thread, i: Instruction, at: int, type: str) -> list[Value]:
    """Of a bit field: numbers of 8 bits."""
    return [t.cast(t.read(each, "i32") & 255, type) for each in i.operands[at : at + 2]]


def _mask(t: Thread, length: Value) -> Value:
    """So many ones."""
    bits = width(length.type)
    all_of_it = t.compare("uge", length, bits)
    one = t.constant(length.type, 1)
    return t.choose(all_of_it, -1, (one << t.choose(all_of_it, 0, length)) - 1)


HANDLERS: dict[str, Callable[[Thread, Instruction], None]] = {
    **dict.fromkeys(("add", "sub", "addc", "subc"), add_or_sub),
    **dict.fromkeys(("mul", "mad", "madc"), multiply),
    **dict.fromkeys(("div", "rem"), divide),
    **dict.fromkeys(("min", "max"), extreme),
    **dict.fromkeys(("and", "or", "xor", "not"), logic),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("popc", "clz"), count),
    "neg": negate,
    "abs": absolute,
    **dict.fromkeys(("dp4a", "dp2a"), dot_product),
    "lop3": lop3,
    "shf": funnel,
    "brev": reverse,
    "bfi": insert,
    "bfe": extract,
    "prmt": permute,
}
