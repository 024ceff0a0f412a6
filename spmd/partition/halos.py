"""Windows along a split dim: slices, padding, pooling and convolutions with rows of the neighbours.

Row r of a result is made of the operand's rows from `r * stride + first` on. A device gets those
that it lacks, its *halos*, from the devices before and behind it, by one `ppermute` for each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.record import record, replace
from spmd.collectives.axis import axis_index
from spmd.collectives.ppermute import ppermute
from spmd.core.aval import typeof
from spmd.core.ir import Eqn
from spmd.core.primitive import Dims, Primitive
from spmd.core.structural import broadcast_in_dim
from spmd.lax.array import full, iota
from spmd.lax.concatenate import concatenate, concatenate_p
from spmd.lax.conv import conv_general_dilated_p
from spmd.lax.dynamic import dynamic_slice_in_dim
from spmd.lax.logic import bitwise_and, ge, lt, select
from spmd.lax.reduce_window import (
    reduce_window_max_p,
    reduce_window_min_p,
    reduce_window_sum_p,
)
from spmd.lax.slicing import pad, pad_p, slice_in_dim, slice_p
from spmd.partition.shifts import shifted

Axes = tuple[Any, ...]
Sizes = Mapping[Any, int]

# For a dim, by the number of the operand, how windows read it.
Windows = dict[int, dict[int, "Window"]]

# The label of operand dim d is this and d, where its rows are read by windows.
HALO = 400
# Halos may be this share of a dim; of larger ones the whole dim is as cheap.
_SHARE = 4
# Rows that go farther do so by one exchange, if they are at least this share of the other rows.
_FEW = 16


@record
class Window:
    """How the rows of a dim of a result read those of an operand's.

    `rows` and `results` are the sizes of both, `span` the rows that one result row reads. Between
    two rows of the operand there are `base - 1` rows of zeros; `first` and `stride` count these.
    A window that `is_summed` is read by the rows of dim `result_dim` of the second operand, and the
    result is a sum over these: the gradient of a convolution's kernel.
    """

    result_dim: int
    rows: int
    results: int
    first: int
    stride: int = 1
    span: int = 1
    base: int = 1
    is_summed: bool = False

    def is_small(self) -> bool:
        """Whether halos are few beside the rows."""
        moved = abs(self.first) + self.span - 1
        drift = abs(self.rows * self.base - self.results * self.stride)
        enough = self.results * _SHARE >= self.rows > 0  # few results are read as a sum
        return enough and _SHARE * max(moved, drift) <= self.rows * self.base

    def is_shift(self) -> bool:
        """Whether result rows are rows at a fixed distance, and neither are few of the others."""
        steps = self.stride, self.span, self.base
        enough = self.results * _FEW >= self.rows > 0 and self.rows * _FEW >= self.results
        return steps == (1, 1, 1) and not self.is_summed and enough

    def parts(self, count: int) -> tuple[int, int]:
        """The rows of an operand's and of a result's part on one of `count` devices."""
        return -(-self.rows // count), -(-self.results // count)

    def halos(self, count: int) -> tuple[int, int] | None:
        """The rows that a device lacks before and behind its own; None if that differs too much."""
        own, made = self.parts(count)
        if self.base > 1:
            if made * self.stride != own * self.base or self.rows % count:
                return None
            before = max(0, -(self.first // self.base))
            end = (made - 1) * self.stride + self.first + self.span
            return before, max(0, -(-end // self.base) - own)
        starts = [self.start(k, count) for k in range(count) if k * made < self.results]
        need = (made - 1) * self.stride + self.span
        return max(0, -min(starts)), max(0, max(starts) + need - own)

    def start(self, k: int, count: int) -> int:
        """The first row that device k reads, counted from its own first row."""
        own, made = self.parts(count)
        return k * (made * self.stride - own) + self.first

    def exchanges(self, count: int) -> tuple[int, int]:
        """How many permutes the halos take, and how many rows these move; (-1, 0) if impossible."""
        found = self.halos(count)
        own = self.parts(count)[0]
        if found is None or max(found) > (count - 1) * own:
            return -1, 0
        return sum(-(-rows // own) for rows in found), sum(found)


# ---- which dims --------------------------------------------------------------------------------


def windows_of(eqn: Eqn) -> Windows:
    """The dims of which windows are read, that halos may split, each with its operands' windows."""
    find = _WINDOWS.get(eqn.prim)
    if find is None:
        return {}
    out = eqn.outvars[0].aval.shape
    if eqn.prim is concatenate_p:
        return find(eqn, out)
    found = find(eqn, eqn.invars[0].aval.shape, out)
    shifts = eqn.prim in (pad_p, slice_p)
    return {
        d: {0: window}
        for d, window in found.items()
        if window.is_small() or (shifts and window.is_shift())
    }


