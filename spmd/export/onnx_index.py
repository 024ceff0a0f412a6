"""Gather, scatter and dynamic slices as ONNX operators.

Every element that a window reads or writes has a place in the operand laid out in one row: the sum
over the operand's dims of position times stride. A gather is then `Gather` in that row, a scatter
`ScatterElements`. Whole rows along one dim, as of embedding tables, are `Gather` directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.util import inverse_permutation
from spmd.core.ir import Eqn
from spmd.export.onnx_graph import Graph, product, refused, rule
from spmd.export.onnx_rules import chosen
from spmd.lax.gather import default_fill
from spmd.lax.windows import (
    GatherDimensionNumbers,
    GatherScatterMode,
    as_gather,
    batch_dims,
    window_dims,
    window_sizes,
)

_FILL = GatherScatterMode.FILL_OR_DROP


def strides(shape: Sequence[int]) -> list[int]:
    """How far apart elements that are neighbours in each dim are in one row."""
    return [product(shape[d + 1 :]) for d in range(len(shape))]


class Places:
    """The places of a stack of windows' elements in the operand laid out in one row.

    `rows` are their numbers, in the stack's shape; `inside` says which windows lie inside, in a
    shape that broadcasts to it.
    """

    def __init__(
        self,
        g: Graph,
        indices: str,
        index_shape: Sequence[int],
        operand: Sequence[int],
        stack: Sequence[int],
        numbers: GatherDimensionNumbers,
    ):
        self.g, self.stack = g, stack
        sizes = window_sizes(numbers, operand, stack)
        batch = batch_dims(numbers, len(stack))
        steps = strides(operand)
        indices = g.cast(indices, np.int64)
        self.inside = g.scalar(True, np.bool_)
        rows = g.scalar(0, np.int64)
        for k, d in enumerate(numbers.start_index_map):
            start = g.op("Gather", indices, g.scalar(k, np.int64), axis=len(index_shape) - 1)
            start = g.spread(start, batch, stack, index_shape[:-1])
            last = g.size(operand[d] - sizes[d])
            fits = g.op("And", self._not_less(start, g.size(0)), self._not_less(last, start))
            self.inside = g.op("And", self.inside, fits)
            start = g.op("Max", g.op("Min", start, last), g.size(0))
            rows = g.op("Add", rows, g.op("Mul", start, g.size(steps[d])))
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        for d, at in pairs:
            rows = g.op("Add", rows, self._walk(batch[at], operand[d], steps[d]))
        for at, d in zip(numbers.offset_dims, window_dims(numbers, len(operand)), strict=True):
            rows = g.op("Add", rows, self._walk(at, stack[at], steps[d]))
        self.rows = g.expand(rows, stack)

    def _not_less(self, x: str, y: str) -> str:
        return self.g.op("GreaterOrEqual", x, y)

    def _walk(self, at: int, count: int, step: int) -> str:
        """0, step, 2 step, ... along one dim of the stack."""
        numbers = self.g.op("Mul", self.g.count(count, np.int64), self.g.size(step))
        return self.g.spread(numbers, (at,), self.stack, (count,))


# ---- gather ------------------------------------------------------------------------------------


@rule("gather")
def _gather(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    operand, indices = (v.aval for v in eqn.invars)
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    if not operand.size:
        raise refused(eqn, f"from an empty array ({operand}) has no form in ONNX")
    if takes_whole_rows(eqn):
        return _take(g, eqn, xs)
    places = Places(g, xs[1], indices.shape, operand.shape, out.shape, numbers)
    row = g.reshape(xs[0], (operand.size,))
    found = g.op("Gather", row, places.rows, axis=0)
    return _filled(g, eqn, found, places.inside)


def _filled(g: Graph, eqn: Eqn, found: str, inside: str) -> str:
    if eqn.params["mode"] is not _FILL:
        return found
    dtype, fill = eqn.outvars[0].aval.dtype, eqn.params["fill_value"]
    fill = default_fill(dtype) if fill is None else fill
    return chosen(g, dtype, inside, found, g.scalar(fill, dtype))


def takes_whole_rows(eqn: Eqn) -> bool:
    """Whether a gather takes whole slices at positions along one dim, as an embedding does."""
    numbers: Any = eqn.params["dimension_numbers"]
    operand = eqn.invars[0].aval
    axes = numbers.start_index_map
    if len(axes) != 1 or numbers.collapsed_slice_dims != axes or numbers.operand_batching_dims:
        return False
    sizes = eqn.params["slice_sizes"]
    return all(d in axes or sizes[d] == operand.shape[d] for d in range(operand.ndim))


def _take(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    operand, indices = (v.aval for v in eqn.invars)
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    (axis,) = numbers.start_index_map
    x, index = xs[0], g.cast(g.op("Squeeze", xs[1], g.ints(indices.ndim - 1)), np.int64)
    last = g.size(operand.shape[axis] - 1)
    zero = g.scalar(0, np.int64)
    safe = g.op("Max", g.op("Min", index, last), zero)
    found = g.op("Gather", x, safe, axis=int(axis))
    # Gather puts the indices' dims where the axis was; they belong to the batch dims.
    batch = batch_dims(numbers, out.ndim)
    window = [d for d in range(out.ndim) if d not in batch]
    order = [*window[:axis], *batch, *window[axis:]]
    found = g.transpose(found, inverse_permutation(order))
    not_low, not_high = g.op("GreaterOrEqual", index, zero), g.op("LessOrEqual", index, last)
    inside = g.spread(g.op("And", not_low, not_high), batch, out.shape, indices.shape[:-1])
    return _filled(g, eqn, found, inside)


# ---- scatter -----------------------------------------------------------------------------------

_COMBINE = {
    "scatter": "none", "scatter_add": "add", "scatter_mul": "mul", "scatter_max": "max",
    "scatter_min": "min",
}  # fmt: skip


@rule(*_COMBINE)
def _scatter(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    operand, indices, updates = (v.aval for v in eqn.invars)
    numbers = as_gather(eqn.params["dimension_numbers"])
    places = Places(g, xs[1], indices.shape, operand.shape, updates.shape, numbers)
    combine = _COMBINE[eqn.prim.name]
    if not operand.size or not updates.size:
        return g.op("Identity", xs[0])
    rows = places.rows
    if eqn.params["mode"] is not GatherScatterMode.CLIP:
        # A window that does not fit goes to a place behind the operand, which is cut off again.
        rows = g.op("Where", places.inside, rows, g.size(operand.size))
    return _scattered(g, xs[0], operand, rows, xs[2], updates, combine)


def _scattered(
    g: Graph, x: str, operand: Any, rows: str, values: str, updates: Any, combine: str
) -> str:
    """The operand with `values` at `rows`, one place longer while that is done."""
    dtype = operand.dtype
    if dtypes.is_bool(dtype):
        dtype = np.dtype(np.int32)
    elif dtypes.is_float(dtype) and dtype.itemsize == 2 and combine != "none":
        dtype = np.dtype(np.float32)
    if dtype != operand.dtype:
        x, values = g.cast(x, dtype), g.cast(values, dtype)
    row = g.reshape(x, (operand.size,))
    row = g.op("Concat", row, g.reshape(g.scalar(0, dtype), (1,)), axis=0)
    flat = [g.reshape(v, (updates.size,)) for v in (rows, values)]
    row = g.op("ScatterElements", row, *flat, axis=0, reduction=combine)
    row = g.op("Slice", row, g.ints(0), g.ints(operand.size), g.ints(0))
    out = g.reshape(row, operand.shape)
    return out if dtype == operand.dtype else g.cast(out, operand.dtype)


# ---- dynamic slices ----------------------------------------------------------------------------


def _starts(g: Graph, starts: Sequence[str], room: Sequence[int]) -> str:
    """The start indices as one vector, moved so that the slice lies inside."""
    one = [g.reshape(g.cast(s, np.int64), (1,)) for s in starts]
    vector = g.op("Concat", *one, axis=0)
    return g.op("Max", g.op("Min", vector, g.ints(*room)), g.ints(*[0] * len(room)))


@rule("dynamic_slice")
def _dynamic_slice(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    shape, sizes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if not shape:
        return g.op("Identity", xs[0])
    starts = _starts(g, xs[1:], [n - s for n, s in zip(shape, sizes, strict=True)])
    return g.op("Slice", xs[0], starts, g.op("Add", starts, g.ints(*sizes)))


@rule("dynamic_update_slice")
def _dynamic_update_slice(g: Graph, eqn: Eqn, xs: list[str]) -> str:
    operand, update = (v.aval for v in eqn.invars[:2])
    if not operand.shape or not update.size:
        return g.op("Identity", xs[0] if operand.shape else xs[1])
    starts = _starts(g, xs[2:], [n - s for n, s in zip(operand.shape, update.shape, strict=True)])
    rows = g.scalar(0, np.int64)
    for d, step in enumerate(strides(operand.shape)):
        start = g.op("Gather", starts, g.scalar(d, np.int64), axis=0)
        here = g.op("Add", g.count(update.shape[d], np.int64), start)
        here = g.op("Mul", here, g.size(step))
        rows = g.op("Add", rows, g.spread(here, (d,), update.shape, (update.shape[d],)))
    return _scattered(g, xs[0], operand, rows, xs[1], update, "none")
