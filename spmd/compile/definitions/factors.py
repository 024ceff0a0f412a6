"""Cholesky and LU factors, triangular systems, and what is made of them: column by column."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.compile.definitions.stacks import (
    as_dtype,
    at,
    both,
    flat,
    full,
    like_leading,
    loop,
    nan_unless,
    outer,
    pick,
    places,
    spread,
    swapped,
    zero_unless,
)
from spmd.compile.definitions.table import defines
from spmd.core.aval import typeof
from spmd.core.structural import broadcast_in_dim, permute_dims
from spmd.lax.arithmetic import abs as absolute
from spmd.lax.arithmetic import add, div, imag, mul, sqrt, sub
from spmd.lax.array import broadcasted_iota
from spmd.lax.concatenate import concatenate
from spmd.lax.control_scan import scan
from spmd.lax.linalg.family import conjugate, diagonal, lower_part, real_part, take_rows
from spmd.lax.linalg.lu import lu_p
from spmd.lax.linalg.triangular import triangular_solve_p
from spmd.lax.logic import eq, ge, gt, lt, ne, select
from spmd.lax.reduce import argmax, reduce_and
from spmd.lax.slicing import slice_in_dim

# ---- Cholesky ----------------------------------------------------------------------------------


@defines("cholesky")
def cholesky(x: Any) -> Any:
    """Each column scales itself, and takes its outer product off the columns behind it."""
    a = flat(x)
    dtype = typeof(a).dtype
    rows, columns = places(a, 1), places(a, 2)

    def step(k: Any, a: Any) -> Any:
        column = at(a, k, 2)
        pivot = sqrt(real_part(at(column, k, 1)))
        place = places(column, 1)
        scaled = div(column, as_dtype(spread(pivot, column, (0,)), dtype))
        scaled = select(eq(place, k), as_dtype(spread(pivot, column, (0,)), dtype), scaled)
        left = select(gt(columns, k), sub(a, outer(scaled, conjugate(scaled))), a)
        return select(both(eq(columns, k), ge(rows, k)), spread(scaled, a, (0, 1)), left)

    found = loop(typeof(a).shape[-1], step, a)
    pivots = real_part(diagonal(found))
    good = reduce_and(gt(pivots, full(0, pivots)), (1,))
    return like_leading(lower_part(nan_unless(good, found)), x)


@defines("cholesky_update")
def cholesky_update(r_matrix: Any, w_vector: Any) -> Any:
    """One Givens rotation a row brings w into R."""
    r, w = flat(r_matrix), flat(w_vector, 1)
    r = zero_unless(ge(places(r, 2), places(r, 1)), r)
    rows = places(r, 1)

    def step(k: Any, carry: Any) -> Any:
        r, w = carry
        row = at(r, k, 1)
        high, low = at(row, k, 1), at(w, k, 1)
        size, other = absolute(high), absolute(low)
        most = select(gt(size, other), size, other)
        none = eq(most, full(0, most))
        safe = select(none, full(1, most), most)
        high, low = div(high, safe), div(low, safe)
        length = sqrt(add(mul(high, high), mul(low, low)))
        length = select(none, full(1, length), length)
        c = spread(select(none, full(1, high), div(high, length)), w, (0,))
        s = spread(div(low, length), w, (0,))
        behind = ge(places(w, 1), k)
        turned = select(behind, add(mul(c, row), mul(s, w)), row)
        w = select(behind, sub(mul(c, w), mul(s, row)), w)
        return select(eq(rows, k), spread(turned, r, (0, 2)), r), w

    found, _ = loop(typeof(r).shape[-1], step, (r, w))
    return like_leading(found, r_matrix)


# ---- triangular systems ------------------------------------------------------------------------


@defines("triangular_solve")
def triangular_solve(
    a: Any,
    b: Any,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    conjugate_a: bool,
    unit_diagonal: bool,
) -> Any:
    """Substitution: each row that is solved leaves the rows behind it (or before it)."""
    matrix, x = flat(a), flat(b)
    if conjugate_a:
        matrix = conjugate(matrix)
    # x op(a) = b is op(a)^T x^T = b^T.
    if transpose_a == left_side:
        matrix, lower = swapped(matrix), not lower
    x = x if left_side else swapped(x)
    rows = places(x, 1)

    def step(k: Any, x: Any) -> Any:
        column, row = at(matrix, k, 2), at(x, k, 1)
        if not unit_diagonal:
            row = div(row, spread(at(column, k, 1), row, (0,)))
        left = gt(rows, k) if lower else lt(rows, k)
        x = select(left, sub(x, outer(column, row)), x)
        return select(eq(rows, k), spread(row, x, (0, 2)), x)

    x = loop(typeof(x).shape[1], step, x, reverse=not lower)
    return like_leading(x if left_side else swapped(x), b)


# ---- LU ----------------------------------------------------------------------------------------


@defines("lu")
def lu(x: Any) -> list[Any]:
    """Gaussian elimination with exchanges of rows, as LAPACK's getf2."""
    a = flat(x)
    b, m, n = typeof(a).shape
    rows, columns = places(a, 1), places(a, 2)
    order = broadcasted_iota(np.int32, (b, m), 1)

    def step(carry: Any, k: Any) -> Any:
        a, order = carry
        column, place = at(a, k, 2), order_like
        # As LAPACK's iamax: |re| + |im|, the first of equals; NaN is never larger.
        size = absolute(real_part(column))
        if dtypes.is_complex(typeof(a).dtype):
            size = add(size, absolute(imag(column)))
        size = select(ne(size, size), full(-1, size), size)
        size = select(lt(place, k), full(-2, size), size)
        chosen = argmax(size, 1, np.int32)
        own, pivot_row = at(a, k, 1), pick(a, chosen)
        pivot, here = pick(column, chosen), spread(chosen, place, (0,))
        column = select(eq(place, here), spread(at(column, k, 1), column, (0,)), column)
        safe = select(eq(pivot, full(0, pivot)), full(1, pivot), pivot)
        factors = div(column, spread(safe, column, (0,)))
        taken = select(eq(rows, spread(chosen, rows, (0,))), spread(own, a, (0, 2)), a)
        taken = select(eq(rows, k), spread(pivot_row, a, (0, 2)), taken)
        below, reduced = gt(rows, k), sub(taken, outer(factors, pivot_row))
        taken = select(both(below, gt(columns, k)), reduced, taken)
        taken = select(both(below, eq(columns, k)), spread(factors, a, (0, 1)), taken)
        last = spread(at(order, k, 1), order, (0,))
        moved = select(eq(place, here), last, order)
        moved = select(eq(place, k), spread(pick(order, chosen), order, (0,)), moved)
        return (taken, moved), chosen

    order_like = order
    (a, order), pivots = scan(step, (a, order), np.arange(min(m, n), dtype=np.int32))
    pivots = permute_dims(pivots, (1, 0))
    return [like_leading(a, x), like_leading(pivots, x), like_leading(order, x)]


