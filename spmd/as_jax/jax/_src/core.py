"""`jax._src.core`: the names of `jax.core` and `jax.extend.core`, by their old path."""

from __future__ import annotations

from typing import Any

from spmd.as_jax.jax.core import *  # noqa: F403
from spmd.as_jax.jax.extend.core import *  # noqa: F403
from spmd.as_jax.jax.extend.core import trace_state_clean as trace_state_clean
from spmd.as_jax.refuse import missing

__getattr__ = missing("jax._src.core")


def physical_aval(aval: Any) -> Any:
    """The aval of what is stored of a value."""
    return aval
