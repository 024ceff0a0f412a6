"""`jaxlib._jax`: the class of jitted functions."""

from spmd.as_jax.refuse import missing
from spmd.compile.dispatch.jit import JitFunction as PjitFunction

__all__ = ["PjitFunction"]
__getattr__ = missing("jaxlib._jax")
