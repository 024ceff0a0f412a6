"""Means and spreads: `mean`, `average`, `var`, `std`, `cov`, `corrcoef`, and those without NaN."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeArgumentError, ShapeError
from spmd.compile.dispatch.eager_cache import cached_options
from spmd.core.aval import typeof
from spmd.numpy.joining import concatenate
from spmd.numpy.logic import isnan
from spmd.numpy.manipulation import atleast_2d, reshape, transpose
from spmd.numpy.products import dot
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    constant_like,
    operand,
    optional_dtype,
    plain,
    promote_args_inexact,
    promote_dtypes_inexact,
    promote_shapes,
    select,
)
from spmd.numpy.reductions import (
    Axis,
    canonical_axes,
    check_where,
    nansum,
    sum,
    wide_float,
)
from spmd.numpy.selection import clip
from spmd.numpy.ufuncs import conjugate, divide, multiply, subtract
from spmd.sharding.array import Array, ArrayLike

# ---- means -------------------------------------------------------------------------------------


def _count(a: Any, axis: Axis, keepdims: bool, where: Any, dtype: np.dtype) -> Any:
    """The number of elements a mean is over: a constant unless there is a mask."""
    aval = typeof(a)
    dims = canonical_axes(axis, aval.ndim, "mean")
    if where is None:
        return np.array(math.prod(aval.shape[d] for d in dims), dtype)
    mask, _ = promote_shapes("mean", where, a)
    if typeof(mask).shape != aval.shape:
        mask = lax.broadcast_in_dim(mask, aval.shape, ())
    return sum(mask, axis, dtype, keepdims=keepdims)


@cached_options
def mean(
    a: ArrayLike,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    keepdims: bool = False,
    *,
    where: ArrayLike | None = None,
) -> Array:
    """The arithmetic mean of elements along dims; NaN if there are none.

    `axis` is one dim, several, or None for all; `keepdims` keeps them with size 1. `where` is a
    bool mask that broadcasts against `a` and says which elements count. The dtype is `dtype`, or
    that of `a`; integers and bools become the default float (float32, or float64 with x64).

    >>> snp.mean(np.array([[1, 2], [3, 5]]), axis=0)
    Array([2. , 3.5], dtype=float32)
    """
    a = operand("mean", a, out)
    canonical_axes(axis, typeof(a).ndim, "mean")
    mask = check_where("mean", where)
    wanted = optional_dtype(dtype, "mean")
    result = wanted or dtypes.to_inexact(typeof(a).dtype)
    compute = wide_float(result) if wanted is None else result
    total = sum(a, axis, compute, keepdims=keepdims, where=mask)
    count = _count(a, axis, keepdims, mask, compute)
    return lax.convert_element_type(lax.div(total, count), result)


def average(
    a: Any, axis: Axis = None, weights: Any = None, returned: bool = False, keepdims: bool = False
) -> Any:
    """The weighted mean of elements along dims.

    `weights` have the shape of `a`, or of the dims that `axis` names; without them all elements
    count equally. `a` and `weights` are promoted to one floating or complex dtype. With `returned`
    the result is a pair: the means, and the sums of the weights in their shape.

    >>> snp.average(np.array([1.0, 2.0]), weights=np.array([3, 1]))
    Array(1.25, dtype=float32)
    """
    if weights is None:
        (a,) = promote_args_inexact("average", a)
        result = mean(a, axis, keepdims=keepdims)
        weight = _count(a, axis, keepdims, None, typeof(result).dtype)
    else:
        check_arraylike("average", a, weights)
        a, weights = promote_dtypes_inexact(plain(a), plain(weights))
        weights = _spread_weights(a, weights, axis)
        weight = sum(weights, axis, keepdims=keepdims)
        total = sum(multiply(a, weights), axis, keepdims=keepdims)
        result = divide(total, weight)
    if not returned:
        return result
    shape = typeof(result).shape
    weight = weight if typeof(weight).shape == shape else lax.broadcast(weight, shape)
    return result, as_array(weight)


def _spread_weights(a: Any, weights: Any, axis: Axis) -> Any:
    shape, given = typeof(a).shape, typeof(weights).shape
    if given == shape:
        return weights
    dims = canonical_axes(axis, len(shape), "average")
    if axis is None or given != tuple(shape[d] for d in dims):
        raise ShapeError(
            f"average: weights of shape {given} fit neither the array's shape {shape} nor its "
            f"size along axis={axis}"
        )
    order = [int(k) for k in np.argsort(dims)]
    kept = sorted(dims)
    return lax.broadcast_in_dim(lax.transpose(weights, order), shape, kept)


# ---- spreads -----------------------------------------------------------------------------------


def _correction(name: str, ddof: Any, correction: Any) -> Any:
    if correction is None:
        return ddof
    if ddof != 0:
        raise ArgumentError(f"{name}: give ddof or correction, not both")
    return correction


def _var_dtypes(name: str, source: np.dtype, dtype: Any) -> tuple[np.dtype, np.dtype]:
    """The dtypes of the computation and of the result."""
    wanted = optional_dtype(dtype, name)
    if wanted is not None:
        if dtypes.is_complex(source) and not dtypes.is_complex(wanted):
            raise DtypeArgumentError(f"{name}: dtype={wanted} is real, but the array is {source}")
        return wide_float(wanted), wanted
    inexact = dtypes.to_inexact(source)
    return wide_float(inexact), dtypes.real_of(inexact)


def var(
    a: ArrayLike,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    where: ArrayLike | None = None,
    mean: Any = None,
    correction: float | None = None,
) -> Array:
    """The variance of elements along dims: the mean squared distance from the mean.

    `axis` is one dim, several, or None for all; `keepdims` keeps them with size 1. The sum of
    squares is divided by the count minus `ddof` (or `correction`, its name in the array API
    standard). `mean` is the mean, if it is known already, with the reduced dims; `where` is a bool
    mask of what counts. The result is real, of the floating dtype to which `a` is promoted, or
    `dtype`. Raises a `DtypeArgumentError` for a real `dtype` of complex numbers.

    >>> snp.var(np.array([1.0, 2.0, 3.0, 4.0]))
    Array(1.25, dtype=float32)
    """
    a, mask = operand("var", a, out), check_where("var", where)
    types = _var_dtypes("var", typeof(a).dtype, dtype)
    dims = canonical_axes(axis, typeof(a).ndim, "var")
    less = _correction("var", ddof, correction)
    return _variance(a, mean, mask, dims, less, bool(keepdims), types)


@one_program("axis", "less", "keepdims", "types")
def _variance(
    a: Any, center: Any, mask: Any, axis: Axis, less: float, keepdims: bool, types: Any
) -> Any:
    compute, result = types
    a = lax.convert_element_type(a, compute)
    if center is None:
        center = mean(a, axis, compute, keepdims=True, where=mask)
    centered = subtract(a, lax.convert_element_type(plain(center), compute))
    squared = _squared_modulus(centered)
    real = dtypes.real_of(compute)
    total = sum(squared, axis, real, keepdims=keepdims, where=mask)
    count = _count(a, axis, keepdims, mask, real)
    return lax.convert_element_type(_over(total, count, less), result)


def _squared_modulus(x: Any) -> Any:
    """`|x|**2`, which is real for complex numbers too."""
    if dtypes.is_complex(typeof(x).dtype):
        return lax.real(lax.mul(x, lax.conj(x)))
    return lax.square(x)


def _over(total: Any, count: Any, less: Any) -> Any:
    """`total / (count - less)`, NaN where nothing is left to divide by."""
    if isinstance(count, np.ndarray):
        left = float(count) - float(less)
        return lax.div(total, np.array(left if left > 0 else np.nan, typeof(total).dtype))
    freedom = lax.sub(count, np.array(less, typeof(count).dtype))
    enough = lax.gt(freedom, constant_like(freedom, 0))
    return select(enough, lax.div(total, freedom), constant_like(total, np.nan))


def std(
    a: ArrayLike,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    where: ArrayLike | None = None,
    mean: Any = None,
    correction: float | None = None,
) -> Array:
    """The standard deviation of elements along dims: the square root of `var`.

    `axis` is one dim, several, or None for all; `keepdims` keeps them with size 1. `ddof`, `where`,
    `mean` and `correction` are those of `var`. The result is real, of the floating dtype to which
    `a` is promoted, or `dtype`.

    >>> snp.std(np.array([1.0, 2.0, 3.0, 4.0]))
    Array(1.118034, dtype=float32)
    """
    a = operand("std", a, out)
    canonical_axes(axis, typeof(a).ndim, "std")
    less = _correction("std", ddof, correction)
    return lax.sqrt(var(a, axis, dtype, None, less, keepdims, where=where, mean=mean))


def cov(
    m: ArrayLike,
    y: ArrayLike | None = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: Any = None,
    aweights: Any = None,
    dtype: Any = None,
) -> Array:
    """The covariance matrix of variables, the rows of `m` (its columns, if not `rowvar`).

    `y` has further variables. For n variables the shape is (n, n), and () for one. The sums are
    divided by the number of samples minus 1, or minus 0 if `bias`, or minus `ddof`. `fweights` say
    how often a sample counts, `aweights` how much. All arrays are promoted to one floating or
    complex dtype, or converted to `dtype`.

    >>> snp.cov(np.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]))
    Array([[ 1., -1.],
           [-1.,  1.]], dtype=float32)
    """
    check_arraylike("cov", m, *(() if y is None else (y,)))
    parts = promote_dtypes_inexact(*(plain(x) for x in (m, y) if x is not None))
    rows = []
    for part in parts:
        matrix = atleast_2d(part)
        turned = not rowvar and typeof(part).ndim != 1
        rows.append(transpose(matrix) if turned else matrix)
    x = concatenate(rows, 0)
    wanted = optional_dtype(dtype, "cov")
    x = x if wanted is None else lax.convert_element_type(x, wanted)
    if typeof(rows[0]).shape[0] == 0:
        return lax.full((0, 0), 0, typeof(x).dtype)
    variables, samples = typeof(x).shape
    if samples == 0:
        shape = () if variables == 1 else (variables, variables)
        return lax.full(shape, np.nan, typeof(x).dtype)
    less = (0 if bias else 1) if ddof is None else ddof
    weights = _cov_weights(x, fweights, aweights)
    center, weight = average(x, 1, weights, returned=True)
    first = lax.index_in_dim(weight, 0, 0, keepdims=False)
    if weights is not None and aweights is not None and less:
        spent = divide(sum(multiply(weights, aweights)), first)
        freedom = subtract(first, multiply(less, spent))
    else:
        freedom = subtract(first, less)
    x = subtract(x, reshape(center, (-1, 1)))
    weighted = x if weights is None else multiply(x, weights)
    result = divide(dot(x, conjugate(transpose(weighted))), freedom)
    return lax.squeeze(result, (0, 1)) if typeof(result).shape == (1, 1) else result


def _cov_weights(x: Any, fweights: Any, aweights: Any) -> Any:
    given = [w for w in (fweights, aweights) if w is not None]
    for w in given:
        check_arraylike("cov", w)
        if typeof(w).shape != typeof(x).shape[1:]:
            raise ShapeError(
                f"cov: weights of shape {typeof(w).shape} do not fit {typeof(x).shape[1]} samples"
            )
    if not given:
        return None
    if fweights is not None and not dtypes.is_integer(typeof(fweights).dtype):
        raise DtypeArgumentError(f"cov: fweights are counts, so integers, got {typeof(fweights)}")
    weights = plain(given[0])
    return multiply(weights, given[1]) if len(given) == 2 else weights


def corrcoef(
    x: ArrayLike, y: ArrayLike | None = None, rowvar: bool = True, dtype: Any = None
) -> Array:
    """The correlation coefficients of variables, the rows of `x` (its columns, if not `rowvar`).

    `y` has further variables. For n variables the shape is (n, n), and () for one. The arrays are
    promoted to one floating or complex dtype, or converted to `dtype`. The coefficients lie in [-1,
    1].

    >>> snp.corrcoef(np.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]))
    Array([[ 1., -1.],
           [-1.,  1.]], dtype=float32)
    """
    c = cov(x, y, rowvar, dtype=dtype)
    if typeof(c).ndim == 0:
        return divide(c, c)
    n = typeof(c).shape[0]
    mask = lax.eye(np.bool_, (n, n))
    variances = sum(select(mask, c, constant_like(c, 0)), 1)
    deviations = lax.convert_element_type(
        lax.sqrt(lax.real(variances) if dtypes.is_complex(typeof(c).dtype) else variances),
        typeof(c).dtype,
    )
    c = divide(divide(c, reshape(deviations, (-1, 1))), reshape(deviations, (1, -1)))
    if dtypes.is_complex(typeof(c).dtype):
        return lax.complex(clip(lax.real(c), -1, 1), clip(lax.imag(c), -1, 1))
    return clip(c, -1, 1)


# ---- ignoring NaN ------------------------------------------------------------------------------


def nanmean(
    a: ArrayLike,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> Array:
    """The arithmetic mean of the elements along dims that are not NaN, and NaN if all are.

    `axis`, `dtype`, `keepdims` and `where` are those of `mean`: `axis=None` takes all dims, and
    integers become the default float.

    >>> snp.nanmean(np.array([1.0, np.nan, 3.0]))
    Array(2., dtype=float32)
    """
    a = operand("nanmean", a, out)
    canonical_axes(axis, typeof(a).ndim, "nanmean")
    if not dtypes.is_inexact(typeof(a).dtype):
        return mean(a, axis, dtype, out, keepdims, where=where)
    result = optional_dtype(dtype, "nanmean") or typeof(a).dtype
    count = sum(lax.bitwise_not(isnan(a)), axis, result, keepdims=keepdims, where=where)
    return lax.div(nansum(a, axis, result, keepdims=keepdims, where=where), count)


def nanvar(
    a: ArrayLike,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
    mean: Any = None,
) -> Array:
    """The variance of the elements along dims that are not NaN, and NaN if all are.

    `axis`, `dtype`, `ddof`, `keepdims`, `where` and `mean` are those of `var`: `axis=None` takes
    all dims, and the result is a real float.

    >>> snp.nanvar(np.array([1.0, np.nan, 3.0]))
    Array(1., dtype=float32)
    """
    a = operand("nanvar", a, out)
    canonical_axes(axis, typeof(a).ndim, "nanvar")
    compute, result = _var_dtypes("nanvar", typeof(a).dtype, dtype)
    a = lax.convert_element_type(a, compute)
    missing = isnan(a)
    center = nanmean(a, axis, compute, keepdims=True, where=where) if mean is None else mean
    distance = select(missing, constant_like(a, 0), subtract(a, center))
    squared = _squared_modulus(distance)
    count = sum(
        lax.bitwise_not(missing), axis, typeof(squared).dtype, keepdims=keepdims, where=where
    )
    total = sum(squared, axis, keepdims=keepdims, where=where)
    return lax.convert_element_type(_over(total, count, ddof), result)


def nanstd(
    a: ArrayLike,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
    mean: Any = None,
) -> Array:
    """The standard deviation of the elements along dims that are not NaN, and NaN if all are.

    `axis`, `dtype`, `ddof`, `keepdims`, `where` and `mean` are those of `var`: `axis=None` takes
    all dims, and the result is a real float.

    >>> snp.nanstd(np.array([1.0, np.nan, 3.0]))
    Array(1., dtype=float32)
    """
    check_arraylike("nanstd", a)
    canonical_axes(axis, typeof(plain(a)).ndim, "nanstd")
    return lax.sqrt(nanvar(a, axis, dtype, out, ddof, keepdims, where, mean))