def are_far(windows: Mapping[int, Window]) -> bool:
    """Whether one exchange brings the rows that windows of a dim read, not a permute each."""
    return not all(window.is_small() for window in windows.values())


def halo_rule(found: Dims, windows: Windows) -> Dims:
    """The rule of an equation, with labels for the dims that halos may split."""
    if not windows:
        return found
    operands, result = list(map(list, found.operands)), list(found.results[0])
    for d, by_operand in windows.items():
        for k, window in by_operand.items():
            read_by = operands[1] if window.is_summed else result
            operands[k][d] = read_by[window.result_dim] = HALO + d
    results = (tuple(result), *found.results[1:])
    return replace(found, operands=tuple(map(tuple, operands)), results=results)


def _of_concatenation(eqn: Eqn, out: Sequence[int]) -> Windows:
    """Large operands are windows of themselves, padded; small ones are read whole."""
    d, place, found = eqn.params["dimension"], 0, {}
    for k, atom in enumerate(eqn.invars):
        rows = atom.aval.shape[d]
        window = Window(d, rows, out[d], -place)
        place += rows
        if window.is_shift():
            found[k] = window
    return {d: found} if found else {}


def _of_slice(eqn: Eqn, shape: Sequence[int], out: Sequence[int]) -> dict[int, Window]:
    params = eqn.params
    steps = params["strides"] or (1,) * len(shape)
    return {
        d: Window(d, size, out[d], params["start_indices"][d], steps[d])
        for d, size in enumerate(shape)
        if out[d] != size
    }


def _of_pad(eqn: Eqn, shape: Sequence[int], out: Sequence[int]) -> dict[int, Window]:
    return {
        d: Window(d, shape[d], out[d], -low)
        for d, (low, high, interior) in enumerate(eqn.params["padding_config"])
        if (low or high) and not interior
    }


def _of_pooling(eqn: Eqn, shape: Sequence[int], out: Sequence[int]) -> dict[int, Window]:
    windows = eqn.params["windows"]
    spans = windows.spans()
    return {
        d: Window(
            d,
            size,
            out[d],
            -windows.padding[d][0],
            windows.strides[d],
            spans[d],
            windows.base_dilation[d],
        )
        for d, size in enumerate(shape)
        if (spans[d], out[d]) != (1, size)
    }


def _of_convolution(eqn: Eqn, shape: Sequence[int], out: Sequence[int]) -> dict[int, Window]:
    """The windows of small kernels; of kernels as large as the operand, what their rows read."""
    params, kernel = eqn.params, eqn.invars[1].aval.shape
    lhs, rhs, result = params["dimension_numbers"]
    found = {}
    for k, (d, w, r) in enumerate(zip(lhs[2:], rhs[2:], result[2:], strict=True)):
        low, base = params["padding"][k][0], params["lhs_dilation"][k]
        stride, dilation = params["window_strides"][k], params["rhs_dilation"][k]
        span, reach = (kernel[w] - 1) * dilation + 1, (out[r] - 1) * stride + 1
        if kernel[w] <= out[r]:
            if params["batch_group_count"] == 1:
                found[d] = Window(r, shape[d], out[r], -low, stride, span, base)
        else:
            found[d] = Window(w, shape[d], kernel[w], -low, dilation, reach, base, True)
    return found


_WINDOWS: dict[Primitive, Callable[..., Any]] = {
    concatenate_p: _of_concatenation,
    conv_general_dilated_p: _of_convolution,
    pad_p: _of_pad,
    reduce_window_max_p: _of_pooling,
    reduce_window_min_p: _of_pooling,
    reduce_window_sum_p: _of_pooling,
    slice_p: _of_slice,
}


# ---- writing -----------------------------------------------------------------------------------


