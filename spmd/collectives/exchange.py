"""exchange: every device sends rectangles of its value to others, as a fixed list says.

The one collective that changes any layout into any other: the list of `rectangles.copies_between`
gives each device what it lacks, and nothing else. Partitioning and `device_put` write it; where an
all_gather, an all_to_all or a permute moves as little, they write those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.collectives.groups import (
    collective,
    make_varying,
    names_of,
    only_axis,
    rows_of,
    stack_rows,
)
from spmd.collectives.rectangles import Copies, Copy
from spmd.core.aval import ShapedArray, typeof
from spmd.core.structural import broadcast_leading, move_dim, reduce_sum, zeros_like_aval
from spmd.lax.dynamic import dynamic_update_slice
from spmd.lax.slicing import slice as slice_of


def exchange(x: Any, axis_name: Any, copies: Copies, shape: Sequence[int]) -> Any:
    """A value of `shape`, into which rectangles of the devices' `x` are copied; the rest is zero.

    The `copies` name positions along `axis_name`, row-major for several axes. Rectangles that one
    device gets do not overlap. The dtype stays. Raises `AxisError` if an axis is not in scope.
    """
    axes = names_of(axis_name)
    return exchange_p.bind(make_varying(x, axes), axes=axes, copies=copies, shape=tuple(shape))


# ---- rules -------------------------------------------------------------------------------------


def _window(start: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))


def _members(operands: list[Any], *, copies: Copies, shape: Any, **_: Any) -> list[Any]:
    out = [np.zeros(shape, x.dtype) for x in operands]
    for copy in copies.items:
        part = operands[copy.source][_window(copy.start, copy.sizes)]
        out[copy.target][_window(copy.place, copy.sizes)] = part
    return out


def _batch(axis: Any, operands: Any, at: Any, *, axes: Any, copies: Copies, shape: Any) -> Any:
    (x,), (dim,) = operands, at
    if axis.name not in axes:
        if dim is None:
            return exchange_p.bind(x, axes=axes, copies=copies, shape=shape), None
        x, n = move_dim(x, dim, 0), axis.size
        deeper = [
            Copy(c.source, c.target, (0, *c.start), (0, *c.place), (n, *c.sizes))
            for c in copies.items
        ]
        made = exchange_p.bind(x, axes=axes, copies=Copies(tuple(deeper)), shape=(n, *shape))
        return made, 0
    only_axis("exchange", axis, axes)
    rows = rows_of(x, dim, axis.size)
    out = [zeros_like_aval(typeof(row).update(shape=shape)) for row in rows]
    for copy in copies.items:
        stops = [a + n for a, n in zip(copy.start, copy.sizes, strict=True)]
        part = slice_of(rows[copy.source], copy.start, stops)
        out[copy.target] = dynamic_update_slice(out[copy.target], part, list(copy.place))
    return stack_rows(out), 0


def _transpose(ct: Any, x: Any, *, axes: Any, copies: Copies, shape: Any) -> Any:
    """The copies back. Elements copied to n devices come back in n layers, which are added."""
    layers: list[list[Copy]] = []
    for copy in copies.items:
        back = Copy(copy.target, copy.source, copy.place, copy.start, copy.sizes)
        layer = next((one for one in layers if not any(_meet(back, c) for c in one)), None)
        if layer is None:
            layers.append(layer := [])
        layer.append(back)
    whole = x.aval.shape
    ct = make_varying(ct, axes)
    if len(layers) == 1:
        return [exchange_p.bind(ct, axes=axes, copies=Copies(tuple(layers[0])), shape=whole)]
    found = tuple(
        Copy(c.source, c.target, (0, *c.start), (k, *c.place), (1, *c.sizes))
        for k, layer in enumerate(layers)
        for c in layer
    )
    rows = broadcast_leading(ct, 1)
    shape = (len(layers), *whole)
    back = exchange_p.bind(rows, axes=axes, copies=Copies(found), shape=shape)
    return [reduce_sum(back, (0,))]


def _meet(one: Copy, other: Copy) -> bool:
    """Whether two copies write to one element."""
    if one.target != other.target:
        return False
    pairs = zip(one.place, one.sizes, other.place, other.sizes, strict=True)
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in pairs)


def _abstract(x: ShapedArray, *, axes: Any, copies: Copies, shape: Any) -> ShapedArray:
    return x.update(shape=shape)


exchange_p = collective(
    "exchange",
    abstract=_abstract,
    transpose=_transpose,
    batch=_batch,
    members=_members,
)
