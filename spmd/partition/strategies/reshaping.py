"""Reshapes of split dims: which axes they carry on, and rows that one exchange brings.

A reshape keeps the order of elements. In each group of dims that it merges or cuts a device has an
interval of the elements, if the first dim is split, or if the first is in parts of one row and the
next is split. Of the result it has the same interval, where the sizes of dims allow that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmd.base.record import record
from spmd.collectives.exchange import exchange
from spmd.collectives.rectangles import Rectangle, copies_between, most_lacking
from spmd.core.aval import typeof
from spmd.core.structural import reshape

Axes = tuple[Any, ...]
Shape = tuple[int, ...]


@record
class Group:
    """Dims of two shapes that have one number of elements; dims of size 1 belong to none."""

    old: Shape
    new: Shape


@functools.lru_cache(maxsize=4096)
def groups(old: Shape, new: Shape) -> tuple[Group, ...]:
    """The groups of a reshape of arrays that have elements.

    >>> groups((6, 4), (2, 3, 4))
    (Group(old=(0,), new=(0, 1)), Group(old=(1,), new=(2,)))
    """
    found = []
    ins = [d for d, size in enumerate(old) if size != 1]
    outs = [d for d, size in enumerate(new) if size != 1]
    i = j = 0
    while i < len(ins) and j < len(outs):
        first, start = i, j
        left, right = old[ins[i]], new[outs[j]]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * old[ins[i]], i + 1
            else:
                right, j = right * new[outs[j]], j + 1
        found.append(Group(tuple(ins[first:i]), tuple(outs[start:j])))
    return tuple(found)


# ---- axes that a reshape carries on --------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def may_reach_second(old: Shape, new: Shape, devices: int) -> bool:
    """Whether so many devices may split more than the first dim of a group that has several."""
    if 0 in old:
        return False
    sides = [(shape, own) for g in groups(old, new) for shape, own in ((old, g.old), (new, g.new))]
    return any(len(own) > 1 and shape[own[0]] <= devices for shape, own in sides)


def carried(
    old: Shape, new: Shape, split: Sequence[Axes], sizes: Mapping[Any, int]
) -> tuple[Axes, ...]:
    """The split of a reshape's result whose parts have the elements of those of its operand.

    Axes that no dim of the result can have are left out.

    >>> carried((8, 3), (2, 4, 3), (("x", "y"), ()), {"x": 2, "y": 2})
    (('x',), ('y',), ())
    """
    made: list[Axes] = [()] * len(new)
    for group in groups(old, new):
        if not (axes := _in_order(old, group.old, split, sizes)):
            continue
        for d, own in zip(group.new, _dealt(axes, new, group.new, sizes)[0], strict=True):
            made[d] = own
    return tuple(made)


def cut_points(
    old: Shape, new: Shape, split: Sequence[Axes], sizes: Mapping[Any, int]
) -> Iterator[tuple[Any, int]]:
    """The axes whose first part, of a number of devices, would split a dim of a reshape's result.

    The rest of such an axis would split the next dim.
    """
    for group in groups(old, new):
        if not (axes := _in_order(old, group.old, split, sizes)):
            continue
        dealt, last, left = _dealt(axes, new, group.new, sizes)
        used = sum(map(len, dealt))
        if used == len(axes) or left == 1 or last + 1 == len(group.new):
            continue
        n, after = sizes[axes[used]], new[group.new[last + 1]]
        if n % left == 0 and (after % (n // left) == 0 or (n // left) % after == 0):
            yield axes[used], left


def _in_order(
    shape: Shape, own: Sequence[int], split: Sequence[Axes], sizes: Mapping[Any, int]
) -> Axes:
    """The axes that cut the elements of a group into intervals: a dim behind one in whole parts."""
    found: Axes = ()
    for d in own:
        if not split[d]:
            break
        found += tuple(split[d])
        if math.prod(sizes[a] for a in split[d]) != shape[d]:
            break
    return found


def _dealt(
    axes: Axes, shape: Shape, own: Sequence[int], sizes: Mapping[Any, int]
) -> tuple[list[Axes], int, int]:
    """For each dim of a group the axes that split it; the last that may have some, and its rows.

    A dim gets axes if those before it are in parts of one row.
    """
    made: list[Axes] = [()] * len(own)
    first, k, rows = 0, 0, 1
    for k, d in enumerate(own):
        stop, rows = first, shape[d]
        while stop < len(axes) and rows % sizes[axes[stop]] == 0:
            rows //= sizes[axes[stop]]
            stop += 1
        made[k], first = tuple(axes[first:stop]), stop
        if rows != 1:
            break
    return made, k, rows


# ---- rows that are exchanged ---------------------------------------------------------------------


def _intervals(shape: Shape, own: Sequence[int], count: int) -> list[Rectangle]:
    """The elements of a group that each of so many devices has, if they split its first dim."""
    rest = math.prod(shape[d] for d in own[1:])
    part, total = -(-shape[own[0]] // count) * rest, shape[own[0]] * rest
    return [((min(k * part, total), min((k + 1) * part, total)),) for k in range(count)]


def lacking_share(old: Shape, new: Shape, dim: int, count: int) -> float:
    """The largest share of elements that a device lacks, if `count` split operand dim `dim`."""
    for group in groups(old, new):
        if group.old[0] == dim:
            have, want = _intervals(old, group.old, count), _intervals(new, group.new, count)
            return most_lacking(have, want) / math.prod(old[d] for d in group.old)
    return 0.0


def lines_up(old: Shape, new: Shape, split: Sequence[Axes], sizes: Mapping[Any, int]) -> bool:
    """Whether a reshape of parts gives parts of the result, which is split like this."""
    for group in groups(old, new):
        count = math.prod(sizes[a] for a in split[group.new[0]])
        if _part(old, group.old, count) != _part(new, group.new, count):
            return False
    return True


def _part(shape: Shape, own: Sequence[int], count: int) -> int:
    """The elements of a group in a device's buffer."""
    return -(-shape[own[0]] // count) * math.prod(shape[d] for d in own[1:])


def reshaped(
    x: Any, old: Shape, new: Shape, split: Sequence[Axes], part: Shape, sizes: Mapping[Any, int]
) -> Any:
    """A device's part of the result of a reshape from `old` to `new`, from that of the operand.

    `split` are the axes that split the dims of the result, and `part` is the shape of the part.
    """
    found = groups(old, new)
    counts = [math.prod(sizes[a] for a in split[group.new[0]]) for group in found]
    whole = [_part(old, group.old, n) for group, n in zip(found, counts, strict=True)]
    x = reshape(x, whole)
    for k, (group, count) in enumerate(zip(found, counts, strict=True)):
        made = _part(new, group.new, count)
        if whole[k] == made:
            continue
        around = [(0, size) for size in typeof(x).shape]
        have, want = (
            [(*around[:k], *interval, *around[k + 1 :]) for interval in intervals]
            for intervals in (_intervals(old, group.old, count), _intervals(new, group.new, count))
        )
        whole[k] = made
        x = exchange(x, split[group.new[0]], copies_between(have, want), whole)
    return reshape(x, part)
