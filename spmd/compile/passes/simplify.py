"""Simplify: constant folding, identities, common subexpressions and dead code, in one walk.

Equations are read in order; each is folded, replaced by a rule of `algebra`, found to be equal to
an earlier one, or copied. What nothing needs any more is removed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from spmd.collectives.axis import pvary_p
from spmd.compile.lower.elementwise import is_elementwise
from spmd.compile.passes.algebra import (
    RULES,
    WITH_LITERAL,
    Producers,
    Rule,
    pair_rules,
    same_type,
)
from spmd.compile.passes.prune import prune
from spmd.compile.passes.substitute import Writer, finish, map_subjaxprs, start
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Literal, Var
from spmd.core.primitive import Primitive, is_refused
from spmd.core.record import record
from spmd.core.structural import add_any_p, broadcast_in_dim_p
from spmd.lax.arithmetic import add_p
from spmd.lax.concatenate import split_p
from spmd.lax.slicing import slice_p


def simplify(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr with less to do."""
    writer = start(closed)
    _Simplifier(writer).run(closed)
    return prune(finish(writer, closed))


@record
class _Facts:
    """What the walk has to know of a primitive."""

    rule: Rule | None  # of `algebra`
    needs_literal: bool  # the rule finds nothing without one
    is_elementwise: bool
    names: frozenset[str]  # of its parameters, as far as was seen
    values: Callable[[dict[str, Any]], Any]  # those parameters, in order of their names


