"""Memoised fusion decisions: an equivalent group reuses the decisions of the first one.

The equations of a group depend on the equations above its root, and on a few answers about its
surroundings: whether an equation is in another group already, whether an equation outside reads its
result, whether those readers lead back into the group, and which reduction is further up. A
`FusionTrace` keeps the equations of a finished group with these answers, in the order of the
queries. `replay` follows it from another root and makes the same queries; at the first difference
it gives up, and the group is formed like any other. So one layer of a deep network is decided, and
the others are compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

from spmd.base.record import record
from spmd.compile.expressions.index_map import Index
from spmd.compile.passes.fusion.graph import NO_EQUATION
from spmd.compile.passes.fusion.group import Frame
from spmd.core.ir import Var

# Of the roots of one kind, so many ways to grow are kept: a layer may have several like sums.
MOST_TRACES = 8


@record(frozen=False)
class Query:
    """An equation that was asked to join a group, and the findings around it."""

    k: int
    taken: bool = False  # another group has it
    shared: bool | None = None  # is read outside of the group; None: not asked
    circle: bool | None = None  # those readers lead back into the group; None: not asked
    behind: Any = None  # an index, and which reduction behind it could open the group's rows there
    joined: bool = False


@record(eq=False)
class FusionTrace:
    """A group that grew, without the names of its equations.

    Equations behind the group are numbered in the order in which its members, in the order in
    which they joined, read them. The root is number 1; number 0 is `NO_EQUATION`, or an equation
    that cannot join any group. The facts about members stand in the order in which they joined.
    """

    kind: int  # of the root
    reads: tuple[int, ...]  # its operands' makers
    steps: tuple[Step, ...]
    count: int  # how many numbers there are
    members: tuple[int, ...]
    indices: tuple[Index, ...]
    again: tuple[tuple[int, list[Index]], ...]
    extra: tuple[int, ...]
    frame: Frame
    # The values that members read from outside, by the member's number and the operand's position;
    # each where it is first read, from the first equation on.
    outside: tuple[tuple[int, int], ...]
    # The arrays of the space's size among them and among the group's results, for `merge`; a
    # member's result has position -1.
    touched: tuple[tuple[int, int], ...]


# An equation that was asked to join: its number and kind, whether another group has it, whether
# others read its result (None: not asked), the query if its rare questions were asked, and, if it
# joined, its reads and whether it is a copy.
Step: TypeAlias = tuple[int, int, bool, bool | None, Query | None, tuple[int, ...] | None, bool]


class FusionTraces:
    """How the groups of a jaxpr grew."""

    def __init__(self) -> None:
        self._of: dict[int, list[FusionTrace]] = {}  # by the kind of the root, the latest first
        # The growth that came after each the last time: a deep network repeats it.
        self._next: dict[FusionTrace | None, FusionTrace] = {}
        self._last: FusionTrace | None = None

    def add(self, growth: FusionTrace) -> None:
        """Keep how a group grew."""
        known = self._of.setdefault(growth.kind, [])
        known.insert(0, growth)
        del known[MOST_TRACES:]
        self.follow(growth)

    def follow(self, growth: FusionTrace) -> None:
        """Note that a group grew like this now."""
        self._next[self._last] = growth
        self._last = growth

    def of(self, kind: int) -> Iterator[FusionTrace]:
        """The ways to grow from a root of a kind, the likeliest first."""
        known = self._of.get(kind, ())
        guess = self._next.get(self._last)
        if guess is not None and guess in known:
            yield guess
        yield from [growth for growth in known if growth is not guess]


class _Walk:
    """Numbers the equations behind a group in the order in which its members read them."""

    def __init__(self, fuser: Any, root: int):
        self.fuser = fuser
        self.numbers = {NO_EQUATION: 0, root: 1}
        self.places = [NO_EQUATION, root]

    def reads(self, k: int) -> tuple[int, ...]:
        """The numbers of member `k`'s operands."""
        fusible, numbers = self.fuser.fusible, self.numbers
        found = []
        for maker in self.fuser.sources[k]:
            if not fusible[maker]:
                found.append(0)
                continue
            number = numbers.get(maker)
            if number is None:
                number = numbers[maker] = len(self.places)
                self.places.append(maker)
            found.append(number)
        return tuple(found)


