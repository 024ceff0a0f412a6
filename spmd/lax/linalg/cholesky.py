"""Cholesky factors, their update by a rank-one term, and symmetric products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.errors import ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.primitive import Refused
from spmd.lax.arithmetic import add, mul, sub
from spmd.lax.families import check_dtype, fail
from spmd.lax.linalg.family import (
    MATRIX,
    check_matrices,
    diagonal_part,
    hermitian_from,
    lapack,
    lower_part,
    matmul,
    not_linear,
    scale,
    stacked,
    swapped,
    symmetrize,
)
from spmd.lax.linalg.triangular import triangular_solve

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- cholesky ----------------------------------------------------------------------------------


def cholesky(x: Any, *, symmetrize_input: bool = True) -> Array:
    """Compute the lower triangular L with `L @ adjoint(L) == x`.

    `x` is (..., n, n), Hermitian and positive definite, of a float or complex dtype; the shape and
    the dtype stay. Without `symmetrize_input` only its lower triangle is read. Where `x` is not
    positive definite, the factor is NaN. Raises `ShapeError` if the matrices are not square, and
    `DtypeError` for integers, booleans and 16-bit floats.

    >>> lax.linalg.cholesky(np.array([[4.0, 2.0], [2.0, 5.0]]))
    Array([[2., 0.],
           [1., 2.]], dtype=float32)
    """
    check_matrices("cholesky", typeof(x), square=True)
    return cholesky_p.bind(symmetrize(x) if symmetrize_input else x)


def _cholesky_abstract(x: ShapedArray) -> ShapedArray:
    check_matrices("cholesky", x, square=True)
    return x.strip_weak()


def _cholesky_impl(xp: Any, x: Any) -> Any:
    found = lapack("cholesky_lo", np.linalg.cholesky, x)
    # All of a factor that does not exist is NaN; what is above the diagonal is zero.
    failed = found.size and np.isnan(found[..., 0, -1]).any()
    return np.tril(found) if failed else found


def _cholesky_jvp(primals: Any, tangents: Any) -> Any:
    """dL = L phi(inv(L) dA inv(L)^H), where phi takes the lower part and half the diagonal.

    Murray, "Differentiation of the Cholesky decomposition" (arXiv 1602.07527), section 3.1.
    """
    factor = cholesky_p.bind(*primals)
    # LAPACK reads the lower triangle, so the result depends on that alone.
    change = hermitian_from(tangents[0], lower=True)
    inner = triangular_solve(factor, change, left_side=True, lower=True)
    inner = triangular_solve(
        factor, inner, left_side=False, lower=True, transpose_a=True, conjugate_a=True
    )
    phi = sub(lower_part(inner), scale(diagonal_part(inner), 0.5))
    return factor, matmul(factor, phi)


cholesky_p = stacked(
    "cholesky",
    abstract=_cholesky_abstract,
    impl=_cholesky_impl,
    jvp=_cholesky_jvp,
    transpose=not_linear("cholesky"),
    cores=(2,),
)

# ---- cholesky_update ---------------------------------------------------------------------------


def cholesky_update(r_matrix: Any, w_vector: Any) -> Array:
    """Compute the upper triangular R' with `R'.T @ R' == R.T @ R + outer(w, w)`.

    `r_matrix`, R, is (..., n, n), upper triangular, and `w_vector` (..., n), both of one float
    dtype. The result has the shape of R. Raises `ShapeError` or `DtypeError` for other operands.

    >>> lax.linalg.cholesky_update(np.eye(2), np.array([0.0, 3.0])).round(4)
    Array([[1.    , 0.    ],
           [0.    , 3.1623]], dtype=float32)
    """
    return cholesky_update_p.bind(r_matrix, w_vector)


def _update_abstract(r: ShapedArray, w: ShapedArray) -> ShapedArray:
    leading, n, _ = check_matrices("cholesky_update", r, "r_matrix", square=True)
    floats = frozenset(d for d in MATRIX if d.kind == "f")
    check_dtype("cholesky_update", "r_matrix", r, floats)
    if w.shape != (*leading, n) or w.dtype != r.dtype:
        fail(
            ShapeError,
            f"cholesky_update: w_vector must be {r.dtype}{[*leading, n]} to go with r_matrix "
            f"{r}, got {w}",
        )
    return r.strip_weak()


def _update_impl(xp: Any, r: Any, w: Any) -> Any:
    """One Givens rotation a row brings w into R (Golub & Van Loan, section 6.5.4)."""
    r, w = np.triu(r), w.copy()
    with np.errstate(all="ignore"):
        for k in range(r.shape[-1]):
            length = np.hypot(r[..., k, k], w[..., k])
            safe = np.where(length == 0, 1, length)
            c = np.where(length == 0, 1, r[..., k, k] / safe)[..., None]
            s = (w[..., k] / safe)[..., None]
            row = r[..., k, k:].copy()
            r[..., k, k:] = c * row + s * w[..., k:]
            w[..., k:] = c * w[..., k:] - s * row
    return r


cholesky_update_p = stacked(
    "cholesky_update",
    abstract=_update_abstract,
    impl=_update_impl,
    jvp=Refused(
        "has no derivative rule; differentiate lax.linalg.cholesky of R.T @ R + outer(w, w)"
    ),
    transpose=not_linear("cholesky_update"),
    cores=(2, 1),
)

# ---- symmetric_product -------------------------------------------------------------------------


def symmetric_product(
    a_matrix: Any,
    c_matrix: Any,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    symmetrize_output: bool = False,
) -> Array:
    """Compute `alpha * a @ a.T + beta * c`, where c is symmetric.

    `a_matrix` has shape (..., n, k), `c_matrix` (..., n, n), both of one float or complex dtype;
    `alpha` and `beta` are Python numbers. The whole product is computed, so that
    `symmetrize_output` changes nothing. Raises `ShapeError` if the shapes do not fit.

    >>> lax.linalg.symmetric_product(np.ones((2, 3)), np.eye(2), beta=1.0)
    Array([[4., 3.],
           [3., 4.]], dtype=float32)
    """
    leading, n, _ = check_matrices("symmetric_product", typeof(a_matrix), "a_matrix")
    wanted = (*leading, n, n)
    if typeof(c_matrix).shape != wanted:
        fail(
            ShapeError,
            f"symmetric_product: c_matrix must have shape {wanted} to go with a_matrix "
            f"{typeof(a_matrix)}, got {typeof(c_matrix)}",
        )
    product = scale(matmul(a_matrix, swapped(a_matrix)), alpha)
    return add(product, mul(c_matrix, np.asarray(beta, typeof(product).dtype)))
