"""Fuse: group equations that become one kernel.

Groups grow from a root (the last equation) towards its producers. The root's result defines the
space; every member has an index in it, found with `lower.index`, or several, if members read it at
several places. A producer joins if computing it where it is wanted costs less than a round trip to
memory (`worth` says what counts), and no cycle between groups arises. A reduction joins if the dims
that its result lacks are the group's inner dims, which is how a softmax (max, exp, sum, divide)
becomes one kernel with three passes over each row.

A value that others need too is written by the group that computes it, as one more output. What only
moves elements is worth no memory: each group that reads it makes its own copy. `merge` then joins
groups that grew side by side.

Each group becomes one `fused` equation, whose jaxpr still says what it means.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

from spmd.compile.lower.alike import kinds_of, pattern
from spmd.compile.lower.elementwise import EXPENSIVE, can_lower, is_elementwise
from spmd.compile.lower.expression import REDUCTIONS, index_of_start, storage_dtype
from spmd.compile.lower.index import MOVES, ZERO, Index, dim, dims_of, operand_index, span
from spmd.compile.passes.group import Group
from spmd.compile.passes.merge import merge_groups
from spmd.compile.passes.reach import Reach
from spmd.compile.passes.repeat import Asked, Growth, remember, repeat
from spmd.compile.passes.substitute import finish, internal_primitive, map_subjaxprs, start
from spmd.compile.passes.worth import is_one_sum, repeating_pays, rows_fit
from spmd.core.call import impl_jaxpr
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.util import product

# A kernel's code stays of a sane size: LLVM's time grows faster than linearly.
MAX_EQNS = 256

# Reads of one value at different places that one kernel makes: a stencil of 3 x 3 and some more.
MAX_INDICES = 12

# ---- the fused equation ------------------------------------------------------------------------

fused_p = internal_primitive(
    "fused",
    abstract=lambda *avals, jaxpr, space: jaxpr.out_avals,
    impl=lambda xp, *args, jaxpr, space: impl_jaxpr(xp, jaxpr, *args),
)


def fuse(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Replace groups of equations by `fused` equations, in control flow bodies too."""
    return _Fuser(closed).run()


# ---- what can be in a group --------------------------------------------------------------------

# Not worth memory of their own: a group that needs them makes its own copy.
_FREE = frozenset(MOVES) | {"iota"}
# Of an array in memory, these are the same array with another shape.
ALIASES = frozenset(("reshape", "squeeze"))
# The parts of a concatenation are written in place by those that make them; see `lower.parts`.
_NOT_ROOTS = ALIASES | {"concatenate"}
_READERS = frozenset(("dynamic_slice", "gather"))


def is_fusible(eqn: Eqn) -> bool:
    """Whether an equation can be part of a kernel."""
    name, out = eqn.prim.name, eqn.outvars[0].aval if len(eqn.outvars) == 1 else None
    if out is None or eqn.effects or not out.size:
        return False
    for v in eqn.invars:
        if storage_dtype(v.aval.dtype) is None:
            return False
    if storage_dtype(out.dtype) is None:
        return False
    if name in _FREE:
        return True
    if name in REDUCTIONS:
        return isinstance(eqn.invars[0], Var) and _can_reduce(eqn)
    if name == "pad":
        return all(between == 0 for _, _, between in eqn.params["padding_config"])
    if name == "concatenate":
        return True
    if name in _READERS:
        return _can_read(eqn)
    return can_lower(eqn)


def _can_reduce(eqn: Eqn) -> bool:
    operand = eqn.invars[0].aval
    kernel = storage_dtype(operand.dtype) or ""
    if operand.dtype.names:
        return False
    if eqn.prim.name in ("reduce_sum", "reduce_prod"):
        return kernel != "bool" and (kernel[0] != "c" or eqn.prim.name == "reduce_sum")
    if eqn.prim.name in ("reduce_and", "reduce_or", "reduce_xor"):
        return kernel == "bool" or kernel[0] in "iu"
    return kernel[0] != "c"


def _can_read(eqn: Eqn) -> bool:
    operand, *indices = eqn.invars
    if not isinstance(operand, Var) or not operand.aval.size:
        return False
    if any(v.aval.dtype.kind not in "iu" or v.aval.dtype.str[1:] == "u8" for v in indices):
        return False
    return not (operand.aval.dtype.names and eqn.prim.name == "gather")


# ---- all groups of a jaxpr ---------------------------------------------------------------------