class _Simplifier:
    """One walk over a jaxpr."""

    def __init__(self, writer: Writer):
        self.writer = writer
        self.producers = Producers(writer)
        self.rules = RULES | pair_rules(self.producers)
        self.facts: dict[Primitive, _Facts] = {}
        self.known: dict[Any, tuple[Var, ...]] = {}

    def facts_of(self, eqn: Eqn) -> _Facts:
        """What there is to know of an equation's primitive."""
        found = self.facts.get(eqn.prim)
        if found is None:
            name = eqn.prim.name
            found = self.facts[eqn.prim] = _Facts(
                self.rules.get(name),
                name in WITH_LITERAL,
                is_elementwise(name),
                frozenset(eqn.params),
                itemgetter(*sorted(eqn.params)) if eqn.params else len,
            )
        return found

    def run(self, closed: ClosedJaxpr) -> None:
        nested, read_all = closed.jaxpr.nested, self.writer.read_all
        for eqn in closed.eqns:
            ins = read_all(eqn.invars)
            if eqn.prim is pvary_p:  # what varies matters to types, which have done their work
                self.writer.define(eqn.outvars[0], ins[0])
                continue
            if len(eqn.outvars) == 1 and not eqn.effects:
                found = self.rewrite(eqn, ins)
                if found is not None:
                    self.writer.define(eqn.outvars[0], found)
                    continue
            if eqn.prim is split_p:
                self.slices(eqn, ins[0])
            else:
                params = map_subjaxprs(eqn, simplify) if eqn in nested else eqn.params
                self.copy(eqn, ins, params)

    def slices(self, eqn: Eqn, operand: Atom) -> None:
        """Write a split as slices, which cost nothing in the kernels that read them."""
        axis, end = eqn.params["axis"], 0
        for size, out in zip(eqn.params["sizes"], eqn.outvars, strict=True):
            starts = [0] * operand.aval.ndim
            limits = list(operand.aval.shape)
            starts[axis], end = end, end + size
            limits[axis] = end
            params: dict[str, Any] = {"start_indices": tuple(starts), "strides": None}
            params["limit_indices"] = tuple(limits)
            piece = Var(out.aval)
            made = eqn.replace(prim=slice_p, invars=(operand,), outvars=(piece,), params=params)
            self.writer.define(out, self.emit(made)[0])

    def rewrite(self, eqn: Eqn, ins: Sequence[Atom]) -> Atom | None:
        """What an equation of one result is equal to, if that is found."""
        facts, out = self.facts_of(eqn), eqn.outvars[0].aval
        rule, found = facts.rule, None
        if facts.is_elementwise:
            has_literal = Literal in map(type, ins)
            if has_literal and not out.shape:
                found = self.fold(eqn, ins)
                if found is not None:
                    return found
            if rule is not None and (has_literal or not facts.needs_literal):
                found = rule(self.writer, eqn, ins)
            if found is None and out.shape and not self.producers.scalars().keys().isdisjoint(ins):
                found = self.strip_broadcasts(eqn, ins)
        elif rule is not None:
            found = rule(self.writer, eqn, ins)
        return found if found is not None and same_type(found.aval, out) else None

    def fold(self, eqn: Eqn, ins: Sequence[Atom]) -> Literal | None:
        """The literal that an elementwise scalar equation of literals computes."""
        out = eqn.outvars[0].aval
        if out.dtype.names or out.vma or is_refused(eqn.prim.impl):
            return None
        arrays = [np.asarray(a.val, a.aval.dtype) for a in ins if isinstance(a, Literal)]
        if len(arrays) != len(ins):
            return None
        with np.errstate(all="ignore"):
            value = eqn.prim.rule("impl")(np, *arrays, **eqn.params)
        return Literal(np.asarray(value, out.dtype)[()], out)

    def strip_broadcasts(self, eqn: Eqn, ins: Sequence[Atom]) -> Atom:
        """Let an elementwise equation read scalars directly instead of their broadcasts."""
        scalars = self.producers.scalars()
        operands = [scalars.get(a, a) for a in ins]
        if eqn.prim is add_any_p:
            eqn = eqn.replace(prim=add_p)  # which takes scalars
        out = eqn.outvars[0].aval
        result = self.write(eqn, operands)
        if result.aval.shape == out.shape:
            return result
        params = {"shape": out.shape, "broadcast_dimensions": ()}
        return self.writer.emit(broadcast_in_dim_p, [result], params, eqn.source)

    def write(self, eqn: Eqn, operands: Sequence[Atom]) -> Atom:
        """An equation of the same primitive on other operands, itself simplified."""
        avals = [a.aval for a in operands]
        out = Var(
            eqn.prim.rule("abstract")(*avals, **eqn.params).update(vma=eqn.outvars[0].aval.vma)
        )
        again = eqn.replace(invars=tuple(operands), outvars=(out,))
        found = self.rewrite(again, operands)
        if found is not None:
            return found
        return self.emit(again)[0]

    def copy(self, eqn: Eqn, ins: tuple[Atom, ...], params: dict[str, Any]) -> None:
        """Write the equation, unless an equal one is there already."""
        if ins is not eqn.invars or params is not eqn.params:
            eqn = Eqn(eqn.prim, ins, eqn.outvars, params, eqn.effects, eqn.source)
        written = self.emit(eqn)
        if written is not eqn.outvars:
            for old, new in zip(eqn.outvars, written, strict=True):
                self.writer.define(old, new)

    def emit(self, eqn: Eqn) -> tuple[Var, ...]:
        """Append an equation; give the results of an earlier equal one if there is one."""
        if eqn.effects:
            self.writer.eqns.append(eqn)
            return eqn.outvars
        outs = eqn.outvars
        found = self.known.setdefault(self.key(eqn), outs)
        if found is outs:
            self.writer.eqns.append(eqn)
        return found

    def key(self, eqn: Eqn) -> Any:
        """Equal for equations that compute equal results."""
        ins, params = eqn.invars, eqn.params
        if Literal in map(type, ins):
            ins = tuple([_atom_key(a) for a in ins])
        if not params:
            return eqn.prim, ins
        facts = self.facts_of(eqn)
        if params.keys() == facts.names:
            return eqn.prim, ins, facts.values(params)
        return eqn.prim, ins, None, tuple(sorted(params.items()))


def _atom_key(atom: Atom) -> Any:
    if isinstance(atom, Literal):
        stored = np.asarray(atom.val, atom.aval.dtype)
        return atom.aval.dtype, stored.tobytes()
    return atom
