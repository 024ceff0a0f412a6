"""Histograms of several variables: `histogram2d`, `histogramdd`; of one, see `sorting.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base.errors import ShapeError
from spmd.core.aval import is_arraylike, typeof
from spmd.numpy.creation import asarray
from spmd.numpy.joining import stack
from spmd.numpy.numerical import ravel_multi_index
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    constant_like,
    plain,
    promote_dtypes_inexact,
    select,
)
from spmd.numpy.reductions import sum as _sum
from spmd.numpy.repeating import diff
from spmd.numpy.sorting import bincount, histogram_bin_edges, searchsorted
from spmd.numpy.ufuncs import divide


def histogramdd(
    sample: Any,
    bins: Any = 10,
    range: Sequence[Any] | None = None,
    weights: Any = None,
    density: bool | None = None,
) -> tuple[Any, list[Any]]:
    """Count the points in each box of a grid, and give the edges of the boxes.

    `sample` has shape (points, dims). `bins` is a number for all dims, or a number or vector of
    edges for each dim. `range` has a pair of bounds or None for each dim; without bounds they are
    the smallest and largest coordinate. Points outside the edges count nowhere; the last bin of
    each dim is closed. `weights`, of shape (points,), say how much each point counts. With
    `density` the counts are divided by their sum and by the volume of each box.

    The result is an array with one dim of bins for each dim of the grid, and a list of vectors of
    edges. `sample` and `weights` are promoted to one floating dtype. The edges have that dtype; the
    counts have it with `weights` or `density`, and otherwise the default integer dtype. Raises a
    `ShapeError` if `sample`, `bins`, `range` or `weights` do not fit.

    >>> points = np.array([[0.0, 0.0], [1.0, 1.0], [0.9, 0.1]])
    >>> histogramdd(points, 2)[0]
    Array([[1, 0],
           [1, 1]], dtype=int32)
    """
    check_arraylike("histogramdd", sample)
    if weights is None:
        (sample,) = promote_dtypes_inexact(plain(sample))
    else:
        check_arraylike("histogramdd", weights)
        sample, weights = promote_dtypes_inexact(plain(sample), plain(weights))
    if typeof(sample).ndim != 2:
        raise ShapeError(f"histogramdd: sample must be (points, dims), got {typeof(sample)}")
    n, dims = typeof(sample).shape
    if weights is not None and typeof(weights).shape != (n,):
        raise ShapeError(f"histogramdd: {n} points need weights ({n},), got {typeof(weights)}")
    ranges = [None] * dims if range is None else list(range)
    if len(ranges) != dims or any(
        r is not None and not (hasattr(r, "__len__") and len(r) == 2) for r in ranges
    ):
        raise ShapeError(f"histogramdd: range must be {dims} pairs or None, got {range!r}")
    columns = [lax.index_in_dim(sample, d, 1, keepdims=False) for d, _ in enumerate(ranges)]
    edges = [
        histogram_bin_edges(x, b, r)
        for x, b, r in zip(columns, _bins_of_dims(bins, dims), ranges, strict=True)
    ]
    places = tuple(_place(x, e) for x, e in zip(columns, edges, strict=True))
    # One bin more at each end of each dim takes what lies outside, and is cut off.
    sizes = tuple(typeof(e).shape[0] + 1 for e in edges)
    counts = bincount(
        ravel_multi_index(places, sizes, mode="clip"), weights, length=math.prod(sizes)
    )
    inner = [size - 1 for size in sizes]
    counts = lax.slice(lax.reshape(counts, sizes), [1] * dims, inner)
    return (_density(counts, edges, typeof(sample).dtype) if density else counts), edges


def _bins_of_dims(bins: Any, dims: int) -> list[Any]:
    if not isinstance(bins, (list, tuple)) and np.ndim(bins) == 0:
        return [bins] * dims
    found = list(bins)
    if len(found) != dims:
        raise ShapeError(f"histogramdd: {len(found)} bins were given for {dims} dims")
    return found


def _place(x: Any, edges: Any) -> Any:
    """The number of the bin of each element: 0 is left of all, the last one right of all."""
    place = searchsorted(edges, x, "right")
    last = lax.index_in_dim(edges, typeof(edges).shape[0] - 1, 0, keepdims=False)
    return select(lax.eq(x, last), lax.sub(place, constant_like(place, 1)), place)


def _density(counts: Any, edges: Sequence[Any], dtype: np.dtype) -> Any:
    """Counts divided by their sum and by the boxes' volumes."""
    counts = lax.convert_element_type(counts, dtype)
    counts = divide(counts, _sum(counts))
    for d, e in enumerate(edges):
        whole = typeof(counts).shape
        counts = lax.div(counts, lax.broadcast_in_dim(diff(e), whole, (d,)))
    return counts


def histogram2d(
    x: Any,
    y: Any,
    bins: Any = 10,
    range: Sequence[Any] | None = None,
    weights: Any = None,
    density: bool | None = None,
) -> tuple[Any, Any, Any]:
    """Count the points (x, y) in each box of a grid, and give the edges along both dims.

    `x` and `y` are vectors of one size. `bins` is a number or a vector of edges for both dims, or a
    pair of those. `range`, `weights` and `density` are those of `histogramdd`, and so are the
    dtypes. The results are the counts, of shape (bins of `x`, bins of `y`), and two vectors of
    edges. Raises a `ShapeError` if `x` and `y` differ in shape or are no vectors.

    >>> x, y = np.array([0.0, 1.0, 0.9]), np.array([0.0, 1.0, 0.1])
    >>> counts, x_edges, y_edges = histogram2d(x, y, [1, 2])
    >>> counts, y_edges
    (Array([[2, 1]], dtype=int32), Array([0. , 0.5, 1. ], dtype=float32))
    """
    check_arraylike("histogram2d", x, y)
    count = 1 if is_arraylike(bins) and np.ndim(bins) == 0 else len(bins)
    if count not in (1, 2):
        edges = asarray(bins)
        bins = [edges, edges]
    points = stack([as_array(plain(v)) for v in (x, y)], 1)
    counts, (x_edges, y_edges) = histogramdd(points, bins, range, weights, density)
    return counts, x_edges, y_edges
