"""Product hoisting: products of a loop's iterations become one product before or after it.

A recurrent network multiplies each step's input with the same weights: `x @ w` in every iteration.
All of them are one product of the stacked inputs, in which threads and register tiles find more to
share. Its gradient adds one product an iteration to the gradient of the weights: `g += x.T @ y`.
All of them are one product that sums over the iterations too, and the carried sum is gone.
Sums of the operands of such a product (the gradient of a bias) go with it.

Both keep stacks of an iteration's own values, so they are for iterations of few rows, which read
all weights, or change all sums, to multiply little with each, and for stacks that are small. (With
32 rows an iteration no gain was measured, and a third more memory was needed.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from spmd.base.record import record
from spmd.base.util import split_list
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Var
from spmd.core.rewriting.equations import JaxprBuilder, finish, map_subjaxprs, start
from spmd.core.structural import permute_dims_p, reduce_sum_p
from spmd.lax.dot import DimensionNumbers, dot_general_p

# From so many rows on an iteration's product is efficient by itself.
MOST_ROWS = 8
# A carried sum is read and written in each: this many rows do not make up for it.
MOST_SUMMED_ROWS = 16
# Bytes of a stack that is made for a product outside.
MOST_STACKED = 2**24
# A product of fewer summands takes less time than writing its result down.
LEAST_DEPTH = 8
# For a sum, an iteration may write so many times as many elements to stacks as the sum has.
MOST_WRITTEN = 2


def hoist_matmuls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr in which single products after a scan replace products in each iteration."""
    nested = closed.jaxpr.nested
    if not nested:
        return closed
    writer = start(closed)
    for eqn in closed.eqns:
        params = map_subjaxprs(eqn, hoist_matmuls) if eqn in nested else eqn.params
        if eqn.prim.name == "scan" and params["num_carry"] and params["length"] > 1:
            _Scan(writer, eqn.replace(params=params)).write()
        else:
            writer.keep(eqn, params)
    return finish(writer, closed)


@record
class _Sum:
    """A carried value to which iterations add a product or a sum, seen through permutations."""

    position: int  # among the carried values
    add: Eqn
    moves: tuple[Eqn, ...]  # permutations of the term, the innermost first
    term: Eqn

    @property
    def factors(self) -> list[Var]:
        """The operands of the product or of the sum."""
        return [v for v in self.term.invars if isinstance(v, Var)]

    def params(self) -> dict[str, Any]:
        """The parameters of the term that sums over the stacks of all iterations."""
        if self.term.prim is reduce_sum_p:
            return self.term.params | {"axes": (0, *_later(self.term.params["axes"]))}
        numbers: DimensionNumbers = self.term.params["dimension_numbers"]
        left, right = numbers.contract
        contract = ((0, *_later(left)), (0, *_later(right)))
        return self.term.params | {"dimension_numbers": DimensionNumbers(contract, ((), ()))}


