"""Sylvester's equation, and square roots of matrices, both by Schur form."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import DtypeError, ShapeError
from spmd.core.aval import ShapedArray
from spmd.core.primitive import Zero
from spmd.core.structural import add_any, is_linear
from spmd.lax.arithmetic import neg
from spmd.lax.families import check_same_dtype, fail
from spmd.lax.linalg.family import (
    adjoint_of,
    check_matrices,
    matmul,
    not_linear,
    stacked,
    swapped,
)
from spmd.lax.linalg.schur import complex_form
from spmd.lax.linalg.triangular import forward_substitution

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- sylvester ---------------------------------------------------------------------------------


def sylvester(a: Any, b: Any, c: Any) -> Array:
    """Solve `a @ x + x @ b == c`.

    `a` has shape (..., m, m), `b` (..., n, n), `c` (..., m, n), which is also the shape of the
    result; all have one float or complex dtype. There is one solution if no eigenvalue of `a` is
    minus one of `b`; otherwise infinities or NaN. Raises `ShapeError` or `DtypeError` for other
    operands.

    >>> lax.linalg.sylvester(np.eye(2), np.eye(2), np.ones((2, 2)))
    Array([[0.5, 0.5],
           [0.5, 0.5]], dtype=float32)
    """
    return sylvester_p.bind(a, b, c)


def _sylvester_abstract(a: ShapedArray, b: ShapedArray, c: ShapedArray) -> ShapedArray:
    leading, m, _ = check_matrices("sylvester", a, "a", square=True)
    others, n, _ = check_matrices("sylvester", b, "b", square=True)
    check_same_dtype("sylvester", ("a", "b", "c"), (a, b, c))
    if c.shape != (*leading, m, n) or others != leading:
        fail(ShapeError, f"sylvester: c must be {[*leading, m, n]} for a {a} and b {b}, got {c}")
    return c.strip_weak()


def _sylvester_impl(xp: Any, a: Any, b: Any, c: Any) -> Any:
    """Bartels and Stewart, Comm. ACM 15 (1972), 820-826, in complex numbers."""
    r, u = complex_form(a)
    s, v = complex_form(b)
    f = adjoint_of(u) @ c @ v
    y = np.zeros_like(f)
    unit = np.eye(r.shape[-1])
    with np.errstate(all="ignore"):
        for k in range(s.shape[-1]):
            right = f[..., :, k : k + 1] - y[..., :, :k] @ s[..., :k, k : k + 1]
            matrix = r + s[..., k, k, None, None] * unit
            flipped = np.flip(matrix, (-1, -2)), np.flip(right, -2)
            y[..., :, k : k + 1] = np.flip(forward_substitution(*flipped, False), -2)
    x = u @ y @ adjoint_of(v)
    return (x if c.dtype.kind == "c" else x.real).astype(c.dtype)


def _sylvester_jvp(primals: Any, tangents: Any) -> Any:
    """a dx + dx b = dc - da x - x db."""
    a, b, c = primals
    da, db, dc = tangents
    x = sylvester_p.bind(a, b, c)
    terms = [] if isinstance(dc, Zero) else [dc]
    if not isinstance(da, Zero):
        terms.append(neg(matmul(da, x)))
    if not isinstance(db, Zero):
        terms.append(neg(matmul(x, db)))
    return x, sylvester_p.bind(a, b, functools.reduce(add_any, terms))


def _sylvester_transpose(ct: Any, a: Any, b: Any, c: Any) -> Any:
    assert is_linear(c) and not is_linear(a) and not is_linear(b)
    return [None, None, sylvester_p.bind(swapped(a), swapped(b), ct)]


sylvester_p = stacked(
    "sylvester",
    abstract=_sylvester_abstract,
    impl=_sylvester_impl,
    jvp=_sylvester_jvp,
    transpose=_sylvester_transpose,
    cores=(2, 2, 2),
)

# ---- sqrtm -------------------------------------------------------------------------------------


def sqrtm(a: Any) -> Array:
    """Compute the principal square root of complex square matrices, `sqrtm(a) @ sqrtm(a) == a`.

    `a` has shape (..., n, n) and a complex dtype, which stay. Raises `ShapeError` if the matrices
    are not square, and `DtypeError` for other dtypes.

    >>> lax.linalg.sqrtm(np.diag([4.0 + 0.0j, 9.0])).real
    Array([[2., 0.],
           [0., 3.]], dtype=float32)
    """
    return sqrtm_p.bind(a)


def _sqrtm_abstract(a: ShapedArray) -> ShapedArray:
    check_matrices("sqrtm", a, "a", square=True)
    if not dtypes.is_complex(a.dtype):
        fail(DtypeError, f"sqrtm: a must be complex, as its root may be; got {a}")
    return a.strip_weak()


def _sqrtm_impl(xp: Any, a: Any) -> Any:
    """Bjorck and Hammarling, Linear Algebra Appl. 52 (1983), 127-140: column by column."""
    t, z = complex_form(a)
    n = t.shape[-1]
    diagonal = np.sqrt(t[..., np.arange(n), np.arange(n)])
    root = np.zeros_like(t)
    with np.errstate(all="ignore"):
        for k in range(n):
            root[..., k, k] = diagonal[..., k]
            if k:
                sums = diagonal[..., :k] + diagonal[..., k, None]
                # For two eigenvalues 0, an entry 0 has the root 0; any other entry has none.
                alone = sums == 0
                matrix = root[..., :k, :k] + diagonal[..., k, None, None] * np.eye(k)
                matrix[..., np.arange(k), np.arange(k)] += alone
                right = np.flip(t[..., :k, k : k + 1], -2)
                solved = forward_substitution(np.flip(matrix, (-1, -2)), right, False)
                solved = np.flip(solved, -2)[..., 0]
                root[..., :k, k] = np.where(alone & (solved != 0), np.nan, solved)
    return (z @ root @ adjoint_of(z)).astype(a.dtype)


def _sqrtm_jvp(primals: Any, tangents: Any) -> Any:
    """The root X of A has X dX + dX X = dA."""
    root = sqrtm_p.bind(*primals)
    return root, sylvester_p.bind(root, root, tangents[0])


sqrtm_p = stacked(
    "sqrtm",
    abstract=_sqrtm_abstract,
    impl=_sqrtm_impl,
    jvp=_sqrtm_jvp,
    transpose=not_linear("sqrtm"),
    cores=(2,),
)
