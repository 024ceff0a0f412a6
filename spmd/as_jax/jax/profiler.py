"""`jax.profiler`: spmd's, and what would talk to a profiler of XLA's."""

from __future__ import annotations

from spmd.as_jax.refuse import missing, refused
from spmd.profiler import *  # noqa: F403

__getattr__ = missing("jax.profiler")
_WHY = "spmd has no profiler server; profiler.trace(folder) and SPMD_TRACE write a timeline"
start_server = refused("jax.profiler.start_server", _WHY)
stop_server = refused("jax.profiler.stop_server", _WHY)
ProfileData = refused("jax.profiler.ProfileData", _WHY)
ProfileEvent = refused("jax.profiler.ProfileEvent", _WHY)
ProfilePlane = refused("jax.profiler.ProfilePlane", _WHY)
register_subprocess = refused("jax.profiler.register_subprocess", _WHY)
