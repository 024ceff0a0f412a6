"""`jax.interpreters.pxla`: nothing that programs need is left in it."""

from spmd.as_jax.refuse import missing

__getattr__ = missing("jax.interpreters.pxla")
