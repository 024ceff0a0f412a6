"""Eigenvalues and singular values by Jacobi's rotations, half as many at once as there are columns.

A sweep goes through all pairs of columns, in turns in which each column has one partner (Golub &
Van Loan, section 8.5). Column i becomes `c[i] * column i + s[i] * its partner`. Sweeps end when
what they would remove is below the last bit; the host reads that once a sweep.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.compile.definitions.stacks import (
    all_finite,
    as_dtype,
    both,
    flat,
    full,
    lengths,
    like_leading,
    nan_unless,
    outer,
    places,
    spread,
    zero_unless,
)
from spmd.compile.definitions.table import defines
from spmd.core.aval import typeof
from spmd.core.structural import broadcast_in_dim, reduce_sum, reshape
from spmd.lax.arithmetic import abs as absolute
from spmd.lax.arithmetic import add, div, mul, neg, sign, sqrt, square, sub
from spmd.lax.array import broadcasted_iota
from spmd.lax.control_scan import scan
from spmd.lax.control_while import while_loop
from spmd.lax.linalg.family import (
    adjoint,
    conjugate,
    diagonal,
    eye_like,
    hermitian_from,
    matmul,
    on_diagonal,
    real_part,
)
from spmd.lax.linalg.qr import qr_p
from spmd.lax.logic import bitwise_and, bitwise_not, eq, gt, lt, select
from spmd.lax.reduce import reduce_max, reduce_or
from spmd.lax.slicing import pad, slice_in_dim
from spmd.lax.sort import sort, take_along

MOST_SWEEPS = 30


def partners(n: int) -> np.ndarray:
    """For each turn of a sweep the partner of each of n columns, n even: a round robin."""
    turns = []
    ring = list(range(1, n))
    for _ in range(n - 1):
        players = [0, *ring]
        partner = np.empty(n, np.int32)
        for one, other in zip(players[: n // 2], reversed(players[n // 2 :]), strict=True):
            partner[one], partner[other] = other, one
        turns.append(partner)
        ring = [ring[-1], *ring[:-1]]
    return np.array(turns)


def rotation(own: Any, other: Any, product: Any, partner: Any) -> tuple[Any, Any]:
    """The c (real) and s of each column, from its square, its partner's, and their product.

    `product` is that of the partner's adjoint and the column: column i of `A` is turned so that
    element (partner, i) of `adjoint(A) @ A` becomes zero.
    """
    place = broadcasted_iota(np.int32, typeof(product).shape, 1)
    after = gt(place, spread(partner, place, (1,)))
    # Both of a pair must take the very same one, or their rotation is not unitary.
    product = select(after, product, conjugate(take(product, partner, 1)))
    size = absolute(product)
    none = eq(size, full(0, size))
    safe = select(none, full(1, size), size)
    ratio = div(sub(own, other), mul(full(2, size), safe))
    tied = select(after, full(1, size), full(-1, size))
    way = select(eq(ratio, full(0, ratio)), tied, sign(ratio))
    height = absolute(ratio)
    tangent = div(way, add(height, sqrt(add(full(1, ratio), square(height)))))
    tangent = select(none, full(0, tangent), tangent)
    cosine = div(full(1, tangent), sqrt(add(full(1, tangent), square(tangent))))
    dtype = typeof(product).dtype
    phase = div(product, as_dtype(safe, dtype))
    return cosine, mul(as_dtype(mul(tangent, cosine), dtype), phase)


def turned(a: Any, cosine: Any, sine: Any, partner: Any) -> Any:
    """Matrices with their columns turned."""
    other = take(a, partner, 2)
    dtype = typeof(a).dtype
    return add(
        mul(a, spread(as_dtype(cosine, dtype), a, (0, 2))), mul(other, spread(sine, a, (0, 2)))
    )


def take(x: Any, partner: Any, dim: int) -> Any:
    """A stack whose places along a dim are those of the partners."""
    shape = list(typeof(x).shape)
    spot = broadcast_in_dim(partner, tuple(shape), (dim,))
    return take_along(x, spot, dim)


def _pair_products(a: Any, partner: Any) -> Any:
    """Elements (partner of i, i) of square matrices, as vectors."""
    row = spread(partner, places(a, 1), (2,))
    return reduce_sum(zero_unless(eq(places(a, 1), row), a), (1,))


def _even(a: Any) -> Any:
    """Square matrices with a row and a column of zeros more, if they have an odd number."""
    more = typeof(a).shape[-1] % 2
    side = (0, more, 0)
    return pad(a, np.zeros((), typeof(a).dtype), [(0, 0, 0), side, side])


def _sweeps(carry: Any, turn: Any, remains: Any, size: int) -> Any:
    """Sweeps of turns while `remains` says of their carry that there is something to remove."""
    if size < 2:
        return carry
    table = partners(size)

    def body(state: Any) -> Any:
        count, carry = state
        carry, _ = scan(lambda carry, partner: (turn(carry, partner), None), carry, table)
        return add(count, np.int32(1)), carry

    def unfinished(state: Any) -> Any:
        return bitwise_and(lt(state[0], np.int32(MOST_SWEEPS)), remains(state[1]))

    return while_loop(unfinished, body, (np.int32(0), carry))[1]


def _scaled(a: Any) -> tuple[Any, Any]:
    """Matrices whose largest element is one, and the factor; NaN if one is not finite."""
    a = nan_unless(all_finite(a), a)
    most = reduce_max(absolute(a), (1, 2))
    factor = select(gt(most, full(0, most)), most, full(1, most))
    return div(a, spread(as_dtype(factor, typeof(a).dtype), a, (0,))), factor


# ---- eigh --------------------------------------------------------------------------------------


@defines("eigh")
def eigh(x: Any, *, lower: bool) -> list[Any]:
    """Rotations from both sides, until the matrix is diagonal."""
    given = flat(x)
    n, dtype = typeof(given).shape[-1], typeof(given).dtype
    small, factor = _scaled(hermitian_from(given, lower))
    a = _even(small)
    epsilon = np.finfo(dtype).eps / 4

    def turn(carry: Any, partner: Any) -> Any:
        a, vectors = carry
        own = real_part(diagonal(a))
        products = _pair_products(a, partner)
        cosine, sine = rotation(own, take(own, partner, 1), products, partner)
        half = turned(a, cosine, sine, partner)
        whole = adjoint(turned(adjoint(half), cosine, sine, partner))
        paired = eq(places(a, 1), spread(partner, places(a, 1), (2,)))
        whole = select(paired, full(0, whole), whole)
        straight = as_dtype(real_part(whole), dtype)
        whole = select(on_diagonal(whole), straight, whole)
        return whole, turned(vectors, cosine, sine, partner)

    def remains(carry: Any) -> Any:
        size = absolute(carry[0])
        rest = _norms(select(on_diagonal(size), full(0, size), size))
        return reduce_or(gt(rest, mul(_norms(size), full(epsilon, rest))), (0,))

    a, vectors = _sweeps((a, eye_like(a)), turn, remains, typeof(a).shape[-1])
    values = slice_in_dim(real_part(diagonal(a)), 0, n, axis=1)
    vectors = slice_in_dim(slice_in_dim(vectors, 0, n, axis=1), 0, n, axis=2)
    # Of a NaN matrix no rotation was made.
    values = nan_unless(all_finite(small), mul(values, spread(factor, values, (0,))))
    vectors = nan_unless(all_finite(small), vectors)
    order = broadcasted_iota(np.int32, typeof(values).shape, 1)
    values, order = sort((values, order), 1, num_keys=1)
    vectors = take_along(vectors, spread(order, vectors, (0, 2)), 2)
    return [like_leading(vectors, x), like_leading(values, x)]


def _norms(a: Any) -> Any:
    b, m, n = typeof(a).shape
    return lengths(reshape(a, (b, m * n)), 1)


# ---- svd ---------------------------------------------------------------------------------------


@defines("svd")
def svd(x: Any, *, full_matrices: bool, compute_uv: bool) -> list[Any]:
    """One-sided rotations of the adjoint of R, for `x == Q @ R`, until its columns are orthogonal.

    With `adjoint(R) @ V == W` and `W == U * s`, `x` is `(Q @ V) * s @ adjoint(U)`. U and s are QR
    factors of W, so that U is unitary where singular values are zero, too.
    """
    given = flat(x)
    _, m, n = typeof(given).shape
    if m < n:
        outs = svd(adjoint(given), full_matrices=full_matrices, compute_uv=compute_uv)
        if not compute_uv:
            return [like_leading(outs[0], x)]
        u, s, vh = outs
        return [like_leading(y, x) for y in (adjoint(vh), s, adjoint(u))]
    small, factor = _scaled(given)
    dtype, good = typeof(small).dtype, all_finite(small)
    q, r = qr_p.bind(small, pivoting=False, full_matrices=full_matrices)
    a = _even(adjoint(slice_in_dim(r, 0, n, axis=1)))
    epsilon = np.finfo(dtype).eps * n

    def products(a: Any, partner: Any) -> tuple[Any, Any, Any]:
        own = reduce_sum(square(absolute(a)), (1,))
        product = reduce_sum(mul(conjugate(take(a, partner, 2)), a), (1,))
        return own, take(own, partner, 1), product

    def turn(carry: Any, partner: Any) -> Any:
        a, vectors = carry
        turns = rotation(*products(a, partner), partner)
        return turned(a, *turns, partner), turned(vectors, *turns, partner)

    def remains(carry: Any) -> Any:
        gram = absolute(matmul(adjoint(carry[0]), carry[0]))
        squares = sqrt(diagonal(gram))
        limit = mul(outer(squares, squares), full(epsilon, gram))
        rest = both(gt(gram, limit), bitwise_not(on_diagonal(gram)))
        return reduce_or(rest, (0, 1, 2))

    a, vectors = _sweeps((a, eye_like(a)), turn, remains, typeof(a).shape[-1])
    a = slice_in_dim(slice_in_dim(a, 0, n, axis=1), 0, n, axis=2)
    vectors = slice_in_dim(slice_in_dim(vectors, 0, n, axis=1), 0, n, axis=2)
    values = lengths(a, 1)
    order = broadcasted_iota(np.int32, typeof(values).shape, 1)
    values, order = sort((neg(values), order), 1, num_keys=1)
    values = nan_unless(good, mul(neg(values), spread(factor, values, (0,))))
    if not compute_uv:
        return [like_leading(values, x)]
    columns = spread(order, a, (0, 2))
    unitary, triangle = qr_p.bind(take_along(a, columns, 2), pivoting=False, full_matrices=True)
    ends = diagonal(triangle)
    flips = select(lt(real_part(ends), full(0, real_part(ends))), full(-1, ends), full(1, ends))
    right = adjoint(mul(unitary, spread(flips, unitary, (0, 2))))
    left = take_along(vectors, columns, 2)
    if full_matrices and m > n:
        rest = eye_like(slice_in_dim(slice_in_dim(q, 0, m - n, axis=1), 0, m - n, axis=2))
        zero = np.zeros((), dtype)
        left = pad(left, zero, [(0, 0, 0), (0, m - n, 0), (0, m - n, 0)])
        left = add(left, pad(rest, zero, [(0, 0, 0), (n, 0, 0), (n, 0, 0)]))
    left = nan_unless(good, matmul(q, left))
    right = nan_unless(good, right)
    return [like_leading(left, x), like_leading(values, x), like_leading(right, x)]
