"""Rows that go far: large operands joined along a split dim, slices and paddings of much of one.

A row of the result is a row of one operand, at a fixed distance. Where that is far from the
device's own rows one exchange brings each device those that it lacks; `halos.py` has the near
ones, and those that are part of one another are exchanged once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from spmd.base.record import record
from spmd.collectives.exchange import exchange
from spmd.collectives.ppermute import ppermute_p
from spmd.collectives.rectangles import Copies, Copy, common, interval
from spmd.core.aval import typeof
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Var
from spmd.core.rewriting.equations import map_subjaxprs
from spmd.lax.concatenate import concatenate
from spmd.lax.slicing import slice_p

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


# ---- halos that are part of one another --------------------------------------------------------


def share_halos(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr in which no part of a value is permuted that is part of another one.

    `a[1:-1] + a[2:]` of split rows reads one row of the next device, and two: it gets two.
    """
    if ppermute_p.name not in closed.jaxpr.primitives:
        return closed
    nested = closed.jaxpr.nested
    eqns = [
        eqn.replace(params=map_subjaxprs(eqn, share_halos)) if eqn in nested else eqn
        for eqn in closed.eqns
    ]
    shared = [rows for rows in _halos_by_value(eqns) if len(rows) > 1]
    made = _with_shared(eqns, shared) or eqns
    return ClosedJaxpr(closed.jaxpr.replace(eqns=made), closed.consts)


@record
class _Halo:
    """Part of a value that is permuted: the numbers of both equations, and the part."""

    cut: int
    moved: int
    starts: tuple[int, ...]
    limits: tuple[int, ...]

    def size(self) -> int:
        """The number of elements."""
        return math.prod(b - a for a, b in zip(self.starts, self.limits, strict=True))

    def has(self, other: _Halo) -> bool:
        """Whether another part is one of this."""
        starts = zip(self.starts, other.starts, strict=True)
        limits = zip(self.limits, other.limits, strict=True)
        return all(a <= b for a, b in starts) and all(a >= b for a, b in limits)


def _halos_by_value(eqns: Sequence[Eqn]) -> list[list[_Halo]]:
    """The parts of each value that go the same way, in the order of the program."""
    cuts: dict[Atom, int] = {}
    found: dict[Any, list[_Halo]] = {}
    for k, eqn in enumerate(eqns):
        if eqn.prim is slice_p and eqn.params["strides"] is None:
            cuts[eqn.outvars[0]] = k
        elif eqn.prim is ppermute_p and (at := cuts.get(eqn.invars[0])) is not None:
            cut = eqns[at]
            starts, limits = cut.params["start_indices"], cut.params["limit_indices"]
            way = cut.invars[0], tuple(sorted(eqn.params.items()))
            found.setdefault(way, []).append(_Halo(at, k, tuple(starts), tuple(limits)))
    return list(found.values())


def _with_shared(eqns: Sequence[Eqn], groups: Sequence[list[_Halo]]) -> list[Eqn] | None:
    """The equations with one exchange for parts of one; None if there are no such parts."""
    before: dict[int, list[int]] = {}
    instead: dict[int, Eqn] = {}
    for halos in groups:
        wide = max(halos, key=_Halo.size)
        parts = [h for h in halos if h is not wide and wide.has(h)]
        if not parts:
            continue
        first = min(h.moved for h in parts)
        if first < wide.moved:  # the first reader has it made
            before[first] = [k for k in (wide.cut, wide.moved) if k > first]
        (source,) = eqns[wide.moved].outvars
        for h in parts:
            instead[h.moved] = _cut(source, wide, h, eqns[h.moved])
    if not instead:
        return None
    early = {k for numbers in before.values() for k in numbers}
    made = []
    for k, eqn in enumerate(eqns):
        made += [eqns[n] for n in before.get(k, ())]
        if k not in early:
            made.append(instead.get(k, eqn))
    return made


def _cut(source: Var, wide: _Halo, part: _Halo, eqn: Eqn) -> Eqn:
    """The equation that makes a permuted part of the larger one."""
    offsets = wide.starts
    params = {
        "start_indices": tuple([a - o for a, o in zip(part.starts, offsets, strict=True)]),
        "limit_indices": tuple([b - o for b, o in zip(part.limits, offsets, strict=True)]),
        "strides": None,
    }
    return Eqn(slice_p, (source,), eqn.outvars, params, eqn.effects, eqn.source)
