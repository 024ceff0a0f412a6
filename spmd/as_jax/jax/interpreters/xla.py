"""`jax.interpreters.xla`: one operation compiled by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.as_jax.primitive import apply_primitive
from spmd.as_jax.refuse import missing

__all__ = ["apply_primitive", "canonicalize_dtype_handlers"]
__getattr__ = missing("jax.interpreters.xla")

# Libraries register types of theirs here; spmd reads `__jax_array__`.
canonicalize_dtype_handlers: dict[type, Callable[..., Any]] = {np.ndarray: np.asarray}
