"""`jax.experimental.key_reuse`, and its module `_core`, which programs name."""

from spmd.experimental import key_reuse as _core
from spmd.experimental.key_reuse import KeyReuseError

__all__ = ["KeyReuseError", "_core"]
__path__: list[str] = []
