"""Savings by constraints: a program is partitioned again with one value laid out otherwise.

Only what moves much is looked at. A saving is counted, not estimated: it is the difference of the
bytes that a device receives in the two programs, neither of which runs.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmd.base.amounts import size_text
from spmd.base.context import state
from spmd.base.record import record
from spmd.base.source import UNKNOWN, Source, current_source
from spmd.collectives.volume import KINDS, received
from spmd.compile.executable.select import partitioned
from spmd.compile.passes.hoist_invariants import hoist_invariants
from spmd.compile.passes.pipeline import inline_calls
from spmd.compile.passes.simplify import simplify
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr, Var, subjaxprs
from spmd.partition.moves import combined, moved
from spmd.partition.propagate import Cell, Plan, Split
from spmd.partition.unasked import Watch, watching
from spmd.partition.write import as_spec
from spmd.sharding.constraint import sharding_constraint_p

# Collectives by which a device receives so many bytes in a call are looked at, the largest first,
# and so many of them; less than this part of all bytes is no saving.
NOTABLE = 1 << 16
_MOST_LOOKED_AT = 4
_LEAST_SAVED = 0.02
# A program that computes more by this factor, as devices do work alike, saves nothing.
_MORE_WORK = 1.05


@record
class Saving:
    """The cause of a collective, and what a constraint would save; `saved` is 0 if none does.

    `made` is the line of the value that it moves, `reader` the primitive that wants it, laid out by
    the spec `want`; `received` are the bytes of one time. With the value of that line constrained
    to `spec` a device receives `saved` bytes less in a call.
    """

    kind: str
    source: Source
    made: Source
    reader: str
    want: str
    received: int
    spec: str
    saved: int

    @property
    def cause(self) -> str:
        """The value, the layout that is wanted of it, and the reader that wants it."""
        value = f"a value of {self.made.short}, " if self.made not in (self.source, UNKNOWN) else ""
        return f"{value}wanted as P({self.want}) by {self.reader}"

    def __str__(self) -> str:
        code = linecache.getline(self.made.file, self.made.line).strip()
        name = m[1] if (m := re.match(r"(\w+) *=[^=]", code)) else "x"
        made = f"{name} = lax.with_sharding_constraint({name}, NamedSharding(mesh, P({self.spec})))"
        what = "" if m else f", where x is the value of {self.made.short}"
        behind = f" behind {self.made.short}" if m else ""
        return f"{made}{behind}: {size_text(self.saved)} less received in all{what}"


@record
class _Move:
    """A move or a sum of the partitioner's: the value's cell, how it was split and is wanted."""

    kind: str
    cell: Cell
    want: Split
    axes: frozenset[Any]
    source: Source
    made: Source
    reader: str
    received: int


class _Recorder(Watch):
    """Keeps all moves and sums of a program while it is written."""

    def __init__(self) -> None:
        super().__init__("", {})
        self.found: list[_Move] = []

    def moved(self, value: Any, x: Any, have: Split, want: Split, sizes: Mapping[Any, int]) -> Any:
        before = len(state.trace.eqns)
        out = moved(x, value.cell.shape, have, want, sizes)
        rows = zip(have, want, strict=True)
        changed = frozenset(a for own, to in rows for a in {*own} ^ {*to})
        self._keep(value, want, changed, before, sizes)
        return out

    def combined(
        self, value: Any, x: Any, form: Any, want: Split, sizes: Mapping[Any, int]
    ) -> tuple[Any, Split]:
        before = len(state.trace.eqns)
        split, over, how = form
        out = combined(x, split, over, how, want, sizes)
        self._keep(value, want, frozenset(form[1]), before, sizes)
        return out

    def _keep(
        self,
        value: Any,
        want: Split,
        axes: frozenset[Any],
        before: int,
        sizes: Mapping[Any, int],
    ) -> None:
        for eqn in state.trace.eqns[before:]:
            if eqn.prim.name in KINDS:
                reader = "the result" if self.eqn is None else self.eqn.prim.name
                self.found.append(
                    _Move(
                        KINDS[eqn.prim.name],
                        value.cell,
                        want,
                        axes,
                        current_source(),
                        value.source or UNKNOWN,
                        reader,
                        received(eqn, sizes),
                    )
                )


def savings_of(closed: ClosedJaxpr, layouts: Any) -> list[Saving]:
    """For the largest moves of a program their causes, and the constraints that save most."""
    flat, plans, recorder = inline_calls(closed), [], _Recorder()
    with watching(recorder):
        made = partitioned(flat, layouts, plans)
    if made is None or not plans:
        return []
    (plan,) = plans
    total, work = _received(made), _work(made)
    notable = sorted(
        (m for m in recorder.found if m.received >= NOTABLE), key=lambda m: -m.received
    )
    found = []
    for move in notable[:_MOST_LOOKED_AT]:
        best, spec = 0, ""
        var = _value_of_line(flat, plan, move.cell)
        for candidate in _candidates(move, plan):
            if var is None:
                break
            tried: list[Plan] = []
            with watching(_Recorder()):
                again = partitioned(_constrained(flat, var, plan, candidate), layouts, tried)
            if again is not None and _work(again) <= _MORE_WORK * work:
                saved = total - _received(again)
                if saved > max(best, _LEAST_SAVED * total):
                    best, spec = saved, _entries(candidate)
        found.append(
            Saving(
                move.kind,
                move.source,
                move.made,
                move.reader,
                _entries(move.want),
                move.received,
                spec,
                best,
            )
        )
    return found


def _value_of_line(closed: ClosedJaxpr, plan: Plan, cell: Cell) -> Var | None:
    """The last value of this shape that a cell's line computes, which its user can constrain."""
    var = next((v for v, own in plan.top.cells.items() if own is cell), None)
    if var is None or var in closed.jaxpr.invars:
        return var
    numbers = [k for k, eqn in enumerate(closed.eqns) if var in eqn.outvars]
    if not numbers:
        return None
    source = closed.eqns[numbers[0]].source
    for eqn in closed.eqns[numbers[0] :]:
        if (eqn.source.file, eqn.source.line) != (source.file, source.line):
            break
        var = next((v for v in eqn.outvars if v.aval.shape == var.aval.shape), var)
    return var


