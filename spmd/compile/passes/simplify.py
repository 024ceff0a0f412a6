"""Simplify: constant folding, identities, common subexpressions and dead code, in one walk.

Equations are read in order; each is folded, replaced by a rule of `algebra`, found to be equal to
an earlier one, or copied. Equations without a use are removed at the end. `core/rewriting`
walks and merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.dtypes import is_small
from spmd.base.record import record
from spmd.base.source import Source
from spmd.collectives.axis import pcast_p, pvary_p, unvary_p
from spmd.compile.expressions.scalar_ops import ENTRIES
from spmd.compile.passes.algebra import RULES, WITH_LITERAL, Producers, Rule, pair_rules, same_type
from spmd.compile.passes.dead_code import prune
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Literal, Var
from spmd.core.primitive import Primitive, is_refused
from spmd.core.rewriting.equations import Walk, finish, map_subjaxprs, start
from spmd.core.structural import add_any_p, broadcast_in_dim_p
from spmd.lax.arithmetic import add_p
from spmd.lax.concatenate import split_p
from spmd.lax.slicing import slice_p
from spmd.sharding.constraint import shard_alike_p


def simplify(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr with less to do."""
    writer = start(closed, Producers)
    writer.count_readers(closed.jaxpr)
    _Simplifier(writer).run(closed.jaxpr)
    return prune(finish(writer, closed))


# Casts that only types need: compiled code has none.
_TYPES = frozenset({pcast_p, pvary_p, unvary_p})


@record
class _Facts:
    """The facts about a primitive that the walk needs."""

    rule: Rule | None  # of `algebra`
    needs_literal: bool  # the rule finds nothing without one
    is_elementwise: bool


class _Simplifier(Walk):
    """One walk over a jaxpr."""

    writer: Producers

    def __init__(self, writer: Producers):
        super().__init__(writer)
        self.rules = RULES | pair_rules(writer)
        self.facts: dict[Primitive, _Facts] = {}

    def facts_of(self, eqn: Eqn) -> _Facts:
        """The facts about an equation's primitive."""
        found = self.facts.get(eqn.prim)
        if found is None:
            name = eqn.prim.name
            found = self.facts[eqn.prim] = _Facts(
                self.rules.get(name),
                name in WITH_LITERAL,
                name in ENTRIES,
            )
        return found

    def replaces(self, eqn: Eqn, ins: tuple[Atom, ...], source: Source) -> bool:
        """Write what is equal to an equation, and cheaper, if that is found."""
        prim = eqn.prim
        if len(eqn.outvars) == 1 and not eqn.effects:
            if prim in _TYPES:  # which have done their work
                found: Atom | None = ins[0]
            else:
                found = self.rewrite(eqn, ins)
            if found is not None:
                self.writer.define(eqn.outvars[0], found)
                return True
        if prim is shard_alike_p:  # values are laid out by now
            self.define(eqn, ins)
            return True
        if prim is split_p:
            self.slices(eqn, ins[0])
            return True
        return False

    def params_of(self, eqn: Eqn) -> dict[str, Any]:
        """The parameters of an equation with the jaxprs among them simplified."""
        return map_subjaxprs(eqn, simplify)

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
            self.writer.define(out, self.writer.write(made)[0])

    def rewrite(self, eqn: Eqn, ins: Sequence[Atom]) -> Atom | None:
        """The atom that an equation of one result is equal to, if that is found."""
        facts, has_literal = (
            self.facts.get(eqn.prim) or self.facts_of(eqn),
            Literal in map(type, ins),
        )
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
        found = self.rewrite(again, operands)
        return self.writer.write(again)[0] if found is None else found
