"""QR factors, with or without pivoting, and the Householder reflections that they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, RefusedError, ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.jvp import zero_tangent
from spmd.core.primitive import Refused
from spmd.core.structural import broadcast_in_dim
from spmd.lax.arithmetic import add, sub
from spmd.lax.concatenate import concatenate
from spmd.lax.convert import convert_element_type
from spmd.lax.families import check_same_dtype, fail
from spmd.lax.linalg.family import (
    adjoint,
    adjoint_of,
    check_matrices,
    diagonal_part,
    lower_part,
    matmul,
    not_linear,
    real_part,
    stacked,
)
from spmd.lax.linalg.lapack import orthogonal_factors
from spmd.lax.linalg.triangular import triangular_solve
from spmd.lax.slicing import slice_in_dim
from spmd.lax.sort import take_along

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- qr ----------------------------------------------------------------------------------------


def qr(x: Any, *, pivoting: bool = False, full_matrices: bool = True, use_magma: Any = None) -> Any:
    """Compute QR factors: `x == Q @ R`, Q with orthonormal columns and R upper triangular.

    For `x` of shape (..., m, n), of a float or complex dtype, and k = min(m, n): Q (..., m, m) and
    R (..., m, n) if `full_matrices`, else Q (..., m, k) and R (..., k, n). With `pivoting` there is
    a third result, the int32 permutation of columns (..., n), with `x[:, p] == Q @ R` and the
    diagonal of R decreasing. `use_magma`, a library that spmd does not have, raises
    `ArgumentError`. Raises `ShapeError` for less than two dims, and `DtypeError` for integers,
    booleans and 16-bit floats.

    >>> q, r = lax.linalg.qr(np.array([[3.0], [4.0]]), full_matrices=False)
    >>> abs(q), abs(r)
    (Array([[0.6],
           [0.8]], dtype=float32), Array([[5.]], dtype=float32))
    """
    if use_magma is not None:
        raise ArgumentError("qr: use_magma chooses a library that spmd does not have; leave it out")
    full = bool(full_matrices)
    return tuple(qr_p.bind(x, pivoting=bool(pivoting), full_matrices=full))


def _qr_abstract(x: ShapedArray, *, pivoting: bool, full_matrices: bool) -> list[ShapedArray]:
    leading, m, n = check_matrices("qr", x)
    k = m if full_matrices else min(m, n)
    x = x.strip_weak()
    outs = [x.update(shape=(*leading, m, k)), x.update(shape=(*leading, k, n))]
    return [*outs, ShapedArray((*leading, n), np.int32)] if pivoting else outs


def _qr_impl(xp: Any, x: Any, *, pivoting: bool, full_matrices: bool) -> list[Any]:
    if pivoting:
        return _pivoted(x, full_matrices)
    found = orthogonal_factors(x, full_matrices)
    if found is not None:
        return list(found)
    q, r = np.linalg.qr(x, "complete" if full_matrices else "reduced")
    return [q.astype(x.dtype), r.astype(x.dtype)]


def _pivoted(x: Any, full_matrices: bool) -> list[Any]:
    """Householder's QR, always of the column of largest norm left (Golub & Van Loan, 5.4.1)."""
    *leading, m, n = x.shape
    a = np.array(x).reshape((int(np.prod(leading)), m, n))
    every = np.arange(a.shape[0])
    places = np.tile(np.arange(n, dtype=np.int32), (a.shape[0], 1))
    q = np.tile(np.eye(m, dtype=a.dtype), (a.shape[0], 1, 1))
    for k in range(min(m, n)):
        left = np.sum(np.abs(a[:, k:, k:]) ** 2, axis=1)
        chosen = k + np.argmax(left, axis=1)
        for moved in (a, places[:, None]):
            swap = moved[every, :, chosen].copy()
            moved[every, :, chosen] = moved[:, :, k]
            moved[:, :, k] = swap
        v, tau, beta = householder_vector(a[:, k:, k])
        reflect(a[:, k:, k:], v, np.conj(tau))
        a[:, k, k] = beta
        a[:, k + 1 :, k] = 0
        # Q = H0 H1 ..., so a reflection acts on it from the right.
        reflect(q[:, :, k:], v, tau, left=False)
    rows = m if full_matrices else min(m, n)
    shapes = ((*leading, m, rows), (*leading, rows, n), (*leading, n))
    outs = (q[:, :, :rows], a[:, :rows], places)
    return [np.ascontiguousarray(y).reshape(s) for y, s in zip(outs, shapes, strict=True)]


