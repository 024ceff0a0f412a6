"""Meanings of scalar operations, as NumPy code on carried values (see `ops.py` for the rules).

Part of the interpreter: `scalar_op` gives a function of arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.compile.kernel.dtypes import DTYPES, kind
from spmd.lax.keys.threefry import encrypt

Array = np.ndarray[Any, Any]


def scalar_op(
    op: str, operands: tuple[str, ...], dtype: str, attr: int | None
) -> Callable[..., Array]:
    """Return the array function of `op` for operands and result of the given kernel dtypes."""
    if op == "convert":
        return lambda x: _convert(x, operands[0], dtype)
    if op == "bitcast":
        return lambda x: _bitcast(x, operands[0], dtype)
    if op == "integer_pow":
        return lambda x: _integer_pow(x, attr or 0)
    if kind(operands[0]) in "iu" and op in _INTEGER:
        return lambda *values: _INTEGER[op](*values).astype(values[0].dtype)
    if op in ("lgamma", "digamma", "erf", "erfc", "erf_inv"):
        return lambda x: _by_element(op)(x).astype(x.dtype)
    if op == "threefry2x32":
        return _threefry
    if op == "nextafter":
        return lambda x, y: _nextafter(x, y, dtype)
    return _PLAIN[op]


def _threefry(k0: Array, k1: Array, x0: Array, x1: Array) -> Array:
    low, high = encrypt(k0, k1, x0, x1)
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)


# ---- conversions ------------------------------------------------------------------------


def _convert(x: Array, source: str, target: str) -> Array:
    stored, carrier = DTYPES[target].numpy, DTYPES[DTYPES[target].carrier].numpy
    if kind(target) == "b":
        return x != 0
    if kind(source) == "c" and kind(target) != "c":
        x = x.real
    if kind(source) in "fc" and kind(target) in "iu":
        return _saturate(x, target)
    return x.astype(stored).astype(carrier)


def _saturate(x: Array, target: str) -> Array:
    info = np.iinfo(DTYPES[target].numpy)
    whole = np.trunc(np.where(np.isnan(x), 0, x).astype(np.float64))
    # 2**63 - 1 is no double: compare with the power of two above it, then choose.
    too_big, too_small = whole >= float(info.max) + (info.bits < 64), whole < float(info.min)
    inside = np.where(too_big | too_small, 0, whole).astype(info.dtype)
    return np.where(too_big, info.max, np.where(too_small, info.min, inside)).astype(info.dtype)


def _bitcast(x: Array, source: str, target: str) -> Array:
    stored = np.array(x.astype(DTYPES[source].numpy))
    return stored.view(DTYPES[target].numpy).astype(DTYPES[DTYPES[target].carrier].numpy)


# ---- integers -----------------------------------------------------------------------------


def _integer_div(x: Array, y: Array) -> Array:
    lowest = np.iinfo(x.dtype).min
    overflow = (y == -1) & (x == lowest) if x.dtype.kind == "i" else np.zeros(x.shape, bool)
    safe = np.where((y == 0) | overflow, 1, y).astype(x.dtype)
    floor = x // safe
    quotient = floor + ((x % safe != 0) & ((x < 0) != (safe < 0)))
    ones = np.invert(np.zeros((), x.dtype))
    return np.where(y == 0, ones, np.where(overflow, lowest, quotient))


def _integer_rem(x: Array, y: Array) -> Array:
    safe = np.where((y == 0) | ((y == -1) & (x.dtype.kind == "i")), 1, y).astype(x.dtype)
    return np.where(y == 0, x, np.fmod(x, safe))


def _shift(x: Array, by: Array, how: str) -> Array:
    bits = x.dtype.itemsize * 8
    inside = (by >= 0) & (by < bits)
    amount = np.where(inside, by, 0).astype(x.dtype)
    if how == "shl":
        return np.where(inside, np.left_shift(x, amount), 0)
    if how == "shr_logical":
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        moved = np.right_shift(x.astype(unsigned), amount.astype(unsigned)).astype(x.dtype)
        return np.where(inside, moved, 0)
    signed = np.dtype(f"i{x.dtype.itemsize}")
    amount = np.where(inside, by, bits - 1).astype(signed)
    return np.right_shift(x.astype(signed), amount).astype(x.dtype)


def _count_bits(x: Array) -> Array:
    return np.bitwise_count(x.view(np.dtype(f"u{x.dtype.itemsize}")))


def _leading_zeros(x: Array) -> Array:
    bits = x.dtype.itemsize * 8
    unsigned = np.array(x).view(np.dtype(f"u{x.dtype.itemsize}"))
    return bits - np.vectorize(lambda v: int(v).bit_length(), otypes=[np.int64])(unsigned)


_INTEGER: dict[str, Callable[..., Array]] = {
    "div": _integer_div,
    "rem": _integer_rem,
    "shl": lambda x, y: _shift(x, y, "shl"),
    "shr_logical": lambda x, y: _shift(x, y, "shr_logical"),
    "shr_arith": lambda x, y: _shift(x, y, "shr_arith"),
    "clz": _leading_zeros,
    "popcount": lambda x: _count_bits(np.array(x)),
}


# ---- floating point ------------------------------------------------------------------------


def _integer_pow(x: Array, exponent: int) -> Array:
    result, power, left = np.ones_like(x), x, abs(exponent)
    while left:
        result = result * power if left & 1 else result
        power, left = power * power, left >> 1
    if exponent >= 0:
        return result
    return 1 / result if x.dtype.kind in "fc" else _integer_div(np.ones_like(x), result)


def _round_away(x: Array) -> Array:
    whole = np.trunc(x)
    return np.copysign(whole + np.where(np.abs(x - whole) >= 0.5, np.sign(x), 0), x).astype(x.dtype)


def _logistic(x: Array) -> Array:
    one = x.dtype.type(1)
    return one / (one + np.exp(-x))


def _complex(real: Array, imag: Array) -> Array:
    # Not real + 1j * imag, which makes NaNs of infinities.
    dtype = np.result_type(real.dtype, np.complex64)
    result = np.empty(np.broadcast_shapes(real.shape, imag.shape), dtype)
    result.real, result.imag = real, imag
    return result


def _nextafter(x: Array, y: Array, dtype: str) -> Array:
    stored = DTYPES[dtype].numpy
    return np.nextafter(x.astype(stored), y.astype(stored)).astype(x.dtype)


def _sign(x: Array) -> Array:
    # np.sign drops the sign of zero.
    return np.where(x == 0, x, np.sign(x)) if x.dtype.kind == "f" else np.sign(x)


def _by_element(op: str) -> Callable[[Array], Array]:
    functions: dict[str, Callable[[float], float]] = {
        "erf": math.erf,
        "erfc": math.erfc,
        "lgamma": _lgamma,
        "digamma": _digamma,
        "erf_inv": _erf_inv,
    }
    return np.vectorize(lambda x: functions[op](float(x)), otypes=[np.float64])


def _lgamma(x: float) -> float:
    if math.isinf(x) or (x <= 0 and x == math.floor(x)):
        return math.inf
    # Beyond it the result is no double.
    return math.inf if x > 2.55e305 else math.lgamma(x)


def _digamma(x: float) -> float:
    if x == -math.inf or (x <= 0 and x == math.floor(x)):
        return math.nan
    if x < 0.5:
        return _digamma(1 - x) - math.pi / math.tan(math.pi * x)
    shift = 0.0
    while x < 10:
        shift -= 1 / x
        x += 1
    inverse = 1 / (x * x)
    series = 0.0
    # The Bernoulli numbers B(2k) / 2k of the asymptotic series, highest first.
    for term in (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12):
        series = series * inverse + term
    return shift + math.log(x) - 0.5 / x - series * inverse


def _erf_inv(x: float) -> float:
    if not abs(x) < 1:
        return math.copysign(math.inf, x) if abs(x) == 1 else math.nan
    if x == 0:
        return x
    log = math.log1p(-x * x)
    half = 2 / (math.pi * 0.147) + log / 2
    guess = math.copysign(math.sqrt(math.sqrt(half * half - log / 0.147) - half), x)
    for _ in range(4):
        # erfc keeps its digits where erf is close to 1.
        error = (1 - abs(x)) - math.erfc(abs(guess))
        error = error if abs(x) > 0.5 else math.erf(abs(guess)) - abs(x)
        slope = 2 / math.sqrt(math.pi) * math.exp(-guess * guess)
        guess -= error / slope * math.copysign(1.0, x)
    return guess


_PLAIN: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rem": np.fmod,
    "pow": np.power,
    "max": np.maximum,
    "min": np.minimum,
    "atan2": np.arctan2,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": np.negative,
    "abs": np.abs,
    "sign": _sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": _round_away,
    "round_even": np.rint,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "cbrt": np.cbrt,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "logistic": _logistic,
    "conj": np.conj,
    "real": np.real,
    "imag": np.imag,
    "complex": _complex,
    "is_finite": np.isfinite,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "select": np.where,
}
