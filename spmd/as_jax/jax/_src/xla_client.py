"""`jax._src.lib.xla_client`: the description of shardings in XLA's words."""

from spmd.as_jax.refuse import missing
from spmd.sharding.xla.hlo_sharding import HloSharding, OpSharding

__all__ = ["HloSharding", "OpSharding"]

__getattr__ = missing("jax._src.lib.xla_client")
