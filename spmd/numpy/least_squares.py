"""Least squares, pseudo-inverses, rank and condition: what singular values are for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd import lax
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.core.custom import custom_jvp
from spmd.lax.linalg.family import adjoint, in_columns, matmul, symmetrize
from spmd.numpy.factorizations import inexact_matrix, inv, solve, svd, svdvals
from spmd.numpy.logic import isnan
from spmd.numpy.manipulation import moveaxis, reshape
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    default_int,
    operand,
    plain,
    promote_args_inexact,
    promote_dtypes_inexact,
    promotes_inside,
)
from spmd.numpy.reductions import any as _any
from spmd.numpy.reductions import sum as _sum
from spmd.numpy.searching import where
from spmd.sharding.array import Array, ArrayLike


def _cutoff(s: Any, rtol: Any, default: float) -> Any:
    """The smallest singular value that counts, for each matrix."""
    if typeof(s).shape[-1] == 0:
        return np.zeros((), typeof(s).dtype)
    relative = as_array(default if rtol is None else rtol).astype(typeof(s).dtype)
    return s[..., :1] * relative[..., None]


def _eps(x: Any) -> float:
    return float(np.finfo(typeof(x).dtype).eps)


@promotes_inside()
def matrix_rank(
    M: ArrayLike, rtol: Any = None, *, hermitian: bool = False, tol: Any = None
) -> Array:
    """The rank of matrices: how many singular values exceed a bound.

    `M` has shape (..., m, n), and the result is an integer in shape (...): for numbers and vectors
    whether an element is not 0. The bound is the largest singular value times `rtol`, by default
    `max(m, n)` times the precision of the dtype, as in NumPy and the array API standard (JAX takes
    `rtol` as the bound itself); `tol` is an absolute bound. `hermitian` promises that `M` is, and
    is quicker. Raises an `ArgumentError` if both bounds are given.

    >>> snp.linalg.matrix_rank(np.array([[1.0, 2.0], [2.0, 4.0]]))
    Array(1, dtype=int32)
    """
    if tol is not None and rtol is not None:
        raise ArgumentError("matrix_rank: only one of tol and rtol may be given")
    x = operand("matrix_rank", M)
    if typeof(x).ndim < 2:
        return _any(as_array(x) != 0).astype(np.int32)
    x = inexact_matrix("matrix_rank", x)
    s = svd(x, full_matrices=False, compute_uv=False, hermitian=hermitian)
    if tol is not None:
        return _sum(s > as_array(tol)[..., None], -1)
    return _sum(s > _cutoff(s, rtol, max(typeof(x).shape[-2:]) * _eps(x)), -1)


def cond(x: ArrayLike, p: ArrayLike | None = None) -> Array:
    """The condition number of matrices: `norm(x, p) * norm(inv(x), p)`, by singular values for 2.

    `x` has shape (..., m, n), and the result has shape (...). `p` is 2 or None for the ratio of the
    largest to the smallest singular value, and -2 for its inverse. For square matrices it may also
    be "fro", "nuc", 1, -1, inf or -inf, as in `norm`. The result has the real floating dtype to
    which `x` is promoted. Raises a `ShapeError` if `x` has fewer than two dims, if the matrices are
    empty, and if they are not square for such a `p`; an `ArgumentError` for another `p`.

    >>> cond(array([[2.0, 0.0], [0.0, 1.0]]))
    Array(2., dtype=float32)
    """
    x = inexact_matrix("cond", x)
    if 0 in typeof(x).shape[-2:]:
        raise ShapeError(f"cond: an empty matrix has no condition, got shape {typeof(x).shape}")
    if p in (None, 2, -2):
        s = svdvals(x)
        return s[..., -1] / s[..., 0] if p == -2 else s[..., 0] / s[..., -1]
    if p not in ("fro", "f", "nuc", 1, -1, np.inf, -np.inf):
        raise ArgumentError(f"cond: p={p!r} must be None, 'fro', 'nuc', 1, -1, 2, -2, inf or -inf")
    x = inexact_matrix("cond", x, square=True)
    found = norm_of_matrix(x, p) * norm_of_matrix(inv(x), p)
    return where(isnan(found) & ~_any(isnan(x), (-2, -1)), np.inf, found)


def norm_of_matrix(x: Any, ord: Any) -> Any:
    """The norm of matrices by their entries: "fro", 1, -1, inf or -inf; or "nuc"."""
    if ord == "nuc":
        return _sum(svdvals(x), -1)
    size = lax.abs(x)
    if ord in ("fro", "f"):
        return lax.sqrt(_sum(size * size, (-2, -1)))
    sums = _sum(size, -2 if ord in (1, -1) else -1)
    return sums.max(-1) if ord in (1, np.inf) else sums.min(-1)


@promotes_inside()
def pinv(a: ArrayLike, rtol: Any = None, hermitian: bool = False, *, rcond: Any = None) -> Array:
    """The Moore-Penrose pseudo-inverses of matrices.

    `a` has shape (..., m, n), and the result (..., n, m); integers become the default float.
    Singular values up to `rtol` (or its old name `rcond`) times the largest count as zero; the
    default is `10 * max(m, n)` times the precision of the dtype. `hermitian` promises that `a` is.

    >>> snp.linalg.pinv(np.array([[2.0, 0.0], [0.0, 0.0]]))
    Array([[0.5, 0. ],
           [0. , 0. ]], dtype=float32)
    """
    a = inexact_matrix("pinv", a, square=hermitian)
    rtol = rcond if rtol is None else rtol
    if 0 in typeof(a).shape:
        return adjoint(a)
    if hermitian:
        a = symmetrize(a)

    @custom_jvp
    def pseudo(a: Any) -> Any:
        u, s, vh = svd(a, full_matrices=False, hermitian=hermitian)
        kept = s > _cutoff(s, rtol, 10 * max(typeof(a).shape[-2:]) * _eps(a))
        inverse = where(kept, 1 / where(kept, s, 1), 0).astype(typeof(u).dtype)
        scaled = lax.mul(adjoint(u), in_columns(inverse, adjoint(u)))
        return matmul(adjoint(vh), scaled)

    @pseudo.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        """Golub and Pereyra, SIAM J. Numer. Anal. 10 (1973), 413-432, equation 4.12."""
        (a,), (da,) = primals, tangents
        p = pseudo(a)
        rows = matmul(matmul(p, adjoint(p)), adjoint(da))
        columns = matmul(adjoint(da), matmul(adjoint(p), p))
        change = lax.neg(matmul(matmul(p, da), p))
        change = change + rows - matmul(matmul(rows, a), p)
        return p, change + columns - matmul(p, matmul(a, columns))

    return pseudo(a)


def lstsq(
    a: Any, b: Any, rcond: float | None = None, *, numpy_resid: bool = False
) -> tuple[Array, Array, Array, Array]:
    """Find the `x` of smallest norm among those that minimise `norm(a @ x - b)`.

    The result is a tuple: x, residuals, rank of `a`, singular values of `a`. `a` is (m, n), `b`
    (m,) or (m, k); x is (n,) or (n, k), and the residuals are squared norms, one for each column of
    `b`. Both are promoted to one floating or complex dtype. Singular values below `rcond` times the
    largest count as zero. With `numpy_resid` the residuals are an array of size 0 where NumPy's
    are, which needs concrete arrays. Raises a `ShapeError` if the shapes do not fit.

    >>> x, *_ = snp.linalg.lstsq(np.array([[2.0], [2.0]]), np.array([1.0, 3.0]))
    >>> snp.allclose(x, np.array([1.0]))
    Array(True, dtype=bool)
    """
    check_arraylike("lstsq", a, b)
    a, b = (as_array(x) for x in promote_dtypes_inexact(plain(a), plain(b)))
    shape = typeof(a).shape
    if len(shape) != 2 or typeof(b).ndim not in (1, 2) or typeof(b).shape[0] != shape[0]:
        raise ShapeError(
            f"lstsq: a must be (m, n) and b (m,) or (m, k), got {shape} and {typeof(b).shape}"
        )
    vector = typeof(b).ndim == 1
    b = b[:, None] if vector else b
    if 0 in shape:
        x = lax.full((shape[1], typeof(b).shape[1]), 0, typeof(a).dtype)
        rank, s = as_array(np.int32(0)), lax.full((0,), 0, np.finfo(typeof(a).dtype).dtype)
    else:
        x, rank, s = _smallest_solution(a, b, rcond)
        rank = lax.convert_element_type(rank, default_int())
    if numpy_resid and (int(rank) < shape[1] or shape[0] <= shape[1]):
        residual = lax.full((0,), 0, np.finfo(typeof(a).dtype).dtype)
    else:
        left = lax.abs(b - matmul(a, x))
        residual = _sum(left * left, 0)
    return (x[:, 0] if vector else x), residual, rank, s


def _smallest_solution(a: Any, b: Any, rcond: Any) -> tuple[Any, Any, Any]:
    u, s, vh = svd(a, full_matrices=False)
    relative = max(typeof(a).shape) * _eps(a) if rcond is None else rcond
    relative = as_array(relative).astype(typeof(s).dtype)
    kept = (s > 0) & (s >= where(relative < 0, _eps(a), relative) * s[0])
    inverse = where(kept, 1 / where(kept, s, 1), 0).astype(typeof(u).dtype)
    along = matmul(adjoint(u), b)
    return matmul(adjoint(vh), along * inverse[:, None]), _sum(kept, dtype=np.int32), s


# ---- tensors -----------------------------------------------------------------------------------


def tensorinv(a: ArrayLike, ind: int = 2) -> Array:
    """The inverse of a tensor as a map from its last dims to its first `ind` ones.

    The product of the first sizes equals that of the last ones, and the result has the last dims
    first. Integers become the default float. Raises a `ShapeError` if they differ.

    >>> snp.linalg.tensorinv(2 * np.eye(4).reshape(2, 2, 2, 2)).shape
    (2, 2, 2, 2)
    """
    (a,) = promote_args_inexact("tensorinv", a)
    shape = typeof(a).shape
    first, last = shape[: int(ind)], shape[int(ind) :]
    if ind <= 0 or math.prod(first) != math.prod(last):
        raise ShapeError(
            f"tensorinv: with ind={ind}, shape {shape} is cut into {first} and {last}, whose sizes "
            f"{math.prod(first)} and {math.prod(last)} must be equal (and ind > 0)"
        )
    flat = inv(reshape(a, (math.prod(first), -1)))
    return reshape(flat, (*last, *first))


def tensorsolve(a: ArrayLike, b: ArrayLike, axes: Any = None) -> Array:
    """Solve the equations `tensordot(a, x, x.ndim) == b`.

    The first dims of `a` are those of `b`, the others, of the same size in all, those of the
    result; dims `axes` of `a` are moved to its end first. Both are promoted to one floating or
    complex dtype. Raises a `ShapeError` if the shapes do not fit.

    >>> snp.linalg.tensorsolve(2 * np.eye(4).reshape(2, 2, 4), np.ones((2, 2)))
    Array([0.5, 0.5, 0.5, 0.5], dtype=float32)
    """
    check_arraylike("tensorsolve", a, b)
    a, b = promote_dtypes_inexact(plain(a), plain(b))
    if axes is not None:
        a = moveaxis(a, axes, tuple(range(-len(axes), 0)))
    first, last = typeof(a).shape[: typeof(b).ndim], typeof(a).shape[typeof(b).ndim :]
    size = math.prod(last)
    if first != typeof(b).shape or math.prod(first) != size:
        raise ShapeError(
            f"tensorsolve: the first dims of a {typeof(a).shape} must be those of b "
            f"{typeof(b).shape}, and the others of the same size, {math.prod(first)}"
        )
    return reshape(solve(reshape(a, (size, size)), reshape(b, (-1,))), last)
