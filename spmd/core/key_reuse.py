"""Record of the random keys that were used, for `debug_key_reuse`.

A key is told by the object that holds it, not by its bits: `random.clone` makes one that may be
used again. Uses are noted for each trace by itself, so that a function may be traced twice, and
the branches of a `cond` may draw with one key. The uses of keys by a jitted function are
noted with its program, for calls that do not trace it again.
"""

from __future__ import annotations

import weakref
from typing import Any

from spmd.base.context import state
from spmd.base.dtypes import is_key
from spmd.base.errors import KeyReuseError
from spmd.base.source import Source, current_source
from spmd.core.aval import typeof
from spmd.core.ir import ClosedJaxpr
from spmd.core.stage import JaxprTracer
from spmd.core.trace import Trace
from spmd.core.vmap import BatchTracer


class _Uses:
    """One object's uses: by which function, on which line, in which trace."""

    def __init__(self, key: Any):
        at = id(key)
        self.alive = weakref.ref(key, lambda _: _uses.pop(at, None))
        self.by_trace: weakref.WeakKeyDictionary[Trace, tuple[str, Source]]
        self.by_trace = weakref.WeakKeyDictionary()


_uses: dict[int, _Uses] = {}
# Variables that were used while their program was traced; kept alive, so that ids stay theirs.
_variables: dict[int, Any] = {}


def use_key(key: Any, what: str) -> None:
    """Note that a typed key was used by `what`; a `KeyReuseError` if it was used before."""
    found = _uses.get(id(key))
    if found is None or found.alive() is not key:
        found = _uses[id(key)] = _Uses(key)
    before = found.by_trace.get(state.trace)
    if before is not None:
        name, source = before
        raise KeyReuseError(
            f"{current_source()}: {what}: this key was used already, by {name} at {source}. Two "
            "draws with one key are not independent: make keys with random.split, and use each "
            "once (random.clone(key) says that the same numbers are wanted)."
        )
    found.by_trace[state.trace] = what, current_source()
    if isinstance(key, JaxprTracer):
        _variables[id(key._var)] = key._var
    elif isinstance(key, BatchTracer):
        _use_under(key, what)


def _use_under(key: BatchTracer, what: str) -> None:
    """The keys of all examples are used too, one level out."""
    inner = state.trace
    state.trace = key._trace.parent
    try:
        use_key(key.val, what)
    finally:
        state.trace = inner


def use_inputs(closed: ClosedJaxpr, operands: Any, what: str) -> None:
    """Note that a call used those of its operands that its program uses as keys."""
    for var, x in zip(closed.jaxpr.invars, operands, strict=True):
        if id(var) in _variables and is_key(typeof(x).dtype):
            use_key(x, what)