def remember(fuser: Any, group: Any, asked: list[Query]) -> None:
    """Keep how a group grew, for `replay`."""
    walk = _Walk(fuser, group.root)
    order = [group.root, *[question.k for question in asked if question.joined]]
    reads = {k: walk.reads(k) for k in order}
    numbers = walk.numbers
    steps: list[Step] = []
    for question in asked:
        k = question.k
        rare = None if question.behind is None and question.circle is None else question
        read = reads[k] if question.joined else None
        is_copy = k in group.copies
        found = numbers[k], fuser.kinds[k], question.taken, question.shared, rare, read, is_copy
        steps.append(found)
    growth = FusionTrace(
        fuser.kinds[group.root],
        reads[group.root],
        tuple(steps),
        len(walk.places),
        tuple([numbers[k] for k in order]),
        tuple([group.index[k] for k in order]),
        tuple([(numbers[k], group.again[k]) for k in order if k in group.again]),
        tuple([numbers[k] for k in group.extra]),
        group.frame(),
        *_surroundings(fuser, group, numbers),
    )
    group.growth, group.places = growth, walk.places
    fuser.growths.add(growth)


def _surroundings(fuser: Any, group: Any, numbers: dict[int, int]) -> tuple[Any, Any]:
    """A growth's `outside` and `touched`."""
    size, members = math.prod(group.sizes), group.members
    made = {group.root, *group.extra} | group.copies
    outside, touched = [], []
    for k in sorted(members):
        eqn, number = fuser.eqns[k], numbers[k]
        for position, (atom, source) in enumerate(zip(eqn.invars, fuser.sources[k], strict=True)):
            if source not in members:
                outside.append((number, position))
                if atom.aval.size == size and type(atom) is Var:
                    touched.append((number, position))
        if k in made and eqn.outvars[0].aval.size == size:
            touched.append((number, -1))
    return tuple(outside), tuple(touched)


def replay(fuser: Any, root: int, group: Any) -> Any:
    """Let the new `group` of a root grow as one before; None if there is none that it is like."""
    for growth in fuser.growths.of(fuser.kinds[root]):
        places = _follow(fuser, root, group, growth)
        if places is not None:
            fuser.growths.follow(growth)
            _settle(fuser, group, growth, places)
            return group
        group.members = {root}
        group.copies = set()
    return None


def _follow(fuser: Any, root: int, group: Any, growth: FusionTrace) -> list[int] | None:
    """The equations that stand at the numbers of a growth; None if something is different.

    The group's members and copies are filled in on the way, as they are asked for.
    """
    places = [NO_EQUATION, root]
    if not _reads_as(fuser, root, growth.reads, places):
        return None
    kinds, users, group_of, needed = fuser.kinds, fuser.users, fuser.group_of, fuser.needed
    members, copies = group.members, group.copies
    before = root
    for number, kind, taken, was_shared, rare, reads, is_copy in growth.steps:
        k = places[number]
        if k >= before or kinds[k] != kind or (k in group_of) is not taken:
            return None
        before = k
        if was_shared is None:
            continue
        if copies:
            shared = fuser.outside_users(group, k) or fuser.is_needed_outside(group, k)
        else:
            shared = k in needed or not members.issuperset(users[k])
        if bool(shared) is not was_shared:
            return None
        if rare is not None and not _is_around(fuser, group, k, rare):
            return None
        if reads is not None:
            members.add(k)
            if is_copy:
                copies.add(k)
            if not _reads_as(fuser, k, reads, places):
                return None
    # Equations of different numbers are different ones.
    return places if len(set(places)) == growth.count == len(places) else None


def _reads_as(fuser: Any, k: int, expected: tuple[int, ...], places: list[int]) -> bool:
    """Whether equation `k` reads from the expected places; fills in those it reads first."""
    fusible = fuser.fusible
    for maker, number in zip(fuser.sources[k], expected, strict=True):
        if number == len(places):
            places.append(maker)
            if not fusible[maker]:
                return False
        elif places[number] != (maker if fusible[maker] else NO_EQUATION):
            return False
    return True


def _is_around(fuser: Any, group: Any, k: int, asked: Query) -> bool:
    """Whether the answers to rarer questions are still true around an equation."""
    if asked.behind is not None:
        index, found = asked.behind
        if fuser.kind_of_opening(fuser.reduction_behind(group, k, index)) != found:
            return False
    if asked.circle is None:
        return True
    return asked.circle is fuser.reach.any_reaches(fuser.outside_users(group, k), group)


def _settle(fuser: Any, group: Any, growth: FusionTrace, places: list[int]) -> None:
    """Note the members of a group that grew as one before, and the facts about them."""
    group.growth, group.places = growth, places
    group.enter(growth.frame)
    joined = [places[number] for number in growth.members]
    group.index = dict(zip(joined, growth.indices, strict=True))
    group.again = {places[number]: indices for number, indices in growth.again}
    fuser.group_of.update(dict.fromkeys(joined, group))
    for k in group.copies:
        del fuser.group_of[k]
    for number in growth.extra:
        group.extra.append(places[number])
        fuser.reach.note_exit(group.root, places[number])
