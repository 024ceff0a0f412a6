"""Reachability between equations while groups form: would one more member close a circle?

The one idea: an equation leads to a set of equations, kept as the bits of one integer, so
the union of hundreds is a few thousand machine instructions. The last equation has the first bit,
so that an equation's integer is no longer than the list after it. Only groups that have several
outputs lead to more than their members do: a walk enters them by one and leaves by another.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

# Sets of bits take the square of this in memory; larger programs are walked.
MOST_BITS = 20_000


class Reach:
    """Answers whether equations lead to a group, through equations and other groups."""

    def __init__(self, users: Sequence[list[int]], group_of: dict[int, Any]):
        self._users = users
        self._group_of = group_of
        self._last = len(users) - 1
        # Groups with an output before their root: their roots, sorted, and for each the first
        # such output of it and all later ones.
        self._exits: dict[int, int] = {}
        self._roots: list[int] = []
        self._first: list[int] = []
        # For each equation, the bits of those that it leads to, its own included.
        self._leads = _descendants(users) if len(users) <= MOST_BITS else None
        # Of groups with several outputs: their former number of members, their bits, their reach.
        self._known: dict[int, tuple[int, int, int]] = {}
        # By group, which is kept: the address of one that is gone may be that of another.
        self._views: dict[Any, tuple[int, set[int], int, int]] = {}

    def note_exit(self, root: int, k: int) -> None:
        """The group of `root` has an output at equation `k` too."""
        before = self._exits.get(root)
        if before is not None and before <= k:
            return
        self._exits[root] = k
        at = bisect.bisect_left(self._roots, root)
        if before is None:
            self._roots.insert(at, root)
            self._first.insert(at, self._first[at] if at < len(self._first) else k + 1)
        while at >= 0 and self._first[at] > k:
            self._first[at] = k
            at -= 1

    def any_reaches(self, starts: Sequence[int], group: Any) -> bool:
        """Whether any of `starts` leads to a member of `group`.

        A group counts as one: a start that reaches a member reaches all that any member leads to.
        """
        outside = [k for k in starts if k not in group.members]
        if not outside:
            return False
        first = min(outside)
        if first > group.root and not self._roots:
            return False
        if self._leads is None:
            return self.any_walks_to(outside, group)
        roots = self._roots_between(first, group.root)
        if first > group.root and not roots:
            return False  # users come after their operands
        goal, reached = self._bits(group.members), 0
        for k in outside:
            reached |= self._leads[k]
        if reached & goal:
            return True
        closed = {id(group)}
        grows = bool(roots)
        while grows:
            grows = False
            for root in roots:
                other = self._group_of[root]
                if id(other) in closed:
                    continue
                bits, after = self._leads_to(root, other)
                if reached & bits:
                    closed.add(id(other))
                    grows = grows or after | reached != reached
                    reached |= after
                    if reached & goal:
                        return True
        return False

    def _bits(self, members: Iterable[int]) -> int:
        bits, last = 0, self._last
        for k in members:
            bits |= 1 << last - k
        return bits

    def is_between(self, start: Any, end: Any) -> bool:
        """Whether an equation outside of two groups leads from one to the other, through equations.

        There may be a path through other groups when there is none; `any_reaches` finds it.
        """
        leads = self._leads
        if leads is None:
            return False
        _, readers, reached, _ = self._view(start)
        _, _, _, goal = self._view(end)
        if not reached & goal:
            return False
        inside = end.members
        return inside.isdisjoint(readers) or any(
            leads[k] & goal for k in readers if k not in inside
        )

    def _view(self, group: Any) -> tuple[int, set[int], int, int]:
        """A group's size, its outside readers, what they lead to, and its members' bits."""
        found = self._views.get(group)
        if found is None or found[0] != len(group.members):
            assert self._leads is not None
            members = group.members
            readers: set[int] = set()
            for k in members:
                if k not in group.copies:
                    readers.update(self._users[k])
            readers -= members
            reached = 0
            for k in readers:
                reached |= self._leads[k]
            found = self._views[group] = len(members), readers, reached, self._bits(members)
        return found

    def _roots_between(self, first: int, last: int) -> list[int]:
        """The groups with several outputs by which a walk from `first` on may come to `last`.

        It enters them behind `first`, or behind where others brought it back to, and those that it
        enters behind `last` must bring it back to there.
        """
        roots, firsts = self._roots, self._first
        low = 0
        while low < len(roots):
            before = bisect.bisect_left(roots, first)
            if before == len(roots) or firsts[before] >= first:
                low = before
                break
            first = firsts[before]
        # `firsts` rises: the last one up to `last` belongs to the group of that very place.
        high = bisect.bisect_right(roots, last)
        while True:
            behind = bisect.bisect_right(firsts, last)
            if behind <= high:
                break
            high, last = behind, roots[behind - 1]
        return roots[low:high]

    def _leads_to(self, root: int, group: Any) -> tuple[int, int]:
        """The bits of a group's own members, and of all that any of them leads to."""
        found = self._known.get(root)
        if found is None or found[0] != len(group.members):
            assert self._leads is not None
            own = group.members - group.copies
            after = 0
            for k in own:
                after |= self._leads[k]
            found = self._known[root] = len(group.members), self._bits(own), after
        return found[1:]

    def any_walks_to(self, starts: Sequence[int], group: Any) -> bool:
        """The answer of `any_reaches`, found step by step."""
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
                for user in self._users[member]:
                    if user in group.members:
                        return True
                    if user not in seen and self._may_lead_back(user, group.root):
                        stack.append(user)
        return False

    def _may_lead_back(self, k: int, root: int) -> bool:
        """Whether a walk from equation `k` can still come to `root` or before.

        Users come after their operands, so a walk only moves on, except through a group that it
        enters behind `k` and leaves by an output in front of it.
        """
        while k > root:
            at = bisect.bisect_left(self._roots, k)
            if at == len(self._roots) or self._first[at] >= k:
                return False
            k = self._first[at]
        return True


def _descendants(users: Sequence[list[int]]) -> list[int]:
    """For each equation, the bits of itself and of those that it leads to."""
    leads, bit = [0] * len(users), 1
    for k in range(len(users) - 1, -1, -1):
        bits = bit
        for user in users[k]:
            bits |= leads[user]
        leads[k] = bits
        bit <<= 1
    return leads
