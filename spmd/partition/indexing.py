"""Indexing along a split dim: each device reads or writes the rows that it has.

A device counts indices from its own first row, so that rows of others are out of its bounds: a read
of one gives 0, a write is dropped. A read is then a sum over the devices; a write needs no exchange
at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.record import replace
from spmd.collectives.axis import axis_index
from spmd.core.aval import typeof
from spmd.core.ir import ClosedJaxpr, Eqn, Literal
from spmd.core.primitive import Dims, Primitive
from spmd.core.rewrite import close
from spmd.core.structural import broadcast_in_dim
from spmd.lax.array import broadcasted_iota, full, iota
from spmd.lax.concatenate import concatenate
from spmd.lax.convert import convert_element_type
from spmd.lax.dynamic import (
    dynamic_slice,
    dynamic_slice_p,
    dynamic_update_slice,
    dynamic_update_slice_p,
)
from spmd.lax.gather import gather, gather_p, scatter_add_p
from spmd.lax.logic import bitwise_and, clamp, eq, ge, lt, select
from spmd.lax.scatter import scatter_max_p, scatter_min_p, scatter_mul_p, scatter_p
from spmd.lax.slicing import pad, slice_in_dim, slice_p
from spmd.lax.windows import GatherDimensionNumbers, GatherScatterMode, as_gather, window_sizes

SCATTERS = (scatter_p, scatter_add_p, scatter_mul_p, scatter_min_p, scatter_max_p)
SLICES = (slice_p, dynamic_slice_p)
# The label of operand dim d is this and d, where rows are read or written one by one.
ROWS = 500
# An update of this share of an array has few rows.
_FEW = 4

Axes = tuple[Any, ...]
Sizes = Mapping[Any, int]
Numbers = GatherDimensionNumbers


def indexed_rule(eqn: Eqn, found: Dims) -> Dims:
    """The rule of an equation that indexes, with labels for the dims that it indexes."""
    operand = eqn.invars[0].aval
    labels, results = list(found.operands[0]), [list(r) for r in found.results]
    if eqn.prim in SCATTERS:
        numbers = as_gather(eqn.params["dimension_numbers"])
        sizes = window_sizes(numbers, operand.shape, eqn.invars[2].aval.shape)
        for d in _single_rows(numbers, sizes):
            labels[d] = results[0][d] = ROWS + d
        reduces = "add" if eqn.prim is scatter_add_p else found.reduces
        return _with(found, labels, results, reduces)
    if eqn.prim is dynamic_update_slice_p:
        for d, size in enumerate(eqn.invars[1].aval.shape):
            if size != operand.shape[d]:
                labels[d] = results[0][d] = ROWS + d
        return _with(found, labels, results, found.reduces)
    if dtypes.is_bool(operand.dtype) or operand.dtype.names:
        return found  # what is read could not be added up
    if eqn.prim is gather_p:
        sizes = eqn.params["slice_sizes"]
        read = _single_rows(eqn.params["dimension_numbers"], sizes)
    else:
        read = [d for d, label in enumerate(labels) if label < 0]
    for d in read:
        labels[d] = ROWS + d
    return _with(found, labels, results, "add")


def _single_rows(numbers: Numbers, sizes: Sequence[int]) -> list[int]:
    """The operand dims of which an index vector names one row."""
    return [d for d in numbers.start_index_map if sizes[d] == 1]


def _with(found: Dims, labels: Sequence[int], results: Any, reduces: str | None) -> Dims:
    operands = (tuple(labels), *found.operands[1:])
    return replace(found, operands=operands, results=tuple(map(tuple, results)), reduces=reduces)


def split_rows(rule: Dims, axes: Mapping[int, Axes]) -> dict[int, Axes]:
    """The dims whose rows are read or written one by one, and are split, with their axes."""
    labels = enumerate(rule.operands[0]) if rule.operands else ()
    return {d: axes[label] for d, label in labels if label >= ROWS and axes.get(label)}


def write_indexing(
    eqn: Eqn, parts: Sequence[Any], rows: Mapping[int, Axes], params: dict[str, Any], sizes: Sizes
) -> Any:
    """The equation on a device's rows; what it reads is a term of the sum over the devices.

    `rows` are the split dims whose rows are named, `params` those of the equation on parts.
    """
    return _WRITERS[eqn.prim](eqn, parts, rows, params, sizes)


def _first_row(axes: Axes, size: int) -> Any:
    """The number of a device's first row, of the `size` that it has."""
    return axis_index(axes) * np.int32(size)


def _count(axes: Axes, sizes: Sizes) -> int:
    return math.prod(sizes[a] for a in axes)


# ---- gather and scatter ------------------------------------------------------------------------


