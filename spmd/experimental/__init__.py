"""JAX's experimental paths: `spmd.experimental.shard_map`, ...; each is a name of spmd's elsewhere.

For programs that come from JAX; new programs write `spmd.shard_map`, `spmd.checkify`, and so on.
"""

from spmd.base.lazy_import import attach as _attach
from spmd.lax.callback import io_callback

__all__ = ["io_callback"]

_MODULES = (
    "checkify", "compilation_cache", "compute_on", "custom_partitioning", "jet", "layout",
    "mesh_utils", "multihost_utils", "ode", "pjit", "random", "scheduling_groups", "shard_alike",
    "shard_map", "sparse", "xla_metadata",
)  # fmt: skip
__getattr__, __dir__ = _attach(__name__, _MODULES)
