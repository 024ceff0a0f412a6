"""`spmd.checkify` under JAX's path."""

# ruff: noqa: F403

from spmd.checkify import *
from spmd.checkify import __all__ as __all__
