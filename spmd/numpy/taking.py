"""Elements picked by arrays of positions along a dim: `take`, `take_along_axis`, `put_along_axis`.

Unlike `x[i]`, they fill what is out of bounds (with NaN, or the smallest integer) by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import (
    ArgumentError,
    DtypeArgumentError,
    IndexingError,
    RefusedError,
    ShapeError,
)
from spmd.base.source import current_source
from spmd.base.util import canonical_dim
from spmd.core.aval import typeof
from spmd.numpy.promotion import (
    as_array,
    broadcast_shapes_of,
    broadcast_to,
    check_arraylike,
    convert,
    operand,
    plain,
)
from spmd.sharding.array import Array, ArrayLike

# ---- positions ---------------------------------------------------------------------------------


def _positions(name: str, indices: Any) -> Any:
    """Positions as an array of integers of at least 32 bits."""
    indices = operand(name, indices)
    dtype = typeof(indices).dtype
    if not dtypes.is_integer(dtype):
        raise DtypeArgumentError(
            f"{current_source()}: {name} requires integer indices, got {typeof(indices)}; "
            "convert them with .astype(int)"
        )
    if isinstance(indices, int):
        return np.asarray(indices, dtypes.canonical(np.int64))
    return indices if dtype.itemsize >= 4 else lax.convert_element_type(indices, np.int32)


def _wrapped(indices: Any, size: int) -> Any:
    """Negative positions counted from the end."""
    if dtypes.is_unsigned(typeof(indices).dtype):
        return indices
    return lax.select(lax.lt(indices, 0), lax.add(indices, size), indices)


def _modulo(indices: Any, size: int) -> Any:
    rest = lax.rem(indices, convert(size, typeof(indices).dtype))
    return _wrapped(rest, size)


def _flattened(x: Any) -> Any:
    return lax.reshape(x, (typeof(x).size,))


# ---- take --------------------------------------------------------------------------------------


def take(
    a: ArrayLike,
    indices: ArrayLike,
    axis: int | None = None,
    out: None = None,
    mode: str | None = None,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    fill_value: ArrayLike | None = None,
) -> Array:
    """Take elements or slices at given positions along a dim.

    `indices` are integers of any shape, which stands in the result in place of dim `axis`; with
    `axis=None` the array is flattened first. Negative positions count from the end. `mode` says
    what is read out of bounds: "fill" (the default), "clip", or "wrap". The filling is
    `fill_value`, or NaN, or the largest integer of an unsigned and the smallest of a signed dtype.
    The dtype of `a` stays. `unique_indices` and `indices_are_sorted` are promises that may save
    time. Raises an `IndexingError` if the dim is empty, and an `ArgumentError` for another `mode`.

    >>> snp.take(np.arange(10, 15), np.array([3, -1]))
    Array([13, 14], dtype=int32)
    """
    if out is not None:
        raise ArgumentError("take: arrays are immutable, so out= is not supported; use the result")
    check_arraylike("take", a)
    a, indices = as_array(a), _positions("take", indices)
    if axis is None:
        a, axis = _flattened(a), 0
    axis = canonical_dim(axis, typeof(a).ndim)
    shape, places = typeof(a).shape, typeof(indices).shape
    if shape[axis] == 0 and 0 not in places:
        raise IndexingError(
            f"{current_source()}: take: nothing can be taken from dim {axis} of {typeof(a)}, "
            "which has size 0"
        )
    indices, gather_mode = _in_mode(indices, shape[axis], mode)
    numbers = lax.GatherDimensionNumbers(
        (*range(axis), *range(axis + len(places), len(shape) + len(places) - 1)), (axis,), (axis,)
    )
    return lax.gather(
        a,
        lax.expand_dims(indices, (len(places),)),
        numbers,
        (*shape[:axis], 1, *shape[axis + 1 :]),
        unique_indices=unique_indices,
        indices_are_sorted=indices_are_sorted,
        mode=gather_mode,
        fill_value=fill_value,
    )


def _in_mode(indices: Any, size: int, mode: str | None) -> tuple[Any, lax.GatherScatterMode]:
    if mode is None or mode == "fill":
        return _wrapped(indices, size), lax.GatherScatterMode.FILL_OR_DROP
    if mode == "wrap":
        return _modulo(indices, size), lax.GatherScatterMode.PROMISE_IN_BOUNDS
    if mode == "clip":
        return indices, lax.GatherScatterMode.CLIP
    raise RefusedError(
        f"take: mode={mode!r} must be 'fill', 'clip' or 'wrap'; a compiled program cannot raise "
        "for an index that it only knows when it runs"
    )


# ---- along an axis -----------------------------------------------------------------------------


def take_along_axis(
    arr: ArrayLike,
    indices: ArrayLike,
    axis: int | None = -1,
    mode: Any = None,
    fill_value: ArrayLike | None = None,
    *,
    wrap_negative_indices: bool | None = None,
) -> Array:
    """Take elements along a dim at positions that differ from row to row, as `argsort` gives them.

    `indices` has as many dims as `arr`, and the dims but `axis` broadcast against each other; the
    result has the shape of `indices` and the dtype of `arr`. `mode` is that of `x.at[].get`: None
    reads `fill_value` (NaN by default) out of bounds. Negative indices count from the end unless
    `wrap_negative_indices=False`.

    >>> snp.take_along_axis(np.array([[30, 10, 20]]), np.array([[1, 2, 0]]), 1)
    Array([[10, 20, 30]], dtype=int32)
    """
    check_arraylike("take_along_axis", arr)
    x, indices = as_array(arr), _positions("take_along_axis", indices)
    if axis is None:
        x, axis = _flattened(x), 0
    axis, (x, indices) = _aligned("take_along_axis", x, indices, axis)
    if wrap_negative_indices is None or wrap_negative_indices:
        indices = _wrapped(indices, typeof(x).shape[axis])
    aval, ndim = typeof(x), typeof(x).ndim
    if not aval.shape[axis]:
        # A gather reads slices of one element, and there is none to read: all is zero, as in JAX.
        return lax.full(typeof(indices).shape, 0, aval.dtype)
    return lax.gather(
        x,
        lax.expand_dims(indices, (ndim,)),
        _rowwise(ndim, axis),
        tuple(min(1, s) for s in typeof(x).shape),
        mode="fill" if mode is None else mode,
        fill_value=fill_value,
    )


def put_along_axis(
    arr: ArrayLike,
    indices: ArrayLike,
    values: ArrayLike,
    axis: int | None,
    inplace: bool = True,
    *,
    mode: Any = None,
) -> Array:
    """Make a copy of an array with `values` put where `take_along_axis` would read.

    `values` broadcast to the shape of `indices` and are converted to the dtype of `arr`. `mode` is
    that of `x.at[].set`. As arrays are immutable, write `inplace=False`. Raises an `ArgumentError`
    without it, and a `ShapeError` if `indices` does not fit.

    >>> snp.put_along_axis(np.array([[3, 1]]), np.array([[1]]), 9, 1, inplace=False)
    Array([[3, 9]], dtype=int32)
    """
    if inplace:
        raise ArgumentError(
            "put_along_axis: arrays are immutable; pass inplace=False and use the result"
        )
    check_arraylike("put_along_axis", arr, values)
    whole = as_array(arr)
    x, indices = whole, _positions("put_along_axis", indices)
    if axis is None:
        x, axis = _flattened(x), 0
    aval = typeof(x)
    axis, (x, indices) = _aligned("put_along_axis", x, indices, axis)
    if typeof(x).shape != aval.shape:
        raise ShapeError(
            f"put_along_axis: indices of shape {typeof(indices).shape} must not be larger than "
            f"arr, {aval}, in dims other than {axis}"
        )
    values = convert(plain(values), aval.dtype)
    values = broadcast_to(values, typeof(indices).shape)
    out = lax.scatter(
        x,
        lax.expand_dims(_wrapped(indices, aval.shape[axis]), (aval.ndim,)),
        values,
        lax.ScatterDimensionNumbers(*_rowwise(aval.ndim, axis)),
        mode=mode,
    )
    return lax.reshape(out, typeof(whole).shape)


def _aligned(name: str, x: Any, indices: Any, axis: int) -> tuple[int, Sequence[Any]]:
    """Array and positions with equal sizes in all dims but `axis`."""
    ndim = typeof(x).ndim
    if typeof(indices).ndim != ndim:
        raise ShapeError(
            f"{current_source()}: {name}: indices must have as many dims as the array, got "
            f"{typeof(indices)} and {typeof(x)}; add dims of size 1"
        )
    axis = canonical_dim(axis, ndim)
    shapes = [list(typeof(v).shape) for v in (x, indices)]
    along = [shape[axis] for shape in shapes]
    for shape in shapes:
        shape[axis] = 1
    common = list(broadcast_shapes_of(name, [tuple(shape) for shape in shapes]))
    found = []
    for v, size in zip((x, indices), along, strict=True):
        common[axis] = size
        found.append(broadcast_to(v, tuple(common)))
    return axis, found


def _rowwise(ndim: int, axis: int) -> lax.GatherDimensionNumbers:
    others = tuple(d for d in range(ndim) if d != axis)
    return lax.GatherDimensionNumbers((), (axis,), (axis,), others, others)
