"""Arrays over devices: meshes, partition specs, shardings, `shard_map` and `pmap`."""

from spmd.sharding.named import NamedSharding, PmapSharding, Sharding, SingleDeviceSharding
from spmd.sharding.spec import Mesh, PartitionSpec, make_mesh

__all__ = [
    "Mesh",
    "NamedSharding",
    "PartitionSpec",
    "PmapSharding",
    "Sharding",
    "SingleDeviceSharding",
    "make_mesh",
]
