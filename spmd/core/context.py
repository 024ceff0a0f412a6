"""What surrounds the running code: the current trace and the axis names in scope, per thread.

The only mutable state of the tracer. `state` is thread-local; each thread starts with evaluation
and no axes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _State(threading.local):
    """One thread's current trace and axis environment."""

    def __init__(self) -> None:
        self.trace: Any = evaluation[0]
        self.axes: tuple[Any, ...] = ()


# The trace that every thread starts with; core/trace.py puts its `EvalTrace` here.
evaluation: list[Any] = [None]
state = _State()


@contextmanager
def current_trace(trace: Any) -> Iterator[Any]:
    """Make `trace` the one that processes primitives, for the length of a `with` block."""
    before = state.trace
    state.trace = trace
    try:
        yield trace
    finally:
        state.trace = before
