"""Reachability between equations while groups form: would one more member close a circle?"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from spmd.core.ir import Eqn


class Reach:
    """Answers whether equations lead to a group, through equations and other groups."""

    def __init__(self, eqns: Sequence[Eqn], users: dict[Any, list[int]], group_of: dict[int, Any]):
        self._eqns = eqns
        self._users = users
        self._group_of = group_of
        # Groups with an output before their root: their roots, sorted, and for each the first
        # such output of it and all later ones.
        self._exits: dict[int, int] = {}
        self._roots: list[int] = []
        self._first: list[int] = []

    def note_exit(self, root: int, k: int) -> None:
        """The group of `root` has an output at equation `k` too."""
        self._exits[root] = min(k, self._exits.get(root, k))
        self._roots = sorted(self._exits)
        self._first = [self._exits[r] for r in self._roots]
        for i in range(len(self._first) - 2, -1, -1):
            self._first[i] = min(self._first[i], self._first[i + 1])

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
        """Whether a walk from equation `k` can still come to `root` or before.

        Users come after what they use, so a walk only moves on, except through a group that it
        enters behind `k` and leaves by an output in front of it.
        """
        while k > root:
            at = bisect.bisect_left(self._roots, k)
            if at == len(self._roots) or self._first[at] >= k:
                return False
            k = self._first[at]
        return True
