"""Arithmetic: sums, products, powers, signs, rounding, extremes, and the parts of complex numbers.

The one idea: integers follow XLA where C leaves the meaning open. They wrap around; `x / 0` is -1
(all bits set), `x rem 0` is x; division truncates and the remainder has the dividend's sign.
"""

from __future__ import annotations

import enum
import operator
from typing import TYPE_CHECKING, Any

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
    precisions,
    unary,
)
from spmd.lax.logic import eq, ge, select

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- add, sub, neg, mul ------------------------------------------------------------------------


def neg(x: Any) -> Array:
    """Compute the negative of `x`, elementwise.

    `x` keeps its shape and its integer, float or complex dtype. Raises `DtypeError` for booleans.

    >>> lax.neg(np.array([1, -2]))
    Array([-1,  2], dtype=int32)
    """
    return neg_p.bind(x)


def add(x: Any, y: Any) -> Array:
    """Add `x` and `y`, elementwise.

    `x` and `y` have one shape, or are scalars, and one integer, float or complex dtype; a Python
    number takes that of the other. Integers wrap around. Raises `ShapeError` or `DtypeError` if
    shapes or dtypes differ: lax does not broadcast or promote, `snp.add` does.

    >>> lax.add(np.array([1, 2]), 10)
    Array([11, 12], dtype=int32)
    """
    return add_p.bind(*matched(x, y))


def sub(x: Any, y: Any) -> Array:
    """Subtract `y` from `x`, elementwise.

    `x` and `y` have one shape, or are scalars, and one integer, float or complex dtype; a Python
    number takes that of the other. Integers wrap around. Raises `ShapeError` or `DtypeError` if
    shapes or dtypes differ: lax does not broadcast or promote, `snp.subtract` does.

    >>> lax.sub(np.array([1, 2]), 10)
    Array([-9, -8], dtype=int32)
    """
    return sub_p.bind(*matched(x, y))


def mul(x: Any, y: Any, *, out_dtype: Any = None) -> Array:
    """Multiply `x` and `y`, elementwise.

    `x` and `y` have one shape, or are scalars, and one integer, float or complex dtype; a Python
    number takes that of the other. Integers wrap around. With `out_dtype` both are converted to it
    before. Raises `ShapeError` or `DtypeError` if shapes or dtypes differ: lax does not broadcast
    or promote, `snp.multiply` does.

    >>> lax.mul(np.array([1, 2]), 10)
    Array([10, 20], dtype=int32)
    """
    if out_dtype is not None:
        x, y = convert_element_type(x, out_dtype), convert_element_type(y, out_dtype)
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


def div(x: Any, y: Any) -> Array:
    """Divide `x` by `y`, elementwise; integers truncate towards zero.

    `x` and `y` have one shape, or are scalars, and one integer, float or complex dtype; a Python
    number takes that of the other. An integer divided by 0 is -1 (all bits set). Raises
    `ShapeError` or `DtypeError` if shapes or dtypes differ: lax does not broadcast or promote,
    `snp.divide` does.

    >>> lax.div(np.array([7, -7, 1]), np.array([2, 2, 0]))
    Array([ 3, -3, -1], dtype=int32)
    """
    return div_p.bind(*matched(x, y))


def rem(x: Any, y: Any) -> Array:
    """Compute the remainder of the truncated quotient, elementwise; it has the sign of `x`.

    `x` and `y` have one shape, or are scalars, and one integer or float dtype; a Python number
    takes that of the other. An integer modulo 0 is itself. Raises `ShapeError` or `DtypeError` if
    shapes or dtypes differ: lax does not broadcast or promote, `snp.remainder` does.

    >>> lax.rem(np.array([7, -7, 1]), np.array([2, 2, 0]))
    Array([ 1, -1,  1], dtype=int32)
    """
    return rem_p.bind(*matched(x, y))


def reciprocal(x: Any) -> Array:
    """Compute `1 / x`, elementwise.

    `x` keeps its shape and its integer, float or complex dtype. Raises `DtypeError` for booleans.

    >>> lax.reciprocal(np.array([1.0, 4.0]))
    Array([1.  , 0.25], dtype=float32)
    """
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


def pow(x: Any, y: Any) -> Array:
    """Raise `x` to the power `y`, elementwise.

    `x` is of a float or complex dtype, which the result has; `y` is of the same dtype or an
    integer. Both have one shape, or are scalars. Raises `ShapeError` or `DtypeError` if shapes or
    dtypes differ: lax does not broadcast or promote, `snp.power` does.

    >>> lax.pow(np.array([1.0, 2.0, 4.0]), 0.5)
    Array([1.       , 1.4142135, 2.       ], dtype=float32)
    >>> lax.pow(np.array([1.0, 2.0, 4.0]), np.array([3, -1, 0]))
    Array([1. , 0.5, 1. ], dtype=float32)
    """
    if not dtypes.is_integer(typeof(y).dtype):
        x, y = matched(x, y)
    return pow_p.bind(x, y)


