"""Matrices brought to Hessenberg, tridiagonal and Schur form by unitary similarity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.errors import ArgumentError
from spmd.core.aval import ShapedArray
from spmd.core.primitive import Refused
from spmd.lax.linalg.family import check_matrices, not_linear, stacked
from spmd.lax.linalg.qr import householder_vector, reflect
from spmd.lax.linalg.schur_steps import complex_schur, real_schur

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- hessenberg --------------------------------------------------------------------------------


def hessenberg(a: Any) -> tuple[Array, Array]:
    """Compute the Hessenberg form `adjoint(Q) @ a @ Q`, as LAPACK's gehrd does.

    Q is held as Householder vectors. For `a` of shape (..., n, n), of a float or complex dtype:
    (..., n, n) with the form on and above the first subdiagonal and the vectors below it, and taus
    (..., n - 1). Raises `ShapeError` if the matrices are not square, and `DtypeError` for integers,
    booleans and 16-bit floats.

    >>> packed, taus = lax.linalg.hessenberg(np.arange(9.0).reshape(3, 3))
    >>> packed.shape, taus.shape
    ((3, 3), (2,))
    """
    packed, taus = hessenberg_p.bind(a)
    return packed, taus


def _hessenberg_abstract(a: ShapedArray) -> list[ShapedArray]:
    leading, n, _ = check_matrices("hessenberg", a, "a", square=True)
    a = a.strip_weak()
    return [a, a.update(shape=(*leading, max(n - 1, 0)))]


def _hessenberg_impl(xp: Any, a: Any) -> list[Any]:
    out = np.array(a, order="C")
    n = out.shape[-1]
    taus = np.zeros((*out.shape[:-2], max(n - 1, 0)), out.dtype)
    for k in range(n - 1):
        v, tau, beta = householder_vector(out[..., k + 1 :, k])
        reflect(out[..., k + 1 :, k + 1 :], v, np.conj(tau))
        reflect(out[..., :, k + 1 :], v, tau, left=False)
        out[..., k + 1, k] = beta
        out[..., k + 2 :, k] = v[..., 1:]
        taus[..., k] = tau
    return [out, taus]


_VECTORS = Refused("has no derivative rule; differentiate a function of its input's eigenvalues")

hessenberg_p = stacked(
    "hessenberg",
    abstract=_hessenberg_abstract,
    impl=_hessenberg_impl,
    jvp=_VECTORS,
    transpose=not_linear("hessenberg"),
    cores=(2,),
    multiple=True,
)

# ---- tridiagonal -------------------------------------------------------------------------------


def tridiagonal(a: Any, *, lower: bool = True) -> tuple[Array, Array, Array, Array]:
    """Compute the tridiagonal form of Hermitian matrices, as LAPACK's sytrd does.

    The result is (packed vectors, diagonal, off-diagonal, taus). For `a` of shape (..., n, n), of
    which the `lower` (or the upper) triangle is read: (..., n, n), real (..., n), real (..., n - 1)
    and (..., n - 1). The dtype is a float or complex one. Raises `ShapeError` if the matrices are
    not square, and `DtypeError` for integers, booleans and 16-bit floats.

    >>> packed, d, e, taus = lax.linalg.tridiagonal(np.eye(3))
    >>> d
    Array([1., 1., 1.], dtype=float32)
    """
    packed, d, e, taus = tridiagonal_p.bind(a, lower=bool(lower))
    return packed, d, e, taus


def _tridiagonal_abstract(a: ShapedArray, *, lower: bool) -> list[ShapedArray]:
    leading, n, _ = check_matrices("tridiagonal", a, "a", square=True)
    a, real = a.strip_weak(), np.finfo(a.dtype).dtype
    less = (*leading, max(n - 1, 0))
    d, e = ShapedArray((*leading, n), real), ShapedArray(less, real)
    return [a, d, e, a.update(shape=less)]


def _tridiagonal_impl(xp: Any, a: Any, *, lower: bool) -> list[Any]:
    if not lower:
        # sytrd of the upper triangle goes from the last column to the first.
        packed, d, e, taus = _tridiagonal_impl(xp, np.flip(a, (-1, -2)), lower=True)
        flipped = [np.flip(packed, (-1, -2)), *(np.flip(y, -1) for y in (d, e, taus))]
        return [np.ascontiguousarray(y) for y in flipped]
    below = np.tril(a, -1)
    full = below + np.conj(np.swapaxes(below, -1, -2))
    n = a.shape[-1]
    places = np.arange(n)
    full[..., places, places] = a[..., places, places].real
    packed, taus = _hessenberg_impl(xp, full)
    d, e = packed[..., places, places].real, packed[..., places[1:], places[:-1]].real
    return [np.tril(packed) + np.triu(a, 1), d.copy(), e.copy(), taus]


tridiagonal_p = stacked(
    "tridiagonal",
    abstract=_tridiagonal_abstract,
    impl=_tridiagonal_impl,
    jvp=_VECTORS,
    transpose=not_linear("tridiagonal"),
    cores=(2,),
    multiple=True,
)

# ---- schur -------------------------------------------------------------------------------------


def schur(
    x: Any,
    *,
    compute_schur_vectors: bool = True,
    sort_eig_vals: bool = False,
    select_callable: Callable[..., Any] | None = None,
) -> tuple[Array, ...]:
    """Compute the Schur form `x == Z @ T @ adjoint(Z)`: T, and the unitary Z if asked for.

    T is upper triangular for complex `x` of shape (..., n, n); for real `x` it has 2 by 2 blocks on
    the diagonal for complex pairs of eigenvalues, their diagonal elements equal. The dtype stays.
    The result is (T, Z), or (T,) without `compute_schur_vectors`. `sort_eig_vals` and
    `select_callable` are not supported: they raise `ArgumentError`. Raises `ShapeError` if the
    matrices are not square, and `DtypeError` for integers, booleans and 16-bit floats.

    >>> t, z = lax.linalg.schur(np.array([[1.0, 2.0], [0.0, 3.0]]))
    >>> t
    Array([[1., 2.],
           [0., 3.]], dtype=float32)
    """
    if sort_eig_vals or select_callable is not None:
        raise ArgumentError("schur: sorting eigenvalues is not supported")
    return tuple(schur_p.bind(x, compute_schur_vectors=bool(compute_schur_vectors)))


def _schur_abstract(x: ShapedArray, *, compute_schur_vectors: bool) -> list[ShapedArray]:
    check_matrices("schur", x, square=True)
    return [x.strip_weak()] * (2 if compute_schur_vectors else 1)


def _schur_impl(xp: Any, x: Any, *, compute_schur_vectors: bool) -> list[Any]:
    flat = x.reshape((int(np.prod(x.shape[:-2])), *x.shape[-2:]))
    one = complex_schur if x.dtype.kind == "c" else real_schur
    t, z = np.empty_like(flat), np.empty_like(flat)
    for k, a in enumerate(flat):
        t[k], z[k] = one(*_with_vectors(a)) if np.isfinite(a).all() else (np.nan, np.nan)
    return [y.reshape(x.shape) for y in (t, z)][: 2 if compute_schur_vectors else 1]


def complex_form(a: Any) -> tuple[Any, Any]:
    """The complex Schur form of a stack of NumPy matrices, in double precision."""
    t, z = _schur_impl(np, a.astype(np.complex128), compute_schur_vectors=True)
    return t, z


def _with_vectors(a: Any) -> tuple[Any, Any]:
    """The Hessenberg form of a matrix in double precision, and the unitary matrix that gives it."""
    wide = a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)
    packed, taus = _hessenberg_impl(np, wide)
    q = np.eye(a.shape[-1], dtype=wide.dtype)
    for k in reversed(range(len(taus))):
        v = np.concatenate([np.ones(1, wide.dtype), packed[k + 2 :, k]])
        reflect(q[k + 1 :, k + 1 :], v, taus[k])
    return np.triu(packed, -1), q


schur_p = stacked(
    "schur",
    abstract=_schur_abstract,
    impl=_schur_impl,
    jvp=Refused("has no derivative rule; scipy.linalg.sqrtm and expm have theirs"),
    transpose=not_linear("schur"),
    cores=(2,),
    multiple=True,
)
