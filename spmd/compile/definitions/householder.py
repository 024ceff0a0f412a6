"""Factors made of Householder's reflections `I - tau v adjoint(v)`, one a column."""

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
    lengths,
    like_leading,
    outer,
    pick,
    places,
    spread,
    swapped,
    zero_unless,
)
from spmd.compile.definitions.table import defines
from spmd.core.aval import typeof
from spmd.core.structural import permute_dims, reduce_sum
from spmd.lax.arithmetic import add, div, imag, mul, neg, sub
from spmd.lax.array import broadcasted_iota, rev
from spmd.lax.control_scan import scan
from spmd.lax.linalg.family import (
    conjugate,
    diagonal,
    eye_like,
    hermitian_from,
    lower_part,
    real_part,
    upper_part,
)
from spmd.lax.linalg.qr import geqrf_p, householder_product_p
from spmd.lax.linalg.schur import hessenberg_p, tridiagonal_p
from spmd.lax.logic import eq, ge, gt, lt, select
from spmd.lax.reduce import argmax
from spmd.lax.slicing import pad, slice_in_dim


def reflection(column: Any, k: Any) -> tuple[Any, Any, Any]:
    """The reflection that takes a column from place k on to a multiple of e_k: v, tau, beta.

    `adjoint(I - tau v adjoint(v)) @ x == beta e_k` with real beta, as LAPACK's larfg has it; v is
    one at k and zero before.
    """
    place, dtype = places(column, 1), typeof(column).dtype
    alpha = at(column, k, 1)
    rest = lengths(zero_unless(gt(place, k), column), 1)
    size = lengths(zero_unless(ge(place, k), column), 1)
    real = real_part(alpha)
    none = eq(rest, full(0, rest))
    if dtypes.is_complex(dtype):
        other = imag(alpha)
        none = both(none, eq(other, full(0, other)))
    beta = select(none, real, select(lt(real, full(0, real)), size, neg(size)))
    safe = as_dtype(select(none, full(1, beta), beta), dtype)
    tau = select(none, full(0, alpha), div(sub(safe, alpha), safe))
    ratio = select(none, full(1, alpha), sub(alpha, as_dtype(beta, dtype)))
    v = zero_unless(gt(place, k), div(column, spread(ratio, column, (0,))))
    v = select(spread(none, v, (0,)), full(0, v), v)
    return select(eq(place, k), full(1, v), v), tau, as_dtype(beta, dtype)


def reflect(a: Any, v: Any, tau: Any) -> Any:
    """The product of `I - tau v adjoint(v)` and matrices."""
    shares = reduce_sum(mul(spread(conjugate(v), a, (0, 1)), a), (1,))
    return sub(a, outer(mul(spread(tau, v, (0,)), v), shares))


def reflect_right(a: Any, v: Any, tau: Any) -> Any:
    """The product of matrices and `I - tau v adjoint(v)`."""
    shares = reduce_sum(mul(a, spread(v, a, (0, 2))), (2,))
    return sub(a, outer(mul(spread(tau, shares, (0,)), shares), conjugate(v)))


def packed_column(a: Any, v: Any, beta: Any, row: Any, column: Any) -> Any:
    """Matrices with beta at a place, and what v has below it."""
    rows, here = places(a, 1), eq(places(a, 2), column)
    a = select(both(here, eq(rows, row)), spread(beta, a, (0,)), a)
    return select(both(here, gt(rows, row)), spread(v, a, (0, 1)), a)


def packed_vector(a: Any, k: Any) -> Any:
    """Reflection k of packed matrices: one at k, zero before."""
    v = at(a, k, 2)
    place = places(v, 1)
    return select(eq(place, k), full(1, v), zero_unless(gt(place, k), v))


def _taus(taus: Any) -> Any:
    return permute_dims(taus, (1, 0))


# ---- QR ----------------------------------------------------------------------------------------


@defines("geqrf")
def geqrf(x: Any) -> list[Any]:
    """R above the vectors of the reflections, and the taus."""
    a = flat(x)
    columns, count = places(a, 2), min(typeof(a).shape[1:])

    def step(a: Any, k: Any) -> Any:
        v, tau, beta = reflection(at(a, k, 2), k)
        a = select(gt(columns, k), reflect(a, v, conjugate(tau)), a)
        return packed_column(a, v, beta, k, k), tau

    a, taus = scan(step, a, np.arange(count, dtype=np.int32))
    return [like_leading(a, x), like_leading(_taus(taus), x)]


