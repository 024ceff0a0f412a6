"""Taylor-mode differentiation: `jet.jet(fun, primals, series)`, as in `jax.experimental.jet`."""

from spmd.api.taylor import jet

__all__ = ["jet"]