def householder_vector(x: Any) -> tuple[Any, Any, Any]:
    """The reflection that takes x to a multiple of e1: v with v[0] = 1, tau, and beta.

    `adjoint(I - tau v adjoint(v)) @ x == beta e1` with real beta, as LAPACK's larfg has it.
    """
    alpha = x[..., 0]
    rest = np.sqrt(np.sum(np.abs(x[..., 1:]) ** 2, axis=-1))
    none = (rest == 0) & (alpha.imag == 0)
    size = np.hypot(np.abs(alpha), rest)
    beta = np.where(none, alpha.real, -np.copysign(size, alpha.real)).astype(x.dtype)
    safe = np.where(none, 1, beta)
    tau = np.where(none, 0, (safe - alpha) / safe).astype(x.dtype)
    v = x / np.where(none, 1, alpha - beta)[..., None]
    v[none] = 0
    v[..., 0] = 1
    return v.astype(x.dtype), tau, beta


def reflect(a: Any, v: Any, tau: Any, left: bool = True) -> None:
    """Multiply matrices in place by `I - tau v adjoint(v)`, from the left or the right."""
    v, tau = v[..., None], tau[..., None, None]
    if left:
        a -= tau * (v @ (adjoint_of(v) @ a))
    else:
        a -= tau * ((a @ v) @ adjoint_of(v))


def _qr_jvp(primals: Any, tangents: Any, *, pivoting: bool, full_matrices: bool) -> Any:
    """With M = Q^H dA inv(R) and the skew W of M's lower part: dQ = Q (W - M) + dA inv(R).

    Walter and Lehmann, "Algorithmic differentiation of linear algebra functions" (arXiv
    1009.6112); the diagonal of R stays real. A wide matrix has the Q of its first columns.
    """
    (x,), (dx,) = primals, tangents
    _, m, n = check_matrices("qr", typeof(x))
    if full_matrices and m > n:
        raise RefusedError(
            f"qr: with full_matrices=True the last {m - n} columns of Q are arbitrary, so they "
            "have no derivative; use full_matrices=False (mode='reduced')"
        )
    outs = qr_p.bind(x, pivoting=pivoting, full_matrices=False)
    q, r, *places = outs
    if pivoting:
        spread = broadcast_in_dim(
            places[0],
            typeof(x).shape,
            (*range(typeof(x).ndim - 2), typeof(x).ndim - 1),
        )
        dx = take_along(dx, spread, typeof(x).ndim - 1)
    first = slice_in_dim(dx, 0, min(m, n), axis=-1)
    square = slice_in_dim(r, 0, min(m, n), axis=-1)
    solved = triangular_solve(square, first, left_side=False, lower=False)
    inner = matmul(adjoint(q), solved)
    below = lower_part(inner, strict=True)
    skew = sub(below, adjoint(below))
    if dtypes.is_complex(typeof(x).dtype):
        middle = diagonal_part(inner)
        skew = add(skew, sub(middle, convert_element_type(real_part(middle), typeof(x).dtype)))
    dq = add(matmul(q, sub(skew, inner)), solved)
    dr = matmul(sub(inner, skew), square)
    if n > m:
        # Q R2 = A2, the columns behind: dR2 = Q^H (dA2 - dQ R2).
        behind = sub(slice_in_dim(dx, m, n, axis=-1), matmul(dq, slice_in_dim(r, m, n, axis=-1)))
        dr = concatenate([dr, matmul(adjoint(q), behind)], typeof(r).ndim - 1)
    return outs, [dq, dr, *map(zero_tangent, places)]


qr_p = stacked(
    "qr",
    abstract=_qr_abstract,
    impl=_qr_impl,
    jvp=_qr_jvp,
    transpose=not_linear("qr"),
    cores=(2,),
    multiple=True,
)

# ---- geqrf -------------------------------------------------------------------------------------


def geqrf(x: Any) -> tuple[Array, Array]:
    """Compute QR factors as LAPACK holds them: R above the Householder vectors, and taus.

    For `x` of shape (..., m, n), of a float or complex dtype: (..., m, n), and taus (..., min(m,
    n)). `householder_product` makes Q. Raises `ShapeError` for less than two dims, and `DtypeError`
    for integers, booleans and 16-bit floats.

    >>> packed, taus = lax.linalg.geqrf(np.array([[3.0], [4.0]]))
    >>> packed.shape, taus.shape
    ((2, 1), (1,))
    """
    packed, taus = geqrf_p.bind(x)
    return packed, taus


def _geqrf_abstract(x: ShapedArray) -> list[ShapedArray]:
    leading, m, n = check_matrices("geqrf", x)
    x = x.strip_weak()
    return [x, x.update(shape=(*leading, min(m, n)))]


def _geqrf_impl(xp: Any, x: Any) -> list[Any]:
    packed, taus = np.linalg.qr(x, "raw")
    packed = np.ascontiguousarray(np.swapaxes(packed, -1, -2))
    return [packed.astype(x.dtype), taus.astype(x.dtype)]


geqrf_p = stacked(
    "geqrf",
    abstract=_geqrf_abstract,
    impl=_geqrf_impl,
    jvp=Refused("its vectors have no derivative rule; differentiate lax.linalg.qr"),
    transpose=not_linear("geqrf"),
    cores=(2,),
    multiple=True,
)

