"""Rematerialization: a kernel recomputes values that it can make from its other operands.

`fuse` puts a value that one kernel makes and another reads into memory. A gradient's kernels read
many such values, some of which are a few cheap operations away from others that they read too: gelu
keeps its tanh, so `0.5 * (1 + tanh)` need not be kept beside it; bodies that attract each other
have positions, so the distances of all pairs need not be kept. Such a value is computed
again by each group that reads it. That saves writing and reading it, and above all its memory,
which in a training step is taken from the forward pass until the backward pass comes by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base.record import record
from spmd.compile.expressions.expression import REDUCTIONS
from spmd.compile.expressions.group_kernel import Space
from spmd.compile.expressions.index_map import MOVES
from spmd.compile.expressions.scalar_ops import EXPENSIVE, is_elementwise
from spmd.compile.passes.fusion.cost import ROUND_TRIP
from spmd.compile.passes.fusion.fuse import MAX_EQNS
from spmd.compile.passes.inline_calls import with_bodies
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.rewriting.equations import finish, map_subjaxprs, start

# Smaller values are kept: they take little memory.
LEAST_BYTES = 1 << 12
# Values of so much fewer bytes may be read, and be kept, only to compute a value from them.
TIMES_SMALLER = 8
# Moves that read an element where it lies, or one element many times.
_PLAIN_MOVES = frozenset(("broadcast_in_dim", "reshape", "squeeze"))


def rematerialize(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr whose groups recompute values that are cheaper so than kept."""
    return _Rematerializer(closed).run()


@record
class _Recipe:
    """How a value comes about inside its group, from values that are outside of it."""

    eqns: tuple[Eqn, ...]
    value: Var  # in the group's own names
    given: dict[Var, Var]  # outside names for the group's names


