"""LU factors with partial pivoting, permutations from pivots, and systems of equations."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.errors import DtypeError, ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.jvp import zero_tangent
from spmd.core.primitive import Refused, Zero
from spmd.core.structural import add_any, is_linear
from spmd.lax.arithmetic import add, neg
from spmd.lax.families import check_same_dtype, fail
from spmd.lax.linalg.family import (
    check_matrices,
    eye_like,
    lapack,
    lower_part,
    matmul,
    not_linear,
    stacked,
    swapped,
    take_rows,
    upper_part,
)
from spmd.lax.linalg.lapack import lu_factors
from spmd.lax.linalg.triangular import forward_substitution, triangular_solve
from spmd.lax.slicing import pad, slice

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# Columns factored one by one before the rest is a matrix product.
_BLOCK = 32
# Rows are exchanged matrix by matrix in stacks of fewer than this, all at once in larger ones.
_FEW = 32

# ---- lu ----------------------------------------------------------------------------------------


def lu(x: Any) -> tuple[Array, Array, Array]:
    """Compute LU factors with partial pivoting: the factors, pivots and permutation.

    For `x` of shape (..., m, n), of a float or complex dtype, and k = min(m, n): the factors (...,
    m, n), with L below the diagonal (its own diagonal is one) and U on and above; the int32 pivots
    (..., k), by which row i was exchanged with row pivots[i]; and the int32 permutation (..., m),
    so that `x[permutation] == L @ U`. Raises `ShapeError` for less than two dims, and `DtypeError`
    for integers, booleans and 16-bit floats.

    >>> lax.linalg.lu(np.array([[1.0, 2.0], [4.0, 4.0]]))
    (Array([[4.  , 4.  ],
           [0.25, 1.  ]], dtype=float32), Array([1, 1], dtype=int32), Array([1, 0], dtype=int32))
    """
    factors, pivots, permutation = lu_p.bind(x)
    return factors, pivots, permutation


def _lu_abstract(x: ShapedArray) -> list[ShapedArray]:
    leading, m, n = check_matrices("lu", x)
    small = ShapedArray((*leading, min(m, n)), np.int32)
    return [x.strip_weak(), small, ShapedArray((*leading, m), np.int32)]


def _lu_impl(xp: Any, x: Any) -> list[Any]:
    *leading, m, n = x.shape
    a = np.array(x, order="C").reshape((math.prod(leading), m, n))
    pivots = np.zeros((a.shape[0], min(m, n)), np.int32)
    if not lu_factors(a, pivots):
        _eliminate(a, pivots)
    permutation = _permutation(pivots, m)
    shapes = ((*leading, m, n), (*leading, min(m, n)), (*leading, m))
    outs = (a, pivots, permutation)
    return [y.reshape(shape) for y, shape in zip(outs, shapes, strict=True)]


def _eliminate(a: Any, pivots: Any) -> None:
    """Gaussian elimination of a stack in place, by blocks of columns."""
    m, n = a.shape[1:]
    with np.errstate(all="ignore"):
        for start in range(0, min(m, n), _BLOCK):
            stop = min(start + _BLOCK, m, n)
            _factor_columns(a, pivots, start, stop)
            if stop < n:
                head = a[:, start:stop, start:stop]
                a[:, start:stop, stop:] = forward_substitution(head, a[:, start:stop, stop:], True)
                a[:, stop:, stop:] -= a[:, stop:, start:stop] @ a[:, start:stop, stop:]


def _factor_columns(a: Any, pivots: Any, start: int, stop: int) -> None:
    """Gaussian elimination of some columns, exchanging whole rows (LAPACK's getf2)."""
    every = np.arange(a.shape[0])
    for k in range(start, stop):
        column = a[:, k:, k]
        # As LAPACK's iamax: |re| + |im|, the first of equals; NaN is never larger.
        size = np.abs(column.real) + np.abs(column.imag)
        row = k + np.argmax(np.where(np.isnan(size), -1, size), axis=1)
        pivots[:, k] = row
        swap = a[every, row].copy()
        a[every, row] = a[:, k]
        a[:, k] = swap
        pivot = a[:, k, k, None]
        a[:, k + 1 :, k] /= np.where(pivot == 0, 1, pivot)
        a[:, k + 1 :, k + 1 : stop] -= a[:, k + 1 :, k, None] * a[:, k, None, k + 1 : stop]


def _lu_jvp(primals: Any, tangents: Any) -> Any:
    """With M = inv(L) P dA inv(U): dL = L tril(M, -1), dU = triu(M) U.

    Rectangular factors are made square by a unit block, which keeps the formula (as in the
    appendix of Murray, arXiv 1602.07527, for its blocked form).
    """
    (x,), (dx,) = primals, tangents
    factors, pivots, permutation = lu_p.bind(x)
    lower, upper = _square_factors(factors)
    inner = triangular_solve(
        lower, take_rows(dx, permutation), left_side=True, lower=True, unit_diagonal=True
    )
    inner = triangular_solve(upper, inner, left_side=False, lower=False)
    change = add(matmul(lower, lower_part(inner, strict=True)), matmul(upper_part(inner), upper))
    zeros = [zero_tangent(pivots), zero_tangent(permutation)]
    return [factors, pivots, permutation], [change, *zeros]


def _square_factors(factors: Any) -> tuple[Any, Any]:
    """L (m, m) and U (n, n), with a unit block where the factors have no columns or rows."""
    *leading, m, n = typeof(factors).shape
    k, zero = min(m, n), np.zeros((), typeof(factors).dtype)
    none = [(0, 0, 0)] * len(leading)
    limits = tuple(leading)
    starts = (0,) * (len(leading) + 2)
    left = pad(slice(factors, starts, (*limits, m, k)), zero, [*none, (0, 0, 0), (0, m - k, 0)])
    right = pad(slice(factors, starts, (*limits, k, n)), zero, [*none, (0, n - k, 0), (0, 0, 0)])
    lower = add(lower_part(left, strict=True), eye_like(left))
    if n > k:
        ones = [*none, (k, 0, 0), (k, 0, 0)]
        corner = slice(right, starts, (*limits, n - k, n - k))
        return lower, add(upper_part(right), pad(eye_like(corner), zero, ones))
    return lower, upper_part(right)


lu_p = stacked(
    "lu",
    abstract=_lu_abstract,
    impl=_lu_impl,
    jvp=_lu_jvp,
    transpose=not_linear("lu"),
    cores=(2,),
    multiple=True,
)

# ---- lu_pivots_to_permutation ------------------------------------------------------------------


def lu_pivots_to_permutation(pivots: Any, permutation_size: int) -> Array:
    """Compute the permutation that the row exchanges of an LU factorization make.

    Row i is exchanged with row `pivots[i]`, for each i in order. `pivots` has shape (..., k) and
    dtype int32; the result is int32 of shape (..., `permutation_size`). Raises `ShapeError` or
    `DtypeError` for other operands.

    >>> lax.linalg.lu_pivots_to_permutation(np.array([1, 1], np.int32), 2)
    Array([1, 0], dtype=int32)
    """
    return lu_pivots_to_permutation_p.bind(pivots, permutation_size=int(permutation_size))


def _permutation_abstract(pivots: ShapedArray, *, permutation_size: int) -> ShapedArray:
    name = "lu_pivots_to_permutation"
    if pivots.dtype != np.int32:
        fail(DtypeError, f"{name}: pivots must be int32, got {pivots}")
    if pivots.ndim < 1 or pivots.shape[-1] > permutation_size:
        fail(
            ShapeError,
            f"{name}: permutation_size={permutation_size} must be at least the number of pivots, "
            f"the last dim of {pivots}",
        )
    return pivots.update(shape=(*pivots.shape[:-1], permutation_size), weak_type=False)


def _exchanged(pivots: list[int], size: int) -> list[int]:
    """The permutation of one matrix."""
    places = list(range(size))
    for k, row in enumerate(pivots):
        places[k], places[row] = places[row], places[k]
    return places


def _permutation(pivots: Any, size: int) -> Any:
    leading = pivots.shape[:-1]
    flat = pivots.reshape((math.prod(leading), pivots.shape[-1]))
    if flat.shape[0] < _FEW:
        return np.array([_exchanged(row, size) for row in flat.tolist()], np.int32).reshape(
            (*leading, size)
        )
    out = np.tile(np.arange(size, dtype=np.int32), (flat.shape[0], 1))
    every = np.arange(flat.shape[0])
    for k in range(flat.shape[1]):
        row = flat[:, k]
        swap = out[every, row].copy()
        out[every, row] = out[:, k]
        out[:, k] = swap
    return out.reshape((*leading, size))


lu_pivots_to_permutation_p = stacked(
    "lu_pivots_to_permutation",
    abstract=_permutation_abstract,
    impl=lambda xp, pivots, *, permutation_size: _permutation(pivots, permutation_size),
    jvp=Refused("is a function of integers, which has no derivative"),
    transpose=not_linear("lu_pivots_to_permutation"),
    cores=(1,),
)

# ---- solve -------------------------------------------------------------------------------------


def solve(a: Any, b: Any) -> Array:
    """Solve `a @ x == b` for square matrices; NaN where they are singular.

    `a` has shape (..., n, n) and `b` (..., n, k), which is also the shape of the result. Both have
    one float or complex dtype. Raises `ShapeError` or `DtypeError` for other operands.

    >>> lax.linalg.solve(np.array([[2.0, 0.0], [0.0, 4.0]]), np.ones((2, 1)))
    Array([[0.5 ],
           [0.25]], dtype=float32)
    """
    return solve_p.bind(a, b)


def _solve_abstract(a: ShapedArray, b: ShapedArray) -> ShapedArray:
    leading, n, _ = check_matrices("solve", a, "a", square=True)
    others, rows, _ = check_matrices("solve", b, "b")
    check_same_dtype("solve", ("a", "b"), (a, b))
    if others != leading or rows != n:
        fail(ShapeError, f"solve: b must be {[*leading, n]} and any columns for a {a}, got {b}")
    return b.strip_weak()


def _solve_jvp(primals: Any, tangents: Any) -> Any:
    """With a x = b: a dx = db - da x (Giles 2008, section 2.3.1)."""
    a, b = primals
    da, db = tangents
    x = solve_p.bind(a, b)
    terms = [] if isinstance(db, Zero) else [db]
    if not isinstance(da, Zero):
        terms.append(neg(matmul(da, x)))
    return x, solve_p.bind(a, functools.reduce(add_any, terms))


def _solve_transpose(ct: Any, a: Any, b: Any) -> Any:
    assert is_linear(b) and not is_linear(a)
    return [None, solve_p.bind(swapped(a), ct)]


solve_p = stacked(
    "solve",
    abstract=_solve_abstract,
    impl=lambda xp, a, b: lapack("solve", np.linalg.solve, a, b),
    jvp=_solve_jvp,
    transpose=_solve_transpose,
    cores=(2, 2),
)
