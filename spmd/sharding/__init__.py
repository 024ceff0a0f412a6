"""Arrays over devices: meshes, partition specs, shardings, `shard_map` and `pmap`."""

import typing as _typing

from spmd.base.lazy_import import without as _without
from spmd.core.aval import ManualAxisType
from spmd.sharding.abstract_mesh import AbstractDevice, AbstractMesh, AxisType
from spmd.sharding.constraint import shard_alike
from spmd.sharding.explicit_layouts import auto_axes, explicit_axes, reshard
from spmd.sharding.mesh_scope import get_abstract_mesh, get_mesh, set_mesh, use_abstract_mesh
from spmd.sharding.named import (
    NamedSharding,
    PmapSharding,
    Sharding,
    SingleDeviceSharding,
    make_single_device_sharding,
)
from spmd.sharding.shard_map import Infer
from spmd.sharding.spec import Mesh, PartitionSpec, make_mesh

__all__ = [
    "AbstractDevice",
    "AbstractMesh",
    "AxisType",
    "Infer",
    "ManualAxisType",
    "Mesh",
    "NamedSharding",
    "PartitionSpec",
    "PmapSharding",
    "Sharding",
    "SingleDeviceSharding",
    "auto_axes",
    "explicit_axes",
    "get_abstract_mesh",
    "get_mesh",
    "make_mesh",
    "make_single_device_sharding",
    "reshard",
    "set_mesh",
    "shard_alike",
    "use_abstract_mesh",
]

if not _typing.TYPE_CHECKING:  # which knows what is missing by itself
    __getattr__ = _without(__name__)
