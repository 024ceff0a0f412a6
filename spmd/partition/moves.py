"""Moves: a value that is split one way becomes split another way, inside the per-device program.

A device keeps its part of what it has whole. The rest is one collective that brings each device
what it lacks: an all_gather, an all_to_all or a permute where they do, else an exchange.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base.record import record
from spmd.collectives.all_gather import all_gather
from spmd.collectives.all_to_all import all_to_all
from spmd.collectives.axis import axis_index
from spmd.collectives.exchange import exchange
from spmd.collectives.ppermute import ppermute
from spmd.collectives.psum import pmax, pmin, psum
from spmd.collectives.psum_scatter import psum_scatter
from spmd.collectives.rectangles import Copies, copies_between, held, lacking, part_sizes
from spmd.core.aval import ShapedArray, typeof
from spmd.core.structural import reshape
from spmd.lax.array import full
from spmd.lax.dynamic import dynamic_slice, dynamic_slice_in_dim, dynamic_update_slice
from spmd.lax.logic import eq, select
from spmd.lax.reduce import reduce_and, reduce_or, reduce_prod, reduce_xor
from spmd.lax.slicing import pad, slice_in_dim
from spmd.partition.propagate import Axes, Split
from spmd.partition.seconds import BYTE, EXCHANGE


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
    for size, axes in zip(shape, split, strict=True):
        if axes and size % math.prod([sizes[a] for a in axes]):
            return True
    return False


def moved(x: Any, shape: Sequence[int], have: Split, want: Split, sizes: Mapping[Any, int]) -> Any:
    """A device's part of a value of `shape` as `want` splits it, from the part as `have` does."""
    for step in route(tuple(shape), have, want, tuple(sizes.items())).steps:
        x = step.run(x)
    return x


def seconds(
    aval: ShapedArray, have: Split, want: Split, sizes: Mapping[Any, int]
) -> tuple[float, int]:
    """The cost of a move, by the constants of `cost`, and the number of its steps."""
    found = route(aval.shape, have, want, tuple(sizes.items()))
    nbytes = found.received * aval.dtype.itemsize
    return found.collectives * EXCHANGE + nbytes * BYTE, len(found.steps)


@functools.lru_cache(maxsize=4096)
def route(
    shape: tuple[int, ...], have: Split, want: Split, sizes: tuple[tuple[Any, int], ...]
) -> Route:
    """The way from one split to another: cuts, and at most one collective.

    That is an all_gather, an all_to_all or a permute where one of them brings no device more than
    what it lacks, and else an exchange of rectangles.
    """
    by_axis = dict(sizes)
    found = _composed(shape, have, want, by_axis)
    if not found.collectives:
        return found
    # Cuts first, and one collective: that brings what lacks, if no part has rows that fill it up.
    if found.collectives == 1 and isinstance(found.steps[-1], Handed | Gathered):
        if not is_uneven(shape, have, by_axis) and not is_uneven(shape, want, by_axis):
            return found
    least, all_alike = _exchanged(shape, have, want, by_axis)
    one = found.collectives == 1 and all_alike and found.received == least.received
    return found if one else least


# ---- steps ---------------------------------------------------------------------------------------


@record
class Route:
    """The steps of a move, and what they cost: collectives, and elements that a device receives."""

    steps: tuple[Step, ...]
    collectives: int
    received: int


@record
class Permuted:
    """Each device gets the part of another."""

    axes: Axes
    pairs: tuple[tuple[int, int], ...]

    def run(self, x: Any) -> Any:
        """One permute."""
        return ppermute(x, self.axes, self.pairs)


@record
class Cut:
    """Each device keeps its part of dims that it has whole: as often as listed, dims and axes."""

    parts: tuple[tuple[int, Any, int], ...]

    def run(self, x: Any) -> Any:
        """This device's part."""
        shape = list(typeof(x).shape)
        starts: list[Any] = [0] * len(shape)
        for d, axis, size in self.parts:
            shape[d] //= size
            starts[d] = starts[d] + axis_index(axis) * shape[d]
        return dynamic_slice(x, starts, shape)


@record
class Handed:
    """An axis no longer splits one dim, but another."""

    source: int
    target: int
    axis: Any

    def run(self, x: Any) -> Any:
        """One all_to_all."""
        return all_to_all(x, self.axis, self.target, self.source, tiled=True)


@record
class Gathered:
    """A dim is no longer split by some axes; it has `size` rows then."""

    dim: int
    axes: Axes
    size: int

    def run(self, x: Any) -> Any:
        """One all_gather, without the rows that fill up the last parts."""
        x = all_gather(x, self.axes, axis=self.dim, tiled=True)
        if typeof(x).shape[self.dim] == self.size:
            return x
        return slice_in_dim(x, 0, self.size, 1, self.dim)


