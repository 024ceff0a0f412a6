"""Means, spreads, quantiles and counts: `mean`, `var`, `median`, `quantile`, `cov`, `histogram`."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import lax
from spmd.core import dtypes
from spmd.core.aval import typeof
from spmd.core.errors import ArgumentError, DtypeError, ShapeError
from spmd.core.util import product
from spmd.numpy.joining import concatenate
from spmd.numpy.logic import isnan
from spmd.numpy.manipulation import atleast_2d, reshape, transpose
from spmd.numpy.products import dot
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    constant_like,
    optional_dtype,
    plain,
    promote_dtypes_inexact,
    promote_shapes,
    select,
)
from spmd.numpy.reductions import (
    Axis,
    any,
    canonical_axes,
    check_where,
    nansum,
    refuse_out,
    sum,
    wide_float,
)
from spmd.numpy.selection import clip
from spmd.numpy.ufuncs import conjugate, divide, multiply, square, subtract

# ---- means -------------------------------------------------------------------------------------


def _count(a: Any, axis: Axis, keepdims: bool, where: Any, dtype: np.dtype) -> Any:
    """How many elements a mean is over: a constant unless there is a mask."""
    aval = typeof(a)
    dims = canonical_axes(axis, aval.ndim, "mean")
    if where is None:
        return np.array(product(aval.shape[d] for d in dims), dtype)
    mask, _ = promote_shapes("mean", where, a)
    if typeof(mask).shape != aval.shape:
        mask = lax.broadcast_in_dim(mask, aval.shape, ())
    return sum(mask, axis, dtype, keepdims=keepdims)


def mean(
    a: Any,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    keepdims: bool = False,
    *,
    where: Any = None,
) -> Any:
    """The arithmetic mean over dims."""
    refuse_out("mean", out)
    check_arraylike("mean", a)
    a, mask = plain(a), check_where("mean", where)
    wanted = optional_dtype(dtype, "mean")
    result = wanted or dtypes.to_inexact(typeof(a).dtype)
    compute = wide_float(result) if wanted is None else result
    total = sum(a, axis, compute, keepdims=keepdims, where=mask)
    count = _count(a, axis, keepdims, mask, compute)
    return lax.convert_element_type(lax.div(total, count), result)


def average(
    a: Any, axis: Axis = None, weights: Any = None, returned: bool = False, keepdims: bool = False
) -> Any:
    """The weighted mean; with `returned` also the sum of the weights."""
    if weights is None:
        check_arraylike("average", a)
        (a,) = promote_dtypes_inexact(plain(a))
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
            raise DtypeError(f"{name}: dtype={wanted} is real, but the array is {source}")
        return wide_float(wanted), wanted
    inexact = dtypes.to_inexact(source)
    return wide_float(inexact), dtypes.real_of(inexact)


def var(
    a: Any,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    where: Any = None,
    mean: Any = None,
    correction: float | None = None,
) -> Any:
    """The variance over dims: mean square distance from the mean, over count minus `ddof`."""
    refuse_out("var", out)
    check_arraylike("var", a)
    a, mask = plain(a), check_where("var", where)
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
    if dtypes.is_complex(compute):
        squared = lax.real(lax.mul(centered, lax.conj(centered)))
    else:
        squared = lax.square(centered)
    real = dtypes.real_of(compute)
    total = sum(squared, axis, real, keepdims=keepdims, where=mask)
    count = _count(a, axis, keepdims, mask, real)
    return lax.convert_element_type(_over(total, count, less), result)


def _over(total: Any, count: Any, less: Any) -> Any:
    """`total / (count - less)`, NaN where nothing is left to divide by."""
    freedom = lax.sub(count, np.array(less, typeof(count).dtype))
    if isinstance(count, np.ndarray):
        left = float(count) - float(less)
        return lax.div(total, np.array(left if left > 0 else np.nan, typeof(total).dtype))
    enough = lax.gt(freedom, constant_like(freedom, 0))
    return select(enough, lax.div(total, freedom), constant_like(total, np.nan))


def std(
    a: Any,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    where: Any = None,
    mean: Any = None,
    correction: float | None = None,
) -> Any:
    """The standard deviation over dims: the square root of the variance."""
    refuse_out("std", out)
    check_arraylike("std", a)
    less = _correction("std", ddof, correction)
    return lax.sqrt(var(a, axis, dtype, None, less, keepdims, where=where, mean=mean))


def cov(
    m: Any,
    y: Any = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: Any = None,
    aweights: Any = None,
    *,
    dtype: Any = None,
) -> Any:
    """The covariance matrix of variables: rows of `m` (columns, if not `rowvar`)."""
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
    weights = plain(given[0])
    return multiply(weights, given[1]) if len(given) == 2 else weights


def corrcoef(x: Any, y: Any = None, rowvar: bool = True, *, dtype: Any = None) -> Any:
    """The matrix of correlation coefficients."""
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


# ---- quantiles ---------------------------------------------------------------------------------

_METHODS = ("linear", "lower", "higher", "midpoint", "nearest")


def quantile(
    a: Any,
    q: Any,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
) -> Any:
    """The values below which a share `q` of the elements lies."""
    refuse_out("quantile", out)
    return _quantile("quantile", a, q, axis, method, keepdims, skip_nan=False)


def nanquantile(
    a: Any,
    q: Any,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
) -> Any:
    """Quantiles of the elements that are not NaN."""
    refuse_out("nanquantile", out)
    return _quantile("nanquantile", a, q, axis, method, keepdims, skip_nan=True)


def percentile(
    a: Any,
    q: Any,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
) -> Any:
    """Quantiles with `q` in percent."""
    check_arraylike("percentile", a, q)
    return quantile(a, divide(q, 100), axis, out, overwrite_input, method, keepdims)


def nanpercentile(
    a: Any,
    q: Any,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
) -> Any:
    """Percentiles of the elements that are not NaN."""
    check_arraylike("nanpercentile", a, q)
    return nanquantile(a, divide(q, 100), axis, out, overwrite_input, method, keepdims)


def median(
    a: Any,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    keepdims: bool = False,
) -> Any:
    """The middle value: half of the elements are below."""
    return quantile(a, 0.5, axis, out, overwrite_input, "midpoint", keepdims)


def nanmedian(
    a: Any,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    keepdims: bool = False,
) -> Any:
    """The middle value of the elements that are not NaN."""
    return nanquantile(a, 0.5, axis, out, overwrite_input, "midpoint", keepdims)


def _quantile(
    name: str, a: Any, q: Any, axis: Axis, method: str, keepdims: bool, skip_nan: bool
) -> Any:
    check_arraylike(name, a, q)
    if method not in _METHODS:
        raise ArgumentError(f"{name}: method must be one of {', '.join(_METHODS)}, got {method!r}")
    (a,) = promote_dtypes_inexact(plain(a))
    (q,) = promote_dtypes_inexact(plain(q))
    if dtypes.is_complex(typeof(a).dtype):
        raise DtypeError(f"{name}: complex numbers have no order")
    if typeof(q).ndim > 1:
        raise ShapeError(f"{name}: q must have at most one dim, got shape {typeof(q).shape}")
    shape = typeof(a).shape
    dims = canonical_axes(axis, len(shape), name)
    kept = [d for d in range(len(shape)) if d not in dims]
    # The dims that are reduced become one, the first: everything else is then elementwise.
    rows = lax.reshape(
        lax.transpose(a, [*dims, *kept]),
        (product(shape[d] for d in dims), *(shape[d] for d in kept)),
    )
    result = _quantiles_of_rows(rows, q, method, skip_nan)
    if keepdims:
        lead = typeof(q).shape
        whole = [*lead, *(1 if d in dims else size for d, size in enumerate(shape))]
        result = lax.reshape(result, whole)
    return lax.convert_element_type(result, typeof(a).dtype)


@one_program("method", "skip_nan")
def _quantiles_of_rows(rows: Any, q: Any, method: str, skip_nan: bool) -> Any:
    """Quantiles over the first dim; a dim of `q` becomes the result's first."""
    missing = isnan(rows)
    nan = constant_like(rows, np.nan)
    if not skip_nan:
        rows = select(any(missing, 0, keepdims=True), nan, rows)
    rows = lax.sort(rows, 0)
    rest, dtype = typeof(rows).shape[1:], typeof(q).dtype
    if skip_nan:
        count = sum(lax.bitwise_not(missing), 0, dtype)
    else:
        count = np.array(typeof(rows).shape[0], dtype)
    last = lax.sub(count, np.array(1, dtype))
    lead = typeof(q).shape
    whole = (*lead, *rest)
    q = lax.broadcast_in_dim(q, whole, range(len(lead)))
    last = lax.broadcast_in_dim(last, whole, range(len(whole) - typeof(last).ndim, len(whole)))
    position = lax.mul(q, last)
    zero = np.array(0, dtype)
    low, high = lax.floor(position), lax.ceil(position)
    weight = lax.sub(position, low)
    low, high = (lax.max(zero, lax.min(k, last)) for k in (low, high))
    low_value, high_value = (_pick(rows, k, len(lead)) for k in (low, high))
    return _between(low_value, high_value, weight, method)


