"""Stretches: which values of a program belong to which copy of what repeats itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from spmd.compile.passes.periods import Region, Table
from spmd.core.record import record


@record(eq=False)
class Stretch:
    """Values in the order of copies, `step` of each copy: of a region, or inputs, one a copy.

    In a long program `cut` is where those begin that are left out; in a short one where they
    come back, and `gap` is the number of the equation there.
    """

    values: Any  # their numbers in the table
    step: int
    sign: int
    cut: int
    region: Region | None = None
    gap: int = 0


class Layout:
    """Where in which stretch each value of a table is."""

    def __init__(self, table: Table, stretches: Sequence[Stretch], missing: int):
        self.table = table
        self.stretches = stretches
        self.missing = missing
        count = len(table.values)
        self.of = np.full(count + 1, -1)  # the last place is for literals
        self.at = np.zeros(count + 1, np.int64)
        for k, stretch in enumerate(stretches):
            self.of[stretch.values] = k
            self.at[stretch.values] = np.arange(len(stretch.values))
        # The last place of each is for what is in no stretch: it moves nowhere.
        self.step = np.array([*[s.step for s in stretches], 0])
        self.sign = np.array([*[s.sign for s in stretches], 1])
        self.cut = np.array([*[s.cut for s in stretches], 1])

    def reads(self, start: int, end: int) -> Any:
        """What the equations from `start` to `end` read, one after the other."""
        reads = self.table.reads
        return self.table.edges[reads[start] : reads[end]]

    def read_outside(self) -> Any:
        """By value, whether an equation of no region reads it."""
        table = self.table
        outer = outside_of(table, [s.region for s in self.stretches if s.region is not None])
        found = np.zeros(len(table.values) + 1, bool)
        found[table.edges[np.repeat(outer, np.diff(table.reads))].clip(-1)] = True
        return found


def outside_of(table: Table, regions: Iterable[Region]) -> Any:
    """By equation, whether it is in no region."""
    outer = np.ones(len(table.does), bool)
    for region in regions:
        outer[region.start : region.end] = False
    return outer
