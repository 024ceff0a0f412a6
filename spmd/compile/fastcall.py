"""The fast path of a jitted call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FastPath:
    """Specialised closures, the most recent first."""

    MISS = object()

    def __init__(self) -> None:
        self.matchers: list[Callable[..., Any]] = []

    def add(self, *_: Any) -> None:
        """Specialise."""

    def clear(self) -> None:
        """Forget all."""
        self.matchers.clear()
