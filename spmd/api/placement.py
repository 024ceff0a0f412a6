"""Putting arrays on devices: `device_put`, and its replicated and sharded relatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.core.aval import typeof
from spmd.core.device import Device, process_index
from spmd.core.dtypes import canonical
from spmd.core.errors import ArgumentError, ShapeError
from spmd.core.names import check_arrays
from spmd.core.source import current_source
from spmd.core.trace import Tracer, to_numpy
from spmd.core.tree import (
    broadcast_prefix,
    keystr,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)
from spmd.sharding.array import Array, alias, from_numpy, from_shards, shard_value
from spmd.sharding.named import NamedSharding, PmapSharding, Sharding
from spmd.sharding.spec import Mesh, PartitionSpec


def device_put(
    x: Any,
    device: Any = None,
    *,
    src: Any = None,
    donate: Any = False,
    may_alias: Any = None,
) -> Any:
    """Put an array, or a pytree of them, on a device or lay it out by a sharding.

    `device` is a `Device`, a `Sharding`, None (the default device), or a pytree prefix of those.
    `src` is where the arrays are, which they know themselves. `may_alias=False` asks for new
    arrays, which stay when those of `x` are donated. Raises a `ShardingError` that names the leaf
    if its shape cannot be cut evenly.

    >>> device_put(np.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
    """
    pairs, tree = tree_flatten_with_path(x)
    leaves = [leaf for _, leaf in pairs]
    names = [f"x{keystr(path)}" for path, _ in pairs]
    check_arrays("device_put", names, leaves)
    places = broadcast_prefix(device, x, "device_put: device", _is_place)
    placed = [_put(n, v, p) for n, v, p in zip(names, leaves, places, strict=True)]
    if may_alias is False:
        pairs = zip(leaves, placed, strict=True)
        placed = [alias(y) if y is x and isinstance(y, Array) else y for x, y in pairs]
    return tree_unflatten(tree, placed)


def _is_place(x: Any) -> bool:
    return x is None or isinstance(x, (Device, Sharding))


def _put(name: str, x: Any, place: Any) -> Any:
    if isinstance(x, Tracer):
        return x
    if place is None:
        return x if isinstance(x, Array) else from_numpy(x)
    if isinstance(place, Device):
        if isinstance(x, Array) and x.shards is None and x.committed and x.device is place:
            return x
        return from_numpy(to_numpy(x), typeof(x), place)
    if isinstance(place, Sharding):
        if isinstance(x, Array) and x.sharding == place:
            return x
        aval = typeof(x)
        if isinstance(place, NamedSharding):
            place.check(aval.shape, f"{current_source()}: device_put: {name}")
        return shard_value(to_numpy(x), aval, place, process_index())
    raise ArgumentError(
        f"{current_source()}: device_put: device must be a Device, a Sharding or None, "
        f"got {place!r}"
    )


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Device]) -> Any:
    """Stack one pytree for each device along a new leading dim, each row on its device."""
    if len(shards) != len(devices):
        raise ShapeError(
            f"{current_source()}: device_put_sharded: {len(shards)} shards for {len(devices)} "
            "devices; there must be one for each"
        )

    def one(*rows: Any) -> Array:
        pieces = [
            from_numpy(np.asarray(to_numpy(r))[None], device=d)
            for r, d in zip(rows, devices, strict=True)
        ]
        aval = pieces[0].aval.update(shape=(len(rows), *pieces[0].shape[1:]))
        return from_shards(aval, PmapSharding(devices), pieces)

    return tree_map(one, *shards)


def device_put_replicated(x: Any, devices: Sequence[Device]) -> Any:
    """One row of `x` on each device, stacked along a new leading dim."""
    return device_put_sharded([x] * len(devices), devices)


def make_array_from_callback(
    shape: Sequence[int], sharding: Sharding, data_callback: Any, *, dtype: Any = None
) -> Array:
    """A global array whose local pieces are `data_callback(index)` for each device's slices.

    `dtype` is that of the pieces; they are converted if it is another one.
    """
    mine = process_index()
    wanted = None if dtype is None else canonical(dtype)
    pieces = [
        from_numpy(np.asarray(data_callback(index), wanted), device=device)
        for device, index in sharding.devices_indices_map(tuple(shape)).items()
        if device.process_index == mine
    ]
    return from_shards(pieces[0].aval.update(shape=tuple(shape)), sharding, pieces)


def make_array_from_single_device_arrays(
    shape: Sequence[int], sharding: Sharding, arrays: Sequence[Any], *, dtype: Any = None
) -> Array:
    """A global array from the pieces that are on this process's devices already.

    `arrays` holds one array for each local device of `sharding`, in any order, of the shape that
    the device holds. Raises a `ShapeError` that names a piece that does not fit.
    """
    shape, mine = tuple(shape), process_index()
    given = {x.device: x for x in arrays}
    places = sharding.devices_indices_map(shape)
    local = [d for d in places if d.process_index == mine]
    if set(given) != set(local) or len(arrays) != len(local):
        raise ArgumentError(
            f"{current_source()}: make_array_from_single_device_arrays: needs one array on each of "
            f"{[str(d) for d in local]}, got arrays on {[str(x.device) for x in arrays]}"
        )
    for device in local:
        wanted = np.empty(shape, np.void)[places[device]].shape
        if given[device].shape != wanted:
            raise ShapeError(
                f"{current_source()}: make_array_from_single_device_arrays: the array on {device} "
                f"has shape {given[device].shape}; of a {shape} laid out by {sharding} it holds "
                f"{wanted}"
            )
    pieces = [given[d] for d in local]
    aval = pieces[0].aval.update(shape=shape)
    if dtype is not None and aval.dtype != canonical(dtype):
        raise ArgumentError(
            f"{current_source()}: make_array_from_single_device_arrays: dtype={dtype} but the "
            f"arrays are {aval.dtype.name}"
        )
    return from_shards(aval, sharding, pieces)


def copy_to_host_async(x: Any) -> Any:
    """The same pytree: arrays on CPU devices are in the host's memory already."""
    return x


def make_array_from_process_local_data(
    sharding: NamedSharding, local_data: Any, global_shape: Sequence[int] | None = None
) -> Array:
    """A global array of which each process gives its part along the leading split dim.

    `global_shape`, if given, must be what the parts make: it is a check.
    """
    value = np.asarray(local_data)
    mesh = sharding.mesh
    mine = process_index()
    here = [d for d in mesh.flat_devices() if d.process_index == mine]
    local = NamedSharding(Mesh(np.asarray(here, dtype=object), ("_",)), PartitionSpec("_"))
    pieces = shard_value(value, typeof(value), local, mine).shards
    assert pieces is not None
    shape = list(value.shape)
    shape[0] = shape[0] * mesh.size // len(here)
    if global_shape is not None and tuple(global_shape) != tuple(shape):
        raise ShapeError(
            f"{current_source()}: make_array_from_process_local_data: parts of shape {value.shape} "
            f"make {tuple(shape)}, not global_shape={tuple(global_shape)}"
        )
    return from_shards(typeof(value).update(shape=tuple(shape)), sharding, pieces)
