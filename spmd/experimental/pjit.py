"""`pjit`, the old name of `jit`."""

from spmd.api.compiled import jit as pjit
from spmd.sharding.constraint import with_sharding_constraint

__all__ = ["pjit", "with_sharding_constraint"]
