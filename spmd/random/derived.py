"""Distributions made of one or two simpler draws: `lognormal`, `geometric`, `wald`, `f`, `ball`.

Each splits its key in JAX's order and computes JAX's formula, so that samples agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import DtypeArgumentError
from spmd.core.aval import typeof
from spmd.core.explicit import lays_out_result
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    broadcast_to,
    check_arraylike,
    default_int,
    operand,
    plain,
    promote_dtypes_inexact,
    select,
    user_dtype,
)
from spmd.numpy.reductions import sum as _sum
from spmd.numpy.ufuncs import absolute, add, divide, multiply, power, reciprocal
from spmd.random.continuous import (
    any_normal,
    exponential_typed,
    maxwell,
    normal_typed,
    uniform_typed,
)
from spmd.random.discrete import rademacher
from spmd.random.gamma import chisquare, gamma_typed
from spmd.random.keys import (
    canonical_shape,
    count_of,
    float_dtype,
    pair,
    parameters_shape,
    sample_shape,
    single,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array


def _parameter(name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A parameter with the dtype and the shape of the sample."""
    return broadcast_to(lax.convert_element_type(operand(name, x), dtype), shape)


# ---- one draw, then a formula ------------------------------------------------------------------


@lays_out_result
def lognormal(
    key: Any, sigma: Any = 1.0, shape: Any = None, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw numbers whose logarithms are normal with mean 0 and standard deviation `sigma`.

    `sigma` broadcasts to `shape`, which is by default its own; `dtype` is a float or complex
    dtype, by default float32. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is
    the layout of the result. Raises `DtypeError` for another, `ShapeError` if `sigma` does not
    broadcast, and `ArgumentError` if `key` is no single key.

    >>> bool((spmd.random.lognormal(spmd.random.key(0), 0.5, (100,)) > 0).all())
    True
    """
    found = dtypes.canonical(np.float64) if dtype is None else user_dtype(dtype, "lognormal")
    if not dtypes.is_inexact(found):
        raise DtypeArgumentError(f"lognormal: dtype must be a float or complex, got {found}")
    whole = parameters_shape("lognormal", shape, found, sigma)
    scale = _parameter("lognormal", sigma, whole, found)
    return _lognormal(single(key, "lognormal"), scale, whole, found)


@one_program("shape", "dtype")
def _lognormal(key: Any, sigma: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return lax.exp(lax.mul(any_normal(key, shape, dtype), sigma))


@lays_out_result
def geometric(
    key: Any, p: Any, shape: Any = None, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw how many trials, each a success with probability `p`, it takes to the first success.

    `p` broadcasts to `shape`, which is by default its own; `dtype` is an integer dtype, by
    default int32. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout
    of the result. Raises `DtypeError` for another, `ShapeError` if `p` does not broadcast, and
    `ArgumentError` if it is no array or `key` is no single key.

    >>> spmd.random.geometric(spmd.random.key(0), 1.0, (4,))
    Array([1, 1, 1, 1], dtype=int32)
    """
    check_arraylike("geometric", p)
    found = default_int() if dtype is None else user_dtype(dtype, "geometric")
    if not dtypes.is_integer(found):
        raise DtypeArgumentError(f"geometric: dtype must be an integer, got {found}")
    whole = sample_shape("geometric", shape, p)
    (p,) = promote_dtypes_inexact(plain(p))
    p = broadcast_to(lax.convert_element_type(p, typeof(p).dtype), whole)
    return _geometric(single(key, "geometric"), p, found)


@one_program("dtype")
def _geometric(key: Any, p: Any, dtype: np.dtype) -> Any:
    own = typeof(p).dtype
    zero, one = np.array(0, own), np.array(1, own)
    u = uniform_typed(key, typeof(p).shape, own)
    # JAX takes 0, whose logarithm is infinite, for 1.
    u = select(lax.eq(u, zero), one, u)
    trials = lax.add(lax.floor(lax.div(lax.log(u), lax.log1p(lax.neg(p)))), one)
    return lax.convert_element_type(trials, dtype)


@lays_out_result
def triangular(
    key: Any,
    left: Any,
    mode: Any,
    right: Any,
    shape: Any = None,
    dtype: Any = None,
    *,
    out_sharding: Any = None,
) -> Array:
    """Draw numbers in [`left`, `right`] whose density is a triangle with its peak at `mode`.

    The parameters broadcast to `shape`, which is by default theirs; `dtype` is a float dtype,
    by default float32. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the
    layout of the result. Raises `DtypeError` for another, `ShapeError` if a parameter does not
    broadcast, and `ArgumentError` if one is no array or `key` is no single key.

    >>> x = spmd.random.triangular(spmd.random.key(0), 1.0, 2.0, 4.0, (100,))
    >>> bool(((1 <= x) & (x <= 4)).all())
    True
    """
    found = float_dtype(dtype, "triangular")
    whole = parameters_shape("triangular", shape, found, left, mode, right)
    ends = [_parameter("triangular", v, whole, found) for v in (left, mode, right)]
    return _triangular(single(key, "triangular"), *ends)


@one_program()
def _triangular(key: Any, left: Any, mode: Any, right: Any) -> Any:
    """The distribution function's inverse: one root below the mode, another above."""
    dtype = typeof(left).dtype
    width, rise, fall = lax.sub(right, left), lax.sub(mode, left), lax.sub(right, mode)
    u = uniform_typed(key, typeof(left).shape, dtype)
    below = lax.add(left, lax.sqrt(lax.mul(lax.mul(u, width), rise)))
    rest = lax.sub(np.array(1, dtype), u)
    above = lax.sub(right, lax.sqrt(lax.mul(lax.mul(rest, width), fall)))
    return lax.select(lax.lt(u, lax.div(rise, width)), below, above)


# ---- two draws ---------------------------------------------------------------------------------


@lays_out_result
def wald(
    key: Any, mean: Any, shape: Any = None, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw Wald (inverse Gaussian) distributed numbers with the given `mean` and scale 1.

    `mean` broadcasts to `shape`, which is by default its own; `dtype` is a float dtype, by
    default float32. The method is that of Michael, Schucany and Haas (1976). `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `DtypeError`
    for another dtype, `ShapeError` if `mean` does not broadcast, and `ArgumentError` if it is
    no array or `key` is no single key.

    >>> bool((spmd.random.wald(spmd.random.key(0), 2.0, (100,)) > 0).all())
    True
    """
    found = float_dtype(dtype, "wald")
    whole = parameters_shape("wald", shape, found, mean)
    return _wald(single(key, "wald"), _parameter("wald", mean, whole, found))


@one_program()
def _wald(key: Any, mean: Any) -> Any:
    """Michael, Schucany and Haas (1976): the smaller root or its mirror image."""
    shape, dtype = typeof(mean).shape, typeof(mean).dtype
    first, second = pair(key)
    half, four = np.array(0.5, dtype), np.array(4, dtype)
    y = lax.square(normal_typed(first, shape, dtype))
    z = uniform_typed(second, shape, dtype)
    squared = lax.square(mean)
    under = lax.add(lax.mul(lax.mul(four, mean), y), lax.mul(squared, lax.square(y)))
    x = lax.add(mean, lax.mul(lax.mul(squared, y), half))
    x = lax.sub(x, lax.mul(lax.mul(mean, half), lax.sqrt(under)))
    return lax.select(lax.le(z, lax.div(mean, lax.add(mean, x))), x, lax.div(squared, x))


@lays_out_result
def f(
    key: Any,
    dfnum: Any,
    dfden: Any,
    shape: Any = None,
    dtype: Any = None,
    *,
    out_sharding: Any = None,
) -> Array:
    """Draw numbers of the F distribution with `dfnum` and `dfden` degrees of freedom.

    The parameters broadcast to `shape`, which is by default theirs; `dtype` is a float dtype,
    by default float32. A derivative with respect to a parameter raises `RefusedError`.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises `DtypeError` for another dtype, `ShapeError` if a parameter does not broadcast, and
    `ArgumentError` if one is no array or `key` is no single key.

    >>> bool((spmd.random.f(spmd.random.key(0), 2.0, 3.0, (100,)) > 0).all())
    True
    """
    found = float_dtype(dtype, "f")
    whole = parameters_shape("f", shape, found, dfnum, dfden)
    below, above = pair(single(key, "f"))
    numerator, denominator = (_parameter("f", v, whole, found) for v in (dfnum, dfden))
    top = lax.div(chisquare(above, numerator, whole, found), numerator)
    return lax.div(top, lax.div(chisquare(below, denominator, whole, found), denominator))


def double_sided_maxwell(
    key: Any, loc: Any, scale: Any, shape: Any = (), dtype: Any = None
) -> Array:
    """Draw Maxwell distributed numbers with random signs, times `scale`, plus `loc`.

    As in JAX the result has shape `shape + parameters' shape`; an empty `shape` counts as theirs.
    `dtype` is a float dtype, by default float32. Raises `DtypeError` for another, `ShapeError` if a
    size is negative, and `ArgumentError` if `key` is no single key.

    >>> spmd.random.double_sided_maxwell(spmd.random.key(0), 0.0, 1.0, (2, 3)).shape
    (2, 3)
    """
    found = float_dtype(dtype, "double_sided_maxwell")
    own = sample_shape("double_sided_maxwell", None, loc, scale)
    whole = (canonical_shape(shape, "double_sided_maxwell") or own) + own
    args = plain(loc), plain(scale)
    return _double_sided_maxwell(single(key, "double_sided_maxwell"), *args, whole, found)


@one_program("shape", "dtype")
def _double_sided_maxwell(
    key: Any, loc: Any, scale: Any, shape: tuple[int, ...], dtype: np.dtype
) -> Any:
    first, second = pair(key)
    length = maxwell(first, shape, dtype)
    sign = rademacher(second, shape, dtype)
    return add(multiply(multiply(sign, length), scale), loc)


@lays_out_result
def generalized_normal(
    key: Any, p: Any, shape: Any = (), dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw numbers with density proportional to `exp(-abs(x) ** p)`.

    `shape` is the result's, and `p` broadcasts to it; `dtype` is a float dtype, by default
    float32. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the
    result. Raises `DtypeError` for another, `ShapeError` if a size is negative, and
    `ArgumentError` if `key` is no single key.

    >>> spmd.random.generalized_normal(spmd.random.key(0), 3.0, (2, 3)).shape
    (2, 3)
    """
    found = float_dtype(dtype, "generalized_normal")
    whole = canonical_shape(shape, "generalized_normal")
    first, second = pair(single(key, "generalized_normal"))
    exponent = reciprocal(p)
    size = gamma_typed(first, exponent, whole, found)
    return multiply(rademacher(second, whole, found), power(size, exponent))


@lays_out_result
def ball(
    key: Any, d: int, p: Any = 2, shape: Any = (), dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw points uniform in the unit ball of the `p`-norm in `d` dimensions.

    The result has shape `shape + (d,)`; `dtype` is a float dtype, by default float32. The
    method is that of Barthe et al. (2005). `out_sharding`, a sharding or spec over `Explicit`
    mesh axes, is the layout of the result. Raises `DtypeError` for another dtype, `ShapeError`
    if a size is negative, and `ArgumentError` if `d` is no integer or `key` is no single key.

    >>> x = spmd.random.ball(spmd.random.key(0), 3, shape=(100,))
    >>> bool(((x**2).sum(-1) <= 1).all())
    True
    """
    found, whole = float_dtype(dtype, "ball"), canonical_shape(shape, "ball")
    first, second = pair(single(key, "ball"))
    points = generalized_normal(first, p, (*whole, count_of("ball", d)), found)
    waited = exponential_typed(second, whole, found)
    total = add(_sum(power(absolute(points), p), axis=-1), waited)
    return divide(points, lax.expand_dims(power(total, reciprocal(p)), (len(whole),)))
