"""Periods: where a program repeats itself, equation by equation.

A deep network is a head, the same layer over and over, and a tail; its gradient has the layers a
second time, backwards, and a training step their updates. Such a stretch of equations is a
`Region`: equation `i + period` does what equation `i` does, and what it reads is what that reads,
one copy further: the value of the copy before, the weights of its own layer, what the same layer
kept for the way back (there copies count the other way round), or a value that all copies share.
The weights, one input for each copy, are a region too, whose copies are single values.

All of this is arithmetic on numbers. Values are numbered (inputs, constants, then results in
order), so that "one copy further" is a constant difference, and NumPy compares all edges of a
region at once. Programs of thousands of equations take milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.compile.lower.alike import literal_key, what_it_does
from spmd.core.ir import ClosedJaxpr, Eqn, Literal, Var
from spmd.core.record import record

# Equations that must be alike in a row before a distance between them is looked at; fewer in short
# programs, in which there are not many distances.
WINDOW, WINDOW_OF_SHORT = 8, 2
SHORT = 800
# Of the distances between windows that are alike, so many are tried, the most frequent ones.
MOST_DISTANCES = 12
# Rounds of leaving out what does not fit, each of which may show that more does not.
MOST_ROUNDS = 12

INPUTS = -1  # the period of a region of inputs, which no equations make


@record(frozen=False)
class Region:
    """Equations `start` to `end`, alike at a distance of `period`; and the values that they make.

    Copies count forwards if `sign` is 1, backwards if it is -1: a backward pass reads the layers
    from the last to the first. 0: it is not known how the region hangs together with others.
    """

    start: int
    end: int
    period: int
    first: int = 0  # the number of its first value
    last: int = 0  # the number behind its last value
    step: int = 1  # values in a copy
    sign: int = 0

    @property
    def copies(self) -> int:
        """How many whole copies there are."""
        return (self.last - self.first) // self.step


@record(eq=False)
class Table:
    """A jaxpr in numbers: what the operands of each equation are, and what it does to them."""

    closed: ClosedJaxpr
    values: list[Var]  # by number
    number: dict[Any, int]
    inputs: int  # how many of the values are inputs; constants follow
    given: int  # inputs and constants
    does: Any  # by equation: equal for the same primitive with the same parameters
    types: Any  # by value: equal for those of one type
    made: Any  # by equation: the number of its first result; one more at the end
    edges: Any  # the operands of all equations, one after the other; literals are negative
    reads: Any  # by equation: where its operands begin; one more at the end

    def maker(self, value: int) -> int:
        """The number of the equation that makes a value; -1 for inputs and constants."""
        return int(np.searchsorted(self.made, value, "right")) - 1

    def operands(self, k: int) -> Any:
        """The numbers of what equation `k` reads."""
        return self.edges[self.reads[k] : self.reads[k + 1]]


def table_of(closed: ClosedJaxpr, inputs: Sequence[Var] | None = None) -> Table:
    """A closed jaxpr in numbers; `inputs` are its own, in the order in which to number them."""
    jaxpr = closed.jaxpr
    invars = tuple(jaxpr.invars if inputs is None else inputs)
    values: list[Var] = [*invars, *jaxpr.constvars]
    given = len(values)
    values += [v for eqn in jaxpr.eqns for v in eqn.outvars]
    number: dict[Any, int] = dict(zip(values, range(len(values)), strict=True))
    atoms = [atom for eqn in jaxpr.eqns for atom in eqn.invars]
    edges = np.array([number.get(atom, -1) for atom in atoms], np.int64)
    literals: dict[Any, int] = {}
    for k in np.flatnonzero(edges < 0).tolist():
        atom = atoms[k]
        assert isinstance(atom, Literal)
        edges[k] = -1 - literals.setdefault(literal_key(atom), len(literals))
    avals = {aval: k for k, aval in enumerate(dict.fromkeys([v.aval for v in values]))}
    types = np.array([avals[v.aval] for v in values], np.int64)
    made = _ends(given, [len(eqn.outvars) for eqn in jaxpr.eqns])
    reads = _ends(0, [len(eqn.invars) for eqn in jaxpr.eqns])
    does = np.array(_numbered(jaxpr.eqns), np.int64)
    return Table(closed, values, number, len(invars), given, does, types, made, edges, reads)


def _ends(start: int, counts: Sequence[int]) -> Any:
    """Where each of some rows begins, and where the last one ends."""
    return np.cumsum([start, *counts])


def _numbered(eqns: Sequence[Eqn]) -> list[int]:
    """A number for each equation, equal for those of one primitive with the same parameters."""
    names: dict[Any, int] = {}
    found = []
    for eqn in eqns:
        try:
            found.append(names.setdefault(what_it_does(eqn), len(names)))
        except TypeError:  # these parameters cannot be compared
            found.append(names.setdefault(eqn, len(names)))
    return found


def signs_of(table: Table) -> Any:
    """A number for each equation, equal for those that do the same to operands of the same types.

    Others may have the same number, though hardly ever.
    """
    types = np.append(table.types, -1)
    counts, outs = np.diff(table.reads), np.diff(table.made)
    read = _mixed(types[table.edges.clip(-1)] + 2)
    place = np.arange(len(read)) - np.repeat(table.reads[:-1], counts)
    read = _mixed(read + place.astype(np.uint64))
    total = np.zeros(len(read) + 1, np.uint64)
    np.cumsum(read, out=total[1:])
    result = _mixed(types[np.minimum(table.made[:-1], len(types) - 1)] + 2)
    mixed = _mixed(table.does) + total[table.reads[1:]] - total[table.reads[:-1]]
    return _mixed(mixed ^ result + outs.astype(np.uint64) * _FACTOR)


_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def _mixed(numbers: Any) -> Any:
    """Other numbers for numbers, spread over 64 bits."""
    found = (numbers.astype(np.uint64) + np.uint64(1)) * _FACTOR
    found ^= found >> np.uint64(29)
    found *= np.uint64(0xBF58476D1CE4E5B9)
    return found ^ found >> np.uint64(32)


# ---- finding regions ---------------------------------------------------------------------------


def find_regions(
    table: Table, copies: int, families: Sequence[Region] | None = None
) -> list[Region]:
    """The regions of at least so many copies that hang together, or none.

    Unless `families` are given, the known regions of inputs, inputs may be read in any order that
    is the same wherever a region reads them; `families_of` says in which.
    """
    return _Finder(table, copies, families).find()


def candidates(kinds: Any, copies: int) -> list[Region]:
    """Stretches of equal numbers at some distance, those that repeat most first, none twice."""
    found: list[tuple[int, int, int]] = []
    for period in _distances(kinds):
        alike = kinds[period:] == kinds[:-period]
        for start, length in _runs(alike):
            if length >= (copies - 1) * period:
                found.append((-length, period, start))
    free = np.ones(len(kinds), bool)
    regions = []
    for length, period, start in sorted(found):
        end = start - length + period
        # Two that stand side by side may be alike for some equations beyond their ends.
        runs = _runs(free[start:end])
        if not runs:
            continue
        first, count = max(runs, key=lambda run: run[1])
        if count >= copies * period:
            first += start
            free[first : first + count] = False
            regions.append(Region(first, first + count, period))
    return regions


def _distances(kinds: Any) -> list[int]:
    """The most frequent distances from a window of equations to the last one that is alike."""
    window = WINDOW if len(kinds) >= SHORT else WINDOW_OF_SHORT
    count = len(kinds) - window + 1
    if count < 2:
        return []
    windows = np.zeros(count, np.uint64)
    for k in range(window):  # what only looks alike is found out later
        windows = windows * _FACTOR + kinds[k : k + count]
    order = np.argsort(windows, kind="stable")
    alike = windows[order[1:]] == windows[order[:-1]]
    distances = (order[1:] - order[:-1])[alike]
    if not len(distances):
        return []
    counts = np.bincount(distances)
    best = np.argsort(-counts, kind="stable")[:MOST_DISTANCES]
    return [int(d) for d in best if counts[d] > 1]


def _runs(flags: Any) -> list[tuple[int, int]]:
    """Where stretches of true flags begin, and how long they are."""
    ends = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return [(int(a), int(b - a)) for a, b in zip(ends[::2], ends[1::2], strict=True)]


@record(eq=False)
class _Edges:
    """What the equations of a region read, all but those of its last copy, and one copy later."""

    here: Any
    there: Any
    reader: Any  # the number of the equation that reads
    own: Any  # which of them are values of regions, or inputs that differ
    region: Any  # of what region `here` is, by its position in the list
    turn: Any  # 1 if `there` is one copy of that further, -1 if it is one copy before, else 0
    fine: Any  # what need not be looked at again: literals and values that all copies share


class _Finder:
    """Leaves out of the candidates what does not fit, until all that is left does."""

    def __init__(self, table: Table, copies: int, families: Sequence[Region] | None):
        self.table = table
        self.copies = copies
        self.families = list(families or ())
        self.is_free = families is None
        self.read_types = np.append(table.types, -1)[table.edges.clip(-1)]
        self.reader = np.repeat(np.arange(len(table.does)), np.diff(table.reads))

    def find(self) -> list[Region]:
        regions = candidates(signs_of(self.table), self.copies)
        for _ in range(MOST_ROUNDS):
            if not regions:
                return []
            for region in regions:
                self.measure(region)
            every = [*self.families, *regions]
            edges = [self.edges(region, every) for region in regions]
            self.turn(regions, edges)
            known = [k for k, region in enumerate(regions) if region.sign]
            left = [r for k in known if (r := self.fitting(regions[k], edges[k], every))]
            if left == regions:
                return regions
            regions = left
        return []

    def measure(self, region: Region) -> None:
        """Note which values a region makes."""
        made = self.table.made
        region.first, region.last = int(made[region.start]), int(made[region.end])
        region.step = int(made[region.start + region.period]) - region.first
        region.sign = 0

    def edges(self, region: Region, every: Sequence[Region]) -> _Edges:
        """What a region's equations read, and how that moves from copy to copy."""
        table = self.table
        begin, end = table.reads[region.start], table.reads[region.end - region.period]
        later = table.reads[region.start + region.period]
        here = table.edges[begin:end]
        there = table.edges[later : later + len(here)]
        of = np.full(len(table.values) + 1, -1)  # the last place is for literals
        step = np.zeros(len(every) + 1, np.int64)
        for k, other in enumerate(every):
            of[other.first : other.last] = k
            step[k] = other.step
        # What comes into the first copy, or what the last one reads of it, may be outside.
        first, second, moved = of[here.clip(-1)], of[there.clip(-1)], there - here
        first = np.where(first < 0, second, first)
        same = (second == first) | (second < 0)
        turn = np.where(
            same & (first >= 0), (moved == step[first]) * 1 - (moved == -step[first]), 0
        )
        fine = (moved == 0) & (first < 0)
        both = (here >= 0) & (here < table.inputs) & (there >= 0) & (there < table.inputs)
        own = both & (moved != 0) & (first < 0) & self.is_free
        return _Edges(here, there, self.reader[begin:end], own, first, turn, fine)

    def turn(self, regions: Sequence[Region], edges: Sequence[_Edges]) -> None:
        """Decide which way copies count: as in the largest region, or backwards."""
        offset = len(self.families)
        following: dict[int, int] = {}
        waiting = list(range(len(regions)))
        if not self.families:
            self.settle(regions[0], edges[0], 1, following)
            waiting.remove(0)
        progress = True
        while progress:
            progress = False
            for k in list(waiting):
                sign = _vote(k, offset, regions, edges, self.families, following)
                if sign:
                    self.settle(regions[k], edges[k], sign, following)
                    waiting.remove(k)
                    progress = True
        self.following = _in_order(following)

    def settle(self, region: Region, edges: _Edges, sign: int, following: dict[int, int]) -> None:
        """Note a region's sign, and which input follows which in the order of copies."""
        region.sign = sign
        here, there = edges.here[edges.own], edges.there[edges.own]
        pairs = zip(here.tolist(), there.tolist(), strict=True)
        for a, b in pairs if sign > 0 else ((b, a) for a, b in pairs):
            following.setdefault(a, b)

    def fitting(self, region: Region, edges: _Edges, every: Sequence[Region]) -> Region | None:
        """The longest part of a region in which every edge moves as it should."""
        signs = np.array([*[other.sign for other in every], 0])
        fine = edges.fine | (
            (edges.region >= 0) & (edges.turn == signs[edges.region] * region.sign)
        )
        if edges.own.any():
            fine = fine | (edges.own & self.follows(edges, region.sign))
        good = self.alike(region)
        good[edges.reader[~fine] - region.start] = False
        runs = _runs(good)
        if not runs:
            return None
        start, length = max(runs, key=lambda run: run[1])
        if length == len(good):
            return region
        if length < (self.copies - 1) * region.period:
            return None
        start += region.start
        return Region(start, start + length + region.period, region.period)

    def alike(self, region: Region) -> Any:
        """By equation but for the last copy's, whether the one a period later does the same."""
        table, at = self.table, slice(region.start, region.end - region.period)
        later = slice(region.start + region.period, region.end)
        found = table.does[at] == table.does[later]
        for places, what in (table.reads, self.read_types), (table.made, table.types):
            counts = np.diff(places)
            found &= counts[at] == counts[later]
            here = what[places[at.start] : places[at.stop]]
            there = what[places[later.start] : places[later.stop]]
            if len(here) != len(there):
                return np.zeros(len(found), bool)  # what looked alike was not
            number = np.repeat(np.arange(len(found)), np.diff(places[at.start : at.stop + 1]))
            found[number[here != there]] = False
        return found

    def follows(self, edges: _Edges, sign: int) -> Any:
        """Which operands are inputs that follow each other as elsewhere."""
        found = np.zeros(len(edges.here), bool)
        for k in np.flatnonzero(edges.own).tolist():
            a, b = int(edges.here[k]), int(edges.there[k])
            if sign < 0:
                a, b = b, a
            found[k] = self.following.get(a) == b
        return found


