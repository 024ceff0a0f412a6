"""Multi-output fusion: groups over the same space that read the same array become one kernel.

Growing from one root leaves siblings apart: the two gradients of a product, an updated moment and
the parameter computed from it. Two groups merge if their spaces agree, one reads what the other
reads (a whole array, not a broadcast vector) or makes, at the same index, and no path leads from
one to the other through a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.compile.expressions.index_map import Index
from spmd.compile.passes.fusion.graph import with_copies
from spmd.core.ir import Var

MAX_EQNS = 256

# Of the groups that read one array, each is compared with so many of those before it: in a deep
# network every layer reads some mask, and the layers are apart anyway.
MOST_NEIGHBOURS = 16


def merge_groups(fuser: Any, units: dict[int, Any]) -> None:
    """Merge groups where possible; `units` maps a root to its group (None for lone equations)."""
    touching: dict[Var, list[int]] = {}
    for root in sorted(units):
        if units[root] is not None:
            for var in dict.fromkeys(_touched(fuser, units[root])):
                touching.setdefault(var, []).append(root)
    apart: set[Any] = set()
    for roots in touching.values():
        if len(roots) < 2:
            continue
        groups = _current(fuser, roots)
        if len(groups) > 1:
            _merge_all(fuser, units, groups, apart)


def _current(fuser: Any, roots: Sequence[int]) -> list[Any]:
    """The groups that the given roots belong to by now, each once."""
    return list({id(group): group for group in map(fuser.group_of.__getitem__, roots)}.values())


def _touched(fuser: Any, group: Any) -> list[Var]:
    """The arrays of the space's size that a group reads, or makes for others too."""
    eqns, places = fuser.eqns, group.places
    return [
        eqns[places[number]].invars[position] if position >= 0 else eqns[places[number]].outvars[0]
        for number, position in group.growth.touched
    ]


def _merge_all(fuser: Any, units: dict[int, Any], groups: list[Any], apart: set[Any]) -> None:
    """Merge groups where possible; `apart` has pairs that were found to stay two.

    An obstacle between two groups remains when others have merged.
    """
    kept: list[Any] = []
    for group in groups:
        key = _key(group)
        for other in kept[-MOST_NEIGHBOURS:]:
            if other.key != key:
                continue
            pair = other, len(other.members), group, len(group.members)
            if pair in apart:
                continue
            before = other.root
            if _merge(fuser, other, group):
                units.pop(group.root)
                if other.root != before:
                    units[other.root] = units.pop(before)
                break
            apart.add(pair)
        else:
            kept.append(group)


def _merge(fuser: Any, a: Any, b: Any) -> bool:
    """Move the members of `b` into `a`, if that is right."""
    if a.again or b.again or len(a.members) + len(b.members) > MAX_EQNS:
        return False
    if fuser.reach.is_between(a, b) or fuser.reach.is_between(b, a):
        return False  # as `_apart` would find: most pairs are of one layer and another
    place = dict(zip(_order(b), _order(a), strict=True))
    index = b.index
    if any(d != moved for d, moved in place.items()):
        index = {k: _moved(index, place) for k, index in b.index.items()}
    if not _agree(fuser, a, b, index, place) or _apart(fuser, a, b):
        return False
    owned = (a.members - a.copies) | (b.members - b.copies)
    a.extra += [b.root, *b.extra]
    a.members |= b.members
    a.copies = (a.copies | b.copies) - owned
    a.reads = (a.reads | b.reads) - a.members
    a.index.update(index)
    a.growth = None
    for k in b.members - b.copies:
        fuser.group_of[k] = a
    fuser.reach.note_exit(max(a.root, b.root), min(a.members))
    if b.root > a.root:
        # The root is the last member; the old one is an output like any other.
        a.extra = [a.root, *(k for k in a.extra if k != b.root)]
        a.root = b.root
    return True


def _order(group: Any) -> list[int]:
    """The dims of a group's space, outer first."""
    inner = group.inner or ()
    return [d for d in range(len(group.sizes)) if d not in inner] + list(inner)


def _key(group: Any) -> Any:
    if group.key is None:
        inner = tuple(group.sizes[d] for d in group.inner or ())
        outer = tuple(group.sizes[d] for d in _order(group))
        group.key = outer, inner, group.inner is None
    return group.key


def _moved(index: Index, place: dict[int, int]) -> Index:
    """An index in the dims of one group as one in those of another, which are `place[d]`."""
    return tuple([affine.moved(place) for affine in index])


def _agree(fuser: Any, a: Any, b: Any, index: dict[int, Index], place: dict[int, int]) -> bool:
    """Whether values that both compute, or one reads of the other, are at the same index."""
    if any(a.index[k] != index[k] for k in a.index.keys() & index.keys()):
        return False
    for reader, maker, known in ((b, a, a.index), (a, b, index)):
        if reader.reads.isdisjoint(maker.index):
            continue
        for k in reader.members:
            for position, source in enumerate(fuser.sources[k]):
                if source not in maker.index or source in reader.index:
                    continue
                eqn = fuser.eqns[k]
                wanted = fuser.index_of_operand(reader, eqn, position, reader.index[k])
                if wanted is None:
                    return False
                if reader is b:
                    wanted = _moved(wanted, place)
                if wanted != known[source]:
                    return False
    return True


def _apart(fuser: Any, a: Any, b: Any) -> bool:
    """Whether a path leads from one group to the other through anything else."""
    both = a.members | b.members
    copies = (a.copies | b.copies) - (a.members - a.copies) - (b.members - b.copies)
    for start, end in ((a, b), (b, a)):
        outside = [
            user
            for k in sorted(start.members - start.copies)
            for read in with_copies(fuser.users, k, copies)
            for user in fuser.users[read]
            if user not in both
        ]
        if outside and fuser.reach.any_reaches(outside, end):
            return True
    return False
