"""Simplify: constant folding, identities, common subexpressions and dead code, in one walk.

Equations are read in order; each is folded, replaced by a rule of `algebra`, found to be equal to
an earlier one, or copied. What nothing needs any more is removed at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.collectives.axis import pvary_p
from spmd.compile.lower.elementwise import is_elementwise
from spmd.compile.passes.algebra import RULES, Producers, pair_rules, same_type
from spmd.compile.passes.prune import prune
from spmd.compile.passes.substitute import Writer, finish, map_subjaxprs, start
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Literal, Var
from spmd.core.primitive import is_refused
from spmd.core.structural import add_any_p, broadcast_in_dim_p
from spmd.lax.arithmetic import add_p
from spmd.lax.concatenate import split_p
from spmd.lax.slicing import slice_p


def simplify(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr with less to do."""
    writer = start(closed)
    _Simplifier(writer).run(closed)
    return prune(finish(writer, closed))


class _Simplifier:
    """One walk over a jaxpr."""

    def __init__(self, writer: Writer):
        self.writer = writer
        self.producers = Producers(writer)
        self.rules = RULES | pair_rules(self.producers)
        self.known: dict[Any, tuple[Var, ...]] = {}

    def run(self, closed: ClosedJaxpr) -> None:
        for eqn in closed.eqns:
            ins = self.writer.read_all(eqn.invars)
            if eqn.prim is pvary_p:  # what varies matters to types, which have done their work
                self.writer.define(eqn.outvars[0], ins[0])
                continue
            if len(eqn.outvars) == 1 and not eqn.effects:
                found = self.fold(eqn, ins) or self.rewrite(eqn, ins)
                if found is not None:
                    self.writer.define(eqn.outvars[0], found)
                    continue
            if eqn.prim is split_p:
                self.slices(eqn, ins[0])
            else:
                self.copy(eqn, ins)

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
        """What a rule says that the equation is equal to."""
        rule = self.rules.get(eqn.prim.name)
        found = rule(self.writer, eqn, ins) if rule is not None else None
        if found is None and eqn.outvars[0].aval.shape and is_elementwise(eqn.prim.name):
            found = self.strip_broadcasts(eqn, ins)
        if found is None or not same_type(found.aval, eqn.outvars[0].aval):
            return None
        return found

    def fold(self, eqn: Eqn, ins: Sequence[Atom]) -> Literal | None:
        """The literal that a scalar equation of literals computes."""
        out = eqn.outvars[0].aval
        if out.shape or not ins or out.dtype.names or out.vma:
            return None
        literals = [a for a in ins if isinstance(a, Literal)]
        if len(literals) != len(ins):
            return None
        if not is_elementwise(eqn.prim.name) or is_refused(eqn.prim.impl):
            return None
        arrays = [np.asarray(a.val, a.aval.dtype) for a in literals]
        with np.errstate(all="ignore"):
            value = eqn.prim.rule("impl")(np, *arrays, **eqn.params)
        return Literal(np.asarray(value, out.dtype)[()], out)

    def strip_broadcasts(self, eqn: Eqn, ins: Sequence[Atom]) -> Atom | None:
        """Let an elementwise equation read scalars directly instead of their broadcasts."""
        bare = [self.scalar_behind(a) if a.aval.shape else None for a in ins]
        if not any(bare):  # variables and literals are true
            return None
        if eqn.prim is add_any_p:
            eqn = eqn.replace(prim=add_p)  # which takes scalars
        out = eqn.outvars[0].aval
        operands = [a if b is None else b for a, b in zip(ins, bare, strict=True)]
        result = self.write(eqn, operands)
        if result.aval.shape == out.shape:
            return result
        params = {"shape": out.shape, "broadcast_dimensions": ()}
        return self.writer.emit(broadcast_in_dim_p, [result], params, eqn.source)

    def scalar_behind(self, atom: Atom) -> Atom | None:
        """The scalar of which `atom` is a broadcast."""
        made = self.producers.of(atom, "broadcast_in_dim")
        if made is None or made.invars[0].aval.shape:
            return None
        return made.invars[0]

    def write(self, eqn: Eqn, operands: Sequence[Atom]) -> Atom:
        """An equation of the same primitive on other operands, itself simplified."""
        avals = [a.aval for a in operands]
        out = Var(
            eqn.prim.rule("abstract")(*avals, **eqn.params).update(vma=eqn.outvars[0].aval.vma)
        )
        again = eqn.replace(invars=tuple(operands), outvars=(out,))
        found = self.fold(again, operands) or self.rewrite(again, operands)
        if found is not None:
            return found
        return self.emit(again)[0]

    def copy(self, eqn: Eqn, ins: tuple[Atom, ...]) -> None:
        """Write the equation, unless an equal one is there already."""
        params = map_subjaxprs(eqn, simplify)
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
        key = _key(eqn)
        found = self.known.get(key)
        if found is None:
            self.writer.eqns.append(eqn)
            self.known[key] = found = eqn.outvars
        return found


def _key(eqn: Eqn) -> Any:
    """Equal for equations that compute equal results."""
    params = eqn.params.items()
    ordered = tuple(sorted(params) if len(params) > 1 else params)
    return eqn.prim, tuple([_atom_key(a) for a in eqn.invars]), ordered


def _atom_key(atom: Atom) -> Any:
    if isinstance(atom, Literal):
        stored = np.asarray(atom.val, atom.aval.dtype)
        return atom.aval.dtype, stored.tobytes()
    return atom
