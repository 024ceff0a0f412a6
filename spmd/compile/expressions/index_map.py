"""Index maps: where in an operand a point of a kernel's space reads.

The one idea: operations that only move values cost nothing inside a kernel, because the result's
index determines the operand's. An index is one `Affine` per dim: a linear function of the point.
`operand_index` maps the index at which a result is wanted to the index at which the operand is
read, or gives None where that is not affine (a reshape that cuts a dim unevenly).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeAlias

from spmd.base.record import record
from spmd.core.ir import Eqn


@record
class Affine:
    """`offset + sum(coefficient * index of a space dim)`; `terms` are (dim, coefficient)."""

    terms: tuple[tuple[int, int], ...] = ()
    offset: int = 0

    def __add__(self, other: Affine) -> Affine:
        sums = dict(self.terms)
        for dim, coefficient in other.terms:
            sums[dim] = sums.get(dim, 0) + coefficient
        terms = tuple(sorted((d, c) for d, c in sums.items() if c))
        return Affine(terms, self.offset + other.offset)

    def scale(self, factor: int, plus: int = 0) -> Affine:
        """`factor * self + plus`."""
        terms = tuple((d, c * factor) for d, c in self.terms) if factor else ()
        return Affine(terms, self.offset * factor + plus)

    @property
    def dims(self) -> frozenset[int]:
        """The space dims it depends on."""
        return frozenset([d for d, _ in self.terms])

    def moved(self, place: Mapping[int, int]) -> Affine:
        """The same with dim `place[d]` for each dim d."""
        if len(self.terms) == 1 and not self.offset:
            ((d, c),) = self.terms
            return plain(place[d]) if c == 1 else Affine(((place[d], c),))
        return Affine(tuple(sorted([(place[d], c) for d, c in self.terms])), self.offset)

    def plain_dim(self) -> int | None:
        """The space dim that this is the index of, if it is just that."""
        if self.offset == 0 and len(self.terms) == 1 and self.terms[0][1] == 1:
            return self.terms[0][0]
        return None


Index: TypeAlias = tuple[Affine, ...]
ZERO = Affine()


# The space dim of a dim of size 1: it runs along none.
NO_DIM = -1


def dim(number: int, size: int) -> Affine:
    """The index of a space dim; nothing to count where its size is 1."""
    return plain(number) if size != 1 else ZERO


@cache
def plain(number: int) -> Affine:
    """The index of a space dim. One object each: most indices are made of these."""
    return Affine(((number, 1),))


def index_along(along: Sequence[int], sizes: Sequence[int]) -> Index:
    """The index of an array whose dims are these space dims; `NO_DIM` is none."""
    return tuple([ZERO if d == NO_DIM else dim(d, sizes[d]) for d in along])


def dims_of(index: Index) -> frozenset[int]:
    """The space dims that an index depends on."""
    return frozenset([d for affine in index for d, _ in affine.terms])


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The distance in elements between neighbours along each dim of a contiguous array."""
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * shape[k + 1]
    return tuple(strides)


def linear(index: Index, shape: Sequence[int]) -> Affine:
    """The address of an index in a contiguous array."""
    total = ZERO
    for affine, stride in zip(index, strides_of(shape), strict=True):
        total = total + affine.scale(stride)
    return total


def reshaped(index: Index, shape: Sequence[int], to: Sequence[int], space: Sequence[int]):
    """The index with the same address in an array of shape `to`; None if it is not affine."""
    if math.prod(to) == 0:
        return tuple(ZERO for _ in to)
    if [s for s in shape if s != 1] == [s for s in to if s != 1]:
        # Also right beside the array's edges, where the general rule gives up.
        kept = iter([a for a, s in zip(index, shape, strict=True) if s != 1])
        return tuple(ZERO if s == 1 else next(kept) for s in to)
    rest = linear(index, shape)
    out = []
    for size, stride in zip(to, strides_of(to), strict=True):
        if size == 1:
            out.append(ZERO)
            continue
        whole, rest = _divide(rest, stride)
        low, high = span(rest, space)
        if low < 0 or high >= stride:
            return None
        out.append(whole)
    return tuple(out)


def _divide(affine: Affine, by: int) -> tuple[Affine, Affine]:
    """Quotient and remainder, term by term; right if the remainder stays in range(by)."""
    whole = tuple((d, c // by) for d, c in affine.terms if c // by)
    rest = tuple((d, c % by) for d, c in affine.terms if c % by)
    return Affine(whole, affine.offset // by), Affine(rest, affine.offset % by)


def span(affine: Affine, space: Sequence[int]) -> tuple[int, int]:
    """The least and the largest value of an affine index over a space."""
    low = high = affine.offset
    for d, c in affine.terms:
        if c < 0:
            low += c * (space[d] - 1)
        else:
            high += c * (space[d] - 1)
    return low, high


# ---- the table of moving primitives ------------------------------------------------------------

Rule = Callable[[Eqn, Index, Sequence[int]], Index | None]


def _broadcast(eqn: Eqn, index: Index, space: Sequence[int]) -> Index:
    where = eqn.params["broadcast_dimensions"]
    shape = eqn.invars[0].aval.shape
    return tuple(ZERO if s == 1 else index[d] for s, d in zip(shape, where, strict=True))


def _permute(eqn: Eqn, index: Index, space: Sequence[int]) -> Index:
    perm = eqn.params["permutation"]
    out = [ZERO] * len(perm)
    for k, p in enumerate(perm):
        out[p] = index[k]
    return tuple(out)


def _reshape(eqn: Eqn, index: Index, space: Sequence[int]) -> Index | None:
    return reshaped(index, eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, space)


def _squeeze(eqn: Eqn, index: Index, space: Sequence[int]) -> Index:
    gone = eqn.params["dimensions"]
    kept = iter(index)
    return tuple(ZERO if d in gone else next(kept) for d in range(eqn.invars[0].aval.ndim))


def _slice(eqn: Eqn, index: Index, space: Sequence[int]) -> Index:
    starts = eqn.params["start_indices"]
    steps = eqn.params["strides"] or (1,) * len(starts)
    return tuple(a.scale(s, b) for a, s, b in zip(index, steps, starts, strict=True))


def _rev(eqn: Eqn, index: Index, space: Sequence[int]) -> Index:
    flipped = eqn.params["dimensions"]
    shape = eqn.invars[0].aval.shape
    return tuple(a.scale(-1, shape[d] - 1) if d in flipped else a for d, a in enumerate(index))


MOVES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "permute_dims": _permute,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "slice": _slice,
    "rev": _rev,
}


def operand_index(eqn: Eqn, index: Index, space: Sequence[int]) -> Index | None:
    """The index at which a moving equation reads its operand for its result at `index`."""
    return MOVES[eqn.prim.name](eqn, index, space)
