"""Arrays laid out anew over the devices that hold them, in whatever order: one exchange.

The two shardings need not be over one mesh: each says which rectangle of the array a device holds,
and the program is over the devices as one axis, on stacked shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base.device import Device, process_index
from spmd.collectives.exchange import exchange
from spmd.collectives.rectangles import Copies, Rectangle, copies_between
from spmd.compile.executable.async_operands import same_memory
from spmd.compile.lazy import cuda_moves
from spmd.core.aval import ShapedArray
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array, alias, filled_up, from_numpy, from_shards
from spmd.sharding.explicit_layouts import reshard_p
from spmd.sharding.future import DeviceMemory
from spmd.sharding.named import NamedSharding, Sharding, SingleDeviceSharding
from spmd.sharding.shard_map import shard_map
from spmd.sharding.spec import Mesh, PartitionSpec

_AXIS = "device"


def redistributed(x: Array, sharding: Sharding) -> Array | None:
    """An array laid out by a sharding of the devices that hold it, or of GPUs if those are.

    Each device receives the elements that it lacks. All processes of the devices must call. None if
    the devices are others, of which one is no GPU of this process.
    """
    now = x.sharding
    if x.shards is None or now.device_set != sharding.device_set:
        return between_gpus(x, sharding)
    if isinstance(now, NamedSharding) and now.spec.unreduced:
        x = reshard_p.bind(x, mesh=now.mesh, spec=now.spec.update(unreduced=frozenset()))
        return redistributed(x, sharding)
    plan = _plan(x.shape, now, sharding)
    local = [d for d in plan.devices if d.process_index == process_index()]
    if plan.stays:
        made = [alias(shard) for shard in x.shards]
    elif plan.is_local:
        found = between_gpus(x, sharding)
        if found is not None:
            return found
        made = [
            from_numpy(filled_up(to_numpy(shard)[plan.window[d]], plan.part), device=d)
            for d, shard in zip(local, x.shards, strict=True)
        ]
    else:
        count, (first, *rest) = len(plan.devices), x.shards[0].shape
        whole = x.shards[0].aval.update(shape=(count * first, *rest))
        stacked = NamedSharding(plan.mesh, PartitionSpec(_AXIS))
        made = plan.run(from_shards(whole, stacked, [alias(s) for s in x.shards])).shards
    by_device = dict(zip(local, made, strict=True))
    shards = [by_device[d] for d in _devices(sharding, x.shape) if d in by_device]
    for device, shard in by_device.items():
        shard._sharding = SingleDeviceSharding(device)
    return from_shards(x.aval.strip_sharding(), sharding, shards)


def between_gpus(x: Array, sharding: Sharding) -> Array | None:
    """An array of GPUs of this process, laid out over such GPUs by copies between their memories.

    None if a device is no such GPU, or the values are on the host still.
    """
    shards = {shard.device: shard for shard in x.shards or (x,)}
    want = rectangles(sharding, x.shape)
    have = {x.device: tuple((0, n) for n in x.shape)}
    if x.shards is not None:
        have = rectangles(x.sharding, x.shape)
    devices = list(dict.fromkeys([*have, *want]))
    mine = process_index()
    if x.is_unreduced or any((d.platform, d.process_index) != ("gpu", mine) for d in devices):
        return None
    if any(not isinstance(shard.owner, DeviceMemory) for shard in shards.values()):
        return None
    copies = copies_between([have.get(d) for d in devices], [want.get(d) for d in devices])
    part = x.aval.strip_sharding().update(shape=sharding.shard_shape(x.shape))
    pieces: dict[Device, list[Any]] = {d: [] for d in want}
    for source, target, *where in copies.items:
        piece = cuda_moves.Piece(shards[devices[source]], *where)
        pieces[devices[target]].append(piece)
    made = [_made_of(own, part, device) for device, own in pieces.items()]
    if isinstance(sharding, SingleDeviceSharding):
        return made[0]
    return from_shards(x.aval.strip_sharding(), sharding, made)


def _made_of(pieces: Sequence[Any], part: ShapedArray, device: Device) -> Array:
    """An array of a device from pieces: over the same memory if that is there already."""
    if len(pieces) == 1:
        (piece,) = pieces
        if piece.source.device is device and piece.sizes == piece.source.shape == part.shape:
            return same_memory(piece.source, part, SingleDeviceSharding(device))
    return cuda_moves.gathered(pieces, part, device)


def _devices(sharding: Sharding, shape: Sequence[int]) -> list[Device]:
    return list(sharding.devices_indices_map(shape))


class _Plan:
    """A change of layout of arrays of one shape: the copies, and a program of them."""

    def __init__(self, shape: tuple[int, ...], now: Sharding, sharding: Sharding):
        have, want = rectangles(now, shape), rectangles(sharding, shape)
        self.devices = list(have)
        wanted = [want[d] for d in self.devices]
        places = [d.process_index for d in self.devices]
        self.copies = copies_between(list(have.values()), wanted, places)
        self.part = tuple(stop - start for start, stop in wanted[0])
        pairs = zip(self.devices, wanted, strict=True)
        self.stays = all(have[d] == rectangle for d, rectangle in pairs)
        self.is_local = not self.copies.received()
        # Where a device's part lies in the shard that it has, if no other device has any of it.
        nothing = (slice(0, 0),) * len(shape)
        self.window = dict.fromkeys(self.devices, nothing) | {
            self.devices[c.target]: tuple(
                slice(a, a + n) for a, n in zip(c.start, c.sizes, strict=True)
            )
            for c in self.copies.items
        }
        self.mesh = Mesh(np.array(self.devices), (_AXIS,))
        self.run = _program(self.mesh, self.copies, self.part)


_plan = functools.lru_cache(maxsize=256)(_Plan)


def rectangles(sharding: Sharding, shape: Sequence[int]) -> dict[Device, Rectangle]:
    """The part of an array that each device holds."""
    found = sharding.devices_indices_map(tuple(shape))
    return {
        device: tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        for device, index in found.items()
    }


@functools.lru_cache(maxsize=256)
def _program(mesh: Mesh, copies: Copies, part: tuple[int, ...]) -> Callable[[Array], Any]:
    def device_put(x: Any) -> Any:
        return exchange(x, _AXIS, copies, part)

    spec = PartitionSpec(_AXIS)
    return shard_map(device_put, mesh=mesh, in_specs=spec, out_specs=spec)
