"""`spmd.checkify` under JAX's path."""

# ruff: noqa: F403

from spmd.checkify import *
