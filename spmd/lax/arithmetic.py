"""Arithmetic: sums, products, powers, signs, rounding, extremes, and the parts of complex numbers.

The one idea: integers follow XLA where C leaves the meaning open. They wrap around; `x / 0` is -1
(all bits set), `x rem 0` is x; division truncates and the remainder has the dividend's sign.
"""

from __future__ import annotations

import enum
import operator
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError
from spmd.core.aval import typeof
from spmd.core.primitive import Refused, linear
from spmd.lax.convert import convert_element_type, matched
from spmd.lax.families import (
    ANY,
    COMPLEX,
    FLOAT,
    INEXACT,
    NUMERIC,
    REAL,
    binary,
    const,
    fail,
    unary,
)
from spmd.lax.logic import eq, ge, select

# ---- add, sub, neg, mul ------------------------------------------------------------------------


def neg(x: Any) -> Any:
    """The negative of x, elementwise."""
    return neg_p.bind(x)


def add(x: Any, y: Any) -> Any:
    """The sum, elementwise."""
    return add_p.bind(*matched(x, y))


def sub(x: Any, y: Any) -> Any:
    """The difference x - y, elementwise."""
    return sub_p.bind(*matched(x, y))


def mul(x: Any, y: Any) -> Any:
    """The product, elementwise."""
    return mul_p.bind(*matched(x, y))


neg_p = unary("neg", accepts=NUMERIC, impl="negative", jvp=linear, transpose=lambda ct, x: neg(ct))
add_p = binary(
    "add",
    accepts=NUMERIC,
    impl="add",
    jvp=(lambda t, x, y, out: t, lambda t, x, y, out: t),
    transpose=(lambda ct, x, y: ct, lambda ct, x, y: ct),
)
sub_p = binary(
    "sub",
    accepts=NUMERIC,
    impl="subtract",
    jvp=(lambda t, x, y, out: t, lambda t, x, y, out: neg(t)),
    transpose=(lambda ct, x, y: ct, lambda ct, x, y: neg(ct)),
)
mul_p = binary(
    "mul",
    accepts=NUMERIC,
    impl="multiply",
    jvp=(lambda t, x, y, out: mul_p.bind(t, y), lambda t, x, y, out: mul_p.bind(x, t)),
    transpose=(lambda ct, x, y: mul_p.bind(ct, y), lambda ct, x, y: mul_p.bind(x, ct)),
)

# ---- div, rem ----------------------------------------------------------------------------------


def div(x: Any, y: Any) -> Any:
    """The quotient x / y, elementwise; integers truncate towards zero."""
    return div_p.bind(*matched(x, y))


def rem(x: Any, y: Any) -> Any:
    """The remainder of the truncated quotient, elementwise; it has the sign of x."""
    return rem_p.bind(*matched(x, y))


def reciprocal(x: Any) -> Any:
    """`1 / x`, elementwise."""
    return div(const(x, 1), x)


def _div(xp: Any, x: Any, y: Any) -> Any:
    if not dtypes.is_integer(x.dtype):
        return xp.divide(x, y)
    divisor = xp.where(y == 0, y.dtype.type(1), y)
    quotient = xp.floor_divide(x, divisor)
    if x.dtype.kind == "i":  # from rounded down to truncated
        inexact = x - quotient * divisor != 0
        quotient = quotient + (inexact & ((x < 0) != (divisor < 0))).astype(x.dtype)
    return xp.where(y == 0, np.asarray(-1).astype(x.dtype), quotient)


def _rem(xp: Any, x: Any, y: Any) -> Any:
    if not dtypes.is_integer(x.dtype):
        return xp.fmod(x, y)
    divisor = xp.where(y == 0, y.dtype.type(1), y)
    return xp.where(y == 0, x, xp.fmod(x, divisor))


div_p = binary(
    "div",
    accepts=NUMERIC,
    impl=_div,
    jvp=(
        lambda t, x, y, out: div(t, y),
        lambda t, x, y, out: mul(neg(t), div(out, y)),
    ),
    transpose=(lambda ct, x, y: div(ct, y), None),
)
rem_p = binary(
    "rem",
    accepts=REAL,
    impl=_rem,
    jvp=(
        lambda t, x, y, out: t,
        lambda t, x, y, out: mul(neg(t), mul(sign(div(x, y)), floor(abs(div(x, y))))),
    ),
)

# ---- powers ------------------------------------------------------------------------------------


def pow(x: Any, y: Any) -> Any:
    """x to the power y, elementwise; x is inexact, y of the same dtype or an integer."""
    if not dtypes.is_integer(typeof(y).dtype):
        x, y = matched(x, y)
    return pow_p.bind(x, y)


def integer_pow(x: Any, y: int) -> Any:
    """x to a power that is a Python integer, elementwise, by repeated multiplication."""
    try:
        y = operator.index(y)
    except TypeError:
        raise ArgumentError(
            f"integer_pow: y={y!r} must be a Python integer; lax.pow takes arrays and floats"
        ) from None
    aval = typeof(x)
    if y < 0 and dtypes.is_integer(aval.dtype):
        fail(DtypeError, f"integer_pow: integers have no negative powers, got {aval} and y={y}")
    return integer_pow_p.bind(x, y=y)


