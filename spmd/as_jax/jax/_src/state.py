"""`jax._src.state` and its module `types`: the type of mutable arrays."""

from spmd.ref import AbstractRef

__all__ = ["AbstractRef"]
__path__: list[str] = []