class _Rematerializer:
    """Goes through the groups of one jaxpr in order, each before its readers."""

    def __init__(self, closed: ClosedJaxpr):
        self.closed = closed
        self.eqns: list[Eqn | None] = list(closed.eqns)
        self.readers: dict[Atom, list[int]] = {}
        for k, eqn in enumerate(closed.eqns):
            for atom in dict.fromkeys(eqn.invars):
                self.readers.setdefault(atom, []).append(k)
        self.made = {v for eqn in closed.eqns for v in eqn.outvars}
        self.needed = set(closed.jaxpr.outvars)
        # Groups that were alike stay alike: one new jaxpr for equal changes to the same one.
        self.bodies: dict[Any, ClosedJaxpr] = {}
        # By body: the makers of its values; and whether an operand may be computed there.
        self.makers: dict[int, dict[Var, int]] = {}
        self.takers: dict[tuple[int, int], bool] = {}

    def run(self) -> ClosedJaxpr:
        changed, outer = False, with_bodies(self.closed)
        for k, eqn in enumerate(self.closed.eqns):
            if eqn.prim.name == "fused":
                changed |= self.lighten(k)
            elif eqn in outer:
                self.eqns[k] = eqn.replace(params=map_subjaxprs(eqn, rematerialize))
                changed = True
        if not changed:
            return self.closed
        writer = start(self.closed)
        for eqn in self.eqns:
            if eqn is not None:
                writer.keep(eqn)
        return finish(writer, self.closed)

    def lighten(self, k: int) -> bool:
        """Let the readers of a group's results compute those for which that pays."""
        eqn = self.eqns[k]
        assert eqn is not None
        kept = list(range(len(eqn.outvars)))
        locked: set[Var] = set()  # values that a reader makes other results from
        for position, out in enumerate(eqn.outvars):
            if out in locked or not self.can_leave(out):
                continue
            rest = [p for p in kept if p != position]
            recipe = self.recipe(eqn, position, rest, 0) or self.recipe(eqn, position, rest, 1)
            if recipe is None or not _can_lose(eqn, rest):
                continue
            kept = rest
            locked.update(recipe.given.values())
            for reader in self.readers.pop(out):
                self.give(reader, out, recipe)
        if len(kept) == len(eqn.outvars):
            return False
        self.eqns[k] = self.without(eqn, kept) if kept else None
        return True

    # ---- values that may leave ----

    def can_leave(self, out: Var) -> bool:
        """Whether all that reads a value are groups that could compute it at any element."""
        if out.aval.nbytes < LEAST_BYTES or out in self.needed:
            return False
        readers = [self.eqns[k] for k in self.readers.get(out, ())]
        return bool(readers) and all(eqn is not None and self.takes(eqn, out) for eqn in readers)

    def takes(self, eqn: Eqn, out: Var) -> bool:
        """Whether an equation is a group that may compute an operand where it reads it."""
        if eqn.prim.name != "fused" or eqn.invars.count(out) > 1:
            return False
        at, closed = eqn.invars.index(out), eqn.params["jaxpr"]
        found = self.takers.get((id(closed), at))
        if found is None:
            found = self.takers[id(closed), at] = _takes(closed.jaxpr, at)
        return found

    def recipe(self, eqn: Eqn, position: int, kept: Sequence[int], more: int) -> _Recipe | None:
        """The recipe of a result from operands of all its readers, or next to nothing more.

        With `more` they may read so many values in its place that are no larger: these may then
        have to be kept for longer, but they are there anyway as long as the result would be.
        """
        body = eqn.params["jaxpr"].jaxpr
        out, value = eqn.outvars[position], body.outvars[position]
        makers = self.makers.get(id(body))
        if makers is None:
            makers = self.makers[id(body)] = {e.outvars[0]: n for n, e in enumerate(body.eqns)}
        if value not in makers or not is_cheap(body.eqns[makers[value]]):
            return None
        readers = [set(found.invars) for k in self.readers[out] if (found := self.eqns[k])]
        outside: dict[Atom, Atom] = dict(zip(body.invars, eqn.invars, strict=True))
        outside |= {body.outvars[p]: eqn.outvars[p] for p in kept}
        given: dict[Var, Var] = {}
        chosen: set[int] = set()
        stack = [value]
        while stack:
            atom = stack.pop()
            if isinstance(atom, Literal) or atom in given:
                continue
            known = outside.get(atom)
            if isinstance(known, Var) and _is_at_hand(known, readers, out):
                given[atom] = known
                continue
            if isinstance(known, Var) and more and self.is_kept(known, out):
                given[atom] = known
                more -= 1
                continue
            n = makers.get(atom)
            if n is None or not is_cheap(body.eqns[n]):
                return None
            if n not in chosen:
                chosen.add(n)
                stack += body.eqns[n].invars
        eqns = tuple([body.eqns[n] for n in sorted(chosen)])
        if sum(is_elementwise(e.prim.name) for e in eqns) > ROUND_TRIP:
            return None
        return _Recipe(eqns, value, given)

    def is_kept(self, var: Var, out: Var) -> bool:
        """Whether a value may be read in place of another: arguments may be wanted for results."""
        return var in self.made and 0 < var.aval.nbytes <= out.aval.nbytes

    # ---- writing the groups anew ----

    def give(self, k: int, out: Var, recipe: _Recipe) -> None:
        """Let a group compute an operand."""
        eqn = self.eqns[k]
        assert eqn is not None
        body: Jaxpr = eqn.params["jaxpr"].jaxpr
        at = eqn.invars.index(out)
        places = [eqn.invars.index(v) if v in eqn.invars else None for v in recipe.given.values()]
        key = (
            id(eqn.params["jaxpr"]),
            at,
            tuple(map(id, recipe.eqns)),
            id(recipe.value),
            tuple(zip(map(id, recipe.given), places, strict=True)),
        )
        more = [v for v, p in zip(recipe.given.values(), places, strict=True) if p is None]
        closed = self.bodies.get(key)
        if closed is None:
            closed = self.bodies[key] = _computing(body, at, recipe, places)
        invars = (*eqn.invars[:at], *eqn.invars[at + 1 :], *more)
        self.eqns[k] = eqn.replace(invars=invars, params=eqn.params | {"jaxpr": closed})
        for var in more:
            # A value that was only a result of the program so far had no readers.
            readers = self.readers.setdefault(var, [])
            if k not in readers:
                readers.append(k)

    def without(self, eqn: Eqn, kept: Sequence[int]) -> Eqn:
        """A group with some of its results only."""
        old: ClosedJaxpr = eqn.params["jaxpr"]
        key = (id(old), tuple(kept))
        closed = self.bodies.get(key)
        if closed is None:
            outvars = [old.jaxpr.outvars[p] for p in kept]
            closed = self.bodies[key] = ClosedJaxpr(_pruned(old.jaxpr, outvars))
        reads = dict(zip(old.jaxpr.invars, eqn.invars, strict=True))
        space: Space = eqn.params["space"]
        outputs = tuple([space.outputs[p] for p in kept])
        return eqn.replace(
            invars=tuple([reads[v] for v in closed.jaxpr.invars]),
            outvars=tuple([eqn.outvars[p] for p in kept]),
            params={"jaxpr": closed, "space": Space(space.outer, space.inner, outputs)},
        )