def square(x: Any) -> Any:
    """`x * x`, elementwise."""
    return square_p.bind(x)


def sqrt(x: Any) -> Any:
    """The square root, elementwise; NaN below zero."""
    return sqrt_p.bind(x)


def rsqrt(x: Any) -> Any:
    """`1 / sqrt(x)`, elementwise."""
    return rsqrt_p.bind(x)


def cbrt(x: Any) -> Any:
    """The real cube root, elementwise."""
    return cbrt_p.bind(x)


def _pow(xp: Any, x: Any, y: Any) -> Any:
    return xp.power(x, y.astype(x.dtype))


def _log(x: Any) -> Any:
    """The logarithm that pow's derivative needs: 0 at 0, where `0 ** y` does not change with y."""
    return log_p.bind(_nonzero(x))


def _pow_jvp_base(t: Any, x: Any, y: Any, out: Any) -> Any:
    if not dtypes.is_integer(typeof(y).dtype):
        return mul(t, mul(y, pow_p.bind(x, sub(y, const(y, 1)))))
    power = convert_element_type(y, typeof(x).dtype)
    slope = mul(_nonzero(power), pow_p.bind(x, sub(power, const(power, 1))))
    return mul(t, select(eq(y, const(y, 0)), const(slope, 0), slope))


def _integer_pow(xp: Any, x: Any, *, y: int) -> Any:
    # Not from a product with one: of an infinite complex number that is not a number.
    out: Any = None if y else xp.ones_like(x)
    factor, left = x, y if y >= 0 else -y
    while left:
        if left & 1:
            out = factor if out is None else out * factor
        left >>= 1
        if left:
            factor = factor * factor
    return 1 / out if y < 0 else out


def _integer_pow_jvp(t: Any, x: Any, out: Any, *, y: int) -> Any:
    if y == 0:
        return mul(t, const(t, 0))
    if y == 1:
        return t
    return mul(t, mul(const(x, y), x if y == 2 else integer_pow(x, y - 1)))


def _nonzero(x: Any) -> Any:
    """x, with ones in place of zeros."""
    return select(eq(x, const(x, 0)), const(x, 1), x)


pow_p = binary(
    "pow",
    accepts=(INEXACT, NUMERIC),
    impl=_pow,
    agree=False,
    jvp=(_pow_jvp_base, lambda t, x, y, out: mul(t, mul(_log(x), out))),
)
integer_pow_p = unary("integer_pow", accepts=NUMERIC, impl=_integer_pow, jvp=_integer_pow_jvp)
square_p = unary(
    "square",
    accepts=NUMERIC,
    jvp=lambda t, x, out: mul(t, mul(const(x, 2), x)),
)
sqrt_p = unary("sqrt", accepts=INEXACT, jvp=lambda t, x, out: mul(t, div(const(x, 0.5), out)))
rsqrt_p = unary(
    "rsqrt",
    accepts=INEXACT,
    impl=lambda xp, x: 1 / xp.sqrt(x),
    jvp=lambda t, x, out: mul(t, mul(const(x, -0.5), div(out, x))),
)
cbrt_p = unary(
    "cbrt",
    accepts=FLOAT,
    jvp=lambda t, x, out: mul(t, mul(const(x, 1 / 3), integer_pow(out, -2))),
)


def log(x: Any) -> Any:
    """The natural logarithm, elementwise; NaN below zero."""
    return log_p.bind(x)


log_p = unary("log", accepts=INEXACT, jvp=lambda t, x, out: div(t, x))

# ---- sign, abs, rounding -----------------------------------------------------------------------


class RoundingMethod(enum.IntEnum):
    """Where `round` puts what is halfway between two integers."""

    AWAY_FROM_ZERO = 0
    TO_NEAREST_EVEN = 1


def sign(x: Any) -> Any:
    """-1, 0 or 1, elementwise; `x / abs(x)` for complex x. NaN and -0.0 stay."""
    return sign_p.bind(x)


def abs(x: Any) -> Any:
    """The absolute value, elementwise; real for complex x."""
    return abs_p.bind(x)


def floor(x: Any) -> Any:
    """The largest integer not above x, elementwise, as a float."""
    return floor_p.bind(x)


def ceil(x: Any) -> Any:
    """The smallest integer not below x, elementwise, as a float."""
    return ceil_p.bind(x)


def round(x: Any, rounding_method: RoundingMethod = RoundingMethod.AWAY_FROM_ZERO) -> Any:
    """The nearest integer, elementwise, as a float."""
    return round_p.bind(x, rounding_method=RoundingMethod(rounding_method))


def is_finite(x: Any) -> Any:
    """Whether x is neither infinite nor NaN, elementwise."""
    return is_finite_p.bind(x)


