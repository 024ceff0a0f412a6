"""`jax._src.xla_bridge`: the platforms of this process."""

from __future__ import annotations

from typing import Any

from spmd.as_jax.jax.extend.backend import backends, get_backend

__all__ = ["backends", "get_backend"]

_backends: dict[str, Any] = {}
