"""Gather and scatter-add: read windows of an array, add windows to it; each other's transpose.

`spmd.lax.windows` defines which element of the operand each element of the stack of windows is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.primitive import Linear, Primitive, dims, remembered, shown_as
from spmd.core.structural import broadcast_in_dim, move_dim, reshape, zeros_like_aval
from spmd.lax.arithmetic import add, rem
from spmd.lax.concatenate import concatenate
from spmd.lax.families import fail, linear_in
from spmd.lax.logic import lt, select
from spmd.lax.scatter_rules import (
    bind_scatter,
    scatter_abstract,
    scatter_batch,
    scatter_dims,
    scatter_impl,
)
from spmd.lax.windows import (
    GatherDimensionNumbers,
    GatherScatterMode,
    ScatterDimensionNumbers,
    as_gather,
    as_scatter,
    check_numbers,
    normalized,
    positions,
    stack_shape,
    window_labels,
    window_sizes,
    with_batch_dim,
    with_indices_dim,
    with_window_dim,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- gather ------------------------------------------------------------------------------------


def gather(
    operand: Any,
    start_indices: Any,
    dimension_numbers: GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    *,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    mode: str | GatherScatterMode | None = None,
    fill_value: Any = None,
) -> Array:
    """Stack the windows of `operand` of size `slice_sizes` that start at `start_indices`.

    The last dim of `start_indices`, an array of integers, holds index vectors; `dimension_numbers`
    says which operand dim each of their components addresses and where the windows' dims are in the
    shape of the result. The dtype stays. `mode=None` is "promise_in_bounds"; "clip" moves windows
    inside; in mode "fill", a window that does not fit is filled with `fill_value` (default: NaN,
    the smallest signed integer, the largest unsigned one, True). `unique_indices` and
    `indices_are_sorted` are promises of the caller. **Prefer `x[i]`, `snp.take` and
    `x.at[i].get()`, which write these numbers for you.**

    Raises `ShapeError` if sizes or dimension numbers do not fit, `DtypeError` if indices are no
    integers, and `ArgumentError` for another mode.

    >>> rows = lax.GatherDimensionNumbers((1,), (0,), (0,))
    >>> lax.gather(np.arange(6).reshape(3, 2), np.array([[2], [0]]), rows, (1, 2))
    Array([[4, 5],
           [0, 1]], dtype=int32)
    """
    parsed = GatherScatterMode.PROMISE_IN_BOUNDS if mode is None else mode
    parsed = GatherScatterMode.from_any(parsed)
    if parsed is not GatherScatterMode.FILL_OR_DROP:
        fill_value = None
    elif fill_value is None:
        fill_value = default_fill(typeof(operand).dtype)
    else:
        fill_value = np.asarray(fill_value).item()
    return gather_p.bind(
        operand,
        start_indices,
        dimension_numbers=normalized(dimension_numbers),
        slice_sizes=tuple(s.__index__() for s in slice_sizes),
        unique_indices=bool(unique_indices),
        indices_are_sorted=bool(indices_are_sorted),
        mode=parsed,
        fill_value=fill_value,
    )


def default_fill(dtype: np.dtype) -> Any:
    """The value of a gather in mode "fill" where nothing was read, as a Python scalar."""
    if dtypes.is_inexact(dtype):
        return np.nan
    if dtypes.is_bool(dtype):
        return True
    if dtypes.is_key(dtype):
        return int(np.iinfo(np.uint32).max)
    info = dtypes.iinfo(dtype)
    return int(info.max if dtypes.is_unsigned(dtype) else info.min)


def _fill_array(dtype: np.dtype, fill_value: Any) -> np.ndarray:
    if dtype.names:
        return np.array((fill_value,) * len(dtype.names), dtype)
    return dtypes.number(fill_value, dtype)


@remembered
def _gather_abstract(
    operand: ShapedArray,
    indices: ShapedArray,
    *,
    dimension_numbers: GatherDimensionNumbers,
    slice_sizes: tuple[int, ...],
    **_: Any,
) -> ShapedArray:
    """The type of the result: batch dims of the indices, and window dims at `offset_dims`."""
    numbers = dimension_numbers
    ndim = max(indices.ndim, 1) - 1 + len(numbers.offset_dims)
    check_numbers("gather", numbers, operand, indices, ndim)
    if len(slice_sizes) != operand.ndim:
        fail(
            ShapeError,
            f"gather: slice_sizes={slice_sizes} needs one size for each dim of the operand, "
            f"{operand}",
        )
    limits = list(operand.shape)
    for d in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims):
        limits[d] = min(1, limits[d])
    for d, (size, limit) in enumerate(zip(slice_sizes, limits, strict=True)):
        if not 0 <= size <= limit and 0 not in indices.shape:
            fail(
                ShapeError,
                f"gather: slice_sizes[{d}]={size} is out of range; dim {d} of the operand "
                f"{operand} allows 0 to {limit} with {numbers}",
            )
        if d in numbers.collapsed_slice_dims and size != 1:
            fail(ShapeError, f"gather: slice_sizes[{d}]={size} must be 1, as dim {d} is collapsed")
    return operand.update(shape=stack_shape(numbers, indices.shape, slice_sizes))


def _gather_impl(
    xp: Any,
    operand: Any,
    indices: Any,
    *,
    dimension_numbers: GatherDimensionNumbers,
    slice_sizes: tuple[int, ...],
    mode: GatherScatterMode,
    fill_value: Any,
    **_: Any,
) -> Any:
    shape = stack_shape(dimension_numbers, indices.shape, slice_sizes)
    if 0 in shape:
        return xp.empty(shape, operand.dtype)
    where, fits = positions(xp, indices, operand.shape, shape, dimension_numbers)
    out = xp.broadcast_to(operand[tuple(where)], shape)
    if mode is not GatherScatterMode.FILL_OR_DROP:
        return out
    return xp.where(fits, out, _fill_array(operand.dtype, fill_value))


def _gather_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    operand, indices = primals
    out = gather_p.bind(operand, indices, **params)
    fill = None if params["fill_value"] is None else 0
    return out, gather_p.bind(tangents[0], indices, **{**params, "fill_value": fill})


def _gather_transpose(
    ct: Any,
    operand: Linear,
    indices: Any,
    *,
    dimension_numbers: GatherDimensionNumbers,
    slice_sizes: Any,
    fill_value: Any,
    **how: Any,
) -> list[Any]:
    numbers, zeros = as_scatter(dimension_numbers), zeros_like_aval(operand.aval)
    return [scatter_add(zeros, indices, ct, numbers, **how), None]


def _gather_batch(
    axis: Any, operands: Any, at: Any, *, dimension_numbers: Any, slice_sizes: Any, **params: Any
) -> Any:
    (operand, indices), (d, indices_dim) = operands, at
    if indices_dim is None:
        operand = move_dim(operand, d, 0)
        numbers, sizes = with_window_dim(dimension_numbers), (axis.size, *slice_sizes)
    elif d is None:
        indices = move_dim(indices, indices_dim, 0)
        numbers, sizes = with_indices_dim(dimension_numbers), slice_sizes
        # Several examples read the same array: together they need not be unique or in order.
        params |= {"unique_indices": False, "indices_are_sorted": False}
    else:
        operand, indices = move_dim(operand, d, 0), move_dim(indices, indices_dim, 0)
        numbers, sizes = with_batch_dim(dimension_numbers), (min(1, axis.size), *slice_sizes)
    out = gather_p.bind(operand, indices, dimension_numbers=numbers, slice_sizes=sizes, **params)
    return out, 0


def _gather_dims(
    operand: ShapedArray,
    indices: ShapedArray,
    *,
    dimension_numbers: GatherDimensionNumbers,
    slice_sizes: tuple[int, ...],
    **_: Any,
) -> Any:
    stack = stack_shape(dimension_numbers, indices.shape, slice_sizes)
    labels = window_labels(dimension_numbers, operand.shape, indices.ndim, stack)
    return dims(labels[:2], labels[2:])


gather_p = Primitive(
    "gather",
    abstract=_gather_abstract,
    impl=_gather_impl,
    jvp=_gather_jvp,
    transpose=_gather_transpose,
    batch=_gather_batch,
    dims=_gather_dims,
)


def gather_like_scatter(
    operand: Any,
    indices: Any,
    updates: ShapedArray,
    *,
    dimension_numbers: ScatterDimensionNumbers,
    **how: Any,
) -> Any:
    """Read the elements that a scatter of updates of this aval overwrites; zero elsewhere."""
    numbers = as_gather(dimension_numbers)
    sizes = window_sizes(numbers, typeof(operand).shape, updates.shape)
    return gather(operand, indices, numbers, sizes, fill_value=0, **how)


# ---- scatter_add -------------------------------------------------------------------------------


def scatter_add(
    operand: Any,
    scatter_indices: Any,
    updates: Any,
    dimension_numbers: ScatterDimensionNumbers,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: str | GatherScatterMode | None = None,
) -> Array:
    """Add windows of `updates` to `operand` where `scatter_indices` says.

    The last dim of `scatter_indices`, an array of integers, holds index vectors;
    `dimension_numbers` says which operand dim each of their components addresses and which dims of
    `updates` run inside a window. The result has the shape and dtype of `operand`. Updates of the
    same element are all added. `mode=None` is "drop": windows that do not fit are left out.
    `unique_indices` and `indices_are_sorted` are promises of the caller. **Prefer `x.at[i].add(v)`,
    which writes these numbers for you.**

    Raises `ShapeError`, `DtypeError` and `ArgumentError` as `scatter` does.

    >>> elements = lax.ScatterDimensionNumbers((), (0,), (0,))
    >>> lax.scatter_add(np.zeros(3), np.array([[0], [2], [2]]), np.ones(3), elements)
    Array([1., 0., 2.], dtype=float32)
    """
    how = dimension_numbers, indices_are_sorted, unique_indices, mode
    return bind_scatter(scatter_add_p, operand, scatter_indices, updates, *how)


def _scatter_add_transpose(
    ct: Any, operand: Any, indices: Any, updates: Any, **params: Any
) -> list[Any]:
    ct_updates = None
    if isinstance(updates, Linear):
        ct_updates = gather_like_scatter(ct, indices, updates.aval, **params)
    return [ct if isinstance(operand, Linear) else None, None, ct_updates]


scatter_add_p = Primitive(
    "scatter_add",
    abstract=scatter_abstract("scatter_add", dtypes.NUMERIC),
    impl=scatter_impl(lambda xp, out, index, v: xp.add.at(out, index, v), in_float32=True),
    jvp=linear_in(lambda: scatter_add_p, 0, 2),
    transpose=_scatter_add_transpose,
    batch=scatter_batch(lambda: scatter_add_p),
    dims=scatter_dims,
    text=shown_as("scatter-add"),
)


# ---- index_take --------------------------------------------------------------------------------


def index_take(src: Any, idxs: Any, axes: Sequence[int]) -> Array:
    """Take slices of `src` at index vectors: component k of each addresses dim `axes[k]`.

    `idxs` has an array of indices for each of `axes`, all of one length: the leading dim of the
    result. The other dims of `src` follow, and the result has its dtype. Negative indices, and
    those past the end, wrap around. Raises a `ShapeError` if there is not one array for each of
    `axes`.

    >>> lax.index_take(np.eye(3), (np.array([0, 1]), np.array([0, 2])), (0, 1))
    Array([1., 0.], dtype=float32)
    """
    aval = typeof(src)
    axes = tuple(axes)
    if len(idxs) != len(axes):
        fail(ShapeError, f"index_take: {len(idxs)} arrays of indices for {len(axes)} axes {axes}")
    columns = []
    for index, axis in zip(idxs, axes, strict=True):
        shape = typeof(index).shape
        size = broadcast_in_dim(np.asarray(aval.shape[axis], typeof(index).dtype), shape, ())
        left = rem(index, size)
        zero = broadcast_in_dim(np.asarray(0, typeof(index).dtype), shape, ())
        columns.append(reshape(select(lt(left, zero), add(left, size), left), (*shape, 1)))
    numbers = GatherDimensionNumbers(
        offset_dims=tuple(range(1, aval.ndim - len(axes) + 1)),
        collapsed_slice_dims=tuple(sorted(axes)),
        start_index_map=axes,
    )
    sizes = [1 if d in axes else n for d, n in enumerate(aval.shape)]
    return gather(src, concatenate(columns, 1), numbers, sizes)