def _is_at_hand(var: Var, readers: Sequence[set[Atom]], out: Var) -> bool:
    """Whether all readers of `out` read a value too, or it is small enough to be kept for them."""
    if var.aval.nbytes * TIMES_SMALLER <= out.aval.nbytes:
        return True
    return all(var in read for read in readers)


def is_cheap(eqn: Eqn) -> bool:
    """Whether an equation costs less than reading its result, wherever its operands are read."""
    name = eqn.prim.name
    if name == "reshape":
        # Dims of size 1 come and go; others keep their places.
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        return [n for n in before if n != 1] == [n for n in after if n != 1]
    return name in _PLAIN_MOVES or (is_elementwise(name) and name not in EXPENSIVE)


def _takes(body: Jaxpr, at: int) -> bool:
    """Whether a group may compute an operand, by its position, where it reads it."""
    given = body.invars[at]
    if len(body.eqns) + ROUND_TRIP > MAX_EQNS or given in body.outvars:
        return False
    users = [e.prim.name for e in body.eqns if given in e.invars]
    return all(is_elementwise(n) or n in MOVES or n in REDUCTIONS for n in users)


def _can_lose(eqn: Eqn, kept: Sequence[int]) -> bool:
    """Whether a group is still one of its kind with these results only.

    A kernel over rows without anything to do along them would be an odd one.
    """
    space: Space = eqn.params["space"]
    if not space.inner or not kept:
        return True
    body: Jaxpr = eqn.params["jaxpr"].jaxpr
    rest = _pruned(body, [body.outvars[p] for p in kept])
    return any(e.prim.name in REDUCTIONS for e in rest.eqns)


def _pruned(body: Jaxpr, outvars: Sequence[Atom]) -> Jaxpr:
    """The part of a group that its results need."""
    wanted, eqns = set(outvars), []
    for eqn in reversed(body.eqns):
        if wanted.intersection(eqn.outvars):
            wanted.update(eqn.invars)
            eqns.append(eqn)
    invars = [v for v in body.invars if v in wanted]
    return Jaxpr((), invars, eqns[::-1], outvars)


def _computing(body: Jaxpr, at: int, recipe: _Recipe, places: Sequence[int | None]) -> ClosedJaxpr:
    """A group that computes its operand number `at` itself.

    `places` says which of its operands the recipe reads; new ones come behind them.
    """
    names: dict[Atom, Var] = {recipe.value: body.invars[at]}
    more = []
    for var, place in zip(recipe.given, places, strict=True):
        if place is None:
            names[var] = Var(var.aval)
            more.append(names[var])
        else:
            names[var] = body.invars[place]
    eqns = []
    for eqn in recipe.eqns:
        for var in eqn.outvars:
            names.setdefault(var, Var(var.aval))
        ins = tuple([names.get(a, a) for a in eqn.invars])
        eqns.append(eqn.replace(invars=ins, outvars=tuple([names[v] for v in eqn.outvars])))
    invars = (*body.invars[:at], *body.invars[at + 1 :], *more)
    return ClosedJaxpr(Jaxpr((), invars, [*eqns, *body.eqns], body.outvars))
