"""Quantiles: `quantile`, `percentile`, `median`, and the same without NaN.

The dims reduced become one, which is sorted; the two elements around each quantile are picked by
comparing positions, so that derivatives flow without a gather.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import lax
from spmd.core import dtypes
from spmd.core.aval import typeof
from spmd.core.errors import ArgumentError, DtypeError, ShapeError
from spmd.core.util import product
from spmd.numpy.logic import isnan
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    check_arraylike,
    constant_like,
    plain,
    promote_dtypes_inexact,
    select,
)
from spmd.numpy.reductions import Axis, any, canonical_axes, refuse_out, sum
from spmd.numpy.ufuncs import divide

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