def _own_indices(
    eqn: Eqn,
    operand: Any,
    indices: Any,
    rows: Mapping[int, Axes],
    windows: Sequence[int],
    sizes: Sizes,
) -> tuple[Any, Any]:
    """Index vectors counted from the device's rows, and which windows fit the whole operand.

    An index beyond the whole is so on all devices, though the last may have rows that are too many.
    """
    numbers = _numbers(eqn)
    whole = eqn.invars[0].aval.shape
    # A read that is promised to be in bounds is moved inside, too; such a write is dropped.
    mode, reads = eqn.params["mode"], eqn.prim is gather_p
    clips = mode is not GatherScatterMode.FILL_OR_DROP if reads else mode is GatherScatterMode.CLIP
    last = typeof(indices).ndim - 1
    wide = np.dtype(np.int64 if typeof(indices).dtype.itemsize == 8 else np.int32)
    given = convert_element_type(indices, wide)
    columns, fits = [], None
    for k, d in enumerate(numbers.start_index_map):
        column = slice_in_dim(given, k, k + 1, 1, last)
        most = wide.type(whole[d] - windows[d])
        if clips:
            column = clamp(wide.type(0), column, most)
        inside = bitwise_and(ge(column, wide.type(0)), lt(column, wide.type(most + 1)))
        fits = inside if fits is None else bitwise_and(fits, inside)
        if d in rows:
            if whole[d] % _count(rows[d], sizes):
                column = select(inside, column, full(typeof(column).shape, -1, wide))
            first = convert_element_type(_first_row(rows[d], typeof(operand).shape[d]), wide)
            column = column - first
        columns.append(column)
    return concatenate(columns, last), fits


def _numbers(eqn: Eqn) -> Numbers:
    found = eqn.params["dimension_numbers"]
    return found if eqn.prim is gather_p else as_gather(found)


def _gather(
    eqn: Eqn, parts: Sequence[Any], rows: Mapping[int, Axes], params: dict[str, Any], sizes: Sizes
) -> Any:
    operand, indices = parts
    numbers, windows = _numbers(eqn), params["slice_sizes"]
    own, fits = _own_indices(eqn, operand, indices, rows, windows, sizes)
    fill = GatherScatterMode.FILL_OR_DROP
    out = gather(operand, own, numbers, windows, mode=fill, fill_value=0)
    if params["mode"] is not fill or params["fill_value"] in (0, None):
        return out
    # Windows that fit nowhere are filled by one device.
    aval = typeof(out)
    dims = [d for d in range(aval.ndim) if d not in numbers.offset_dims]
    over = tuple(a for axes in rows.values() for a in axes)
    value = dtypes.number(params["fill_value"], aval.dtype)
    is_first = eq(axis_index(over), np.int32(0))
    filled = select(is_first, full((), value, aval.dtype), full((), 0, aval.dtype))
    shape = typeof(fits).shape[:-1]
    where = broadcast_in_dim(fits.reshape(shape), aval.shape, dims)
    return select(where, out, broadcast_in_dim(filled, aval.shape, ()))


