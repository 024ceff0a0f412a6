"""Simplify: constant folding, identities, common subexpressions and dead code, in one walk.

Equations are read in order; each is folded, replaced by a rule of `algebra`, found to be equal to
an earlier one, or copied. Equations without a use are removed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from spmd.base.dtypes import is_small
from spmd.base.record import record
from spmd.collectives.axis import pcast_p, pvary_p, unvary_p
from spmd.compile.expressions.scalar_ops import ENTRIES
from spmd.compile.passes.algebra import (
    PRODUCERS,
    RULES,
    WITH_LITERAL,
    Producers,
    Rule,
    pair_rules,
    same_type,
)
from spmd.compile.passes.dead_code import prune
from spmd.compile.passes.rewriter import finish, map_subjaxprs, start
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Literal, Var
from spmd.core.primitive import Primitive, is_refused
from spmd.core.structural import add_any_p, broadcast_in_dim_p
from spmd.lax.arithmetic import add_p
from spmd.lax.concatenate import split_p
from spmd.lax.slicing import slice_p
from spmd.sharding.constraint import shard_alike_p


def simplify(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr with less to do."""
    writer = start(closed, Producers)
    _Simplifier(writer).run(closed)
    return prune(finish(writer, closed))


@record
class _Facts:
    """The facts about a primitive that the walk needs."""

    rule: Rule | None  # of `algebra`
    needs_literal: bool  # the rule finds nothing without one
    is_elementwise: bool
    is_producer: bool  # rules ask for its results
    names: frozenset[str]  # of its parameters, as far as was seen
    values: Callable[[dict[str, Any]], Any]  # those parameters, in order of their names


class _Simplifier:
    """One walk over a jaxpr."""

    def __init__(self, writer: Producers):
        self.writer = writer
        self.rules = RULES | pair_rules(writer)
        self.facts: dict[Primitive, _Facts] = {}
        self.known: dict[Any, tuple[Var, ...]] = {}

    def facts_of(self, eqn: Eqn) -> _Facts:
        """The facts about an equation's primitive."""
        found = self.facts.get(eqn.prim)
        if found is None:
            name = eqn.prim.name
            found = self.facts[eqn.prim] = _Facts(
                self.rules.get(name),
                name in WITH_LITERAL,
                name in ENTRIES,
                name in PRODUCERS,
                frozenset(eqn.params),
                itemgetter(*sorted(eqn.params)) if eqn.params else len,
            )
        return found

    def run(self, closed: ClosedJaxpr) -> None:
        nested, writer, facts_of = closed.jaxpr.nested, self.writer, self.facts_of
        for eqn in closed.eqns:
            ins, facts = writer.read_all(eqn.invars), facts_of(eqn)
            has_literal = Literal in map(type, ins)
            if len(eqn.outvars) == 1 and not eqn.effects:
                if eqn.prim in (pcast_p, pvary_p, unvary_p):  # types have done their work
                    writer.define(eqn.outvars[0], ins[0])
                    continue
                found = self.rewrite(eqn, ins, facts, has_literal)
                if found is not None:
                    writer.define(eqn.outvars[0], found)
                    continue
            if eqn.prim is shard_alike_p:  # values are laid out by now
                for out, operand in zip(eqn.outvars, ins, strict=True):
                    writer.define(out, operand)
                continue
            if eqn.prim is split_p:
                self.slices(eqn, ins[0])
                continue
            params = map_subjaxprs(eqn, simplify) if eqn in nested else eqn.params
            if ins is not eqn.invars or params is not eqn.params:
                eqn = Eqn(eqn.prim, ins, eqn.outvars, params, eqn.effects, eqn.source)
            written = self.emit(eqn, facts, has_literal)
            if written is not eqn.outvars:
                for old, new in zip(eqn.outvars, written, strict=True):
                    writer.define(old, new)

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
            self.writer.define(out, self.emit(made, self.facts_of(made), False)[0])

    def rewrite(
        self, eqn: Eqn, ins: Sequence[Atom], facts: _Facts, has_literal: bool
    ) -> Atom | None:
        """The atom that an equation of one result is equal to, if that is found."""
        rule, out, found = facts.rule, eqn.outvars[0].aval, None
        if has_literal and facts.is_elementwise and not out.shape:
            found = self.fold(eqn, ins)
            if found is not None:
                return found
        if rule is not None and (has_literal or not facts.needs_literal):
            found = rule(self.writer, eqn, ins)
        if found is None:
            if not facts.is_elementwise or self.writer.scalars.keys().isdisjoint(ins):
                return None
            if out.shape not in [a.aval.shape for a in ins]:
                return None  # bits cast to another width have a dim more or less
            found = self.strip_broadcasts(eqn, ins)
        return found if same_type(found.aval, out) else None

    def fold(self, eqn: Eqn, ins: Sequence[Atom]) -> Literal | None:
        """The literal that an elementwise scalar equation of literals computes."""
        out = eqn.outvars[0].aval
        if out.dtype.names or is_small(out.dtype) or out.vma or is_refused(eqn.prim.impl):
            return None
        arrays = [np.asarray(a.val, a.aval.dtype) for a in ins if isinstance(a, Literal)]
        if len(arrays) != len(ins):
            return None
        with np.errstate(all="ignore"):
            value = eqn.prim.rule("impl")(np, *arrays, **eqn.params)
        return Literal(np.asarray(value, out.dtype)[()], out)

    def strip_broadcasts(self, eqn: Eqn, ins: Sequence[Atom]) -> Atom:
        """Let an elementwise equation read scalars directly instead of their broadcasts."""
        scalars = self.writer.scalars
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
        facts, has_literal = self.facts_of(again), Literal in map(type, operands)
        found = self.rewrite(again, operands, facts, has_literal)
        if found is not None:
            return found
        return self.emit(again, facts, has_literal)[0]

    def emit(self, eqn: Eqn, facts: _Facts, has_literal: bool) -> tuple[Var, ...]:
        """Append an equation; give the results of an earlier equal one if there is one."""
        outs = eqn.outvars
        if not eqn.effects:
            ins = tuple([_atom_key(a) for a in eqn.invars]) if has_literal else eqn.invars
            key: Any = eqn.prim, ins
            if eqn.params:
                # Values of the same names in the same order, or else whatever names there are.
                if eqn.params.keys() == facts.names:
                    key = eqn.prim, ins, facts.values(eqn.params)
                else:
                    key = eqn.prim, ins, None, tuple(sorted(eqn.params.items()))
            found = self.known.setdefault(key, outs)
            if found is not outs:
                return found
        self.writer.eqns.append(eqn)
        if facts.is_producer:
            self.writer.note(eqn)
        return outs


def _atom_key(atom: Atom) -> Any:
    if isinstance(atom, Literal):
        stored = np.asarray(atom.val, atom.aval.dtype)
        return atom.aval.dtype, stored.tobytes()
    return atom
