"""The base of all scatters: everything but the combination of two elements.

The rules here are made for one primitive at a time, as the families of elementwise primitives are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import DtypeError, ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.primitive import Primitive, dims
from spmd.core.structural import move_dim, to_front
from spmd.lax.families import fail
from spmd.lax.windows import (
    GatherDimensionNumbers,
    GatherScatterMode,
    ScatterDimensionNumbers,
    as_gather,
    check_numbers,
    normalized,
    positions,
    stack_shape,
    window_dims,
    window_labels,
    window_sizes,
    with_batch_dim,
    with_window_dim,
)


def bind_scatter(
    prim: Primitive,
    operand: Any,
    scatter_indices: Any,
    updates: Any,
    dimension_numbers: ScatterDimensionNumbers,
    indices_are_sorted: bool,
    unique_indices: bool,
    mode: str | GatherScatterMode | None,
) -> Any:
    """Normalise the arguments of a scatter's public function and apply its primitive."""
    if isinstance(updates, (bool, int, float, complex)):
        updates = np.asarray(updates, typeof(operand).dtype)
    return prim.bind(
        operand,
        scatter_indices,
        updates,
        dimension_numbers=normalized(dimension_numbers),
        indices_are_sorted=bool(indices_are_sorted),
        unique_indices=bool(unique_indices),
        mode=GatherScatterMode.from_any(mode),
    )


def scatter_abstract(name: str, accepts: Sequence[np.dtype] | None) -> Callable[..., ShapedArray]:
    """The abstract rule of a scatter whose elements are combined if of one of these dtypes."""

    def rule(
        operand: ShapedArray,
        indices: ShapedArray,
        updates: ShapedArray,
        *,
        dimension_numbers: ScatterDimensionNumbers,
        **_: Any,
    ) -> ShapedArray:
        if operand.dtype != updates.dtype:
            fail(
                DtypeError,
                f"{name}: operand and updates must have one dtype, got {operand} and {updates}; "
                "convert one with lax.convert_element_type",
            )
        if accepts is not None and operand.dtype not in accepts:
            fail(DtypeError, f"{name}: does not combine elements of dtype {operand}")
        check_numbers(name, dimension_numbers, operand, indices, updates.ndim)
        _check_updates(name, as_gather(dimension_numbers), operand, indices, updates)
        return operand

    return rule


def _check_updates(
    name: str,
    numbers: GatherDimensionNumbers,
    operand: ShapedArray,
    indices: ShapedArray,
    updates: ShapedArray,
) -> None:
    ndim = indices.ndim - 1 + len(numbers.offset_dims)
    if updates.ndim != ndim:
        fail(
            ShapeError,
            f"{name}: updates must have {ndim} dims ({indices.ndim - 1} of indices and "
            f"{len(numbers.offset_dims)} of the windows), got {updates}",
        )
    sizes = window_sizes(numbers, operand.shape, updates.shape)
    expected = stack_shape(numbers, indices.shape, sizes)
    if updates.shape != expected:
        fail(
            ShapeError,
            f"{name}: updates must have shape {expected}, as indices are {indices} and windows of "
            f"{sizes} are written to {operand}; got {updates}",
        )
    for d in window_dims(numbers, operand.ndim):
        if sizes[d] > operand.shape[d]:
            fail(
                ShapeError,
                f"{name}: windows of {sizes} do not fit dim {d} of the operand {operand} "
                f"(updates are {updates})",
            )


def scatter_impl(combine: Callable[..., None], in_float32: bool = False) -> Callable[..., Any]:
    """The impl of a scatter: `combine(xp, out, index, values)` changes `out` in the stack's order.

    With `in_float32`, 16-bit floats are accumulated in float32 and rounded once.
    """

    def impl(
        xp: Any,
        operand: Any,
        indices: Any,
        updates: Any,
        *,
        dimension_numbers: ScatterDimensionNumbers,
        mode: GatherScatterMode,
        **_: Any,
    ) -> Any:
        shape = updates.shape
        small = in_float32 and operand.dtype in (dtypes.bfloat16, np.float16)
        out = xp.array(operand, np.float32 if small else operand.dtype, copy=True)
        if 0 in shape or 0 in operand.shape:
            return xp.array(operand, copy=True)
        numbers = as_gather(dimension_numbers)
        where, fits = positions(xp, indices, operand.shape, shape, numbers)
        index = [xp.broadcast_to(position, shape) for position in where]
        if mode is not GatherScatterMode.CLIP:
            kept = xp.broadcast_to(fits, shape)
            index, updates = [position[kept] for position in index], updates[kept]
        with np.errstate(all="ignore"):
            combine(xp, out, tuple(index), updates.astype(out.dtype))
            return out.astype(operand.dtype)

    return impl


def scatter_batch(get_prim: Callable[[], Primitive]) -> Callable[..., Any]:
    """The batch rule of a scatter; `get_prim` names the primitive, which the rule belongs to."""

    def rule(axis: Any, operands: Any, at: Any, *, dimension_numbers: Any, **params: Any) -> Any:
        operand, indices, updates = operands
        operand = to_front(operand, at[0], axis.size)
        updates = to_front(updates, at[2], axis.size)
        if at[1] is None:
            numbers = with_window_dim(dimension_numbers)
        else:
            indices = move_dim(indices, at[1], 0)
            numbers = with_batch_dim(dimension_numbers)
        out = get_prim().bind(operand, indices, updates, dimension_numbers=numbers, **params)
        return out, 0

    return rule


def scatter_dims(
    operand: ShapedArray,
    indices: ShapedArray,
    updates: ShapedArray,
    *,
    dimension_numbers: ScatterDimensionNumbers,
    **_: Any,
) -> Any:
    """The dims rule of every scatter: dims that walk along, or span every window, may be split.

    Splitting the other dims of indices and updates would need the operand on one device only.
    """
    numbers = as_gather(dimension_numbers)
    shape = updates.shape
    in_operand, in_indices, in_updates = window_labels(numbers, operand.shape, indices.ndim, shape)
    return dims([in_operand, in_indices, in_updates], [_own(in_operand)])


def _own(labels: list[int]) -> list[int]:
    """The labels of the result; dims that must stay whole have labels of their own."""
    return [label if label >= 0 else label - 1000 for label in labels]
