"""`jax._src.sharding_impls`, `array`, `mesh`, `named_sharding`, `sharding`: names of shardings."""

from __future__ import annotations

from typing import Any

import numpy as np

import spmd.sharding as _ours
from spmd.api.placement import (
    make_array_from_callback,
    make_array_from_process_local_data,
    make_array_from_single_device_arrays,
)
from spmd.base.errors import ArgumentError, DuplicateSpecError, IndivisibleError
from spmd.core.aval import typeof
from spmd.core.call import UNSPECIFIED, UnspecifiedValue
from spmd.sharding.array import Array, Shard
from spmd.sharding.spec import current_mesh
from spmd.sharding.xla.gspmd import GSPMDSharding

__all__ = [
    "UNSPECIFIED",
    "ArrayImpl",
    "DuplicateSpecError",
    "GSPMDSharding",
    "IndivisibleError",
    "Shard",
    "UnspecifiedValue",
    "canonicalize_sharding",
    "empty_concrete_mesh",
    "get_concrete_mesh",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "make_array_from_single_device_arrays",
    "named_sharding_to_xla_hlo_sharding",
    "thread_resources",
]

# Its name in `jax._src.mesh`.
get_concrete_mesh = _ours.get_mesh


class _ArrayType(type):
    """The type of the name `ArrayImpl`, which stands for the class of arrays, and makes some."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Array)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, Array)

    def __getattr__(cls, name: str) -> Any:
        return getattr(Array, name)

    def __call__(
        cls, aval: Any, sharding: Any, arrays: Any, committed: bool, _skip_checks: bool = False
    ) -> Array:
        for x in arrays:
            if typeof(x).dtype != aval.dtype:
                raise ArgumentError(
                    f"ArrayImpl: the array is {aval.dtype}, and a shard is {typeof(x).short()}"
                )
        return make_array_from_single_device_arrays(aval.shape, sharding, list(arrays))


class ArrayImpl(metaclass=_ArrayType):
    """The class of arrays: called with a type, a sharding and its shards, it makes one."""


class _Env:
    """The mesh of `with mesh:` or `set_mesh`, as `thread_resources.env` of JAX has it."""

    @property
    def physical_mesh(self) -> Any:
        mesh = current_mesh()
        return mesh if isinstance(mesh, _ours.Mesh) else _ours.get_mesh()


class _ThreadResources:
    env = _Env()


thread_resources = _ThreadResources()
empty_concrete_mesh = _ours.Mesh(np.empty((), dtype=object), ())


def canonicalize_sharding(sharding: Any, name: str = "", **_: Any) -> Any:
    """The sharding that was given."""
    return sharding


def named_sharding_to_xla_hlo_sharding(sharding: Any, num_dimensions: int) -> Any:
    """A sharding in XLA's words, for arrays of a number of dims."""
    return sharding._to_xla_hlo_sharding(num_dimensions)


def __getattr__(name: str) -> Any:
    return getattr(_ours, name)
