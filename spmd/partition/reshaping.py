"""Reshapes of a split dim whose parts do not line up: rows that one exchange brings.

A reshape keeps the order of elements. In each group of dims that it merges or cuts a device has an
interval of the elements, if the first dim is split, and of the result another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmd.base.record import record
from spmd.collectives.exchange import exchange
from spmd.collectives.rectangles import Rectangle, copies_between, most_lacking
from spmd.core.aval import typeof
from spmd.core.structural import reshape

Axes = tuple[Any, ...]
Shape = Sequence[int]


@record
class Group:
    """Dims of two shapes that have one number of elements; dims of size 1 belong to none."""

    old: tuple[int, ...]
    new: tuple[int, ...]


def groups(old: Shape, new: Shape) -> Iterator[Group]:
    """The groups of a reshape of arrays that have elements.

    >>> list(groups((6, 4), (2, 3, 4)))
    [Group(old=(0,), new=(0, 1)), Group(old=(1,), new=(2,))]
    """
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
        yield Group(tuple(ins[first:i]), tuple(outs[start:j]))


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
    found = list(groups(old, new))
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
