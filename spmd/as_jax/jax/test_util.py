"""`jax.test_util`: `check_grads`."""

from spmd.as_jax.refuse import missing
from spmd.testing import check_grads

__all__ = ["check_grads"]
__getattr__ = missing("jax.test_util")
