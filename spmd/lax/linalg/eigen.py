"""Eigenvalues and eigenvectors, of Hermitian and of general matrices."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.errors import ArgumentError, RefusedError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.structural import reduce_sum
from spmd.lax.arithmetic import abs, complex, div, imag, mul, real, sub
from spmd.lax.array import expand_dims, squeeze
from spmd.lax.convert import convert_element_type
from spmd.lax.linalg.family import (
    adjoint,
    check_matrices,
    conjugate,
    diagonal,
    each_or_nan,
    eye_like,
    hermitian_from,
    in_columns,
    in_rows,
    lapack,
    matmul,
    not_linear,
    on_diagonal,
    real_part,
    stacked,
    symmetrize,
    zero_unless,
)
from spmd.lax.linalg.lu import solve
from spmd.lax.logic import bitwise_not, select
from spmd.lax.reduce import argmax
from spmd.lax.slicing import slice_in_dim
from spmd.lax.sort import take_along

if TYPE_CHECKING:
    from spmd.sharding.array import Array


class EighImplementation(enum.Enum):
    """The algorithms that `eigh` accepts; LAPACK's divide and conquer runs."""

    QR = "QR"
    JACOBI = "Jacobi"
    QDWH = "QDWH"


class EigImplementation(enum.Enum):
    """The libraries that `eig` accepts; LAPACK runs."""

    CUSOLVER = "cusolver"
    MAGMA = "magma"
    LAPACK = "lapack"


# ---- eigh --------------------------------------------------------------------------------------


def eigh(
    x: Any,
    *,
    lower: bool = True,
    symmetrize_input: bool = True,
    sort_eigenvalues: bool = True,
    subset_by_index: tuple[int, int] | None = None,
    implementation: EighImplementation | None = None,
) -> tuple[Array, Array]:
    """Compute eigenvectors and eigenvalues of Hermitian matrices, `x @ v == v * w`: (v, w).

    `x` has shape (..., n, n) and a float or complex dtype; v (..., n, n) has orthonormal columns, w
    is real (..., n). Eigenvalues are ascending, whatever `sort_eigenvalues` says. Without
    `symmetrize_input` only the `lower` (or the upper) triangle is read. `subset_by_index=(start,
    stop)` keeps those eigenvalues and vectors. `implementation` is accepted for JAX's sake. Raises
    `ShapeError` if the matrices are not square, and `DtypeError` for integers, booleans and 16-bit
    floats. `ArgumentError` is raised if the subset is out of range.

    >>> v, w = lax.linalg.eigh(np.array([[2.0, 1.0], [1.0, 2.0]]))
    >>> w.round(5)
    Array([1., 3.], dtype=float32)
    """
    _, n, _ = check_matrices("eigh", typeof(x), square=True)
    v, w = eigh_p.bind(symmetrize(x) if symmetrize_input else x, lower=bool(lower))
    if subset_by_index is None:
        return v, w
    start, stop = subset_by_index
    if not 0 <= start <= stop <= n:
        raise ArgumentError(f"eigh: subset_by_index={subset_by_index} must lie within (0, {n})")
    return slice_in_dim(v, start, stop, axis=-1), slice_in_dim(w, start, stop, axis=-1)


def _eigh_abstract(x: ShapedArray, *, lower: bool) -> list[ShapedArray]:
    leading, n, _ = check_matrices("eigh", x, square=True)
    return [x.strip_weak(), ShapedArray((*leading, n), np.finfo(x.dtype).dtype)]


def _eigh_impl(xp: Any, x: Any, *, lower: bool) -> list[Any]:
    side = "L" if lower else "U"
    name = "eigh_lo" if lower else "eigh_up"
    w, v = lapack(name, lambda a: tuple(np.linalg.eigh(a, side)), x)
    return [v, w]


def _eigh_jvp(primals: Any, tangents: Any, *, lower: bool) -> Any:
    """dw = diag(V^H dA V), dV = V (F * V^H dA V) with F[i, j] = 1 / (w[j] - w[i]).

    Giles 2008, section 3.1: for distinct eigenvalues. Where two are equal, eigenvectors have no
    derivative and theirs is infinite or NaN; that of the eigenvalues alone stays finite.
    """
    v, w = eigh_p.bind(*primals, lower=lower)
    change = hermitian_from(tangents[0], lower)
    inner = matmul(matmul(adjoint(v), change), v)
    dw = real_part(diagonal(inner))
    gaps = sub(in_rows(w, inner), in_columns(w, inner))
    dv = matmul(v, _over_gaps(inner, convert_element_type(gaps, typeof(v).dtype)))
    return [v, w], [dv, dw]


def _over_gaps(inner: Any, gaps: Any) -> Any:
    """`inner / gaps` off the diagonal, zero on it."""
    diagonal = on_diagonal(inner)
    ones = eye_like(inner)
    return zero_unless(bitwise_not(diagonal), div(inner, select(diagonal, ones, gaps)))


eigh_p = stacked(
    "eigh",
    abstract=_eigh_abstract,
    impl=_eigh_impl,
    jvp=_eigh_jvp,
    transpose=not_linear("eigh"),
    cores=(2,),
    multiple=True,
)

# ---- eig ---------------------------------------------------------------------------------------


