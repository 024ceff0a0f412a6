"""Rematerialization in loops: a loop recomputes stacked values that it can make of others.

The forward loop of a gradient stacks, for each iteration, what the backward loop reads. Some of it
is a slice of the weights that both have, some is a few cheap operations away from another stack:
beside a tanh `1 - tanh`, which is as large. The backward loop makes such values itself, at the same
position of the stacks. `rematerialize` does so for values outside of loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spmd.base.record import record
from spmd.compile.expressions.scalar_ops import is_elementwise
from spmd.compile.passes.dead_code import prune
from spmd.compile.passes.fusion.cost import ROUND_TRIP
from spmd.compile.passes.fusion.rematerialize import LEAST_BYTES, TIMES_SMALLER, is_cheap
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.rewriting.equations import map_subjaxprs


def thin_stacks(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr whose loops stack only what their readers cannot make for less."""
    nested = closed.jaxpr.nested
    if not nested:
        return closed
    eqns = [
        eqn.replace(params=map_subjaxprs(eqn, thin_stacks)) if eqn in nested else eqn
        for eqn in closed.eqns
    ]
    thinner = _Thinner(closed.jaxpr, eqns)
    if not thinner.run():
        return ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)
    return prune(ClosedJaxpr(closed.jaxpr.replace(eqns=thinner.eqns), closed.consts))


@record
class _Recipe:
    """How a loop's body makes a value, of stacks and constants of the loop: `given`, by its names.

    Each comes with whether it is a stack.
    """

    value: Atom
    eqns: tuple[Eqn, ...]
    given: dict[Var, tuple[Atom, bool]]


class _Thinner:
    """Goes through the loops of one jaxpr, each before those that read its stacks."""

    def __init__(self, jaxpr: Jaxpr, eqns: list[Eqn]):
        self.eqns = eqns
        self.lasting = {*jaxpr.invars, *jaxpr.constvars}
        self.results = set(jaxpr.outvars)
        self.readers: dict[Atom, list[int]] = {}
        for k, eqn in enumerate(eqns):
            for atom in dict.fromkeys(eqn.invars):
                self.readers.setdefault(atom, []).append(k)

    def run(self) -> bool:
        """Whether a loop stacks less."""
        found = [self.thin(k) for k, eqn in enumerate(self.eqns) if eqn.prim.name == "scan"]
        return any(found)

    def thin(self, k: int) -> bool:
        eqn, changed = self.eqns[k], False
        count = eqn.params["num_carry"]
        kept = set(range(count, len(eqn.outvars)))
        locked: set[Atom] = set()  # stacks of which readers make others
        # The last ones first: a value is made after those that it is made of.
        for n in reversed(range(count, len(eqn.outvars))):
            out = eqn.outvars[n]
            if out in locked or not self.can_leave(out, eqn):
                continue
            readers = self.readers[out]
            recipe = self.recipe(eqn, n, kept - {n}, [set(self.eqns[r].invars) for r in readers])
            if recipe is None:
                continue
            kept.discard(n)
            locked.update(atom for atom, _ in recipe.given.values())
            for reader in readers:
                self.eqns[reader] = _making(self.eqns[reader], out, recipe)
                for atom, _ in recipe.given.values():
                    if reader not in self.readers.setdefault(atom, []):
                        self.readers[atom].append(reader)
            del self.readers[out]
            changed = True
        return changed

    def can_leave(self, out: Var, eqn: Eqn) -> bool:
        """Whether all that reads a stack are loops that read it iteration by iteration."""
        if out.aval.nbytes < LEAST_BYTES or out in self.results or not self.readers.get(out):
            return False
        for reader in (self.eqns[k] for k in self.readers[out]):
            if reader.prim.name != "scan" or reader.params["length"] != eqn.params["length"]:
                return False
            if out in reader.invars[: reader.params["num_consts"] + reader.params["num_carry"]]:
                return False
        return True

    def recipe(self, eqn: Eqn, n: int, kept: set[int], readers: list[set[Atom]]) -> _Recipe | None:
        """The recipe of a stacked result, of what all its readers have, or next to nothing more."""
        body: Jaxpr = eqn.params["jaxpr"].jaxpr
        out, value = eqn.outvars[n], body.outvars[n]
        makers = {e.outvars[0]: e for e in body.eqns if len(e.outvars) == 1 and not e.effects}
        outside: dict[Atom, tuple[Atom, bool]] = dict(_operands(eqn))
        outside.update((body.outvars[p], (eqn.outvars[p], True)) for p in sorted(kept))
        given: dict[Var, tuple[Atom, bool]] = {}
        chosen: dict[Var, Eqn] = {}
        stack: list[Atom] = [value]
        while stack:
            atom = stack.pop()
            if isinstance(atom, Literal) or atom in given or atom in chosen:
                continue
            known = outside.get(atom)
            if known is not None and self.is_at_hand(known[0], out, readers):
                given[atom] = known
                continue
            made = makers.get(atom)
            if made is None or not (is_cheap(made) or made.prim.name == "slice"):
                return None
            chosen[atom] = made
            stack += made.invars
        eqns = tuple([e for e in body.eqns if e.outvars[0] in chosen])
        if sum(is_elementwise(e.prim.name) for e in eqns) > ROUND_TRIP:
            return None
        return _Recipe(value, eqns, given)

    def is_at_hand(self, atom: Atom, out: Var, readers: list[set[Atom]]) -> bool:
        """Whether readers have a value anyway, or it is as good as nothing beside the stack."""
        if isinstance(atom, Literal) or atom in self.lasting:
            return True
        if atom.aval.nbytes * TIMES_SMALLER <= out.aval.nbytes:
            return True
        return all(atom in read for read in readers)


