"""Moves: a value that is split one way becomes split another way, inside the per-device program.

The steps, each as often as it applies: cut a dim by an axis over which the value is whole; hand an
axis from one dim to another, which is one all_to_all; gather what is in the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.collectives.all_gather import all_gather
from spmd.collectives.all_to_all import all_to_all
from spmd.collectives.axis import axis_index
from spmd.collectives.ppermute import ppermute
from spmd.collectives.psum import pmax, pmin, psum
from spmd.collectives.psum_scatter import psum_scatter
from spmd.core.aval import typeof
from spmd.lax.array import full
from spmd.lax.dynamic import dynamic_slice, dynamic_slice_in_dim, dynamic_update_slice
from spmd.lax.logic import eq, select
from spmd.lax.reduce import reduce_and, reduce_or, reduce_prod, reduce_xor
from spmd.lax.slicing import pad, slice_in_dim
from spmd.partition.propagate import Axes, Split


def _gathered(reduce: Callable[[Any, tuple[int, ...]], Any]) -> Callable[[Any, Axes], Any]:
    """The terms of all devices, combined by each."""
    return lambda x, axes: reduce(all_gather(x, axes), (0,))


_TOTALS: dict[str, Callable[[Any, Axes], Any]] = {
    "add": psum,
    "and": _gathered(reduce_and),
    "max": pmax,
    "min": pmin,
    "mul": _gathered(reduce_prod),
    "or": _gathered(reduce_or),
    "xor": _gathered(reduce_xor),
}


def is_uneven(shape: Sequence[int], split: Split, sizes: Mapping[Any, int]) -> bool:
    """Whether the parts of some dim have different sizes."""
    pairs = zip(shape, split, strict=True)
    return any(size % math.prod(sizes[a] for a in axes) for size, axes in pairs)


def moved(x: Any, shape: Sequence[int], have: Split, want: Split, sizes: Mapping[Any, int]) -> Any:
    """A device's part of a value of `shape` as `want` splits it, from the part as `have` does.

    A dim whose parts have different sizes is whole in between.
    """
    if not is_uneven(shape, have, sizes) and not is_uneven(shape, want, sizes):
        return _moved_evenly(x, have, want, sizes)
    around, target = list(have), list(want)
    for d, (size, own, wanted) in enumerate(zip(shape, have, want, strict=True)):
        if own == wanted:
            continue
        if size % math.prod(sizes[a] for a in own):
            x = slice_in_dim(all_gather(x, own, axis=d, tiled=True), 0, size, 1, d)
            around[d] = ()
        if size % math.prod(sizes[a] for a in wanted):
            target[d] = ()
    x = _moved_evenly(x, tuple(around), tuple(target), sizes)
    for d, (size, now, wanted) in enumerate(zip(shape, target, want, strict=True)):
        if now != wanted:
            count = math.prod(sizes[a] for a in wanted)
            rows = -(-size // count)
            zero = np.zeros((), typeof(x).dtype)[()]
            config = [(0, rows * count - size if k == d else 0, 0) for k in range(len(shape))]
            x = dynamic_slice_in_dim(
                pad(x, zero, config), axis_index(wanted) * np.int32(rows), rows, d
            )
    return x


def _renamed(
    have: Split, want: Split, sizes: Mapping[Any, int]
) -> tuple[Axes, list[tuple[int, int]]] | None:
    """The permutation by which blocks go where other axes of the same sizes put them, and its axes.

    None if the blocks are others.
    """
    from_axes, to_axes = ([a for axes in split for a in axes] for split in (have, want))
    lengths = [len(own) == len(wanted) for own, wanted in zip(have, want, strict=True)]
    if not all(lengths) or [sizes[a] for a in from_axes] != [sizes[a] for a in to_axes]:
        return None
    involved = [a for a in sizes if a in from_axes or a in to_axes]
    from_axes += [a for a in involved if a not in from_axes]
    to_axes += [a for a in involved if a not in to_axes]
    if [sizes[a] for a in from_axes] != [sizes[a] for a in to_axes]:
        return None
    grid = tuple(sizes[a] for a in involved)
    pairs = []
    for k, place in enumerate(np.ndindex(*grid)):
        at = dict(zip(involved, place, strict=True))
        source = {a: at[b] for a, b in zip(from_axes, to_axes, strict=True)}
        pairs.append((int(np.ravel_multi_index([source[a] for a in involved], grid)), k))
    return tuple(involved), pairs


def _moved_evenly(x: Any, have: Split, want: Split, sizes: Mapping[Any, int]) -> Any:
    if have != want and (found := _renamed(have, want, sizes)) is not None:
        return ppermute(x, *found)
    now = [list(axes) for axes in have]
    while True:
        x = _cut(x, now, want, sizes)
        hand = _next_handed(now, want)
        if hand is not None:
            source, target, axis = hand
            x = all_to_all(x, axis, target, source, tiled=True)
            now[source].pop()
            now[target].append(axis)
            continue
        gathered = _next_gather(now, want)
        if gathered is None:
            return x
        d, axes = gathered
        x = all_gather(x, axes, axis=d, tiled=True)
        del now[d][len(now[d]) - len(axes) :]


def _cut(x: Any, now: list[list[Any]], want: Split, sizes: Mapping[Any, int]) -> Any:
    """Take this device's part along all dims that axes not in use are to split."""
    shape = list(typeof(x).shape)
    starts: list[Any] = [0] * len(shape)
    step = _next_cut(now, want)
    if step is None:
        return x
    while step is not None:
        d, axis = step
        shape[d] //= sizes[axis]
        starts[d] = starts[d] + axis_index(axis) * shape[d]
        now[d].append(axis)
        step = _next_cut(now, want)
    return dynamic_slice(x, starts, shape)


