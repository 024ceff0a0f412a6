"""`spmd.shard_alike` under JAX's path."""

from spmd.sharding.constraint import shard_alike

__all__ = ["shard_alike"]
