"""Forks: what a child forgets, what happens before, and that no module goes around the registry."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from spmd.base.fork import after_fork_in_child, before_fork

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]
ROOT = Path(__file__).parents[2]


class Owner:
    """Something with a method that a child calls."""

    def __init__(self, seen: list[object]):
        self.seen = seen

    def forget(self) -> None:
        self.seen.append(self.__class__.__name__)


def seen_by_child(seen: list[object], expected: list[object]) -> bool:
    """Whether a forked child finds what is expected; its parent must not."""
    child = os.fork()
    if child == 0:
        os._exit(0 if seen == expected else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_calls_what_is_registered_in_order_and_its_parent_does_not():
    seen: list[object] = []
    owner = Owner(seen)
    after_fork_in_child(owner.forget)
    after_fork_in_child(lambda: seen.append("function"))
    before_fork(lambda: seen.append(os.getpid()))
    assert seen_by_child(seen, [os.getpid(), "Owner", "function"])
    assert seen == [os.getpid()]


def test_a_method_does_not_keep_its_object():
    seen: list[object] = []
    owner = Owner(seen)
    after_fork_in_child(owner.forget)
    del owner
    gc.collect()
    assert seen_by_child(seen, [])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_keeps_no_other_call_from_being_made():
    seen: list[object] = []
    wrong = Owner(seen)
    wrong.seen = None  # type: ignore[assignment]
    after_fork_in_child(wrong.forget)
    after_fork_in_child(lambda: seen.append("after"))
    assert seen_by_child(seen, ["after"])


def test_no_other_module_registers_hooks():
    """One registry: Python keeps a hook for ever, and not every system has forks."""
    found = [
        str(path.relative_to(ROOT))
        for folder in ("spmd", "launch")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "register_at_fork" in path.read_text(encoding="utf-8")
    ]
    assert found == ["spmd/base/fork.py"]
