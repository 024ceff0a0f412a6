"""`jax._src.sharding_impls`: the names of `jax.sharding`, and what stands for no sharding."""

from __future__ import annotations

from typing import Any

import spmd.sharding as _ours
from spmd.core.call import UNSPECIFIED, UnspecifiedValue

__all__ = ["UNSPECIFIED", "UnspecifiedValue", "canonicalize_sharding"]


def canonicalize_sharding(sharding: Any, name: str = "", **_: Any) -> Any:
    """The sharding that was given."""
    return sharding


def __getattr__(name: str) -> Any:
    return getattr(_ours, name)
