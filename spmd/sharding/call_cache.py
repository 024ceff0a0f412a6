"""Repeated calls of mapped functions: the facts for `compile/` to write a closure for them.

The one idea: a call that was evaluated once the general way is described by a `MappedCall`; when
calls of its kind come again, the hook makes a closure for them, which matches the arguments and
runs the program without looking at names, trees or meshes. A mismatch returns `MISS`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.config import config
from spmd.base.context import busy, state
from spmd.base.record import record
from spmd.base.tree import TreeDef
from spmd.base.util import MISS, MOST_MATCHERS
from spmd.core.aval import ShapedArray
from spmd.core.trace import EVAL
from spmd.sharding.array import Array
from spmd.sharding.named import NamedSharding


@record
class MappedCall:
    """A call that was evaluated: its arguments as this process sees them, and its results."""

    leaves: Sequence[Any]
    tree: TreeDef  # of (args, kwargs) without the static ones
    static: tuple[tuple[int, Any], ...]
    in_shardings: Sequence[NamedSharding]
    donated: Sequence[bool]
    outs: Sequence[tuple[ShapedArray, NamedSharding]]  # of each result
    out_tree: TreeDef
    params: dict[str, Any]  # of the primitive


class _Hook:
    """Set by compile: makes the closure of a call, or None if its arguments are not matched."""

    specialise: Callable[[MappedCall], Callable[..., Any] | None] = staticmethod(lambda call: None)


hook = _Hook()
_all: weakref.WeakSet[FastCalls] = weakref.WeakSet()


class FastCalls:
    """The closures of one mapped function, the most recent first."""

    def __init__(self) -> None:
        self.matchers: list[Callable[..., Any]] = []
        self._seen: dict[Any, int] = {}
        _all.add(self)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call that a closure matches, else `MISS`."""
        if is_evaluated():
            for match in self.matchers:
                out = match(args, kwargs)
                if out is not MISS:
                    return out
        return MISS

    def note(self, call: MappedCall) -> None:
        """Remember an evaluated call; write a closure when its kind comes for the second time."""
        kinds = tuple((type(x), isinstance(x, Array) and x.shards is None) for x in call.leaves)
        key = (id(call.params["jaxpr"]), kinds)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] == 2:
            made = hook.specialise(call)
            if made is not None:
                self.matchers = [made, *self.matchers[: MOST_MATCHERS - 1]]

    def clear(self) -> None:
        """Forget all closures."""
        self.matchers = []
        self._seen = {}


def is_evaluated() -> bool:
    """Whether a call made here runs now, outside of all transformations and maps."""
    return not busy or (state.trace is EVAL and not state.axes)


def _forget(_: Any) -> None:
    for calls in list(_all):
        calls.clear()


# Closures do not look at settings: a change of one that matters forgets them.
config.on_program_update(_forget)