class _Scan:
    """Rewrites one scan."""

    def __init__(self, writer: JaxprBuilder, eqn: Eqn):
        self.writer = writer
        self.eqn = eqn
        p = eqn.params
        self.length: int = p["length"]
        self.closed: ClosedJaxpr = p["jaxpr"]
        body = self.closed.jaxpr
        sizes = [p["num_consts"], p["num_carry"]]
        self.consts, self.carry, self.xs = split_list(body.invars, sizes)
        self.operands = [writer.read(v) for v in eqn.invars]
        self.stacks = dict(zip(self.xs, self.operands[sum(sizes) :], strict=True))
        self.makers = {v: e for e in body.eqns for v in e.outvars}
        read = (*body.outvars, *(v for e in body.eqns for v in e.invars))
        self.uses = Counter(v for v in read if isinstance(v, Var))
        self.fixed = dict(zip(self.consts, self.operands, strict=False))
        for var, value in zip(body.constvars, self.closed.consts, strict=True):
            self.fixed[var] = writer.const(value, var.aval)
        # Permutations of fixed values, which are written before the loop when they are wanted.
        self.turned: dict[Var, Eqn] = {}
        for eqn in body.eqns:
            if eqn.prim is permute_dims_p and self._is_fixed(eqn.invars[0]):
                self.turned[eqn.outvars[0]] = eqn

    def write(self) -> None:
        """Write the scan, and the products around it; as it was if there are none."""
        before = [e for e in self.closed.eqns if self._is_before(e)]
        sums = self._sums()
        if not before and not sums:
            self.writer.keep(self.eqn, self.eqn.params)
            return
        gone = {id(e) for s in sums for e in (s.add, *s.moves, s.term)}
        before = [e for e in before if id(e) not in gone]
        replaced = {id(e): self._moved_before(e) for e in before}
        eqns, more_xs = [], []
        for eqn in self.closed.eqns:
            if id(eqn) in replaced:
                stack, given, rest = replaced[id(eqn)]
                more_xs.append((given, stack))
                self.stacks[given] = stack
                eqns += rest
            elif id(eqn) not in gone:
                eqns.append(eqn)
        stacked = self._stacked(sums)
        self._write_scan(eqns, more_xs, {s.position for s in sums}, stacked)
        for each in sums:
            self._after(each)

    def _is_fixed(self, atom: Atom) -> bool:
        """Whether a value is the same in all iterations."""
        return atom in self.fixed or atom in self.turned

    def _fixed(self, atom: Atom) -> Atom:
        """Such a value, outside of the loop."""
        turns: list[Eqn] = []
        while isinstance(atom, Var) and atom in self.turned:
            turns.append(self.turned[atom])
            atom = turns[-1].invars[0]
        value = self.fixed[atom] if isinstance(atom, Var) else atom
        for eqn in reversed(turns):
            value = self.writer.emit(eqn.prim, [value], eqn.params, eqn.source)
        return value

    # ---- before the loop ----

    def _is_before(self, eqn: Eqn) -> bool:
        """Whether an equation multiplies the iteration's part of a stack with a fixed value."""
        if not _is_product(eqn):
            return False
        sides = [v in self.stacks for v in eqn.invars], [self._is_fixed(v) for v in eqn.invars]
        one_each = sides[0] in ([True, False], [False, True]) and sides[1] == [
            not x for x in sides[0]
        ]
        if not one_each or _depth(eqn) < LEAST_DEPTH:
            return False
        x = eqn.invars[sides[0].index(True)]
        few = x.aval.size <= MOST_ROWS * _depth(eqn)
        return few and self.length * eqn.outvars[0].aval.nbytes <= MOST_STACKED

    def _moved_before(self, eqn: Eqn) -> tuple[Var, Var, list[Eqn]]:
        """The stack of an equation's results, an iteration's part of it, and its product."""
        numbers: DimensionNumbers = eqn.params["dimension_numbers"]
        at = 0 if eqn.invars[0] in self.stacks else 1
        x, w = eqn.invars[at], eqn.invars[1 - at]
        assert isinstance(x, Var)
        contract = (_later(numbers.contract[at]), numbers.contract[1 - at])
        params = eqn.params | {"dimension_numbers": DimensionNumbers(contract, ((), ()))}
        operands = [self.stacks[x], self._fixed(w)]
        stack = self.writer.emit(dot_general_p, operands, params, eqn.source)
        out = eqn.outvars[0]
        if at == 0:
            return stack, out, []
        # The iteration's part comes first in the stack's product and last in its own.
        own = len(numbers.free(1, x.aval.ndim))
        order = (*range(own, out.aval.ndim), *range(own))
        shape = tuple([stack.aval.shape[1 + d] for d in range(out.aval.ndim)])
        given = Var(out.aval.update(shape=shape))
        return (
            stack,
            given,
            [Eqn(permute_dims_p, (given,), (out,), {"permutation": order}, source=eqn.source)],
        )

    # ---- after the loop ----

    def _sums(self) -> list[_Sum]:
        """The carried values that leave."""
        found = [s for k in range(len(self.carry)) if (s := self._sum(k)) is not None]
        products = [s for s in found if self._leaves(s)]
        factors = {v for s in products for v in s.factors}
        also = [s for s in found if s.term.prim is reduce_sum_p and factors.issuperset(s.factors)]
        return [*products, *also]

    def _sum(self, position: int) -> _Sum | None:
        """The sum in a carried value, if the value has no other use."""
        carried, out = self.carry[position], self.closed.jaxpr.outvars[position]
        if not isinstance(out, Var):
            return None
        add = self.makers.get(out)
        if add is None or add.prim.name not in ("add", "add_any") or self.uses[carried] != 1:
            return None
        if carried not in add.invars or self.uses[out] != 1:
            return None
        (term,) = [v for v in add.invars if v is not carried]
        moves: list[Eqn] = []
        while isinstance(term, Var) and term in self.makers and self.uses[term] == 1:
            eqn = self.makers[term]
            if eqn.prim is not permute_dims_p:
                break
            moves.insert(0, eqn)
            term = eqn.invars[0]
        made = self.makers.get(term) if isinstance(term, Var) else None
        if made is None or self.uses[made.outvars[0]] != 1:
            return None
        return _Sum(position, add, tuple(moves), made)

    def _leaves(self, of: _Sum) -> bool:
        """Whether a sum of products should leave: its factors differ, and stacks of them pay."""
        if not _is_product(of.term) or any(self._is_fixed(v) for v in of.factors):
            return False
        if _depth(of.term) > MOST_SUMMED_ROWS:
            return False
        written = sum(v.aval.size for v in set(of.factors) - set(self.stacks))
        nbytes = self.length * max(v.aval.nbytes for v in of.factors)
        return written <= MOST_WRITTEN * of.add.outvars[0].aval.size and nbytes <= MOST_STACKED

    def _stacked(self, sums: Sequence[_Sum]) -> list[Var]:
        """The values that an iteration stacks additionally, for the products after the loop."""
        known = set(self.stacks) | set(self.closed.jaxpr.outvars[len(self.carry) :])
        return list(dict.fromkeys(v for s in sums for v in s.factors if v not in known))

    def _after(self, of: _Sum) -> None:
        """Write the term of all iterations at once, and define the result of the loop."""
        stacks = [self.stacks[v] for v in of.factors]
        total = self.writer.emit(of.term.prim, stacks, of.params(), of.term.source)
        for move in of.moves:
            total = self.writer.emit(move.prim, [total], move.params, move.source)
        first = self.operands[len(self.consts) + of.position]
        total = self.writer.emit(of.add.prim, [first, total], of.add.params, of.add.source)
        self.writer.define(self.eqn.outvars[of.position], total)

    # ---- the loop ----

    def _write_scan(
        self,
        eqns: Sequence[Eqn],
        more_xs: Sequence[tuple[Var, Atom]],
        gone: set[int],
        stacked: Sequence[Var],
    ) -> None:
        """Write the scan without some carried values; note the stacks that it makes."""
        body, p = self.closed.jaxpr, self.eqn.params
        kept = [k for k in range(len(self.carry)) if k not in gone]
        count = len(self.carry)
        invars = [*self.consts, *(self.carry[k] for k in kept), *self.xs]
        invars += [given for given, _ in more_xs]
        outvars = [*(body.outvars[k] for k in kept), *body.outvars[count:], *stacked]
        consts, init, xs = split_list(self.operands, [len(self.consts), count])
        operands = (*consts, *(init[k] for k in kept), *xs, *(stack for _, stack in more_xs))
        changed = body.replace(invars=invars, outvars=outvars, eqns=list(eqns))
        params: dict[str, Any] = p | {
            "jaxpr": ClosedJaxpr(changed, self.closed.consts),
            "num_carry": len(kept),
        }
        more = [Var(v.aval.update(shape=(self.length, *v.aval.shape))) for v in stacked]
        outs = (*(self.eqn.outvars[k] for k in kept), *self.eqn.outvars[count:], *more)
        self.writer.eqns.append(self.eqn.replace(invars=operands, outvars=outs, params=params))
        for var, made in zip(body.outvars[count:], outs[len(kept) :], strict=False):
            if isinstance(var, Var):
                self.stacks.setdefault(var, made)
        self.stacks.update(zip(stacked, more, strict=True))


def _is_product(eqn: Eqn) -> bool:
    return eqn.prim is dot_general_p and not any(eqn.params["dimension_numbers"].batch)


def _depth(eqn: Eqn) -> int:
    """The number of products that an element of the result sums."""
    dims = eqn.params["dimension_numbers"].contract[0]
    return math.prod(eqn.invars[0].aval.shape[d] for d in dims)


def _later(dims: Sequence[int]) -> tuple[int, ...]:
    """Dims of a value as those of a stack of such values."""
    return tuple([d + 1 for d in dims])
