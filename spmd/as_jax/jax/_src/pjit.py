"""`jax._src.pjit`: the primitive of jitted calls."""

from spmd.as_jax.refuse import missing
from spmd.core.call import jit_p
from spmd.sharding import auto_axes, explicit_axes

__all__ = ["auto_axes", "explicit_axes", "jit_p"]
__getattr__ = missing("jax._src.pjit")
