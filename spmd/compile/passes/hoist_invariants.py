"""Loop-invariant code motion: work that every iteration would repeat leaves the loop.

An equation of a loop's body is invariant if it reads only the loop's constants, carried values that
the body hands on unchanged, and other invariant equations. Moving it out is not free: its result
must be kept in memory and read in every iteration. So equations with real work move (a product, a
reduction, an exp), with everything behind them; those that only move or scale elements stay, fused
into the kernels that read them, and so do those that would read more memory outside than inside.
Operands of products and convolutions are in memory anyway, so elementwise work before one moves.

Inner loops go first: equations that leave them may then leave the outer ones too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from spmd.base.util import split_list
from spmd.compile.expressions.index_map import MOVES
from spmd.compile.expressions.scalar_ops import EXPENSIVE, is_elementwise
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.rewrite import dependents
from spmd.core.rewriting.equations import JaxprBuilder, finish, map_subjaxprs, start

# Cheap to do again beside other work, and often larger than their operands.
CHEAP = frozenset(MOVES) | {"iota", "pad", "concatenate"}
# These read their operands from memory: no elementwise work is fused into them.
FROM_MEMORY = frozenset(("dot_general", "conv_general_dilated"))
VIEWS = frozenset(("permute_dims", "reshape"))
# `optimization_barrier` says that its operands are to be computed here, not before.
FIXED = frozenset(("optimization_barrier",))
# Results of at most this many elements are kept at no cost, however little work they are.
FEW_ELEMENTS = 16

# A loop's new operands and parameters.
Changed: TypeAlias = tuple[list[Atom], dict[str, Any]]


def hoist_invariants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr whose loops do their invariant work only once, before them."""
    nested = closed.jaxpr.nested
    if not nested:
        return closed
    writer = start(closed)
    for eqn in closed.eqns:
        if eqn not in nested:
            writer.keep(eqn)
            continue
        params = map_subjaxprs(eqn, hoist_invariants)
        rule = _LOOPS.get(eqn.prim.name)
        if eqn.prim.name == "scan":
            _forward_stacks(writer, eqn)
        changed = None if rule is None else rule(writer, eqn.replace(params=params))
        if changed is None:
            writer.keep(eqn, params)
        else:
            operands, params = changed
            writer.eqns.append(eqn.replace(invars=tuple(operands), params=params))
    return finish(writer, closed)


# ---- one body ----------------------------------------------------------------------------------


class _Body:
    """A loop's body, and which of its equations leave it."""

    def __init__(self, closed: ClosedJaxpr, changing: Sequence[Var]):
        self.closed = closed
        self.jaxpr = closed.jaxpr
        fixed = [v for e in self.jaxpr.eqns if e.effects or e.prim.name in FIXED for v in e.outvars]
        self.varying = dependents(self.jaxpr, [*changing, *fixed])
        self.makers = {v: e for e in self.jaxpr.eqns for v in e.outvars if v not in self.varying}
        self.in_memory = self._read_from_memory()
        self.working: dict[Var, bool] = {}
        for eqn in self.jaxpr.eqns:
            self.working.update((v, self._does_work(eqn)) for v in eqn.outvars if v in self.makers)
        self.results = self._results()

    def _read_from_memory(self) -> set[Var]:
        """The operands of products and convolutions, also if these read them in another order."""
        found: set[Var] = set()
        for eqn in reversed(self.jaxpr.eqns):
            is_view = eqn.prim.name in VIEWS and eqn.outvars[0] in found
            if is_view or eqn.prim.name in FROM_MEMORY:
                found.update(_variables(eqn.invars))
        return found

    def _does_work(self, eqn: Eqn) -> bool:
        """Whether an invariant value has real work in it."""
        name = eqn.prim.name
        own = name in EXPENSIVE or not (name in CHEAP or is_elementwise(name))
        return own or any(self.working.get(v, False) for v in _variables(eqn.invars))

    def _results(self) -> list[Var]:
        """The invariant values that the remaining body reads from outside."""
        found: dict[Var, None] = {}
        readers = [e for e in self.jaxpr.eqns if any(v in self.varying for v in e.outvars)]
        stack = [v for e in readers for v in _variables(e.invars)][::-1]
        stack += [v for v in _variables(self.jaxpr.outvars)]
        stack += [v for e in self.jaxpr.eqns if e.effects for v in _variables(e.invars)]
        seen = set()
        while stack:
            var = stack.pop()
            if var in seen or var not in self.makers:
                continue
            seen.add(var)
            if self._is_worth_keeping(var):
                found[var] = None
            else:
                stack.extend(_variables(self.makers[var].invars))
        return list(found)

    def _is_worth_keeping(self, var: Var) -> bool:
        eqn = self.makers[var]
        if var.aval.size <= FEW_ELEMENTS:
            return eqn.prim.name not in CHEAP
        reads = max((v.aval.nbytes for v in _variables(eqn.invars)), default=0)
        is_cheap = eqn.prim.name in CHEAP or is_elementwise(eqn.prim.name)
        if eqn.prim.name in CHEAP or not (self.working[var] or var in self.in_memory):
            return False
        return not is_cheap or var.aval.nbytes <= reads

    def move(self, writer: JaxprBuilder, given: dict[Var, Atom]) -> tuple[ClosedJaxpr, list[Atom]]:
        """Write the hoisted part with the loop's operands `given`; the rest, and its new operands.

        The rest has inputs for the hoisted results, in front of its others.
        """
        gone = _behind(self.results, self.makers)
        for var, value in zip(self.jaxpr.constvars, self.closed.consts, strict=True):
            writer.define(var, writer.const(value, var.aval))
        for var, atom in given.items():
            writer.define(var, atom)
        for eqn in self.jaxpr.eqns:
            if any(v in gone for v in eqn.outvars):
                writer.copy(eqn)
        needed = _needed(self.jaxpr, set(self.results))
        kept = [e for e in self.jaxpr.eqns if e.effects or any(v in needed for v in e.outvars)]
        invars = (*self.results, *self.jaxpr.invars)
        rest = ClosedJaxpr(self.jaxpr.replace(invars=invars, eqns=kept), self.closed.consts)
        return rest, [writer.read(v) for v in self.results]


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _behind(results: Sequence[Var], makers: dict[Var, Eqn]) -> set[Var]:
    """The variables that the results are made of, themselves included."""
    found, stack = set(), list(results)
    while stack:
        var = stack.pop()
        if var in makers and var not in found:
            found.add(var)
            stack.extend(_variables(makers[var].invars))
    return found


