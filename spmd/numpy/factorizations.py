"""Factors, eigenvalues, determinants and inverses, in terms of `lax.linalg`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, RefusedError, ShapeError
from spmd.core.aval import typeof
from spmd.core.custom import custom_jvp
from spmd.lax.linalg import cholesky as _cholesky
from spmd.lax.linalg import eig as _eig
from spmd.lax.linalg import eigh as _eigh
from spmd.lax.linalg import geqrf, lu, triangular_solve
from spmd.lax.linalg import qr as _qr
from spmd.lax.linalg import solve as _solve
from spmd.lax.linalg import svd as _svd
from spmd.lax.linalg.family import adjoint, diagonal, in_rows, take_rows
from spmd.numpy.promotion import (
    as_array,
    broadcast_to,
    check_arraylike,
    plain,
    promote_args_inexact,
    promote_dtypes_inexact,
)
from spmd.numpy.reductions import cumprod, prod
from spmd.numpy.reductions import max as _max
from spmd.numpy.reductions import sum as _sum
from spmd.numpy.searching import where
from spmd.numpy.sorting import argsort
from spmd.numpy.taking import take_along_axis
from spmd.sharding.array import Array, ArrayLike


class EigResult(NamedTuple):
    """The result of `eig`."""

    eigenvalues: Array
    eigenvectors: Array


class EighResult(NamedTuple):
    """The result of `eigh`."""

    eigenvalues: Array
    eigenvectors: Array


class QRResult(NamedTuple):
    """The result of `qr`."""

    Q: Array
    R: Array


class SlogdetResult(NamedTuple):
    """The result of `slogdet`."""

    sign: Array
    logabsdet: Array


class SVDResult(NamedTuple):
    """The result of `svd`."""

    U: Array
    S: Array
    Vh: Array


def inexact_matrix(name: str, x: Any, square: bool = False) -> Any:
    """An argument as floating or complex matrices; raises the user's error if it is none."""
    (x,) = promote_args_inexact(name, x)
    shape = typeof(x).shape
    if len(shape) < 2 or (square and shape[-1] != shape[-2]):
        needed = "square matrices, (..., n, n)," if square else "at least two dims"
        raise ShapeError(f"{name}: {needed} needed, got shape {shape}")
    return as_array(x)


# ---- factors -----------------------------------------------------------------------------------


def cholesky(a: ArrayLike, *, upper: bool = False, symmetrize_input: bool = True) -> Array:
    """The triangular factor of Hermitian positive definite matrices, NaN for others.

    `a` has shape (..., n, n), which the result has too. It is the lower one, `a == L @ adjoint(L)`,
    unless `upper`. With `symmetrize_input` the mean of `a` and its adjoint is factored, else its
    lower triangle. Integers become the default float. Raises a `ShapeError` if `a` is not square.

    >>> snp.linalg.cholesky(np.array([[4.0, 2.0], [2.0, 5.0]]))
    Array([[2., 0.],
           [1., 2.]], dtype=float32)
    """
    a = inexact_matrix("cholesky", a, square=True)
    factor = _cholesky(a, symmetrize_input=symmetrize_input)
    return adjoint(factor) if upper else factor


def qr(a: ArrayLike, mode: str = "reduced") -> Any:
    """The QR factors of matrices: a pair `QRResult`, or R alone for mode "r".

    `a` has shape (..., m, n). `mode` says of which shape Q is: "reduced" (m by min(m, n)) or
    "complete" (m by m). "raw" gives LAPACK's packed Householder vectors, transposed, and their
    factors. Integers become the default float. Raises an `ArgumentError` for another `mode`.

    >>> q, r = snp.linalg.qr(np.array([[3.0, 1.0], [4.0, 2.0]]))
    >>> snp.allclose(q @ r, np.array([[3.0, 1.0], [4.0, 2.0]]), atol=1e-5)
    Array(True, dtype=bool)
    """
    a = inexact_matrix("qr", a)
    if mode == "raw":
        packed, taus = geqrf(a)
        return QRResult(lax.transpose(packed, _last_swapped(packed)), taus)
    if mode not in ("reduced", "r", "full", "complete"):
        raise ArgumentError(f'qr: mode={mode!r} must be "reduced", "complete", "r" or "raw"')
    q, r = _qr(a, full_matrices=mode == "complete")
    return r if mode == "r" else QRResult(q, r)


def _last_swapped(x: Any) -> tuple[int, ...]:
    n = typeof(x).ndim
    return (*range(n - 2), n - 1, n - 2)