# ---- householder_product -----------------------------------------------------------------------


def householder_product(a: Any, taus: Any) -> Array:
    """Compute the first columns of a product of reflections: LAPACK's orgqr.

    A reflection is `I - tau v adjoint(v)`. Column i of `a` (..., m, n) holds vector i below the
    diagonal, whose own element is one; `taus` is (..., k) with k <= n <= m. The result has the
    shape of `a` and its dtype, a float or complex one. Raises `ShapeError` or `DtypeError` for
    other operands.

    >>> q = lax.linalg.householder_product(*lax.linalg.geqrf(np.array([[3.0], [4.0]])))
    >>> abs(q)
    Array([[0.6],
           [0.8]], dtype=float32)
    """
    return householder_product_p.bind(a, taus)


def _check_taus(name: str, a: ShapedArray, taus: ShapedArray, most: int) -> None:
    check_same_dtype(name, ("a", "taus"), (a, taus))
    if taus.shape[:-1] != a.shape[:-2] or taus.ndim != a.ndim - 1 or taus.shape[-1] > most:
        fail(
            ShapeError,
            f"{name}: taus must be (..., k), k at most {most}, with the leading dims of a {a}; "
            f"got {taus}",
        )


def _product_abstract(a: ShapedArray, taus: ShapedArray) -> ShapedArray:
    _, m, n = check_matrices("householder_product", a, "a")
    if m < n:
        fail(ShapeError, f"householder_product: a must not have more columns than rows, got {a}")
    _check_taus("householder_product", a, taus, min(m, n))
    return a.strip_weak()


def _product_impl(xp: Any, a: Any, taus: Any) -> Any:
    out = np.broadcast_to(np.eye(*a.shape[-2:], dtype=a.dtype), a.shape).copy()
    for k in reversed(range(taus.shape[-1])):
        reflect(out[..., k:, k:], _vector(a, k), taus[..., k])
    return out


def _vector(a: Any, k: int) -> Any:
    """Householder vector k of a packed factor, from its element that is one."""
    v = a[..., k:, k].copy()
    v[..., 0] = 1
    return v


householder_product_p = stacked(
    "householder_product",
    abstract=_product_abstract,
    impl=_product_impl,
    jvp=Refused("has no derivative rule; differentiate lax.linalg.qr"),
    transpose=not_linear("householder_product"),
    cores=(2, 1),
)

# ---- ormqr -------------------------------------------------------------------------------------


def ormqr(a: Any, taus: Any, c: Any, *, left: bool = True, transpose: bool = False) -> Array:
    """Multiply `c` by the Q that `a` and `taus` hold, without making Q.

    With `left` it is `Q @ c`, else `c @ Q`; `transpose` takes the adjoint of Q. `a` is (..., r, k),
    where r is the number of rows of `c` (columns, from the right), and `c` (..., m, n), which is
    the shape of the result. All have one float or complex dtype. Raises `ShapeError` or
    `DtypeError` for other operands.

    >>> x = np.array([[3.0], [4.0]])
    >>> abs(lax.linalg.ormqr(*lax.linalg.geqrf(x), x, transpose=True)).round(5)
    Array([[5.],
           [0.]], dtype=float32)
    """
    return ormqr_p.bind(a, taus, c, left=bool(left), transpose=bool(transpose))


def _ormqr_abstract(
    a: ShapedArray, taus: ShapedArray, c: ShapedArray, *, left: bool, transpose: bool
) -> ShapedArray:
    leading, r, k = check_matrices("ormqr", a, "a")
    others, m, n = check_matrices("ormqr", c, "c")
    _check_taus("ormqr", a, taus, min(r, k))
    check_same_dtype("ormqr", ("a", "c"), (a, c))
    if others != leading or r != (m if left else n):
        fail(
            ShapeError,
            f"ormqr: dim {-2 if left else -1} of c {c} must be {r}, the rows of a {a}, and leading "
            "dims must be equal",
        )
    return c.strip_weak()


def _ormqr_impl(xp: Any, a: Any, taus: Any, c: Any, *, left: bool, transpose: bool) -> Any:
    out = np.array(c)
    order = range(taus.shape[-1])
    # Q = H0 H1 ...: from the left the last acts first, from the right and transposed the first.
    for k in order if left == transpose else reversed(order):
        tau = np.conj(taus[..., k]) if transpose else taus[..., k]
        reflect(out[..., k:, :] if left else out[..., :, k:], _vector(a, k), tau, left)
    return out


ormqr_p = stacked(
    "ormqr",
    abstract=_ormqr_abstract,
    impl=_ormqr_impl,
    jvp=Refused("has no derivative rule; multiply with the Q of lax.linalg.qr"),
    transpose=Refused("has no transpose rule; multiply with the Q of lax.linalg.qr"),
    cores=(2, 1, 2),
)
