"""Quantiles: `quantile`, `percentile`, `median`, and the same without NaN.

The dims reduced become one, which is sorted; the two elements around each quantile are picked by
comparing positions, so that derivatives flow without a gather.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.core.explicit import lays_out_result
from spmd.numpy.logic import isnan
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    check_arraylike,
    constant_like,
    operand,
    plain,
    promote_dtypes_inexact,
    refuse_out,
    select,
)
from spmd.numpy.reductions import Axis, any, canonical_axes, sum
from spmd.numpy.ufuncs import divide
from spmd.sharding.array import Array, ArrayLike

_METHODS = ("linear", "lower", "higher", "midpoint", "nearest", "inverted_cdf")


def quantile(
    a: ArrayLike,
    q: ArrayLike,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: ArrayLike | None = None,
) -> Array:
    """The values below which a share `q` of the elements along dims lies.

    `q` is a number or vector in [0, 1]; a vector gives the result a first dim. `axis` is one dim,
    several, or None for all. `method` says what lies between two elements: "linear", "lower",
    "higher", "midpoint" or "nearest". `a` is promoted to a floating dtype, which the result has;
    `overwrite_input` changes nothing.

    `weights`, of the shape of `a` or of its reduced dims, say how often an element counts; they go
    with `method="inverted_cdf"`: the least element below which at least that share lies.

    >>> snp.quantile(np.array([1.0, 2.0, 4.0]), np.array([0.25, 0.5]))
    Array([1.5, 2. ], dtype=float32)
    >>> heavy = np.array([1, 1, 8])
    >>> snp.quantile(np.array([1.0, 2.0, 3.0]), 0.5, method="inverted_cdf", weights=heavy)
    Array(3., dtype=float32)
    """
    return _quantile("quantile", a, q, axis, out, method, keepdims, False, weights)


def nanquantile(
    a: ArrayLike,
    q: ArrayLike,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: ArrayLike | None = None,
) -> Array:
    """The quantiles of the elements along dims that are not NaN, and NaN if all are.

    `q`, `axis`, `overwrite_input`, `method`, `keepdims` and `weights` are those of `quantile`; the
    result has the floating dtype to which `a` is promoted.

    >>> snp.nanquantile(np.array([1.0, np.nan, 3.0]), 0.5)
    Array(2., dtype=float32)
    """
    return _quantile("nanquantile", a, q, axis, out, method, keepdims, True, weights)


@lays_out_result
def percentile(
    a: ArrayLike,
    q: ArrayLike,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: ArrayLike | None = None,
    out_sharding: Any = None,
) -> Array:
    """The values below which `q` percent of the elements along dims lie.

    `q` is a number or vector in [0, 100]. `axis`, `overwrite_input`, `method`, `keepdims` and
    `weights` are those of `quantile`; the result has the floating dtype to which `a` is
    promoted. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the
    result.

    >>> snp.percentile(np.array([1.0, 2.0, 3.0, 4.0]), 50)
    Array(2.5, dtype=float32)
    """
    return _quantile("percentile", a, q, axis, out, method, keepdims, False, weights, 100)


def nanpercentile(
    a: ArrayLike,
    q: ArrayLike,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: ArrayLike | None = None,
) -> Array:
    """The percentiles of the elements along dims that are not NaN, and NaN if all are.

    `q` is a number or vector in [0, 100]. `axis`, `overwrite_input`, `method`, `keepdims` and
    `weights` are those of `quantile`; the result has the floating dtype to which `a` is promoted.

    >>> snp.nanpercentile(np.array([1.0, np.nan, 3.0]), 50)
    Array(2., dtype=float32)
    """
    return _quantile("nanpercentile", a, q, axis, out, method, keepdims, True, weights, 100)


def median(
    a: ArrayLike,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    keepdims: bool = False,
) -> Array:
    """The middle element along dims, or the mean of the middle two.

    `axis` is one dim, several, or None for all; `keepdims` keeps them with size 1. The result has
    the floating dtype to which `a` is promoted; `overwrite_input` changes nothing.

    >>> snp.median(np.array([3, 1, 2, 10]))
    Array(2.5, dtype=float32)
    """
    return _quantile("median", a, 0.5, axis, out, "midpoint", keepdims, False, None)


def nanmedian(
    a: ArrayLike,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    keepdims: bool = False,
) -> Array:
    """The middle of the elements along dims that are not NaN, or the mean of the middle two.

    `axis`, `keepdims` and `overwrite_input` are those of `median`; the result has the floating
    dtype to which `a` is promoted, and is NaN if all elements are.

    >>> snp.nanmedian(np.array([1.0, np.nan, 3.0]))
    Array(2., dtype=float32)
    """
    return _quantile("nanmedian", a, 0.5, axis, out, "midpoint", keepdims, True, None)


def _quantile(
    name: str,
    a: Any,
    q: Any,
    axis: Axis,
    out: Any,
    method: str,
    keepdims: bool,
    skip_nan: bool,
    weights: Any,
    unit: int = 1,
) -> Any:
    """The quantiles at the shares `q / unit` of the elements."""
    refuse_out(name, out)
    check_arraylike(name, a, q)
    if method not in _METHODS:
        raise ArgumentError(f"{name}: method must be one of {', '.join(_METHODS)}, got {method!r}")
    (a,) = promote_dtypes_inexact(plain(a))
    (q,) = promote_dtypes_inexact(plain(q))
    if unit != 1:
        q = divide(q, unit)
    if dtypes.is_complex(typeof(a).dtype):
        raise DtypeArgumentError(f"{name}: complex numbers have no order")
    if typeof(q).ndim > 1:
        raise ShapeError(f"{name}: q must have at most one dim, got shape {typeof(q).shape}")
    shape = typeof(a).shape
    dims = canonical_axes(axis, len(shape), name)
    kept = [d for d in range(len(shape)) if d not in dims]
    count = math.prod(shape[d] for d in dims)

    def as_rows(x: Any) -> Any:
        """The dims that are reduced become one, the first: everything else is elementwise."""
        return lax.reshape(lax.transpose(x, [*dims, *kept]), (count, *(shape[d] for d in kept)))

    if method == "inverted_cdf":
        heavy = as_rows(_weights_like(name, a, weights, dims))
        result = _weighted_quantiles(as_rows(a), heavy, q, skip_nan)
    elif weights is not None:
        raise ArgumentError(f"{name}: weights go with method='inverted_cdf', not with {method!r}")
    else:
        result = _quantiles_of_rows(as_rows(a), q, method, skip_nan)
    if keepdims:
        lead = typeof(q).shape
        whole = [*lead, *(1 if d in dims else size for d, size in enumerate(shape))]
        result = lax.reshape(result, whole)
    return lax.convert_element_type(result, typeof(a).dtype)


def _weights_like(name: str, a: Any, weights: Any, dims: tuple[int, ...]) -> Any:
    """A weight for each element, of the dtype of the elements."""
    shape = typeof(a).shape
    if weights is None:
        return lax.full(shape, 1, typeof(a).dtype)
    given = lax.convert_element_type(operand(name, weights), typeof(a).dtype)
    if typeof(given).shape == shape:
        return given
    if typeof(given).shape != tuple(shape[d] for d in dims):
        raise ShapeError(
            f"{name}: weights of shape {typeof(given).shape} must have the shape of a, {shape}, or "
            f"of its reduced dims, {tuple(shape[d] for d in dims)}"
        )
    return lax.broadcast_in_dim(given, shape, dims)


@one_program("skip_nan")
def _weighted_quantiles(rows: Any, weights: Any, q: Any, skip_nan: bool) -> Any:
    """The least element whose cumulative weight reaches the share `q` of all weight."""
    zero, nan = constant_like(weights, 0), constant_like(rows, np.nan)
    if skip_nan:
        weights = select(isnan(rows), zero, weights)
    else:
        rows = select(any(isnan(rows), 0, keepdims=True), nan, rows)
    wrong = lax.bitwise_or(lax.lt(weights, zero), isnan(weights))
    rows, weights = lax.sort_key_val(rows, weights, 0)
    reached = lax.cumsum(weights, 0)
    total = lax.index_in_dim(reached, -1, 0, keepdims=False)
    lead = typeof(q).shape
    whole = (*lead, *typeof(total).shape)
    spread = range(len(lead), len(whole))
    q = lax.convert_element_type(q, typeof(total).dtype)
    wanted = lax.mul(
        lax.broadcast_in_dim(q, whole, range(len(lead))), lax.broadcast_in_dim(total, whole, spread)
    )
    # How many elements come before the one that reaches it; those without weight never do.
    table = (*lead, *typeof(rows).shape)
    others = [d for d in range(len(table)) if d != len(lead)]
    below = lax.bitwise_or(
        lax.lt(
            lax.broadcast_in_dim(reached, table, range(len(lead), len(table))),
            lax.broadcast_in_dim(wanted, table, others),
        ),
        lax.broadcast_in_dim(lax.le(reached, zero), table, range(len(lead), len(table))),
    )
    last = np.array(typeof(rows).shape[0] - 1, np.int32)
    place = lax.reduce_sum(lax.convert_element_type(below, np.dtype(np.int32)), (len(lead),))
    found = _pick(rows, lax.min(place, last), len(lead))
    bad = lax.bitwise_or(any(wrong, 0), lax.le(total, zero))
    return select(lax.broadcast_in_dim(bad, whole, spread), constant_like(found, np.nan), found)


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
    found = _between(low_value, high_value, weight, method)
    # Of nothing but NaN the result is a constant: no element has a share in it.
    return select(lax.lt(last, zero), nan, found) if skip_nan else found


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
