"""Tridiagonal systems of equations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.primitive import Zero
from spmd.core.structural import is_linear
from spmd.lax.arithmetic import add, mul, sub
from spmd.lax.families import check_same_dtype, fail
from spmd.lax.linalg.family import check_matrices, in_columns, stacked
from spmd.lax.slicing import pad

if TYPE_CHECKING:
    from spmd.sharding.array import Array

_NAMES = ("dl", "d", "du", "b")


def tridiagonal_solve(dl: Any, d: Any, du: Any, b: Any, *, perturb_singular: bool = False) -> Array:
    """Solve `A @ x == b` for A with three diagonals: `d`, `dl` below and `du` above it.

    `dl`, `d` and `du` have shape (..., n), with `dl[i] = A[i, i-1]`, `d[i] = A[i, i]`, `du[i] =
    A[i, i+1]`; `dl[0]` and `du[n-1]` are not read. `b` is (..., n, k), which is also the shape of
    the result. All have one float or complex dtype. Rows are exchanged for stability; a singular
    system gives infinities or NaN. `perturb_singular=True` is not supported: it raises
    `ArgumentError`. Raises `ShapeError` or `DtypeError` for other operands.

    >>> zeros, d = np.zeros(2), np.array([2.0, 4.0])
    >>> lax.linalg.tridiagonal_solve(zeros, d, zeros, np.ones((2, 1)))
    Array([[0.5 ],
           [0.25]], dtype=float32)
    """
    if perturb_singular:
        raise ArgumentError(
            "tridiagonal_solve: perturb_singular=True is not supported; add a small number to d"
        )
    return tridiagonal_solve_p.bind(dl, d, du, b)


def _abstract(dl: ShapedArray, d: ShapedArray, du: ShapedArray, b: ShapedArray) -> ShapedArray:
    leading, n, _ = check_matrices("tridiagonal_solve", b, "b")
    check_same_dtype("tridiagonal_solve", _NAMES, (dl, d, du, b))
    for name, x in zip(_NAMES, (dl, d, du), strict=False):
        if x.shape != (*leading, n):
            fail(
                ShapeError,
                f"tridiagonal_solve: {name} must have shape {(*leading, n)} for b {b}, got {x}",
            )
    return b.strip_weak()


def _impl(xp: Any, dl: Any, d: Any, du: Any, b: Any) -> Any:
    """Gaussian elimination that exchanges neighbouring rows, as LAPACK's gtsv."""
    n = d.shape[-1]
    x = np.array(b, order="C")
    d, du = d.copy(), du.copy()
    if n:
        du[..., -1] = 0  # outside of the matrix: the given element is not read
    beyond = np.zeros_like(d)  # the diagonal above du, from exchanged rows
    with np.errstate(all="ignore"):
        for i in range(n - 1):
            low = dl[..., i + 1]
            swap = np.abs(low) > np.abs(d[..., i])
            top = [np.where(swap, low, d[..., i]), np.where(swap, d[..., i + 1], du[..., i])]
            bottom = [np.where(swap, d[..., i], low), np.where(swap, du[..., i], d[..., i + 1])]
            above = np.where(swap, du[..., i + 1], 0)
            factor = np.where(bottom[0] == 0, 0, bottom[0] / top[0])
            d[..., i], du[..., i], beyond[..., i] = top[0], top[1], above
            d[..., i + 1] = bottom[1] - factor * top[1]
            du[..., i + 1] = np.where(swap, 0, du[..., i + 1]) - factor * above
            swap, factor = swap[..., None], factor[..., None]
            first, second = x[..., i, :].copy(), x[..., i + 1, :].copy()
            x[..., i, :] = np.where(swap, second, first)
            x[..., i + 1, :] = np.where(swap, first, second) - factor * x[..., i, :]
        for i in reversed(range(n)):
            if i + 1 < n:
                x[..., i, :] -= du[..., i, None] * x[..., i + 1, :]
            if i + 2 < n:
                x[..., i, :] -= beyond[..., i, None] * x[..., i + 2, :]
            x[..., i, :] /= d[..., i, None]
    return x


def _multiply(dl: Any, d: Any, du: Any, x: Any) -> Any:
    """A @ x, leaving out diagonals whose tangent is zero."""
    ndim = typeof(x).ndim
    total = None
    for diagonal, by in ((dl, -1), (d, 0), (du, 1)):
        if isinstance(diagonal, Zero):
            continue
        term = mul(in_columns(diagonal, x), _moved(x, by, ndim - 2))
        total = term if total is None else add(total, term)
    return total


def _moved(x: Any, by: int, dim: int) -> Any:
    """`out[i] = x[i + by]` along a dim, zero where that is outside."""
    n = typeof(x).shape[dim]
    if by == 0 or n == 0:
        return x
    config = [(0, 0, 0)] * typeof(x).ndim
    config[dim] = (-by, by, 0)
    return pad(x, np.zeros((), typeof(x).dtype), config)


def _jvp(primals: Any, tangents: Any) -> Any:
    """A dx = db - dA x."""
    *diagonals, b = primals
    x = tridiagonal_solve_p.bind(*diagonals, b)
    dl, d, du, db = tangents
    moved = _multiply(dl, d, du, x)
    if moved is None:
        return x, tridiagonal_solve_p.bind(*diagonals, db)
    zero = np.zeros((), typeof(x).dtype)
    right = sub(zero, moved) if isinstance(db, Zero) else sub(db, moved)
    return x, tridiagonal_solve_p.bind(*diagonals, right)


def _transpose(ct: Any, dl: Any, d: Any, du: Any, b: Any) -> Any:
    assert is_linear(b) and not any(map(is_linear, (dl, d, du)))
    dim = typeof(d).ndim - 1
    out = tridiagonal_solve_p.bind(_moved(du, -1, dim), d, _moved(dl, 1, dim), ct)
    return [None, None, None, out]


tridiagonal_solve_p = stacked(
    "tridiagonal_solve",
    abstract=_abstract,
    impl=_impl,
    jvp=_jvp,
    transpose=_transpose,
    cores=(1, 1, 1, 2),
)
