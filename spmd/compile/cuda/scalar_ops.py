"""Scalar operations of kernel IR as CUDA C++ expressions over the functions of `scalar.cuh`.

Operands are names or literals, so no expression needs brackets around them. A value's C++ type is
its dtype's *carrier*: `f32` for f16 and bf16, the dtype's own name for all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd.compile.kernel.dtypes import DTYPES, REAL_OF, from_bits, kind, to_bits
from spmd.compile.kernel.ops import identity


def carrier(dtype: str) -> str:
    """Return the C++ type of values of a dtype; arrays hold the dtype's own name."""
    return DTYPES[dtype].carrier


# ---- constants ------------------------------------------------------------------------------


def literal(bits: int, dtype: str) -> str:
    """Return the C++ literal of a constant given by its stored bits, of the carrier's type."""
    if kind(dtype) == "c":
        real, half = REAL_OF[dtype], DTYPES[dtype].bits // 2
        parts = literal(bits & ((1 << half) - 1), real), literal(bits >> half, real)
        return f"{dtype}{{{parts[0]}, {parts[1]}}}"
    value = from_bits(bits, dtype)
    if kind(dtype) == "b":
        return "true" if value else "false"
    if kind(dtype) in "iu":
        return _integer(int(value), dtype)
    return _float(value.astype(DTYPES[carrier(dtype)].numpy))


def _integer(value: int, dtype: str) -> str:
    suffix = {"i32": "", "u32": "u", "i64": "ll", "u64": "ull"}.get(dtype)
    if suffix is None:
        return f"({dtype}){value}"
    if value in (-(2**31), -(2**63)):
        return f"({value + 1}{suffix} - 1)"
    return f"{value}{suffix}" if value >= 0 else f"({value}{suffix})"


def _float(value: np.generic) -> str:
    wide = value.dtype == np.float64
    if not np.isfinite(value):
        raw = to_bits(value, "f64" if wide else "f32")
        return f"bits_as<f64>({raw:#x}ull)" if wide else f"bits_as<f32>({raw:#x}u)"
    # repr gives the shortest digits that read back as the same number.
    text = repr(float(value)) if wide else str(value) + "f"
    if "." not in text and "e" not in text:
        text = text.replace("f", ".0f")
    return f"({text})" if text.startswith("-") else text


def identity_literal(op: str, dtype: str) -> str:
    """Return the literal that a reduction or scan of `dtype` starts from."""
    return literal(to_bits(identity(op, dtype), carrier(dtype)), carrier(dtype))


# ---- operations -----------------------------------------------------------------------------

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITWISE = {"and": "bit_and", "or": "bit_or", "xor": "bit_xor"}
_EXTREME = {"max": "larger", "min": "smaller"}

# CUDA's own functions: the name for f64; f32 has an f behind it.
_MATH = {
    "rem": "fmod",
    "abs": "fabs",
    "round_even": "rint",
    "erf_inv": "erfinv",
} | {
    name: name
    for name in (
        "floor ceil round trunc cbrt erf erfc sqrt rsqrt exp exp2 expm1 log log1p sin cos tan asin "
        "acos atan sinh cosh tanh asinh acosh atanh pow atan2 nextafter"
    ).split()
}
# Functions of the prelude, overloaded for both widths.
_OWN_FLOAT = {
    "sign": "sign",
    "logistic": "logistic",
    "lgamma": "log_gamma",
    "digamma": "digamma",
    "is_finite": "is_finite",
}
_INTEGER = (
    "add sub mul div rem neg sign shl shr_logical shr_arith clz popcount threefry2x32".split()
)
_COMPLEX = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "neg": "neg",
    "conj": "conjugate",
    "abs": "modulus",
    "exp": "exponential",
    "log": "logarithm",
    "sqrt": "root",
}

# Functors of `team.cuh` that combine two values of a reduction, scan or combining store.
FUNCTORS = {name: name.capitalize() for name in "add mul max min and or xor".split()} | {
    "argmax": "ArgMax",
    "argmin": "ArgMin",
}


