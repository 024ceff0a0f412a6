"""Tiling of product chains: values between two products are made in blocks, never as a whole.

Attention written as a formula multiplies queries with keys, turns each row of the scores into
weights, and multiplies these with the values. Scores and weights have as many elements as queries
times keys: far more than operands and results. A row of the result needs one row of them, so
blocks of rows follow each other in a loop without a carry, whose iterations may run on several
threads, and the scores of a block never leave a core's cache.

The way back from the second product is followed through elementwise operations, broadcasts and
reductions along the rows to the first; every dim on the way is known to be a batch dim, the rows',
or whole in each block. Another reader of such a value (a backward pass, say) keeps it in memory,
and then nothing is gained.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from spmd.base.record import record
from spmd.compile.expressions.scalar_ops import EXPENSIVE, is_elementwise
from spmd.compile.passes.inline_calls import with_bodies
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.rewriting.equations import JaxprBuilder, finish, map_subjaxprs, start
from spmd.core.structural import broadcast_in_dim_p, permute_dims_p, reshape_p
from spmd.lax.array import iota_p
from spmd.lax.control_scan import scan_p
from spmd.lax.dot import DimensionNumbers, dot_general_p

# Values that fit in the caches as a whole may be there as a whole.
LEAST_BYTES = 1 << 20
# Bytes of a block's part of such values; and its rows. (4 heads of 1024 x 64 take 6.8 ms as a
# whole, 6.5, 6.3, 6.0, 6.3 in blocks of 32, 64, 128, 256 rows.)
BLOCK_BYTES, MOST_ROWS = 1 << 19, 256
# With fewer blocks threads would have nothing to share.
LEAST_ROUNDS = 8
# Operands that don't have their rows in order are copied, which should be little beside the rest.
COPIED_PART = 4

_REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min"))

# For each dim of a value the number of the loop that goes along it; None where an iteration has it
# all.
Along = tuple[int | None, ...]


def tile_matmul_chains(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr in which rows between two products are loops over blocks of them."""
    found, outer = _Finder(closed).find(), with_bodies(closed)
    if not found and not outer:
        return closed
    gone = {k for chain in found.values() for k in chain.members}
    writer = start(closed)
    for k, eqn in enumerate(closed.eqns):
        if k in found:
            _write(writer, found[k])
        elif k not in gone:
            writer.keep(eqn, map_subjaxprs(eqn, tile_matmul_chains) if eqn in outer else None)
    return finish(writer, closed)


