"""The context of the running code: the current trace, axis names and mesh, the source line.

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
        self.scope: str = ""
        # The scopes with the transformations that they were entered under, `vmap(jvp(layer))`, and
        # the trace that the innermost one was entered under.
        self.name_stack: str = ""
        self.scope_trace: Any = None
        self.operand: str = ""
        # The mesh that `set_mesh` has set, over which results lie that no mesh has touched.
        self.mesh: Any = None
        # Whether user code itself must cast values that need one type, such as a loop's carry.
        self.checks_varying = True
        # How often traced code has depended on the mesh in scope, as for a spec without a mesh.
        self.mesh_reads = 0


# The trace that every thread starts with; core/trace.py puts its `EvalTrace` here.
evaluation: list[Any] = [None]
state = _State()

# One entry for each scope, on any thread, that began a transformation, brought axis names or set a
# mesh. While it is empty every thread evaluates, and a call need not ask for its own thread's
# `state`, which would take a tenth of it. `list.append` and `list.pop` are atomic.
busy: list[None] = []


def set_state_mesh(mesh: Any) -> None:
    """Make `mesh`, or none, the one over which this thread's results lie."""
    if (mesh is None) != (state.mesh is None):
        if mesh is None:
            busy.pop()
        else:
            busy.append(None)
    state.mesh = mesh


class current_trace:
    """Make `trace` the one that processes primitives, for the length of a `with` block."""

    __slots__ = ("_before", "_begins", "_trace")

    def __init__(self, trace: Any):
        self._trace = trace

    def __enter__(self) -> Any:
        self._before = before = state.trace
        self._begins = before is evaluation[0] and self._trace is not before
        if self._begins:
            busy.append(None)
        state.trace = self._trace
        return self._trace

    def __exit__(self, *error: object) -> None:
        state.trace = self._before
        if self._begins:
            busy.pop()


@contextmanager
def without_varying_checks() -> Iterator[None]:
    """Let values vary over more axes where they meet, for code that knows nothing of axes."""
    before = state.checks_varying
    state.checks_varying = False
    try:
        yield
    finally:
        state.checks_varying = before


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


@contextmanager
def undisturbed() -> Iterator[None]:
    """Begin as a new thread does, for the length of a `with` block: no trace, no axes, no line."""
    before = vars(state).copy()
    state.axes, state.source, state.scope, state.operand, state.mesh = (), None, "", "", None
    state.name_stack, state.scope_trace = "", None
    try:
        with current_trace(evaluation[0]):
            yield
    finally:
        vars(state).update(before)
