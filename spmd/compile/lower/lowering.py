"""Lowering: an optimised jaxpr becomes a schedule.

`Lowering` walks the equations and asks `RULES` how each becomes steps; an equation without a rule
becomes a `Host` step that runs its primitive's `impl`, so that every primitive runs from its first
day. A result is written right where it is wanted: into an output of the program, a slot of a
scan's stack, or a temporary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from spmd.compile.lower.host_steps import HostCall
from spmd.compile.lower.steps import (
    CONST,
    INPUT,
    OUTPUT,
    TEMP,
    Buffer,
    Copy,
    Host,
    Ref,
    Schedule,
    Step,
    View,
    view,
)
from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var

Rule: TypeAlias = Callable[["Lowering", Eqn], None]
Watch: TypeAlias = Callable[[Sequence[Step]], None]
Hint: TypeAlias = Callable[["Lowering", Eqn, dict[Var, Eqn], Counter[Var]], None]

# How a primitive becomes steps, by name; filled by the modules of this package.
RULES: dict[str, Rule] = {}

# Placement hints, by the name of a primitive: functions that note where an equation wants its
# operands. They are called before any equation of the body is written, with the body's makers and
# how often each variable is read.
HINTS: dict[str, Hint] = {}

# Results that are an operand's bytes under another type: nothing is done for them.
ALIASES = frozenset(
    "reshape squeeze copy stop_gradient name pvary unvary sharding_constraint device_put".split()
)

T = TypeVar("T")


def declares(table: dict[str, T], *names: str) -> Callable[[T], T]:
    """A decorator: puts a function into a table, under some names of primitives."""

    def declare(function: T) -> T:
        table.update(dict.fromkeys(names, function))
        return function

    return declare


# `@rule("add")`: how the primitives of these names become steps.
rule = partial(declares, RULES)
# `@hints("concatenate")`: a placement hint for the operands of these primitives.
hints = partial(declares, HINTS)


def lower(closed: ClosedJaxpr, topology: Any = None, watch: Watch | None = None) -> Schedule:
    """The schedule of an optimised closed jaxpr; `topology` is the mesh of a per-device one.

    `watch` sees the steps of the program, those outside of loops, as they are written.
    """
    lowering = Lowering(topology, closed.jaxpr.name, watch)
    schedule, jaxpr = lowering.schedule, closed.jaxpr
    places = [lowering.buffer(INPUT, v.aval.nbytes) for v in jaxpr.invars]
    schedule.inputs.extend(places)
    number = {v: k for k, v in enumerate(jaxpr.invars)}
    wanted: list[Ref | None] = []
    for atom in jaxpr.outvars:
        if isinstance(atom, Var) and atom in number:
            schedule.results.append(number[atom])
            wanted.append(None)
            continue
        out = lowering.buffer(OUTPUT, atom.aval.nbytes)
        schedule.outputs.append(out)
        schedule.results.append(out)
        wanted.append(Ref(out))
    lowering.body(closed, [Ref(b) for b in places], wanted)
    schedule.steps.extend(lowering.steps)
    return schedule


class Lowering:
    """Walks jaxprs, keeps where each variable's value is, and collects steps."""

    def __init__(self, topology: Any = None, program: str = "", watch: Watch | None = None) -> None:
        self.topology = topology
        self.program = program  # its name, for texts about its steps
        self.schedule = Schedule()
        self.steps: list[Step] = []
        self._program_steps = self.steps
        self._watch = watch
        self._watched = 0  # how many of the program's steps
        self.level = 0  # how many loops are around the steps being written
        self.refs: dict[Var, Ref] = {}
        self.targets: dict[Var, Ref] = {}
        self.views: dict[Var, Any] = {}  # of `parts.View`: places that are not contiguous
        self.written: set[Var] = set()  # variables whose view holds their value
        self.unread: set[Var] = set()  # results that a kernel need not write
        self.spread: dict[Var, Literal] = {}  # variables that are one number everywhere: no memory
        self._counts: dict[str, int] = {}
        self._loops = 0
        self._consts: dict[Any, tuple[Ref, Any]] = {}

    # ---- places ----

    def buffer(self, kind: str, nbytes: int) -> Buffer:
        """A new buffer."""
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        return Buffer(kind, nbytes, number)

    def count(self, kind: str) -> int:
        """The number of buffers of a kind there are so far; the number of the next one."""
        return self._counts.get(kind, 0)

    def next_parallel(self) -> int:
        """A number for a parallel loop."""
        self._loops += 1
        return self._loops

    def temp(self, aval: ShapedArray) -> Ref:
        """A new temporary."""
        return Ref(self.buffer(TEMP, aval.nbytes))

    def const(self, value: Any, aval: ShapedArray) -> Ref:
        """The place of a constant."""
        key: Any = id(value)
        if isinstance(value, (np.generic, bool, int, float, complex)):
            stored = np.asarray(value, aval.dtype)
            key = (stored.dtype, stored.tobytes())
        found = self._consts.get(key)
        if found is None:
            place = self.buffer(CONST, aval.nbytes)
            self.schedule.consts.append((place, (value, aval)))
            # The value is kept with its id, which would otherwise be given to another object.
            found = self._consts[key] = (Ref(place), value)
        return found[0]

    def ref(self, atom: Atom) -> Ref:
        """The place of a value."""
        if isinstance(atom, Literal):
            return self.const(atom.val, atom.aval)
        return self.refs[atom]

    def place(self, var: Var) -> Ref:
        """The place that a result is written to: the one that is wanted, or a new temporary."""
        found = self.targets.get(var)
        if found is None:
            found = self.temp(var.aval)
        self.refs[var] = found
        return found

    # ---- bodies ----

    def body(
        self, closed: ClosedJaxpr, operands: Sequence[Ref], wanted: Sequence[Ref | None]
    ) -> list[Ref]:
        """Write the steps of a jaxpr; give where its results are.

        Results are where they are `wanted`; those that are wanted nowhere may be anywhere, among
        the operands too.
        """
        jaxpr = closed.jaxpr
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            self.refs[var] = self.const(value, var.aval)
        self.refs.update(zip(jaxpr.invars, operands, strict=True))
        self._note_places(jaxpr, wanted)
        for eqn in jaxpr.eqns:
            self.equation(eqn)
            if self._watch is not None and self.steps is self._program_steps:
                new, self._watched = self._watched, len(self.steps)
                self._watch(self.steps[new:])
        found = []
        for atom, target in zip(jaxpr.outvars, wanted, strict=True):
            place = self.ref(atom)
            if target is not None and place != target:
                self.copy(target, place, atom.aval.nbytes)
                place = target
            found.append(place)
        return found

    def _note_places(self, jaxpr: Jaxpr, wanted: Sequence[Ref | None]) -> None:
        """Note where results are wanted, also through equations that only rename bytes."""
        made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
        for var in made:  # the same jaxpr may have been written before, for another equation
            self.targets.pop(var, None)
            self.views.pop(var, None)
            self.written.discard(var)
            self.spread.pop(var, None)
        for atom, target in zip(jaxpr.outvars, wanted, strict=True):
            if isinstance(atom, Var) and atom in made and target is not None:
                self.targets.setdefault(atom, target)
        makers: dict[Var, Eqn] = {}
        readers: Counter[Var] = Counter()
        if any(eqn.prim.name in HINTS for eqn in jaxpr.eqns):
            makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
            read = (*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars))
            readers.update(v for v in read if isinstance(v, Var))
        for eqn in reversed(jaxpr.eqns):
            if eqn.prim.name in HINTS:
                HINTS[eqn.prim.name](self, eqn, makers, readers)
            if eqn.prim.name not in ALIASES:
                continue
            operand, out = eqn.invars[0], eqn.outvars[0]
            if isinstance(operand, Var) and operand in made and out in self.targets:
                self.targets.setdefault(operand, self.targets[out])

    @contextmanager
    def loop(self) -> Iterator[int]:
        """Write steps one loop further in; gives the level of that loop."""
        self.level += 1
        yield self.level - 1
        self.level -= 1

    def block(self, write: Callable[[], Any]) -> tuple[tuple[Step, ...], Any]:
        """The steps that `write` writes, and its result."""
        outside, self.steps = self.steps, []
        try:
            result = write()
            return tuple(self.steps), result
        finally:
            self.steps = outside

    # ---- equations ----

    def equation(self, eqn: Eqn) -> None:
        """Write the steps of one equation."""
        if eqn.prim.name in ALIASES or eqn.prim.name == "optimization_barrier":
            for operand, out in zip(eqn.invars, eqn.outvars, strict=True):
                if operand in self.written:
                    self.written.add(out)
                else:
                    self.refs[out] = self.ref(operand)
        elif all(v.aval.nbytes == 0 for v in eqn.outvars) and not eqn.effects:
            for var in eqn.outvars:
                self.place(var)
        else:
            RULES.get(eqn.prim.name, host)(self, eqn)

    def copy(self, target: Ref, source: Ref, nbytes: int) -> None:
        """Copy a value."""
        if nbytes and target != source:
            self.steps.append(Copy(target, source, nbytes))


def host(lowering: Lowering, eqn: Eqn) -> None:
    """The step that runs an equation's `impl` over NumPy."""
    read: list[View[Ref]] = []
    slots: list[tuple[bool, Any]] = []
    for atom in eqn.invars:
        if isinstance(atom, Literal):
            slots.append((False, np.asarray(atom.val, atom.aval.dtype)))
        else:
            slots.append((True, len(read)))
            read.append(view(lowering.refs[atom], atom.aval))
    outs = tuple(view(lowering.place(v), v.aval) for v in eqn.outvars)
    call = HostCall(eqn.prim, eqn.params, tuple(slots))
    effects = bool(eqn.effects)
    lowering.steps.append(Host(call, tuple(read), outs, eqn.prim.name, eqn.source, effects=effects))