def nextafter(x1: Any, x2: Any) -> Any:
    """The float next to x1 in the direction of x2, elementwise."""
    return nextafter_p.bind(*matched(x1, x2))


def _round(xp: Any, x: Any, *, rounding_method: RoundingMethod) -> Any:
    if rounding_method == RoundingMethod.TO_NEAREST_EVEN:
        return xp.rint(x)
    whole = xp.trunc(x)  # adding 0.5 first would round 0.49999997 up
    half = x.dtype.type(0.5)
    return xp.where(xp.abs(x - whole) >= half, whole + xp.copysign(x.dtype.type(1), x), whole)


def _abs_jvp(t: Any, x: Any, out: Any) -> Any:
    if dtypes.is_complex(typeof(x).dtype):
        return real(mul(t, div(conj(x), convert_element_type(_nonzero(out), typeof(x).dtype))))
    return select(ge(x, const(x, 0)), t, neg(t))


def _real_dtype(x: Any, **_: Any) -> np.dtype:
    return dtypes.real_of(x.dtype)


sign_p = unary("sign", accepts=NUMERIC, impl=lambda xp, x: xp.where(x == 0, x, xp.sign(x)))
abs_p = unary("abs", accepts=NUMERIC, jvp=_abs_jvp, result=_real_dtype)
floor_p = unary("floor", accepts=FLOAT)
ceil_p = unary("ceil", accepts=FLOAT)
round_p = unary("round", accepts=FLOAT, impl=_round)
is_finite_p = unary(
    "is_finite", accepts=FLOAT, impl="isfinite", result=lambda x: dtypes.bool_, weak=False
)
nextafter_p = binary(
    "nextafter",
    accepts=FLOAT,
    impl="nextafter",
    jvp=Refused("has no derivative here; use lax.stop_gradient on its operands"),
    widen=False,
)

# ---- max, min ----------------------------------------------------------------------------------


def max(x: Any, y: Any) -> Any:
    """The larger, elementwise; NaN if either is NaN. Complex numbers in lexicographic order."""
    return max_p.bind(*matched(x, y))


def min(x: Any, y: Any) -> Any:
    """The smaller, elementwise; NaN if either is NaN. Complex numbers in lexicographic order."""
    return min_p.bind(*matched(x, y))


def _share(t: Any, x: Any, other: Any, out: Any) -> Any:
    """The part of a tangent that the winner x gets: all of it, or half at a tie."""
    won = select(eq(x, out), const(out, 1), const(out, 0))
    tied = select(eq(other, out), const(out, 2), const(out, 1))
    return mul(t, div(won, tied))


max_p = binary(
    "max",
    accepts=ANY,
    impl="maximum",
    jvp=(
        lambda t, x, y, out: _share(t, x, y, out),
        lambda t, x, y, out: _share(t, y, x, out),
    ),
)
min_p = binary(
    "min",
    accepts=ANY,
    impl="minimum",
    jvp=(
        lambda t, x, y, out: _share(t, x, y, out),
        lambda t, x, y, out: _share(t, y, x, out),
    ),
)

# ---- complex numbers ---------------------------------------------------------------------------


def real(x: Any) -> Any:
    """The real part of complex numbers."""
    return real_p.bind(x)


def imag(x: Any) -> Any:
    """The imaginary part of complex numbers."""
    return imag_p.bind(x)


def complex(x: Any, y: Any) -> Any:
    """The complex numbers `x + iy` of two float arrays."""
    return complex_p.bind(*matched(x, y))


def conj(x: Any) -> Any:
    """The complex conjugate; complex also for real x."""
    return conj_p.bind(x) if dtypes.is_complex(typeof(x).dtype) else complex(x, const(x, 0))


def _complex(xp: Any, x: Any, y: Any) -> Any:
    out = xp.empty(np.broadcast_shapes(x.shape, y.shape), dtypes.complex_of(x.dtype))
    out.real, out.imag = x, y
    return out


real_p = unary(
    "real",
    accepts=COMPLEX,
    impl=lambda xp, x: x.real.copy(),
    jvp=linear,
    transpose=lambda ct, x: complex(ct, const(ct, 0)),
    result=_real_dtype,
)
imag_p = unary(
    "imag",
    accepts=COMPLEX,
    impl=lambda xp, x: x.imag.copy(),
    jvp=linear,
    transpose=lambda ct, x: complex(const(ct, 0), neg(ct)),
    result=_real_dtype,
)
complex_p = binary(
    "complex",
    accepts=frozenset((dtypes.float32, np.dtype(np.float64))),
    impl=_complex,
    jvp=linear,
    transpose=(lambda ct, x, y: real(ct), lambda ct, x, y: imag(neg(ct))),
    result=lambda x, y: dtypes.complex_of(x.dtype),
)
conj_p = unary(
    "conj", accepts=COMPLEX, impl="conjugate", jvp=linear, transpose=lambda ct, x: conj(ct)
)
