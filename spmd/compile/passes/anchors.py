"""Anchors: what the passes made of a shortened program is compared with what they were given.

A value that a pass does not replace keeps its variable. So where the passes' program repeats
itself, it can be asked which layers its copies belong to: those to which the values belong that
were there before. Stretches that only look alike, as the last three terms of a sum do, are told
from layers by this; copies that span two layers from those of one; and whether a value that is read
outside belongs to the layers before the gap or behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import numpy as np

from spmd.compile.passes.periods import Region
from spmd.compile.passes.stretches import Layout, outside_of
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Var


class Anchors:
    """What is known of the values of the passes' program, `made`, from the one they were given.

    In `given`, the layout of the deep program, values are where they were before copies were left
    out; `families` of the stretches of both are inputs.
    """

    def __init__(self, given: Layout, made: Layout, families: int):
        self.made = made
        number = given.table.number
        numbers = np.array([number.get(v, -1) for v in made.table.values])
        old = given.of[numbers]
        # 1 for what belongs to layers before the gap, -1 for those behind it, 0 if it is not known.
        self.side = np.where(given.at[numbers] < given.cut[old], 1, -1) * given.sign[old]
        self.side[old < 0] = 0
        new = made.of[:-1]
        both = np.flatnonzero((old >= 0) & (new >= families))
        self.region = new[both]
        old = old[both]
        at = given.at[numbers[both]]
        at = at - np.where(at >= given.cut[old], given.missing * given.step[old], 0)
        self.old_class, self.old_layer = _places(given, old, at)
        self.new_class, self.new_layer = _places(made, self.region, made.at[:-1][both])

    def hold(self) -> bool:
        """Whether every region's copies are the layers they should be, each of them once.

        What came from the same place of all layers is at the same place of all copies, as many
        copies apart as layers; and of each region, two copies at least are known.
        """
        apart = self.new_layer - self.old_layer
        places = list(zip(self.new_class.tolist(), self.old_class.tolist(), strict=True))
        pairs = set(zip(places, apart.tolist(), strict=True))
        if not len({a for a, _ in places}) == len({b for _, b in places}) == len(pairs):
            return False
        twice = {
            region
            for region, place in zip(self.region.tolist(), self.new_class.tolist(), strict=True)
            if self.count(place) > 1
        }
        stretches = self.made.stretches
        return all(s.region is None or k in twice for k, s in enumerate(stretches))

    def sides(self, region: Region) -> Any:
        """Of each value of a region: 1 if it stays before the gap, -1 if it stays behind, else 0.

        A value that a pass made is where its neighbours are, up to one copy from the others.
        """
        side = self.side[region.first : region.last] * region.sign
        before, behind = np.flatnonzero(side > 0), np.flatnonzero(side < 0)
        new, at = side == 0, np.arange(len(side))
        if len(before):
            side[new & (at + region.step <= before[-1])] = 1
        if len(behind):
            side[new & (at - region.step >= behind[0])] = -1
        return side

    def count(self, place: int) -> int:
        """How many values are known at one place of a copy."""
        return int((self.new_class == place).sum())


def _places(layout: Layout, of: Any, at: Any) -> tuple[Any, Any]:
    """At which place in a copy values are, as numbers of their own, and of which layer they are."""
    base = np.concatenate(([0], np.cumsum(layout.step)))
    step = layout.step[of]
    return base[of] + at % step, at // step * layout.sign[of]


def end_in_regions(closed: ClosedJaxpr, gone: Iterable[Var], made: Layout, families: int) -> bool:
    """Whether all that replaces the values `gone` of a program is made in regions."""
    wanted = set(gone)
    if not wanted:
        return True
    number, of = made.table.number, made.of
    for eqn in closed.eqns:
        if wanted.isdisjoint(eqn.invars):
            continue
        for v in eqn.outvars:
            k = number.get(v)
            if k is None:
                wanted.add(v)
            elif of[k] < families:
                return False
    now = zip(closed.jaxpr.outvars, made.table.closed.jaxpr.outvars, strict=True)
    return all(of[number.get(atom, -1)] >= families for v, atom in now if v in wanted)


def spans_a_gap(given: Layout, made: Layout) -> bool:
    """Whether the passes make one equation, of what copies read, from both sides of a gap.

    Groups merge that read or make one array if few others do between them. Where all layers read
    it, two may be close enough in the short program only.
    """
    table, number = made.table, given.table.number
    regions = [s.region for s in made.stretches if s.region is not None]
    shared: set[Atom] = set()
    for region in regions:
        second = region.start + region.period  # the first copy, or the last one, may read others
        for eqn in table.closed.eqns[second : second + region.period]:
            fixed = [v for v in eqn.invars if made.of[table.number.get(v, -1)] < 0]
            shared.update([v for v in fixed if _may_join(eqn, v)])
    gaps = sorted(s.gap for s in given.stretches if s.region is not None)
    for k in np.flatnonzero(outside_of(table, regions) & (np.diff(table.made) > 1)).tolist():
        eqn = table.closed.eqns[k]
        if any(v in shared and _may_join(eqn, v) for v in (*eqn.invars, *eqn.outvars)):
            known = [number[v] for v in eqn.outvars if v in number]
            if len({bisect_right(gaps, given.table.maker(n)) for n in known}) > 1:
                return True
    return False


def _may_join(eqn: Eqn, atom: Atom) -> bool:
    """Whether a value that groups read, or a broadcast of it, may have the size of their space.

    Scalars are read as they are.
    """
    sizes = [a.aval.size for a in (*eqn.invars, *eqn.outvars)]
    return atom.aval.size > 1 or max(sizes) == 1
