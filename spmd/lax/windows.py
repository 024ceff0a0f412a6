"""The base of gather and scatter: windows of an array, placed by index vectors.

Both move windows between an *operand* and a *stack* of windows (gather's result, scatter's
updates). A dim of the stack either runs over the index vectors (a *batch* dim) or inside a window
(an *offset* dim). Element `s` of the stack belongs to the operand's element

    position(s)[d] = start(s)[d] + offset(s)[d]

where `start` is read from the index array at s's batch dims and `offset` is s at its offset dims.
`positions` computes exactly this; gather reads there and scatter writes there.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeArgumentError, ShapeError
from spmd.core.aval import ShapedArray
from spmd.lax.families import fail

# ---- dimension numbers -------------------------------------------------------------------------


class GatherDimensionNumbers(NamedTuple):
    """The corresponding dims of operand, index array and result in a gather.

    The last dim of the index array holds the index vectors.

    * `offset_dims`: dims of the result that run inside a window.
    * `collapsed_slice_dims`: operand dims in which windows have size 1 and no result dim.
    * `start_index_map`: the operand dim that each component of an index vector addresses.
    * `operand_batching_dims`, `start_indices_batching_dims`: operand dims that walk along with
      dims of the index array, pair by pair.
    """

    offset_dims: tuple[int, ...]
    collapsed_slice_dims: tuple[int, ...]
    start_index_map: tuple[int, ...]
    operand_batching_dims: tuple[int, ...] = ()
    start_indices_batching_dims: tuple[int, ...] = ()


class ScatterDimensionNumbers(NamedTuple):
    """The corresponding dims of operand, index array and updates in a scatter.

    The mirror image of `GatherDimensionNumbers`, field by field.
    """

    update_window_dims: tuple[int, ...]
    inserted_window_dims: tuple[int, ...]
    scatter_dims_to_operand_dims: tuple[int, ...]
    operand_batching_dims: tuple[int, ...] = ()
    scatter_indices_batching_dims: tuple[int, ...] = ()


def as_gather(numbers: ScatterDimensionNumbers) -> GatherDimensionNumbers:
    """The gather that reads where a scatter writes."""
    return GatherDimensionNumbers(*numbers)


def as_scatter(numbers: GatherDimensionNumbers) -> ScatterDimensionNumbers:
    """The scatter that writes where a gather reads."""
    return ScatterDimensionNumbers(*numbers)


def normalized(numbers: Any) -> Any:
    """Dimension numbers with every field a tuple of Python integers, hence hashable."""
    return type(numbers)(*(tuple(int(d) for d in field) for field in numbers))


class GatherScatterMode(enum.Enum):
    """The treatment of a window that does not lie inside the operand.

    * `CLIP`: it is moved inside.
    * `FILL_OR_DROP`: a gathered one is filled with a constant, a scattered one is left out.
    * `PROMISE_IN_BOUNDS`: the caller promises that there is none. (Here: gather clips, scatter
      drops; gradients are then wrong.)
    """

    CLIP = enum.auto()
    FILL_OR_DROP = enum.auto()
    PROMISE_IN_BOUNDS = enum.auto()

    @staticmethod
    def from_any(mode: str | GatherScatterMode | None) -> GatherScatterMode:
        """The mode of a name: "clip", "fill", "drop", "promise_in_bounds"; None is "fill"."""
        if isinstance(mode, GatherScatterMode):
            return mode
        found = _MODES.get(mode)
        if found is None:
            names = ", ".join(repr(name) for name in _MODES if name)
            fail(ArgumentError, f"mode={mode!r} of a gather or scatter must be one of {names}")
        return found

    def __repr__(self) -> str:
        return f"GatherScatterMode.{self.name}"

    __str__ = __repr__


_MODES = {
    None: GatherScatterMode.FILL_OR_DROP,
    "fill": GatherScatterMode.FILL_OR_DROP,
    "drop": GatherScatterMode.FILL_OR_DROP,
    "clip": GatherScatterMode.CLIP,
    "promise_in_bounds": GatherScatterMode.PROMISE_IN_BOUNDS,
}

# ---- shapes ------------------------------------------------------------------------------------


def stack_shape(
    numbers: GatherDimensionNumbers, indices: Sequence[int], slice_sizes: Sequence[int]
) -> tuple[int, ...]:
    """The shape of the stack of windows, from the index array's shape and the windows' sizes."""
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    inside = iter([s for d, s in enumerate(slice_sizes) if d not in gone])
    batch = iter(indices[:-1])
    ndim = len(indices) - 1 + len(numbers.offset_dims)
    return tuple(next(inside if d in numbers.offset_dims else batch) for d in range(ndim))


def window_sizes(
    numbers: GatherDimensionNumbers, operand: Sequence[int], stack: Sequence[int]
) -> tuple[int, ...]:
    """The sizes of the windows in each operand dim, from the stack's shape."""
    inside = iter([stack[d] for d in numbers.offset_dims])
    sizes = []
    for d, size in enumerate(operand):
        if d in numbers.collapsed_slice_dims:
            sizes.append(1)
        elif d in numbers.operand_batching_dims:
            sizes.append(min(1, size))
        else:
            sizes.append(next(inside))
    return tuple(sizes)