def write_concatenation(
    eqn: Eqn, parts: Sequence[Any], split: Mapping[int, Axes], sizes: Sizes
) -> Any:
    """A device's part of joined operands: each gives the rows that it has there."""
    ((d, axes),) = split.items()
    windows = windows_of(eqn)[d]
    if are_far(windows):
        places = itertools.accumulate([atom.aval.shape[d] for atom in eqn.invars], initial=0)
        rows = eqn.outvars[0].aval.shape[d]
        pairs = zip(eqn.invars, places, strict=False)
        shifts = [Window(d, atom.aval.shape[d], rows, -place) for atom, place in pairs]
        return shifted(parts, shifts, [k in windows for k in range(len(parts))], d, axes, sizes)
    rows = eqn.outvars[0].aval.shape[d]
    made = -(-rows // math.prod(sizes[a] for a in axes))
    numbers = iota(np.dtype(np.int32), made) + axis_index(axes) * np.int32(made)
    place, out = 0, None
    for k, (x, atom) in enumerate(zip(parts, eqn.invars, strict=True)):
        size = atom.aval.shape[d]
        zero = np.zeros((), typeof(x).dtype)[()]
        if k in windows:
            x, _ = _rows_of_windows(x, d, axes, windows[k], zero, sizes)
        else:
            config = [(made, made, 0) if n == d else (0, 0, 0) for n in range(typeof(x).ndim)]
            start = axis_index(axes) * np.int32(made) + np.int32(made - place)
            x = dynamic_slice_in_dim(pad(x, zero, config), start, made, d)
        if out is None:
            out = x
        else:
            behind = broadcast_in_dim(ge(numbers, np.int32(place)), typeof(x).shape, (d,))
            out = select(behind, x, out)
        place += size
    return out


def with_halos(
    eqn: Eqn,
    parts: Sequence[Any],
    windows: Windows,
    split: Mapping[int, Axes],
    params: dict[str, Any],
    sizes: Sizes,
) -> tuple[list[Any], dict[str, Any]]:
    """Operands with the rows that the device's part of the result is made of, and parameters.

    `split` are the dims that halos split, with their axes.
    """
    x, *rest = parts
    fill = _fill(eqn.prim, rest, typeof(x).dtype)
    for d, axes in split.items():
        window, pads = windows[d][0], (0, 0)
        made = window.parts(math.prod(sizes[a] for a in axes))[1]
        if are_far(windows[d]):
            x = shifted([x], [window], [True], d, axes, sizes)
            if fill is not None:
                first_row = axis_index(axes) * np.int32(made) + np.int32(window.first)
                x = _filled(x, d, first_row, window.rows, fill)
        else:
            x, pads = _rows_of_windows(x, d, axes, window, fill, sizes)
        params = _PARAMS[eqn.prim](params, d, pads, made)
    return [x, *rest], params


# The neutral element of each operator that reduces.
NEUTRAL: dict[str, Callable[[np.dtype], Any]] = {
    "add": lambda dtype: np.zeros((), dtype)[()],
    "and": lambda dtype: ~np.zeros((), dtype)[()],
    "max": lambda dtype: dtypes.min_value(dtype)[()],
    "min": lambda dtype: dtypes.max_value(dtype)[()],
    "mul": lambda dtype: np.ones((), dtype)[()],
    "or": lambda dtype: np.zeros((), dtype)[()],
    "xor": lambda dtype: np.zeros((), dtype)[()],
}
_OPERATORS = {reduce_window_max_p: "max", reduce_window_min_p: "min"}


def _fill(prim: Primitive, rest: Sequence[Any], dtype: np.dtype) -> Any:
    """The value that windows read beyond the ends of a dim; None where they read none there."""
    if prim is slice_p:
        return None
    return rest[0] if prim is pad_p else NEUTRAL[_OPERATORS.get(prim, "add")](dtype)


def _rows_of_windows(
    x: Any, d: int, axes: Axes, window: Window, fill: Any, sizes: Sizes
) -> tuple[Any, tuple[int, int]]:
    """The rows that a device's results are made of, and the padding that is left to do."""
    count = math.prod(sizes[a] for a in axes)
    own, made = window.parts(count)
    found = window.halos(count)
    assert found is not None, "the choice of axes asks first"
    before, behind = found
    x = _joined(x, d, axes, before, behind, count)
    position = axis_index(axes)
    if window.base > 1:
        pads = _left_padding(window, own + before + behind, made, before)
        first_row: Any = position * np.int32(own) - np.int32(before)
        return _filled(x, d, first_row, window.rows, fill), pads
    drift, need = made * window.stride - own, (made - 1) * window.stride + window.span
    if drift:
        start = position * np.int32(drift) + np.int32(window.first + before)
        x = dynamic_slice_in_dim(x, start, need, d)
    else:
        start = window.first + before
        x = slice_in_dim(x, start, start + need, 1, d)
    reads_padding = (
        window.first < 0
        or (window.results - 1) * window.stride + window.first + window.span > window.rows
    )
    if reads_padding:
        first_row = position * np.int32(made * window.stride) + np.int32(window.first)
        x = _filled(x, d, first_row, window.rows, fill)
    return x, (0, 0)


def _left_padding(window: Window, rows: int, made: int, before: int) -> tuple[int, int]:
    """The padding of a device's rows, between which zeros are put, halos included."""
    low = -window.first - before * window.base
    need = (made - 1) * window.stride + window.span
    return low, need - low - ((rows - 1) * window.base + 1)


def _joined(x: Any, d: int, axes: Axes, before: int, behind: int, count: int) -> Any:
    """A device's rows between those of its neighbours; zeros beyond the first and the last."""
    own = typeof(x).shape[d]
    pieces = [x]
    for left, distance in _by_neighbour(before, own):
        pairs = [(k, k + distance) for k in range(count - distance)]
        pieces.insert(0, ppermute(slice_in_dim(x, own - left, own, 1, d), axes, pairs))
    for left, distance in _by_neighbour(behind, own):
        pairs = [(k + distance, k) for k in range(count - distance)]
        pieces.append(ppermute(slice_in_dim(x, 0, left, 1, d), axes, pairs))
    return concatenate(pieces, d) if len(pieces) > 1 else x


def _by_neighbour(rows: int, own: int) -> list[tuple[int, int]]:
    """The number of rows that come from each neighbour, the nearest first."""
    counts = [own] * (rows // own) + ([rows % own] if rows % own else [])
    return [(count, k + 1) for k, count in enumerate(counts)]


def _filled(x: Any, d: int, first_row: Any, rows: int, fill: Any) -> Any:
    """`x`, whose row 0 has the number `first_row`, with `fill` where the operand has no row."""
    shape = typeof(x).shape
    numbers = iota(np.dtype(np.int32), shape[d]) + first_row
    inside = bitwise_and(ge(numbers, np.int32(0)), lt(numbers, np.int32(rows)))
    mask = broadcast_in_dim(inside, shape, (d,))
    return select(mask, x, full(shape, fill, typeof(x).dtype))


def masked(x: Any, d: int, axes: Axes, rows: int, fill: Any) -> Any:
    """A part of a dim that does not divide evenly, with `fill` in the rows that are too many."""
    return _filled(x, d, axis_index(axes) * np.int32(typeof(x).shape[d]), rows, fill)


# ---- parameters of the part --------------------------------------------------------------------


def _replaced(values: Sequence[Any], d: int, value: Any) -> tuple[Any, ...]:
    return (*values[:d], value, *values[d + 1 :])


def _slice_params(params: dict[str, Any], d: int, pads: Any, made: int) -> dict[str, Any]:
    steps = params["strides"]
    end = (made - 1) * (steps[d] if steps else 1) + 1
    return params | {
        "start_indices": _replaced(params["start_indices"], d, 0),
        "limit_indices": _replaced(params["limit_indices"], d, end),
    }


def _pad_params(params: dict[str, Any], d: int, pads: Any, made: int) -> dict[str, Any]:
    return params | {"padding_config": _replaced(params["padding_config"], d, (0, 0, 0))}


def _pooling_params(params: dict[str, Any], d: int, pads: Any, made: int) -> dict[str, Any]:
    windows = params["windows"]
    return params | {"windows": replace(windows, padding=_replaced(windows.padding, d, pads))}


def _convolution_params(params: dict[str, Any], d: int, pads: Any, made: int) -> dict[str, Any]:
    k = params["dimension_numbers"][0].index(d) - 2
    return params | {"padding": _replaced(params["padding"], k, pads)}


_PARAMS: dict[Primitive, Callable[..., dict[str, Any]]] = {
    conv_general_dilated_p: _convolution_params,
    pad_p: _pad_params,
    reduce_window_max_p: _pooling_params,
    reduce_window_min_p: _pooling_params,
    reduce_window_sum_p: _pooling_params,
    slice_p: _slice_params,
}
