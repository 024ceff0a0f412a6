"""Matrices of a known structure: of blocks, of constant diagonals, and those with names."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.lax.linalg import family
from spmd.numpy.joining import concatenate
from spmd.numpy.manipulation import atleast_1d, atleast_2d
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    default_float,
    plain,
    promote_dtypes,
    promote_dtypes_inexact,
    promotes_inside,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- made of arrays ----------------------------------------------------------------------------


def block_diag(*arrs: Any) -> Array:
    """Put matrices along the diagonal of a larger one, zeros elsewhere.

    `arrs` have at most two dims each, where vectors count as rows. The result has the sums of their
    sizes as its shape; the dtypes are promoted to one. Raises `ShapeError` for more than two dims,
    and `ArgumentError` if one is no array.

    >>> spmd.scipy.linalg.block_diag(np.array([[1.0]]), np.array([[2.0, 3.0]]))
    Array([[1., 0., 0.],
           [0., 2., 3.]], dtype=float32)
    """
    arrs = arrs or (np.zeros((1, 0), default_float()),)
    check_arraylike("block_diag", *arrs)
    blocks = promote_dtypes(*map(plain, arrs))
    if any(typeof(x).ndim > 2 for x in blocks):
        raise ShapeError("block_diag: at most two dims each, got " + str([*map(typeof, blocks)]))
    blocks = [atleast_2d(x) for x in blocks]
    columns = [typeof(x).shape[1] for x in blocks]
    rows = []
    for k, x in enumerate(blocks):
        sides = (sum(columns[:k]), sum(columns[k + 1 :]), 0)
        rows.append(lax.pad(x, np.zeros((), typeof(x).dtype), [(0, 0, 0), sides]))
    return concatenate(rows, 0)


def _vectors(name: str, *xs: Any, inexact: bool = False) -> list[Any]:
    """Arguments as vectors, or stacks of them, of one dtype."""
    check_arraylike(name, *xs)
    promote = promote_dtypes_inexact if inexact else promote_dtypes
    return [as_array(atleast_1d(x)) for x in promote(*map(plain, xs))]


def toeplitz(c: Any, r: Any = None) -> Array:
    """Make matrices that are constant along each diagonal.

    `c` (..., m) is the first column and `r` (..., n) the first row, whose first element is not
    read; without `r` the first row is the conjugate of `c`. The result has shape (..., m, n), and
    the dtype that theirs are promoted to. A scalar counts as a vector of one element. Raises
    `ArgumentError` if an argument is no array.

    >>> spmd.scipy.linalg.toeplitz(np.array([1, 2]), np.array([0, 3, 4]))
    Array([[1, 3, 4],
           [2, 1, 3]], dtype=int32)
    """
    (c,) = _vectors("toeplitz", c)
    r = family.conjugate(c) if r is None else r
    c, r = _stacks(*_vectors("toeplitz", c, r))
    m, n = typeof(c).shape[-1], typeof(r).shape[-1]
    values = concatenate([c[..., ::-1], r[..., 1:]], -1)
    return values[..., np.arange(m)[::-1, None] + np.arange(n)]


def _stacks(c: Any, r: Any) -> tuple[Any, Any]:
    leading = np.broadcast_shapes(typeof(c).shape[:-1], typeof(r).shape[:-1])
    wide = [np.broadcast_shapes((*leading, 1), typeof(x).shape) for x in (c, r)]
    ndim = len(leading) + 1
    c, r = (
        lax.broadcast_in_dim(x, shape, tuple(range(ndim - typeof(x).ndim, ndim)))
        for x, shape in zip((c, r), wide, strict=True)
    )
    return as_array(c), as_array(r)


def hankel(c: Any, r: Any = None) -> Array:
    """Make matrices that are constant along each anti-diagonal.

    `c` (..., m) is the first column and `r` (..., n) the last row, whose first element is not read;
    without `r` it is zeros. The result has shape (..., m, n), and the dtype that theirs are
    promoted to. A scalar counts as a vector of one element. Raises `ArgumentError` if an argument
    is no array.

    >>> spmd.scipy.linalg.hankel(np.array([1, 2]), np.array([0, 3, 4]))
    Array([[1, 2, 3],
           [2, 3, 4]], dtype=int32)
    """
    (c,) = _vectors("hankel", c)
    c, r = _stacks(*_vectors("hankel", c, lax.full_like(c, 0) if r is None else r))
    m, n = typeof(c).shape[-1], typeof(r).shape[-1]
    values = concatenate([c, r[..., 1:]], -1)
    return values[..., np.arange(m)[:, None] + np.arange(n)]


def circulant(c: Any) -> Array:
    """Make matrices whose columns are `c`, each turned down by one more.

    For `c` of shape (..., n) the result has shape (..., n, n); the dtype stays. A scalar counts as
    a vector of one element. Raises `ArgumentError` if an argument is no array.

    >>> spmd.scipy.linalg.circulant(np.array([1, 2, 3]))
    Array([[1, 3, 2],
           [2, 1, 3],
           [3, 2, 1]], dtype=int32)
    """
    (c,) = _vectors("circulant", c)
    n = typeof(c).shape[-1]
    return c[..., (np.arange(n)[:, None] - np.arange(n)) % max(n, 1)]


def companion(a: Any) -> Array:
    """Make the matrices whose characteristic polynomials have the coefficients `a`, up to `a[0]`.

    For `a` of shape (..., n) the result has shape (..., n - 1, n - 1); integers become float32.
    Raises `ShapeError` for less than two coefficients, and `ArgumentError` if `a` is no array.

    >>> spmd.scipy.linalg.companion(np.array([1.0, -3.0, 2.0]))
    Array([[ 3., -2.],
           [ 1.,  0.]], dtype=float32)
    """
    (a,) = _vectors("companion", a, inexact=True)
    n = typeof(a).shape[-1]
    if n < 2:
        raise ShapeError(f"companion: a needs at least two coefficients, got {typeof(a)}")
    return _over_shift(-a[..., 1:] / a[..., :1])


def _over_shift(first: Any) -> Any:
    """A first row over ones below the diagonal."""
    *leading, n = typeof(first).shape
    ones = np.broadcast_to(np.eye(n - 1, n, dtype=typeof(first).dtype), (*leading, n - 1, n))
    return concatenate([first[..., None, :], ones], -2)


@promotes_inside()
def fiedler_companion(a: Any) -> Array:
    """Make companion matrices with five diagonals, of the polynomials with coefficients `a`.

    For `a` of shape (..., n) the result has shape (..., n - 1, n - 1); integers become float32. Its
    eigenvalues are the roots; the first coefficient must not be 0. The construction is Fiedler's,
    "A note on companion matrices" (2003). Raises `ShapeError` if there is no coefficient, and
    `ArgumentError` if `a` is no array.

    >>> spmd.scipy.linalg.fiedler_companion(np.array([1.0, -3.0, 2.0]))
    Array([[ 3., -2.],
           [ 1.,  0.]], dtype=float32)
    """
    (a,) = _vectors("fiedler_companion", a, inexact=True)
    n = typeof(a).shape[-1]
    if n == 0:
        raise ShapeError(f"fiedler_companion: a must not be empty, got {typeof(a)}")
    size = n - 1
    places, ones = np.zeros((size, size), int), np.zeros((size, size), typeof(a).dtype)
    for row in range(0, size, 2):
        places[row, max(row - 1, 0)] = row + 1
        if row + 1 < size:
            places[row, row + 1] = row + 2
        if row + 2 < size:
            ones[row, row + 2] = 1
    for row in range(1, size, 2):
        ones[row, max(row - 2, 0)] = 1
    numbers = -a / a[..., :1]
    return numbers[..., places] * (places > 0).astype(typeof(a).dtype) + ones


def leslie(f: Any, s: Any) -> Array:
    """Make Leslie matrices: fecundity `f` in the first row, survival `s` below the diagonal.

    For `f` of shape (..., n) and `s` (..., n - 1) the result has shape (..., n, n), and the dtype
    that theirs are promoted to. Raises `ShapeError` if `s` is not one shorter than `f`, and
    `ArgumentError` if one is no array.

    >>> spmd.scipy.linalg.leslie(np.array([0.1, 2.0]), np.array([0.5]))
    Array([[0.1, 2. ],
           [0.5, 0. ]], dtype=float32)
    """
    f, s = _vectors("leslie", f, s)
    n = typeof(f).shape[-1]
    if n < 2 or typeof(s).shape[-1] != n - 1:
        raise ShapeError(f"leslie: s must be one shorter than f; got f {typeof(f)}, s {typeof(s)}")
    below = s[..., None] * np.eye(n - 1, n, dtype=typeof(s).dtype)
    return concatenate([f[..., None, :], below], -2)


def fiedler(a: Any) -> Array:
    """Make the matrices of the distances `abs(a[i] - a[j])`.

    For `a` of shape (..., n) the result has shape (..., n, n); the dtype stays. A scalar counts as
    a vector of one element. Raises `ArgumentError` if an argument is no array.

    >>> spmd.scipy.linalg.fiedler(np.array([1, 4, 6]))
    Array([[0, 3, 5],
           [3, 0, 2],
           [5, 2, 0]], dtype=int32)
    """
    (a,) = _vectors("fiedler", a)
    return lax.abs(a[..., :, None] - a[..., None, :])


@promotes_inside()
def convolution_matrix(a: Any, n: int, mode: str = "full") -> Array:
    """Make the matrix M with `M @ v == convolve(a, v, mode)`, for v of length `n`.

    `mode` is "full", "valid" or "same". For `a` of shape (..., m) the result has shape (..., k, n),
    where k is the length of the convolution; the dtype stays. Raises `ShapeError` if `a` or v is
    empty, and `ArgumentError` for another mode or if `a` is no array.

    >>> spmd.scipy.linalg.convolution_matrix(np.array([1, 2]), 2)
    Array([[1, 0],
           [2, 1],
           [0, 2]], dtype=int32)
    """
    n = operator.index(n)
    (a,) = _vectors("convolution_matrix", a)
    m = typeof(a).shape[-1]
    if n < 1 or m < 1:
        raise ShapeError(f"convolution_matrix: a and n must not be empty, got {typeof(a)}, n={n}")
    cut = {"full": 0, "same": min(n, m) - 1, "valid": 2 * (min(n, m) - 1)}
    if mode not in cut:
        raise ArgumentError(f'convolution_matrix: mode={mode!r} must be "full", "valid" or "same"')
    rows = np.arange(m + n - 1 - cut[mode])[:, None] + cut[mode] // 2
    places = rows - np.arange(n)
    inside = (places >= 0) & (places < m)
    values = a[..., np.clip(places, 0, m - 1)]
    return values * inside.astype(typeof(a).dtype)


# ---- known numbers -----------------------------------------------------------------------------


def _check_size(name: str, n: int) -> int:
    n = operator.index(n)
    if n < 1:
        raise ArgumentError(f"{name}: n must be a positive integer, got {n}")
    return n


def _floats(x: Any) -> Any:
    return as_array(np.asarray(x, default_float()))


def dft(n: int, scale: str | None = None, *, dtype: Any = None) -> Array:
    """Make the matrix of the discrete Fourier transform, `dft(n) @ x == fft(x)`.

    The result has shape (n, n); `scale` divides by sqrt(n) ("sqrtn") or `n` ("n"). `dtype` is a
    complex dtype, by default complex64 (complex128 under x64). Raises `ArgumentError` for another
    scale or dtype.

    >>> spmd.scipy.linalg.dft(2).real
    Array([[ 1.,  1.],
           [ 1., -1.]], dtype=float32)
    """
    if scale not in (None, "sqrtn", "n"):
        raise ArgumentError(f'dft: scale={scale!r} must be None, "sqrtn" or "n"')
    wanted = np.result_type(default_float(), np.complex64)
    wanted = wanted if dtype is None else dtypes.canonical(dtype)
    if not dtypes.is_complex(wanted):
        raise ArgumentError(f"dft: dtype must be complex, got {wanted}")
    k = np.arange(n)
    values = np.exp(-2j * np.pi * (np.outer(k, k) % max(n, 1)) / max(n, 1))
    return as_array((values / {None: 1, "sqrtn": math.sqrt(n), "n": n}[scale]).astype(wanted))


def hilbert(n: int) -> Array:
    """Make the matrix `1 / (i + j + 1)`, known for how ill-conditioned it is.

    The result has shape (n, n), for an integer `n`, and the default float dtype.

    >>> spmd.scipy.linalg.hilbert(2)
    Array([[1.        , 0.5       ],
           [0.5       , 0.33333334]], dtype=float32)
    """
    k = np.arange(_check_size("hilbert", n))
    return _floats(1 / (k[:, None] + k + 1))


def invhilbert(n: int) -> Array:
    """Make the inverse of `hilbert(n)`, whose elements are integers.

    The result has shape (n, n), for an integer `n`, and the default float dtype.

    >>> spmd.scipy.linalg.invhilbert(2)
    Array([[ 4., -6.],
           [-6., 12.]], dtype=float32)
    """
    n = _check_size("invhilbert", n)
    comb = math.comb

    def element(i: int, j: int) -> int:
        size = (i + j + 1) * comb(n + i, n - j - 1) * comb(n + j, n - i - 1) * comb(i + j, i) ** 2
        return -size if (i + j) % 2 else size

    return _floats([[float(element(i, j)) for j in range(n)] for i in range(n)])


def _check_kind(name: str, kind: str | None) -> str:
    if kind not in (None, "symmetric", "lower", "upper"):
        raise ArgumentError(f'{name}: kind={kind!r} must be "symmetric", "lower" or "upper"')
    return kind or "symmetric"


def _binomials(n: int) -> list[list[int]]:
    """Pascal's triangle as a lower triangular matrix."""
    return [[math.comb(i, j) for j in range(n)] for i in range(n)]


