"""Repeat: a group like one that has grown before grows the same way, without deciding it again.

What a group takes in depends on the equations behind its root, and of what is around it on a few
answers only: whether an equation is in another group already, whether anything outside reads its
result, whether those readers lead back into the group, and what reduction is further behind. A
`Growth` keeps a finished group's equations with these answers, in the order in which they were
asked for. `repeat` walks along with another root and asks for nothing but them; at the first
difference it gives up, and the group grows as any other. So in a deep network one layer is decided,
and the others are compared with it.
"""

from __future__ import annotations

from typing import Any

from spmd.compile.lower.index import Index
from spmd.core.ir import Literal
from spmd.core.record import record

# Of the roots of one kind, so many ways to grow are kept: a layer may have several like sums.
MOST_GROWTHS = 8


@record(frozen=False)
class Asked:
    """An equation that was asked to join a group, and what was found around it."""

    k: int
    taken: bool = False  # another group has it
    shared: bool = False  # something outside of the group reads it
    circle: bool | None = None  # those readers lead back into the group; None: nobody asked
    behind: Any = None  # an index, and which reduction behind it could open the group's rows there
    joined: bool = False


@record
class Growth:
    """A group that grew, told without the names of its equations.

    Equations behind the group are numbered as its members, in the order in which they joined, read
    them; the root is number 0. `reads` has these numbers for each member, -1 for what comes from
    memory anyway.
    """

    kinds: tuple[int, ...]
    asked: tuple[tuple[int, Asked], ...]
    members: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    indices: tuple[Index, ...]
    again: tuple[list[Index] | None, ...]
    copies: frozenset[int]
    extra: tuple[int, ...]
    group: Any


class _Walk:
    """Numbers the equations behind a group in the order in which its members read them."""

    def __init__(self, fuser: Any, root: int):
        self.fuser = fuser
        self.numbers = {root: 0}
        self.places = [root]

    def reads(self, k: int) -> tuple[int, ...]:
        """The numbers of what member `k` reads."""
        makers, fusible, numbers = self.fuser.makers, self.fuser.fusible, self.numbers
        found = []
        for atom in self.fuser.eqns[k].invars:
            maker = None if type(atom) is Literal else makers.get(atom)
            if maker is None or not fusible[maker]:
                found.append(-1)
                continue
            number = numbers.get(maker)
            if number is None:
                number = numbers[maker] = len(self.places)
                self.places.append(maker)
            found.append(number)
        return tuple(found)


def remember(fuser: Any, group: Any, asked: list[Asked]) -> None:
    """Keep how a group grew, for `repeat`."""
    walk = _Walk(fuser, group.root)
    order = [group.root, *[question.k for question in asked if question.joined]]
    reads = tuple([walk.reads(k) for k in order])
    outs = [fuser.eqns[k].outvars[0] for k in order]
    numbers = walk.numbers
    growth = Growth(
        tuple([fuser.kinds[k] for k in walk.places]),
        tuple([(numbers[question.k], question) for question in asked]),
        tuple([numbers[k] for k in order]),
        reads,
        tuple([group.index[out] for out in outs]),
        tuple([group.again.get(out) for out in outs]),
        frozenset([numbers[k] for k in group.copies]),
        tuple([numbers[fuser.makers[out]] for out in group.extra]),
        group.frame(),
    )
    known = fuser.grown.setdefault(fuser.kinds[group.root], [])
    known.insert(0, growth)
    del known[MOST_GROWTHS:]


def repeat(fuser: Any, root: int, group: Any) -> Any:
    """Let the new `group` of a root grow as one before; None if there is none that it is like."""
    known = fuser.grown.get(fuser.kinds[root], ())
    for at, growth in enumerate(known):
        places = _follow(fuser, root, group, growth)
        if places is not None:
            if at:
                known.insert(0, known.pop(at))
            _settle(fuser, group, growth, places)
            return group
        group.members = {root}
        group.copies = set()
    return None


def _follow(fuser: Any, root: int, group: Any, growth: Growth) -> list[int] | None:
    """The equations that stand at the numbers of a growth; None if something is different.

    The group's members and copies are filled in on the way, as they are asked for.
    """
    walk = _Walk(fuser, root)
    reads, places, kinds = iter(growth.reads), walk.places, fuser.kinds
    if walk.reads(root) != next(reads):
        return None
    before = root
    for number, asked in growth.asked:
        k = places[number]
        if k >= before or kinds[k] != growth.kinds[number]:
            return None
        before = k
        if (k in fuser.group_of) != asked.taken:
            return None
        if asked.taken:
            continue
        (out,) = fuser.eqns[k].outvars
        outside = fuser.outside_users(group, out)
        if (bool(outside) or fuser.is_needed_outside(group, out)) != asked.shared:
            return None
        if asked.behind is not None:
            index, found = asked.behind
            opening = fuser.reduction_behind(group, fuser.eqns[k], index)
            if fuser.kind_of_opening(opening) != found:
                return None
        if asked.circle is not None and asked.circle != fuser.reach.any_reaches(outside, group):
            return None
        if asked.joined:
            group.members.add(k)
            if number in growth.copies:
                group.copies.add(k)
            if walk.reads(k) != next(reads):
                return None
    if len(places) != len(growth.kinds):
        return None
    return places


def _settle(fuser: Any, group: Any, growth: Growth, places: list[int]) -> None:
    """Note the members of a group that grew as one before, and what is known of them."""
    group.enter(growth.group)
    eqns, group_of, copies = fuser.eqns, fuser.group_of, growth.copies
    for number, index, again in zip(growth.members, growth.indices, growth.again, strict=True):
        k = places[number]
        out = eqns[k].outvars[0]
        group.index[out] = index
        if again is not None:
            group.again[out] = again
        if number not in copies:
            group_of[k] = group
    for number in growth.extra:
        k = places[number]
        group.extra.append(eqns[k].outvars[0])
        fuser.reach.note_exit(group.root, k)
