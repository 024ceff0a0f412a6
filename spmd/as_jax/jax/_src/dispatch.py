"""`jax._src.dispatch`: waiting for effects."""

from spmd.as_jax.primitive import apply_primitive
from spmd.lax.callback import effects_barrier as wait_for_tokens

__all__ = ["apply_primitive", "wait_for_tokens"]
