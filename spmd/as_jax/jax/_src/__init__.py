"""`jax._src`: the few of JAX's private names that libraries import."""

from spmd.as_jax.finder import below

__getattr__ = below("jax._src")
