"""Propagation: which mesh axes split the dims of each value of a program.

Every value has a `Cell`. The shardings of arguments, of results and of the user's constraints are
known at first. They spread along the rules of equations in both directions until nothing changes:
first through what only renames dims, then through broadcasts and reductions, then through products.
A cell's axes only ever grow, and a dim that its user closed keeps what he said, so the end is
reached after as many steps as there are dims; it depends on the program alone.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from spmd.base.config import config
from spmd.base.errors import ShardingError
from spmd.collectives.axis import pcast_p
from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Var
from spmd.core.remat import optimization_barrier_p
from spmd.core.structural import add_any_p, permute_dims_p, reshape_p
from spmd.lax.arithmetic import add_p, neg_p, sub_p
from spmd.lax.array import squeeze_p
from spmd.lax.control_cond import cond_p
from spmd.lax.control_scan import scan_p
from spmd.lax.control_while import while_p
from spmd.lax.convert import convert_element_type_p
from spmd.partition.accumulating import added_up, addends
from spmd.partition.kinds import MOST_WAYS, Groups, Kind, Offer, Offers, kind_of
from spmd.partition.rules import CONTRACTS, LEVELS, RENAMES
from spmd.partition.strategies.reshaping import carried, may_reach_second
from spmd.partition.strategies.rolling import rolls_of
from spmd.partition.strategies.sections import sections_of
from spmd.sharding.abstract_mesh import AxisType
from spmd.sharding.array import Array
from spmd.sharding.constraint import sharding_constraint_p
from spmd.sharding.custom_partitioning import custom_partitioning_p
from spmd.sharding.explicit_layouts import reshard_p, to_auto_p
from spmd.sharding.named import NamedSharding
from spmd.sharding.operand_layouts import is_reordered, similar_spec, spec_over
from spmd.sharding.shard_map_rules import shard_map_p
from spmd.sharding.spec import Mesh, PartitionSpec

T = TypeVar("T")

Axes = tuple[Any, ...]
# For each dim of a value the mesh axes that split it, major first.
Split = tuple[Axes, ...]

# Where terms of a sum are wanted of the result, they are of the operands.
KEEPS_TERMS = frozenset(
    {
        add_any_p,
        add_p,
        convert_element_type_p,
        neg_p,
        permute_dims_p,
        reshape_p,
        reshard_p,
        squeeze_p,
        sub_p,
        to_auto_p,
    }
)


class Cell:
    """The axes that split each dim of a value; a closed dim keeps its axes."""

    is_split = False  # whether any axes were given to it
    # Whether the value, or one of its shape that is computed from it, leaves the program.
    edge = False
    # The axes along which devices hold terms of a sum, as the type says, and those along which
    # a reader wants such terms.
    unreduced: Axes = ()
    terms: Axes = ()
    # The sum of which the value is a term, if other terms of it may be partial, too.
    sum: Sum | None = None
    # The axes along which the type says how the value is laid out.
    barred: frozenset[Any] = frozenset()

    def __init__(self, aval: ShapedArray):
        self.shape = shape = aval.shape
        ndim = len(shape)
        self.axes: Split = _NO_AXES[ndim]
        self.closed: tuple[bool, ...] = _OPEN[ndim]
        self.by: tuple[str, ...] = _BY_NOBODY[ndim]  # the origins of the splits, in words
        self.links: list[Link] = []
        if aval.explicit is not None:
            self._close_typed(aval.explicit)

    def close(self, spec: PartitionSpec, by: str) -> None:
        """Fix the dims of which a spec speaks, which is that of an argument, say."""
        for d in range(len(self.axes)):
            if d < len(spec) and spec[d] is PartitionSpec.UNCONSTRAINED:
                continue
            self.closed = _with(self.closed, d, True)
            self.put(d, spec.axes_of(d), by)
        for link in self.links:
            link.is_behind = True

    def put(self, d: int, axes: Axes, by: str) -> None:
        """Say which axes split a dim, whatever was said before."""
        if axes:
            self.is_split = True
        have, said = self.axes, self.by
        self.axes = (*have[:d], axes, *have[d + 1 :])
        self.by = (*said[:d], by, *said[d + 1 :])

    def _close_typed(self, sharding: NamedSharding) -> None:
        """Fix what a type says; along other axes than explicit ones dims may be split further."""
        mesh = sharding.mesh
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        self.barred = frozenset(a for a, kind in kinds.items() if kind is AxisType.Explicit)
        # Along manual axes each device's term is its shard.
        self.unreduced = tuple(a for a in sharding.unreduced_axes if a in self.barred)
        self.terms = self.unreduced
        self.close(sharding.spec, "its type")
        if len(self.barred) < len(kinds):
            self.closed = _OPEN[len(self.axes)]

    def offer(
        self, d: int, axes: Axes, sizes: Mapping[Any, int], by: str, uneven: bool = False
    ) -> bool:
        """Split a dim over more axes if that is possible; whether it was done.

        In propagation parts are equally large; what is made `uneven` stays so for its readers.
        """
        have = self.axes[d]
        if self.closed[d] or len(axes) <= len(have) or axes[: len(have)] != have:
            return False
        if self.barred and not self.barred.isdisjoint(axes[len(have) :]):
            return False
        count = 1
        for a in axes:
            count *= sizes[a]
            for k, own in enumerate(self.axes):
                if own and k != d and a in own:
                    return False
        if not uneven and self.shape[d] % count:
            return False
        self.put(d, axes, by)
        return True


class Sum:
    """Values that are added up before they are read: one collective makes the sum of all.

    `share` says, of each axis along which some of them may be partial, which part of that
    collective one has to pay: none, if there is a term already that is.
    """

    __slots__ = ("share",)

    def __init__(self) -> None:
        self.share: dict[Any, float] = {}

    def made(self, over: Axes) -> None:
        """A term of it is partial over some axes."""
        for axis in over:
            self.share[axis] = 0.0


def cell_of_literal(aval: ShapedArray) -> Cell:
    """The cell of a literal in a link: most have no dims, and share one."""
    return Cell(aval) if aval.shape or aval.explicit is not None else _NO_DIMS


# For each number of dims, what cells say at first.
MOST_DIMS = 64
_NO_AXES: list[Split] = [((),) * n for n in range(MOST_DIMS + 1)]
_OPEN = [(False,) * n for n in range(MOST_DIMS + 1)]
_BY_NOBODY = [("",) * n for n in range(MOST_DIMS + 1)]
_NO_DIMS = Cell(ShapedArray((), np.dtype(np.float32)))


def _with(values: tuple[T, ...], d: int, value: T) -> tuple[T, ...]:
    return (*values[:d], value, *values[d + 1 :])


def even(cell: Cell, sizes: Mapping[Any, int]) -> Cell:
    """The cell, or one whose dims with unequal parts are whole, as at the edges of programs."""
    parts = [math.prod(sizes[a] for a in axes) for axes in cell.axes]
    if not any(size % count for size, count in zip(cell.shape, parts, strict=True)):
        return cell
    made = copy(cell)
    rows = zip(cell.axes, cell.shape, parts, strict=True)
    made.axes = tuple([() if size % count else axes for axes, size, count in rows])
    return made


class Link:
    """Cells whose dims with equal labels should be split alike: `groups` are these dims.

    A link `is_behind` if one of its cells has got axes that others may have to get: it is told of
    those that other links give, and knows of its own. The offers of links of one kind depend on the
    layouts of their cells: `known` keeps them, for the sizes at hand.
    """

    __slots__ = ("cells", "groups", "is_behind", "known", "level", "queued")

    def __init__(
        self, cells: Sequence[Cell], groups: Groups, level: int, known: Offers | None = None
    ):
        self.cells = cells
        self.groups = groups
        self.level = level
        self.known = known
        self.queued = True  # by its level, when the turn of that comes
        self.is_behind = False
        for cell in cells:
            if cell.axes:  # a value without dims tells nothing
                cell.links.append(self)
                if cell.is_split:
                    self.is_behind = True

    def spread(self, sizes: Mapping[Any, int]) -> Sequence[Cell]:
        """Offer the axes of each label to all dims that have it; the cells that changed."""
        cells, known = self.cells, self.known
        if known is None:
            return [cells[k] for k, _, _, _ in self._offers(sizes)]
        key = tuple([(cell.axes, cell.closed, cell.barred) for cell in cells])
        if key not in known:
            offers = self._offers(sizes)
            # Cells that are there twice are not two cells that are laid out alike.
            if len(set(cells)) == len(cells):
                if len(known) >= MOST_WAYS:
                    known.clear()
                known[key] = offers
            return [cells[k] for k, _, _, _ in offers]
        changed = []
        for k, d, axes, (n, m) in known[key]:
            changed.append(cell := cells[k])
            cell.put(d, axes, cells[n].by[m])
        self.is_behind = False
        return changed

    def _offers(self, sizes: Mapping[Any, int]) -> list[Offer]:
        """Make all offers; those that were taken."""
        cells, taken = self.cells, []
        for group in self.groups:
            for k, d in group:
                if cells[k].axes[d]:
                    break
            else:
                continue
            first = _agreed(cells, group)
            if first is None:
                continue
            axes, by = cells[first[0]].axes[first[1]], cells[first[0]].by[first[1]]
            for k, d in group:
                cell = cells[k]
                shorter = not cell.closed[d] and cell.axes[d] != axes
                if shorter and cell.offer(d, axes, sizes, by):
                    taken.append((k, d, axes, first))
        # There is more to do at once only if a cell has dims of two labels.
        self.is_behind = bool(taken) and len(set(cells)) < len(cells)
        return taken


def _agreed(cells: Sequence[Cell], group: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The first dim with the most axes, if all others' begin these: else a conflict stays open.

    None, too, if no dim has any.
    """
    longest, first = (), None
    for k, d in group:
        axes = cells[k].axes[d]
        if axes is longest or not axes or axes == longest[: len(axes)]:
            continue
        if axes[: len(longest)] != longest:
            return None
        longest, first = axes, (k, d)
    return first


