"""Repeated calls of jitted and mapped functions: when closures for them are written, and kept.

The one idea: a call that was evaluated the general way is noted. When calls of its kind come again,
the compiler makes a closure for them, which matches the arguments and runs the program without
looking at names, trees or meshes. A mismatch returns `MISS`.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from spmd.base.background import Worker, is_ending, wait_for_rest
from spmd.base.config import config
from spmd.base.context import busy, state
from spmd.base.record import record
from spmd.base.tree import TreeDef, tree_leaves
from spmd.base.util import MISS, MOST_MATCHERS
from spmd.core.aval import ShapedArray
from spmd.core.trace import EVAL
from spmd.sharding.array import Array, note_made
from spmd.sharding.named import NamedSharding
from spmd.sharding.spec import current_mesh

Match = Callable[[tuple[Any, ...], dict[str, Any]], Any]


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
    """Set by the compiler.

    `specialise` makes the closure of a mapped call, or None if its arguments are not matched.
    `preparation` gives the work that the first closure of the process needs, if it should be done
    beside the program; None once it was given.
    """

    specialise: Callable[[MappedCall], Match | None] = staticmethod(lambda call: None)
    preparation: Callable[[], Callable[[], object] | None] = staticmethod(lambda: None)


hook = _Hook()
_all: weakref.WeakSet[FastCalls] = weakref.WeakSet()
_worker = Worker("spmd-closures")
_is_wanted = threading.Event()  # a call waits for the preparation
# The preparation begins when no program was compiled for so long, or after the longest wait.
REST_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 1.0
POLL_SECONDS = 0.01


def no_match(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure that no call fits."""
    return MISS


class FastCalls:
    """The closures of one function, of which the one that was written last is tried first.

    `match(args, kwargs)` gives the result of the first that fits, or `MISS`. While `set_mesh` has
    set a mesh, results lie elsewhere: closures are those of `over(mesh)`.
    """

    __slots__ = ("__weakref__", "_counts", "_matchers", "_over", "match")

    def __init__(self) -> None:
        self.clear()
        _all.add(self)

    def note(self, kind: Any, make: Callable[[], Match | None]) -> None:
        """Count an evaluated call; `make` its closure when its kind comes for the second time."""
        self._counts[kind] = calls = self._counts.get(kind, 0) + 1
        if calls == 1:
            preparation = hook.preparation()
            if preparation is not None:
                _worker.submit(partial(_prepare_at_rest, preparation, not gc.isenabled()))
        elif calls == 2:
            _is_wanted.set()
            _worker.flush()
            made = make()
            if made is not None:
                self._set([made, *self._matchers[: MOST_MATCHERS - 1]])

    def over(self, mesh: Any) -> FastCalls:
        """The closures of calls while `set_mesh` has set a mesh; None is no mesh."""
        if mesh is None:
            return self
        found = self._over.get(mesh)
        if found is None:
            found = self._over[mesh] = FastCalls()
        return found

    def note_map(self, call: MappedCall) -> None:
        """Count an evaluated call of a mapped function."""
        kinds = [
            (type(x), (x.shards is None, x._sharding is None)) if isinstance(x, Array) else type(x)
            for x in call.leaves
        ]
        self.note((id(call.params["jaxpr"]), *kinds), partial(hook.specialise, call))

    def clear(self) -> None:
        """Forget all closures."""
        self._counts: dict[Any, int] = {}
        self._over: dict[Any, FastCalls] = {}
        self._set([])

    def _set(self, matchers: list[Match]) -> None:
        self._matchers = matchers
        # The only closure is called directly, which is faster.
        self.match: Match = no_match if not matchers else self._match_any
        if len(matchers) == 1:
            self.match = matchers[0]

    def _match_any(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for match in self._matchers:
            out = match(args, kwargs)
            if out is not MISS:
                return out
        return MISS


def _prepare_at_rest(preparation: Callable[[], object], is_paused: bool) -> None:
    """Prepare between compiles: two threads that need Python's lock delay each other.

    The garbage collector is off during a compile, which tells when one runs. If it `is_paused` for
    another reason, the preparation begins at once.
    """
    if not is_paused:
        active = time.monotonic()

        def last_active() -> float:
            nonlocal active
            active = active if gc.isenabled() else time.monotonic()
            return active

        def pause(seconds: float) -> bool:
            return is_ending() or _is_wanted.wait(min(seconds, POLL_SECONDS))

        wait_for_rest(last_active, pause, REST_SECONDS, LONGEST_WAIT_SECONDS)
    preparation()


def is_evaluated() -> bool:
    """Whether a call made here runs now, outside of all transformations and maps."""
    return not busy or (state.trace is EVAL and not state.axes)


def noting_device(make: Callable[[], Match | None]) -> Match | None:
    """The closure of `make`, whose results record that the default device made them."""
    made = make()
    if made is None:
        return None

    def match(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = made(args, kwargs)
        if out is not MISS:
            note_made(tree_leaves(out))
        return out

    return match


def compared(mesh: Any, make: Callable[[], Match | None]) -> Match | None:
    """The closure of `make`, which matches only while `mesh`, or none, is in scope."""
    made = make()
    if made is None:
        return None

    def match(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return made(args, kwargs) if current_mesh() is mesh else MISS

    return match


def _forget(_: Any) -> None:
    for calls in list(_all):
        calls.clear()


# Closures do not look at settings: a change of one that matters forgets them.
config.on_program_update(_forget)
