"""Cumulative operations along a split dim: each device's own, and the totals of those before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spmd.collectives.all_gather import all_gather
from spmd.collectives.axis import axis_index
from spmd.core.aval import typeof
from spmd.core.primitive import Primitive
from spmd.core.structural import broadcast_in_dim
from spmd.lax.arithmetic import add, max, min, mul
from spmd.lax.cumulative import cummax_p, cummin_p, cumprod_p, cumsum_p
from spmd.lax.dynamic import dynamic_index_in_dim
from spmd.lax.logic import clamp, eq, select
from spmd.lax.slicing import slice_in_dim
from spmd.partition.halos import NEUTRAL, masked

# How two neighbouring results are joined.
CUMULATIVE: dict[Primitive, Callable[[Any, Any], Any]] = {
    cumsum_p: add,
    cumprod_p: mul,
    cummax_p: max,
    cummin_p: min,
}


_OPERATORS = {cumsum_p: "add", cumprod_p: "mul", cummax_p: "max", cummin_p: "min"}


def write_cumulative(
    prim: Primitive,
    x: Any,
    axes: tuple[Any, ...],
    params: dict[str, Any],
    sizes: Mapping[Any, int],
    rows: int,
) -> Any:
    """The operation on a device's part of dim `axis` of `rows`, which the mesh `axes` split.

    The devices exchange one row each: their last, or in reverse their first. Rows that are too many
    come last, so they count in reverse alone, where they are made neutral.
    """
    d, reverse = params["axis"], params["reverse"]
    if reverse and rows % math.prod(sizes[a] for a in axes):
        x = masked(x, d, axes, rows, NEUTRAL[_OPERATORS[prim]](typeof(x).dtype))
    own = prim.bind(x, **params)
    shape, count = typeof(own).shape, math.prod(sizes[a] for a in axes)
    row = 0 if reverse else shape[d] - 1
    totals = all_gather(slice_in_dim(own, row, row + 1, 1, d), axes, axis=d, tiled=True)
    running = prim.bind(totals, **params)
    here = axis_index(axes)
    before = here + np.int32(1 if reverse else -1)
    place = clamp(np.int32(0), before, np.int32(count - 1))
    ahead = dynamic_index_in_dim(running, place, d, keepdims=True)
    joined = CUMULATIVE[prim](broadcast_in_dim(ahead, shape, range(len(shape))), own)
    return select(eq(place, before), joined, own)
