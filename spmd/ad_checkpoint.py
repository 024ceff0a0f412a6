"""`checkpoint` and what goes with it, under the module name that JAX users import from."""

from spmd.api.residuals import print_saved_residuals
from spmd.core.remat import (
    Offloadable,
    Recompute,
    Saveable,
    checkpoint,
    checkpoint_name,
    checkpoint_policies,
)

__all__ = [
    "Offloadable",
    "Recompute",
    "Saveable",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "print_saved_residuals",
]
