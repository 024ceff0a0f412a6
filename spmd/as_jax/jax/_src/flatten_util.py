"""`jax._src.flatten_util`: `jax.flatten_util` by its old path."""

from spmd.flatten_util import ravel_pytree

__all__ = ["ravel_pytree"]
