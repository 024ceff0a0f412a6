"""Rectangles: the part of an array that each device holds, and what it lacks of another part.

The one idea: under any layout a device holds one interval of each dim. Two lists of rectangles, by
device, say which elements each has and wants; their intersections are the copies that give every
device exactly what it lacks. An uneven dim has parts of ceil(size / parts) rows, the last of which
are shorter or empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from spmd.base.digest import blake2b
from spmd.base.record import record

Interval = tuple[int, int]
Rectangle = tuple[Interval, ...]
Axes = tuple[Any, ...]


class Copy(NamedTuple):
    """A rectangle that position `source` of a group has, and `target` gets.

    It lies at `start` in the source's buffer and at `place` in the target's; `sizes` is its shape.
    """

    source: int
    target: int
    start: tuple[int, ...]
    place: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of its elements."""
        return math.prod(self.sizes)


@record
class Copies:
    """The copies of an exchange: a parameter of its primitive, equal by content."""

    items: tuple[Copy, ...]

    def received(self) -> dict[int, int]:
        """The number of elements that each position gets from others."""
        found: dict[int, int] = {}
        for copy in self.items:
            if copy.source != copy.target:
                found[copy.target] = found.get(copy.target, 0) + copy.count
        return found

    def __str__(self) -> str:
        """A short text, the same in every process, that differs where the content does."""
        data = repr([tuple(copy) for copy in self.items]).encode()
        return f"{len(self.items)} rectangles {blake2b(data, digest_size=8).hexdigest()}"


# ---- parts by device ----------------------------------------------------------------------------


def interval(size: int, parts: int, part: int) -> Interval:
    """The rows of one of so many parts of a dim.

    >>> [interval(10, 4, k) for k in range(4)], interval(5, 4, 3)
    ([(0, 3), (3, 6), (6, 9), (9, 10)], (5, 5))
    """
    rows = -(-size // parts)
    return min(part * rows, size), min((part + 1) * rows, size)


def part_sizes(shape: Sequence[int], split: Sequence[Axes], sizes: Mapping[Any, int]) -> list[int]:
    """The shape of every device's buffer: that of the first part."""
    pairs = zip(shape, split, strict=True)
    return [-(-size // math.prod(sizes[a] for a in axes)) for size, axes in pairs]


def held(shape: Sequence[int], split: Sequence[Axes], sizes: Mapping[Any, int]) -> list[Rectangle]:
    """The part of an array that each device of a mesh holds, in the order of positions, row-major.

    Each dim is split over the axes that `split` names for it, the first of them the coarsest.

    >>> held((8,), [("x",)], {"x": 2, "y": 2})
    [((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)]
    """
    strides: dict[Any, int] = {}
    count = 1
    for axis in reversed(list(sizes)):
        strides[axis] = count
        count *= sizes[axis]
    columns = []
    for size, axes in zip(shape, split, strict=True):
        parts = math.prod(sizes[a] for a in axes)
        rows = [interval(size, parts, part) for part in range(parts)]
        column = []
        for position in range(count):
            part = 0
            for a in axes:
                part = part * sizes[a] + position // strides[a] % sizes[a]
            column.append(rows[part])
        columns.append(column)
    return list(zip(*columns, strict=True)) if columns else [()] * count


def elements(rectangle: Rectangle) -> int:
    """The number of elements a rectangle has."""
    return math.prod(stop - start for start, stop in rectangle)


def common(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """The elements of both rectangles; None if there are none."""
    found = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        found.append((start, stop))
    return tuple(found)


def lacking(have: Rectangle, want: Rectangle) -> int:
    """The number of elements that a device wants and does not have.

    >>> lacking(((0, 4), (0, 2)), ((0, 2), (0, 4)))
    4
    """
    both = common(have, want)
    return elements(want) - (elements(both) if both is not None else 0)


def most_lacking(have: Sequence[Rectangle], want: Sequence[Rectangle]) -> int:
    """The elements that the device which lacks the most has to receive."""
    return max((lacking(a, b) for a, b in zip(have, want, strict=True)), default=0)


# ---- the copies that change one layout into another --------------------------------------------


def copies_between(
    have: Sequence[Rectangle | None],
    want: Sequence[Rectangle | None],
    places: Sequence[Any] = (),
) -> Copies:
    """The copies by which devices that hold `have` get `want`; None where one is no part of it.

    Different rectangles of `have` do not overlap. Elements that several devices hold come from one
    in the same of the `places` (processes), if there is one, and else from the one that sends the
    least.
    """
    places = places or [0] * len(have)
    holders: dict[Rectangle, list[int]] = {}
    for position, rectangle in enumerate(have):
        if rectangle is not None:
            holders.setdefault(rectangle, []).append(position)
    by_dim = [sorted(set(intervals)) for intervals in zip(*holders, strict=True)]
    sent = [0] * len(have)
    found = []
    for target, wanted in enumerate(want):
        if wanted is None:
            continue
        for rectangle, those in _sources(holders, by_dim, have[target], wanted):
            size = elements(rectangle)
            source = target
            if target not in those:
                source = min(
                    those,
                    key=lambda k: (places[k] != places[target], sent[k], abs(k - target), k),
                )
                sent[source] += size
            at = have[source]
            assert at is not None
            found.append(_copy(source, target, rectangle, at, wanted))
    return Copies(tuple(found))


def _sources(
    holders: Mapping[Rectangle, list[int]],
    by_dim: Sequence[Sequence[Interval]],
    own: Rectangle | None,
    wanted: Rectangle,
) -> Iterator[tuple[Rectangle, list[int]]]:
    """The pieces of a wanted rectangle, with those that hold them; first the device's own."""
    if own is not None and common(own, wanted) == wanted:
        yield wanted, holders[own]
        return
    meeting = [
        [one for one in intervals if one[0] < stop and start < one[1]]
        for intervals, (start, stop) in zip(by_dim, wanted, strict=True)
    ]
    for rectangle in itertools.product(*meeting):
        if rectangle in holders and (both := common(rectangle, wanted)) is not None:
            yield both, holders[rectangle]


def _copy(source: int, target: int, piece: Rectangle, have: Rectangle, want: Rectangle) -> Copy:
    return Copy(
        source,
        target,
        tuple([a - b for (a, _), (b, _) in zip(piece, have, strict=True)]),
        tuple([a - b for (a, _), (b, _) in zip(piece, want, strict=True)]),
        tuple([stop - start for start, stop in piece]),
    )


def gaps(copies: Copies, target: int, shape: Sequence[int]) -> list[Rectangle]:
    """The elements of a target's buffer that no copy writes, as rectangles that do not overlap."""
    left: list[Rectangle] = [tuple((0, size) for size in shape)]
    for copy in copies.items:
        if copy.target == target:
            hole = tuple((a, a + n) for a, n in zip(copy.place, copy.sizes, strict=True))
            left = [piece for one in left for piece in _without(one, hole)]
    return [one for one in left if elements(one)]


def _without(one: Rectangle, hole: Rectangle) -> Iterator[Rectangle]:
    """A rectangle without the elements of another, in pieces."""
    both = common(one, hole)
    if both is None:
        yield one
        return
    around = list(one)
    for d, ((start, stop), (low, high)) in enumerate(zip(one, both, strict=True)):
        for rows in (start, low), (high, stop):
            if rows[0] < rows[1]:
                yield (*around[:d], rows, *around[d + 1 :])
        around[d] = (low, high)
