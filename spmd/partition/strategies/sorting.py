"""Sorts along a split dim: each device sorts its own rows, and a fixed pattern moves them on.

Leighton's columnsort (IEEE Trans. Computers, 1985): the devices' rows are the columns of a matrix.
Columns are sorted, the matrix is dealt out like cards and sorted, collected again and sorted; then
each element is at most half a column from its place, and neighbours sort their halves together. All
exchanges are as large as any data may need, and no device ever has all rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.collectives.all_to_all import all_to_all
from spmd.collectives.axis import axis_index
from spmd.collectives.ppermute import ppermute
from spmd.core.aval import typeof
from spmd.core.ir import Eqn
from spmd.core.primitive import Dims, dims
from spmd.core.structural import permute_dims, reshape
from spmd.lax.arithmetic import add
from spmd.lax.array import broadcasted_iota, full
from spmd.lax.concatenate import concatenate
from spmd.lax.logic import eq, select
from spmd.lax.slicing import slice_in_dim
from spmd.lax.sort import sort
from spmd.partition.halos import masked
from spmd.partition.seconds import BYTE, ELEMENT, EXCHANGE

Axes = tuple[Any, ...]
Sizes = Mapping[Any, int]

# The label of the dim along which rows are sorted.
SORTED = 610
# Sorting takes so many times what an elementwise operation does.
SORT = 32
_INDEX = np.dtype(np.int32)


def sort_rule(eqn: Eqn) -> Dims:
    """All dims may be split; that which is sorted, under a label of its own."""
    d = eqn.params["dimension"]
    labels = [SORTED if k == d else k for k in range(eqn.invars[0].aval.ndim)]
    return dims([labels] * len(eqn.invars), [labels] * len(eqn.outvars))


def sort_seconds(eqn: Eqn, label: int, count: int, parts: int) -> float:
    """The cost beside one sort of a device's rows; infinite where the pattern does not fit."""
    if label != SORTED:
        return 0.0
    aval, d = eqn.invars[0].aval, eqn.params["dimension"]
    rows = -(-aval.shape[d] // count)
    if aval.shape[d] % count and any(
        dtypes.is_complex(x.aval.dtype) for x in eqn.invars[: eqn.params["num_keys"]]
    ):
        return math.inf
    if count < 3 or rows % (2 * count) or rows < 2 * (count - 1) ** 2:
        return math.inf
    operands = [atom.aval for atom in eqn.invars]
    nbytes = sum(x.nbytes for x in operands)
    if _needs_places(operands, eqn.params["num_keys"]):
        nbytes += aval.size * _INDEX.itemsize
    moved = BYTE * nbytes / parts * (2 * (count - 1) / count**2 + 1 / count)
    return 4 * EXCHANGE * len(operands) + moved + 3 * SORT * ELEMENT * aval.size / parts / count


def _needs_places(operands: Sequence[Any], num_keys: int) -> bool:
    """Whether elements with equal keys differ: in other operands, or as 0.0 and -0.0 do."""
    whole = all(dtypes.is_integer(x.dtype) or dtypes.is_bool(x.dtype) for x in operands)
    return num_keys < len(operands) or not whole


def write_sort(
    parts: Sequence[Any], params: Mapping[str, Any], axes: Axes, sizes: Sizes, whole: int = 0
) -> list[Any]:
    """A device's rows of the sorted operands. Equal keys keep their order, by their places.

    There are so many rows on the `whole`, if parts differ in size. Those that are too many come
    last and stay there: no key comes after theirs.
    """
    d, keys = params["dimension"], params["num_keys"]
    count, shape = math.prod(sizes[a] for a in axes), typeof(parts[0]).shape
    rows = shape[d]
    position = axis_index(axes)
    xs = list(parts)
    if whole % count:
        last = [masked(x, d, axes, whole, _last_key(typeof(x).dtype)) for x in xs[:keys]]
        xs[:keys] = last
    has_places = _needs_places([typeof(x) for x in parts], keys)
    if has_places:
        first = full(shape, position * np.int32(rows))
        xs.insert(keys, add(broadcasted_iota(_INDEX, shape, d), first))

    def ordered(xs: Sequence[Any]) -> list[Any]:
        return list(sort(xs, d, True, keys + has_places))

    def dealt(x: Any) -> Any:
        x = _turned(x, d, (rows // count, count))
        return all_to_all(x, axes, d, d, tiled=True)

    def collected(x: Any) -> Any:
        x = all_to_all(x, axes, d, d, tiled=True)
        return _turned(x, d, (count, rows // count))

    xs = ordered([dealt(x) for x in ordered(xs)])
    xs = ordered([collected(x) for x in xs])
    half = rows // 2
    first, last = ([slice_in_dim(x, k, k + half, 1, d) for x in xs] for k in (0, half))
    onward = [(k, k + 1) for k in range(count - 1)]
    before = [ppermute(x, axes, onward) for x in last]
    both = ordered([concatenate([x, y], d) for x, y in zip(before, first, strict=True)])
    back = [(k + 1, k) for k in range(count - 1)]
    returned = [ppermute(slice_in_dim(x, 0, half, 1, d), axes, back) for x in both]
    at_start, at_end = eq(position, np.int32(0)), eq(position, np.int32(count - 1))
    made = []
    for x, own, mixed, came in zip(first, last, both, returned, strict=True):
        start = select(at_start, x, slice_in_dim(mixed, half, rows, 1, d))
        made.append(concatenate([start, select(at_end, own, came)], d))
    if has_places:
        del made[keys]
    return made


def _last_key(dtype: np.dtype) -> Any:
    """A key after which no other comes."""
    return dtype.type(np.nan) if dtypes.is_float(dtype) else dtypes.max_value(dtype)[()]


def _turned(x: Any, d: int, grid: tuple[int, int]) -> Any:
    """The rows of dim d, laid out as a grid, by its columns."""
    shape = typeof(x).shape
    x = reshape(x, (*shape[:d], *grid, *shape[d + 1 :]))
    order = [*range(d), d + 1, d, *range(d + 2, len(shape) + 1)]
    return reshape(permute_dims(x, order), shape)
