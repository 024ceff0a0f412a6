"""Rows that go far: large operands joined along a split dim, slices and paddings of much of one.

A row of the result is a row of one operand, at a fixed distance. Where that is far from the
device's own rows one exchange brings each device those that it lacks; `halos.py` has the near ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from spmd.collectives.exchange import exchange
from spmd.collectives.rectangles import Copies, Copy, common, interval
from spmd.core.aval import typeof
from spmd.lax.concatenate import concatenate

Axes = tuple[Any, ...]
Sizes = Mapping[Any, int]


class Shift(Protocol):
    """The places of an operand's rows: row `r + first` of `rows` becomes row `r` of `results`."""

    @property
    def rows(self) -> int: ...
    @property
    def results(self) -> int: ...
    @property
    def first(self) -> int: ...


def rows_lacking(shifts: Sequence[Shift], count: int) -> int:
    """The most rows that one of so many devices has to get from others."""
    most = 0
    for part in range(count):
        lacks = 0
        for one in shifts:
            start, stop = interval(one.results, count, part)
            needed = common(((start + one.first, stop + one.first),), ((0, one.rows),))
            if needed is not None:
                own = common(needed, (interval(one.rows, count, part),))
                lacks += needed[0][1] - needed[0][0] - (own[0][1] - own[0][0] if own else 0)
        most = max(most, lacks)
    return most


def shifted(
    parts: Sequence[Any],
    shifts: Sequence[Shift],
    split: Sequence[bool],
    d: int,
    axes: Axes,
    sizes: Sizes,
) -> Any:
    """A device's rows of the result, from its parts of operands; zeros where there are none.

    Operands that are not `split` are whole on every device.
    """
    count = math.prod(sizes[a] for a in axes)
    held = [typeof(x).shape[d] for x in parts]
    made = -(-shifts[0].results // count)
    shape = list(typeof(parts[0]).shape)

    def cut(rows: int) -> tuple[int, ...]:
        return (*shape[:d], rows, *shape[d + 1 :])

    def at(row: int) -> tuple[int, ...]:
        return (*[0] * d, row, *[0] * (len(shape) - d - 1))

    copies = []
    for target in range(count):
        start, stop = interval(shifts[0].results, count, target)
        for k, one in enumerate(shifts):
            needed = ((start + one.first, stop + one.first),)
            for source in range(count) if split[k] else (target,):
                own = interval(one.rows, count, source) if split[k] else (0, one.rows)
                found = common(needed, (own,))
                if found is None:
                    continue
                ((low, high),) = found
                begin, place = sum(held[:k]) + low - own[0], low - one.first - start
                copies.append(Copy(source, target, at(begin), at(place), cut(high - low)))
    x = concatenate(parts, d) if len(parts) > 1 else parts[0]
    return exchange(x, axes, Copies(tuple(copies)), cut(made))
