"""`jax._src.op_shardings`: what an `HloSharding` says of the parts of arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd.as_jax.refuse import missing
from spmd.base.errors import ArgumentError
from spmd.sharding.xla.hlo_sharding import HloSharding

__all__ = [
    "are_hlo_shardings_equal",
    "get_num_ways_dim_sharded",
    "is_hlo_sharding_replicated",
    "op_sharding_to_indices",
    "op_sharding_to_numpy_indices",
]

__getattr__ = missing("jax._src.op_shardings")


def is_hlo_sharding_replicated(hc: HloSharding) -> bool:
    """Whether every device holds a whole array."""
    return hc.num_devices() == 1 or hc.is_replicated()


def are_hlo_shardings_equal(hc1: HloSharding, hc2: HloSharding) -> bool:
    """Whether both put the same parts on the same devices."""
    whole = is_hlo_sharding_replicated(hc1) and is_hlo_sharding_replicated(hc2)
    return whole or hc1 == hc2


def get_num_ways_dim_sharded(hlo_sharding: HloSharding) -> tuple[list[int], int]:
    """The number of parts of each dim, and of the devices that hold the same part."""
    if not hlo_sharding.is_tiled():
        return [], 1
    dims = hlo_sharding.tile_assignment_dimensions()
    if hlo_sharding.replicate_on_last_tile_dim():
        return dims[:-1], dims[-1]
    groups = [kind.name for kind in hlo_sharding.subgroup_types()]
    parts = dims[: len(dims) - len(groups)]
    same = dict(zip(groups, dims[len(parts) :], strict=True))
    return parts, same.get("REPLICATED", 1)


def op_sharding_to_numpy_indices(
    hlo_sharding: HloSharding, shape: Sequence[int], num_devices: int
) -> np.ndarray:
    """For each device the slices of an array of a shape that it holds, in an array."""
    found = np.empty(num_devices, dtype=object)
    if is_hlo_sharding_replicated(hlo_sharding):
        for k in range(num_devices):
            found[k] = tuple(slice(None) for _ in shape)
        return found
    parts, same = get_num_ways_dim_sharded(hlo_sharding)
    if len(parts) != len(shape) or hlo_sharding.num_devices() != num_devices:
        raise ArgumentError(
            f"op_sharding_to_indices: {hlo_sharding} cuts {len(parts)} dims over "
            f"{hlo_sharding.num_devices()} devices; the shape is {tuple(shape)}, and num_devices "
            f"{num_devices}"
        )
    for n, size in zip(parts, shape, strict=True):
        if size % n:
            raise ArgumentError(
                f"op_sharding_to_indices: {hlo_sharding} cuts a dim of size {size} of "
                f"{tuple(shape)} into {n} parts; {size} is not a multiple of {n}"
            )
    devices = iter(hlo_sharding.tile_assignment_devices())
    for place in np.ndindex(*parts):
        index = tuple(
            slice(None) if n == 1 else slice(k * size // n, (k + 1) * size // n)
            for k, n, size in zip(place, parts, shape, strict=True)
        )
        for _ in range(same):
            found[next(devices)] = index
    return found


def op_sharding_to_indices(
    op_sharding: HloSharding, shape: Sequence[int], num_devices: int
) -> tuple[tuple[slice, ...], ...]:
    """For each device the slices of an array of a shape that it holds."""
    return tuple(op_sharding_to_numpy_indices(op_sharding, shape, num_devices).flat)
