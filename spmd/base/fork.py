"""Fork hooks: the only module that registers any.

A child has a copy of its parent's memory and one thread, the one that forked. So

* a fork waits for `guard`ed locks, as that of `logging` does. A lock that another thread held at
  that moment would be held for ever in the child, and the data behind it would be half changed;
* a child forgets the state of other threads of its parent (`after_fork_in_child`), and makes
  anew the locks that no fork waits for.

Python calls the hooks before a fork in reverse order of their registration and those after it in
that order. A hook that raises is reported, and the others are still called.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import MethodType

# Guarded locks, the outermost first: a thread that holds one may take those that follow.
GUARDED = "imports", "runtime", "loader", "units", "memory"

_entered: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}


def guard(what: str) -> threading.RLock:
    """A new lock for one of `GUARDED`; the forking thread may hold it."""
    lock = threading.RLock()
    enter_before_forks(what, lock.acquire, lock.release)
    return lock


def enter_before_forks(what: str, enter: Callable[[], object], leave: Callable[[], object]) -> None:
    """Call `enter` before each fork, and `leave` behind it, in the parent and in the child."""
    assert what in GUARDED and what not in _entered
    _entered[what] = enter, leave


def before_fork(call: Callable[[], object]) -> None:
    """Call something before each fork, while no guarded lock is held for it."""
    _register(before=call)


def after_fork_in_child(forget: Callable[[], object]) -> None:
    """Call something in each forked child; a method as long as its object exists."""
    find = weakref.WeakMethod(forget) if isinstance(forget, MethodType) else lambda: forget

    def call() -> None:
        found = find()
        if found is not None:
            found()

    _register(after_in_child=call)


def _enter() -> None:
    for what in GUARDED:
        if what in _entered:
            _entered[what][0]()


def _leave() -> None:
    for what in reversed(GUARDED):
        if what in _entered:
            _entered[what][1]()


def _register(**hooks: Callable[[], object]) -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**hooks)


_register(before=_enter, after_in_parent=_leave, after_in_child=_leave)