def svd(
    a: ArrayLike,
    full_matrices: bool = True,
    compute_uv: bool = True,
    hermitian: bool = False,
    subset_by_index: tuple[int, int] | None = None,
) -> Any:
    """The singular value decomposition of matrices, `a == (U * S) @ Vh`: an `SVDResult`.

    `a` has shape (..., m, n). S is real and in decreasing order; it is returned alone if
    `compute_uv=False`. U is m by m and Vh n by n, or with `full_matrices=False` m by k and k by n,
    with k = min(m, n). `hermitian` promises that `a` is, and is quicker. `subset_by_index=(start,
    stop)` keeps some of the singular values, and needs `full_matrices=False`. Integers become the
    default float. **Vectors have derivatives only with `full_matrices=False`** (or of square
    matrices).

    >>> snp.linalg.svd(np.array([[3.0, 0.0], [0.0, 4.0]]), compute_uv=False)
    Array([4., 3.], dtype=float32)
    """
    a = inexact_matrix("svd", a)
    if hermitian:
        return _hermitian_svd(a, compute_uv)
    how: dict[str, Any] = {"full_matrices": full_matrices, "subset_by_index": subset_by_index}
    if not compute_uv:
        return _svd(a, compute_uv=False, **how)
    return SVDResult(*_svd(a, **how))


def _hermitian_svd(a: Any, compute_uv: bool) -> Any:
    """Singular values are absolute eigenvalues; the sign goes to one side's vectors."""
    v, w = _eigh(a)
    size = lax.abs(w)
    order = argsort(lax.neg(size), axis=-1)
    s = take_along_axis(size, order, axis=-1)
    if not compute_uv:
        return s
    u = take_along_axis(v, order[..., None, :], axis=-1)
    sign = where(take_along_axis(w, order, axis=-1) < 0, -1, 1).astype(typeof(u).dtype)
    return SVDResult(u, s, adjoint(lax.mul(u, in_rows(sign, u))))


def svdvals(x: ArrayLike, /) -> Array:
    """The singular values of matrices, in decreasing order.

    `x` has shape (..., m, n). The result is real and has the size min(m, n) in the last dim;
    integers become the default float.

    >>> snp.linalg.svdvals(np.array([[3.0, 0.0], [0.0, 4.0]]))
    Array([4., 3.], dtype=float32)
    """
    return svd(x, compute_uv=False)


# ---- eigenvalues -------------------------------------------------------------------------------


def eig(a: ArrayLike) -> EigResult:
    """The eigenvalues and right eigenvectors of square matrices: an `EigResult`.

    `a` has shape (..., n, n). Both results are complex; the vectors are the columns. For
    derivatives of the vectors see `lax.linalg.eig`. Raises a `ShapeError` if `a` is not square.

    >>> snp.linalg.eig(np.array([[2.0, 1.0], [0.0, 3.0]])).eigenvalues
    Array([2.+0.j, 3.+0.j], dtype=complex64)
    """
    a = inexact_matrix("eig", a, square=True)
    w, v = _eig(a, compute_left_eigenvectors=False)
    return EigResult(w, v)


def eigvals(a: ArrayLike) -> Array:
    """The eigenvalues of square matrices, in the order of LAPACK.

    `a` has shape (..., n, n). The result is complex. Raises a `ShapeError` if `a` is not square.

    >>> snp.linalg.eigvals(np.array([[2.0, 1.0], [0.0, 3.0]]))
    Array([2.+0.j, 3.+0.j], dtype=complex64)
    """
    a = inexact_matrix("eigvals", a, square=True)
    none: dict[str, Any] = {"compute_left_eigenvectors": False, "compute_right_eigenvectors": False}
    return _eig(a, **none)[0]


def eigh(a: ArrayLike, UPLO: str | None = None, symmetrize_input: bool = True) -> EighResult:
    """The eigenvalues, ascending, and eigenvectors of Hermitian matrices: an `EighResult`.

    `a` has shape (..., n, n); the vectors are columns. The values are real floats, and integers
    become the default float. Without `symmetrize_input` only the triangle that `UPLO` names ("L" or
    "U") is read. Raises an `ArgumentError` for another `UPLO`.

    >>> snp.linalg.eigh(np.array([[2.0, 0.0], [0.0, 1.0]])).eigenvalues
    Array([1., 2.], dtype=float32)
    """
    a = inexact_matrix("eigh", a, square=True)
    if UPLO not in (None, "L", "U"):
        raise ArgumentError(f'eigh: UPLO={UPLO!r} must be "L" or "U"')
    v, w = _eigh(a, lower=UPLO != "U", symmetrize_input=symmetrize_input)
    return EighResult(w, v)