def _of_kind(lower: np.ndarray, kind: str, product: np.ndarray) -> Any:
    return _floats({"lower": lower, "upper": lower.T, "symmetric": product}[kind].astype(float))


def pascal(n: int, kind: str | None = None) -> Array:
    """Make the matrix of binomial coefficients `comb(i + j, i)`.

    The result has shape (n, n), for an integer `n`, and the default float dtype. `kind` is
    "symmetric", the default, or "lower" or "upper" for a triangle of `comb(i, j)`. Raises
    `ArgumentError` for another kind.

    >>> spmd.scipy.linalg.pascal(3)
    Array([[1., 1., 1.],
           [1., 2., 3.],
           [1., 3., 6.]], dtype=float32)
    """
    lower = np.array(_binomials(_check_size("pascal", n)), dtype=object)
    return _of_kind(lower, _check_kind("pascal", kind), lower @ lower.T)


def invpascal(n: int, kind: str | None = None) -> Array:
    """Make the inverse of `pascal(n, kind)`.

    `n`, `kind`, the shape, the float dtype and the errors are those of `pascal`: `ArgumentError`.

    >>> spmd.scipy.linalg.invpascal(2)
    Array([[ 2., -1.],
           [-1.,  1.]], dtype=float32)
    """
    n = _check_size("invpascal", n)
    sign = (-1) ** np.add.outer(np.arange(n), np.arange(n))
    lower = np.array(_binomials(n), dtype=object) * sign
    return _of_kind(lower, _check_kind("invpascal", kind), lower.T @ lower)