def _pick(rows: Any, position: Any, lead: int) -> Any:
    """`rows[position[i..., j...], j...]`, by comparing: differentiable, and no gather per row."""
    n = typeof(rows).shape[0]
    index = lax.convert_element_type(position, np.dtype(np.int32))
    whole = (*typeof(index).shape[:lead], *typeof(rows).shape)
    numbers = lax.broadcasted_iota(np.dtype(np.int32), whole, lead)
    others = [d for d in range(len(whole)) if d != lead]
    hit = lax.eq(numbers, lax.broadcast_in_dim(index, whole, others))
    spread = lax.broadcast_in_dim(rows, whole, range(lead, len(whole)))
    values = select(hit, spread, constant_like(spread, 0))
    return lax.reduce_sum(values, (lead,)) if n else lax.full(typeof(index).shape, np.nan)


def _between(low: Any, high: Any, weight: Any, method: str) -> Any:
    weight = lax.convert_element_type(weight, typeof(low).dtype)
    if method == "lower":
        return low
    if method == "higher":
        return high
    if method == "nearest":
        return select(lax.le(weight, constant_like(weight, 0.5)), low, high)
    if method == "midpoint":
        return lax.mul(lax.add(low, high), constant_like(low, 0.5))
    return lax.add(lax.mul(low, lax.sub(constant_like(weight, 1), weight)), lax.mul(high, weight))