def _pivoted(a: Any) -> tuple[Any, Any, Any]:
    """`geqrf` of the column of largest norm left, each time; and where the columns were."""
    b, m, n = typeof(a).shape
    rows, columns = places(a, 1), places(a, 2)
    order = broadcasted_iota(np.int32, (b, n), 1)

    def step(carry: Any, k: Any) -> Any:
        a, moved = carry
        left = lengths(zero_unless(ge(rows, k), a), 1)
        done = lt(order, k)
        chosen = argmax(select(done, full(-1, left), left), 1, np.int32)
        here = eq(order, spread(chosen, order, (0,)))
        column, own = pick(swapped(a), chosen), at(a, k, 2)
        a = select(spread(here, a, (0, 2)), spread(own, a, (0, 1)), a)
        a = select(eq(columns, k), spread(column, a, (0, 1)), a)
        last = pick(moved, chosen)
        moved = select(here, spread(at(moved, k, 1), moved, (0,)), moved)
        moved = select(eq(order, k), spread(last, moved, (0,)), moved)
        v, tau, beta = reflection(column, k)
        a = select(gt(columns, k), reflect(a, v, conjugate(tau)), a)
        return (packed_column(a, v, beta, k, k), moved), tau

    (a, order), taus = scan(step, (a, order), np.arange(min(m, n), dtype=np.int32))
    return a, _taus(taus), order


@defines("qr")
def qr(x: Any, *, pivoting: bool, full_matrices: bool) -> list[Any]:
    """The reflections, and their product."""
    a = flat(x)
    _, m, n = typeof(a).shape
    size = m if full_matrices else min(m, n)
    order: list[Any] = []
    if pivoting:
        a, taus, place = _pivoted(a)
        order.append(like_leading(place, x))
    else:
        a, taus = geqrf_p.bind(a)
    first = slice_in_dim(a, 0, min(size, n), axis=2)
    zero = np.zeros((), typeof(a).dtype)
    first = pad(first, zero, [(0, 0, 0), (0, 0, 0), (0, max(size - n, 0), 0)])
    q = householder_product_p.bind(first, taus)
    r = upper_part(slice_in_dim(a, 0, size, axis=1))
    return [like_leading(q, x), like_leading(r, x), *order]


@defines("householder_product")
def householder_product(a: Any, taus: Any) -> Any:
    """From the last reflection to the first, so that each changes few columns."""
    packed, by_column = flat(a), _taus(flat(taus, 1))

    def step(out: Any, given: Any) -> Any:
        k, tau = given
        return reflect(out, packed_vector(packed, k), tau), None

    count = np.arange(typeof(by_column).shape[0], dtype=np.int32)
    out, _ = scan(step, eye_like(packed), (count, by_column), reverse=True)
    return like_leading(out, a)


@defines("ormqr")
def ormqr(a: Any, taus: Any, c: Any, *, left: bool, transpose: bool) -> Any:
    """The reflections act on c, one after the other."""
    packed, by_column, out = flat(a), _taus(flat(taus, 1)), flat(c)
    by_column = conjugate(by_column) if transpose else by_column

    def step(out: Any, given: Any) -> Any:
        k, tau = given
        v = packed_vector(packed, k)
        return (reflect if left else reflect_right)(out, v, tau), None

    # Q = H0 H1 ...: from the left the last acts first, from the right and transposed the first.
    count = np.arange(typeof(by_column).shape[0], dtype=np.int32)
    out, _ = scan(step, out, (count, by_column), reverse=left != transpose)
    return like_leading(out, c)


# ---- forms of the same eigenvalues -------------------------------------------------------------


@defines("hessenberg")
def hessenberg(a: Any) -> list[Any]:
    """Reflections from both sides, which leave one diagonal below the main one."""
    out = flat(a)
    n = typeof(out).shape[-1]
    columns = places(out, 2)

    def step(out: Any, k: Any) -> Any:
        below = add(k, np.int32(1))
        v, tau, beta = reflection(at(out, k, 2), below)
        behind = gt(columns, k)
        out = select(behind, reflect(out, v, conjugate(tau)), out)
        out = select(behind, reflect_right(out, v, tau), out)
        return packed_column(out, v, beta, below, k), tau

    out, taus = scan(step, out, np.arange(n - 1, dtype=np.int32))
    return [like_leading(out, a), like_leading(_taus(taus), a)]


@defines("tridiagonal")
def tridiagonal(a: Any, *, lower: bool) -> list[Any]:
    """Hessenberg's form of a Hermitian matrix."""
    given = flat(a)
    if not lower:
        # sytrd of the upper triangle goes from the last column to the first.
        packed, *vectors = tridiagonal_p.bind(rev(given, (1, 2)), lower=True)
        flipped = [rev(packed, (1, 2)), *(rev(v, (1,)) for v in vectors)]
        return [like_leading(y, a) for y in flipped]
    packed, taus = hessenberg_p.bind(hermitian_from(given, lower=True))
    n = typeof(given).shape[-1]
    below = slice_in_dim(slice_in_dim(packed, 1, n, axis=1), 0, n - 1, axis=2)
    vectors = [real_part(diagonal(packed)), real_part(diagonal(below)), taus]
    packed = add(lower_part(packed), upper_part(given, strict=True))
    return [like_leading(y, a) for y in (packed, *vectors)]
