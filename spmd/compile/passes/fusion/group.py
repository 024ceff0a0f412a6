"""Group: equations that become one kernel, while they are collected and after.

Members are numbers of equations. A group knows the index of each member's result in its space,
whose dims are those of its root's result and those that reductions add. `fuse` decides which
equations join a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

from spmd.compile.expressions.group_kernel import Space
from spmd.compile.expressions.index_map import NO_DIM, Index, dim
from spmd.core.ir import Eqn

# A group's inner dims, the sizes of its dims, its root's index, all dims that count, outer ones.
Frame: TypeAlias = tuple[
    tuple[int, ...] | None, tuple[int, ...], Index | None, frozenset[int], frozenset[int]
]


@cache
def _space_of(shape: tuple[int, ...]) -> tuple[Index, frozenset[int]]:
    """The index of a group's root, and the dims of its space that have anything to count."""
    counted = frozenset([d for d, size in enumerate(shape) if size != 1])
    return tuple([dim(d, size) for d, size in enumerate(shape)]), counted


class Group:
    """Equations that become one kernel, and the index of each of their results in its space."""

    def __init__(self, root: int, eqn: Eqn):
        self.root = root
        self.members = {root}
        self.copies: set[int] = set()
        self.index: dict[int, Index] = {}
        # Further indices at which members read a value: it is computed at each of them.
        self.again: dict[int, list[Index]] = {}
        self.extra: list[int] = []
        self.reads: set[int] = set()  # makers of operands from memory, once finished
        self.inner: tuple[int, ...] | None = None
        # How the group grew, and the equations at the numbers of that; None once it is merged.
        self.growth: Any = None
        self.places: list[int] = []
        self.key: Any = None  # the key for `merge`, once the group is finished
        self.shape = eqn.outvars[0].aval.shape
        self.sizes = list(self.shape)
        # The root's index, which most members have; None if the space has dims that it lacks. The
        # space dims that have anything to count, and the outer ones among them.
        self.first: Index | None
        self.index[root], self.whole = _space_of(self.shape)
        self.first, self.points = self.index[root], self.whole

    def open_rows(self, inner: Sequence[int], more: Sequence[int] = ()) -> None:
        """Let some dims be the inner ones; `more` are the sizes of dims to add before."""
        if more:
            self.sizes.extend(more)
            self.first = None
        self.inner = tuple(inner)
        self.whole = frozenset([d for d, s in enumerate(self.sizes) if s != 1])
        self.points = self.whole - frozenset(self.inner)

    def frame(self) -> Frame:
        """The space of a finished group, for one that is like it."""
        return self.inner, tuple(self.sizes), self.first, self.whole, self.points

    def enter(self, frame: Frame) -> None:
        """Have the space of another group."""
        self.inner, sizes, self.first, self.whole, self.points = frame
        self.sizes = list(sizes)

    def space(self, written: Sequence[int]) -> Space:
        """The final space: outer dims first, without those in which there is nothing to count.

        `written` are the members whose results others read.
        """
        inner = [d for d in self.inner or () if self.sizes[d] != 1] or list(self.inner or ())[:1]
        outer = [d for d in range(len(self.sizes)) if d in self.points]
        place = {old: new for new, old in enumerate([*outer, *inner])}
        outputs = tuple(self._along(k, place) for k in written)
        sizes = [tuple(self.sizes[d] for d in dims) for dims in (outer, inner)]
        return Space(sizes[0], sizes[1], outputs)

    def _along(self, k: int, place: dict[int, int]) -> tuple[int, ...]:
        """The space dim of each dim of a member's result."""
        plain = [a.plain_dim() for a in self.index[k]]
        return tuple(NO_DIM if d is None else place[d] for d in plain)