@record
class CutUnevenly:
    """Each device keeps so many rows of a dim that it has whole, filled up with zeros."""

    dim: int
    axes: Axes
    rows: int
    padding: int

    def run(self, x: Any) -> Any:
        """This device's rows."""
        zero = np.zeros((), typeof(x).dtype)[()]
        config = [(0, self.padding if d == self.dim else 0, 0) for d in range(typeof(x).ndim)]
        start = axis_index(self.axes) * np.int32(self.rows)
        return dynamic_slice_in_dim(pad(x, zero, config), start, self.rows, self.dim)


@record
class Exchanged:
    """Each device gets the rectangles that it lacks."""

    axes: Axes
    copies: Copies
    shape: tuple[int, ...]

    def run(self, x: Any) -> Any:
        """One exchange."""
        return exchange(x, self.axes, self.copies, self.shape)


Step = Permuted | Cut | Handed | Gathered | CutUnevenly | Exchanged


# ---- one exchange --------------------------------------------------------------------------------


def _exchanged(
    shape: tuple[int, ...], have: Split, want: Split, sizes: Mapping[Any, int]
) -> tuple[Route, bool]:
    """The exchange between two splits, along those axes that split a dim otherwise afterwards.

    It is a permute where each device's part goes to one other as it is. With it comes whether all
    devices lack the same number of elements.
    """
    whole, before, after = list(shape), list(have), list(want)
    for d, (size, own, wanted) in enumerate(zip(shape, have, want, strict=True)):
        kept = 0
        while kept < min(len(own), len(wanted)) and own[kept] == wanted[kept]:
            kept += 1
        parts = math.prod(sizes[a] for a in own[:kept])
        if own == wanted:
            whole[d] = -(-size // parts)
        elif size % math.prod(sizes[a] for a in own) or size % math.prod(sizes[a] for a in wanted):
            continue  # the parts of uneven parts are others
        else:
            whole[d] = size // parts
        before[d], after[d] = own[kept:], wanted[kept:]
    involved = [a for a in sizes if any(a in axes for axes in (*before, *after))]
    grid = {a: sizes[a] for a in involved}
    had, wants = held(whole, before, grid), held(whole, after, grid)
    copies = copies_between(had, wants)
    given, made = (tuple(part_sizes(whole, split, grid)) for split in (before, after))
    axes = tuple(involved)
    pairs = _as_permutation(copies, given, made)
    step = Exchanged(axes, copies, made) if pairs is None else Permuted(axes, pairs)
    if given == made and all(c.source == c.target and c.start == c.place for c in copies.items):
        return Route((), 0, 0), True
    lacks = [lacking(own, wanted) for own, wanted in zip(had, wants, strict=True)]
    return Route((step,), 1, max(lacks)), min(lacks) == max(lacks)


def _as_permutation(
    copies: Copies, given: Sequence[int], made: Sequence[int]
) -> tuple[tuple[int, int], ...] | None:
    """The pairs of sender and receiver, if each device's whole part goes to one."""
    if given != made or any(copy.sizes != made for copy in copies.items):
        return None
    pairs = tuple((copy.source, copy.target) for copy in copies.items)
    return pairs if len({source for source, _ in pairs}) == len(pairs) else None


# ---- the other collectives -----------------------------------------------------------------------


def _composed(shape: tuple[int, ...], have: Split, want: Split, sizes: Mapping[Any, int]) -> Route:
    """The way by cuts, all_to_alls and gathers, each as often as it applies.

    A dim whose parts have different sizes is whole in between.
    """
    way = _Way(shape, have, sizes)
    target = list(want)
    for d, (size, own, wanted) in enumerate(zip(shape, have, want, strict=True)):
        if own == wanted:
            continue
        if size % math.prod(sizes[a] for a in own):
            way.gather(d, own)
        if size % math.prod(sizes[a] for a in wanted):
            target[d] = ()
    way.go(tuple(target))
    for d, (size, now, wanted) in enumerate(zip(shape, target, want, strict=True)):
        if now != wanted:
            count = math.prod(sizes[a] for a in wanted)
            rows = -(-size // count)
            way.steps.append(CutUnevenly(d, wanted, rows, rows * count - size))
    return Route(tuple(way.steps), way.collectives, way.received)


class _Way:
    """The steps so far, and how the value is split after them."""

    def __init__(self, shape: Sequence[int], have: Split, sizes: Mapping[Any, int]):
        self.shape = shape
        self.now = [list(axes) for axes in have]
        self.sizes = sizes
        self.steps: list[Step] = []
        self.collectives = 0
        self.received = 0

    def _part(self) -> int:
        """The elements of a device's part."""
        pairs = zip(self.shape, self.now, strict=True)
        return math.prod(-(-n // math.prod(self.sizes[a] for a in axes)) for n, axes in pairs)

    def _add(self, step: Step, received: int) -> None:
        self.steps.append(step)
        self.collectives += 1
        self.received += received

    def gather(self, d: int, axes: Axes) -> None:
        """Gather the last axes of a dim."""
        part = self._part()
        del self.now[d][len(self.now[d]) - len(axes) :]
        n = math.prod(self.sizes[a] for a in axes)
        size = -(-self.shape[d] // math.prod(self.sizes[a] for a in self.now[d]))
        self._add(Gathered(d, axes, size), part * (n - 1))

    def go(self, want: Split) -> None:
        """Every step that leads to a split of which all parts are alike."""
        while True:
            self._cut(want)
            hand = _next_handed(self.now, want)
            if hand is not None:
                source, target, axis = hand
                n = self.sizes[axis]
                self._add(Handed(source, target, axis), self._part() * (n - 1) // n)
                self.now[source].pop()
                self.now[target].append(axis)
                continue
            gathered = _next_gather(self.now, want)
            if gathered is None:
                return
            self.gather(*gathered)

    def _cut(self, want: Split) -> None:
        """Take this device's part along all dims that axes not in use are to split."""
        parts = []
        while (step := _next_cut(self.now, want)) is not None:
            d, axis = step
            parts.append((d, axis, self.sizes[axis]))
            self.now[d].append(axis)
        if parts:
            self.steps.append(Cut(tuple(parts)))


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
        for source, own in enumerate(now):
            if source != target and own and own[-1] == axis and not _begins(own, want[source]):
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


# ---- totals --------------------------------------------------------------------------------------


@record
class Root:
    """The device that alone has a value: its place among those along some axes, row-major.

    What the others hold in its stead means nothing.
    """

    place: int


def combined(
    x: Any, have: Split, over: Axes, combine: str | Root, want: Split, sizes: Mapping[Any, int]
) -> tuple[Any, Split]:
    """The total of the terms that devices along the axes `over` hold, and how it is split.

    A sum that is wanted split along one of these axes is scattered there. So is what a root has.
    """
    now, left = [list(axes) for axes in have], list(over)
    if isinstance(combine, Root):
        return _from_root(x, have, over, combine.place, want, sizes)
    if combine == "add":
        for d, wanted in enumerate(want):
            axes, size = [], typeof(x).shape[d]
            for axis in wanted[len(now[d]) :] if _begins(now[d], wanted) else ():
                if axis not in left or size % sizes[axis]:
                    break
                size //= sizes[axis]
                axes.append(axis)
                left.remove(axis)
            if axes:
                x = psum_scatter(x, tuple(axes), scatter_dimension=d, tiled=True)
                now[d] += axes
    if left:
        x = _TOTALS[combine](x, tuple(left))
    return x, tuple(tuple(axes) for axes in now)


def _from_root(
    x: Any, have: Split, over: Axes, root: int, want: Split, sizes: Mapping[Any, int]
) -> tuple[Any, Split]:
    """The value of a root on all devices along the axes, by one exchange of what is wanted."""
    if not have:
        number, _ = _from_root(reshape(x, (1,)), ((),), over, root, ((),), sizes)
        return reshape(number, ()), ()
    shape, grid = typeof(x).shape, {a: sizes[a] for a in over}
    more: list[Axes] = []
    for size, own, wanted in zip(shape, have, want, strict=True):
        begins = wanted[: len(own)] == own
        added = wanted[len(own) :] if begins and all(a in over for a in wanted[len(own) :]) else ()
        more.append(() if size % math.prod(sizes[a] for a in added) else added)
    wants = held(shape, more, grid)
    nothing, whole = tuple((0, 0) for _ in shape), tuple((0, size) for size in shape)
    had = [whole if k == root else nothing for k in range(len(wants))]
    x = exchange(x, over, copies_between(had, wants), part_sizes(shape, more, grid))
    return x, tuple(own + added for own, added in zip(have, more, strict=True))


def root_term(x: Any, over: Axes, root: Root) -> Any:
    """A term of a sum over the devices: what the root has there, and zeros elsewhere."""
    aval = typeof(x)
    is_there = eq(axis_index(over), np.int32(root.place))
    return select(is_there, x, full(aval.shape, 0, aval.dtype))


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