def batch_dims(numbers: GatherDimensionNumbers, stack_ndim: int) -> list[int]:
    """The dims of the stack that run over the index array's dims but its last, in order."""
    return [d for d in range(stack_ndim) if d not in numbers.offset_dims]


def window_dims(numbers: GatherDimensionNumbers, operand_ndim: int) -> list[int]:
    """The operand dims that the stack's offset dims run over, in order."""
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    return [d for d in range(operand_ndim) if d not in gone]


# ---- the law -----------------------------------------------------------------------------------


def check_numbers(
    name: str,
    given: GatherDimensionNumbers | ScatterDimensionNumbers,
    operand: ShapedArray,
    indices: ShapedArray,
    stack_ndim: int,
) -> None:
    """Raise an error of dimension numbers that do not fit the arrays, of shapes or of dtypes."""
    fields = type(given)._fields
    offset, collapsed, index_map, operand_batch, indices_batch = given
    if not dtypes.is_integer(indices.dtype):
        fail(DtypeArgumentError, f"{name}: indices must be integers, got {indices}")
    if indices.ndim == 0:
        fail(ShapeError, f"{name}: indices need a last dim that holds the index vectors")
    _check_dims(name, fields[0], offset, stack_ndim, ordered=True)
    _check_dims(name, fields[1], collapsed, operand.ndim, ordered=True)
    _check_dims(name, fields[2], index_map, operand.ndim)
    _check_dims(name, fields[3], operand_batch, operand.ndim, ordered=True)
    _check_dims(name, fields[4], indices_batch, indices.ndim - 1)
    for k, field in ((1, collapsed), (2, index_map)):
        if set(field) & set(operand_batch):
            fail(
                ShapeError,
                f"{name}: {fields[k]}={field} and {fields[3]}={operand_batch} must not share dims",
            )
    if len(index_map) != indices.shape[-1]:
        fail(
            ShapeError,
            f"{name}: {fields[2]}={index_map} has {len(index_map)} entries, but the index vectors "
            f"(the last dim of indices, {indices}) have {indices.shape[-1]}",
        )
    accounted = len(offset) + len(collapsed) + len(operand_batch)
    if accounted != operand.ndim:
        fail(
            ShapeError,
            f"{name}: {fields[0]}={offset}, {fields[1]}={collapsed} and {fields[3]}="
            f"{operand_batch} account for {accounted} operand dims; {operand} has {operand.ndim}",
        )
    walked = [operand.shape[d] for d in operand_batch]
    if walked != [indices.shape[d] for d in indices_batch]:
        fail(
            ShapeError,
            f"{name}: dims {operand_batch} of the operand {operand} must be as large as dims "
            f"{indices_batch} of the indices {indices}, which they walk along with",
        )


def _check_dims(
    name: str, field: str, given: Sequence[int], ndim: int, ordered: bool = False
) -> None:
    good = len(set(given)) == len(given) and all(0 <= d < ndim for d in given)
    if not good or (ordered and list(given) != sorted(given)):
        order = "increasing" if ordered else "different"
        fail(ShapeError, f"{name}: {field}={tuple(given)} must be {order} dims in range({ndim})")


# ---- the meaning -------------------------------------------------------------------------------


