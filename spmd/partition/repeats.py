"""Equal equations are one: what a program computes twice is computed, moved and added up once.

Before a program is partitioned its calls are written out, and equal equations merged. Two sums of
one value would be terms that two readers finish, each by a collective of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.source import UNKNOWN, Source
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.rewrite import dce
from spmd.core.structural import broadcast_in_dim_p
from spmd.lax.control_cond import cond_p
from spmd.lax.control_scan import scan_p
from spmd.lax.control_while import while_p
from spmd.partition.rules import called_jaxpr
from spmd.sharding.shard_map_rules import shard_map_p


def without_repeats(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal program without calls, equal equations, and equations that nothing reads."""
    jaxpr, walk = closed.jaxpr, _Walk()
    walk.define_consts(closed)
    walk.run(jaxpr)
    outs = walk.read_all(jaxpr.outvars)
    consts = list(walk.consts.values())
    made = jaxpr.replace(constvars=[v for v, _ in consts], eqns=walk.eqns, outvars=outs)
    made, _ = dce(made, (True,) * len(outs))
    return ClosedJaxpr(made, [value for _, value in consts])


class _Walk:
    """One walk over a jaxpr and the calls in it.

    `atoms` stand for old variables. Variables with one number, another variable, have equal values;
    `known` are the equations by primitive and numbers of operands. Those that are `free` can be
    made anew, in any layout, without a move.
    """

    def __init__(self) -> None:
        self.eqns: list[Eqn] = []
        self.atoms: dict[Any, Atom] = {}
        self.numbers: dict[Any, Any] = {}
        self.free: set[Any] = set()
        self.known: dict[Any, list[Eqn]] = {}
        self.consts: dict[int, tuple[Var, Any]] = {}

    def define_consts(self, closed: ClosedJaxpr) -> None:
        """Take over constants; one that is there twice has one variable."""
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            first, _ = self.consts.setdefault(id(value), (var, value))
            if first is not var:
                self.atoms[var] = first

    def read_all(self, atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
        """The new atoms for old ones; the same tuple if nothing changed."""
        found = self.atoms
        for atom in atoms:
            if atom in found:
                return tuple([found.get(a, a) for a in atoms])
        return atoms

    def run(self, jaxpr: Jaxpr, source: Source | None = None) -> None:
        """Write the equations of a jaxpr; those of a call, with new names, and its `source`."""
        nested = jaxpr.nested
        for eqn in jaxpr.eqns:
            ins, outs, params, line = self.read_all(eqn.invars), eqn.outvars, eqn.params, eqn.source
            old = outs
            if source is not None and line is UNKNOWN:
                line = source
            if eqn.prim.inline is not None or eqn.prim.expand is not None:
                call = called_jaxpr(eqn)
                if call is not None:
                    self._call(call, ins, outs, line)
                    continue
            if source is not None:
                outs = tuple([Var(v.aval) for v in outs])
            if eqn in nested and _has_bodies(eqn):
                params = _with_bodies(params)
            is_as_before = ins is eqn.invars and params is eqn.params
            if source is not None or not is_as_before:
                eqn = Eqn(eqn.prim, ins, outs, params, eqn.effects, line)
            equal = None if eqn.effects else self._merge(eqn)
            if equal is not None:
                self.atoms.update(zip(old, equal, strict=True))
                continue
            self.eqns.append(eqn)
            if source is not None:
                self.atoms.update(zip(old, outs, strict=True))

    def _call(
        self, body: ClosedJaxpr, ins: Sequence[Atom], outs: Sequence[Var], line: Source
    ) -> None:
        self.define_consts(body)
        self.atoms.update(zip(body.jaxpr.invars, ins, strict=True))
        self.run(body.jaxpr, line)
        self.atoms.update(zip(outs, self.read_all(body.jaxpr.outvars), strict=True))

    def _merge(self, eqn: Eqn) -> Sequence[Var] | None:
        """The results of an equal equation that is written already.

        What is made of no variable, and what is repeated along new dims, moves nothing: each reader
        has its own, laid out as it is wanted there, and the readers may be equal.
        """
        numbers, names = self.numbers, []
        is_free = True
        for atom in eqn.invars:
            if type(atom) is Literal:
                names.append(_literal(atom))
            else:
                is_free = is_free and atom in self.free
                names.append(numbers.get(atom, atom))
        if (is_free and not _shrinks(eqn)) or eqn.prim is broadcast_in_dim_p:
            is_free = True
            self.free.update(eqn.outvars)
        before = self.known.setdefault((eqn.prim, *names), [])
        for other in before:
            if other.params is eqn.params or _are_equal(other.params, eqn.params):
                if not _have_types_of(eqn, other):
                    continue
                if is_free:
                    pairs = zip(eqn.outvars, other.outvars, strict=True)
                    numbers.update((v, numbers.get(first, first)) for v, first in pairs)
                    return None
                return other.outvars
        before.append(eqn)
        return None


def _literal(atom: Literal) -> Any:
    return atom.aval, np.asarray(atom.val).tobytes()


def _shrinks(eqn: Eqn) -> bool:
    """Whether it has fewer elements than an operand: a reduction may have to be added up."""
    return any(a.aval.size > v.aval.size for a in eqn.invars for v in eqn.outvars)


def _have_types_of(eqn: Eqn, other: Eqn) -> bool:
    return all(a.aval == b.aval for a, b in zip(eqn.outvars, other.outvars, strict=True))


def _are_equal(params: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether parameters are equal, and of the same types: 0.0 is not -0.0."""
    if params.keys() != others.keys():
        return False
    try:
        hash(tuple(params.values()))
        return all(
            x is others[name] or (x == others[name] and repr(x) == repr(others[name]))
            for name, x in params.items()
        )
    except TypeError:  # a parameter that has no hash
        return False


def _has_bodies(eqn: Eqn) -> bool:
    """Whether jaxprs of an equation are partitioned; the body of a map along all axes is not."""
    return eqn.prim in _LOOPS or (eqn.prim is shard_map_p and eqn.params.get("manual") is not None)


_LOOPS = (scan_p, while_p, cond_p)


def _with_bodies(params: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, ClosedJaxpr):
            changed[name] = without_repeats(value)
        elif isinstance(value, tuple) and any(isinstance(v, ClosedJaxpr) for v in value):
            changed[name] = tuple(
                without_repeats(v) if isinstance(v, ClosedJaxpr) else v for v in value
            )
    return params | changed