def eigvalsh(a: ArrayLike, UPLO: str | None = "L", *, symmetrize_input: bool = True) -> Array:
    """The eigenvalues of Hermitian matrices, ascending.

    `a` has shape (..., n, n). The result is a real float, and integers become the default float.
    `UPLO` and `symmetrize_input` are those of `eigh`.

    >>> snp.linalg.eigvalsh(np.array([[2.0, 0.0], [0.0, 1.0]]))
    Array([1., 2.], dtype=float32)
    """
    return eigh(a, UPLO, symmetrize_input).eigenvalues


# ---- determinants ------------------------------------------------------------------------------


def _parity(pivots: Any) -> Any:
    """Whether an odd number of rows were exchanged."""
    places = lax.broadcasted_iota(np.int32, typeof(pivots).shape, typeof(pivots).ndim - 1)
    return _sum(lax.ne(pivots, places), -1, dtype=np.int32) % 2


def slogdet(a: ArrayLike, *, method: str | None = None) -> SlogdetResult:
    """The sign and the logarithm of the absolute value of determinants: a `SlogdetResult`.

    `a` has shape (..., n, n), and `det(a) == sign * exp(logabsdet)`, without overflow. The sign of
    complex matrices is a phase; integers become the default float. `method` is "lu", "qr" or None,
    which all factorise by LU. Raises an `ArgumentError` for another `method`, and a `RefusedError`
    for "qr" of complex matrices, as in JAX.

    >>> snp.linalg.slogdet(np.array([[2.0, 0.0], [0.0, -1.0]]))
    SlogdetResult(sign=Array(-1., dtype=float32), logabsdet=Array(0.6931472, dtype=float32))
    """
    a = inexact_matrix("slogdet", a, square=True)
    if method not in (None, "lu", "qr"):
        raise ArgumentError(f'slogdet: method={method!r} must be None, "lu" or "qr"')
    if method == "qr" and dtypes.is_complex(typeof(a).dtype):
        raise RefusedError('slogdet: method="qr" is for real matrices; use "lu"')
    return SlogdetResult(*_slogdet(a))


@custom_jvp
def _slogdet(a: Any) -> tuple[Any, Any]:
    factors, pivots, _ = lu(a)
    d = diagonal(factors)
    flip = where(_parity(pivots) == 1, -1, 1).astype(typeof(a).dtype)
    return lax.mul(prod(lax.sign(d), -1), flip), _sum(lax.log(lax.abs(d)), -1)


@_slogdet.defjvp
def _slogdet_jvp(primals: Any, tangents: Any) -> Any:
    """d log det(A) = trace(inv(A) dA) (Giles 2008, section 2.2.3)."""
    (a,), (da,) = primals, tangents
    sign, logdet = _slogdet(a)
    change = _sum(diagonal(_solve(a, da)), -1)
    if not dtypes.is_complex(typeof(a).dtype):
        return (sign, logdet), (lax.zeros_like_array(sign), change)
    turn = lax.complex(lax.zeros_like_array(logdet), lax.imag(change))
    return (sign, logdet), (lax.mul(sign, turn), lax.real(change))


def det(a: Any) -> Array:
    """The determinants of square matrices.

    `a` has shape (..., n, n); integers become the default float. The derivative is right for
    singular matrices too. Raises a `ShapeError` if `a` is not square.

    >>> snp.linalg.det(np.array([[1.0, 2.0], [3.0, 4.0]]))
    Array(-2., dtype=float32)
    """
    a = as_array(inexact_matrix("det", a, square=True))
    n = typeof(a).shape[-1]
    if n == 0:
        return prod(diagonal(a), -1)
    if n == 1:
        return a[..., 0, 0]
    if n == 2:
        return a[..., 0, 0] * a[..., 1, 1] - a[..., 0, 1] * a[..., 1, 0]
    if n == 3:
        x, y, z = a[..., 0, :], a[..., 1, :], a[..., 2, :]
        return (
            x[..., 0] * (y[..., 1] * z[..., 2] - y[..., 2] * z[..., 1])
            + x[..., 1] * (y[..., 2] * z[..., 0] - y[..., 0] * z[..., 2])
            + x[..., 2] * (y[..., 0] * z[..., 1] - y[..., 1] * z[..., 0])
        )
    return _det(a)


