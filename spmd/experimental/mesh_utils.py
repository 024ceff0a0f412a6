"""Grids of devices for meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.device import devices as all_devices
from spmd.base.errors import ShardingError

__all__ = ["create_device_mesh", "create_hybrid_device_mesh"]


def create_device_mesh(
    mesh_shape: Sequence[int],
    devices: Sequence[Any] | None = None,
    *,
    contiguous_submeshes: bool = False,
    allow_split_physical_axes: bool = False,
) -> np.ndarray:
    """The devices (default: all) as an array of `mesh_shape`, the last axis running fastest.

    Neighbours in the array belong to one process as far as possible. The last two
    parameters are for machines with a network of their own, and have no effect here. Raises a
    `ShardingError` if the shape needs more or fewer devices than there are.

    >>> create_device_mesh((2, 2)).shape
    (2, 2)
    """
    found = list(all_devices() if devices is None else devices)
    if math.prod(mesh_shape) != len(found):
        raise ShardingError(
            f"create_device_mesh: mesh_shape={tuple(mesh_shape)} needs {math.prod(mesh_shape)} "
            f"devices, and there are {len(found)}"
        )
    grid = np.empty(len(found), dtype=object)
    grid[:] = found
    return grid.reshape(tuple(mesh_shape))


def create_hybrid_device_mesh(
    mesh_shape: Sequence[int],
    dcn_mesh_shape: Sequence[int],
    devices: Sequence[Any] | None = None,
    *,
    process_is_granule: bool = False,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = False,
) -> np.ndarray:
    """The devices as an array of which each axis goes over `dcn_mesh_shape[k]` groups of processes
    and, in each of these, over `mesh_shape[k]` devices.

    A group is a run of consecutive devices, and so of consecutive processes. Raises a
    `ShardingError` if the shapes need more or fewer devices than there are.

    >>> create_hybrid_device_mesh((2, 1), (1, 2)).shape
    (2, 2)
    """
    sizes = [inner * outer for inner, outer in zip(mesh_shape, dcn_mesh_shape, strict=True)]
    whole = create_device_mesh(sizes, devices).reshape(*dcn_mesh_shape, *mesh_shape)
    rank = len(sizes)
    order = [axis for k in range(rank) for axis in (k, rank + k)]
    return whole.transpose(order).reshape(sizes)