class _Fuser:
    """Forms the groups of one jaxpr, from its last equation to its first."""

    def __init__(self, closed: ClosedJaxpr):
        self.closed = closed
        self.eqns = closed.eqns
        self.makers = {v: k for k, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.users: dict[Any, list[int]] = {}
        for k, eqn in enumerate(self.eqns):
            for v in dict.fromkeys(eqn.invars):
                self.users.setdefault(v, []).append(k)
        # Equal for equations that do the same to operands of the same types.
        self.kinds = kinds_of(self.eqns)
        known: dict[int, bool] = {}
        for kind, eqn in zip(self.kinds, self.eqns, strict=True):
            if kind not in known:
                known[kind] = is_fusible(eqn)
        self.fusible = [known[kind] for kind in self.kinds]
        # Members that read their operands at their own index.
        self.plain = [
            k and is_elementwise(e.prim.name) for k, e in zip(self.fusible, self.eqns, strict=True)
        ]
        self.group_of: dict[int, Group] = {}
        # How groups grew from roots of each kind, the latest first; and what groups stand for.
        self.grown: dict[int, list[Growth]] = {}
        self.bodies: dict[Any, ClosedJaxpr] = {}
        self.reach = Reach(self.eqns, self.users, self.group_of)
        self.needed: set[Any] = {v for v in closed.jaxpr.outvars if isinstance(v, Var)}

    def run(self) -> ClosedJaxpr:
        units: dict[int, Group | None] = {}
        for k in range(len(self.eqns) - 1, -1, -1):
            eqn = self.eqns[k]
            if k in self.group_of or not (eqn.effects or self._is_needed(eqn)):
                continue
            if self.fusible[k] and eqn.prim.name not in _NOT_ROOTS:
                units[k] = self.form(k)
            else:
                units[k] = None
                self.needed.update(v for v in eqn.invars if isinstance(v, Var))
        merge_groups(self, units)
        return self.write(units)

    def _is_needed(self, eqn: Eqn) -> bool:
        return any(v in self.needed for v in eqn.outvars)

    # ---- growing a group ----

    def form(self, root: int) -> Group:
        """The group of a root, as one like it grew before if the surroundings are alike too."""
        group = repeat(self, root, Group(root, self.eqns[root])) or self.grow(root)
        self.close(group)
        return group

    def grow(self, root: int) -> Group:
        """The group of a root: pull producers, the latest first, as long as any fits."""
        eqn = self.eqns[root]
        group = Group(root, eqn)
        self.group_of[root] = group
        if eqn.prim.name in REDUCTIONS:
            self.open_rows(group, eqn)
        queue: list[int] = []
        wanted: dict[int, list[Index]] = {}
        refused: set[int] = set()
        asked: list[Asked] = []
        self.visit(group, root, queue, wanted, refused)
        while queue:
            k = -heapq.heappop(queue)
            if k in group.members or k in refused or len(group.members) >= MAX_EQNS:
                continue
            question = Asked(k)
            asked.append(question)
            if self.admit(group, question, wanted[k]):
                self.visit(group, k, queue, wanted, refused)
            else:
                refused.add(k)
        remember(self, group, asked)
        return group

    def visit(
        self,
        group: Group,
        k: int,
        queue: list[int],
        wanted: dict[int, list[Index]],
        refused: set[int],
    ) -> None:
        """Ask for the operands of a new member."""
        eqn, plain = self.eqns[k], self.plain[k]
        (out,) = eqn.outvars
        everywhere = (group.index[out], *group.again.get(out, ()))
        for position, atom in enumerate(eqn.invars):
            maker = None if isinstance(atom, Literal) else self.makers.get(atom)
            if maker is None or not self.fusible[maker]:
                continue
            for at in everywhere:
                if plain:
                    index = at if atom.aval.shape else ()
                else:
                    index = self.index_of_operand(group, eqn, position, at)
                if index is None:
                    refused.add(maker)
                elif index not in wanted.setdefault(maker, []):
                    wanted[maker].append(index)
            heapq.heappush(queue, -maker)

    def index_of_operand(
        self, group: Group, eqn: Eqn, position: int, index: Index | None = None
    ) -> Index | None:
        """Where a member reads an operand; None if the operand must come from memory.

        `index` is where the member's own value is wanted.
        """
        name, atom = eqn.prim.name, eqn.invars[position]
        if index is None:
            index = group.index[eqn.outvars[0]]
        if name in MOVES:
            return operand_index(eqn, index, group.sizes)
        if name in REDUCTIONS:
            return self.reduced_index(group, eqn, index)
        if name == "gather" and position == 1:
            return index_of_start(eqn, index)
        if name in _READERS:
            return None
        if name == "concatenate":
            return _index_of_part(eqn, position, index)
        if name == "pad" and position == 0:
            lows = [low for low, _, _ in eqn.params["padding_config"]]
            return tuple(a.scale(1, -low) for a, low in zip(index, lows, strict=True))
        if name == "pad":
            return ()
        return index if atom.aval.shape else ()

    def reduced_index(self, group: Group, eqn: Eqn, index: Index) -> Index:
        kept, along = iter(index), iter(group.inner or ())
        axes, shape = eqn.params["axes"], eqn.invars[0].aval.shape
        return tuple(dim(next(along), s) if d in axes else next(kept) for d, s in enumerate(shape))

    # ---- the rules of admission ----

    def admit(self, group: Group, asked: Asked, indices: list[Index]) -> bool:
        """Let an equation join a group if it may; says whether it did."""
        k = asked.k
        asked.taken = k in self.group_of
        if asked.taken or not indices:
            return False
        eqn, index = self.eqns[k], indices[0]
        out = eqn.outvars[0]
        # Each point of the space wants an element of its own, as of the root: nothing is repeated.
        once = len(indices) == 1 and index is group.first and out.aval.shape == group.shape
        outside = self.outside_users(group, out)
        if len(indices) > MAX_INDICES:
            return False
        shared = asked.shared = bool(outside) or self.is_needed_outside(group, out)
        free = eqn.prim.name in _FREE
        if eqn.prim.name in MOVES and any(
            operand_index(eqn, at, group.sizes) is None for at in indices
        ):
            return False
        if not (free or once or self.is_cheap_at(group, eqn, indices)):
            return False
        if not once and group.inner is None and dims_of(index) < group.whole:
            opening = self.reduction_behind(group, eqn, index)
            asked.behind = index, self.kind_of_opening(opening)
            if opening is not None:
                self.open_rows(group, *opening)
        if eqn.prim.name in REDUCTIONS:
            if not self.fits_rows(group, eqn, index):
                return False
        elif not (free or once) and any(self.repeats_work(group, eqn, at) for at in indices):
            return False
        if shared and not free:
            storable = [at for at in indices if self.can_store(group, out, at)]
            if not storable:
                return False
            asked.circle = self.reach.any_reaches(outside, group)
            if asked.circle:
                return False
            index = storable[0]
            group.extra.append(out)
            self.reach.note_exit(group.root, k)
        if eqn.prim.name in REDUCTIONS and group.inner is None:
            kept = dims_of(index)
            self.open_rows(group, eqn, None if kept == group.whole else kept)
        group.members.add(k)
        group.index[out] = index
        if len(indices) > 1:
            group.again[out] = [at for at in indices if at != index]
        if shared and free:
            group.copies.add(k)
        else:
            self.group_of[k] = group
        asked.joined = True
        return True

    def is_cheap_at(self, group: Group, eqn: Eqn, indices: list[Index]) -> bool:
        """Whether computing a value at these indices costs less than a round trip to memory.

        At one index inside the value that is no question.
        """
        shape = eqn.outvars[0].aval.shape
        inside = all(_is_inside(index, shape, group.sizes) for index in indices)
        if len(indices) == 1 and inside:
            return True
        evaluations = product(group.sizes) * len(indices)
        name = eqn.prim.name
        return is_elementwise(name) and repeating_pays(name, product(shape), evaluations)

    def outside_users(self, group: Group, var: Var) -> list[int]:
        """Equations that read a variable and are not computed in the group only."""
        found = []
        for user in self.users.get(var, ()):
            if user not in group.members:
                found.append(user)
            elif user in group.copies:
                found += self.outside_users(group, self.eqns[user].outvars[0])
        return found

    def is_needed_outside(self, group: Group, var: Var) -> bool:
        """Whether finished groups, or the results, read a variable or a copy's original."""
        copies = [u for u in self.users.get(var, ()) if u in group.copies]
        return var in self.needed or any(
            self.is_needed_outside(group, self.eqns[u].outvars[0]) for u in copies
        )

    def reduction_behind(
        self, group: Group, eqn: Eqn, index: Index
    ) -> tuple[Eqn, frozenset[int]] | None:
        """A reduction that an equation's value is made of and that could open the group's rows.

        With it come the dims that it keeps.
        """
        stack, seen = [(eqn, index)], 0
        while stack and seen < 32:
            eqn, index = stack.pop()
            seen += 1
            name = eqn.prim.name
            if name in REDUCTIONS:
                if self.fits_rows(group, eqn, index):
                    return eqn, dims_of(index)
                continue
            if name not in MOVES and not is_elementwise(name):
                continue
            for atom in eqn.invars:
                maker = None if isinstance(atom, Literal) else self.makers.get(atom)
                inside = operand_index(eqn, index, group.sizes) if name in MOVES else index
                if maker is not None and self.fusible[maker] and inside is not None:
                    stack.append((self.eqns[maker], inside if atom.aval.shape else ()))
        return None

    def kind_of_opening(self, opening: tuple[Eqn, frozenset[int]] | None) -> Any:
        """What `reduction_behind` found, without the names of its equation."""
        if opening is None:
            return None
        eqn, kept = opening
        return self.kinds[self.makers[eqn.outvars[0]]], kept

    def repeats_work(self, group: Group, eqn: Eqn, index: Index) -> bool:
        """Whether computing a value at every point that wants it does more than once would."""
        dims = dims_of(index)
        if dims == group.whole or (group.inner is not None and dims == group.points):
            return False
        points = product(group.sizes[d] for d in group.whole)
        if eqn.outvars[0].aval.size >= points:
            return False
        # A scalar that costs next to nothing is not worth a kernel of its own.
        return bool(dims) or eqn.prim.name in EXPENSIVE or eqn.prim.name in _READERS

    def can_store(self, group: Group, out: Var, index: Index) -> bool:
        """Whether the group's kernel can write out the whole of a value computed at `index`."""
        along = []
        for affine, size in zip(index, out.aval.shape, strict=True):
            d = affine.plain_dim()
            if d is not None and group.sizes[d] == size:
                along.append(d)
            elif affine != ZERO or size != 1:
                return False
        dims = frozenset(along)
        points = product(group.sizes[d] for d in group.points)
        row = product(group.sizes[d] for d in group.inner or ())
        if len(along) != len(dims) or (group.inner is not None and is_one_sum(points, row)):
            return False
        return dims == group.whole or (group.inner is not None and dims == group.points)

    def fits_rows(self, group: Group, eqn: Eqn, index: Index) -> bool:
        """Whether a reduction's missing dims are, or can become, the group's inner dims."""
        if any(a != ZERO and a.plain_dim() is None for a in index):
            return False
        plain = [d for d in (a.plain_dim() for a in index) if d is not None]
        dims = frozenset(plain)
        if len(plain) != len(dims):
            return False
        reduced = tuple(eqn.invars[0].aval.shape[d] for d in sorted(eqn.params["axes"]))
        if group.inner is not None:
            return dims == group.points and reduced == self._row_shape(group)
        if dims == group.whole:
            return True
        return bool(dims) and self.row_dims(group, dims, reduced) is not None

    def row_dims(
        self, group: Group, kept: frozenset[int], reduced: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        """The space dims that become the group's rows: those of the reduced sizes, in order."""
        rest = [d for d in range(len(group.sizes)) if d not in kept]
        sizes, chosen = list(reduced), []
        for d in rest:
            if sizes and group.sizes[d] == sizes[0]:
                chosen.append(d)
                sizes.pop(0)
            elif group.sizes[d] != 1:
                return None
        points = product(group.sizes[d] for d in kept)
        is_tail = not chosen or chosen == list(range(chosen[0], len(group.sizes)))
        if sizes or not rows_fit(points, product(reduced), is_tail):
            return None
        return tuple(chosen)

    def _row_shape(self, group: Group) -> tuple[int, ...]:
        return tuple(group.sizes[d] for d in group.inner or ())

    def open_rows(self, group: Group, eqn: Eqn, kept: frozenset[int] | None = None) -> None:
        """Give the group inner dims: new ones, or those of its dims that are not `kept`."""
        reduced = tuple(eqn.invars[0].aval.shape[d] for d in sorted(eqn.params["axes"]))
        count = len(group.sizes)
        if kept is None:
            group.open_rows(range(count, count + len(reduced)), reduced)
        else:
            inner = self.row_dims(group, kept, reduced)
            assert inner is not None, "rows are opened after `fits_rows`"
            group.open_rows(inner)

    def close(self, group: Group) -> None:
        """Note what the finished group reads from memory."""
        read: set[Any] = set()
        made: list[Var] = []
        for k in group.members:
            read.update(self.eqns[k].invars)  # literals do no harm
            made += self.eqns[k].outvars
        self.needed |= read.difference(made)

    # ---- writing the result ----

    def write(self, units: dict[int, Group | None]) -> ClosedJaxpr:
        """The jaxpr with a `fused` equation for each group, in an order that works."""
        writer = start(self.closed)
        read = self.read_between(units)
        for k in self.order(units):
            group = units[k]
            if group is None:
                eqn = self.eqns[k]
                # A map inside of a program is optimised with it, and as a program of its own.
                done = eqn.prim.name in ("fused", "product")
                writer.keep(eqn, eqn.params if done else map_subjaxprs(eqn, fuse))
            else:
                writer.keep(self.fused(group, read))
        return finish(writer, self.closed)

    def order(self, units: dict[int, Group | None]) -> list[int]:
        """Units sorted so that each comes after what it reads, else by their first equation."""
        unit_of = {}
        for k, group in units.items():
            owned = {k} if group is None else group.members - group.copies
            unit_of.update(dict.fromkeys(owned, k))
        waits: dict[int, set[int]] = {k: set() for k in units}
        for k, group in units.items():
            members = (k,) if group is None else group.members
            read: set[Any] = {v for m in members for v in self.eqns[m].invars}
            made = [self.makers[v] for v in read if v in self.makers]
            waits[k] = {unit_of[m] for m in made if m not in members}
        waits_for_effects(self.eqns, units, waits)
        return _sorted(waits)

    def read_between(self, units: dict[int, Group | None]) -> set[Var]:
        """The variables that cross from one unit to another, or to the results."""
        read: set[Any] = set(self.closed.jaxpr.outvars)  # literals do no harm
        for k, group in units.items():
            if group is None:
                read.update(self.eqns[k].invars)
                continue
            inside: set[Any] = set()
            made: list[Var] = []
            for m in group.members:
                inside.update(self.eqns[m].invars)
                made += self.eqns[m].outvars
            read |= inside.difference(made)
        return read

    def fused(self, group: Group, read: set[Var]) -> Eqn:
        """The equation of a group, with the outputs that others read.

        Groups that are alike have one jaxpr, in the names of the first.
        """
        root = self.eqns[group.root]
        outs = tuple(v for v in (*root.outvars, *group.extra) if v in read)
        space = group.space(outs)
        members = sorted(group.members)
        alike, reads = pattern([(self.kinds[k], self.eqns[k]) for k in members], outs)
        closed = self.bodies.get(alike)
        if closed is None:
            jaxpr = Jaxpr((), reads, [self.eqns[k] for k in members], outs)
            closed = self.bodies[alike] = ClosedJaxpr(jaxpr)
        params = {"jaxpr": closed, "space": space}
        return Eqn(fused_p, reads, outs, params, frozenset(), root.source)


def _index_of_part(eqn: Eqn, position: int, index: Index) -> Index:
    """Where a concatenation reads an operand, if its own index is inside that operand."""
    along = eqn.params["dimension"]
    start = sum(v.aval.shape[along] for v in eqn.invars[:position])
    return (*index[:along], index[along].scale(1, -start), *index[along + 1 :])


def _is_inside(index: Index, shape: Sequence[int], space: Sequence[int]) -> bool:
    """Whether an index stays inside a shape at all points of a space."""
    for affine, size in zip(index, shape, strict=True):
        low, high = span(affine, space)
        if low < 0 or high >= size:
            return False
    return True


def waits_for_effects(
    eqns: Sequence[Eqn], units: dict[int, Any], waits: dict[int, set[int]]
) -> None:
    """Keep equations with effects in their order."""
    ordered = [k for k in sorted(units) if eqns[k].effects]
    for before, after in itertools.pairwise(ordered):
        waits[after].add(before)


def _sorted(waits: dict[int, set[int]]) -> list[int]:
    """A topological order that is the same in every process: of the ready ones, the smallest."""
    count = {k: len(before) for k, before in waits.items()}
    after: dict[int, list[int]] = {}
    for k, before in waits.items():
        for b in before:
            after.setdefault(b, []).append(k)
    ready = [k for k, n in count.items() if n == 0]
    heapq.heapify(ready)
    out = []
    while ready:
        k = heapq.heappop(ready)
        out.append(k)
        for later in after.get(k, ()):
            count[later] -= 1
            if count[later] == 0:
                heapq.heappush(ready, later)
    assert len(out) == len(waits), "fused groups depend on each other in a circle"
    return out