@record
class _Chain:
    """The equations of a loop, up to a product, and the dims of their values that it runs along."""

    members: tuple[int, ...]
    eqns: tuple[Eqn, ...]  # the last is the second product
    along: dict[Var, Along]
    sizes: tuple[int, ...]  # of the dims along which there are loops; the last are the rows
    rows: int  # of a block

    @property
    def out(self) -> Var:
        return self.eqns[-1].outvars[0]

    @property
    def trips(self) -> tuple[int, ...]:
        """The iterations of each loop."""
        return (*self.sizes[:-1], self.sizes[-1] // self.rows)

    def block(self, var: Var) -> tuple[int, ...]:
        """The shape of an iteration's part of a value."""
        last, shape = len(self.sizes) - 1, var.aval.shape
        parts = [
            None if loop is None else self.rows if loop == last else 1 for loop in self.along[var]
        ]
        return tuple([n if part is None else part for n, part in zip(shape, parts, strict=True)])

    def given(self, var: Var) -> tuple[int, ...]:
        """The same without the dims that the loops over batches take away."""
        last = len(self.sizes) - 1
        pairs = zip(self.block(var), self.along[var], strict=True)
        kept = [(n, loop) for n, loop in pairs if loop is None or loop == last]
        return tuple(
            [n for n, loop in kept if loop == last] + [n for n, loop in kept if loop is None]
        )

    def loops(self, var: Var) -> list[int]:
        """The loops that go along a value, from the outermost on."""
        return sorted(loop for loop in self.along[var] if loop is not None)

    def order(self, var: Var) -> tuple[int, ...]:
        """A value's dims with those first along which there are loops, in order."""
        along = self.along[var]
        whole = [d for d, loop in enumerate(along) if loop is None]
        return (*sorted(set(range(len(along))) - set(whole), key=lambda d: along[d] or 0), *whole)


# ---- finding chains ----------------------------------------------------------------------------


class _Finder:
    """Looks for chains in one jaxpr."""

    def __init__(self, closed: ClosedJaxpr):
        self.eqns = closed.eqns
        self.needed = {v for v in closed.jaxpr.outvars if isinstance(v, Var)}
        self.makers: dict[Atom, int] = {}
        self.users: dict[Atom, set[int]] = {}

    def find(self) -> dict[int, _Chain]:
        """The chains, by the number of the product that ends them."""
        products = [k for k, e in enumerate(self.eqns) if e.prim is dot_general_p and _is_large(e)]
        if not products:
            return {}
        for k, eqn in enumerate(self.eqns):
            for v in eqn.outvars:
                self.makers[v] = k
            for v in eqn.invars:
                self.users.setdefault(v, set()).add(k)
        return {k: chain for k in products if (chain := self.chain(k)) is not None}

    def chain(self, k: int) -> _Chain | None:
        """The chain that ends with a product whose left operand is large."""
        last = self.eqns[k]
        numbers: DimensionNumbers = last.params["dimension_numbers"]
        wide, other = last.invars
        shape = wide.aval.shape
        batch = [d for d in numbers.batch[0] if shape[d] != 1]
        free = [d for d in numbers.free(0, len(shape)) if shape[d] != 1]
        if len(free) != 1 or not isinstance(wide, Var) or not isinstance(other, Var):
            return None
        loops = {d: n for n, d in enumerate((*batch, *free))}
        sizes = tuple([shape[d] for d in loops])
        left = tuple([loops.get(d) for d in range(len(shape))])
        pairs = dict(zip(numbers.batch[1], numbers.batch[0], strict=True))
        right = tuple([loops.get(pairs.get(d, -1)) for d in range(other.aval.ndim)])
        along = {wide: left, other: right, last.outvars[0]: _of_product(numbers, left, right)}
        members = [] if wide is other else self.follow(k, along)
        names = {self.eqns[j].prim.name for j in members[:-1]}
        if "dot_general" not in names or not names & _REDUCTIONS:
            return None
        rows = _rows(wide.aval.nbytes // math.prod(sizes), sizes[-1])
        eqns = tuple([self.eqns[j] for j in members])
        chain = _Chain(tuple(members), eqns, along, sizes, rows)
        if math.prod(chain.trips) < LEAST_ROUNDS or not _can_loop(chain, wide.aval.nbytes):
            return None
        return chain

    def follow(self, k: int, along: dict[Var, Along]) -> list[int]:
        """The equations that come along with a product, in order, itself the last.

        Notes the loops along all their values. None come if a value is wanted in two ways.
        """
        inside, wide = {k}, self.eqns[k].invars[0]
        assert isinstance(wide, Var)
        loops = {n for n in along[wide] if n is not None}
        queue = [-self.makers[wide]] if wide in self.makers else []
        while queue:
            j = -heapq.heappop(queue)
            if j in inside or not self.comes(j, along, loops, inside):
                continue
            inside.add(j)
            eqn = self.eqns[j]
            wanted = _of_operands(eqn, along[eqn.outvars[0]])
            for atom, how in zip(eqn.invars, wanted, strict=True):
                if isinstance(atom, Literal):
                    continue
                if along.setdefault(atom, how) != how:
                    return []
                if atom in self.makers and eqn.prim is not dot_general_p:
                    heapq.heappush(queue, -self.makers[atom])
        return sorted(inside)

    def comes(self, j: int, along: dict[Var, Along], loops: set[int], inside: set[int]) -> bool:
        """Whether an equation's value is computed in the loop: it has no other reader."""
        eqn = self.eqns[j]
        if len(eqn.outvars) != 1 or eqn.effects:
            return False
        (out,) = eqn.outvars
        if out in self.needed or not self.users[out] <= inside:
            return False
        name, whole = eqn.prim.name, loops <= set(along[out])
        if eqn.prim is dot_general_p or name in _REDUCTIONS:
            return whole
        if is_elementwise(name):
            return whole or name not in EXPENSIVE
        if name == "reshape":
            return _long(eqn.invars[0].aval.shape) == _long(out.aval.shape)
        return name in ("broadcast_in_dim", "squeeze", "iota")


def _is_large(eqn: Eqn) -> bool:
    return eqn.invars[0].aval.nbytes >= LEAST_BYTES


def _rows(row_bytes: int, count: int) -> int:
    """Rows of a block: as many as the cache likes, in blocks of equal size."""
    most = min(MOST_ROWS, max(BLOCK_BYTES // max(row_bytes, 1), 1), count)
    return next((n for n in range(most, most // 4, -1) if count % n == 0), count)


def _can_loop(chain: _Chain, large: int) -> bool:
    """Whether the iterations' parts of all operands and of the result can be contiguous."""
    made = {v for e in chain.eqns for v in e.outvars}
    read = {v for e in chain.eqns for v in e.invars if isinstance(v, Var)} - made
    last, copied = len(chain.sizes) - 1, 0
    for var in (*read, chain.out):
        shape, along = var.aval.shape, chain.along[var]
        long = [loop for n, loop in zip(shape, along, strict=True) if n != 1]
        if last in long and None in long[: long.index(last)]:
            return False
        order = [d for d in chain.order(var) if shape[d] != 1]
        if order != sorted(order):
            if var is chain.out:
                return False
            copied += var.aval.nbytes
    return copied * COPIED_PART <= large


def _long(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]


def _of_product(numbers: DimensionNumbers, left: Along, right: Along) -> Along:
    """The loops along a product's result."""
    free = [left[d] for d in numbers.free(0, len(left))]
    free += [right[d] for d in numbers.free(1, len(right))]
    return (*[left[d] for d in numbers.batch[0]], *free)


def _of_operands(eqn: Eqn, out: Along) -> list[Along]:
    """The loops along the operands of an equation, from those along its result."""
    name = eqn.prim.name
    if name == "iota":
        return []
    if is_elementwise(name):
        return [out if atom.aval.shape else () for atom in eqn.invars]
    shape = eqn.invars[0].aval.shape
    if name == "broadcast_in_dim":
        where, full = eqn.params["broadcast_dimensions"], eqn.params["shape"]
        pairs = zip(shape, where, strict=True)
        return [tuple([out[d] if n == full[d] else None for n, d in pairs])]
    if name in ("reshape", "squeeze"):
        long = iter(
            [loop for n, loop in zip(eqn.outvars[0].aval.shape, out, strict=True) if n != 1]
        )
        return [tuple([next(long) if n != 1 else None for n in shape])]
    if name in _REDUCTIONS:
        kept = iter(out)
        return [tuple([None if d in eqn.params["axes"] else next(kept) for d in range(len(shape))])]
    numbers: DimensionNumbers = eqn.params["dimension_numbers"]
    wanted: list[Along] = []
    first = len(numbers.batch[0])
    for side, atom in enumerate(eqn.invars):
        free = numbers.free(side, atom.aval.ndim)
        loops = dict(zip(numbers.batch[side], out, strict=False))
        loops |= dict(zip(free, out[first:], strict=False))
        first += len(free)
        wanted.append(tuple([loops.get(d) for d in range(atom.aval.ndim)]))
    return wanted


# ---- writing loops -----------------------------------------------------------------------------


def _write(writer: JaxprBuilder, chain: _Chain) -> None:
    """Write a chain as loops around its equations."""
    body = _Body(chain)
    out = body.run()
    writer.eqns += body.before
    eqns, variables = body.writer.eqns, body.variables
    for loop, trips in reversed(list(enumerate(chain.trips))):
        if trips == 1:
            continue
        moves = [loop in chain.loops(v) for v in body.read]
        inner = [v for v, m in zip(variables, moves, strict=True) if not m]
        inner += [v for v, m in zip(variables, moves, strict=True) if m]
        closed = ClosedJaxpr(Jaxpr((), inner, eqns, (out,)))
        variables = [
            Var(v.aval.update(shape=(trips, *v.aval.shape)) if m else v.aval)
            for v, m in zip(variables, moves, strict=True)
        ]
        operands = [v for v, m in zip(variables, moves, strict=True) if not m]
        operands += [v for v, m in zip(variables, moves, strict=True) if m]
        params = {
            "jaxpr": closed,
            "length": trips,
            "reverse": False,
            "num_consts": moves.count(False),
            "num_carry": 0,
            "unroll": 1,
        }
        out = Var(out.aval.update(shape=(trips, *out.aval.shape)))
        source = chain.eqns[-1].source
        eqns = [Eqn(scan_p, tuple(operands), (out,), params, frozenset(), source)]
    for old, var in zip(body.read, variables, strict=True):
        writer.define(var, _arranged(writer, chain, old, var))
    (loops,) = eqns
    writer.keep(loops)
    _reshape(writer, out, chain.out)


def _arranged(writer: JaxprBuilder, chain: _Chain, old: Var, var: Var) -> Atom:
    """An operand in the shape that the loops read."""
    atom, order = writer.read(old), chain.order(old)
    long = [d for d in order if old.aval.shape[d] != 1]
    if long != sorted(long):
        atom = writer.emit(permute_dims_p, [atom], {"permutation": order})
    if atom.aval.shape == var.aval.shape:
        return atom
    made = Var(var.aval)
    return _reshape(writer, atom, made)


def _reshape(writer: JaxprBuilder, atom: Atom, to: Var) -> Var:
    """Write `to` as a reshape."""
    params = {"new_sizes": to.aval.shape}
    writer.eqns.append(Eqn(reshape_p, (atom,), (to,), params))
    return to


class _Body:
    """The equations of one iteration."""

    def __init__(self, chain: _Chain):
        self.chain = chain
        self.writer = JaxprBuilder()
        self.before: list[Eqn] = []  # to be written before the loops
        self.read: list[Var] = []
        self.variables: list[Var] = []

    def run(self) -> Var:
        """Write all equations; gives the iteration's part of the result."""
        chain = self.chain
        made = {v for e in chain.eqns for v in e.outvars}
        for eqn in chain.eqns:
            for atom in eqn.invars:
                if isinstance(atom, Var) and atom not in made:
                    made.add(atom)
                    self.give(atom)
            self.write(eqn)
        out = self.writer.read(chain.out)
        assert isinstance(out, Var)
        return _reshape(self.writer, out, Var(out.aval.update(shape=chain.given(chain.out))))

    def give(self, old: Var) -> None:
        """An iteration's part of an operand."""
        given = Var(old.aval.update(shape=self.chain.given(old)))
        self.read.append(old)
        self.variables.append(given)
        shape = self.chain.block(old)
        if given.aval.shape != shape:
            self.writer.define(old, _reshape(self.writer, given, Var(old.aval.update(shape=shape))))
        else:
            self.writer.define(old, given)

    def write(self, eqn: Eqn) -> None:
        """The equation for an iteration's part of its operands."""
        (old,) = eqn.outvars
        prim, params, shape = eqn.prim, eqn.params, self.chain.block(old)
        ins = self.writer.read_all(eqn.invars)
        match prim.name:
            case "broadcast_in_dim" | "iota":
                params = params | {"shape": shape}
            case "reshape":
                params = params | {"new_sizes": shape}
        d = eqn.params["dimension"] if prim is iota_p else 0
        if prim is iota_p and shape[d] != old.aval.shape[d]:
            prim, ins = broadcast_in_dim_p, (self.positions(eqn, d),)
            params = {"shape": shape, "broadcast_dimensions": (d,)}
        out = Var(old.aval.update(shape=shape))
        self.writer.eqns.append(eqn.replace(prim=prim, invars=ins, outvars=(out,), params=params))
        self.writer.define(old, out)

    def positions(self, eqn: Eqn, d: int) -> Atom:
        """An iteration's part of the numbers along dim `d`, which are computed before the loops."""
        (old,) = eqn.outvars
        numbers = Var(old.aval.update(shape=(old.aval.shape[d],)))
        params = eqn.params | {"shape": numbers.aval.shape, "dimension": 0}
        self.before.append(eqn.replace(outvars=(numbers,), params=params))
        self.chain.along[numbers] = (self.chain.along[old][d],)
        self.give(numbers)
        return self.writer.read(numbers)