def _vote(
    k: int,
    offset: int,
    regions: Sequence[Region],
    edges: Sequence[_Edges],
    families: Sequence[Region],
    following: dict[int, int],
) -> int:
    """Which way region `k` counts, by what it reads and what reads it; 0 if nothing says."""
    votes = 0
    every = [*families, *regions]
    for other, found in enumerate(edges):
        if other == k:
            continue
        # What a region that is known reads of this one.
        if regions[other].sign:
            votes += regions[other].sign * int(found.turn[found.region == k + offset].sum())
    mine = edges[k]
    for other, region in enumerate(every):
        if region.sign and other != k + offset:
            votes += region.sign * int(mine.turn[mine.region == other].sum())
    here, there = mine.here[mine.own].tolist(), mine.there[mine.own].tolist()
    for a, b in zip(here, there, strict=True):
        votes += (following.get(a) == b) - (following.get(b) == a)
    return (votes > 0) - (votes < 0)


def _in_order(following: dict[int, int]) -> dict[int, int]:
    """What follows what, each only one other, from a first to a last: nothing goes in circles."""
    before: dict[int, int] = {}
    for a, b in following.items():
        before.setdefault(b, a)
    found = {}
    for a in [a for a in following if a not in before]:
        while (b := following.get(a)) is not None and before[b] == a:
            found[a] = b
            a = b
    return found


def families_of(table: Table, regions: Sequence[Region]) -> list[list[int]]:
    """The inputs that copies read one each, in the order of copies."""
    finder = _Finder(table, 2, None)
    following: dict[int, int] = {}
    for region in regions:
        finder.settle(region, finder.edges(region, regions), region.sign, following)
    following = _in_order(following)
    chains = []
    for first in sorted(set(following) - set(following.values())):
        chain = [first]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        chains.append(chain)
    return chains
