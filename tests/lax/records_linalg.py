"""The table of op records, continued: linear algebra, several results each.

`function` takes the namespace first, so the same line runs over `spmd.lax` and over `jax.lax`, and
returns what does not depend on a factor's free sign or phase.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

ALL = tuple(map(np.dtype, (np.float32, np.float64, np.complex64, np.complex128)))
REAL = ALL[:2]


@dataclass(frozen=True)
class Linear:
    """An example of one primitive: operands of these shapes, `order` of derivatives compared."""

    primitive: str
    case: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    order: int = 2
    dtypes: tuple[np.dtype, ...] = ALL
    oracle: bool = True
    integers: bool = False

    def __str__(self) -> str:
        return f"{self.primitive}-{self.case}"

    def make(self, dtype: Any, seed: int = 0) -> list[np.ndarray]:
        """Random operands of one dtype."""
        rng = np.random.default_rng(seed + 7)
        if self.integers:
            return [rng.integers(k, 5, s, dtype=np.int32) for s in self.shapes for k in [s[-1] - 1]]
        out = [rng.normal(size=s) for s in self.shapes]
        if np.dtype(dtype).kind == "c":
            out = [x + 1j * rng.normal(size=x.shape) for x in out]
        return [x.astype(dtype) for x in out]


def adjoint(lax: Any, x: Any) -> Any:
    """The conjugate transpose of one matrix."""
    x = lax.transpose(x, (1, 0))
    return lax.conj(x) if x.dtype.kind == "c" else x


def positive(lax: Any, x: Any) -> Any:
    """A Hermitian positive definite matrix."""
    return lax.dot(x, adjoint(lax, x)) + np.eye(x.shape[0], dtype=x.dtype)


def size(lax: Any, x: Any) -> Any:
    """Squared absolute values."""
    return lax.real(x * lax.conj(x)) if x.dtype.kind == "c" else x * x


def _cholesky(lax: Any, x: Any) -> Any:
    return lax.linalg.cholesky(positive(lax, x))


def _triangular(**how: Any) -> Callable[..., Any]:
    return lambda lax, a, b: lax.linalg.triangular_solve(a + 3 * np.eye(3, dtype=a.dtype), b, **how)


def _svd(lax: Any, x: Any) -> Any:
    u, s, vh = lax.linalg.svd(x, full_matrices=False)
    return size(lax, u), s, lax.dot(u[:, :1], vh[:1, :])


def _eigh(lax: Any, x: Any) -> Any:
    v, w = lax.linalg.eigh(x + adjoint(lax, x))
    return w, lax.dot(v[:, :1], adjoint(lax, v[:, :1])), size(lax, v)


def _eig(lax: Any, x: Any) -> Any:
    w, vl, vr = lax.linalg.eig(x, enable_eigvec_derivs=True)
    return w, size(lax, vl), size(lax, vr)


def _eigvals(lax: Any, x: Any) -> Any:
    none = {"compute_left_eigenvectors": False, "compute_right_eigenvectors": False}
    return lax.linalg.eig(x, **none)[0]


def _rotated(lax: Any, x: Any) -> Any:
    t, z = lax.linalg.schur(x)
    return lax.dot(lax.dot(z, t), adjoint(lax, z)), lax.dot(z, adjoint(lax, z))


def _householder(lax: Any, x: Any) -> Any:
    packed, taus = lax.linalg.geqrf(x)
    return lax.linalg.householder_product(packed, taus)


def _sylvester(lax: Any, a: Any, b: Any, c: Any) -> Any:
    shift = 4 * np.eye(3, dtype=a.dtype)
    return lax.linalg.sylvester(a + shift, b, c)


def _one(name: str, **how: Any) -> Callable[..., Any]:
    return lambda lax, *xs: getattr(lax.linalg, name)(*xs, **how)


RECORDS = [
    Linear("cholesky", "positive", _cholesky, ((3, 3),)),
    Linear(
        "cholesky",
        "triangle",
        lambda lax, x: lax.linalg.cholesky(
            x * 0.1 + 3 * np.eye(3, dtype=x.dtype), symmetrize_input=False
        ),
        ((3, 3),),
    ),
    Linear(
        "cholesky_update",
        "random",
        lambda lax, r, w: size(lax, lax.linalg.cholesky_update(_triu(r), w)),
        ((4, 4), (4,)),
        order=0,
        dtypes=REAL,
        oracle=False,
    ),
    Linear("triangular_solve", "left", _triangular(left_side=True, lower=True), ((3, 3), (3, 2))),
    Linear(
        "triangular_solve",
        "right adjoint",
        _triangular(transpose_a=True, conjugate_a=True),
        ((3, 3), (2, 3)),
    ),
    Linear(
        "triangular_solve",
        "unit",
        _triangular(left_side=True, transpose_a=True, unit_diagonal=True),
        ((3, 3), (3, 2)),
    ),
    Linear("triangular_solve", "vector", _triangular(left_side=True), ((3, 3), (3,)), order=1),
    Linear("lu", "square", _one("lu"), ((3, 3),)),
    Linear("lu", "wide", _one("lu"), ((2, 4),)),
    Linear("lu", "tall", _one("lu"), ((4, 2),)),
    Linear("lu", "blocks", _one("lu"), ((40, 45),), order=0),
    Linear(
        "lu_pivots_to_permutation",
        "three",
        _one("lu_pivots_to_permutation", permutation_size=5),
        ((3,),),
        order=0,
        dtypes=REAL[:1],
        integers=True,
    ),
    Linear("solve", "matrix", _one("solve"), ((3, 3), (3, 2)), oracle=False),
    Linear("qr", "square", _one("qr"), ((3, 3),)),
    Linear("qr", "tall", _one("qr", full_matrices=False), ((4, 2),)),
    Linear("qr", "wide", _one("qr"), ((2, 4),)),
    Linear("qr", "complete", _one("qr"), ((4, 2),), order=0),
    Linear("qr", "pivoting", _one("qr", pivoting=True, full_matrices=False), ((4, 3),)),
    Linear("geqrf", "product", _householder, ((4, 3),), order=0, oracle=False),
    Linear("householder_product", "few", _one("householder_product"), ((4, 3), (2,)), order=0),
    Linear("ormqr", "left", _one("ormqr"), ((4, 3), (3,), (4, 2)), order=0),
    Linear(
        "ormqr", "right", _one("ormqr", left=False, transpose=True), ((4, 3), (3,), (2, 4)), order=0
    ),
    Linear("svd", "tall", _svd, ((4, 3),)),
    Linear("svd", "wide", _svd, ((2, 4),)),
    Linear("svd", "values", _one("svd", compute_uv=False), ((3, 3),)),
    Linear("eigh", "hermitian", _eigh, ((3, 3),)),
    Linear("eig", "vectors", _eig, ((3, 3),)),
    Linear("eig", "values", _eigvals, ((3, 3),)),
    Linear("sylvester", "random", _sylvester, ((3, 3), (2, 2), (3, 2)), oracle=False),
    Linear(
        "sqrtm",
        "positive",
        lambda lax, x: lax.linalg.sqrtm(positive(lax, x)),
        ((3, 3),),
        dtypes=ALL[2:],
        oracle=False,
    ),
    Linear("hessenberg", "square", _one("hessenberg"), ((4, 4),), order=0),
    Linear("tridiagonal", "lower", _one("tridiagonal"), ((4, 4),), order=0),
    Linear("schur", "small", _rotated, ((5, 5),), order=0),
    Linear(
        "tridiagonal_solve",
        "pivots",
        lambda lax, dl, d, du, b: lax.linalg.tridiagonal_solve(_cut(dl, 0), d, _cut(du, -1), b),
        ((4,), (4,), (4,), (4, 2)),
    ),
]


def _triu(x: Any) -> Any:
    return x * np.triu(np.ones(x.shape, x.dtype))


def _cut(x: Any, at: int) -> Any:
    """Zero at one end: those elements lie outside the matrix."""
    keep = np.ones(x.shape, x.dtype)
    keep[at] = 0
    return x * keep