def hadamard(n: int, dtype: Any = int) -> Array:
    """Make a matrix of ones and minus ones whose rows are orthogonal.

    The result has shape (n, n), for `n` a power of two (Sylvester's construction); `dtype` is by
    default the default integer dtype. Raises `ArgumentError` if `n` is no power of two.

    >>> spmd.scipy.linalg.hadamard(2)
    Array([[ 1,  1],
           [ 1, -1]], dtype=int32)
    """
    n = _check_size("hadamard", n)
    if n & (n - 1):
        raise ArgumentError(f"hadamard: n must be a power of two, got {n}")
    out = np.ones((1, 1))
    while len(out) < n:
        out = np.block([[out, out], [out, -out]])
    return as_array(out.astype(dtypes.canonical(dtype)))


def helmert(n: int, full: bool = False) -> Array:
    """Make orthonormal contrasts: each row compares an element with those before it.

    The result has shape (n - 1, n), for an integer `n`, and the default float dtype; `full` puts
    the constant row above, which makes an orthogonal matrix (n, n).

    >>> spmd.scipy.linalg.helmert(2).round(4)
    Array([[ 0.7071, -0.7071]], dtype=float32)
    """
    n = _check_size("helmert", n)
    k = np.arange(1, n)[:, None]
    column = np.arange(n)
    rows = np.where(column < k, 1.0, np.where(column == k, -k, 0.0)) / np.sqrt(k * (k + 1.0))
    return _floats(np.concatenate([np.full((1, n), n**-0.5), rows]) if full else rows)
