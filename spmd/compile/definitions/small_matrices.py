"""Factorizations of small matrices: a step a column, and each step works on all matrices.

The one idea: a stack (b, m, n) becomes (m, n, b), so that the vectors of a machine hold the same
element of many matrices, and a row is exchanged by a select. The steps are written one after the
other, each on what is left of the matrices. Large stacks are cut into blocks that stay in a cache,
which are the iterations of a parallel loop. LAPACK takes one matrix at a time, and is left with
larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.compile.definitions.factors import lu_pivots_to_permutation
from spmd.compile.definitions.stacks import both, flat, full, lengths, like_leading
from spmd.compile.definitions.table import Table, defines, write_definitions
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import ClosedJaxpr, Eqn
from spmd.core.structural import broadcast_in_dim, permute_dims, reduce_sum, reshape
from spmd.lax.arithmetic import abs as absolute
from spmd.lax.arithmetic import add, div, mul, neg, sqrt, sub
from spmd.lax.array import broadcasted_iota
from spmd.lax.concatenate import concatenate
from spmd.lax.control_scan import scan
from spmd.lax.convert import convert_element_type
from spmd.lax.linalg.lapack import exported
from spmd.lax.logic import eq, ge, gt, lt, ne, select
from spmd.lax.reduce import argmax, reduce_and
from spmd.lax.slicing import pad, slice_in_dim

# A step is a kernel or two, which LLVM compiles: 16 take it half a second.
MOST_ROWS = 16
# Right-hand sides and columns, together with the rows: a block of more leaves the caches.
MOST_ELEMENTS = 512
# Fewer matrices fill no vectors. Of one of 4 x 4 `det` takes 0.71 us so and 0.74 by LAPACK's native
# step, and is compiled in 440 ms and 180. Without such a step the way to LAPACK takes 13 to 32 us.
LEAST, MOST_ROWS_OF_FEW, MOST_ROWS_WITHOUT_STEP = 16, 3, 8
# Matrices of a block: 16 x 16 of them in float32 are 128 KiB.
BLOCK = 128

_TABLE: Table = {}


def write_small_matrices(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Write factorizations of small matrices as programs."""
    return write_definitions(closed, _is_given_so, _TABLE)


def _is_given_so(eqn: Eqn) -> bool:
    return not eqn.params.get("pivoting")


def are_small(avals: Sequence[ShapedArray]) -> bool:
    """Stacks of real matrices for which a program pays."""
    first, *rest = avals
    *leading, m, n = first.shape
    area = m * n + sum(math.prod(a.shape[-2:]) for a in rest)
    if math.prod(leading) >= LEAST:
        most = MOST_ROWS
    else:
        has_step = exported("getrf", first.dtype.char) is not None
        most = MOST_ROWS_OF_FEW if has_step else MOST_ROWS_WITHOUT_STEP
    return max(m, n) <= most and area <= MOST_ELEMENTS and not dtypes.is_complex(first.dtype)