class ReshapeLink(Link):
    """The operand and the result of a reshape, of whose merged or cut dims a second may be split.

    A device has the same elements of both.
    """

    def spread(self, sizes: Mapping[Any, int]) -> list[Cell]:
        changed = []
        for one, other in (self.cells, self.cells[::-1]):
            made = carried(one.shape, other.shape, one.axes, sizes)
            for d, axes in enumerate(made):
                by = next((said for said, own in zip(one.by, one.axes, strict=True) if own), "")
                if axes and other.offer(d, axes, sizes, by):
                    changed.append(other)
        self.is_behind = False
        return changed


class ShardLink(Link):
    """A value outside of a partly manual map, split by a spec, and its shard inside.

    Along the axes that are left to the compiler both are split alike.
    """

    def __init__(self, outer: Cell, inner: Cell, spec: PartitionSpec, manual: frozenset[Any]):
        super().__init__([outer, inner], (), RENAMES)
        self.first = [spec.axes_of(d) for d in range(len(outer.axes))]
        for d, axes in enumerate(self.first):
            if outer.axes[d][: len(axes)] != axes:
                outer.put(d, axes, outer.by[d])
        self.is_behind = True
        for cell in self.cells:
            cell.barred = cell.barred | manual

    def spread(self, sizes: Mapping[Any, int]) -> list[Cell]:
        outer, inner = self.cells
        changed = []
        for d, first in enumerate(self.first):
            if inner.offer(d, outer.axes[d][len(first) :], sizes, outer.by[d]):
                changed.append(inner)
            if outer.offer(d, (*first, *inner.axes[d]), sizes, inner.by[d]):
                changed.append(outer)
        self.is_behind = bool(changed)
        return changed