def _operands(eqn: Eqn) -> Iterator[tuple[Var, tuple[Atom, bool]]]:
    """The constants and stacks of a loop by their names in its body; whether each is a stack."""
    first, count = eqn.params["num_consts"], eqn.params["num_carry"]
    names: Sequence[Var] = eqn.params["jaxpr"].jaxpr.invars
    for n, (var, atom) in enumerate(zip(names, eqn.invars, strict=True)):
        if not first <= n < first + count:
            yield var, (atom, n >= first)


def _making(eqn: Eqn, out: Var, recipe: _Recipe) -> Eqn:
    """A loop that makes the part of a stack in each iteration, in place of reading it."""
    closed: ClosedJaxpr = eqn.params["jaxpr"]
    body, first = closed.jaxpr, eqn.params["num_consts"]
    has = {known: var for var, known in _operands(eqn)}
    names: dict[Atom, Atom] = {}
    consts: list[tuple[Var, Atom]] = []
    stacks: list[tuple[Var, Atom]] = []
    for var, known in recipe.given.items():
        if known not in has:
            has[known] = Var(var.aval)
            (stacks if known[1] else consts).append((has[known], known[0]))
        names[var] = has[known]
    made = []
    for e in recipe.eqns:
        names[e.outvars[0]] = Var(e.outvars[0].aval)
        ins = tuple([names.get(a, a) for a in e.invars])
        made.append(e.replace(invars=ins, outvars=(names[e.outvars[0]],)))
    at = [n for n, atom in enumerate(eqn.invars) if atom is out]
    value = names.get(recipe.value, recipe.value)
    new: dict[Atom, Atom] = {body.invars[n]: value for n in at}
    rest = [
        e.replace(invars=tuple([new.get(a, a) for a in e.invars]))
        if any(a in new for a in e.invars)
        else e
        for e in body.eqns
    ]
    rows = [p for n, p in enumerate(zip(body.invars, eqn.invars, strict=True)) if n not in at]
    rows = [*rows[:first], *consts, *rows[first:], *stacks]
    jaxpr = body.replace(
        invars=[var for var, _ in rows],
        eqns=[*made, *rest],
        outvars=[new.get(a, a) for a in body.outvars],
    )
    params = eqn.params | {
        "jaxpr": ClosedJaxpr(jaxpr, closed.consts),
        "num_consts": first + len(consts),
    }
    return eqn.replace(invars=tuple([atom for _, atom in rows]), params=params)
