"""Singular values and vectors."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, RefusedError
from spmd.core.aval import ShapedArray, typeof
from spmd.lax.arithmetic import add, mul, sub
from spmd.lax.convert import convert_element_type
from spmd.lax.linalg.family import (
    adjoint,
    check_matrices,
    diagonal,
    diagonal_part,
    in_columns,
    in_rows,
    inverse_or_zero,
    lapack,
    matmul,
    not_linear,
    real_part,
    scale,
    stacked,
)
from spmd.lax.slicing import slice_in_dim


class SvdAlgorithm(enum.Enum):
    """The algorithms that an SVD accepts; LAPACK's divide and conquer (gesdd) runs."""

    DEFAULT = "default"
    QR = "QR"
    JACOBI = "Jacobi"
    POLAR = "polar"


def svd(
    x: Any,
    *,
    full_matrices: bool = True,
    compute_uv: bool = True,
    subset_by_index: tuple[int, int] | None = None,
    algorithm: SvdAlgorithm | None = None,
) -> Any:
    """Compute the singular value decomposition, `x == (U * s) @ Vh`: (U, s, Vh).

    Singular values are in decreasing order. For `x` of shape (..., m, n), of a float or complex
    dtype, and k = min(m, n): U (..., m, k), s real (..., k), Vh (..., k, n); with `full_matrices` U
    is (..., m, m) and Vh (..., n, n). Without `compute_uv` only s is returned.
    `subset_by_index=(start, stop)` keeps some of the singular values, and needs reduced factors, or
    `ArgumentError` is raised. `algorithm` is accepted for JAX's sake. Raises `ShapeError` for less
    than two dims, and `DtypeError` for integers, booleans and 16-bit floats.

    >>> lax.linalg.svd(np.diag([3.0, 4.0]), compute_uv=False)
    Array([4., 3.], dtype=float32)
    """
    _, m, n = check_matrices("svd", typeof(x))
    full = bool(full_matrices) and m != n
    if subset_by_index is None:
        outs = svd_p.bind(x, full_matrices=full, compute_uv=bool(compute_uv))
        return tuple(outs) if compute_uv else outs[0]
    start, stop = subset_by_index
    if not 0 <= start <= stop <= min(m, n):
        raise ArgumentError(
            f"svd: subset_by_index={subset_by_index} must lie within (0, {min(m, n)}), the "
            f"singular values of {typeof(x)}"
        )
    if full and compute_uv and (start, stop) != (0, min(m, n)):
        raise ArgumentError("svd: subset_by_index needs full_matrices=False")
    outs = svd_p.bind(x, full_matrices=full, compute_uv=bool(compute_uv))
    if not compute_uv:
        return slice_in_dim(outs[0], start, stop, axis=-1)
    u, s, vh = outs
    if (start, stop) == (0, min(m, n)):
        return u, s, vh
    return (
        slice_in_dim(u, start, stop, axis=-1),
        slice_in_dim(s, start, stop, axis=-1),
        slice_in_dim(vh, start, stop, axis=-2),
    )


def _abstract(x: ShapedArray, *, full_matrices: bool, compute_uv: bool) -> list[ShapedArray]:
    leading, m, n = check_matrices("svd", x)
    k = min(m, n)
    s = ShapedArray((*leading, k), np.finfo(x.dtype).dtype)
    if not compute_uv:
        return [s]
    x = x.strip_weak()
    u = x.update(shape=(*leading, m, m if full_matrices else k))
    return [u, s, x.update(shape=(*leading, n if full_matrices else k, n))]


def _impl(xp: Any, x: Any, *, full_matrices: bool, compute_uv: bool) -> list[Any]:
    if not compute_uv:
        return [lapack("svd", lambda a: np.linalg.svd(a, compute_uv=False), x)]
    name = "svd_f" if full_matrices else "svd_s"
    return list(lapack(name, lambda a: tuple(np.linalg.svd(a, full_matrices)), x))


def _jvp(primals: Any, tangents: Any, *, full_matrices: bool, compute_uv: bool) -> Any:
    """ds = diag(U^H dA V), and dU, dV of the differences of squared singular values.

    Giles 2008, section 3.2; Townsend, "Differentiating the singular value decomposition" (2016),
    for rectangular and complex matrices. Where singular values are equal their vectors are
    arbitrary, and the rotation among them is left out.
    """
    (x,), (dx,) = primals, tangents
    if full_matrices and compute_uv:
        raise RefusedError(
            "svd: with full_matrices=True the vectors behind the singular values are arbitrary, so "
            "they have no derivative; use full_matrices=False"
        )
    u, s, vh = svd_p.bind(x, full_matrices=False, compute_uv=True)
    inner = matmul(matmul(adjoint(u), dx), adjoint(vh))
    ds = real_part(diagonal(inner))
    if not compute_uv:
        return [s], [ds]
    du, dvh = _vector_tangents(dx, inner, u, s, vh)
    return [u, s, vh], [du, ds, dvh]


def _vector_tangents(dx: Any, inner: Any, u: Any, s: Any, vh: Any) -> tuple[Any, Any]:
    dtype = typeof(u).dtype
    columns, rows = in_rows(s, inner), in_columns(s, inner)
    apart = inverse_or_zero(mul(sub(columns, rows), add(columns, rows)))
    apart, columns, rows = (convert_element_type(y, dtype) for y in (apart, columns, rows))
    scaled, other = mul(inner, columns), mul(rows, inner)
    turn_u = mul(apart, add(scaled, adjoint(scaled)))
    turn_v = mul(apart, add(other, adjoint(other)))
    inverse = convert_element_type(inverse_or_zero(s), dtype)
    if dtypes.is_complex(dtype):
        # The phase of each pair is free; LAPACK's choice is not differentiable, this one is fixed
        # by leaving V's diagonal alone.
        middle = scale(diagonal_part(sub(inner, adjoint(inner))), 0.5)
        turn_u = add(turn_u, mul(middle, in_rows(inverse, middle)))
    v = adjoint(vh)
    du, dv = matmul(u, turn_u), matmul(v, turn_v)
    *_, m, k = typeof(u).shape
    n = typeof(v).shape[-2]
    if m > k:
        du = add(du, _outside(u, matmul(dx, v), inverse))
    if n > k:
        dv = add(dv, _outside(v, matmul(adjoint(dx), u), inverse))
    return du, adjoint(dv)


def _outside(u: Any, moved: Any, inverse: Any) -> Any:
    """The part of `moved` orthogonal to the columns of u, each column divided by its value."""
    part = sub(moved, matmul(u, matmul(adjoint(u), moved)))
    return mul(part, in_rows(inverse, part))


svd_p = stacked(
    "svd",
    abstract=_abstract,
    impl=_impl,
    jvp=_jvp,
    transpose=not_linear("svd"),
    cores=(2,),
    multiple=True,
)
