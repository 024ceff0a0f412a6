"""Picks and reversals along a split dim: the largest elements, their places, the opposite order."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd.collectives.all_gather import all_gather
from spmd.collectives.axis import axis_index
from spmd.collectives.exchange import exchange
from spmd.collectives.ppermute import ppermute
from spmd.collectives.rectangles import Copies, Copy
from spmd.core.aval import typeof
from spmd.core.ir import Eqn
from spmd.core.primitive import Dims, dims
from spmd.core.structural import broadcast_in_dim, reduce_sum
from spmd.lax.array import broadcasted_iota, full, rev
from spmd.lax.convert import convert_element_type
from spmd.lax.logic import eq, select
from spmd.lax.reduce import argmax_p, argmin_p, reduce_max, reduce_min
from spmd.lax.sort import take_along, top_k, top_k_p

Axes = tuple[Any, ...]
Sizes = Mapping[Any, int]

# The label of the dim along which elements are picked is this and its number.
PICKED = 300
PICKS = (argmax_p, argmin_p, top_k_p)
# The operator whose neutral value these pick after all others.
PICKED_LAST = {argmax_p: "max", argmin_p: "min", top_k_p: "max"}


def pick_rule(eqn: Eqn) -> Dims:
    """The rule of an equation that picks elements: the dim may be split, and is in no result."""
    ndim = eqn.invars[0].aval.ndim
    d = _dim(eqn)
    operand = [PICKED + d if k == d else k for k in range(ndim)]
    if eqn.prim is top_k_p:
        result = [-1 if k == d else k for k in range(ndim)]
        return dims([operand], [result, result], reduces="pick")
    return dims([operand], [[k for k in range(ndim) if k != d]], reduces="pick")


def _dim(eqn: Eqn) -> int:
    return eqn.params["axis"] if eqn.prim is top_k_p else eqn.params["axes"][0]


def write_pick(eqn: Eqn, x: Any, axes: Axes) -> list[Any]:
    """Each device picks of its own elements; of what all have picked, the result is picked."""
    d, rows = _dim(eqn), typeof(x).shape[_dim(eqn)]
    first = axis_index(axes) * np.int32(rows)
    if eqn.prim is top_k_p:
        k = eqn.params["k"]
        values, places = top_k(x, min(k, rows), axis=d)
        places = places + first
        values, places = (all_gather(v, axes, axis=d, tiled=True) for v in (values, places))
        values, order = top_k(values, k, axis=d)
        return [values, take_along(places, order, d)]
    best = (reduce_max if eqn.prim is argmax_p else reduce_min)(x, (d,))
    dtype = eqn.params["index_dtype"]
    own = eqn.prim.bind(x, **eqn.params) + convert_element_type(first, dtype)
    values, places = (all_gather(v, axes) for v in (best, own))
    winner = eqn.prim.bind(values, axes=(0,), index_dtype=np.dtype(np.int32))
    shape = typeof(places).shape
    chosen = eq(
        broadcasted_iota(np.dtype(np.int32), shape, 0),
        broadcast_in_dim(winner, shape, range(1, len(shape))),
    )
    return [reduce_sum(select(chosen, places, full(shape, 0, dtype)), (0,))]


def write_reversal(
    x: Any, split: Mapping[int, Axes], dimensions: Any, sizes: Sizes, whole: Sequence[int]
) -> Any:
    """A device's elements are those of the opposite device, reversed; of two, if parts differ."""
    x = rev(x, dimensions)
    for d in dimensions:
        axes = split.get(d)
        if not axes:
            continue
        count, shape = math.prod(sizes[a] for a in axes), typeof(x).shape
        if whole[d] % count:
            x = exchange(x, axes, _opposite_rows(shape, d, count, whole[d]), shape)
        else:
            x = ppermute(x, axes, [(k, count - 1 - k) for k in range(count)])
    return x


@functools.lru_cache(maxsize=256)
def _opposite_rows(part: tuple[int, ...], d: int, count: int, whole: int) -> Copies:
    """The copies that put reversed rows into their places: in a part, rows too many come first."""
    rows, found = part[d], []
    for source in range(count):
        first = whole - (source + 1) * rows  # of the result, the row that a part begins with
        for target in range(count):
            start = max(first, target * rows, 0)
            stop = min(first + rows, (target + 1) * rows, whole)
            if start < stop:
                at = [0] * len(part)
                place, size = list(at), list(part)
                at[d], place[d], size[d] = start - first, start - target * rows, stop - start
                found.append(Copy(source, target, tuple(at), tuple(place), tuple(size)))
    return Copies(tuple(found))
