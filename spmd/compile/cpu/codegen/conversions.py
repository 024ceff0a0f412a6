"""Conversions between kernel dtypes, and between values and how they lie in memory.

Values are *carried* in an element type (f16 and bf16 in `float`, bools in `i1`); memory holds bools
as bytes, bf16 as its 16 bits, f16 as `half`. Rounding to the narrow floats happens here and only
here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd.compile.cpu.math.floats import Floats
from spmd.compile.kernel.dtypes import DTYPES, REAL_OF, from_bits, kind
from spmd.compile.native.llvm.vector_emitter import Emitter

_ELEMENTS = {"bool": "i1", "f16": "float", "bf16": "float", "f32": "float", "f64": "double"}
_MEMORY = {"bool": "i8", "f16": "half", "bf16": "i16"}


def element_of(dtype: str) -> str:
    """Return the LLVM element type that carries values of a dtype (of its parts if complex)."""
    dtype = REAL_OF.get(dtype, dtype)
    return _ELEMENTS.get(dtype) or "i" + dtype[1:]


def memory_element(dtype: str) -> str:
    """Return the LLVM element type that holds a dtype in memory."""
    return _MEMORY.get(dtype) or element_of(dtype)


def from_memory(e: Emitter, raw: str, dtype: str) -> str:
    """Turn loaded lanes into carried ones."""
    match dtype:
        case "bool":
            return e.compare("ne", "i8", raw, e.int(0, "i8"))
        case "f16":
            return e.cast("fpext", "half", "float", raw)
        case "bf16":
            wide = e.cast("zext", "i16", "i32", raw)
            return e.cast("bitcast", "i32", "float", e.binary("shl", "i32", wide, e.int(16, "i32")))
    return raw


def to_memory(e: Emitter, value: str, dtype: str) -> str:
    """Turn carried lanes into stored ones, rounding to the narrow floats (nearest even)."""
    match dtype:
        case "bool":
            return e.cast("zext", "i1", "i8", value)
        case "f16":
            return e.cast("fptrunc", "float", "half", value)
        case "bf16":
            return _bfloat_bits(e, value)
    return value


def _bfloat_bits(e: Emitter, value: str) -> str:
    bits = e.cast("bitcast", "float", "i32", value)
    high = e.binary("lshr", "i32", bits, e.int(16, "i32"))
    tie = e.binary("and", "i32", high, e.int(1, "i32"))
    bump = e.binary("add", "i32", tie, e.int(0x7FFF, "i32"))
    rounded = e.binary("lshr", "i32", e.binary("add", "i32", bits, bump), e.int(16, "i32"))
    # The bump could carry a NaN into infinity: keep its sign and set the quiet bit instead.
    quiet = e.binary("or", "i32", high, e.int(0x40, "i32"))
    broken = e.compare("uno", "float", value, value)
    return e.cast("trunc", "i32", "i16", e.select(broken, "i32", quiet, rounded))


def constant_parts(e: Emitter, dtype: str, bits: int) -> tuple[str, ...]:
    """Write a constant, given as its stored bits, in all lanes."""
    if kind(dtype) == "c":
        real, half = REAL_OF[dtype], DTYPES[dtype].bits // 2
        low, high = bits & ((1 << half) - 1), bits >> half
        return (*constant_parts(e, real, low), *constant_parts(e, real, high))
    element = element_of(dtype)
    if kind(dtype) == "f":
        return (e.float(float(from_bits(bits, dtype)), element),)
    return (e.int(bits, element),)


# ---- convert --------------------------------------------------------------------------------


def convert(e: Emitter, parts: Sequence[str], source: str, target: str) -> tuple[str, ...]:
    """Write a conversion between any two dtypes."""
    if target == "bool":
        return (_to_bool(e, parts, source),)
    if kind(source) == "c":
        real = REAL_OF[source]
        if kind(target) == "c":
            return tuple(_real(e, part, real, REAL_OF[target]) for part in parts)
        return (_real(e, parts[0], real, target),)
    if kind(target) == "c":
        real = _real(e, parts[0], source, REAL_OF[target])
        return (real, e.float(0.0, element_of(target)))
    return (_real(e, parts[0], source, target),)


def _to_bool(e: Emitter, parts: Sequence[str], source: str) -> str:
    element = element_of(source)
    if kind(source) == "b":
        return parts[0]
    if kind(source) in "iu":
        return e.compare("ne", element, parts[0], e.int(0, element))
    tests = [e.compare("une", element, part, e.float(0.0, element)) for part in parts]
    return tests[0] if len(tests) == 1 else e.binary("or", "i1", *tests)


def _real(e: Emitter, x: str, source: str, target: str) -> str:
    given, wanted = element_of(source), element_of(target)
    if kind(target) == "f":
        return _to_float(e, x, source, target)
    if kind(source) == "f":
        return _saturate(e, x, given, wanted, signed=kind(target) == "i")
    if kind(source) == "b":
        return e.cast("zext", "i1", wanted, x)
    if given == wanted:
        return x
    if int(wanted[1:]) < int(given[1:]):
        return e.cast("trunc", given, wanted, x)
    return e.cast("sext" if kind(source) == "i" else "zext", given, wanted, x)


def _saturate(e: Emitter, x: str, given: str, wanted: str, signed: bool) -> str:
    """Truncate to an integer; too large gives the extreme, NaN gives 0."""
    if e.width > 1:
        return _saturate_lanes(e, x, given, wanted, signed)
    name = "fptosi" if signed else "fptoui"
    full = f"@llvm.{name}.sat.{e.suffix(wanted)}.{e.suffix(given)}"
    result, operand = e.type(wanted), e.type(given)
    e.module.declare(full, f"declare {result} {full}({operand})")
    return e.set(f"call {result} {full}({operand} {x})")


def _saturate_lanes(e: Emitter, x: str, given: str, wanted: str, signed: bool) -> str:
    """The same for vectors, of which LLVM takes its own function apart, lane by lane."""
    bits = int(wanted[1:])
    span, one = (1 << (bits - signed)), np.float32 if given == "float" else np.float64
    last = e.float(float(np.nextafter(one(span), one(0))), given)
    least = e.float(float(-span if signed else 0), given)
    # The converted value fits: NaN and values that are too large become 0.
    fits = e.select(e.compare("ole", given, x, last), given, x, e.float(0.0, given))
    fits = e.select(e.compare("ogt", given, fits, least), given, fits, least)
    if bits < 32:
        made = e.cast("trunc", "i32", wanted, e.cast("fptosi", given, "i32", fits))
    else:
        made = e.cast("fptosi" if signed else "fptoui", given, wanted, fits)
    return e.select(e.compare("ogt", given, x, last), wanted, e.int(span - 1, wanted), made)


def _to_float(e: Emitter, x: str, source: str, target: str) -> str:
    given, wanted = element_of(source), element_of(target)
    if kind(source) == "b":
        x = e.cast("uitofp", "i1", wanted, x)
    elif kind(source) in "iu":
        x = e.cast("sitofp" if kind(source) == "i" else "uitofp", given, wanted, x)
    elif (given, wanted) == ("float", "double"):
        x = e.cast("fpext", given, wanted, x)
    elif (given, wanted) == ("double", "float"):
        narrow = target in ("f16", "bf16")
        x = _round_to_odd(e, x) if narrow else e.cast("fptrunc", given, wanted, x)
    if target in ("f16", "bf16") and source != target:
        return from_memory(e, to_memory(e, x, target), target)
    return x


def _round_to_odd(e: Emitter, x: str) -> str:
    """Narrow double to float so that a second rounding, to 16 bits, is as good as one.

    Truncating, and setting the last bit if something was lost, keeps every later tie decidable.
    """
    m = Floats(e, "float")
    near = e.cast("fptrunc", "double", "float", x)
    back = e.cast("fpext", "float", "double", near)
    wide = Floats(e, "double")
    over = wide.is_("ogt", wide.abs(back), wide.abs(x))
    bits = m.to_bits(near)
    bits = e.select(over, "i32", e.binary("sub", "i32", bits, e.int(1, "i32")), bits)
    odd = e.binary("or", "i32", bits, e.int(1, "i32"))
    finite = m.is_("olt", m.abs(near), m.const(float("inf")))
    lost = e.binary("and", "i1", wide.is_("one", back, x), finite)
    return m.of_bits(e.select(lost, "i32", odd, m.to_bits(near)))
