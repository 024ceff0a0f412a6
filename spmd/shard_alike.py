"""`shard_alike`: two values that the compiler lays out alike, as in `jax.experimental`."""

from spmd.sharding.constraint import shard_alike

__all__ = ["shard_alike"]