def eig(
    x: Any,
    *,
    compute_left_eigenvectors: bool = True,
    compute_right_eigenvectors: bool = True,
    enable_eigvec_derivs: bool = False,
    implementation: EigImplementation | None = None,
    use_magma: Any = None,
) -> list[Array]:
    """Compute eigenvalues w of general matrices, then left and right eigenvectors, as a list.

    `x` has shape (..., n, n) and a float or complex dtype. The results are complex: `x @ vr == vr *
    w` and `adjoint(vl) @ x == w[:, None] * adjoint(vl)`, columns of length one;
    `compute_left_eigenvectors` and `compute_right_eigenvectors` say which there are. Eigenvalues
    have a derivative; eigenvectors only with `enable_eigvec_derivs`, as their phase is LAPACK's
    choice. `implementation` and `use_magma` are accepted for JAX's sake. **Left eigenvectors are
    NaN where the matrix has too few right ones** (a defective matrix). Raises `ShapeError` if the
    matrices are not square, and `DtypeError` for integers, booleans and 16-bit floats.

    >>> w, vl, vr = lax.linalg.eig(np.array([[0.0, 1.0], [-1.0, 0.0]]))
    >>> w.imag.round(5)
    Array([ 1., -1.], dtype=float32)
    """
    left, right = bool(compute_left_eigenvectors), bool(compute_right_eigenvectors)
    return list(eig_p.bind(x, left=left, right=right, vectors_differ=bool(enable_eigvec_derivs)))


def _eig_abstract(
    x: ShapedArray, *, left: bool, right: bool, vectors_differ: bool
) -> list[ShapedArray]:
    leading, n, _ = check_matrices("eig", x, square=True)
    dtype = np.result_type(x.dtype, np.complex64)
    vectors = ShapedArray(x.shape, dtype)
    return [ShapedArray((*leading, n), dtype), *([vectors] * (left + right))]


def _eig_impl(xp: Any, x: Any, *, left: bool, right: bool, vectors_differ: bool) -> list[Any]:
    dtype = np.result_type(x.dtype, np.complex64)
    if not (left or right):
        return [each_or_nan(np.linalg.eigvals, x).astype(dtype)]
    w, vr = each_or_nan(lambda a: tuple(np.linalg.eig(a)), x)
    outs = [w.astype(dtype)]
    if left:
        outs.append(each_or_nan(_left_vectors, vr).astype(dtype))
    return [*outs, vr.astype(dtype)] if right else outs


def _left_vectors(vr: Any) -> Any:
    """The columns of the inverse's adjoint, of length one, their largest element real."""
    vl = np.conj(np.swapaxes(np.linalg.inv(vr), -1, -2))
    if vl.shape[-1] == 0:
        return vl
    largest = np.argmax(np.abs(vl), axis=-2)[..., None, :]
    phase = np.conj(np.take_along_axis(vl, largest, -2))
    phase = phase / np.abs(phase)
    return vl * phase / np.linalg.norm(vl, axis=-2, keepdims=True)


def _eig_jvp(primals: Any, tangents: Any, *, left: bool, right: bool, vectors_differ: bool) -> Any:
    """dw = diag(inv(V) dA V) (Giles 2008, section 3.1); for vectors see `_vector_tangent`."""
    if (left or right) and not vectors_differ:
        raise RefusedError(
            "eig: eigenvectors of general matrices have a derivative only up to a factor that spmd "
            "cannot know to be harmless; differentiate eigvals, or pass enable_eigvec_derivs=True "
            "to lax.linalg.eig if your function does not depend on the phase"
        )
    (x,), (dx,) = primals, tangents
    # Of eigenvalues alone, the second derivative needs vectors, and not their phase.
    everything = eig_p.bind(x, left=left, right=True, vectors_differ=True)
    w, vr = everything[0], everything[-1]
    dx = convert_element_type(dx, typeof(vr).dtype)
    dw, dvr = _vector_tangent(w, vr, dx)
    outs, changes = [w], [dw]
    if left:
        vl = everything[1]
        outs.append(vl)
        changes.append(_vector_tangent(conjugate(w), vl, adjoint(dx))[1])
    if right:
        outs.append(vr)
        changes.append(dvr)
    return outs, changes


def _vector_tangent(w: Any, v: Any, dx: Any) -> tuple[Any, Any]:
    """dw, and dV = U + V c for U = V (F * inv(V) dA V), F[i, j] = 1 / (w[j] - w[i]).

    The eigenvalue equation leaves a factor of each column free. LAPACK chooses length one and a
    largest element that is real; to keep both, c = -Re(v^H u) - i Im(u_k) / v_k at that element k.
    """
    inner = matmul(solve(v, dx), v)
    gaps = sub(in_rows(w, inner), in_columns(w, inner))
    free = matmul(v, _over_gaps(inner, gaps))
    rows = typeof(v).ndim - 2
    along = real_part(reduce_sum(mul(conjugate(v), free), (rows,)))
    largest = expand_dims(argmax(abs(v), rows, np.int32), (rows,))
    at_k = squeeze(take_along(v, largest, rows), (rows,))
    change_at_k = squeeze(take_along(free, largest, rows), (rows,))
    turn = div(imag(change_at_k), real(at_k))
    return diagonal(inner), sub(free, mul(v, in_rows(complex(along, turn), v)))


eig_p = stacked(
    "eig",
    abstract=_eig_abstract,
    impl=_eig_impl,
    jvp=_eig_jvp,
    transpose=not_linear("eig"),
    cores=(2,),
    multiple=True,
)
