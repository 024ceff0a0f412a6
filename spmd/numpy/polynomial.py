"""Polynomials as vectors of coefficients, the highest power first: `poly`, `polymul`, `polyfit`.

`polyval` is in `numerical.py`.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ConcretizationError, ShapeError
from spmd.core.aval import typeof
from spmd.core.trace import Tracer
from spmd.numpy import linalg
from spmd.numpy.joining import concatenate
from spmd.numpy.manipulation import atleast_1d, broadcast_to, expand_dims, matrix_transpose, roll
from spmd.numpy.numerical import vander
from spmd.numpy.products import matmul, outer
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    plain,
    promote_args_inexact,
    promote_dtypes,
    promote_dtypes_inexact,
    promotes_inside,
    select,
)
from spmd.numpy.reductions import sum as _sum
from spmd.numpy.signal import convolve
from spmd.numpy.sorting import trim_zeros
from spmd.numpy.taking import take
from spmd.numpy.ufuncs import divide, multiply, negative, sqrt
from spmd.sharding.array import Array, ArrayLike


def _coefficients(name: str, *polynomials: Any, inexact: bool = True) -> list[Any]:
    """Vectors of coefficients in their common dtype."""
    check_arraylike(name, *polynomials)
    promote = promote_dtypes_inexact if inexact else promote_dtypes
    found = [as_array(p) for p in promote(*map(plain, polynomials))]
    if any(typeof(p).ndim != 1 for p in found):
        shapes = ", ".join(str(typeof(p).shape) for p in found)
        raise ShapeError(f"{name}: coefficients must be vectors, got shapes {shapes}")
    return found


def _padded(p: Any, before: int, after: int = 0) -> Any:
    return lax.pad(p, np.zeros((), typeof(p).dtype), [(before, after, 0)])


# ---- sums and products -------------------------------------------------------------------------


def polyadd(a1: ArrayLike, a2: ArrayLike) -> Array:
    """The sum of two polynomials.

    `a1` and `a2` are vectors of coefficients, the highest power first. They are promoted to one
    dtype, and the result has the size of the longer one. Raises a `ShapeError` if they are no
    vectors.

    >>> polyadd(np.array([1, 2]), np.array([5, 0, 1]))
    Array([5, 1, 3], dtype=int32)
    """
    first, second = _coefficients("polyadd", a1, a2, inexact=False)
    n, m = typeof(first).shape[0], typeof(second).shape[0]
    return lax.add(_padded(first, max(m - n, 0)), _padded(second, max(n - m, 0)))


def polysub(a1: ArrayLike, a2: ArrayLike) -> Array:
    """The difference of two polynomials.

    `a1` and `a2` are vectors of coefficients, the highest power first. They are promoted to one
    dtype, and the result has the size of the longer one. Raises a `ShapeError` if they are no
    vectors.

    >>> polysub(np.array([5, 0, 1]), np.array([1, 2]))
    Array([ 5, -1, -1], dtype=int32)
    """
    first, second = _coefficients("polysub", a1, a2, inexact=False)
    return polyadd(first, negative(second))


def polymul(a1: ArrayLike, a2: ArrayLike, *, trim_leading_zeros: bool = False) -> Array:
    """The product of two polynomials.

    `a1` and `a2` are vectors of n and m coefficients, the highest power first, and are promoted to
    one floating or complex dtype. The result has n + m - 1 elements; an empty vector counts as the
    polynomial 0. `trim_leading_zeros` drops the operands' leading zeros first, which needs concrete
    values. Raises a `ShapeError` if they are no vectors.

    >>> polymul(np.array([1.0, 1.0]), np.array([1.0, -1.0]))
    Array([ 1.,  0., -1.], dtype=float32)
    """
    first, second = _coefficients("polymul", a1, a2)
    if trim_leading_zeros:
        first, second = (trim_zeros(p, trim="f") for p in (first, second))
    first, second = (p if typeof(p).size else _padded(p, 1) for p in (first, second))
    return convolve(first, second, mode="full")


def polydiv(u: Any, v: ArrayLike, *, trim_leading_zeros: bool = False) -> tuple[Any, Any]:
    """The quotient and the remainder of two polynomials.

    `u` and the divisor `v` are vectors of n and m coefficients, the highest power first, and are
    promoted to one floating or complex dtype. The quotient has n - m + 1 elements, at least one;
    the remainder has n. `trim_leading_zeros` drops from its front the coefficients that are zero up
    to rounding, which needs concrete values. Raises a `ShapeError` if the operands are no vectors,
    or `v` is empty.

    >>> polydiv(np.array([1.0, 0.0, -1.0]), np.array([1.0, 1.0]))
    (Array([ 1., -1.], dtype=float32), Array([0., 0., 0.], dtype=float32))
    """
    dividend, divisor = _coefficients("polydiv", u, v)
    if not typeof(divisor).size:
        raise ShapeError("polydiv: the divisor has no coefficients")
    quotient, rest = _long_division(dividend, divisor)
    if trim_leading_zeros:
        values = np.asarray(rest)
        tolerance = np.sqrt(dtypes.finfo(values.dtype).eps)
        large = np.flatnonzero(~(np.abs(values) < tolerance))  # NaN stays
        rest = lax.slice_in_dim(rest, int(large[0]) if large.size else values.size, values.size)
    return quotient, rest


@one_program()
def _long_division(u: Any, v: Any) -> tuple[Any, Any]:
    steps = typeof(u).shape[0] - typeof(v).shape[0] + 1
    n, dtype = typeof(v).shape[0], typeof(u).dtype
    if steps <= 0:
        return lax.full((1,), 0, dtype), u
    scale = lax.div(np.array(1, dtype), lax.index_in_dim(v, 0, 0, keepdims=False))

    def step(rest: Any, k: Any) -> Any:
        part = lax.dynamic_slice_in_dim(rest, k, n)
        factor = lax.mul(scale, lax.index_in_dim(part, 0, 0, keepdims=False))
        part = lax.sub(part, lax.mul(factor, v))
        return lax.dynamic_update_slice_in_dim(rest, part, k, 0), factor

    rest, quotient = lax.scan(step, u, lax.iota(dtypes.int32, steps))
    return quotient, rest


# ---- calculus ----------------------------------------------------------------------------------


def _order(name: str, m: Any) -> int:
    try:
        order = operator.index(m)
    except TypeError:
        raise ArgumentError(f"{name}: m must be an integer, got {m!r}") from None
    if order < 0:
        raise ArgumentError(f"{name}: m={order} must not be negative")
    return order


def polyder(p: Any, m: int = 1) -> Array:
    """The derivative of order `m` of a polynomial.

    `p` is a vector of coefficients, the highest power first. The result is `m` elements (1 by
    default) shorter, down to none, and has the floating or complex dtype to which `p` is promoted.
    Raises an `ArgumentError` if `m` is no integer or negative, and a `ShapeError` if `p` is no
    vector.

    >>> polyder(np.array([1.0, 2.0, 3.0]))
    Array([2., 2.], dtype=float32)
    """
    order = _order("polyder", m)
    (p,) = _coefficients("polyder", p)
    n = typeof(p).shape[0]
    factors = np.prod([np.arange(order, n) - k for k in range(order)], axis=0, dtype=np.float64)
    if order == 0:
        return p
    factors = np.asarray(factors[::-1], typeof(p).dtype)
    return multiply(lax.slice_in_dim(p, 0, max(n - order, 0)), factors)


def polyint(p: Any, m: int = 1, k: Any = None) -> Array:
    """The integral of order `m` of a polynomial.

    `p` is a vector of coefficients, the highest power first. `k` are the constants of integration,
    one for all or `m` of them, and 0 by default. The result is `m` elements (1 by default) longer,
    and has the floating or complex dtype to which `p` and `k` are promoted. Raises a `ShapeError`
    if `p` is no vector or `k` has another size, and an `ArgumentError` if `m` is no integer or
    negative.

    >>> polyint(np.array([2.0, 2.0]), k=3)
    Array([1., 2., 3.], dtype=float32)
    """
    order = _order("polyint", m)
    check_arraylike("polyint", p, 0 if k is None else k)
    p, constants = promote_dtypes_inexact(plain(p), 0 if k is None else plain(k))
    (p,) = _coefficients("polyint", p)
    constants = atleast_1d(constants)
    if typeof(constants).shape == (1,):
        constants = broadcast_to(constants, (order,))
    if typeof(constants).shape != (order,):
        raise ShapeError(
            f"polyint: k must be a scalar or have shape (1,) or ({order},), got "
            f"{typeof(constants).shape}"
        )
    if order == 0:
        return p
    powers = np.arange(typeof(p).shape[0] + order)
    factors = np.prod([np.maximum(1, powers - j) for j in range(order)], axis=0, dtype=np.float64)
    return divide(concatenate([p, constants]), np.asarray(factors[::-1], typeof(p).dtype))


# ---- roots -------------------------------------------------------------------------------------


def poly(seq_of_zeros: Any) -> Array:
    """The coefficients of the polynomial with the given roots and leading coefficient 1.

    `seq_of_zeros` is a scalar or vector of roots. The result has one element more, and the floating
    or complex dtype to which they are promoted; without any root it is the scalar 1. For a square
    matrix the roots are its eigenvalues: the result is its characteristic polynomial, in complex
    numbers. Raises a `ShapeError` for another shape.

    >>> poly(np.array([1.0, 2.0]))
    Array([ 1., -3.,  2.], dtype=float32)
    """
    (zeros,) = promote_args_inexact("poly", seq_of_zeros)
    zeros = atleast_1d(zeros)
    shape = typeof(zeros).shape
    if len(shape) == 2 and shape[0] == shape[1] != 0:
        zeros = linalg.eigvals(zeros)
    elif len(shape) != 1:
        raise ShapeError(f"poly: a vector of roots or a square matrix is needed, got {shape}")
    return _from_roots(zeros)


@one_program()
def _from_roots(zeros: Any) -> Any:
    """One factor (x - root) after the other; the vector has its final length from the start."""
    n, dtype = typeof(zeros).shape[0], typeof(zeros).dtype
    if not n:
        return lax.full((), 1, dtype)

    def step(p: Any, root: Any) -> Any:
        shifted = _padded(lax.slice_in_dim(p, 0, n), 1)
        return lax.sub(p, lax.mul(root, shifted)), None

    one = lax.pad(lax.full((1,), 1, dtype), np.zeros((), dtype), [(0, n, 0)])
    return lax.scan(step, one, zeros)[0]


def roots(p: ArrayLike, *, strip_zeros: bool = True) -> Array:
    """The complex roots of a polynomial: the eigenvalues of its companion matrix.

    `p` is a vector of coefficients, the highest power first. Leading zeros are dropped, which needs
    concrete values. With `strip_zeros=False` they are not looked at; the roots that are then
    missing are NaN and come last. The result is a vector with one element less, complex64 or
    complex128. Raises a `ShapeError` if `p` is no vector, and a `ConcretizationError` if it is
    traced and `strip_zeros` is true.

    >>> snp.sort(roots(np.array([1.0, -3.0, 2.0])).real)
    Array([1., 2.], dtype=float32)
    """
    check_arraylike("roots", p)
    (p,) = _coefficients("roots", atleast_1d(*promote_dtypes_inexact(plain(p))))
    if not strip_zeros:
        return _roots_and_nans(p)
    if isinstance(p, Tracer):
        raise ConcretizationError(
            "roots: how many leading coefficients are zero depends on traced data; pass "
            "strip_zeros=False, which gives NaN for the roots that are missing"
        )
    held = np.flatnonzero(np.asarray(p))
    n = typeof(p).shape[0]
    return _companion_roots(lax.slice_in_dim(p, int(held[0]) if held.size else n, n))


def _companion_roots(p: Any) -> Any:
    n, dtype = typeof(p).shape[0], typeof(p).dtype
    if n < 2:
        return lax.full((0,), 0, dtypes.complex_of(dtypes.real_of(dtype)))
    first = lax.index_in_dim(p, 0, 0, keepdims=False)
    row = lax.reshape(lax.neg(lax.div(lax.slice_in_dim(p, 1, n), first)), (1, n - 1))
    below = np.eye(n - 2, n - 1, dtype=dtype)
    return linalg.eigvals(concatenate([row, below], 0))


def _roots_and_nans(p: Any) -> Any:
    """Leading zeros rolled to the end are roots at 0, which become NaN at the end."""
    n, dtype = typeof(p).shape[0], typeof(p).dtype
    if n < 2:
        return _companion_roots(p)
    zero = lax.eq(p, np.zeros((), dtype))
    leading = _sum(lax.cumprod(lax.convert_element_type(zero, dtypes.int32)))
    # A polynomial without any coefficient but zeros has no companion matrix.
    none = lax.eq(leading, np.int32(n))
    p = select(none, np.ones((), dtype), p)
    found = _companion_roots(roll(p, lax.neg(leading)))
    at_zero = lax.convert_element_type(lax.eq(found, np.zeros((), found.dtype)), dtypes.int32)
    order = lax.sort_key_val(at_zero, lax.iota(dtypes.int32, n - 1))[1]
    kept = lax.lt(lax.iota(dtypes.int32, n - 1), lax.sub(np.int32(n - 1), leading))
    return select(kept, take(found, order), np.array(complex(np.nan, np.nan), found.dtype))


# ---- fitting -----------------------------------------------------------------------------------


@promotes_inside(2)
def polyfit(
    x: ArrayLike,
    y: ArrayLike,
    deg: int,
    rcond: float | None = None,
    full: bool = False,
    w: ArrayLike | None = None,
    cov: bool | str = False,
) -> Any:
    """Fit a polynomial of degree `deg` to points (x, y), by least squares.

    `x` is a vector and `y` a vector of its size, or a matrix with as many rows, whose columns are
    fitted each. The coefficients, the highest power first, have the floating dtype to which `x` and
    `y` are promoted. `w` are weights of the differences; singular values below `rcond` times the
    largest count as zero. `full` also returns residuals, rank, singular values and `rcond`; `cov`
    the coefficients' covariance ("unscaled": for weights that are inverse standard deviations).
    Raises a `ShapeError` if the points or weights do not fit.

    >>> x = np.array([0.0, 1.0, 2.0, 3.0])
    >>> snp.allclose(snp.polyfit(x, 2 * x + 1, 1), np.array([2.0, 1.0]), atol=1e-4).item()
    True
    """
    check_arraylike("polyfit", x, y, 0 if w is None else w)
    x, y = promote_dtypes_inexact(plain(x), plain(y))
    order = _order("polyfit", deg) + 1
    n = typeof(x).shape[0] if typeof(x).ndim == 1 else 0
    if not n or typeof(y).ndim not in (1, 2) or typeof(y).shape[0] != n:
        raise ShapeError(
            "polyfit: x must be a vector with elements and y a vector or matrix with as many rows, "
            f"got {typeof(x)} and {typeof(y)}"
        )
    rcond = n * float(dtypes.finfo(typeof(x).dtype).eps) if rcond is None else float(rcond)
    powers, values = vander(x, order), y
    if w is not None:
        (w,) = promote_dtypes_inexact(plain(w))
        if typeof(w).shape != (n,):
            raise ShapeError(f"polyfit: {n} points need weights ({n},), got {typeof(w)}")
        powers = multiply(powers, lax.reshape(w, (n, 1)))
        values = multiply(values, lax.reshape(w, (n,) + (1,) * (typeof(y).ndim - 1)))
    # Columns of length 1, as their powers differ by orders of magnitude.
    scale = sqrt(_sum(multiply(powers, powers), axis=0))
    powers = divide(powers, scale)
    found, residuals, rank, singular = linalg.lstsq(powers, values, rcond)
    found = divide(found, lax.reshape(scale, (order,) + (1,) * (typeof(y).ndim - 1)))
    if full:
        return found, residuals, rank, singular, as_array(rcond)
    if not cov:
        return found
    return found, _covariance(powers, scale, residuals, n, typeof(y).ndim, cov)


def _covariance(powers: Any, scale: Any, residuals: Any, n: int, ndim: int, cov: bool | str) -> Any:
    """The inverse of the normal equations' matrix, times the residuals' variance."""
    order = typeof(scale).shape[0]
    base = linalg.inv(matmul(matrix_transpose(powers), powers))
    base = divide(base, outer(scale, scale))
    if cov == "unscaled":
        return base if ndim == 1 else expand_dims(base, 2)
    if n <= order:
        raise ShapeError(f"polyfit: a covariance needs more than {order} points, got {n}")
    variance = atleast_1d(divide(residuals, n - order))
    return multiply(base, variance) if ndim == 1 else multiply(expand_dims(base, 2), variance)
