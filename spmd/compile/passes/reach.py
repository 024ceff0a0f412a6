"""Reachability between equations while groups form: would one more member close a circle?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.core.ir import Eqn


class Reach:
    """Answers whether equations lead to a group, through equations and other groups."""

    def __init__(self, eqns: Sequence[Eqn], users: dict[Any, list[int]], group_of: dict[int, Any]):
        self._eqns = eqns
        self._users = users
        self._group_of = group_of
        self._first_exit = len(eqns)

    def note_exit(self, k: int) -> None:
        """A group has an output besides its root: equation `k`."""
        self._first_exit = min(self._first_exit, k)

    def any_reaches(self, starts: Sequence[int], group: Any) -> bool:
        """Whether any of `starts` leads to a member of `group`.

        A group counts as one: who reaches a member reaches everything that any member leads to.
        """
        seen: set[int] = set()
        stack = [k for k in starts if k not in group.members]
        while stack:
            k = stack.pop()
            if k in seen:
                continue
            seen.add(k)
            if k in group.members:
                return True
            other = self._group_of.get(k)
            together = other.members - other.copies if other is not None else (k,)
            seen.update(together)
            for member in together:
                for var in self._eqns[member].outvars:
                    for user in self._users.get(var, ()):
                        if user in group.members:
                            return True
                        if user not in seen and self._may_lead_back(user, group.root):
                            stack.append(user)
        return False

    def _may_lead_back(self, k: int, root: int) -> bool:
        """Whether a walk from equation `k` can still come before `root`.

        Users come after what they use, so a walk moves on, except through a group that has an
        output in front of its root. There are few; without one before `root`, walks end early.
        """
        return k <= root or self._first_exit < root