def _scatter(
    eqn: Eqn, parts: Sequence[Any], rows: Mapping[int, Axes], params: dict[str, Any], sizes: Sizes
) -> Any:
    operand, indices, updates = parts
    windows = window_sizes(_numbers(eqn), typeof(operand).shape, typeof(updates).shape)
    own, *_ = _own_indices(eqn, operand, indices, rows, windows, sizes)
    changed = {"mode": GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    return eqn.prim.bind(operand, own, updates, **(params | changed))


# ---- slices ------------------------------------------------------------------------------------


def _taken(x: Any, places: Any, d: int) -> Any:
    """Rows of `x` along dim d; 0 for places that it does not have."""
    shape = typeof(x).shape
    others = tuple(k for k in range(len(shape)) if k != d)
    numbers = Numbers(others, (d,), (d,))
    windows = [1 if k == d else size for k, size in enumerate(shape)]
    fill = GatherScatterMode.FILL_OR_DROP
    indices = broadcast_in_dim(places, (*typeof(places).shape, 1), (0,))
    return gather(x, indices, numbers, windows, mode=fill, fill_value=0)


def _slice(
    eqn: Eqn, parts: Sequence[Any], rows: Mapping[int, Axes], params: dict[str, Any], sizes: Sizes
) -> Any:
    (x,) = parts
    steps = params["strides"] or (1,) * typeof(x).ndim
    for d, axes in rows.items():
        start, stop, step = params["start_indices"][d], params["limit_indices"][d], steps[d]
        places = np.arange(start, stop, step, dtype=np.int32)
        x = _taken(x, places - _first_row(axes, typeof(x).shape[d]), d)
    kept = [d not in rows for d in range(typeof(x).ndim)]
    for d, size in enumerate(typeof(x).shape):
        whole = (params["start_indices"][d], params["limit_indices"][d], steps[d]) == (0, size, 1)
        if kept[d] and not whole:
            x = slice_in_dim(x, params["start_indices"][d], params["limit_indices"][d], steps[d], d)
    return x


def _dynamic_slice(
    eqn: Eqn, parts: Sequence[Any], rows: Mapping[int, Axes], params: dict[str, Any], sizes: Sizes
) -> Any:
    x, *starts = parts
    wanted = list(params["slice_sizes"])
    for d, axes in rows.items():
        here = typeof(x).shape[d]
        most = np.int32(eqn.invars[0].aval.shape[d] - wanted[d])
        start = clamp(np.int32(0), _start(starts[d]), most)
        places = iota(np.dtype(np.int32), wanted[d]) + (start - _first_row(axes, here))
        x = _taken(x, places, d)
        starts[d] = np.int32(0)
    return dynamic_slice(x, [_start(s) for s in starts], wanted)


def _start(x: Any) -> Any:
    return convert_element_type(x, np.dtype(np.int32))


def _update(
    eqn: Eqn, parts: Sequence[Any], rows: Mapping[int, Axes], params: dict[str, Any], sizes: Sizes
) -> Any:
    """Each of the device's rows is one of the update's, or stays."""
    x, update, *starts = parts
    shape = typeof(x).shape
    starts = [_start(s) for s in starts]
    inside = None
    for d, axes in rows.items():
        count = typeof(update).shape[d]
        most = np.int32(eqn.invars[0].aval.shape[d] - count)
        start = clamp(np.int32(0), starts[d], most)
        index = np.dtype(np.int32)
        places = iota(index, shape[d]) + (_first_row(axes, shape[d]) - start)
        here = bitwise_and(ge(places, np.int32(0)), lt(places, np.int32(count)))
        update = _taken(update, places, d)
        starts[d] = np.int32(0)
        here = broadcast_in_dim(here, typeof(update).shape, (d,))
        inside = here if inside is None else bitwise_and(_taken_along(inside, update), here)
    region = dynamic_slice(x, starts, typeof(update).shape)
    return dynamic_update_slice(x, select(inside, update, region), starts)


def chosen_rows(eqn: Eqn, split: Sequence[Axes]) -> ClosedJaxpr | None:
    """An update at a fixed place, of much of a split dim, as a choice between two arrays.

    The update is padded, so that each of its rows goes where it belongs, from a device nearby.
    None for an update elsewhere, or of few rows, which all devices may as well have.
    """
    operand, update, *starts = (atom.aval for atom in eqn.invars)
    shape, sizes = operand.shape, update.shape
    cut = [d for d, size in enumerate(sizes) if size != shape[d]]
    if operand.explicit is not None or operand.dtype.names or _FEW * update.size < operand.size:
        return None
    if not any(split[d] for d in cut):
        return None
    given = [a.val for a in eqn.invars[2:] if isinstance(a, Literal)]
    if len(given) < len(starts):
        return None
    first = [min(max(int(a), 0), n - size) for a, n, size in zip(given, shape, sizes, strict=True)]

    def choose(x: Any, rows: Any) -> list[Any]:
        inside = None
        for d in cut:
            places = broadcasted_iota(np.dtype(np.int32), shape, d)
            last = np.int32(first[d] + sizes[d])
            here = bitwise_and(ge(places, np.int32(first[d])), lt(places, last))
            inside = here if inside is None else bitwise_and(inside, here)
        around = [(a, n - size - a, 0) for a, n, size in zip(first, shape, sizes, strict=True)]
        return [select(inside, pad(rows, np.zeros((), operand.dtype)[()], around), x)]

    avals = [aval.update(vma=frozenset(), sharding=None) for aval in (operand, update)]
    return close(choose, avals, "update", ("x", "rows"))


def _taken_along(mask: Any, like: Any) -> Any:
    """A mask that says the same for all rows of dims that have grown since."""
    have, shape = typeof(mask).shape, typeof(like).shape
    for d, (old, new) in enumerate(zip(have, shape, strict=True)):
        if old != new:
            row = slice_in_dim(mask, 0, 1, 1, d)
            mask = broadcast_in_dim(row, (*have[:d], new, *have[d + 1 :]), range(len(have)))
            have = typeof(mask).shape
    return mask


_WRITERS: dict[Primitive, Callable[..., Any]] = {
    gather_p: _gather,
    slice_p: _slice,
    dynamic_slice_p: _dynamic_slice,
    dynamic_update_slice_p: _update,
    **dict.fromkeys(SCATTERS, _scatter),
}
INDEXING = frozenset(_WRITERS)
