"""What is remembered about groups of equations is about these, whatever becomes of them."""

from __future__ import annotations

from typing import Any

from spmd.compile.passes.fusion.reachability import Reach


class Members:
    """A group as `Reach` sees it: some equations, which come after all others."""

    def __init__(self, *members: int):
        self.members = set(members)
        self.copies: set[int] = set()
        self.root = max(members)


def test_a_group_at_the_address_of_a_freed_one_is_told_apart():
    """Python gives the address of an object that is gone to the next one of its kind."""
    users = [[1], [2], [], [4], []]  # 0 -> 1 -> 2, and 3 -> 4
    group_of: dict[int, Any] = {}
    reach = Reach(users, group_of)
    end = Members(2)
    answers = []
    for k in (3, 0, 3, 0):
        start = Members(k)
        answers.append(reach.is_between(start, end))
        del start
    assert answers == [False, True, False, True]