def _candidates(move: _Move, plan: Plan) -> Iterator[Split]:
    """Other splits of a value along the axes over which it moves; none if its type fixes them.

    Users cannot name axes that the plan has cut.
    """
    cell, sizes = move.cell, plan.sizes
    if cell.barred or any(cell.closed):
        return
    axes = tuple(a for a in sizes if a in move.axes)
    rest = [tuple(a for a in own if a not in move.axes) for own in cell.axes]
    for d, size in enumerate(cell.shape):
        split = tuple((*own, *axes) if n == d else own for n, own in enumerate(rest))
        if plan.sub_axes is not None and any(a in plan.sub_axes.cut for own in split for a in own):
            continue
        if split != cell.axes and size % math.prod(sizes[a] for a in split[d]) == 0:
            yield split


def _constrained(closed: ClosedJaxpr, var: Var, plan: Plan, split: Split) -> ClosedJaxpr:
    """The program with one of its values laid out by a constraint."""
    jaxpr, new = closed.jaxpr, Var(var.aval)
    mesh = plan.mesh if plan.sub_axes is None else plan.sub_axes.outer
    params = {"mesh": mesh, "spec": as_spec(split, in_full=True)}

    def named(atoms: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(new if atom is var else atom for atom in atoms)

    eqns = []
    if var in jaxpr.invars:
        eqns.append(Eqn(sharding_constraint_p, (var,), (new,), params, frozenset(), UNKNOWN))
    for eqn in jaxpr.eqns:
        eqns.append(eqn.replace(invars=named(eqn.invars)) if var in eqn.invars else eqn)
        if var in eqn.outvars:
            effects: frozenset[Any] = frozenset()
            eqns.append(Eqn(sharding_constraint_p, (var,), (new,), params, effects, eqn.source))
    changed: Jaxpr = jaxpr.replace(eqns=eqns, outvars=named(jaxpr.outvars))
    return ClosedJaxpr(changed, closed.consts)


def _received(made: ClosedJaxpr) -> int:
    """The bytes that a device receives in a call."""
    params = made.eqns[0].params
    rows = _equations(simplify(hoist_invariants(params["jaxpr"])), 1)
    return sum(received(e, params["mesh"].shape) * n for e, n in rows if e.prim.name in KINDS)


def _work(made: ClosedJaxpr) -> int:
    """The work of a device: elements that it writes, and multiply-adds."""
    total = 0
    for eqn, times in _equations(made.eqns[0].params["jaxpr"], 1):
        size = sum(v.aval.size for v in eqn.outvars)
        if eqn.prim.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            size *= math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        total += size * times
    return total


def _equations(closed: ClosedJaxpr, times: int) -> Iterator[tuple[Eqn, int]]:
    """The equations of a program and of those inside, with how often they run."""
    for eqn in closed.eqns:
        inner = [x for _, x in subjaxprs(eqn.params)]
        if not inner:
            yield eqn, times
        inside = times * int(eqn.params.get("length", 1)) if eqn.prim.name == "scan" else times
        for x in inner:
            yield from _equations(x, inside)


def _entries(split: Split) -> str:
    return ", ".join(map(repr, as_spec(split)))
