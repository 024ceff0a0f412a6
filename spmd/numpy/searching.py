"""Finding elements and taking those found: `where`, `nonzero`, `extract`, `diagonal`.

How many elements are found depends on data, so under a transformation these need `size=`: the
result then has that size, cut off or filled up.
"""

from __future__ import annotations

import math
import operator
from typing import Any, overload

import numpy as np

from spmd import lax
from spmd.base.errors import ArgumentError, ConcretizationError, RefusedError, ShapeError
from spmd.compile.dispatch.eager_cache import cached_arrays
from spmd.core.aval import typeof
from spmd.core.trace import Tracer
from spmd.numpy.creation import full
from spmd.numpy.joining import stack
from spmd.numpy.logic import as_bool
from spmd.numpy.manipulation import atleast_1d, moveaxis, ravel, reshape
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    constant_like,
    convert,
    default_int,
    operand,
    plain,
    refuse_out,
    select,
)
from spmd.numpy.reductions import canonical_axis
from spmd.numpy.reductions import sum as _sum
from spmd.numpy.taking import take
from spmd.sharding.array import Array, ArrayLike


@overload
def where(
    condition: ArrayLike, /, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> tuple[Array, ...]: ...


@overload
def where(condition: ArrayLike, x: ArrayLike, y: ArrayLike, /) -> Array: ...


@cached_arrays
def where(
    condition: ArrayLike,
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    /,
    *,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
) -> Any:
    """Take elements of `x` where a condition holds, and of `y` elsewhere.

    `condition`, `x` and `y` broadcast to one shape; `x` and `y` are promoted to one dtype. With one
    argument the result is `nonzero(condition)`, which `size` and `fill_value` belong to. Raises an
    `ArgumentError` if only one of `x` and `y` is given.

    Both `x` and `y` are computed, and so are their gradients: **a NaN on the side not taken reaches
    the gradient**; make both sides finite.

    >>> snp.where(np.array([True, False]), 1, np.array([2.5, 3.5]))
    Array([1. , 3.5], dtype=float32)
    """
    if x is None and y is None:
        return nonzero(condition, size=size, fill_value=fill_value)
    if x is None or y is None:
        raise ArgumentError("where: give both x and y, or neither")
    if size is not None or fill_value is not None:
        raise ArgumentError("where: size and fill_value belong to the form with one argument")
    check_arraylike("where", condition, x, y)
    condition, x, y = map(plain, (condition, x, y))
    return as_array(select(as_bool(condition), x, y))


def concrete_size(name: str, found: Any, size: Any) -> int:
    """The number of elements the result has: `size`, else the number found, which must be known."""
    if size is not None:
        return operator.index(size)
    if isinstance(found, Tracer) and found.concrete() is None:
        raise ConcretizationError(
            f"{name}: how many elements are found depends on traced data; give size=, the number "
            "of elements of the result (and fill_value= for those missing)"
        )
    return int(found)


def nonzero(
    a: ArrayLike, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> tuple[Array, ...]:
    """The indices of the elements that are not zero: a vector for each dim of `a`.

    They are in row-major order, and of the default integer dtype. Traced arrays need `size`, the
    number of indices: those missing are `fill_value`, 0 by default, those beyond are left out.
    Raises a `ShapeError` if `a` is a scalar, and a `ConcretizationError` if it is traced and `size`
    is missing.

    >>> snp.nonzero(np.array([[0, 7], [8, 0]]))
    (Array([0, 1], dtype=int32), Array([1, 0], dtype=int32))
    """
    a = operand("nonzero", a)
    shape = typeof(a).shape
    if not shape:
        raise ShapeError("nonzero: an array without dims has no indices; use atleast_1d first")
    mask = lax.reshape(as_bool(a), (typeof(a).size,))
    found = _sum(mask)
    count = concrete_size("nonzero", found, size)
    flat = _positions(mask, count)
    fills = fill_value if isinstance(fill_value, tuple) else (fill_value,) * len(shape)
    missing = lax.ge(lax.iota(default_int(), count), found)
    indices = []
    for d, fill in enumerate(fills):
        stride = constant_like(flat, math.prod(shape[d + 1 :]))
        index = lax.div(flat, stride) if typeof(flat).size else flat
        index = lax.rem(index, constant_like(flat, max(shape[d], 1)))
        value = 0 if fill is None else fill
        indices.append(select(missing, convert(value, typeof(index).dtype), index))
    return tuple(indices)


def _positions(mask: Any, count: int) -> Any:
    """The positions of the first `count` true elements of a vector; what is missing is 0."""
    n = typeof(mask).shape[0]
    index = default_int()
    if n == 0 or count == 0:
        return lax.full((count,), 0, index)
    # A stable sort by "not found" puts the positions found in front, in order: O(n log n), but
    # without the scatter that counting would need.
    _, positions = lax.sort_key_val(lax.bitwise_not(mask), lax.iota(index, n))
    if count <= n:
        return lax.slice_in_dim(positions, 0, count)
    return lax.pad(positions, np.array(0, index), [(0, count - n, 0)])


def flatnonzero(
    a: ArrayLike, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> Array:
    """The positions of the elements that are not zero, in the flat array.

    They are in order, and of the default integer dtype. `size` and `fill_value` are those of
    `nonzero`.

    >>> snp.flatnonzero(np.array([[0, 7], [8, 0]]))
    Array([1, 2], dtype=int32)
    """
    return nonzero(ravel(a), size=size, fill_value=fill_value)[0]


def argwhere(
    a: ArrayLike, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> Array:
    """The indices of the elements that are not zero, one row for each element.

    The shape is (number of elements, number of dims), the dtype the default integer. `size` and
    `fill_value` are those of `nonzero`.

    >>> snp.argwhere(np.array([[0, 7], [8, 0]]))
    Array([[0, 1],
           [1, 0]], dtype=int32)
    """
    a = operand("argwhere", a)
    rank = typeof(a).ndim
    rows = stack(nonzero(atleast_1d(a), size=size, fill_value=fill_value), 1)
    return rows if rank else lax.slice_in_dim(rows, 0, 0, axis=1)


def compress(
    condition: ArrayLike,
    a: ArrayLike,
    axis: int | None = None,
    *,
    size: int | None = None,
    fill_value: ArrayLike = 0,
    out: None = None,
) -> Array:
    """Take the slices along a dim for which a condition holds.

    `condition` is a vector; with `axis=None` it is for the flat array. The dtype of `a` stays.
    Traced conditions need `size`, the number of slices, of which the missing ones are `fill_value`.
    Raises a `ShapeError` if `condition` is no vector.

    >>> snp.compress(np.array([True, False, True]), np.array([5, 6, 7]))
    Array([5, 7], dtype=int32)
    """
    refuse_out("compress", out)
    check_arraylike("compress", condition, a)
    a, condition = plain(a), as_bool(plain(condition))
    if typeof(condition).ndim != 1:
        raise ShapeError(f"compress: the condition must have one dim, got {typeof(condition)}")
    if axis is None:
        a, axis = ravel(a), 0
    d = canonical_axis(axis, typeof(a).ndim, "compress")
    rows = moveaxis(a, d, 0)
    length = min(typeof(condition).shape[0], typeof(rows).shape[0])
    mask = lax.slice_in_dim(condition, 0, length)
    found = _sum(mask)
    count = concrete_size("compress", found, size)
    taken = take(rows, _positions(mask, count), 0, mode="clip")
    missing = lax.ge(lax.iota(default_int(), count), found)
    shape = typeof(taken).shape
    fill = convert(fill_value, typeof(taken).dtype)
    taken = select(lax.broadcast_in_dim(missing, shape, (0,)), fill, taken)
    return moveaxis(taken, 0, d)


def extract(
    condition: ArrayLike, arr: ArrayLike, *, size: int | None = None, fill_value: ArrayLike = 0
) -> Array:
    """Take the elements of `arr` where a condition holds, into one dim.

    `condition` has the shape of `arr`, whose dtype stays. Traced conditions need `size`, the number
    of elements, of which the missing ones are `fill_value`.

    >>> snp.extract(np.array([True, False, True]), np.array([5, 6, 7]))
    Array([5, 7], dtype=int32)
    """
    check_arraylike("extract", condition, arr)
    return compress(ravel(condition), ravel(arr), size=size, fill_value=fill_value)


# ---- diagonals ---------------------------------------------------------------------------------


def diagonal(a: ArrayLike, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """Take a diagonal of matrices, the dims `axis1` and `axis2` of `a`.

    Diagonal `offset` lies that many columns to the right of the main one. It becomes the last dim
    of the result; the dtype stays. Raises a `ShapeError` if there are less than two dims, and an
    `ArgumentError` if the two are the same.

    >>> snp.diagonal(np.array([[1, 2], [3, 4]]))
    Array([1, 4], dtype=int32)
    """
    a = operand("diagonal", a)
    n = typeof(a).ndim
    if n < 2:
        raise ShapeError(f"diagonal: at least two dims are needed, got {typeof(a)}")
    d1, d2 = canonical_axis(axis1, n, "diagonal"), canonical_axis(axis2, n, "diagonal")
    if d1 == d2:
        raise ArgumentError(f"diagonal: axis1={axis1} and axis2={axis2} must be different dims")
    a = moveaxis(a, (d1, d2), (-2, -1))
    *lead, rows, columns = typeof(a).shape
    offset = operator.index(offset)
    first = offset if offset >= 0 else -offset * columns
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    # In the flat matrix the diagonal is every (columns + 1)-th element: a strided slice.
    flat = lax.reshape(a, (*lead, rows * columns))
    last = len(lead)
    if length == 0:
        return lax.slice_in_dim(flat, 0, 0, axis=last)
    stop = first + (length - 1) * (columns + 1) + 1
    return lax.slice_in_dim(flat, first, stop, columns + 1, last)


def diag(v: ArrayLike, k: int = 0) -> Array:
    """Take a diagonal of a matrix, or make the matrix that has a vector there.

    Diagonal `k` lies `k` columns to the right of the main one. The dtype of `v` stays. Raises a
    `ShapeError` if `v` has neither one nor two dims.

    >>> snp.diag(np.array([1, 2]))
    Array([[1, 0],
           [0, 2]], dtype=int32)
    """
    v = operand("diag", v)
    rank = typeof(v).ndim
    if rank == 2:
        return diagonal(v, k)
    if rank != 1:
        raise ShapeError(f"diag: one or two dims are needed, got {typeof(v)}")
    k = operator.index(k)
    n = typeof(v).shape[0]
    size = n + abs(k)
    zero = np.zeros((), typeof(v).dtype)
    rows = lax.pad(v, zero, [(max(-k, 0), max(k, 0), 0)])
    spread = lax.broadcast_in_dim(rows, (size, size), (0,))
    return select(lax.eye(np.bool_, (size, size), k), spread, zero)


def diagflat(v: ArrayLike, k: int = 0) -> Array:
    """Make the matrix that has the flattened elements of `v` on a diagonal.

    Diagonal `k` lies `k` columns to the right of the main one. The dtype stays.

    >>> snp.diagflat(np.array([[1, 2]]))
    Array([[1, 0],
           [0, 2]], dtype=int32)
    """
    return diag(ravel(v), k)


def fill_diagonal(
    a: ArrayLike, val: ArrayLike, wrap: bool = False, *, inplace: bool = True
) -> Array:
    """Make a copy of an array with other values on its diagonal.

    `a` is a matrix, or has dims of equal size; `val` is a scalar or a vector, repeated as needed,
    and converted to the dtype of `a`. As arrays are immutable, write `inplace=False`. Raises an
    `ArgumentError` without it or with `wrap`, and a `ShapeError` for another shape.

    >>> snp.fill_diagonal(np.array([[1, 2], [3, 4]]), 0, inplace=False)
    Array([[0, 2],
           [3, 0]], dtype=int32)
    """
    if inplace:
        raise RefusedError("fill_diagonal: arrays are immutable; pass inplace=False")
    if wrap:
        raise RefusedError("fill_diagonal: wrap=True is not supported")
    check_arraylike("fill_diagonal", a, val)
    a = plain(a)
    shape = typeof(a).shape
    if len(shape) < 2 or (len(shape) > 2 and len(set(shape)) > 1):
        raise ShapeError(f"fill_diagonal: a matrix or an equal-sided array is needed, got {shape}")
    index = default_int()
    first = lax.broadcasted_iota(index, shape, 0)
    on_diagonal = full(shape, True)
    for d in range(1, len(shape)):
        on_diagonal = lax.bitwise_and(
            on_diagonal, lax.eq(first, lax.broadcasted_iota(index, shape, d))
        )
    values = convert(plain(val), typeof(a).dtype)
    if typeof(values).ndim:
        n = min(shape)
        row = reshape(values, (-1,))
        times = -(-n // typeof(row).shape[0])
        row = lax.slice_in_dim(lax.concatenate([row] * times, 0), 0, n)
        values = lax.pad(row, np.zeros((), typeof(a).dtype), [(0, shape[0] - n, 0)])
        values = lax.broadcast_in_dim(values, shape, (0,))
    return select(on_diagonal, values, a)
