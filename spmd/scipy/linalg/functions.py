"""Functions of matrices: exponentials, square roots, and any function of the eigenvalues."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.core.jvp import jvp_flat
from spmd.lax.linalg import family
from spmd.lax.linalg.family import adjoint, diagonal, eye_like, in_columns, in_rows, matmul
from spmd.lax.linalg.family import scale as scaled
from spmd.numpy.factorizations import inexact_matrix, norm_of_columns
from spmd.numpy.promotion import as_array, check_arraylike, plain, promote_dtypes_inexact
from spmd.numpy.searching import where
from spmd.scipy.linalg.factors import complex_of, schur

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# Pade coefficients b_0 .. b_m and the largest norm for which they give full precision (Higham,
# "The scaling and squaring method for the matrix exponential revisited", 2005, table 2.3).
_SINGLE = (17297280, 8648640, 1995840, 277200, 25200, 1512, 56, 1)
_SINGLE_NORM = 3.925724783138660
_DOUBLE = (
    64764752532480000,
    32382376266240000,
    7771770303897600,
    1187353796428800,
    129060195264000,
    10559470521600,
    670442572800,
    33522128640,
    1323241920,
    40840800,
    960960,
    16380,
    182,
    1,
)
_DOUBLE_NORM = 5.371920351148152


def expm(A: Any, *, upper_triangular: bool = False, max_squarings: int = 16) -> Array:
    """Compute the exponential of the square matrices `A` (..., n, n).

    The shape stays; integers become float32. The method is scaling and squaring with a Pade
    approximant (Higham 2005). The result is NaN where more than `max_squarings` would be needed (by
    default for a norm beyond about 2**18). `upper_triangular` is accepted for JAX's sake. Raises
    `ShapeError` if the matrices are not square, and `ArgumentError` if `A` is no array.

    >>> spmd.scipy.linalg.expm(np.array([[0.0, 1.0], [0.0, 0.0]]))
    Array([[1., 1.],
           [0., 1.]], dtype=float32)
    """
    A = inexact_matrix("expm", A, square=True)
    single = np.finfo(typeof(A).dtype).dtype == np.float32
    coefficients, largest = (_SINGLE, _SINGLE_NORM) if single else (_DOUBLE, _DOUBLE_NORM)
    size = lax.stop_gradient(norm_of_columns(A))
    exponent = lax.ceil(lax.log(where(size > largest, size / largest, 1)) / np.log(2))
    count = lax.convert_element_type(where(exponent < 1e6, exponent, 1e6), np.int32)
    factor = as_array(2.0 ** -as_array(count).astype(typeof(size).dtype)).astype(typeof(A).dtype)
    top, bottom = _pade(A * factor[..., None, None], coefficients)
    result = lax.linalg.solve(bottom, top)

    def square(k: Any, x: Any) -> Any:
        more = as_array(k < count)
        squared = lambda x: where(more[..., None, None], matmul(x, x), x)  # noqa: E731
        return lax.cond(more.any(), squared, lambda x: x, x)

    result = lax.fori_loop(0, int(max_squarings), square, result)
    return where((count > max_squarings)[..., None, None], np.nan, result)


def _pade(A: Any, b: tuple[int, ...]) -> tuple[Any, Any]:
    """Numerator and denominator: even powers plus and minus odd ones."""
    square, power = matmul(A, A), eye_like(A)
    even, odd = scaled(power, b[0]), scaled(power, b[1])
    for k in range(2, len(b), 2):
        power = matmul(power, square)
        even, odd = even + scaled(power, b[k]), odd + scaled(power, b[k + 1])
    odd = matmul(A, odd)
    return even + odd, even - odd


def expm_frechet(A: Any, E: Any, *, method: str | None = None, compute_expm: bool = True) -> Any:
    """Compute the exponential of `A` and its derivative in the direction `E`.

    Both are (..., n, n) and are promoted to one float or complex dtype; without `compute_expm` the
    result is the derivative alone. It is what `jvp` of `expm` gives, whatever `method` says. Raises
    `ShapeError` if the shapes differ or are not square, and `ArgumentError` if one is no array.

    >>> zeros = np.zeros((2, 2))
    >>> spmd.scipy.linalg.expm_frechet(zeros, np.eye(2), compute_expm=False)
    Array([[1., 0.],
           [0., 1.]], dtype=float32)
    """
    check_arraylike("expm_frechet", A, E)
    A, E = promote_dtypes_inexact(plain(A), plain(E))
    A, E = (inexact_matrix("expm_frechet", x, square=True) for x in (A, E))
    if typeof(A).shape != typeof(E).shape:
        raise ShapeError(
            f"expm_frechet: A and E must have one shape, got {typeof(A).shape} and "
            f"{typeof(E).shape}"
        )
    (value,), (change,) = jvp_flat(lambda x: [expm(x)], [A], [E])
    return (value, change) if compute_expm else change


def sqrtm(A: Any, blocksize: int = 1) -> Array:
    """Compute the principal square root of the square matrices `A` (..., n, n).

    The shape stays; the dtype is complex. The derivative solves Sylvester's equation. `blocksize`
    must be 1, as in JAX. Raises `ShapeError` if the matrices are not square, and `ArgumentError`
    for another `blocksize` or if `A` is no array.

    >>> spmd.scipy.linalg.sqrtm(np.diag([4.0, 9.0])).real
    Array([[2., 0.],
           [0., 3.]], dtype=float32)
    """
    if blocksize > 1:
        raise ArgumentError("sqrtm: blocksize must be 1")
    A = inexact_matrix("sqrtm", A, square=True)
    return lax.linalg.sqrtm(lax.convert_element_type(A, complex_of(A)))


def funm(A: Any, func: Callable[[Any], Any], disp: bool = True) -> Any:
    """Compute `func` of a square matrix `A` (n, n), by the values of `func` at its eigenvalues.

    `func` maps an array elementwise. The result is complex, of the shape of `A`; without `disp`
    also an estimate of the error is returned. The method is Parlett's recurrence on the Schur form,
    which is inexact where eigenvalues are close. It has no derivative. Raises `ShapeError` for
    other shapes, and `ArgumentError` if `A` is no array.

    >>> spmd.scipy.linalg.funm(np.diag([1.0, 2.0]), lambda x: x * x).real.round(4)
    Array([[1., 0.],
           [0., 4.]], dtype=float32)
    """
    A = inexact_matrix("funm", A, square=True)
    if typeof(A).ndim != 2:
        raise ShapeError(f"funm: A must be one matrix (n, n), got shape {typeof(A).shape}")
    t, z = schur(A, output="complex")
    n, eps = typeof(t).shape[0], float(np.finfo(typeof(t).dtype).eps)
    values = diagonal(t)
    start = where(family.on_diagonal(t), in_rows(as_array(func(values)), t), 0)
    start = lax.convert_element_type(start, typeof(t).dtype)
    row, column = (lax.broadcasted_iota(np.int32, (n, n), d) for d in (0, 1))
    gaps = in_rows(values, t) - in_columns(values, t)
    smallest = where(column > row, lax.abs(gaps), 1).min() if n else 1.0
    gaps = where(gaps == 0, eps, gaps)

    # Of F T = T F, diagonal by diagonal (Golub & Van Loan, 9.1.4).
    def next_diagonal(p: Any, f: Any) -> Any:
        return where(column - row == p, (matmul(t, f) - matmul(f, t)) / gaps, f)

    f = lax.fori_loop(1, n, next_diagonal, start)
    out = matmul(matmul(z, f), adjoint(z))
    if disp:
        return out
    smallest = where(smallest == 0, eps, smallest)
    upper = lax.abs(where(column > row, t, 0)).sum(0).max() if n else 0.0
    ratio = upper / smallest
    error = lax.min(as_array(1.0).astype(typeof(ratio).dtype), lax.max(eps, eps * ratio))
    return out, error
