"""Shorten: a deep program is compiled as a shallow one, and its layers are put back afterwards.

`periods` finds the copies of a repeated stretch, a network's layers. What the passes make of the
third of them they make of the thirtieth: they look at what is around an equation, not at how far
away the ends are. So all but a few copies are left out, the passes run on what is left, and the
equations that they wrote, which repeat themselves too, are continued for as many copies.

Leaving out takes `missing` copies out of the middle of every region. What stood behind the gap
moves up: it reads what the copy before the gap makes, as it would read that of its neighbour. Every
equation has a *shift*, by how many copies it moved: 0 before the gap, `missing` behind it; in a
region that counts backwards it is the other way round, as what stands before the gap there belongs
to layers behind it. Putting back is the same arithmetic the other way: copy `r` of those that come
between has shift `r`, and reads what its model reads, shifted by as much.

This is only done where it is known to be right; else the passes take the whole program. What the
passes made must repeat itself in at least `LEAST_AFTER` copies, as evenly as what they were given.
By the values that are still there, its copies must be layers of what was given (`anchors`). Each
value that one copy hands to the next must still be handed over, or be part of what the copies'
kernels make, of values in the copies beside (a counter that is folded to a number in each layer is
not): then every copy that is put back computes what the copies before it hold from their
neighbours' values, by the code that does so for the others. And nothing outside of regions may read
what is next to the gap or crosses it, so nothing that goes with a copy is forgotten.

So results are right: what a pass knows of a value that is handed over is the equation that made it,
in the copy beside. That the passes would have made the same of all layers needs that they look at
what is near: `simplify` at an equation and who made its operands, but for equal equations, which
may be anywhere (`_reads_nearby`); `fuse` at who reads a value, but for groups that merge if few
others that read the same array lie between them (`spans_a_gap`), and for the size of a kernel,
which is counted from its root; the others at one group, loop or chain between two products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from spmd.compile.passes.anchors import Anchors, end_in_regions, spans_a_gap
from spmd.compile.passes.invariant import hoist_invariants
from spmd.compile.passes.outside import products_outside
from spmd.compile.passes.periods import Region, Table, families_of, find_regions, table_of
from spmd.compile.passes.simplify import simplify
from spmd.compile.passes.stretches import Layout, Stretch
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Var
from spmd.core.source import Source

# Shorter programs are compiled as they are: they are not even looked at.
LEAST_EQNS = 800
# So many copies stay of each region, and at least so many must be worth leaving out.
KEPT, LEAST_MISSING = 6, 6
# What the passes make of those that stay must repeat itself in so many copies.
LEAST_AFTER = 3
# The copies of one stretch that a copy reads, and those that its counterparts in other regions do,
# are at most so many apart: layers further away from each other may be closer in a short program.
MOST_APART = 3


# ---- leaving copies out ------------------------------------------------------------------------


def shorten(closed: ClosedJaxpr) -> Shortened | None:
    """A shallow program that stands for a deep one; None for programs that are not that deep."""
    if len(closed.eqns) < LEAST_EQNS:
        return None
    table = table_of(closed)
    regions = find_regions(table, KEPT + LEAST_MISSING)
    if not regions:
        return None
    families = families_of(table, regions)
    missing = min([r.copies for r in regions] + [len(family) for family in families]) - KEPT
    if missing < LEAST_MISSING:
        return None
    stretches = [
        Stretch(np.array(family), 1, 1, (len(family) - missing) // 2) for family in families
    ]
    for r in regions:
        gap = _narrowest(table, r, missing)
        cut = int(table.made[gap]) - r.first
        stretches.append(Stretch(np.arange(r.first, r.last), r.step, r.sign, cut, r, gap))
    layout = Layout(table, stretches, missing)
    outside = layout.read_outside()
    for s in stretches:
        if outside[s.values[s.cut : s.cut + missing * s.step]].any():
            return None
    return _close(layout) if _evenly_given(layout) and _reads_nearby(layout) else None


def _narrowest(table: Table, region: Region, missing: int) -> int:
    """The equation about the middle of what stays before which the fewest values are handed on."""
    period = region.period
    begin = region.start + (region.end - region.start - (missing + 1) * period) // 2
    low, high = begin - period, begin + 2 * period
    maker = np.searchsorted(
        table.made, table.edges[table.reads[begin] : table.reads[high]], "right"
    )
    reader = np.repeat(np.arange(begin, high), np.diff(table.reads[begin : high + 1]))
    last = np.zeros(high - low, np.int64)  # who reads an equation's results last
    inside = maker > low
    np.maximum.at(last, maker[inside] - 1 - low, reader[inside] - low)
    made = np.flatnonzero(last)
    change = np.zeros(high - low + 1, np.int64)
    np.add.at(change, made + 1, 1)
    np.add.at(change, last[made] + 1, -1)
    return begin + int(np.argmin(np.cumsum(change)[period : 2 * period]))


def _evenly_given(layout: Layout) -> bool:
    """Whether copies that are left out make as many results as those beside them."""
    count = np.zeros(len(layout.table.values), np.int64)
    number = layout.table.number
    np.add.at(count, [number[v] for v in layout.table.closed.jaxpr.outvars if v in number], 1)
    for stretch in layout.stretches:
        begin, end = stretch.cut - stretch.step, stretch.cut + layout.missing * stretch.step
        given = count[stretch.values[begin : end + stretch.step]]
        if (given > 1).any() or (given[: -stretch.step] != given[stretch.step :]).any():
            return False
    return True


def _reads_nearby(layout: Layout) -> bool:
    """Whether copies read those parts of other stretches that belong to layers next to each other.

    Equations of layers far apart may be equal, of which `simplify` keeps one. Where so many layers
    are left out that there is no such pair, both would stay.
    """
    nearest: dict[int, list[int]] = {}
    for stretch in layout.stretches:
        if stretch.region is None:
            continue
        reads = np.unique(layout.reads(stretch.gap - stretch.region.period, stretch.gap).clip(-1))
        of, at = layout.of[reads], layout.at[reads]
        at = (
            at
            - layout.cut[of]
            - (layout.sign[of] != stretch.sign) * (layout.missing * layout.step[of])
        )
        for s in np.unique(of[of >= 0]).tolist():
            found = at[of == s] // layout.step[s]
            nearest.setdefault(s, []).extend((int(found.min()), int(found.max())))
    return all(max(found) - min(found) <= MOST_APART for found in nearest.values())


def _close(layout: Layout) -> Shortened | None:
    """Let what stays read what stays; None if something would be read that is not there."""
    table, missing = layout.table, layout.missing
    eqns, made = table.closed.eqns, table.made
    kept: list[Eqn] = []
    handed: set[Var] = set()
    crossing: set[Var] = set()
    done = 0
    for stretch in sorted(layout.stretches, key=lambda s: s.gap):
        region = stretch.region
        if region is None:
            continue
        kept += eqns[done : region.start]
        behind = stretch.gap + missing * region.period
        for start, end, shift in (region.start, stretch.gap, 0), (behind, region.end, missing):
            before = layout.reads(start, end)
            after = _moved_up(layout, stretch.sign, shift, before)
            readers = np.repeat(np.arange(start, end), np.diff(table.reads[start : end + 1]))
            if after is None or (after >= made[readers]).any():
                return None
            changed = dict.fromkeys(readers[after != before].tolist())
            crossing.update([table.values[v] for v in after[after != before].tolist()])
            first = table.reads[start]
            for k in range(start, end):
                eqn = eqns[k]
                if k in changed:
                    numbers = after[table.reads[k] - first : table.reads[k + 1] - first].tolist()
                    eqn = _reading(eqn, numbers, table.values)
                kept.append(eqn)
            if shift:
                own = (after >= region.first) & (after < region.first + stretch.cut)
                handed.update([table.values[v] for v in after[own].tolist()])
        done = region.end
    kept += eqns[done:]
    return Shortened(layout, kept, handed, crossing)


def _moved_up(layout: Layout, sign: int, shift: int, reads: Any) -> Any:
    """What equations of one shift read of what stays; None if that is not there."""
    of = layout.of[reads.clip(-1)]
    size = np.array([*[len(s.values) for s in layout.stretches], 1])[of]
    step, cut = layout.step[of], layout.cut[of]
    at = (
        layout.at[reads.clip(-1)]
        - np.where(layout.sign[of] == sign, shift, layout.missing - shift) * step
    )
    at = np.where(at < cut, at, at + layout.missing * step)
    known = of >= 0
    if ((at < 0) | (at >= size))[known].any():
        return None
    after = reads.copy()
    for k, stretch in enumerate(layout.stretches):
        mine = of == k
        after[mine] = stretch.values[at[mine]]
    return after


def _reading(eqn: Eqn, numbers: Sequence[int], values: Sequence[Var]) -> Eqn:
    """An equation that reads other values; a negative number leaves an operand as it is."""
    ins = [a if n < 0 else values[n] for a, n in zip(eqn.invars, numbers, strict=True)]
    return Eqn(eqn.prim, tuple(ins), eqn.outvars, eqn.params, eqn.effects, eqn.source)


# ---- putting them back -------------------------------------------------------------------------


class Shortened:
    """A shallow program, `closed`, and what it takes to make a deep one of what becomes of it."""

    def __init__(self, layout: Layout, eqns: Sequence[Eqn], handed: set[Var], crossing: set[Var]):
        self.layout = layout
        self.handed = handed  # what one copy makes and the next one reads, next to the gap
        # What is read for something that was left out: it stands for values of two layers.
        self.crossing = crossing
        jaxpr = layout.table.closed.jaxpr
        gone: set[Atom] = set()
        for stretch in layout.stretches:
            begin, end = stretch.cut, stretch.cut + layout.missing * stretch.step
            gone.update([layout.table.values[v] for v in stretch.values[begin:end].tolist()])
        self.outvars = [v for v in jaxpr.outvars if v not in gone]
        invars = [v for v in jaxpr.invars if v not in gone]
        short = jaxpr.replace(invars=invars, eqns=eqns, outvars=self.outvars, arg_names=())
        self.closed = ClosedJaxpr(short, layout.table.closed.consts)

    def __str__(self) -> str:
        regions = [s.region for s in self.layout.stretches if s.region is not None]
        every = sum(r.end - r.start for r in regions)
        lengths = ", ".join([f"{r.copies} of {r.period}" for r in regions])
        count = len(self.layout.table.closed.eqns)
        return f"{every} of {count} equations repeat themselves: {lengths}"

    def lengthen(self, done: ClosedJaxpr) -> ClosedJaxpr | None:
        """What the passes would make of the whole program, from what they made of the short one.

        None if that does not go on evenly.
        """
        layout = self._after(done)
        return None if layout is None else _Lengthener(self, layout).run()

    def _after(self, done: ClosedJaxpr) -> Layout | None:
        """Where the stretches are in what the passes made."""
        old, missing = self.layout, self.layout.missing
        inputs: list[Var] = []
        stretches: list[Stretch] = []
        families: list[Region] = []
        for s in old.stretches:
            if s.region is None:
                stays = [*s.values[: s.cut].tolist(), *s.values[s.cut + missing :].tolist()]
                first = len(inputs)
                inputs += [old.table.values[v] for v in stays]
                families.append(Region(0, 0, 0, first, len(inputs), 1, 1))
                stretches.append(Stretch(np.arange(first, len(inputs)), 1, 1, s.cut))
        rest = set(done.jaxpr.invars).difference(inputs)
        table = table_of(done, [*inputs, *[v for v in done.jaxpr.invars if v in rest]])
        regions = find_regions(table, LEAST_AFTER, families)
        every = [
            *stretches,
            *[Stretch(np.arange(r.first, r.last), r.step, r.sign, 0, r) for r in regions],
        ]
        made = Layout(table, every, missing)
        outside = made.read_outside()
        if not regions or any(outside[s.values].all() for s in stretches):
            return None
        if outside[[table.number[v] for v in self.crossing if v in table.number]].any():
            return None
        anchors = Anchors(old, made, len(families))
        if not anchors.hold() or spans_a_gap(old, made):
            return None
        for r in regions:
            gap = _free_gap(table, r, outside, anchors.sides(r))
            if gap is None:
                return None
            cut = int(table.made[gap]) - r.first
            stretches.append(Stretch(np.arange(r.first, r.last), r.step, r.sign, cut, r, gap))
        layout = Layout(table, stretches, missing)
        return layout if self._hands_over(layout, len(families)) else None

    def _hands_over(self, layout: Layout, families: int) -> bool:
        """Whether what copies hand over is made in regions, or part of what is made there."""
        number = layout.table.number
        gone = [v for v in self.handed if v not in number]
        if any(layout.of[number[v]] < families for v in self.handed if v in number):
            return False
        return self._stays_near(gone) and end_in_regions(self.closed, gone, layout, families)

    def _stays_near(self, gone: Sequence[Var]) -> bool:
        """Whether values that copies hand over are computed of what is in the copies beside.

        What rules of algebra make of them is asked by letting them be results. A counter becomes a
        number, which copies that are put back would have to count on; what is transposed in every
        layer becomes what came into the first, transposed as often as there are layers.
        """
        if not gone:
            return True
        jaxpr = self.closed.jaxpr
        asked = ClosedJaxpr(jaxpr.replace(outvars=(*jaxpr.outvars, *gone)), self.closed.consts)
        for step in (hoist_invariants, products_outside, simplify):
            asked = step(asked)
        makers: dict[Atom, Eqn] = {v: eqn for eqn in asked.eqns for v in eqn.outvars}
        now = zip(gone, asked.jaxpr.outvars[-len(gone) :], strict=True)
        return all(self._is_of_neighbours(v, atom, makers) for v, atom in now)

    def _is_of_neighbours(self, v: Var, now: Atom, makers: dict[Atom, Eqn]) -> bool:
        """Whether what `v` became is a value of the last two copies, or was made anew of one."""
        old = self.layout
        own = old.of[old.table.number[v]]
        stack, seen = [now], {now}
        while stack:
            atom = stack.pop()
            known = old.table.number.get(atom, -1)
            if known < 0 and atom in makers:
                new = [a for a in makers[atom].invars if a not in seen]
                stack += new
                seen.update(new)
            elif old.of[known] == own and 0 < old.cut[own] - old.at[known] <= 2 * old.step[own]:
                # A broadcast of a number says no more than the number.
                if any(isinstance(a, Var) for a in makers[atom].invars):
                    return True
        return False


def _free_gap(table: Table, region: Region, outside: Any, sides: Any) -> int | None:
    """Where to put copies back: behind one of which nothing is read outside of regions.

    A value that is read there in every copy belongs to something that should be in a region. What
    belongs to layers before those that were left out stays before them, and what belongs to layers
    behind them behind. The copy is about in the middle, and has one before and one behind it.
    """
    read = np.concatenate(([0], np.cumsum(outside)))
    gaps = np.arange(region.start + region.period, region.end - region.period + 1)
    made = table.made
    free = gaps[read[made[gaps]] == read[made[gaps - region.period]]]
    reading = np.flatnonzero(outside[region.first : region.last])
    if not sides[reading].all():
        return None
    for at in reading.tolist():
        free = free[(made[free] > region.first + at) == (sides[at] > 0)]
    if not len(free):
        return None
    middle = (region.start + region.end + region.period) // 2
    return int(free[np.argmin(abs(free - middle))])


# Of a model's operand: the values of a stretch and where in them copy 0 reads, and each one later.
_Moving: TypeAlias = tuple[list[Var], int, int]


class _Lengthener:
    """Writes the deep program."""

    def __init__(self, shortened: Shortened, layout: Layout):
        self.shortened = shortened
        self.layout = layout
        self.table = layout.table
        self.missing = layout.missing
        long = shortened.layout
        families = [s for s in long.stretches if s.region is None]
        # Of each stretch all values, those that were missing too.
        self.values: list[list[Var]] = [
            [long.table.values[v] for v in s.values.tolist()] for s in families
        ]
        for s in layout.stretches[len(families) :]:
            have = [self.table.values[v] for v in s.values.tolist()]
            model = have[s.cut - s.step : s.cut] * self.missing
            self.values.append([*have[: s.cut], *[Var(v.aval) for v in model], *have[s.cut :]])

    def run(self) -> ClosedJaxpr | None:
        jaxpr, eqns = self.table.closed.jaxpr, self.table.closed.eqns
        written: list[Eqn] = []
        done = 0
        for stretch in sorted(self.layout.stretches, key=lambda s: s.gap):
            region = stretch.region
            if region is None:
                continue
            copies = self.copies(stretch, region)
            if copies is None:
                return None
            written += eqns[done : region.start]
            written += self.moved(stretch, region.start, stretch.gap, 0)
            written += copies
            written += self.moved(stretch, stretch.gap, region.end, self.missing)
            done = region.end
        written += eqns[done:]
        outvars = self.results()
        if outvars is None:
            return None
        whole = self.shortened.layout.table.closed.jaxpr
        return ClosedJaxpr(
            jaxpr.replace(invars=whole.invars, eqns=written, outvars=outvars),
            self.table.closed.consts,
        )

    def shift(self, own: int, sign: int, stretch: int) -> int:
        """By how much the values of a stretch move for one of a sign that has moved itself."""
        return own if self.layout.sign[stretch] == sign else self.missing - own

    def moved(self, stretch: Stretch, start: int, end: int, own: int) -> list[Eqn]:
        """The equations before or behind the gap, with what they read now."""
        table, layout = self.table, self.layout
        eqns = list(table.closed.eqns[start:end])
        reads = layout.reads(start, end).clip(-1)
        of, at = layout.of[reads], layout.at[reads]
        shift = np.where(layout.sign[of] == stretch.sign, own, self.missing - own)
        # It stays the same on the side of the gap that has the same shift.
        changed = (of >= 0) & ((at < layout.cut[of]) != (shift == 0))
        readers = np.repeat(np.arange(end - start), np.diff(table.reads[start : end + 1]))
        for k in dict.fromkeys(readers[changed].tolist()):
            ins = list(eqns[k].invars)
            for position, v in enumerate(table.operands(start + k).tolist()):
                if v >= 0 and (s := layout.of[v]) >= 0:
                    at = layout.at[v] + self.shift(own, stretch.sign, int(s)) * layout.step[s]
                    ins[position] = self.values[s][at]
            e = eqns[k]
            eqns[k] = Eqn(e.prim, tuple(ins), e.outvars, e.params, e.effects, e.source)
        return eqns

    def copies(self, stretch: Stretch, region: Region) -> list[Eqn] | None:
        """The copies that were missing, like the one before the gap."""
        start = stretch.gap - region.period
        eqns = self.table.closed.eqns[start : stretch.gap]
        operands = []
        for k in range(start, stretch.gap):
            found = self.operands(stretch, k, region.period)
            if found is None:
                return None
            operands.append(found)
        sources = [self.sources(eqn, stretch.sign) for eqn in eqns]
        own = self.values[self.layout.stretches.index(stretch)]
        written, at = [], stretch.cut
        for r in range(1, self.missing + 1):
            for e, atoms, lines in zip(eqns, operands, sources, strict=True):
                ins = [a if type(a) is not tuple else a[0][a[1] + r * a[2]] for a in atoms]
                outs = tuple(own[at : at + len(e.outvars)])
                at += len(outs)
                written.append(Eqn(e.prim, tuple(ins), outs, e.params, e.effects, lines[r - 1]))
        return written

    def operands(self, stretch: Stretch, k: int, period: int) -> list[Atom | _Moving] | None:
        """What copies of an equation read: the same atom, or what moves on with each copy."""
        table, layout = self.table, self.layout
        found: list[Atom | _Moving] = []
        numbers = zip(table.operands(k).tolist(), table.operands(k + period).tolist(), strict=True)
        for atom, (v, later) in zip(table.closed.eqns[k].invars, numbers, strict=True):
            s = int(layout.of[v]) if v >= 0 else -1
            if s < 0:
                if v != later:
                    return None  # what the first copy reads is like nothing else
                found.append(atom)
                continue
            step, at = int(layout.step[s]), int(layout.at[v])
            slope = step
            if layout.sign[s] != stretch.sign:
                at, slope = at + self.missing * step, -step
            every = self.values[s]
            if (
                not 0
                <= at + min(slope, self.missing * slope)
                <= at + max(slope, self.missing * slope)
                < len(every)
            ):
                return None
            found.append((every, at, slope))
        return found

    def sources(self, eqn: Eqn, sign: int) -> list[Source]:
        """The user's lines of the copies of an equation: layers may be written one by one."""
        long, missing = self.shortened.layout, self.missing
        table = long.table
        v = table.number.get(eqn.outvars[0], -1)
        s = int(long.of[v])
        if s >= 0 and v >= table.given:
            step, cut, at = int(long.step[s]), int(long.cut[s]), int(long.at[v])
            low = at if at < cut else at - missing * step
            shifts = np.arange(1, missing + 1) if long.sign[s] == sign else np.arange(missing)[::-1]
            places = low + step * shifts
            values = long.stretches[s].values
            if places.min() >= 0 and places.max() < len(values):
                makers = np.searchsorted(table.made, values[places], "right") - 1
                found = [table.closed.eqns[k].source for k in makers.tolist()]
                if table.closed.eqns[table.maker(v)].source is eqn.source:
                    return found
        return [eqn.source] * missing

    def results(self) -> list[Atom] | None:
        """The results of the whole program."""
        long = self.shortened.layout
        now = dict(zip(self.shortened.outvars, self.table.closed.jaxpr.outvars, strict=True))
        found: list[Atom] = []
        for atom in long.table.closed.jaxpr.outvars:
            v = long.table.number.get(atom, -1)
            s, at = int(long.of[v]), int(long.at[v])
            if s < 0:
                found.append(now[atom])
                continue
            stretch = long.stretches[s]
            # The value of the short program that stands for this one, and by how much it moved.
            own = min(max((at - stretch.cut) // stretch.step + 1, 0), self.missing)
            is_moved = at < stretch.cut + self.missing * stretch.step
            model = atom
            if is_moved:
                model = long.table.values[stretch.values[at - own * stretch.step]]
            made = self.result(now[model], own, stretch.sign)
            if made is None:
                return None
            if is_moved and own == self.missing:
                # One copy further it must be what the first one behind the gap gives.
                following = now[long.table.values[stretch.values[at + stretch.step]]]
                further = self.result(now[model], own + 1, stretch.sign)
                if further is not self.result(following, own, stretch.sign):
                    return None
            found.append(made)
        return found

    def result(self, atom: Atom, own: int, sign: int) -> Atom | None:
        """What the passes made of a copy's result, as many copies further."""
        v = self.table.number.get(atom, -1)
        s = int(self.layout.of[v])
        if s < 0:
            # Made outside of regions, for a copy that stays as it is; literals are all the same.
            return atom if own in (0, self.missing) else None
        at = int(self.layout.at[v] + self.shift(own, sign, s) * self.layout.step[s])
        return self.values[s][at] if 0 <= at < len(self.values[s]) else None
