"""`spmd.jet` under JAX's path."""

from spmd.jet import jet

__all__ = ["jet"]
