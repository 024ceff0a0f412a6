"""`set_xla_metadata`, which makes notes for XLA's compiler; spmd's compiler ignores them."""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["set_xla_metadata"]


def set_xla_metadata(x: Any = None, **kwargs: Any) -> Any:
    """Return `x` as it is, or without it a context, or decorator, that changes nothing.

    JAX attaches the keyword arguments to operations, for XLA to read; values are the same.

    >>> set_xla_metadata(3.0, priority=1)
    3.0
    >>> with set_xla_metadata(priority=1):
    ...     print(snp.arange(2))
    [0 1]
    """
    return _Unchanged() if x is None else x


class _Unchanged(contextlib.nullcontext, contextlib.ContextDecorator):
    """A context that functions can be decorated with too."""