class CallbackLink(Link):
    """Results whose splits a callback tells, from those of operands."""

    def __init__(
        self,
        operands: Sequence[Cell],
        results: Sequence[Cell],
        tell: Callable[[list[Split]], Sequence[Split]],
    ):
        super().__init__([*operands, *results], (), CONTRACTS)
        self.operands, self.results = operands, results
        self.is_behind = True
        self.tell = tell
        self.seen: list[Split] | None = None

    def spread(self, sizes: Mapping[Any, int]) -> list[Cell]:
        found = [cell.axes for cell in self.operands]
        self.is_behind = False
        if found == self.seen:
            return []
        self.seen = found
        pairs = zip(self.results, self.tell(found), strict=True)
        rows = [(cell, d, axes) for cell, split in pairs for d, axes in enumerate(split)]
        by = "infer_sharding_from_operands"
        return [cell for cell, d, axes in rows if cell.offer(d, axes, sizes, by)]


class Scope:
    """The cells of one jaxpr, and the scopes of the jaxprs inside, by the number of the equation.

    `uses` counts the readers of each variable, `kinds` are those of the equations, by number;
    `sizes` are those of the axes of the mesh that are left to the compiler there, and `grid` stands
    for them and for the setting on which types depend. Of a scan, `sums` are the carries that only
    add up, and `runs` the axes along which each device runs iterations of its own. The `rolls` are
    equations that put the rows of a value elsewhere, and None what is made for these alone.
    `added_up` are the terms of sums, `sections` slices that are all of a value together, by the
    number of the equation.
    """

    __slots__ = (
        "added_up",
        "cells",
        "closed",
        "grid",
        "inner",
        "kinds",
        "mesh",
        "rolls",
        "runs",
        "sections",
        "sizes",
        "sums",
        "uses",
    )

    def __init__(
        self, closed: ClosedJaxpr, cells: dict[Var, Cell], mesh: Mesh, sizes: Mapping[Any, int]
    ):
        self.closed = closed
        self.mesh = mesh
        self.leave(sizes)
        self.cells = cells
        self.uses = _uses(closed.jaxpr)
        self.added_up = added_up(closed.jaxpr, self.uses)
        self.inner: dict[int, list[Scope]] = {}
        self.kinds: dict[int, Kind] = {}
        self.rolls = rolls_of(closed.jaxpr, self.uses, sizes)
        self.sections = sections_of(closed.jaxpr)
        self.runs: dict[int, Axes] = {}
        self.sums: dict[int, frozenset[int]] = {}

    def leave(self, sizes: Mapping[Any, int]) -> None:
        """Leave the axes of these sizes to the compiler."""
        self.sizes = sizes
        self.grid = (config.enable_x64, *sizes.items())

    def of(self, atom: Atom) -> Cell:
        """The cell of an atom; a literal has one of its own each time."""
        return self.cells[atom] if isinstance(atom, Var) else Cell(atom.aval)


