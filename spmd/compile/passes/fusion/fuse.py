"""Fuse: group equations that become one kernel.

Groups grow from a root (the last equation) towards its producers. The root's result defines the
space; every member has an index in it, found with `index_map`, or several, if members read it at
several places. A producer joins if computing it where it is wanted costs less than a round trip to
memory (`cost` says what counts), and no cycle between groups arises. A reduction joins if the dims
that its result lacks are the group's inner dims, which is how a softmax (max, exp, sum, divide)
becomes one kernel with three passes over each row.

A value that others need too is written by the group that computes it, as one more output. A move of
elements is worth no memory: each group that reads it makes its own copy. `merge_siblings`
then joins groups that grew side by side.

Each group becomes one `fused` equation, whose jaxpr still says what it means.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Any

from spmd.compile.expressions.equivalence import kinds_of, literal_key, pattern
from spmd.compile.expressions.expression import REDUCTIONS, index_of_start, storage_dtype
from spmd.compile.expressions.index_map import MOVES, ZERO, Index, dim, dims_of, operand_index, span
from spmd.compile.expressions.scalar_ops import EXPENSIVE, can_lower, is_elementwise
from spmd.compile.passes.fusion.cost import is_one_sum, repeating_pays, rows_fit
from spmd.compile.passes.fusion.graph import NO_EQUATION, graph_of, with_copies
from spmd.compile.passes.fusion.group import Group
from spmd.compile.passes.fusion.memo import FusionTraces, Query, remember, replay
from spmd.compile.passes.fusion.merge_siblings import merge_groups
from spmd.compile.passes.fusion.reachability import Reach
from spmd.compile.passes.inline_calls import with_bodies
from spmd.core.call import impl_jaxpr
from spmd.core.ir import NO_EFFECTS, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.primitive import internal_primitive
from spmd.core.rewriting.equations import finish, map_subjaxprs, start

# The most equations of a kernel: LLVM's time grows faster than linearly with them.
MAX_EQNS = 256

# Reads of one value at different places that one kernel makes: a stencil of 3 x 3 and some more.
MAX_INDICES = 12

# The most parts of a concatenation that a kernel tells apart: a longer one is an array in memory,
# and the makers of its parts write there.
MAX_PARTS = 64

# ---- the fused equation ------------------------------------------------------------------------

fused_p = internal_primitive(
    "fused",
    abstract=lambda *avals, jaxpr, space: jaxpr.out_avals,
    impl=lambda xp, *args, jaxpr, space: impl_jaxpr(xp, jaxpr, *args),
)


def fuse(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Replace groups of equations by `fused` equations, in control flow bodies too."""
    return _Fuser(closed).run()


# ---- members of groups -------------------------------------------------------------------------