def starts_as_int64(xp: Any, indices: Any) -> Any:
    """Index values of any integer dtype as int64; too large values stay out of bounds."""
    if indices.dtype == np.uint64:
        indices = xp.minimum(indices, np.uint64(np.iinfo(np.int64).max))
    return indices.astype(np.int64)


def positions(
    xp: Any,
    indices: Any,
    operand_shape: Sequence[int],
    stack: Sequence[int],
    numbers: GatherDimensionNumbers,
) -> tuple[list[Any], Any]:
    """The position in the operand of each element of the stack, and whether its window fits.

    Returns one index array per operand dim, each broadcastable to the shape of the stack and moved
    inside the operand (`CLIP`), and the mask of the elements whose window did not need that.
    """
    ndim = len(stack)
    sizes = window_sizes(numbers, operand_shape, stack)
    batch = batch_dims(numbers, ndim)
    offset_of = dict(
        zip(window_dims(numbers, len(operand_shape)), numbers.offset_dims, strict=True)
    )
    walks = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    starts = starts_as_int64(xp, indices)
    fits = xp.ones((1,) * ndim, np.bool_)
    where = []
    for d, size in enumerate(operand_shape):
        position = xp.zeros((1,) * ndim, np.int64)
        if d in numbers.start_index_map:
            start = starts[..., numbers.start_index_map.index(d)]
            start = xp.expand_dims(start, tuple(numbers.offset_dims))
            last = size - sizes[d]
            fits = fits & (start >= 0) & (start <= last)
            position = xp.clip(start, 0, max(last, 0))
        if d in walks:
            position = position + _along(xp, batch[walks[d]], stack)
        if d in offset_of:
            position = position + _along(xp, offset_of[d], stack)
        where.append(position)
    return where, fits


def _along(xp: Any, dim: int, shape: Sequence[int]) -> Any:
    """0, 1, 2, ... along one dim of a shape, size 1 in the others."""
    sizes = [1] * len(shape)
    sizes[dim] = shape[dim]
    return xp.reshape(xp.arange(shape[dim], dtype=np.int64), sizes)


# ---- batching ----------------------------------------------------------------------------------


def with_window_dim(numbers: Any) -> Any:
    """Numbers for an operand and a stack with a new first dim, which every window spans."""
    offset, collapsed, index_map, operand_batch, indices_batch = numbers
    return type(numbers)(
        (0, *_behind(offset)),
        _behind(collapsed),
        _behind(index_map),
        _behind(operand_batch),
        indices_batch,
    )


def with_batch_dim(numbers: Any) -> Any:
    """Numbers for operand, indices and stack with a new first dim along which they walk."""
    offset, collapsed, index_map, operand_batch, indices_batch = numbers
    return type(numbers)(
        _behind(offset),
        _behind(collapsed),
        _behind(index_map),
        (0, *_behind(operand_batch)),
        (0, *_behind(indices_batch)),
    )


def with_indices_dim(numbers: Any) -> Any:
    """Numbers for indices and stack with a new first dim; the operand has none."""
    offset, collapsed, index_map, operand_batch, indices_batch = numbers
    return type(numbers)(
        _behind(offset), collapsed, index_map, operand_batch, _behind(indices_batch)
    )


def _behind(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(d + 1 for d in numbers)


# ---- dims --------------------------------------------------------------------------------------


def window_labels(
    numbers: GatherDimensionNumbers, operand: Sequence[int], indices_ndim: int, stack: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Labels of the dims of operand, indices and stack: equal where they may be split alike.

    A stack dim shares its label with the index array's dim that it runs over (and with the operand
    dim that walks along), or with an operand dim that every window spans whole.
    """
    batch = batch_dims(numbers, len(stack))
    in_stack = list(range(len(stack)))
    in_indices = [*batch, -1]
    in_operand = [-2 - d for d in range(len(operand))]
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for d, along in pairs:
        in_operand[d] = batch[along]
    spans = zip(window_dims(numbers, len(operand)), numbers.offset_dims, strict=True)
    for d, inside in spans:
        if stack[inside] == operand[d] and d not in numbers.start_index_map:
            in_operand[d] = inside
        else:
            in_stack[inside] = -2 - len(operand) - inside
    assert len(in_indices) == indices_ndim
    return in_operand, in_indices, in_stack
