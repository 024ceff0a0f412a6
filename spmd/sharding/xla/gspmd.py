"""`GSPMDSharding`: a sharding given by XLA's description of it, over devices without a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.device import MEMORY_KINDS, Device, as_device, check_memory_kind
from spmd.base.errors import ArgumentError, ShardingError
from spmd.sharding.named import Index, NamedSharding, Sharding
from spmd.sharding.spec import Mesh, PartitionSpec
from spmd.sharding.xla.hlo_sharding import HloSharding, OpSharding


class GSPMDSharding(Sharding):
    """Lay an array out over devices as an `HloSharding`, or an `OpSharding`, says.

    The numbers of its tiles are places in `devices`. Raises `ArgumentError` if it is for another
    number of them, or neither tiled nor replicated.

    >>> from spmd.sharding.xla.hlo_sharding import HloSharding
    >>> rows = GSPMDSharding(spmd.devices()[:4], HloSharding.iota_tile((4, 1)))
    >>> rows
    GSPMDSharding({devices=[4,1]<=[4]}, memory_kind=device)
    >>> rows.shard_shape((8, 2))
    (2, 2)
    """

    __slots__ = ("_devices", "_hlo_sharding", "_memory_kind", "_named")

    def __init__(
        self,
        devices: Sequence[Device],
        op_sharding: HloSharding | OpSharding,
        *,
        memory_kind: str | None = None,
    ):
        self._devices = tuple(map(as_device, devices))
        if isinstance(op_sharding, OpSharding):
            op_sharding = HloSharding.from_proto(op_sharding)
        if memory_kind is not None:
            check_memory_kind("GSPMDSharding", memory_kind)
        self._hlo_sharding, self._memory_kind = op_sharding, memory_kind or MEMORY_KINDS[0]
        self._named = self._over_a_mesh()

    def _over_a_mesh(self) -> NamedSharding:
        """The same over a mesh that has one axis for each dim of the tiles."""
        hlo, count = self._hlo_sharding, len(self._devices)
        if hlo.is_replicated() or hlo.num_devices() == count == 1:
            mesh = Mesh(np.array(self._devices, dtype=object), ("_axis_0",))
            return NamedSharding(mesh, PartitionSpec(), memory_kind=self._memory_kind)
        if not hlo.is_tiled() or hlo.subgroup_types():
            raise ArgumentError(f"GSPMDSharding: {hlo} does not say which device holds which part")
        if hlo.num_devices() != count:
            raise ArgumentError(
                f"GSPMDSharding: {hlo} is for {hlo.num_devices()} devices, and {count} are given"
            )
        dims = hlo.tile_assignment_dimensions()
        grid = np.array([self._devices[k] for k in hlo.tile_assignment_devices()], dtype=object)
        names = [f"_axis_{k}" for k in range(len(dims))]
        split = len(dims) - hlo.replicate_on_last_tile_dim()
        entries = [name if size > 1 else None for name, size in zip(names, dims, strict=True)]
        mesh = Mesh(grid.reshape(dims), tuple(names))
        return NamedSharding(mesh, PartitionSpec(*entries[:split]), memory_kind=self._memory_kind)

    @classmethod
    def get_replicated(
        cls, device_assignment: Sequence[Device], *, memory_kind: str | None = None
    ) -> GSPMDSharding:
        """Make the sharding that puts a whole array on each device."""
        return cls(device_assignment, HloSharding.replicate(), memory_kind=memory_kind)

    def over_mesh(self) -> NamedSharding:
        """The same as a sharding over a mesh, which programs are compiled for."""
        return self._named

    def devices_indices_map(self, global_shape: Sequence[int]) -> dict[Device, Index]:
        self.check_compatible_aval(global_shape)
        return self._named.devices_indices_map(global_shape)

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        self.check_compatible_aval(global_shape)
        return self._named.shard_shape(global_shape)

    def check_compatible_aval(self, aval_shape: Sequence[int]) -> None:
        if len(aval_shape) < len(self._named.spec):
            raise ShardingError(
                f"{self} splits {len(self._named.spec)} dims, and an array of shape "
                f"{tuple(aval_shape)} has {len(aval_shape)}"
            )

    @property
    def layout(self) -> Any:
        return self._named.layout

    @property
    def device_set(self) -> set[Device]:
        return set(self._devices)

    @property
    def num_devices(self) -> int:
        return len(self._devices)

    @property
    def _device_assignment(self) -> tuple[Device, ...]:
        return self._devices

    @property
    def is_fully_replicated(self) -> bool:
        return self._named.is_fully_replicated

    @property
    def is_fully_addressable(self) -> bool:
        return self._named.is_fully_addressable

    @property
    def memory_kind(self) -> str:
        return self._memory_kind

    def with_memory_kind(self, kind: str) -> GSPMDSharding:
        return GSPMDSharding(self._devices, self._hlo_sharding, memory_kind=kind)

    def _to_xla_hlo_sharding(self, num_dimensions: int) -> HloSharding:
        return self._hlo_sharding

    def _key(self) -> Any:
        whole = self.is_fully_replicated
        return self._devices, None if whole else self._hlo_sharding, self._memory_kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GSPMDSharding) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> Any:
        return _made, (self._devices, repr(self._hlo_sharding), self._memory_kind)

    def __repr__(self) -> str:
        return f"GSPMDSharding({self._hlo_sharding!r}, memory_kind={self._memory_kind})"


def _made(devices: Sequence[Device], text: str, memory_kind: str) -> GSPMDSharding:
    """A sharding from its pickle."""
    return GSPMDSharding(devices, HloSharding.from_string(text), memory_kind=memory_kind)