def operation(
    op: str, operands: Sequence[str], dtypes: Sequence[str], dtype: str, attr: int | None = None
) -> str:
    """Return the expression of one operation on operands of `dtypes` giving `dtype`."""
    source = dtypes[-1]
    match op:
        case "convert":
            return convert(operands[0], source, dtype)
        case "bitcast":
            return _bitcast(operands[0], source, dtype)
        case "select":
            return f"{operands[0]} ? {operands[1]} : {operands[2]}"
        case "complex":
            return f"{dtype}{{{operands[0]}, {operands[1]}}}"
        case "integer_pow":
            return _integer_pow(operands[0], source, attr or 0)
    if op in _BITWISE:
        return f"{_BITWISE[op]}({operands[0]}, {operands[1]})"
    if op in _EXTREME and kind(source) != "b":
        return f"{_EXTREME[op]}({operands[0]}, {operands[1]})"
    match kind(source):
        case "b":
            return _bool_operation(op, operands)
        case "c":
            return _complex_operation(op, operands)
        case "f":
            return _float_operation(op, operands, carrier(source))
    return _integer_operation(op, operands, source)


def combination(op: str, dtype: str, x: str, y: str) -> str:
    """Return the expression that combines two values of a reduction or combining store."""
    return f"{FUNCTORS[op]}::apply({x}, {y})"


def _bool_operation(op: str, operands: Sequence[str]) -> str:
    if op == "not":
        return f"!{operands[0]}"
    if op in _EXTREME:
        return f"{operands[0]} {'||' if op == 'max' else '&&'} {operands[1]}"
    return f"{operands[0]} {_COMPARE[op]} {operands[1]}"


def _integer_operation(op: str, operands: Sequence[str], dtype: str) -> str:
    if op in _COMPARE:
        return f"{operands[0]} {_COMPARE[op]} {operands[1]}"
    if op == "not":
        return f"({dtype})~{operands[0]}"
    if op == "abs":
        return f"absolute({operands[0]})"
    assert op in _INTEGER, op
    return f"{op}({', '.join(operands)})"


def _float_operation(op: str, operands: Sequence[str], carried: str) -> str:
    if op in _INFIX:
        return f"{operands[0]} {_INFIX[op]} {operands[1]}"
    if op in _COMPARE:
        return f"{operands[0]} {_COMPARE[op]} {operands[1]}"
    if op == "neg":
        return f"-{operands[0]}"
    if op in _OWN_FLOAT:
        return f"{_OWN_FLOAT[op]}({operands[0]})"
    return f"{_MATH[op]}{'f' if carried == 'f32' else ''}({', '.join(operands)})"


def _complex_operation(op: str, operands: Sequence[str]) -> str:
    match op:
        case "real":
            return f"{operands[0]}.re"
        case "imag":
            return f"{operands[0]}.im"
        case "eq" | "ne":
            return f"{'' if op == 'eq' else '!'}equal({operands[0]}, {operands[1]})"
    return f"{_COMPLEX[op]}({', '.join(operands)})"


def _integer_pow(x: str, dtype: str, exponent: int) -> str:
    one = literal(to_bits(1, dtype), dtype)
    raised = f"power({x}, {abs(exponent)}u, {one})"
    if exponent >= 0:
        return raised
    return f"{one} / {raised}" if kind(dtype) == "f" else f"div({one}, {raised})"


# ---- conversions ----------------------------------------------------------------------------


def convert(x: str, source: str, target: str) -> str:
    """Return the expression that converts between any two dtypes."""
    if source == target:
        return x
    if target == "bool":
        return f"{x}.re != 0 || {x}.im != 0" if kind(source) == "c" else f"{x} != 0"
    if kind(source) == "c":
        real = REAL_OF[source]
        if kind(target) == "c":
            parts = [convert(f"{x}.{part}", real, REAL_OF[target]) for part in ("re", "im")]
            return f"{target}{{{parts[0]}, {parts[1]}}}"
        return convert(f"{x}.re", real, target)
    if kind(target) == "c":
        return f"{target}{{{convert(x, source, REAL_OF[target])}, 0}}"
    if kind(target) == "f":
        return _to_float(x, source, target)
    if kind(source) == "f":
        return f"saturate<{target}>({x})"
    return f"({target}){x}"


def _to_float(x: str, source: str, target: str) -> str:
    if target not in ("f16", "bf16"):
        return x if carrier(source) == target else f"({target}){x}"
    if source == "f64":
        x = f"round_to_odd({x})"
    elif kind(source) != "f":
        x = f"(f32){x}"
    return f"round_{target}({x})"


def _bitcast(x: str, source: str, target: str) -> str:
    raw = f"{source}_bits({x})" if source in ("f16", "bf16") else x
    if target in ("f16", "bf16"):
        return f"{target}_value(bits_as<u16>({raw}))"
    return f"bits_as<{target}>({raw})"
