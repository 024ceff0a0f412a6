"""What surrounds the running code: the current trace, the axis names in scope, the line it is for.

The only mutable state of the tracer. `state` is thread-local; each thread starts with evaluation,
no axes, and source lines that are read off the stack.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _State(threading.local):
    """One thread's current trace, axis environment and attributed source line."""

    def __init__(self) -> None:
        self.trace: Any = evaluation[0]
        self.axes: tuple[Any, ...] = ()
        self.source: Any = None


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


@contextmanager
def attributed_to(source: Any) -> Iterator[None]:
    """Name `source` as the user's line for the length of a `with` block; None reads the stack.

    Transformations that walk a jaxpr work on behalf of its equations' lines; the user's own rules,
    called from such a walk, have lines of their own.
    """
    before = state.source
    state.source = source
    try:
        yield
    finally:
        state.source = before
