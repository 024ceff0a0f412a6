"""`jax.extend`: what libraries that extend JAX use."""

from spmd.as_jax.finder import below

__getattr__ = below("jax.extend")
