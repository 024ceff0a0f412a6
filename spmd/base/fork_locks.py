"""Locks that a forked child finds free: a process is forked when no other thread holds them.

A child has one thread, the one that forked. What another thread held at that moment would be held
for ever, and what it guards would be half done; so a fork waits for it, as that of `logging` does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

# What is guarded, from the outermost: who holds one may take those that follow.
GUARDED = "imports", "runtime", "loader", "units", "memory"

_entered: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}


def guard(what: str) -> threading.RLock:
    """A new lock for one of `GUARDED`; whoever forks may hold it."""
    lock = threading.RLock()
    enter_before_forks(what, lock.acquire, lock.release)
    return lock


def enter_before_forks(what: str, enter: Callable[[], object], leave: Callable[[], object]) -> None:
    """Call `enter` before each fork, and `leave` behind it, in the parent and in the child."""
    assert what in GUARDED and what not in _entered
    _entered[what] = enter, leave


def _enter() -> None:
    for what in GUARDED:
        if what in _entered:
            _entered[what][0]()


def _leave() -> None:
    for what in reversed(GUARDED):
        if what in _entered:
            _entered[what][1]()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_enter, after_in_parent=_leave, after_in_child=_leave)
