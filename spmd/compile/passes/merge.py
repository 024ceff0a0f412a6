"""Merge: groups over the same space that read the same array become one kernel.

Growing from one root leaves siblings apart: the two gradients of a product, an updated moment and
the parameter computed from it. Two groups merge if their spaces agree, one reads what the other
reads (a whole array, not a broadcast vector) or makes, at the same index, and no path leads from
one to the other through a third.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from spmd.compile.lower.index import Index
from spmd.core.ir import Literal, Var
from spmd.core.util import product

MAX_EQNS = 256

# Of the groups that read one array, each is compared with so many of those before it: in a deep
# network every layer reads some mask, and the layers are apart anyway.
MOST_NEIGHBOURS = 16


def merge_groups(fuser: Any, units: dict[int, Any]) -> None:
    """Merge what can be merged; `units` maps a root to its group (None for lone equations)."""
    touching: dict[Var, list[int]] = {}
    for root in sorted(units):
        if units[root] is not None:
            for var in _touched(fuser, units[root]):
                touching.setdefault(var, []).append(root)
    for var, roots in touching.items():
        if len(roots) < 2:
            continue
        groups = list(dict.fromkeys(id(g) for g in _current(fuser, roots)))
        if len(groups) > 1:
            _merge_all(fuser, units, var, list(_current(fuser, roots)))


def _current(fuser: Any, roots: Sequence[int]) -> Iterator[Any]:
    """The groups that the given roots belong to by now, each once."""
    seen = set()
    for root in roots:
        group = fuser.group_of[root]
        if id(group) not in seen:
            seen.add(id(group))
            yield group


def _touched(fuser: Any, group: Any) -> dict[Var, None]:
    """The arrays of the space's size that a group reads or makes."""
    size = product(group.sizes)
    found: dict[Any, None] = {}
    for k in sorted(group.members):
        eqn = fuser.eqns[k]
        for v in eqn.invars:
            if v.aval.size == size and type(v) is Var:
                found[v] = None
        for v in eqn.outvars:
            if v.aval.size == size:
                found[v] = None
    return found


def _merge_all(fuser: Any, units: dict[int, Any], var: Var, groups: list[Any]) -> None:
    kept: list[Any] = []
    for group in groups:
        for other in kept[-MOST_NEIGHBOURS:]:
            if _merge(fuser, other, group):
                units.pop(group.root)
                if other.root != _owner(units, other):
                    units[other.root] = units.pop(_owner(units, other))
                break
        else:
            kept.append(group)


def _owner(units: dict[int, Any], group: Any) -> int:
    return next(root for root, g in units.items() if g is group)


def _merge(fuser: Any, a: Any, b: Any) -> bool:
    """Move the members of `b` into `a`, if that is right."""
    if a.again or b.again or _key(a) != _key(b) or len(a.members) + len(b.members) > MAX_EQNS:
        return False
    if fuser.reach.is_between(a, b) or fuser.reach.is_between(b, a):
        return False  # as `_apart` would find: most pairs are of one layer and another
    place = dict(zip(_order(b), _order(a), strict=True))
    index = b.index
    if any(d != moved for d, moved in place.items()):
        index = {v: _moved(index, place) for v, index in b.index.items()}
    if not _agree(fuser, a, b, index, place) or _apart(fuser, a, b):
        return False
    owned = (a.members - a.copies) | (b.members - b.copies)
    a.extra += [fuser.eqns[b.root].outvars[0], *b.extra]
    a.members |= b.members
    a.copies = (a.copies | b.copies) - owned
    a.index.update(index)
    for k in b.members - b.copies:
        fuser.group_of[k] = a
    fuser.reach.note_exit(max(a.root, b.root), min(a.members))
    if b.root > a.root:
        # The root is the last member; the old one is an output like any other.
        old = fuser.eqns[a.root].outvars[0]
        a.extra = [old, *(v for v in a.extra if v is not fuser.eqns[b.root].outvars[0])]
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


def _agree(fuser: Any, a: Any, b: Any, index: dict[Var, Index], place: dict[int, int]) -> bool:
    """Whether what both compute, and what one reads of the other, is at the same index."""
    if any(a.index.get(v, i) != i for v, i in index.items()):
        return False
    for reader, maker, known in ((b, a, a.index), (a, b, index)):
        for k in reader.members:
            eqn = fuser.eqns[k]
            for position, v in enumerate(eqn.invars):
                if isinstance(v, Literal) or v not in maker.index or v in reader.index:
                    continue
                wanted = fuser.index_of_operand(reader, eqn, position)
                if wanted is None:
                    return False
                if reader is b:
                    wanted = _moved(wanted, place)
                if wanted != known[v]:
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
            for var in fuser.eqns[k].outvars
            for user in _outside_users(fuser, var, both, copies)
        ]
        if outside and fuser.reach.any_reaches(outside, end):
            return True
    return False


def _outside_users(fuser: Any, var: Var, both: set[int], copies: set[int]) -> Iterator[int]:
    """Who else reads a variable: of a copied equation, the readers of the original."""
    for user in fuser.users.get(var, ()):
        if user not in both:
            yield user
        elif user in copies:
            yield from _outside_users(fuser, fuser.eqns[user].outvars[0], both, copies)