# ---- ignoring NaN ------------------------------------------------------------------------------


def nanmean(
    a: Any,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """The mean of the elements that are not NaN."""
    refuse_out("nanmean", out)
    check_arraylike("nanmean", a)
    a = plain(a)
    if not dtypes.is_inexact(typeof(a).dtype):
        return mean(a, axis, dtype, out, keepdims, where=where)
    result = optional_dtype(dtype, "nanmean") or typeof(a).dtype
    count = sum(lax.bitwise_not(isnan(a)), axis, result, keepdims=keepdims, where=where)
    return lax.div(nansum(a, axis, result, keepdims=keepdims, where=where), count)


def nanvar(
    a: Any,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """The variance of the elements that are not NaN."""
    refuse_out("nanvar", out)
    check_arraylike("nanvar", a)
    a = plain(a)
    compute, result = _var_dtypes("nanvar", typeof(a).dtype, dtype)
    a = lax.convert_element_type(a, compute)
    missing = isnan(a)
    center = nanmean(a, axis, compute, keepdims=True, where=where)
    distance = select(missing, constant_like(a, 0), subtract(a, center))
    if dtypes.is_complex(compute):
        squared = lax.real(lax.mul(distance, lax.conj(distance)))
    else:
        squared = square(distance)
    count = sum(
        lax.bitwise_not(missing), axis, typeof(squared).dtype, keepdims=keepdims, where=where
    )
    total = sum(squared, axis, keepdims=keepdims, where=where)
    return lax.convert_element_type(_over(total, count, ddof), result)


def nanstd(
    a: Any,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """The standard deviation of the elements that are not NaN."""
    return lax.sqrt(nanvar(a, axis, dtype, out, ddof, keepdims, where))
