"""How the operands of a call are laid out over a mesh, and on which devices they meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """The spec by which a mesh lays arrays out as a sharding does; None if there is none."""
    if sharding.mesh == mesh:
        return sharding.spec
    ids, sizes, dims, unreduced = sharding.layout
    real = [axis for axis, size in mesh.shape.items() if size > 1]
    devices = tuple(d.id for d in mesh.flat_devices())
    if (ids, sizes) != (devices, tuple(mesh.shape[a] for a in real)):
        return None
    entries = (tuple(real[k] for k in places) or None for places in dims)
    return PartitionSpec(*entries, unreduced={real[k] for k in unreduced})
