"""`jax.memory`: memory by what is meant, the device's own or the host's."""

from spmd.as_jax.refuse import missing
from spmd.base.device import MemorySpace as Space

__all__ = ["Space"]

__getattr__ = missing("jax.memory")