@defines("lu_pivots_to_permutation")
def lu_pivots_to_permutation(pivots: Any, *, permutation_size: int) -> Any:
    """The exchanges, one after the other."""
    exchanges = flat(pivots, 1)
    b, count = typeof(exchanges).shape
    place = broadcasted_iota(np.int32, (b, permutation_size), 1)

    def step(k: Any, order: Any) -> Any:
        chosen = at(exchanges, k, 1)
        own, other = at(order, k, 1), pick(order, chosen)
        moved = select(eq(place, spread(chosen, place, (0,))), spread(own, order, (0,)), order)
        return select(eq(place, k), spread(other, order, (0,)), moved)

    return like_leading(loop(count, step, place), pivots, 1)


@defines("solve")
def solve(a: Any, b: Any) -> Any:
    """By LU factors; NaN for singular matrices."""
    factors, _, order = lu_p.bind(flat(a))
    how = {"left_side": True, "transpose_a": False, "conjugate_a": False}
    x = take_rows(flat(b), order)
    x = triangular_solve_p.bind(factors, x, lower=True, unit_diagonal=True, **how)
    x = triangular_solve_p.bind(factors, x, lower=False, unit_diagonal=False, **how)
    pivots = diagonal(factors)
    good = reduce_and(ne(pivots, full(0, pivots)), (1,))
    return like_leading(nan_unless(good, x), b)


@defines("tridiagonal_solve")
def tridiagonal_solve(dl: Any, d: Any, du: Any, b: Any) -> Any:
    """Gaussian elimination that exchanges neighbouring rows, as LAPACK's gtsv.

    The loops run over the rows: what is left of a row is the carry, and what the second one reads
    of it is stacked.
    """
    low, middle, high = (permute_dims(flat(v, 1), (1, 0)) for v in (dl, d, du))
    x = permute_dims(flat(b), (1, 0, 2))  # (n, stack, right-hand sides)
    n = typeof(x).shape[0]
    last = eq(broadcasted_iota(np.int32, typeof(high).shape, 0), np.int32(n - 1))
    high = select(last, full(0, high), high)

    def down(carry: Any, row: Any) -> Any:
        own, above, rest = carry
        low, middle, high, right = row
        swap = gt(absolute(low), absolute(own))
        zero = full(0, own)
        top = select(swap, low, own), select(swap, middle, above), select(swap, high, zero)
        first, second = select(swap, own, low), select(swap, above, middle)
        factor = select(eq(first, zero), zero, div(first, top[0]))
        wide = broadcast_in_dim(swap, typeof(rest).shape, (0,))
        done, left = select(wide, right, rest), select(wide, rest, right)
        left = sub(left, mul(spread(factor, left, (0,)), done))
        third = sub(select(swap, zero, high), mul(factor, top[2]))
        return (sub(second, mul(factor, top[1])), third, left), (*top, done)

    begin = tuple(at(v, np.int32(0), 0) for v in (middle, high, x))
    behind = [_from_second(v) for v in (low, middle, high, x)]
    (own, _, rest), tops = scan(down, begin, tuple(behind))

    def up(carry: Any, row: Any) -> Any:
        one, two = carry
        middle, high, beyond, right = row
        for factor, known in ((high, one), (beyond, two)):
            right = sub(right, mul(spread(factor, right, (0,)), known))
        found = div(right, spread(middle, right, (0,)))
        return (found, one), found

    nothing = full(0, rest)
    end = div(rest, spread(own, rest, (0,)))
    _, found = scan(up, (end, nothing), tops, reverse=True)
    return like_leading(permute_dims(_with_last(found, end), (1, 0, 2)), b)


def _from_second(x: Any) -> Any:
    from_second = typeof(x).shape[0] - 1
    return slice_in_dim(x, 1, 1 + from_second, axis=0)


def _with_last(x: Any, last: Any) -> Any:
    return concatenate([x, broadcast_in_dim(last, (1, *typeof(last).shape), (1, 2))], 0)
