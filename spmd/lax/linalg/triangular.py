"""Triangular systems of equations, from either side."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.errors import ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.primitive import Zero
from spmd.core.structural import add_any, is_linear, move_dim, reshape
from spmd.lax.arithmetic import neg
from spmd.lax.families import check_same_dtype, fail
from spmd.lax.linalg.family import (
    check_matrices,
    conjugate,
    lower_part,
    matmul,
    stacked,
    stacked_batch,
    swapped,
    upper_part,
)
from spmd.lax.linalg.lapack import solve_triangular

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# Rows done one by one before the rest is a matrix product; a step costs some microseconds.
_BLOCK = 32


def triangular_solve(
    a: Any,
    b: Any,
    *,
    left_side: bool = False,
    lower: bool = False,
    transpose_a: bool = False,
    conjugate_a: bool = False,
    unit_diagonal: bool = False,
) -> Array:
    """Solve `op(a) @ x == b` (with `left_side`) or `x @ op(a) == b` for triangular `a`.

    `a` has shape (..., n, n), of which the `lower` (or the upper) triangle is read, without the
    diagonal if `unit_diagonal`; `b` is (..., n, k) on the left side, (..., k, n) on the right, or
    (..., n), which is also the shape of the result. op is the transpose if `transpose_a`, and
    conjugates if `conjugate_a`. Both have one float or complex dtype. A zero on the diagonal gives
    infinities or NaN. Raises `ShapeError` or `DtypeError` for other operands.

    >>> a = np.array([[2.0, 0.0], [1.0, 4.0]])
    >>> lax.linalg.triangular_solve(a, np.array([2.0, 5.0]), left_side=True, lower=True)
    Array([1., 1.], dtype=float32)
    """
    matrix, right = typeof(a), typeof(b)
    vector = right.ndim == matrix.ndim - 1
    if vector:
        b = reshape(b, (*right.shape, 1) if left_side else (*right.shape[:-1], 1, right.shape[-1]))
    out = triangular_solve_p.bind(
        a,
        b,
        left_side=bool(left_side),
        lower=bool(lower),
        transpose_a=bool(transpose_a),
        conjugate_a=bool(conjugate_a) and matrix.dtype.kind == "c",
        unit_diagonal=bool(unit_diagonal),
    )
    return reshape(out, right.shape) if vector else out


def _abstract(a: ShapedArray, b: ShapedArray, *, left_side: bool, **_: Any) -> ShapedArray:
    leading, n, n = check_matrices("triangular_solve", a, "a", square=True)
    others, rows, columns = check_matrices("triangular_solve", b, "b")
    check_same_dtype("triangular_solve", ("a", "b"), (a, b))
    if others != leading or (rows if left_side else columns) != n:
        side = f"(..., {n}, k)" if left_side else f"(..., k, {n})"
        fail(
            ShapeError,
            f"triangular_solve: b must be {side} with the leading dims of a, {leading}, for "
            f"left_side={left_side}; got a {a} and b {b}",
        )
    return b.strip_weak()


def _impl(
    xp: Any,
    a: Any,
    b: Any,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    conjugate_a: bool,
    unit_diagonal: bool,
) -> Any:
    if conjugate_a:
        a = np.conj(a)
    # x op(a) = b is op(a)^T x^T = b^T.
    transposed = transpose_a == left_side
    x = np.array(b if left_side else np.swapaxes(b, -1, -2), order="C")
    if solve_triangular(a, x, lower, transposed, unit_diagonal):
        return np.ascontiguousarray(x if left_side else np.swapaxes(x, -1, -2))
    if transposed:
        a, lower = np.swapaxes(a, -1, -2), not lower
    b = b if left_side else np.swapaxes(b, -1, -2)
    if not lower:
        a, b = np.flip(a, (-1, -2)), np.flip(b, -2)
    with np.errstate(all="ignore"):
        x = forward_substitution(a, b, unit_diagonal)
    x = x if lower else np.flip(x, -2)
    return np.ascontiguousarray(x if left_side else np.swapaxes(x, -1, -2))


def forward_substitution(a: Any, b: Any, unit_diagonal: bool) -> Any:
    """Solve lower triangular systems of NumPy arrays, block by block."""
    n = a.shape[-1]
    x = np.array(b, order="C")
    if solve_triangular(a, x, True, False, unit_diagonal):
        return x
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        if start:
            x[..., start:stop, :] -= a[..., start:stop, :start] @ x[..., :start, :]
        for k in range(start, stop):
            if k > start:
                x[..., k, :] -= (a[..., k : k + 1, start:k] @ x[..., start:k, :])[..., 0, :]
            if not unit_diagonal:
                x[..., k, :] /= a[..., k, k, None]
    return x


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """With op(a) x = b: op(a) dx = db - op(da) x (Giles 2008, section 2.3.1)."""
    a, b = primals
    da, db = tangents
    x = triangular_solve_p.bind(a, b, **params)
    terms = []
    if not isinstance(db, Zero):
        terms.append(triangular_solve_p.bind(a, db, **params))
    if not isinstance(da, Zero):
        part = lower_part if params["lower"] else upper_part
        da = part(da, strict=params["unit_diagonal"])
        da = conjugate(da) if params["conjugate_a"] else da
        da = swapped(da) if params["transpose_a"] else da
        moved = matmul(da, x) if params["left_side"] else matmul(x, da)
        terms.append(triangular_solve_p.bind(a, neg(moved), **params))
    return x, functools.reduce(add_any, terms)


def _transpose(ct: Any, a: Any, b: Any, *, transpose_a: bool, **params: Any) -> Any:
    assert is_linear(b) and not is_linear(a)
    return [None, triangular_solve_p.bind(a, ct, transpose_a=not transpose_a, **params)]


def _batch(axis: Any, operands: Any, at: Any, **params: Any) -> Any:
    """One matrix for all examples: they are more right-hand sides. Otherwise one more stack."""
    a, b = operands
    if at[0] is None and typeof(a).ndim == 2:
        _, rows, columns = typeof(move_dim(b, at[1], 0)).shape
        if params["left_side"]:
            side = reshape(move_dim(b, at[1], 1), (rows, axis.size * columns))
            out = triangular_solve_p.bind(a, side, **params)
            return reshape(out, (rows, axis.size, columns)), 1
        side = reshape(move_dim(b, at[1], 0), (axis.size * rows, columns))
        out = triangular_solve_p.bind(a, side, **params)
        return reshape(out, (axis.size, rows, columns)), 0
    return stacked_batch(triangular_solve_p, axis, operands, at, params)


triangular_solve_p = stacked(
    "triangular_solve",
    abstract=_abstract,
    impl=_impl,
    jvp=_jvp,
    transpose=_transpose,
    cores=(2, 2),
    batch=_batch,
)