def integer_pow(x: Any, y: int) -> Array:
    """Raise `x` to the power `y`, a Python integer, elementwise, by repeated multiplication.

    `x` keeps its shape and its integer, float or complex dtype. Raises `ArgumentError` if `y` is no
    Python integer, and `DtypeError` for booleans and for negative powers of integers.

    >>> lax.integer_pow(np.array([1, 2, 3]), 3)
    Array([ 1,  8, 27], dtype=int32)
    """
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


def square(x: Any) -> Array:
    """Compute `x * x`, elementwise.

    `x` keeps its shape and its integer, float or complex dtype. Integers wrap around. Raises
    `DtypeError` for booleans.

    >>> lax.square(np.array([2, -3]))
    Array([4, 9], dtype=int32)
    """
    return square_p.bind(x)


def sqrt(x: Any, *, accuracy: Any = None) -> Array:
    """Compute the square root, elementwise.

    `x` keeps its shape and its float or complex dtype. Of a negative float it is NaN. Raises
    `DtypeError` for integers and booleans.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.sqrt(np.array([4.0, 2.25, -1.0]))
    Array([2. , 1.5, nan], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("sqrt", accuracy)
    return sqrt_p.bind(x)


def rsqrt(x: Any, *, accuracy: Any = None) -> Array:
    """Compute `1 / sqrt(x)`, elementwise.

    `x` keeps its shape and its float or complex dtype. It is infinite at 0 and NaN below. Raises
    `DtypeError` for integers and booleans.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.rsqrt(np.array([4.0, 0.25, 0.0]))
    Array([0.5, 2. , inf], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("rsqrt", accuracy)
    return rsqrt_p.bind(x)


def cbrt(x: Any, *, accuracy: Any = None) -> Array:
    """Compute the real cube root, elementwise.

    `x` keeps its shape and its float dtype. Raises `DtypeError` for other dtypes.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.cbrt(np.array([-8.0, 27.0]))
    Array([-2.,  3.], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("cbrt", accuracy)
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
    # The first factor is not multiplied by 1: for an infinite complex number that gives NaN.
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


def log(x: Any, *, accuracy: Any = None) -> Array:
    """Compute the natural logarithm, elementwise; NaN below zero.

    `x` keeps its shape and its float or complex dtype. Raises `DtypeError` for integers and
    booleans.
    Every `accuracy`, a `lax.AccuracyMode` or a `lax.Tolerance`, is met: see docs/accuracy.md.

    >>> lax.log(np.array([0.0, 1.0, -1.0]))
    Array([-inf,   0.,  nan], dtype=float32)
    """
    if accuracy is not None:
        precisions.check_accuracy("log", accuracy)
    return log_p.bind(x)


log_p = unary("log", accepts=INEXACT, jvp=lambda t, x, out: div(t, x))

# ---- sign, abs, rounding -----------------------------------------------------------------------


class RoundingMethod(enum.IntEnum):
    """The direction in which `round` takes a number halfway between two integers."""

    AWAY_FROM_ZERO = 0
    TO_NEAREST_EVEN = 1


def sign(x: Any) -> Array:
    """Compute -1, 0 or 1, elementwise; `x / abs(x)` for complex `x`.

    `x` keeps its shape and its integer, float or complex dtype. NaN and -0.0 stay. Raises
    `DtypeError` for booleans.

    >>> lax.sign(np.array([-2.0, 0.0, 3.0]))
    Array([-1.,  0.,  1.], dtype=float32)
    """
    return sign_p.bind(x)


def abs(x: Any) -> Array:
    """Compute the absolute value, elementwise.

    The shape of `x` stays, and its dtype, but complex numbers become real. The smallest signed
    integer stays. Raises `DtypeError` for booleans.

    >>> lax.abs(np.array([-2, 3]))
    Array([2, 3], dtype=int32)
    >>> lax.abs(np.array([3.0 + 4.0j]))
    Array([5.], dtype=float32)
    """
    return abs_p.bind(x)


def floor(x: Any) -> Array:
    """Compute the largest integer not above `x`, elementwise, as a float.

    `x` keeps its shape and its float dtype. Raises `DtypeError` for other dtypes.

    >>> lax.floor(np.array([-1.5, 1.5]))
    Array([-2.,  1.], dtype=float32)
    """
    return floor_p.bind(x)


def ceil(x: Any) -> Array:
    """Compute the smallest integer not below `x`, elementwise, as a float.

    `x` keeps its shape and its float dtype. Raises `DtypeError` for other dtypes.

    >>> lax.ceil(np.array([-1.5, 1.5]))
    Array([-1.,  2.], dtype=float32)
    """
    return ceil_p.bind(x)


def round(x: Any, rounding_method: RoundingMethod = RoundingMethod.AWAY_FROM_ZERO) -> Array:
    """Compute the nearest integer, elementwise, as a float.

    `rounding_method` decides on halves: `AWAY_FROM_ZERO`, or `TO_NEAREST_EVEN`. `x` keeps
    its shape and its float dtype. Raises `DtypeError` for other dtypes.

    >>> lax.round(np.array([0.5, 1.5, 2.5]))
    Array([1., 2., 3.], dtype=float32)
    >>> lax.round(np.array([0.5, 1.5, 2.5]), lax.RoundingMethod.TO_NEAREST_EVEN)
    Array([0., 2., 2.], dtype=float32)
    """
    return round_p.bind(x, rounding_method=RoundingMethod(rounding_method))


def is_finite(x: Any) -> Array:
    """Tell whether `x` is neither infinite nor NaN, elementwise.

    `x` is of a float dtype; the result is of its shape and bool. Raises `DtypeError` for other
    dtypes.

    >>> lax.is_finite(np.array([1.0, np.inf, np.nan]))
    Array([ True, False, False], dtype=bool)
    """
    return is_finite_p.bind(x)


def nextafter(x1: Any, x2: Any) -> Array:
    """Compute the float next to `x1` in the direction of `x2`, elementwise.

    `x1` and `x2` have one shape, or are scalars, and one float dtype; a Python number takes that of
    the other. Raises `ShapeError` or `DtypeError` if shapes or dtypes differ: lax does not
    broadcast or promote, `snp.nextafter` does.

    >>> lax.nextafter(np.float32(1.0), np.float32(2.0))
    Array(1.0000001, dtype=float32)
    """
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
is_finite_p = unary("is_finite", accepts=FLOAT, impl="isfinite", result=lambda x: dtypes.bool_)
nextafter_p = binary(
    "nextafter",
    accepts=FLOAT,
    impl="nextafter",
    jvp=Refused("has no derivative here; use lax.stop_gradient on its operands"),
    widen=False,
)

# ---- max, min ----------------------------------------------------------------------------------


def max(x: Any, y: Any) -> Array:
    """Take the larger of `x` and `y`, elementwise; NaN if either is NaN.

    `x` and `y` have one shape, or are scalars, and one dtype; a Python number takes that of the
    other. Complex numbers are ordered by their real, then their imaginary part. At a tie the
    derivative is shared equally. Raises `ShapeError` or `DtypeError` if shapes or dtypes differ:
    lax does not broadcast or promote, `snp.maximum` does.

    >>> lax.max(np.array([1.0, np.nan, 3.0]), 2.0)
    Array([ 2., nan,  3.], dtype=float32)
    """
    return max_p.bind(*matched(x, y))


def min(x: Any, y: Any) -> Array:
    """Take the smaller of `x` and `y`, elementwise; NaN if either is NaN.

    `x` and `y` have one shape, or are scalars, and one dtype; a Python number takes that of the
    other. Complex numbers are ordered by their real, then their imaginary part. At a tie the
    derivative is shared equally. Raises `ShapeError` or `DtypeError` if shapes or dtypes differ:
    lax does not broadcast or promote, `snp.minimum` does.

    >>> lax.min(np.array([1.0, np.nan, 3.0]), 2.0)
    Array([ 1., nan,  2.], dtype=float32)
    """
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


def real(x: Any) -> Array:
    """Take the real part of complex numbers, elementwise.

    `x` keeps its shape; complex64 becomes float32 and complex128 float64. Raises `DtypeError` for
    other dtypes: `snp.real` takes them.

    >>> lax.real(np.array([1.0 + 2.0j]))
    Array([1.], dtype=float32)
    """
    return real_p.bind(x)


def imag(x: Any) -> Array:
    """Take the imaginary part of complex numbers, elementwise.

    `x` keeps its shape; complex64 becomes float32 and complex128 float64. Raises `DtypeError` for
    other dtypes: `snp.imag` takes them.

    >>> lax.imag(np.array([1.0 + 2.0j]))
    Array([2.], dtype=float32)
    """
    return imag_p.bind(x)


def complex(x: Any, y: Any) -> Array:
    """Make the complex numbers `x + iy`, elementwise.

    `x` and `y` have one shape, or are scalars, and one float dtype: float32 becomes complex64, and
    float64 complex128. Raises `ShapeError` or `DtypeError` if shapes or dtypes differ.

    >>> lax.complex(np.array([1.0, 2.0]), 3.0)
    Array([1.+3.j, 2.+3.j], dtype=complex64)
    """
    return complex_p.bind(*matched(x, y))


def conj(x: Any) -> Array:
    """Compute the complex conjugate, elementwise.

    `x` keeps its shape. Floats become complex numbers with imaginary part 0, as in JAX. Raises
    `DtypeError` for integers and booleans.

    >>> lax.conj(np.array([1.0 + 2.0j]))
    Array([1.-2.j], dtype=complex64)
    """
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