@custom_jvp
def _det(a: Any) -> Any:
    factors, pivots, _ = lu(a)
    flip = where(_parity(pivots) == 1, -1, 1).astype(typeof(a).dtype)
    return lax.mul(prod(diagonal(factors), -1), flip)


@_det.defjvp
def _det_jvp(primals: Any, tangents: Any) -> Any:
    """d det(A) = trace(adj(A) dA) (Giles 2008, section 2.2.3)."""
    value, moved = _adjugate_times(*primals, *tangents)
    return value, _sum(diagonal(moved), -1)


def _adjugate_times(a: Any, b: Any) -> tuple[Any, Any]:
    """det(a) and adj(a) @ b, also where a is singular.

    adj(A) = det(A) inv(U) inv(L) P. Of rank n-1, only U's last diagonal element u is zero, and
    det(A) / u is the product of the others (with the sign): so u becomes that product's inverse,
    and all but the last row is multiplied by det(A) instead. Of lower rank, the adjugate is zero.
    """
    factors, pivots, permutation = lu(a)
    flip = where(_parity(pivots) == 1, -1, 1).astype(typeof(a).dtype)
    products = cumprod(diagonal(factors), -1) * flip[..., None]
    value, others = products[..., -1], products[..., -2]
    none = others == 0
    factors = factors.at[..., -1, -1].set(1 / where(none, 1, others))
    factors = where(none[..., None, None], lax.full_like(factors, 1), factors)
    moved = take_rows(b, permutation)
    moved = triangular_solve(factors, moved, left_side=True, lower=True, unit_diagonal=True)
    last = lax.broadcasted_iota(np.int32, typeof(moved).shape, typeof(moved).ndim - 2)
    is_last = last == typeof(a).shape[-1] - 1
    moved = where(is_last, moved, moved * value[..., None, None])
    moved = triangular_solve(factors, moved, left_side=True, lower=False)
    return value, where(none[..., None, None], 0, moved)


# ---- systems of equations ----------------------------------------------------------------------


def solve(a: ArrayLike, b: ArrayLike) -> Array:
    """Solve the equations `a @ x == b` for square matrices; NaN where `a` is singular.

    `a` has shape (..., n, n). `b` is one vector (n,), or matrices (..., n, k); the dims in front
    broadcast. Both are promoted to one floating or complex dtype. Raises a `ShapeError` if the
    shapes do not fit.

    >>> snp.linalg.solve(np.array([[2.0, 0.0], [0.0, 4.0]]), np.array([2.0, 2.0]))
    Array([1. , 0.5], dtype=float32)
    """
    check_arraylike("solve", a, b)
    a, b = promote_dtypes_inexact(plain(a), plain(b))
    a = inexact_matrix("solve", a, square=True)
    vector = typeof(b).ndim == 1
    if vector:
        b = lax.expand_dims(b, (1,))
    if typeof(b).ndim == 0 or typeof(b).shape[-2] != typeof(a).shape[-1]:
        raise ShapeError(
            f"solve: b must be (n,) or (..., n, k) with n = {typeof(a).shape[-1]} "
            f"for a of shape {typeof(a).shape}, got shape {typeof(b).shape}"
        )
    a, b = same_stack(a, b)
    x = _solve(a, b)
    return lax.squeeze(x, (typeof(x).ndim - 1,)) if vector else x


def same_stack(*matrices: Any) -> list[Any]:
    """Matrices with their leading dims broadcast to common ones."""
    shapes = [typeof(x).shape for x in matrices]
    leading = np.broadcast_shapes(*(s[:-2] for s in shapes))
    return [broadcast_to(x, (*leading, *s[-2:])) for x, s in zip(matrices, shapes, strict=True)]


def inv(a: ArrayLike) -> Array:
    """The inverses of square matrices; NaN where they are singular.

    `a` has shape (..., n, n), which the result has too; integers become the default float. **Prefer
    `solve`.** Raises a `ShapeError` if `a` is not square.

    >>> snp.linalg.inv(np.array([[2.0, 0.0], [0.0, 4.0]]))
    Array([[0.5 , 0.  ],
           [0.  , 0.25]], dtype=float32)
    """
    a = inexact_matrix("inv", a, square=True)
    shape = typeof(a).shape
    unit = lax.eye(typeof(a).dtype, shape[-2:])
    return _solve(a, broadcast_to(unit, shape))


def norm_of_columns(x: Any) -> Any:
    """The 1-norm of matrices: the largest sum of absolute values of a column."""
    return _max(_sum(lax.abs(x), -2), -1, initial=0)
