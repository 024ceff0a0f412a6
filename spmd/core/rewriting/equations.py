"""Rewrites equation by equation: a jaxpr under construction, and a walk over an old one.

A rewrite reads the old equations in order and writes new ones; old variables that changed stand for
new atoms through an environment, all others for themselves. `JaxprBuilder` holds both, `Merging`
writes equal equations once, and a `Walk` decides what becomes of an equation. An unchanged equation
costs next to nothing: the new jaxpr has the very object that the old one had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from spmd.base.source import UNKNOWN, Source
from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.primitive import Primitive

Pass = Callable[[ClosedJaxpr], ClosedJaxpr]


# ---- writing -----------------------------------------------------------------------------------


class JaxprBuilder:
    """Collects the equations and constants of a new jaxpr, and the atoms for old variables."""

    # Hears of new equations: for writers that are asked about those of one result.
    note: Callable[[Eqn], None] | None = None

    def __init__(self) -> None:
        self.eqns: list[Eqn] = []
        self.consts: dict[int, tuple[Any, Var]] = {}
        self._atoms: dict[Var, Atom] = {}

    def read(self, atom: Atom) -> Atom:
        """The new jaxpr's atom for an atom of the old one."""
        return self._atoms.get(atom, atom)  # type: ignore[arg-type]

    def define(self, old: Var, new: Atom) -> None:
        """Let an old variable stand for a new atom from now on."""
        self._atoms[old] = new

    def const(self, value: Any, aval: ShapedArray) -> Var:
        """The variable of a constant; the same object gets the same variable."""
        return self.consts.setdefault(id(value), (value, Var(aval)))[1]

    def define_consts(self, closed: ClosedJaxpr) -> None:
        """Take over the constants of a closed jaxpr."""
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            self.define(var, self.const(value, var.aval))

    def keep(self, eqn: Eqn, params: dict[str, Any] | None = None) -> None:
        """Write an old equation with its operands replaced; its results stay the same variables."""
        ins = self.read_all(eqn.invars)
        if ins is not eqn.invars or not (params is None or params is eqn.params):
            changed = eqn.params if params is None else params
            eqn = Eqn(eqn.prim, ins, eqn.outvars, changed, eqn.effects, eqn.source)
        self.eqns.append(eqn)

    def read_all(self, atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
        """The new jaxpr's atoms for atoms of the old one; the same tuple if nothing changed."""
        found = self._atoms
        if not found:
            return atoms
        for atom in atoms:
            if atom in found:
                return tuple([found.get(a, a) for a in atoms])  # type: ignore[arg-type]
        return atoms

    def copy(self, eqn: Eqn, params: dict[str, Any] | None = None) -> None:
        """Write an old equation with its operands replaced and its results renamed.

        An equation that is written twice, as in a body that is called twice, has to have new names.
        """
        outs = tuple([Var(v.aval) for v in eqn.outvars])
        ins = self.read_all(eqn.invars)
        changed = eqn.params if params is None else params
        self.eqns.append(Eqn(eqn.prim, ins, outs, changed, eqn.effects, eqn.source))
        for old, new in zip(eqn.outvars, outs, strict=True):
            self.define(old, new)

    def emit(
        self,
        prim: Primitive,
        operands: Sequence[Atom],
        params: dict[str, Any],
        source: Source = UNKNOWN,
    ) -> Var:
        """Write a new equation of one result, whose type the primitive's abstract rule gives."""
        out = Var(prim.rule("abstract")(*[a.aval for a in operands], **params))
        effects = prim.effects(params)
        return self.write(Eqn(prim, tuple(operands), (out,), params, effects, source))[0]

    def write(self, eqn: Eqn) -> tuple[Var, ...]:
        """Write a new equation; the variables that have its results."""
        self.eqns.append(eqn)
        if self.note is not None:
            self.note(eqn)
        return eqn.outvars

    def close(self, invars: Sequence[Var], outvars: Sequence[Atom], name: str) -> ClosedJaxpr:
        """The finished jaxpr."""
        pairs = list(self.consts.values())
        jaxpr = Jaxpr([var for _, var in pairs], invars, self.eqns, outvars, name)
        return ClosedJaxpr(jaxpr, [value for value, _ in pairs])


W = TypeVar("W", bound=JaxprBuilder)


def start(closed: ClosedJaxpr, kind: type[W] = JaxprBuilder) -> W:
    """A writer for the rewriting of `closed`, with the same inputs and constants."""
    writer = kind()
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        _, first = writer.consts.setdefault(id(value), (value, var))
        if first is not var:
            writer.define(var, first)
    return writer


def finish(writer: JaxprBuilder, closed: ClosedJaxpr) -> ClosedJaxpr:
    """The rewritten form of `closed`, once its equations are written."""
    jaxpr, pairs = closed.jaxpr, list(writer.consts.values())
    made = jaxpr.replace(
        constvars=[var for _, var in pairs],
        eqns=writer.eqns,
        outvars=writer.read_all(jaxpr.outvars),
    )
    return ClosedJaxpr(made, [value for value, _ in pairs])


def map_subjaxprs(eqn: Eqn, step: Pass) -> dict[str, Any]:
    """The parameters of an equation with `step` applied to the closed jaxprs among them.

    `Jaxpr.nested` says which equations have any.
    """
    changed = {}
    for name, value in eqn.params.items():
        if isinstance(value, ClosedJaxpr):
            changed[name] = step(value)
        elif isinstance(value, tuple) and any(isinstance(v, ClosedJaxpr) for v in value):
            changed[name] = tuple(step(v) if isinstance(v, ClosedJaxpr) else v for v in value)
    return eqn.params | changed if changed else eqn.params


# ---- equal equations ---------------------------------------------------------------------------


class Merging(JaxprBuilder):
    """Writes each of some equal equations once: the others have its results.

    Equations are equal if they have one primitive and equal operands and parameters. `keeps` says
    of which equations each is written, although an equal one is; their readers may be equal.
    """

    keeps: Callable[[Eqn], bool] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Any, Eqn] = {}
        # Variables with one number, another variable, have equal values.
        self.numbers: dict[Any, Any] = {}
        self._names: dict[Primitive, tuple[frozenset[str], Callable[[dict[str, Any]], Any]]] = {}

    def is_equal(self, eqn: Eqn, first: Eqn) -> bool:
        """Whether two equations are the same one: 0.0 is equal to -0.0, and True to 1."""
        if eqn.params is first.params:
            return True
        others = first.params
        return all(x is others[n] or repr(x) == repr(others[n]) for n, x in eqn.params.items())

    def write(self, eqn: Eqn) -> tuple[Var, ...]:
        """Write an equation, if no equal one is written; the variables that have its results."""
        if not eqn.effects:
            first, keeps = self._first(eqn), self.keeps
            is_kept = keeps is not None and keeps(eqn)
            if first is not eqn:
                if not is_kept:
                    return first.outvars
                numbers = self.numbers
                for var, other in zip(eqn.outvars, first.outvars, strict=True):
                    numbers[var] = numbers.get(other, other)
        self.eqns.append(eqn)
        if self.note is not None:
            self.note(eqn)
        return eqn.outvars

    def _first(self, eqn: Eqn) -> Eqn:
        """The equation that was first among those equal to one."""
        prim, ins, params, numbers = eqn.prim, eqn.invars, eqn.params, self.numbers
        if numbers or Literal in map(type, ins):
            ins = tuple([_literal(a) if type(a) is Literal else numbers.get(a, a) for a in ins])
        key: Any = prim, ins
        if params:
            known = self._names.get(prim)
            if known is None:
                known = self._names[prim] = frozenset(params), itemgetter(*sorted(params))
            # Values of the same names in the same order, or else whatever names there are.
            if params.keys() == known[0]:
                key = prim, ins, known[1](params)
            else:
                key = prim, ins, None, tuple(sorted(params.items()))
        try:
            first = self.known.setdefault(key, eqn)
        except TypeError:  # a parameter has no hash
            return eqn
        while first is not eqn and not self.is_equal(eqn, first):
            key = key, None
            first = self.known.setdefault(key, eqn)
        return first