def of_columns(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a definition by a function of operands (m, n, b), whose results have b last too."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        def definition(*operands: Any, **params: Any) -> list[Any]:
            def work(*stacks: Any) -> list[Any]:
                outs = function(*(permute_dims(x, (1, 2, 0)) for x in stacks), **params)
                return [permute_dims(y, (typeof(y).ndim - 1, *range(typeof(y).ndim - 1)))
                        for y in outs]  # fmt: skip

            outs = in_blocks(work, *map(flat, operands))
            return [like_leading(y, operands[0]) for y in outs]

        definition.__name__ = function.__name__
        defines(*names, when=are_small, table=_TABLE)(definition)
        return function

    return declare


def in_blocks(work: Callable[..., list[Any]], *stacks: Any) -> list[Any]:
    """The results of a function of stacks, block by block; the last block is filled with zeros."""
    b = typeof(stacks[0]).shape[0]
    if b <= BLOCK:
        return work(*stacks)
    count = -(-b // BLOCK)

    def cut(x: Any) -> Any:
        zero, rest = np.zeros((), typeof(x).dtype), typeof(x).shape[1:]
        full_length = pad(x, zero, [(0, count * BLOCK - b, 0), *((0, 0, 0) for _ in rest)])
        return reshape(full_length, (count, BLOCK, *rest))

    def join(y: Any) -> Any:
        rest = typeof(y).shape[2:]
        return slice_in_dim(reshape(y, (count * BLOCK, *rest)), 0, b, axis=0)

    _, outs = scan(lambda carry, block: (carry, work(*block)), (), tuple(map(cut, stacks)))
    return list(map(join, outs))


# ---- parts of matrices (m, n, b) ---------------------------------------------------------------


def row(x: Any, k: int) -> Any:
    """Row k, without its dim."""
    return reshape(rows(x, k, k + 1), typeof(x).shape[1:])


def rows(x: Any, start: int, stop: int | None = None) -> Any:
    """Rows from `start` on."""
    return slice_in_dim(x, start, stop, axis=0)


def column(x: Any, k: int) -> Any:
    """Column k, without its dim."""
    m, _, b = typeof(x).shape
    return reshape(columns(x, k, k + 1), (m, b))


def columns(x: Any, start: int, stop: int | None = None) -> Any:
    """Columns from `start` on."""
    return slice_in_dim(x, start, stop, axis=1)


def as_row(x: Any) -> Any:
    """A row more than `x` has: (n, b) becomes (1, n, b)."""
    return reshape(x, (1, *typeof(x).shape))


def outer(x: Any, y: Any) -> Any:
    """The products (m, n, b) of (m, b) and (n, b)."""
    (m, b), (n, _) = typeof(x).shape, typeof(y).shape
    return mul(broadcast_in_dim(x, (m, n, b), (0, 2)), broadcast_in_dim(y, (m, n, b), (1, 2)))


def scaled(x: Any, factor: Any) -> Any:
    """`x` (m, b) times numbers (b,)."""
    return mul(x, broadcast_in_dim(factor, typeof(x).shape, (1,)))


def divided(x: Any, divisor: Any) -> Any:
    """`x` (m, b) divided by numbers (b,)."""
    return div(x, broadcast_in_dim(divisor, typeof(x).shape, (1,)))


def joined(parts: Sequence[Any], dim: int) -> Any:
    """A concatenation of those parts that have elements."""
    parts = [p for p in parts if typeof(p).shape[dim]]
    return concatenate(parts, dim) if len(parts) > 1 else parts[0]


def _where(mask: Any, x: Any, y: Any) -> Any:
    """`x` where a mask (m, b) is true, `y` elsewhere: (m, n, b)."""
    return select(broadcast_in_dim(mask, typeof(y).shape, (0, typeof(y).ndim - 1)), x, y)


# ---- LU ----------------------------------------------------------------------------------------


def eliminate(x: Any, order: Any, keep: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """Gaussian elimination, exchanging whole rows as LAPACK's getf2.

    The rows of the factors; the exchanges, one a column; and the rows of `order` (m, n, b), which
    are exchanged likewise. Below the diagonal are the factors of each step if they are to be kept.
    """
    count, done, places, exchanges = min(typeof(x).shape[:2]), [], [], []
    count = min(count, typeof(order).shape[0])
    for k in range(count):
        left, _, b = typeof(x).shape
        at = k if keep else 0
        values = column(x, at)
        # As LAPACK's iamax: the first of equals; NaN is never larger.
        size = select(ne(values, values), full(-1, values), absolute(values))
        chosen = argmax(size, 0, np.int32)
        place = broadcasted_iota(np.int32, (left, b), 0)
        mask = eq(broadcast_in_dim(chosen, (left, b), (1,)), place)
        exchanges.append(add(chosen, full(k, chosen)))
        top = _chosen_row(mask, x)
        zeros = broadcast_in_dim(np.zeros((), typeof(x).dtype), (k - at, b), ())
        done.append(as_row(joined([zeros, top], 0)))
        places.append(as_row(_chosen_row(mask, order)))
        x, order = _with_top(mask, x), _with_top(mask, order)
        if left == 1:
            break
        pivot = row(top, at)
        safe = select(eq(pivot, full(0, pivot)), full(1, pivot), pivot)
        factors = divided(column(x, at), safe)
        reduced = sub(columns(x, at + 1), outer(factors, rows(top, at + 1)))
        kept = [columns(x, 0, k), reshape(factors, (left - 1, 1, b))] if keep else []
        x = joined([*kept, reduced], 1)
    return [*done, x], exchanges, [*places, order]


def _chosen_row(mask: Any, x: Any) -> Any:
    """The one row at which a mask (m, b) is true."""
    return reduce_sum(_where(mask, x, full(0, x)), (0,))


def _with_top(mask: Any, x: Any) -> Any:
    """The rows behind the first, which stands where the mask is true."""
    rest = rows(x, 1)
    return _where(rows(mask, 1), broadcast_in_dim(row(x, 0), typeof(rest).shape, (1, 2)), rest)


@of_columns("lu")
def lu(x: Any) -> list[Any]:
    """The factors, the exchanges, and the rows that came to each place."""
    m, _, b = typeof(x).shape
    order = broadcasted_iota(np.int32, (m, 1, b), 0)
    factors, exchanges, order = eliminate(x, order, keep=True)
    return [joined(factors, 0), joined([as_row(e) for e in exchanges], 0),
            reshape(joined(order, 0), (m, b))]  # fmt: skip


@of_columns("solve")
def solve(a: Any, b: Any) -> list[Any]:
    """Elimination of both sides, and substitution; NaN for singular matrices."""
    n = typeof(a).shape[0]
    factors = joined(eliminate(joined([a, b], 1), a, keep=False)[0], 0)
    upper, right = columns(factors, 0, n), columns(factors, n)
    pivots = joined([rows(column(upper, k), k, k + 1) for k in range(n)], 0)
    good = reduce_and(ne(pivots, full(0, pivots)), (0,))
    return [_or_nan(good, substitute(upper, right, lower=False, unit_diagonal=False))]


def _or_nan(good: Any, x: Any) -> Any:
    return select(broadcast_in_dim(good, typeof(x).shape, (2,)), x, full(np.nan, x))


# Exchanges that are made one by one over all places; the host needs 10 us for the fewest.
MOST_PIVOTS = 64


def _are_few(avals: Sequence[ShapedArray]) -> bool:
    return avals[0].shape[-1] <= MOST_PIVOTS


defines("lu_pivots_to_permutation", when=_are_few, table=_TABLE)(lu_pivots_to_permutation)


# ---- triangular systems ------------------------------------------------------------------------


def substitute(matrix: Any, x: Any, lower: bool, unit_diagonal: bool) -> Any:
    """Substitution: each row that is solved leaves the rows behind it (or before it)."""
    n, found = typeof(x).shape[0], []
    for k in range(n) if lower else reversed(range(n)):
        values = column(matrix, k)
        solved = row(x, 0 if lower else k)
        if not unit_diagonal:
            solved = divided(solved, row(values, k))
        found.append(as_row(solved))
        factors = rows(values, k + 1) if lower else rows(values, 0, k)
        if typeof(factors).shape[0]:
            x = sub(rows(x, 1) if lower else rows(x, 0, k), outer(factors, solved))
    return joined(found if lower else found[::-1], 0)


@of_columns("triangular_solve")
def triangular_solve(
    a: Any,
    b: Any,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    conjugate_a: bool,
    unit_diagonal: bool,
) -> list[Any]:
    """Substitution from the left: x op(a) = b is op(a)^T x^T = b^T."""
    if transpose_a == left_side:
        a, lower = transposed(a), not lower
    x = substitute(a, b if left_side else transposed(b), lower, unit_diagonal)
    return [x if left_side else transposed(x)]


def transposed(x: Any) -> Any:
    """The transposes of matrices (m, n, b)."""
    return permute_dims(x, (1, 0, 2))


# ---- Cholesky ----------------------------------------------------------------------------------


@of_columns("cholesky")
def cholesky(x: Any) -> list[Any]:
    """Each column scales itself, and takes its outer product off the columns behind it."""
    n, _, b = typeof(x).shape
    found, good = [], None
    for k in range(n):
        values = column(x, 0)
        pivot = sqrt(row(values, 0))
        is_positive = gt(pivot, full(0, pivot))
        good = is_positive if good is None else both(good, is_positive)
        below = divided(rows(values, 1), pivot)
        above = broadcast_in_dim(np.zeros((), typeof(x).dtype), (k, b), ())
        found.append(reshape(joined([above, as_row(pivot), below], 0), (n, 1, b)))
        if k < n - 1:
            x = sub(columns(rows(x, 1), 1), outer(below, below))
    factor = joined(found, 1)
    lower = ge(*(broadcasted_iota(np.int32, (n, n, b), dim) for dim in (0, 1)))
    return [select(lower, _or_nan(good, factor), full(0, factor))]


# ---- QR ----------------------------------------------------------------------------------------


@of_columns("qr")
def qr(x: Any, *, pivoting: bool, full_matrices: bool) -> list[Any]:
    """Householder's reflections from left to right, and their product from right to left."""
    m, n, b = typeof(x).shape
    upper, reflections = [], []
    for k in range(min(m, n)):
        v, tau, beta = reflection(column(x, 0))
        above = broadcast_in_dim(np.zeros((), typeof(x).dtype), (k, b), ())
        rest = columns(x, 1)
        if n - k > 1:
            shares = reduce_sum(mul(broadcast_in_dim(v, typeof(rest).shape, (0, 2)), rest), (0,))
            rest = sub(rest, outer(scaled(v, tau), shares))
        upper.append(as_row(joined([above, as_row(beta), row(rest, 0)], 0)))
        reflections.append((v, tau))
        x = rows(rest, 1)
    width = m if full_matrices else min(m, n)
    if width > n:
        zeros = broadcast_in_dim(np.zeros((), typeof(x).dtype), (width - n, n, b), ())
        upper.append(zeros)
    return [_product(reflections, m, width, b), joined(upper, 0)]


def _product(reflections: Sequence[tuple[Any, Any]], m: int, width: int, b: int) -> Any:
    """The first columns (m, width, b) of a product of reflections, each one row shorter."""
    count = len(reflections)
    zero = np.zeros((), typeof(reflections[0][0]).dtype)
    place = [broadcasted_iota(np.int32, (m - count, width - count, b), dim) for dim in (0, 1)]
    q = convert_element_type(eq(*place), zero.dtype)
    for v, tau in reversed(reflections):
        below = rows(v, 1)
        first = joined([as_row(sub(full(1, tau), tau)), neg(scaled(below, tau))], 0)
        first = reshape(first, (typeof(v).shape[0], 1, b))
        if not typeof(q).shape[1]:
            q = first
            continue
        spread = broadcast_in_dim(below, typeof(q).shape, (0, 2))
        shares = scaled(reduce_sum(mul(spread, q), (0,)), tau)
        behind = joined([as_row(neg(shares)), sub(q, outer(below, shares))], 0)
        q = joined([first, behind], 1)
    return q


def reflection(x: Any) -> tuple[Any, Any, Any]:
    """The reflection `I - tau v v^T` that takes x (m, b) to beta e_0, where v[0] is 1.

    As LAPACK's larfg: beta has the other sign than x[0], and tau is 0 if x is a multiple of e_0.
    """
    alpha, below = row(x, 0), rows(x, 1)
    if not typeof(below).shape[0]:
        return full(1, x), full(0, alpha), alpha
    none = eq(lengths(below, 0), full(0, alpha))
    size = lengths(x, 0)
    beta = select(none, alpha, select(lt(alpha, full(0, alpha)), size, neg(size)))
    safe = select(none, full(1, beta), beta)
    tau = select(none, full(0, alpha), div(sub(safe, alpha), safe))
    ratio = select(none, full(1, alpha), sub(alpha, beta))
    below = select(broadcast_in_dim(none, typeof(below).shape, (1,)), full(0, below),
                   divided(below, ratio))  # fmt: skip
    return joined([full(1, as_row(alpha)), below], 0), tau, beta
