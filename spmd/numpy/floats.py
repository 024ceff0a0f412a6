"""Rounding, floats taken apart, sums by logarithms: `round`, `frexp`, `ldexp`, `logaddexp`."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import DtypeArgumentError, RefusedError
from spmd.core.aval import typeof
from spmd.core.custom import custom_jvp
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    check_real,
    constant_like,
    default_float,
    filled_like,
    operand,
    plain,
    promote_args,
    promote_args_inexact,
    promote_dtypes_inexact,
    promote_dtypes_numeric,
    promote_shapes,
    refuse_out,
    select,
    strong_constant,
)
from spmd.numpy.ufuncs import REAL_ONLY, float_binary, unary, unless_integer
from spmd.sharding.array import Array, ArrayLike

# ---- rounding ----------------------------------------------------------------------------------

floor = unary(
    "floor",
    unless_integer(lax.floor),
    "The largest whole number not above each element.",
    "[1.7, -0.5]",
    "[ 1., -1.], dtype=float32",
    note=REAL_ONLY,
)
ceil = unary(
    "ceil",
    unless_integer(lax.ceil),
    "The smallest whole number not below each element.",
    "[1.7, -0.5]",
    "[ 2., -0.], dtype=float32",
    note=REAL_ONLY,
)


def trunc(x: ArrayLike) -> Array:
    """The whole part of each element, rounded towards zero.

    Elementwise: the result has the shape and the dtype of `x`. Raises a `DtypeError` for complex
    numbers.

    >>> snp.trunc(np.array([1.7, -1.7]))
    Array([ 1., -1.], dtype=float32)
    """
    x = operand("trunc", x)
    if not dtypes.is_inexact(typeof(x).dtype):
        return as_array(x)
    return select(lax.lt(x, constant_like(x, 0)), lax.ceil(x), lax.floor(x))


def rint(x: ArrayLike, /) -> Array:
    """The nearest whole number, and the even one of two.

    Elementwise: the result has the shape of `x`. Integers and bools become the default float; the
    parts of complex numbers are rounded each.

    >>> snp.rint(np.array([0.5, 1.5, 1.7]))
    Array([0., 2., 2.], dtype=float32)
    """
    x = operand("rint", x)
    if not dtypes.is_inexact(typeof(x).dtype):
        return as_array(lax.convert_element_type(x, default_float()))
    if dtypes.is_complex(typeof(x).dtype):
        return lax.complex(rint(lax.real(x)), rint(lax.imag(x)))
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def round(a: ArrayLike, decimals: int = 0, out: None = None) -> Array:
    """Round to a number of decimals, and halves to the even digit.

    Elementwise: the result has the shape and the dtype of `a`. `decimals` counts digits after the
    point, before it if it is negative; the parts of complex numbers are rounded each. Raises a
    `DtypeError` for integers and negative `decimals`, and a `RefusedError` if `out` is given.

    >>> snp.round(np.array([1.25, 2.5]), 1)
    Array([1.2, 2.5], dtype=float32)
    """
    a = operand("round", a, out)
    aval = typeof(a)
    decimals = operator.index(decimals)
    if dtypes.is_complex(aval.dtype):
        return lax.complex(round(lax.real(a), decimals), round(lax.imag(a), decimals))
    if not dtypes.is_inexact(aval.dtype):
        if decimals >= 0:
            return as_array(a)
        raise RefusedError(f"round: integers cannot be rounded to decimals={decimals}; use floats")
    if decimals == 0:
        return lax.round(a, lax.RoundingMethod.TO_NEAREST_EVEN)
    wide = a
    if aval.dtype.itemsize < 4:
        wide = lax.convert_element_type(a, np.dtype(np.float32))
    factor = constant_like(wide, 10.0**decimals)
    scaled = lax.round(lax.mul(wide, factor), lax.RoundingMethod.TO_NEAREST_EVEN)
    rounded = lax.div(scaled, factor)
    return rounded if wide is a else lax.convert_element_type(rounded, aval.dtype)


around = round


# ---- floats taken apart ------------------------------------------------------------------------

nextafter = float_binary(
    "nextafter",
    lax.nextafter,
    "The next float after `x` in the direction of `y`.",
    "np.array([1.0, 2.0]), 0.0",
    "Array([0.99999994, 1.9999999 ], dtype=float32)",
    note=REAL_ONLY,
)


def copysign(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The magnitude of `x` with the sign of `y`.

    `x` and `y` broadcast to one shape and are promoted to one floating dtype: integers and bools
    become the default float. Raises a `DtypeError` for complex numbers.

    >>> snp.copysign(np.array([1.0, 2.0]), -0.0)
    Array([-1., -2.], dtype=float32)
    """
    x, y = promote_args_inexact("copysign", x, y)
    check_real("copysign", x, y)
    magnitude = lax.abs(x)
    if not typeof(y).weak_type:
        # The sign alone would not make the result strong.
        magnitude = lax.convert_element_type(magnitude, typeof(x).dtype)
    return select(signbit(y), lax.neg(magnitude), magnitude)


