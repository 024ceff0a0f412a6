"""How the operands of a call are laid out over a mesh, and on which devices they meet."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.sharding.array import Array
from spmd.sharding.named import NamedSharding
from spmd.sharding.spec import Mesh, PartitionSpec

Layouts = tuple[NamedSharding | None, ...]


def layouts_of(leaves: Sequence[Any]) -> Layouts | None:
    """The shardings of those arguments that lie over a mesh; None if none does."""
    for x in leaves:
        if type(x) is Array and x.shards is not None:
            break
    else:
        return None
    found = [x.sharding if type(x) is Array and x.shards is not None else None for x in leaves]
    named = tuple([s if isinstance(s, NamedSharding) else None for s in found])
    return named if any(named) else None


def spec_over(mesh: Mesh, sharding: NamedSharding) -> PartitionSpec | None:
    """The spec by which a mesh lays arrays out as a sharding does; None if there is none.

    The sharding may be over another mesh of the same devices, in another order.
    """
    other, spec = sharding.mesh, sharding.spec
    if other == mesh:
        return spec
    if not isinstance(other, Mesh):
        return None
    axes = axes_over(mesh, other)
    if any(a not in axes for a in (*spec.all_axes(), *spec.unreduced)):
        return None
    if spec.unreduced and any(len(real) > 1 for real in axes.values()):
        return None  # terms along one axis are terms along that axis
    entries = [
        entry
        if entry is PartitionSpec.UNCONSTRAINED
        else tuple([b for a in spec.axes_of(d) for b in axes[a]]) or None
        for d, entry in enumerate(spec)
    ]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries, unreduced={b for a in spec.unreduced for b in axes[a]})


@functools.lru_cache(maxsize=256)
def axes_over(mesh: Mesh, other: Mesh) -> dict[Any, tuple[Any, ...]]:
    """Those axes of a mesh of the same devices along which devices lie as along axes of this one.

    Position `k` along an axis of `other` is position `k`, row-major, along the axes given for it.
    """
    place = {
        d.id: at for d, at in zip(other.flat_devices(), np.ndindex(*other.axis_sizes), strict=True)
    }
    if {d.id for d in mesh.flat_devices()} != set(place):
        return {}
    positions = np.array([place[d.id] for d in mesh.flat_devices()], np.int64)
    grid = positions.reshape(*mesh.axis_sizes, len(other.axis_sizes))
    steps = np.indices(mesh.axis_sizes)
    found = {}
    for k, name in enumerate(other.axis_names):
        along, strides = grid[..., k], {}
        for n, (axis, size) in enumerate(mesh.shape.items()):
            stride = int(along.take(1, n).flat[0] - along.flat[0]) if size > 1 else 0
            if stride:
                strides[axis] = stride
        order = sorted(strides, key=lambda axis: -strides[axis])
        sizes = [mesh.shape[a] for a in order]
        if [strides[a] for a in order] != [math.prod(sizes[n + 1 :]) for n in range(len(order))]:
            continue
        names = list(mesh.axis_names)
        expected = sum((steps[names.index(a)] * strides[a] for a in order), np.zeros_like(along))
        if np.array_equal(along, expected):
            found[name] = tuple(order)
    return found
