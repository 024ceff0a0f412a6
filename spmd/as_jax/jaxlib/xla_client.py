"""`jaxlib.xla_client`: the class of devices."""

from spmd.as_jax.refuse import missing
from spmd.base.device import Device

__all__ = ["Device"]
__getattr__ = missing("jaxlib.xla_client")