# Not worth memory of their own: a group that needs them makes its own copy.
_FREE = frozenset(MOVES) | {"iota"}
# Of an array in memory, these are the same array with another shape.
ALIASES = frozenset(("reshape", "squeeze"))
# The parts of a concatenation are written in place by those that make them; see
# `lower.concatenate`.
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
        return len(eqn.invars) <= MAX_PARTS
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
        graph = graph_of(self.eqns)
        self.makers, self.sources, self.users = graph.makers, graph.sources, graph.users
        # Equal for equations that do the same to operands of the same types: `first` has one each.
        self.kinds, first = kinds_of(self.eqns)
        known = [is_fusible(eqn) for eqn in first]
        self.fusible = [known[kind] for kind in self.kinds]
        self.fusible.append(False)  # `NO_EQUATION` makes nothing that could join a group
        # Members that read their operands at their own index.
        plain = [k and is_elementwise(e.prim.name) for k, e in zip(known, first, strict=True)]
        self.plain = [plain[kind] for kind in self.kinds]
        self.group_of: dict[int, Group] = {}
        self.growths = FusionTraces()
        # The jaxprs and params of groups; groups that are alike share them.
        self.bodies: dict[Any, ClosedJaxpr] = {}
        self.params: dict[Any, dict[str, Any]] = {}
        self.reach = Reach(self.users, self.group_of)
        # Equations whose results are read by finished groups, by others that stay, or outside.
        self.needed = {self.makers.get(v, NO_EQUATION) for v in closed.jaxpr.outvars}

    def run(self) -> ClosedJaxpr:
        units: dict[int, Group | None] = {}
        group_of, needed = self.group_of, self.needed
        for k in range(len(self.eqns) - 1, -1, -1):
            if k in group_of:
                continue
            eqn = self.eqns[k]
            if k not in needed and not eqn.effects:
                continue
            if self.fusible[k] and eqn.prim.name not in _NOT_ROOTS:
                units[k] = self.form(k)
            else:
                units[k] = None
                needed.update(self.sources[k])
        merge_groups(self, units)
        return self.write(units)

    # ---- growing a group ----

    def form(self, root: int) -> Group:
        """The group of a root, as one like it grew before if the surroundings are alike too."""
        group = replay(self, root, Group(root, self.eqns[root])) or self.grow(root)
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
        asked: list[Query] = []
        self.visit(group, root, queue, wanted, refused)
        while queue:
            k = -heapq.heappop(queue)
            if k in group.members or k in refused or len(group.members) >= MAX_EQNS:
                continue
            question = Query(k)
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
        eqn, plain, fusible = self.eqns[k], self.plain[k], self.fusible
        everywhere = (group.index[k], *group.again.get(k, ()))
        for position, maker in enumerate(self.sources[k]):
            if not fusible[maker]:
                continue
            for at in everywhere:
                if plain:
                    index = at if eqn.invars[position].aval.shape else ()
                else:
                    index = self.index_of_operand(group, eqn, position, at)
                if index is None:
                    refused.add(maker)
                elif index not in wanted.setdefault(maker, []):
                    wanted[maker].append(index)
            heapq.heappush(queue, -maker)

    def index_of_operand(self, group: Group, eqn: Eqn, position: int, index: Index) -> Index | None:
        """The index at which a member reads an operand; None if the operand must come from memory.

        `index` is that of the member's own value.
        """
        name, atom = eqn.prim.name, eqn.invars[position]
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

    def admit(self, group: Group, asked: Query, indices: list[Index]) -> bool:
        """Let an equation join a group if it may; says whether it did."""
        k = asked.k
        asked.taken = k in self.group_of
        if asked.taken or not indices:
            return False
        eqn, index = self.eqns[k], indices[0]
        out = eqn.outvars[0]
        # Each point of the space wants an element of its own, as of the root: nothing is repeated.
        once = len(indices) == 1 and index is group.first and out.aval.shape == group.shape
        if len(indices) > MAX_INDICES:
            return False
        outside = self.outside_users(group, k)
        shared = asked.shared = bool(outside) or self.is_needed_outside(group, k)
        free = eqn.prim.name in _FREE
        if eqn.prim.name in MOVES and any(
            operand_index(eqn, at, group.sizes) is None for at in indices
        ):
            return False
        if not (free or once or self.is_cheap_at(group, eqn, indices)):
            return False
        if not once and group.inner is None and dims_of(index) < group.whole:
            opening = self.reduction_behind(group, k, index)
            asked.behind = index, self.kind_of_opening(opening)
            if opening is not None:
                maker, kept = opening
                self.open_rows(group, self.eqns[maker], kept)
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
            group.extra.append(k)
            self.reach.note_exit(group.root, k)
        if eqn.prim.name in REDUCTIONS and group.inner is None:
            kept = dims_of(index)
            self.open_rows(group, eqn, None if kept == group.whole else kept)
        group.members.add(k)
        group.index[k] = index
        if len(indices) > 1:
            group.again[k] = [at for at in indices if at != index]
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
        evaluations = math.prod(group.sizes) * len(indices)
        name = eqn.prim.name
        return is_elementwise(name) and repeating_pays(name, math.prod(shape), evaluations)

    def outside_users(self, group: Group, k: int) -> list[int]:
        """Equations that read a result and are not computed in the group only."""
        members, users = group.members, self.users
        if group.copies.isdisjoint(users[k]):
            return [user for user in users[k] if user not in members]
        read = with_copies(users, k, group.copies)
        return [user for copy in read for user in users[copy] if user not in members]

    def is_needed_outside(self, group: Group, k: int) -> bool:
        """Whether finished groups, or the results, read a result or a copy's original."""
        if k in self.needed:
            return True
        if group.copies.isdisjoint(self.users[k]):
            return False
        return not self.needed.isdisjoint(with_copies(self.users, k, group.copies))

    def reduction_behind(
        self, group: Group, k: int, index: Index
    ) -> tuple[int, frozenset[int]] | None:
        """A reduction that an equation's value is made of and that could open the group's rows.

        With it come the dims that it keeps.
        """
        stack, seen = [(k, index)], 0
        while stack and seen < 32:
            k, index = stack.pop()
            seen += 1
            eqn = self.eqns[k]
            name = eqn.prim.name
            if name in REDUCTIONS:
                if self.fits_rows(group, eqn, index):
                    return k, dims_of(index)
                continue
            if name in MOVES:
                inside = operand_index(eqn, index, group.sizes)
                if inside is None:
                    continue
            elif is_elementwise(name):
                inside = index
            else:
                continue
            for atom, maker in zip(eqn.invars, self.sources[k], strict=True):
                if self.fusible[maker]:
                    stack.append((maker, inside if atom.aval.shape else ()))
        return None

    def kind_of_opening(self, opening: tuple[int, frozenset[int]] | None) -> Any:
        """The result of `reduction_behind`, without the number of its equation."""
        if opening is None:
            return None
        k, kept = opening
        return self.kinds[k], kept

    def repeats_work(self, group: Group, eqn: Eqn, index: Index) -> bool:
        """Whether computing a value at every point that wants it does more than once would."""
        dims = dims_of(index)
        if dims == group.whole or (group.inner is not None and dims == group.points):
            return False
        points = math.prod(group.sizes[d] for d in group.whole)
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
        points = math.prod(group.sizes[d] for d in group.points)
        row = math.prod(group.sizes[d] for d in group.inner or ())
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
        points = math.prod(group.sizes[d] for d in kept)
        is_tail = not chosen or chosen == list(range(chosen[0], len(group.sizes)))
        if sizes or not rows_fit(points, math.prod(reduced), is_tail):
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
        """Note the operands of the finished group from memory."""
        read = group.reads
        for k in group.members:
            read.update(self.sources[k])
        read -= group.members
        self.needed |= read

    # ---- writing the result ----

    def write(self, units: dict[int, Group | None]) -> ClosedJaxpr:
        """The jaxpr with a `fused` equation for each group, in an order that works."""
        writer = start(self.closed)
        read, outer = self.read_between(units), with_bodies(self.closed)
        for k in self.order(units):
            group, eqn = units[k], self.eqns[k]
            if group is None:
                # A map inside of a program is optimised with it, and as a program of its own.
                writer.keep(eqn, map_subjaxprs(eqn, fuse) if eqn in outer else None)
            else:
                writer.keep(self.fused(group, read))
        return finish(writer, self.closed)

    def order(self, units: dict[int, Group | None]) -> list[int]:
        """Units sorted so that each comes after its operands, else by their first equation."""
        group_of, waits = self.group_of, {}
        for k, group in units.items():
            read = self.sources[k] if group is None else group.reads
            waits[k] = {group_of[m].root if m in group_of else m for m in read}
            waits[k].discard(NO_EQUATION)
        if self.closed.effects:
            waits_for_effects(self.eqns, units, waits)
        return _sorted(waits)

    def read_between(self, units: dict[int, Group | None]) -> set[int]:
        """The equations that are read by another unit, or whose results are the jaxpr's."""
        read = {self.makers.get(v, NO_EQUATION) for v in self.closed.jaxpr.outvars}
        for k, group in units.items():
            read.update(self.sources[k] if group is None else group.reads)
        return read

    def fused(self, group: Group, read: set[int]) -> Eqn:
        """The equation of a group, with the outputs that others read.

        Groups that are alike have one jaxpr, in the names of the first.
        """
        written = [k for k in (group.root, *group.extra) if k in read]
        if group.growth is None:
            params, reads = self.describe(group, written)
        else:
            equivalent, reads = self.pattern_of(group, written)
            params = self.params.get(equivalent)
            if params is None:
                params = self.params[equivalent] = self.describe(group, written)[0]
        outs = tuple([self.eqns[k].outvars[0] for k in written])
        source = self.eqns[group.root].source
        return Eqn(fused_p, reads, outs, params, NO_EFFECTS, source)

    def pattern_of(self, group: Group, written: Sequence[int]) -> tuple[Any, tuple[Var, ...]]:
        """The key that grown groups share if they are alike, and the variables that this one reads.

        `pattern` finds that of any group; here the growth says most of it.
        """
        eqns, places = self.eqns, group.places
        numbers: dict[Any, int] = {}
        row: list[Any] = [group.growth, *[k in written for k in (group.root, *group.extra)]]
        for number, position in group.growth.outside:
            atom = eqns[places[number]].invars[position]
            if type(atom) is Literal:
                row.append(literal_key(atom))
            else:
                row.append(numbers.setdefault(atom, len(numbers)))
        return tuple(row), tuple(numbers)

    def describe(
        self, group: Group, written: Sequence[int]
    ) -> tuple[dict[str, Any], tuple[Var, ...]]:
        """The parameters of a group's equation, and the variables that it reads."""
        members = sorted(group.members)
        outs = tuple([self.eqns[k].outvars[0] for k in written])
        equivalent, reads = pattern([(self.kinds[k], self.eqns[k]) for k in members], outs)
        closed = self.bodies.get(equivalent)
        if closed is None:
            jaxpr = Jaxpr((), reads, [self.eqns[k] for k in members], outs)
            closed = self.bodies[equivalent] = ClosedJaxpr(jaxpr)
        return {"jaxpr": closed, "space": group.space(written)}, reads


def _index_of_part(eqn: Eqn, position: int, index: Index) -> Index:
    """The index at which a concatenation reads the operand that its own index is in."""
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
