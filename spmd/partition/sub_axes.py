"""Sub-axes: mesh axes that are cut in two, so that a reshape keeps both dims that it makes split.

Where 8 heads of queries, split over 4 devices, become 2 groups of 4, an axis of 4 devices is one of
2 for the groups and one of 2 for the heads of each. The program is written over the finer mesh, and
over the user's, and the one that moves less is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

from spmd.base.record import record
from spmd.collectives.volume import KINDS, received
from spmd.core.ir import ClosedJaxpr, subjaxprs
from spmd.core.structural import reshape_p
from spmd.partition.propagate import Cell, Plan, Split
from spmd.partition.seconds import BYTE, EXCHANGE
from spmd.partition.strategies.reshaping import cut_points
from spmd.sharding.abstract_mesh import AxisType
from spmd.sharding.custom_partitioning import custom_partitioning_p
from spmd.sharding.shard_map_rules import shard_map_p
from spmd.sharding.spec import Mesh, PartitionSpec

# Programs with these name axes of the user's mesh inside.
_NAME_AXES = frozenset((shard_map_p, custom_partitioning_p))


@record
class SubAxes:
    """A mesh, the finer one of the same devices, and the axes of that which make up one of this."""

    outer: Mesh
    mesh: Mesh
    parts: Mapping[Any, tuple[Any, ...]]

    @property
    def cut(self) -> frozenset[Any]:
        """The axes of the finer mesh that are no axes of the mesh."""
        return frozenset(part for own in self.parts.values() for part in own)

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """A spec over the mesh as one over the finer mesh."""
        entries: list[Any] = []
        for d, entry in enumerate(spec):
            if entry is not PartitionSpec.UNCONSTRAINED:
                entry = tuple([part for a in spec.axes_of(d) for part in self._parts(a)]) or None
            entries.append(entry)
        unreduced = {part for a in spec.unreduced for part in self._parts(a)}
        return PartitionSpec(*entries, unreduced=unreduced)

    def split(self, split: Split) -> Split:
        """A split over the finer mesh in axes of the mesh; those that are there in part are not."""
        made = []
        for axes in split:
            found: tuple[Any, ...] = ()
            while axes:
                axis = next(a for a in self.outer.axis_names if axes[0] in self._parts(a))
                parts = self._parts(axis)
                if axes[: len(parts)] != parts:
                    break
                found, axes = (*found, axis), axes[len(parts) :]
            made.append(found)
        return tuple(made)

    def whole(self, cell: Cell) -> Cell:
        """The cell, or one whose dims are split by axes of the mesh, as at programs' edges."""
        split = tuple(
            [tuple([p for a in own for p in self._parts(a)]) for own in self.split(cell.axes)]
        )
        if split == cell.axes:
            return cell
        made = copy(cell)
        made.axes = split
        return made

    def _parts(self, axis: Any) -> tuple[Any, ...]:
        return self.parts[axis] if axis in self.parts else (axis,)


def sub_axes_of(plan: Plan) -> SubAxes | None:
    """The sub-axes that would let reshapes of a program carry on more of its splits; None if none.

    `plan` has spread over the user's mesh, of which each axis is left to the compiler.
    """
    mesh = plan.mesh
    if plan.sub_axes is not None or plan.uneven or not mesh.has_only(AxisType.Auto):
        return None
    for scope in plan.scopes:
        if not _NAME_AXES.isdisjoint(scope.closed.jaxpr.by_primitive):
            return None
    cuts = _cuts_of(plan)
    parts: dict[Any, tuple[Any, ...]] = {}
    sizes: dict[Any, int] = {}
    for axis, size in mesh.shape.items():
        points = _chain(cuts.get(axis, ()), size)
        names = (axis,)
        if len(points) > 2:
            steps = [(n, m // n) for n, m in itertools.pairwise(points)]
            # The names that Shardy gives them: the product of the sizes before, and the size.
            names = tuple([f"{axis}:({n}){k}" for n, k in steps])
            parts[axis] = names
            sizes.update(zip(names, [k for _, k in steps], strict=True))
        else:
            sizes[axis] = size
    if not parts or len(sizes) != sum(map(len, parts.values())) + len(mesh.shape) - len(parts):
        return None
    devices = mesh.devices.reshape(tuple(sizes.values()))
    return SubAxes(mesh, Mesh(devices, tuple(sizes), (AxisType.Auto,) * len(sizes)), parts)


def _cuts_of(plan: Plan) -> dict[Any, set[int]]:
    """For each axis, into how many parts reshapes of the program would cut it."""
    cuts: dict[Any, set[int]] = {}
    seen: set[Any] = set()
    reshapes = [(s, e) for s in plan.scopes for _, e in s.closed.jaxpr.eqns_of(reshape_p)]
    for scope, eqn in reshapes:
        one, other = scope.of(eqn.invars[0]), scope.of(eqn.outvars[0])
        for a, b in ((one, other), (other, one)):
            case = a.shape, b.shape, a.axes
            if a.is_split and 0 not in a.shape and case not in seen:
                seen.add(case)
                for axis, count in cut_points(a.shape, b.shape, a.axes, plan.mesh.shape):
                    cuts.setdefault(axis, set()).add(count)
    return cuts


def _chain(cuts: Any, size: int) -> list[int]:
    """1, those of some numbers of which each divides the next, and the size."""
    found = [1]
    for n in sorted(cuts):
        if n % found[-1] == 0 and size % n == 0 and n not in (1, size):
            found.append(n)
    return [*found, size]


def seconds_of(closed: ClosedJaxpr, sizes: Mapping[Any, int]) -> float:
    """The seconds that the collectives of a per-device program take."""
    return sum(_seconds(closed, sizes))


def _seconds(closed: ClosedJaxpr, sizes: Mapping[Any, int]) -> Iterator[float]:
    for eqn in closed.eqns:
        if eqn.prim.name in KINDS:
            yield EXCHANGE + BYTE * received(eqn, sizes)
        times = int(eqn.params.get("length", 1)) if eqn.prim.name == "scan" else 1
        for _, inner in subjaxprs(eqn.params):
            yield times * math.fsum(_seconds(inner, sizes))
