"""Functions that say how they run on a mesh: `custom_partitioning`, as in `jax.experimental`."""

from spmd.sharding.custom_partitioning import custom_partitioning, custom_partitioning_p
from spmd.sharding.sharding_rule import BATCHING, ArrayMapping, CompoundFactor, SdyShardingRule

__all__ = [
    "BATCHING",
    "ArrayMapping",
    "CompoundFactor",
    "SdyShardingRule",
    "custom_partitioning",
    "custom_partitioning_p",
]
