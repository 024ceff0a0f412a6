"""Functions along an axis: `softmax`, `log_softmax`, `logsumexp`, `one_hot`, `standardize`.

All subtract the maximum before they exponentiate, so nothing overflows.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError
from spmd.core.aval import is_arraylike, typeof
from spmd.core.custom import custom_jvp
from spmd.numpy.creation import asarray
from spmd.numpy.logic import isfinite, not_equal
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    check_arraylike_or_none,
    constant_like,
    convert,
    default_float,
    plain,
    promote_args_inexact,
    select,
    user_dtype,
    whole_number,
)
from spmd.numpy.reductions import Axis, canonical_axes, canonical_axis, keep_dims
from spmd.numpy.reductions import max as _max
from spmd.numpy.reductions import sum as _sum
from spmd.numpy.searching import where as _where
from spmd.numpy.selection import clip
from spmd.numpy.statistics import mean as _mean
from spmd.numpy.ufuncs import absolute, divide, exp, log, multiply, real, square, subtract

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- softmax -----------------------------------------------------------------------------------


def softmax(x: Any, axis: Axis = -1, where: Any = None) -> Array:
    """Compute `exp(x) / sum(exp(x))` along `axis`: positive numbers that sum to 1.

    `axis` is a dim, a tuple of dims, or None for all; the shape stays. Elements masked out by
    `where`, which broadcasts to `x`, count as minus infinity and become 0. The largest element is
    subtracted first, so nothing overflows. Integers become float32 and floats keep their dtype.
    Raises `ArgumentError` if `x` is no array, `DimensionError` if a dim is out of range, and
    `DtypeError` for complex numbers.

    >>> spmd.nn.softmax(np.array([0.0, 0.0]))
    Array([0.5, 0.5], dtype=float32)
    >>> spmd.nn.softmax(np.array([1000.0, 1000.0, 2.0]), where=np.array([True, True, False]))
    Array([0.5, 0.5, 0. ], dtype=float32)
    """
    check_arraylike_or_none("softmax", where)
    (x,) = promote_args_inexact("softmax", x)
    return _softmax(x, canonical_axes(axis, x.ndim, "softmax"), where)


@partial(custom_jvp, nondiff_argnums=(1,))
@one_program("axis")
def _softmax(x: Any, axis: Axis, where: Any) -> Any:
    largest = _max(x, axis, where=where, initial=-np.inf, keepdims=True)
    safe = x if where is None else _where(where, x, -np.inf)
    unnormalized = exp(subtract(safe, largest))
    result = divide(unnormalized, _sum(unnormalized, axis, where=where, keepdims=True))
    return result if where is None else _where(where, result, 0)


@_softmax.defjvp
def _softmax_jvp(axis: Axis, primals: Any, tangents: Any) -> Any:
    x, where = primals
    t = tangents[0]
    y = _softmax(x, axis, where)
    weighted = multiply(y, t)
    return y, subtract(weighted, multiply(y, _sum(weighted, axis, where=where, keepdims=True)))


def log_softmax(x: Any, axis: Axis = -1, where: Any = None) -> Array:
    """Compute `log(softmax(x))` along `axis`, without underflow.

    `axis` is a dim, a tuple of dims, or None for all; the shape stays. Elements masked out by
    `where`, which broadcasts to `x`, become minus infinity. Integers become float32 and floats keep
    their dtype. Raises `ArgumentError` if `x` is no array, `DimensionError` if a dim is out of
    range, and `DtypeError` for complex numbers.

    >>> spmd.nn.log_softmax(np.array([0.0, 0.0, -1000.0]))
    Array([-6.9314718e-01, -6.9314718e-01, -1.0006932e+03], dtype=float32)
    """
    check_arraylike_or_none("log_softmax", where)
    (x,) = promote_args_inexact("log_softmax", x)
    return _log_softmax(x, canonical_axes(axis, x.ndim, "log_softmax"), where)


@one_program("axis")
def _log_softmax(x: Any, axis: Axis, where: Any) -> Any:
    largest = lax.stop_gradient(_max(x, axis, where=where, initial=-np.inf, keepdims=True))
    safe = x if where is None else _where(where, x, -np.inf)
    shifted = subtract(safe, largest)
    total = _sum(exp(shifted), axis, where=where, keepdims=True)
    result = subtract(shifted, log(total))
    return result if where is None else _where(where, result, -np.inf)


# ---- logsumexp ---------------------------------------------------------------------------------


@overload
def logsumexp(
    a: Any,
    axis: Axis = None,
    b: Any = None,
    keepdims: bool = False,
    return_sign: Literal[False] = False,
    where: Any = None,
) -> Array: ...


@overload
def logsumexp(
    a: Any,
    axis: Axis = None,
    b: Any = None,
    keepdims: bool = False,
    *,
    return_sign: Literal[True],
    where: Any = None,
) -> tuple[Array, Array]: ...


@overload
def logsumexp(
    a: Any, axis: Axis, b: Any, keepdims: bool, return_sign: bool, where: Any = None
) -> Any: ...


def logsumexp(
    a: Any,
    axis: Axis = None,
    b: Any = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: Any = None,
) -> Any:
    """Compute `log(sum(b * exp(a)))` along `axis`, without overflow.

    `axis` is a dim, a tuple of dims, or None for all; they disappear from the shape, or stay with
    size 1 if `keepdims`. The weights `b` (default: ones) broadcast to `a`; elements where the mask
    `where` is False do not count. With `return_sign` the result is a pair: the logarithm of the
    sum's magnitude, and its sign; without it, a negative sum gives NaN. Integers become float32;
    floats and complex numbers keep their dtype.

    Raises `ArgumentError` if an argument is no array, and `DimensionError` if a dim is out of
    range.

    >>> spmd.nn.logsumexp(np.array([1000.0, 1000.0]))
    Array(1000.6932, dtype=float32)
    >>> spmd.nn.logsumexp(np.zeros(2), b=np.array([1.0, -3.0]), return_sign=True)
    (Array(0.6931472, dtype=float32), Array(-1., dtype=float32))
    """
    dims = axis if axis is None or isinstance(axis, int) else tuple(axis)
    return _logsumexp(a, dims, b, bool(keepdims), bool(return_sign), where)


@one_program("axis", "keepdims", "return_sign")
def _logsumexp(a: Any, axis: Axis, b: Any, keepdims: bool, return_sign: bool, where: Any) -> Any:
    if where is not None:
        a = _where(where, a, 0)
    if b is None:
        (a,) = promote_args_inexact("logsumexp", a)
    else:
        a, b = promote_args_inexact("logsumexp", a, b)
        a = _where(not_equal(b, 0), a, -np.inf)
    shape = typeof(a).shape
    dims = canonical_axes(axis, len(shape), "logsumexp")
    largest = _max(real(a), dims, where=where, initial=-np.inf)
    largest = lax.stop_gradient(select(isfinite(largest), largest, constant_like(largest, 0)))
    dtype = typeof(a).dtype
    shift = lax.convert_element_type(keep_dims(largest, shape, dims), dtype)
    scaled = exp(subtract(a, shift))
    scaled = scaled if b is None else multiply(scaled, b)
    total = _sum(scaled, dims, where=where)
    sign = lax.sign(total)
    if return_sign or not dtypes.is_complex(dtype):
        total = absolute(total)
    out = lax.add(log(total), lax.convert_element_type(largest, typeof(total).dtype))
    if b is not None and not return_sign and not dtypes.is_complex(dtype):
        out = _where(sign < 0, np.nan, out)
    if keepdims:
        out, sign = keep_dims(out, shape, dims), keep_dims(sign, shape, dims)
    return (out, sign) if return_sign else out


def logmeanexp(x: Any, axis: Axis = None, where: Any = None, keepdims: bool = False) -> Array:
    """Compute `log(mean(exp(x)))` along `axis`, without overflow.

    `axis` is a dim, a tuple of dims, or None for all; they disappear from the shape, or stay with
    size 1 if `keepdims`. Elements where the mask `where` is False do not count. Integers become
    float32 and floats keep their dtype. Raises `ArgumentError` if `x` is no array, and
    `DimensionError` if a dim is out of range.

    >>> spmd.nn.logmeanexp(np.array([1000.0, 1000.0]))
    Array(1000., dtype=float32)
    """
    total = logsumexp(x, axis, where=where, keepdims=keepdims)
    ones = lax.full(typeof(plain(x)).shape, 1, typeof(total).dtype)
    return subtract(total, log(_sum(ones, axis, where=where, keepdims=keepdims)))


# ---- one_hot and standardize -------------------------------------------------------------------


def one_hot(x: Any, num_classes: int, *, dtype: Any = None, axis: int = -1) -> Array:
    """Make vectors with a 1 at index `x`, all zeros where `x` is out of range.

    The result has the shape of `x` with a new dim of size `num_classes` at position `axis`; `dtype`
    is by default the default float dtype. Raises `ArgumentError` if `x` has no integer dtype, and
    `DimensionError` if `axis` is out of range.

    >>> spmd.nn.one_hot(np.array([0, 2]), 3)
    Array([[1., 0., 0.],
           [0., 0., 1.]], dtype=float32)
    """
    x = asarray(x)
    if dtypes.is_complex(typeof(x).dtype):
        raise ArgumentError(f"one_hot: x must be real numbers, got {typeof(x)}")
    if dtypes.is_bool(typeof(x).dtype):
        x = lax.convert_element_type(x, np.int32)
    count = whole_number("one_hot", "num_classes", num_classes)
    found = default_float() if dtype is None else user_dtype(dtype, "one_hot")
    shape = typeof(x).shape
    d = canonical_axis(axis, len(shape) + 1, "one_hot")
    whole = (*shape[:d], count, *shape[d:])
    classes = lax.broadcasted_iota(typeof(x).dtype, whole, d)
    spread = lax.broadcast_in_dim(x, whole, [k for k in range(len(whole)) if k != d])
    return lax.convert_element_type(lax.eq(spread, classes), found)


def standardize(
    x: Any,
    axis: Axis = -1,
    mean: Any = None,
    variance: Any = None,
    epsilon: Any = 1e-5,
    where: Any = None,
    *,
    algorithm: str = "fast",
) -> Array:
    """Shift and scale `x` to mean 0 and variance 1 along `axis`.

    `axis` is a dim, a tuple of dims, or None for all; the shape stays. `mean` and `variance` are
    computed if they are not given, from the elements that the mask `where` selects; `epsilon` is
    added to the variance. `algorithm="fast"` takes the mean of squares less the square of the mean,
    "stable" the mean of squared differences. Integers become float32 and floats keep their dtype.
    Raises `ArgumentError` for another algorithm or if an argument is no array, and `DimensionError`
    if a dim is out of range.

    >>> spmd.nn.standardize(np.array([1.0, 2.0, 3.0]))
    Array([-1.2247359,  0.       ,  1.2247359], dtype=float32)
    """
    check_arraylike("standardize", x)
    check_arraylike_or_none("standardize", mean, variance, where)
    if algorithm not in ("fast", "stable"):
        raise ArgumentError(f"standardize: algorithm must be 'fast' or 'stable', not {algorithm!r}")
    dims = canonical_axes(axis, typeof(x).ndim, "standardize")
    return _standardize(x, dims, mean, variance, epsilon, where, algorithm)


@one_program("axis", "algorithm")
def _standardize(
    x: Any, axis: Axis, mean: Any, variance: Any, epsilon: Any, where: Any, algorithm: str
) -> Any:
    x = as_array(plain(x))
    if mean is None:
        mean = _mean(x, axis, keepdims=True, where=where)
    if variance is None and algorithm == "stable":
        variance = _mean(square(subtract(x, mean)), axis, keepdims=True, where=where)
    elif variance is None:
        of_squares = _mean(square(x), axis, keepdims=True, where=where)
        variance = clip(subtract(of_squares, square(mean)), 0)
    return multiply(subtract(x, mean), lax.rsqrt(_plus(variance, epsilon)))


def _plus(x: Any, epsilon: Any) -> Any:
    dtype = dtypes.to_inexact(typeof(x).dtype)
    x = lax.convert_element_type(x, dtype)
    if is_arraylike(epsilon) and typeof(epsilon).ndim:
        return lax.add(x, lax.convert_element_type(epsilon, dtype))
    return lax.add(x, convert(epsilon, dtype))


def scaled_matmul(
    lhs: Any, rhs: Any, lhs_scales: Any, rhs_scales: Any, preferred_element_type: Any = np.float32
) -> Array:
    """Multiply `lhs` (b, m, k) and `rhs` (b, n, k), blocks of k times their scales.

    `lhs_scales` (b, m, j) and `rhs_scales` (b, n, i) have one factor for k/j and k/i neighbours.
    The result has shape (b, m, n) and dtype `preferred_element_type`. Raises `ArgumentError` if an
    argument is no array, and `ShapeError` if the sizes do not fit.

    >>> x, one = np.ones((1, 1, 4), np.float32), np.ones((1, 1, 1), np.float32)
    >>> spmd.nn.scaled_matmul(x, x, one, np.array([[[1.0, 10.0]]], np.float32))
    Array([[[22.]]], dtype=float32)
    """
    check_arraylike("scaled_matmul", lhs, rhs, lhs_scales, rhs_scales)
    return lax.scaled_dot(
        lhs,
        rhs,
        lhs_scale=lhs_scales,
        rhs_scale=rhs_scales,
        dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        preferred_element_type=preferred_element_type,
    )