def _literal(atom: Literal) -> Any:
    stored = np.asarray(atom.val, atom.aval.dtype)
    return atom.aval.dtype, stored.tobytes()


# ---- walks -------------------------------------------------------------------------------------


class Walk:
    """One walk over a jaxpr; by itself it copies.

    It may write something else in an equation's place, or walk through jaxprs that it holds. Its
    writer says which equations are there already.
    """

    def __init__(self, writer: JaxprBuilder):
        self.writer = writer
        # The primitives whose equations are never replaced, as far as that is known.
        self.kept: set[Primitive] = set()

    def replaces(self, eqn: Eqn, ins: tuple[Atom, ...], source: Source) -> bool:
        """Write something else for an equation with such operands, if there is something else."""
        return False

    def params_of(self, eqn: Eqn) -> dict[str, Any]:
        """The parameters of an equation that holds jaxprs, when these have been walked through."""
        return eqn.params

    def run(self, jaxpr: Jaxpr, call: Source | None = None) -> None:
        """Write all equations of a jaxpr; those of a call, made at `call`, under new names.

        A body that is called twice is written twice.
        """
        nested, writer, kept = jaxpr.nested, self.writer, self.kept
        for eqn in jaxpr.eqns:
            ins, outs, params, source = (
                writer.read_all(eqn.invars),
                eqn.outvars,
                eqn.params,
                eqn.source,
            )
            if call is not None and source is UNKNOWN:
                source = call
            if eqn.prim not in kept and self.replaces(eqn, ins, source):
                continue
            if eqn in nested:
                params = self.params_of(eqn)
            if call is not None:
                outs = tuple([Var(v.aval) for v in outs])
            new = eqn
            if call is not None or ins is not eqn.invars or params is not eqn.params:
                new = Eqn(eqn.prim, ins, outs, params, eqn.effects, source)
            outs = writer.write(new)
            if outs is not eqn.outvars:
                self.define(eqn, outs)

    def define(self, eqn: Eqn, outs: Sequence[Atom]) -> None:
        """Let the results of an equation stand for new atoms from now on."""
        for old, new in zip(eqn.outvars, outs, strict=True):
            self.writer.define(old, new)

    def call(self, body: ClosedJaxpr, eqn: Eqn, ins: Sequence[Atom], source: Source) -> None:
        """Write the body of a call in the place of the equation that calls it."""
        writer, inside = self.writer, body.jaxpr
        writer.define_consts(body)
        for inner, operand in zip(inside.invars, ins, strict=True):
            writer.define(inner, operand)
        self.run(inside, source)
        self.define(eqn, writer.read_all(inside.outvars))