def _needed(jaxpr: Jaxpr, given: set[Var]) -> set[Var]:
    """The variables that a body still has to make when some are given."""
    needed = set(_variables(jaxpr.outvars)) - given
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            needed.update(v for v in _variables(eqn.invars) if v not in given)
    return needed


# ---- the loops ---------------------------------------------------------------------------------


def _forward_stacks(writer: JaxprBuilder, eqn: Eqn) -> None:
    """Let stacked results stand for the stack that each iteration hands on, or for an equal one.

    Linearization leaves such: the forward loop stacks parts of an input for the backward one.
    """
    p = eqn.params
    body, first = p["jaxpr"].jaxpr, p["num_consts"] + p["num_carry"]
    known: dict[Atom, Atom] = dict(zip(body.invars[first:], eqn.invars[first:], strict=True))
    outs = zip(body.outvars[p["num_carry"] :], eqn.outvars[p["num_carry"] :], strict=True)
    for var, out in outs:
        if not isinstance(var, Literal):
            found = known.setdefault(var, out)
            if found is not out:
                writer.define(out, writer.read(found))


def _scan(writer: JaxprBuilder, eqn: Eqn) -> Changed | None:
    p = eqn.params
    closed: ClosedJaxpr = p["jaxpr"]
    consts, carry, xs = split_list(closed.jaxpr.invars, [p["num_consts"], p["num_carry"]])
    changing = [v for v, out in zip(carry, closed.jaxpr.outvars, strict=False) if v is not out]
    body = _Body(closed, [*changing, *xs])
    if p["length"] < 2 or not body.results:
        return None
    operands = [writer.read(v) for v in eqn.invars]
    given = dict(zip((*consts, *carry), operands, strict=False))
    rest, extra = body.move(writer, given)
    changes = {"jaxpr": rest, "num_consts": p["num_consts"] + len(extra)}
    return [*extra, *operands], p | changes


def _while(writer: JaxprBuilder, eqn: Eqn) -> Changed | None:
    p = eqn.params
    test, closed = p["cond_jaxpr"], p["body_jaxpr"]
    counts = [p["cond_nconsts"], p["body_nconsts"]]
    of_test, of_body, first = split_list([writer.read(v) for v in eqn.invars], counts)
    pairs = zip(closed.jaxpr.invars[counts[1] :], closed.jaxpr.outvars, strict=True)
    changes = [v is not out for v, out in pairs]
    bodies = []
    for inner, consts in ((test, of_test), (closed, of_body)):
        carry = inner.jaxpr.invars[len(consts) :]
        body = _Body(inner, [v for v, c in zip(carry, changes, strict=True) if c])
        given = dict(zip(inner.jaxpr.invars, (*consts, *first), strict=True))
        bodies.append(body.move(writer, given) if body.results else (inner, []))
    (test, for_test), (closed, for_body) = bodies
    if not (for_test or for_body):
        return None
    params = p | {
        "cond_jaxpr": test,
        "body_jaxpr": closed,
        "cond_nconsts": counts[0] + len(for_test),
        "body_nconsts": counts[1] + len(for_body),
    }
    return [*for_test, *of_test, *for_body, *of_body, *first], params


_LOOPS: dict[str, Callable[[JaxprBuilder, Eqn], Changed | None]] = {"scan": _scan, "while": _while}