def _uses(jaxpr: Jaxpr) -> dict[Any, int]:
    """How often each atom is read."""
    return Counter(chain(*[eqn.invars for eqn in jaxpr.eqns], jaxpr.outvars))


# ---- building ----------------------------------------------------------------------------------


class Plan:
    """The cells and links of a whole program over a mesh."""

    def __init__(self, closed: ClosedJaxpr, mesh: Mesh, uneven: bool = False, sub_axes: Any = None):
        self.mesh = mesh
        # The axes of the user's mesh that this one has in parts; None if the mesh is the user's.
        self.sub_axes = sub_axes
        # Whether parts of the program's results may have different sizes.
        self.uneven = uneven
        self.sizes: Mapping[Any, int] = mesh.shape  # inside of partly manual maps, of fewer axes
        self.grid = tuple(mesh.shape.items())
        self.links: list[Link] = []
        self.scopes: list[Scope] = []  # those around before those inside
        # The constants that are arrays over the mesh, with their cells: operands of the program.
        self.placed: dict[int, tuple[Array, Cell]] = {}
        self.top = self.scope(closed, [Cell(a) for a in closed.in_avals])

    def scope(self, closed: ClosedJaxpr, given: Sequence[Cell]) -> Scope:
        """The scope of a jaxpr whose inputs have the given cells."""
        jaxpr = closed.jaxpr
        cells = dict(zip(jaxpr.invars, given, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            cells[var] = self._constant(var, value)
        scope = Scope(closed, cells, self.mesh, self.sizes)
        self.scopes.append(scope)
        rolls, links, kinds, grid = scope.rolls, self.links, scope.kinds, self.grid
        for k, eqn in enumerate(jaxpr.eqns):
            if k in rolls or eqn.prim in _STRUCTURAL:
                self._equation(scope, k, eqn)
                continue
            kind = kinds[k] = kind_of(eqn)
            for var in eqn.outvars:
                cells[var] = Cell(var.aval)
            if kind.groups:
                atoms = (*eqn.invars, *eqn.outvars)
                given = [cells[a] if type(a) is Var else cell_of_literal(a.aval) for a in atoms]
                if eqn.prim is reshape_p:
                    old, new = given[0].shape, given[1].shape
                    if may_reach_second(old, new, math.prod(self.sizes.values())):
                        links.append(ReshapeLink(given, (), kind.level))
                        continue
                offers = kind.offers
                known = offers[grid] if grid in offers else kind.offers_over(grid)
                links.append(Link(given, kind.groups, kind.level, known))
        return scope

    def _constant(self, var: Var, value: Any) -> Cell:
        sharding = value.sharding if type(value) is Array and value.shards is not None else None
        spec = spec_over(self.mesh, sharding) if isinstance(sharding, NamedSharding) else None
        if spec is None or len(self.sizes) < len(self.mesh.axis_names):
            return Cell(var.aval)
        self.uneven |= isinstance(sharding, NamedSharding) and sharding.uneven
        if id(value) not in self.placed:
            cell = Cell(var.aval)
            cell.close(spec, "its own layout")
            self.placed[id(value)] = value, cell
        return self.placed[id(value)][1]

    def _equation(self, scope: Scope, k: int, eqn: Eqn) -> None:
        """An equation that is no matter of its rule alone: control flow, a map, a roll."""
        cells = scope.cells
        if k in scope.rolls:
            roll, made = scope.rolls[k], self._new(scope, eqn)
            if roll is not None:
                self.same(made[0], cells[roll.operand])
                if isinstance(roll.new, Var):  # the new rows of a shift are whole along its dim
                    along = [d for d in range(len(made[0].axes)) if d != roll.dim]
                    groups = tuple([((0, d), (1, d)) for d in along])
                    self.links.append(Link([made[0], cells[roll.new]], groups, RENAMES))
            return
        given = [cells[a] if type(a) is Var else Cell(a.aval) for a in eqn.invars]
        _STRUCTURAL[eqn.prim](self, scope, k, eqn, given)

    def _new(self, scope: Scope, eqn: Eqn) -> list[Cell]:
        made = [Cell(v.aval) for v in eqn.outvars]
        scope.cells.update(zip(eqn.outvars, made, strict=True))
        return made

    def same(self, one: Cell, other: Cell, skip: int = 0) -> None:
        """Let two cells be split alike, but for the first dims of the other."""
        if one is not other:
            groups = tuple([((0, d), (1, skip + d)) for d in range(len(one.axes))])
            self.links.append(Link([one, other], groups, RENAMES))

    # ---- control flow, maps, constraints ----

    def _scan(self, scope: Scope, k: int, eqn: Eqn, given: Sequence[Cell]) -> None:
        first, count = eqn.params["num_consts"], eqn.params["num_carry"]
        last = first + count
        body, sums = addends(eqn.params["jaxpr"], first, count)
        inside = [*given[:first], *(Cell(a) for a in body.in_avals[first:])]
        if len(sums) == count:
            # Iterations may run on different devices: constants are read before, as inside.
            inside[:first] = [Cell(a) for a in body.in_avals[:first]]
            for n in range(first):
                self.same(inside[n], given[n])
        inner = self.scope(body, inside)
        scope.inner[k] = [inner]
        scope.sums[k] = sums
        outs = [inner.of(atom) for atom in body.jaxpr.outvars]
        for cell in outs:
            cell.edge = True
        made = self._new(scope, eqn)
        for n in range(first, last):
            for other in (given[n], outs[n - first], made[n - first]):
                self.same(inside[n], other)
        for n in range(last, len(given)):
            self.same(inside[n], given[n], skip=1)
        for n in range(last - first, len(outs)):
            self.same(outs[n], made[n], skip=1)
        stacks = [*given[last:], *made[count:]]
        if len(sums) == count and stacks:
            rows = tuple([(n, 0) for n in range(len(stacks))])
            self.links.append(Link(stacks, (rows,), RENAMES))

    def _while(self, scope: Scope, k: int, eqn: Eqn, given: Sequence[Cell]) -> None:
        tested = eqn.params["cond_nconsts"]
        first = tested + eqn.params["body_nconsts"]
        test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        carry = [Cell(a) for a in body.in_avals[first - tested :]]
        inner = self.scope(body, [*given[tested:first], *carry])
        scope.inner[k] = [self.scope(test, [*given[:tested], *carry]), inner]
        made = self._new(scope, eqn)
        returned = [inner.of(atom) for atom in body.jaxpr.outvars]
        for cell in returned:
            cell.edge = True
        for cell, *others in zip(carry, given[first:], returned, made, strict=True):
            for other in others:
                self.same(cell, other)

    def _cond(self, scope: Scope, k: int, eqn: Eqn, given: Sequence[Cell]) -> None:
        branches = eqn.params["branches"]
        # Values that leave a branch leave the program no more than those that enter it.
        inputs = [[Cell(a) for a in branch.in_avals] for branch in branches]
        scope.inner[k] = [self.scope(*pair) for pair in zip(branches, inputs, strict=True)]
        made = self._new(scope, eqn)
        for inner, inside in zip(scope.inner[k], inputs, strict=True):
            for one, other in zip(inside, given[1:], strict=True):
                self.same(one, other)
            for atom, cell in zip(inner.closed.jaxpr.outvars, made, strict=True):
                inner.of(atom).edge = True
                self.same(inner.of(atom), cell)

    def _map(self, scope: Scope, k: int, eqn: Eqn, given: Sequence[Cell]) -> None:
        if eqn.params.get("manual") is not None:
            self._partly_manual_map(scope, k, eqn, given)
            return
        for cell, atom, spec in zip(given, eqn.invars, eqn.params["in_specs"], strict=True):
            wanted = Cell(atom.aval)
            wanted.close(spec, _map_of(eqn))
            self.same(wanted, cell)
        for cell, spec in zip(self._new(scope, eqn), eqn.params["out_specs"], strict=True):
            cell.close(spec, _map_of(eqn))

    def _partly_manual_map(self, scope: Scope, k: int, eqn: Eqn, given: Sequence[Cell]) -> None:
        """Values outside are split by the specs, and then as the values inside are."""
        body, manual = eqn.params["jaxpr"], frozenset(eqn.params["manual"])
        inside = [Cell(a) for a in body.in_avals]
        for cell, part, atom, spec in zip(
            given, inside, eqn.invars, eqn.params["in_specs"], strict=True
        ):
            wanted = Cell(atom.aval)
            self.links.append(ShardLink(wanted, part, spec, manual))
            self.same(wanted, cell)
        around = self.sizes
        self.sizes = {a: n for a, n in around.items() if a not in manual}
        inner = self.scope(body, inside)
        self.sizes = around
        scope.inner[k] = [inner]
        outs = [inner.of(atom) for atom in body.jaxpr.outvars]
        for cell, part, spec in zip(
            self._new(scope, eqn), outs, eqn.params["out_specs"], strict=True
        ):
            self.links.append(ShardLink(cell, part, spec, manual))

    def _constraint(self, scope: Scope, k: int, eqn: Eqn, given: Sequence[Cell]) -> None:
        spec = self._spec_here(eqn)
        (made,) = self._new(scope, eqn)
        if eqn.prim is sharding_constraint_p:
            made.close(spec, f"the constraint at {eqn.source.short}")
            self.uneven |= eqn.params.get("uneven", False)
        self.same(made, given[0])

    def results(self, specs: Sequence[PartitionSpec | None]) -> list[Cell]:
        """The cells of the program's results, with the specs that are given."""
        found = []
        for atom, spec in zip(self.top.closed.jaxpr.outvars, specs, strict=True):
            cell = self.top.of(atom)
            if spec is not None:
                wanted = Cell(atom.aval)
                wanted.close(spec, "out_shardings")
                self.same(wanted, cell)
                cell = wanted
            cell.edge = not self.uneven
            found.append(cell)
        self._look_back()
        return found

    def _look_back(self) -> None:
        """Tell operands what the readers of results want: terms of sums, parts of one size."""
        for scope in self.scopes:
            for k, eqn in reversed(list(enumerate(scope.closed.jaxpr.eqns))):
                made = scope.cells[eqn.outvars[0]] if eqn.outvars else None
                if made is None or not (made.edge or made.terms):
                    continue
                kind = scope.kinds.get(k)
                is_elementwise = kind is not None and kind.is_elementwise
                for cell in map(scope.of, eqn.invars):
                    if made.terms and eqn.prim in KEEPS_TERMS:
                        cell.terms = made.terms
                    cell.edge |= made.edge and is_elementwise and cell.shape == made.shape

    def _to_auto(self, scope: Scope, k: int, eqn: Eqn, given: Sequence[Cell]) -> None:
        (made,) = self._new(scope, eqn)
        self.same(made, given[0])

    def _barrier(self, scope: Scope, k: int, eqn: Eqn, given: Sequence[Cell]) -> None:
        """Each result is laid out as its operand, whatever the others are."""
        for one, other in zip(self._new(scope, eqn), given, strict=True):
            self.same(one, other)

    def _custom_call(self, scope: Scope, k: int, eqn: Eqn, given: Sequence[Cell]) -> None:
        """A function whose user ties dims together by a rule, or tells how results lie."""
        rules, made = eqn.params["_rules"], self._new(scope, eqn)
        operands, results = [x.aval for x in eqn.invars], [v.aval for v in eqn.outvars]
        rule = rules.dims(self.mesh, operands, results)
        axes = tuple(self.sizes)
        if rule is not None:
            kind = scope.kinds[k] = Kind(eqn.prim, rule)
            self.links.append(Link([*given, *made], kind.groups, kind.level))
        elif rules.infer is not None:

            def tell(splits: list[Split]) -> Sequence[Split]:
                return rules.inferred(self.mesh, operands, splits, results, axes)

            self.links.append(CallbackLink(given, made, tell))

    def _spec_here(self, eqn: Eqn) -> PartitionSpec:
        """The spec of a constraint over this mesh."""
        mesh, spec = eqn.params["mesh"], eqn.params["spec"]
        if self.mesh.has_grid_of(mesh):
            return spec
        if self.sub_axes is not None and self.sub_axes.outer.has_grid_of(mesh):
            return self.sub_axes.spec(spec)
        sharding = NamedSharding(mesh, spec)
        if is_reordered(self.mesh, sharding):  # the order of devices counts for results alone
            return similar_spec(self.mesh, sharding)
        found = spec_over(self.mesh, sharding)
        there, here = ([d.id for d in m.flat_devices()] for m in (mesh, self.mesh))
        if found is None or eqn.prim is reshard_p or set(there) != set(here):
            raise ShardingError(
                f"{eqn.source}: a value of {eqn.invars[0].aval.short()} is constrained to {spec} "
                f"over {mesh} on devices {there}, but the program is over {self.mesh} on devices "
                f"{here}, the mesh of its first argument over one; nothing is moved silently. "
                "Place arguments and constraints over one mesh: device_put(x, sharding)"
            )
        return found

    # ---- the fixed point ----

    def spread(self) -> None:
        """Spread all axes that are known until nothing changes, level by level.

        The axes that a product decides spread through renamings of dims before the next product.
        """
        queues: list[deque[Link]] = [deque() for _ in range(LEVELS)]
        waiting: list[list[Link]] = [[] for _ in range(LEVELS)]
        for link in self.links:
            waiting[link.level].append(link)
        renaming, changing_rank, contracting = queues
        for level in range(LEVELS):
            queues[level].extend(waiting[level])
            while queue := renaming or changing_rank or contracting:
                link = queue.popleft()
                link.queued = False
                if not link.is_behind:
                    continue
                for cell in link.spread(self.sizes):
                    for other in cell.links:
                        if other is not link:
                            other.is_behind = True
                        elif not link.is_behind:
                            continue
                        if other.level <= level and not other.queued:
                            other.queued = True
                            queues[other.level].append(other)
        for scope in self.scopes:
            for terms in scope.added_up:
                _tell_of_sum(scope, terms)


def _tell_of_sum(scope: Scope, terms: Sequence[int]) -> None:
    """Tell the terms of a sum which others may be partial as they are."""
    total, count = Sum(), Counter[Any]()
    for k in terms:
        eqn, kind = scope.closed.jaxpr.eqns[k], scope.kinds.get(k)
        if kind is None or kind.rule is None or kind.rule.reduces != "add":
            continue
        kept, rows = kind.rule.results[0], zip(eqn.invars, kind.rule.operands, strict=True)
        summed = [
            a
            for atom, labels in rows
            for label, axes in zip(labels, scope.of(atom).axes, strict=True)
            if label not in kept
            for a in axes
        ]
        if summed:
            count.update(set(summed))
            scope.cells[eqn.outvars[0]].sum = total
    total.share.update((axis, 1 / n) for axis, n in count.items())


_STRUCTURAL = {
    scan_p: Plan._scan,
    while_p: Plan._while,
    cond_p: Plan._cond,
    shard_map_p: Plan._map,
    sharding_constraint_p: Plan._constraint,
    reshard_p: Plan._constraint,
    to_auto_p: Plan._to_auto,
    pcast_p: Plan._to_auto,
    custom_partitioning_p: Plan._custom_call,
    optimization_barrier_p: Plan._barrier,
}


def _map_of(eqn: Eqn) -> str:
    return f"shard_map({eqn.params['name']}) at {eqn.source.short}"
