"""`jax.experimental`: spmd's names under JAX's paths, and what spmd refuses."""

from typing import Any

from spmd.as_jax.finder import below
from spmd.as_jax.refuse import refusing
from spmd.experimental import io_callback

__all__ = ["MutableArray", "cur_qdd", "io_callback"]
__getattr__ = below("jax.experimental")

# By its oldest name, for libraries that look for it to tell such arrays from others.
MutableArray = refusing("jax.experimental", "spmd has no mutable arrays")("MutableArray")


def cur_qdd(x: Any) -> Any:
    """The state of a value of a library's mutable type: what arrays it holds."""
    return x.cur_qdd()