def _begins(axes: list[Any], wanted: Axes) -> bool:
    return tuple(axes) == wanted[: len(axes)]


def _next_cut(now: list[list[Any]], want: Split) -> tuple[int, Any] | None:
    used = {a for axes in now for a in axes}
    for d, (axes, wanted) in enumerate(zip(now, want, strict=True)):
        if _begins(axes, wanted) and len(axes) < len(wanted) and wanted[len(axes)] not in used:
            return d, wanted[len(axes)]
    return None


def _next_handed(now: list[list[Any]], want: Split) -> tuple[int, int, Any] | None:
    """The dim that gives its last axis away, the one that gets it next, and the axis."""
    for target, (axes, wanted) in enumerate(zip(now, want, strict=True)):
        if not _begins(axes, wanted) or len(axes) == len(wanted):
            continue
        axis = wanted[len(axes)]
        for source, held in enumerate(now):
            if source != target and held and held[-1] == axis and not _begins(held, want[source]):
                return source, target, axis
    return None


def _next_gather(now: list[list[Any]], want: Split) -> tuple[int, Axes] | None:
    """A dim that is split by axes that are not wanted there, and these axes."""
    for d, (axes, wanted) in enumerate(zip(now, want, strict=True)):
        if not _begins(axes, wanted):
            kept = 0
            while kept < len(wanted) and axes[kept] == wanted[kept]:
                kept += 1
            return d, tuple(axes[kept:])
    return None


def combined(
    x: Any, have: Split, over: Axes, combine: str, want: Split, sizes: Mapping[Any, int]
) -> tuple[Any, Split]:
    """The total of the terms that devices along the axes `over` hold, and how it is split.

    A sum that is wanted split along one of these axes is scattered there.
    """
    now, left = [list(axes) for axes in have], list(over)
    if combine == "add":
        for d, wanted in enumerate(want):
            while (
                _begins(now[d], wanted)
                and len(now[d]) < len(wanted)
                and wanted[len(now[d])] in left
                and typeof(x).shape[d] % sizes[wanted[len(now[d])]] == 0
            ):
                axis = wanted[len(now[d])]
                x = psum_scatter(x, axis, scatter_dimension=d, tiled=True)
                now[d].append(axis)
                left.remove(axis)
    if left:
        x = _TOTALS[combine](x, tuple(left))
    return x, tuple(tuple(axes) for axes in now)


def alone(x: Any, have: Split, want: Split, over: Axes, sizes: Mapping[Any, int]) -> Any:
    """A term of a total: what a device along the axes `over` has of it, or 0. Nothing moves.

    A part of a dim that one of these axes splits stands among zeros; where none does, the first
    device along the axis has the value.
    """
    shape, starts = list(typeof(x).shape), []
    for d, (own, wanted) in enumerate(zip(have, want, strict=True)):
        more = own[len(wanted) :]
        starts.append(axis_index(more) * np.int32(shape[d]) if more else np.int32(0))
        shape[d] *= math.prod(sizes[a] for a in more)
    if shape != list(typeof(x).shape):
        x = dynamic_update_slice(full(shape, 0, typeof(x).dtype), x, starts)
    rest = tuple(a for a in over if not any(a in own for own in have))
    if rest:
        x = select(eq(axis_index(rest), np.int32(0)), x, full(shape, 0, typeof(x).dtype))
    return x