def signbit(x: ArrayLike, /) -> Array:
    """Whether the sign bit of each element is set, as it is for -0.0 too.

    Elementwise: the result is bool and has the shape of `x`. Raises a `DtypeError` for complex
    numbers.

    >>> snp.signbit(np.array([-1.0, -0.0, 0.0]))
    Array([ True,  True, False], dtype=bool)
    """
    (x,) = promote_args("signbit", x)
    check_real("signbit", x)
    dtype = typeof(x).dtype
    if dtypes.is_bool(dtype) or dtypes.is_unsigned(dtype):
        return filled_like(x, False, np.dtype(np.bool_))
    if dtypes.is_integer(dtype):
        return lax.lt(x, constant_like(x, 0))
    bits = lax.bitcast_convert_type(x, np.dtype(f"i{dtype.itemsize}"))
    return lax.lt(bits, constant_like(bits, 0))


def heaviside(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The step function: 0 for negative `x`, 1 for positive `x`, and `y` at 0.

    `x` and `y` broadcast to one shape and are promoted to one floating dtype: integers and bools
    become the default float. Raises a `DtypeError` for complex numbers.

    >>> snp.heaviside(np.array([-1.0, 0.0, 1.0]), 0.5)
    Array([0. , 0.5, 1. ], dtype=float32)
    """
    check_arraylike("heaviside", x, y)
    x, y = promote_dtypes_inexact(plain(x), plain(y))
    check_real("heaviside", x, y)
    zero, one = strong_constant(x, 0), strong_constant(x, 1)
    not_below = select(lax.gt(x, zero), one, select(lax.ne(x, x), x, y))
    return select(lax.lt(x, zero), zero, not_below)


def frexp(x: ArrayLike, /) -> tuple[Array, Array]:
    """The mantissas and exponents of floats, `x == mantissa * 2**exponent`.

    Elementwise, both in the shape of `x`. The mantissa has a magnitude in [0.5, 1), or is 0, and
    the dtype of `x`, the default float for integers; the exponent is int32. Raises a `DtypeError`
    for complex numbers.

    >>> snp.frexp(np.array([8.0, 0.75]))
    (Array([0.5 , 0.75], dtype=float32), Array([4, 0], dtype=int32))
    """
    (x,) = promote_args_inexact("frexp", x)
    check_real("frexp", x)
    exponent = lax.stop_gradient(_binary_exponent(x))
    half = lax.div(exponent, constant_like(exponent, 2))
    mantissa = x
    # In two steps: 2**-exponent alone overflows for subnormal numbers.
    for part in (half, lax.sub(exponent, half)):
        power_of_two = lax.exp2(lax.convert_element_type(lax.neg(part), typeof(x).dtype))
        mantissa = lax.mul(mantissa, power_of_two)
    return mantissa, exponent


def _binary_exponent(x: Any) -> Any:
    """The exponent of `frexp` as int32, read from the bits; 0 for 0, infinity and NaN."""
    info = dtypes.finfo(typeof(x).dtype)
    int_type = np.dtype(f"i{info.bits // 8}")
    zero = constant_like(x, 0)
    tiny = lax.lt(lax.abs(x), constant_like(x, float(info.tiny)))
    scaled = select(tiny, lax.mul(x, constant_like(x, float(2**info.nmant))), x)
    bits = lax.bitcast_convert_type(scaled, int_type)
    shifted = lax.shift_right_logical(bits, np.array(info.nmant, int_type))
    field = lax.bitwise_and(shifted, np.array((1 << info.nexp) - 1, int_type))
    biased = lax.convert_element_type(field, np.dtype(np.int32))
    exponent = lax.sub(biased, np.int32(-info.minexp))
    exponent = select(tiny, lax.sub(exponent, np.int32(info.nmant)), exponent)
    special = lax.bitwise_or(lax.eq(x, zero), lax.bitwise_not(lax.is_finite(x)))
    return select(special, np.int32(0), exponent)


def ldexp(x: Any, exponent: Any, /) -> Array:
    """The product `x * 2**exponent`, exact also where `2**exponent` alone would overflow.

    `x` and `exponent` broadcast to one shape. The dtype is that of `x`, the default float for
    integers. Raises a `DtypeError` if `x` is complex or `exponent` is no integer.

    >>> snp.ldexp(np.array([0.5, 0.75]), np.array([4, 1]))
    Array([8. , 1.5], dtype=float32)
    """
    check_arraylike("ldexp", x, exponent)
    (x,) = promote_args_inexact("ldexp", x)
    check_real("ldexp", x)
    if dtypes.is_inexact(typeof(exponent).dtype):
        raise DtypeArgumentError(f"ldexp: the exponent must be integers, got {typeof(exponent)}")
    (exponent,) = promote_dtypes_numeric(plain(exponent))
    x, exponent = promote_shapes("ldexp", x, exponent)
    # Beyond three times the least normal exponent each number is 0 or infinite, and each of the
    # three factors below it is finite and not 0: 0 stays 0.
    most = -3 * dtypes.finfo(typeof(x).dtype).minexp
    limits = np.iinfo(typeof(exponent).dtype)
    low, high = max(limits.min, -most), min(limits.max, most)
    exponent = lax.clamp(constant_like(exponent, low), exponent, constant_like(exponent, high))
    third = lax.div(exponent, constant_like(exponent, 3))
    rest = lax.sub(exponent, lax.add(third, third))
    for part in (third, third, rest):
        x = lax.mul(x, lax.exp2(lax.convert_element_type(part, typeof(x).dtype)))
    return x


def modf(x: ArrayLike, /, out: None = None) -> tuple[Array, Array]:
    """The fractional and the whole part of each element, both with its sign.

    Elementwise, both in the shape of `x`; integers and bools become the default float. Raises a
    `DtypeError` for complex numbers, and a `RefusedError` if `out` is given.

    >>> snp.modf(np.array([1.5, -1.25]))
    (Array([ 0.5 , -0.25], dtype=float32), Array([ 1., -1.], dtype=float32))
    """
    refuse_out("modf", out)
    (x,) = promote_args_inexact("modf", x)
    check_real("modf", x)
    whole = trunc(x)
    return lax.sub(x, whole), whole


def spacing(x: ArrayLike, /) -> Array:
    """The distance to the next float away from zero, with the sign of `x`.

    Elementwise: the result has the shape of `x`; integers and bools become the default float.
    Raises a `DtypeError` for complex numbers.

    >>> snp.spacing(np.array([1.0, -1.0]))
    Array([ 1.1920929e-07, -1.1920929e-07], dtype=float32)
    """
    (x,) = promote_args_inexact("spacing", x)
    check_real("spacing", x)
    dtype = typeof(x).dtype
    # A distance is a property of the dtype, so it isn't weak, whatever `x` is.
    x = lax.convert_element_type(x, dtype)
    infinity = constant_like(x, np.inf)
    if dtype == np.float16:
        # As in NumPy: of float16 always the distance upwards.
        return lax.sub(lax.nextafter(x, filled_like(x, np.inf)), x)
    step = lax.sub(lax.nextafter(x, copysign(infinity, x)), x)
    smallest = constant_like(x, float(dtypes.finfo(dtype).smallest_subnormal))
    return select(lax.eq(step, constant_like(x, 0)), copysign(smallest, x), step)


# ---- logarithms of sums of exponentials --------------------------------------------------------


def logaddexp(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The logarithm of a sum of exponentials, `log(exp(x) + exp(y))`, without overflow.

    `x` and `y` broadcast to one shape and are promoted to one floating dtype: integers and bools
    become the default float. The imaginary part of a complex one is in [-pi, pi].

    >>> snp.logaddexp(np.array([0.0, 1000.0]), np.array([0.0, 1000.0]))
    Array([6.9314718e-01, 1.0006932e+03], dtype=float32)
    """
    return _promoted_log_sum("logaddexp", x, y, 1.0)


def logaddexp2(x: ArrayLike, y: ArrayLike, /) -> Array:
    """The logarithm to base 2 of a sum of powers of 2, `log2(2**x + 2**y)`, without overflow.

    `x` and `y` broadcast to one shape and are promoted to one floating dtype: integers and bools
    become the default float. The imaginary part of a complex one is in [-pi, pi] / log(2).

    >>> snp.logaddexp2(np.array([3.0]), np.array([3.0]))
    Array([4.], dtype=float32)
    """
    return _promoted_log_sum("logaddexp2", x, y, np.log(2.0).item())


def _promoted_log_sum(name: str, x: Any, y: Any, log_base: float) -> Any:
    given = x, y
    out = _log_sum(*promote_args_inexact(name, x, y), log_base)
    # As in JAX, a complex result of broadcasting is strongly typed.
    is_complex = dtypes.is_complex(typeof(out).dtype)
    if is_complex and any(typeof(v).ndim != typeof(out).ndim for v in given):
        return lax.convert_element_type(out, typeof(out).dtype)
    return out


@functools.partial(custom_jvp, nondiff_argnums=(2,))
@one_program("log_base")
def _log_sum(x: Any, y: Any, log_base: float) -> Any:
    """`log_b(b**x + b**y)` for the base b of the given natural logarithm."""
    larger = lax.max(x, y)
    if dtypes.is_complex(typeof(x).dtype):
        below = lax.sub(lax.add(x, y), lax.mul(larger, constant_like(x, 2)))  # min - max
        tail = lax.log1p(lax.exp(_times(below, log_base)))
        out = lax.add(larger, _times(tail, 1 / log_base))
        return lax.complex(lax.real(out), _wrapped(lax.imag(out), math.pi / log_base))
    gap = lax.sub(x, y)
    tail = lax.log1p(lax.exp(_times(lax.neg(lax.abs(gap)), log_base)))
    # Equal infinities: their difference is NaN, their sum is the result.
    smooth = lax.add(larger, _times(tail, 1 / log_base))
    return select(lax.ne(gap, gap), lax.add(x, y), smooth)


@_log_sum.defjvp
def _log_sum_jvp(log_base: float, primals: Any, tangents: Any) -> Any:
    """Each operand's tangent weighted by its share of the sum: also where the two are equal."""
    (x, y), (tx, ty) = primals, tangents
    out = _log_sum(x, y, log_base)
    shares = [lax.exp(_times(lax.sub(_finite(v), _finite(out)), log_base)) for v in (x, y)]
    return out, lax.add(lax.mul(tx, shares[0]), lax.mul(ty, shares[1]))


def _wrapped(x: Any, bound: float) -> Any:
    """An angle in [-bound, bound], that is equal to `x` but for whole turns."""
    turn, zero = constant_like(x, 2 * bound), constant_like(x, 0)
    rest = lax.rem(lax.add(x, constant_like(x, bound)), turn)
    rest = select(lax.lt(rest, zero), lax.add(rest, turn), rest)
    return lax.sub(rest, constant_like(x, bound))


def _times(x: Any, factor: float) -> Any:
    if factor == 1.0:
        return x
    # As in JAX, results of reals are strongly typed here.
    is_complex = dtypes.is_complex(typeof(x).dtype)
    return lax.mul(x, constant_like(x, factor) if is_complex else strong_constant(x, factor))


def _finite(x: Any) -> Any:
    """Plus infinity as 0: the share of an infinite operand is that of a finite equal one."""
    return select(lax.eq(x, strong_constant(x, np.inf)), lax.full_like(x, 0), x)
