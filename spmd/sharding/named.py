"""Shardings: which slice of a global array each device holds.

`NamedSharding` says it with a mesh and a spec; `SingleDeviceSharding` and `PmapSharding` are the
two special cases that results of `device_put` and `pmap` have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base.device import Device, process_index
from spmd.base.errors import ShardingError
from spmd.sharding.spec import Mesh, PartitionSpec

Index = tuple[slice, ...]


class Sharding:
    """How a global array is cut over devices."""

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, Index]:
        """For each device, the slices of the global array that it holds."""
        raise NotImplementedError

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's shard."""
        first = next(iter(self.devices_indices_map(global_shape).values()))
        pairs = zip(first, global_shape, strict=True)
        return tuple(len(range(*s.indices(size))) for s, size in pairs)

    @property
    def layout(self) -> Any:
        """Equal for shardings that put the same shards in the same order on the same devices.

        Names do not count: rows over axis "i" of one map lie as rows over axis "batch" of another.
        """
        raise NotImplementedError

    @property
    def device_set(self) -> set[Device]:
        raise NotImplementedError

    @property
    def is_fully_replicated(self) -> bool:
        return False

    @property
    def is_fully_addressable(self) -> bool:
        return True

    def addressable_devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, Index]:
        """`devices_indices_map` of this process's devices."""
        mine = process_index()
        every_device = self.devices_indices_map(global_shape)
        return {d: index for d, index in every_device.items() if d.process_index == mine}


class SingleDeviceSharding(Sharding):
    """The whole array on one device."""

    __slots__ = ("device",)

    def __init__(self, device: Device):
        self.device = device

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, Index]:
        return {self.device: tuple(slice(None) for _ in global_shape)}

    @property
    def layout(self) -> Any:
        return (self.device.id,), (), ()

    @property
    def device_set(self) -> set[Device]:
        return {self.device}

    @property
    def is_fully_replicated(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SingleDeviceSharding) and self.device is other.device

    def __hash__(self) -> int:
        return hash(self.device)

    def __repr__(self) -> str:
        return f"SingleDeviceSharding(device={self.device!r})"


class NamedSharding(Sharding):
    """Lay an array out by a mesh, and a spec that splits its dims over the mesh's axes.

    `mesh` is a `Mesh` and `spec` a `PartitionSpec`. Global shape (8, 4) with `P("x")` over an axis
    of size 4 gives shards of shape (2, 4); any dtype can be laid out. Raises `ShardingError` if
    `spec` names an unknown axis or one axis twice.

    >>> mesh = spmd.make_mesh((4,), ("x",))
    >>> spmd.NamedSharding(mesh, spmd.P("x")).shard_shape((8, 4))
    (2, 4)
    """

    __slots__ = ("_layout", "mesh", "spec")

    def __init__(self, mesh: Mesh, spec: PartitionSpec):
        spec = spec if isinstance(spec, PartitionSpec) else PartitionSpec(*spec)
        named = spec.all_axes()
        mesh.axis_size(named)
        if len(set(named)) != len(named):
            raise ShardingError(f"NamedSharding: {spec} uses a mesh axis more than once")
        self.mesh = mesh
        self.spec = spec
        self._layout: Any = None

    @property
    def layout(self) -> Any:
        if self._layout is None:
            self._layout = self._make_layout()
        return self._layout

    def _make_layout(self) -> Any:
        """Devices, sizes of the axes, and for each dim the positions of the axes that split it."""
        real = [a for a, size in self.mesh.shape.items() if size > 1]
        ids = tuple(d.id for d in self.mesh.flat_devices())
        dims = [
            tuple(real.index(a) for a in self.spec.axes_of(d) if a in real)
            for d in range(len(self.spec))
        ]
        while dims and not dims[-1]:
            dims.pop()
        return ids, tuple(self.mesh.shape[a] for a in real), tuple(dims)

    def check(self, shape: Sequence[int], what: str) -> None:
        """Raise a ShardingError if an array of `shape` cannot be cut like this."""
        if len(self.spec) > len(shape):
            raise ShardingError(
                f"{what} has shape {tuple(shape)} ({len(shape)} dims), but {self.spec} has "
                f"{len(self.spec)} entries; it may have at most one for each dim"
            )
        for d, size in enumerate(shape):
            axes = self.spec.axes_of(d)
            parts = self.mesh.axis_size(axes)
            if size % parts:
                up = -(-size // parts) * parts
                raise ShardingError(
                    f"{what} has shape {tuple(shape)}, and {self.spec} splits dim {d} (size "
                    f"{size}) over mesh axis {_axes_text(axes)} (size {parts}); {size} is not a "
                    f"multiple of {parts}.\nPad dim {d} to {up}, or leave it whole with None."
                )

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, Index]:
        self.check(global_shape, "the array")
        out = {}
        sizes = self.mesh.shape
        for device, position in self.mesh.coordinates():
            index = []
            for d, size in enumerate(global_shape):
                place, parts = 0, 1
                for a in self.spec.axes_of(d):
                    place = place * sizes[a] + position[a]
                    parts *= sizes[a]
                step = size // parts
                whole = parts == 1
                index.append(slice(None) if whole else slice(place * step, (place + 1) * step))
            out[device] = tuple(index)
        return out

    @property
    def device_set(self) -> set[Device]:
        return set(self.mesh.flat_devices())

    @property
    def is_fully_replicated(self) -> bool:
        return self.mesh.axis_size(self.spec.all_axes()) == 1

    @property
    def is_fully_addressable(self) -> bool:
        return len({d.process_index for d in self.mesh.flat_devices()}) == 1

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, NamedSharding) and self.mesh == other.mesh and self.spec == other.spec
        )

    def __hash__(self) -> int:
        return hash((self.mesh, self.spec))

    def __repr__(self) -> str:
        return f"NamedSharding(mesh={self.mesh}, spec={self.spec})"


class PmapSharding(Sharding):
    """One leading row a device, as `pmap` takes and returns."""

    __slots__ = ("devices", "sharded_dim")

    def __init__(self, devices: Sequence[Device], sharded_dim: int | None = 0):
        self.devices = tuple(devices)
        self.sharded_dim = sharded_dim

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, Index]:
        out = {}
        for k, device in enumerate(self.devices):
            index = [slice(None) for _ in global_shape]
            if self.sharded_dim is not None:
                index[self.sharded_dim] = slice(k, k + 1)
            out[device] = tuple(index)
        return out

    @property
    def layout(self) -> Any:
        ids = tuple(d.id for d in self.devices)
        if len(ids) == 1 or self.sharded_dim is None:
            return ids, (len(ids),) if len(ids) > 1 else (), ()
        return ids, (len(ids),), (*[()] * self.sharded_dim, (0,))

    @property
    def device_set(self) -> set[Device]:
        return set(self.devices)

    @property
    def is_fully_replicated(self) -> bool:
        return self.sharded_dim is None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PmapSharding)
            and self.devices == other.devices
            and self.sharded_dim == other.sharded_dim
        )

    def __hash__(self) -> int:
        return hash((self.devices, self.sharded_dim))

    def __repr__(self) -> str:
        return f"PmapSharding(devices={list(self.devices)}, sharded_dim={self.sharded_dim})"


def _axes_text(axes: Sequence[Any]) -> str:
    return " and ".join(repr(a) for a in axes)
