"""Continuous distributions that are a formula of uniform numbers: `normal`, `gumbel`, `cauchy`...

Each draws bits in JAX's order and computes JAX's formula, so that samples agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.core.explicit import lays_out_result
from spmd.numpy import linalg
from spmd.numpy.einsum import einsum
from spmd.numpy.linalg import norm
from spmd.numpy.manipulation import matrix_transpose
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import broadcast_to, plain, promote_dtypes_inexact, select
from spmd.numpy.searching import diagonal
from spmd.numpy.selection import clip
from spmd.numpy.ufuncs import add, divide, multiply, power
from spmd.random.keys import (
    canonical_shape,
    count_of,
    float_dtype,
    pair,
    parameters_shape,
    sample_shape,
    single,
    typed_bits,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- uniform -----------------------------------------------------------------------------------


@lays_out_result
def uniform(
    key: Any,
    shape: Any = (),
    dtype: Any = None,
    minval: Any = 0.0,
    maxval: Any = 1.0,
    *,
    out_sharding: Any = None,
) -> Array:
    """Draw numbers uniformly distributed in [`minval`, `maxval`).

    The bounds broadcast to `shape`. `dtype` is a float dtype, by default float32 (float64 under
    x64). `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the
    result. Raises `DtypeError` for another, `ShapeError` if a bound does not broadcast, and
    `ArgumentError` if `key` is no single key.

    >>> x = spmd.random.uniform(spmd.random.key(0), (3,), minval=5.0, maxval=6.0)
    >>> bool(((5 <= x) & (x < 6)).all())
    True
    """
    found = float_dtype(dtype, "uniform")
    whole = sample_shape("uniform", shape, minval, maxval)
    return uniform_typed(single(key, "uniform"), whole, found, plain(minval), plain(maxval))


@one_program("shape", "dtype")
def uniform_typed(
    key: Any, shape: tuple[int, ...], dtype: np.dtype, low: Any = 0.0, high: Any = 1.0
) -> Any:
    """`uniform` of a typed key, with everything checked."""
    info = dtypes.finfo(dtype)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    # bfloat16 has room for 7 random bits, which come from 8.
    drawn = np.dtype(np.uint8) if info.nmant < 8 else unsigned
    bits = lax.convert_element_type(typed_bits(key, shape, drawn), unsigned)
    # Random bits as mantissa of a number in [1, 2).
    bits = lax.shift_right_logical(bits, np.array(8 * drawn.itemsize - info.nmant, unsigned))
    one = np.array(1, dtype)
    bits = lax.bitwise_or(bits, one.view(unsigned))
    floats = lax.sub(lax.bitcast_convert_type(bits, dtype), one)
    low, high = (_fitted(lax.convert_element_type(v, dtype), shape) for v in (low, high))
    return lax.max(low, lax.add(lax.mul(floats, lax.sub(high, low)), low))


def _fitted(x: Any, shape: tuple[int, ...]) -> Any:
    """A parameter: a scalar, or an array of the sample's shape."""
    own = typeof(x).shape
    return x if not own or own == shape else broadcast_to(x, shape)


# ---- normal ------------------------------------------------------------------------------------


@lays_out_result
def normal(key: Any, shape: Any = (), dtype: Any = None, *, out_sharding: Any = None) -> Array:
    """Draw standard normal numbers of the given `shape`.

    `dtype` is a float or complex dtype, by default float32 (float64 under x64); complex numbers
    have variance 1 altogether. Numbers are those of the inverse distribution function at
    uniform ones. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of
    the result. Raises `DtypeError` for another dtype, `ShapeError` if a size is negative, and
    `ArgumentError` if `key` is no single key.

    >>> x = spmd.random.normal(spmd.random.key(0), (10_000,))
    >>> abs(round(float(x.mean()), 1)), round(float(x.std()), 1)
    (0.0, 1.0)
    """
    whole = canonical_shape(shape, "normal")
    key = single(key, "normal")
    if dtype is not None and dtypes.is_complex(dtypes.canonical(dtype)):
        return any_normal(key, whole, dtypes.canonical(dtype))
    return any_normal(key, whole, float_dtype(dtype, "normal"))


def any_normal(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """`normal` of a typed key and a real or complex dtype."""
    return (_complex_normal if dtypes.is_complex(dtype) else normal_typed)(key, shape, dtype)


@one_program("shape", "dtype")
def _complex_normal(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    first, second = pair(key)
    real = dtypes.real_of(dtype)
    parts = lax.complex(normal_typed(first, shape, real), normal_typed(second, shape, real))
    return lax.div(parts, np.array(np.sqrt(2), dtype))


@one_program("shape", "dtype")
def normal_typed(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """`normal` of a typed key and a real dtype."""
    low = np.nextafter(np.array(-1, dtype), np.array(0, dtype), dtype=dtype)
    u = uniform_typed(key, shape, dtype, low, np.array(1, dtype))
    return lax.mul(lax.erf_inv(u), np.array(np.sqrt(2), dtype))


@lays_out_result
def truncated_normal(
    key: Any,
    lower: Any,
    upper: Any,
    shape: Any = None,
    dtype: Any = None,
    *,
    out_sharding: Any = None,
) -> Array:
    """Draw standard normal numbers under the condition that they lie between `lower` and `upper`.

    The bounds broadcast to `shape`, which is by default theirs. `dtype` is a float dtype, by
    default float32. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout
    of the result. Raises `DtypeError` for another, `ShapeError` if a bound does not broadcast,
    and `ArgumentError` if `key` is no single key.

    >>> x = spmd.random.truncated_normal(spmd.random.key(0), -1.0, 2.0, (100,))
    >>> bool(((-1 < x) & (x < 2)).all())
    True
    """
    found = float_dtype(dtype, "truncated_normal")
    whole = sample_shape("truncated_normal", shape, lower, upper)
    lower, upper = (lax.convert_element_type(plain(v), found) for v in (lower, upper))
    # Evaluated before the program runs: with constant bounds folded into it, rounding would differ.
    root = np.array(np.sqrt(2), found)
    a, b = (lax.erf(lax.div(v, root)) for v in (lower, upper))
    return _truncated(single(key, "truncated_normal"), lower, upper, a, b, whole, found)


@one_program("shape", "dtype")
def _truncated(
    key: Any, lower: Any, upper: Any, a: Any, b: Any, shape: tuple[int, ...], dtype: np.dtype
) -> Any:
    u = uniform_typed(key, shape, dtype, a, b)
    out = lax.mul(lax.erf_inv(u), np.array(np.sqrt(2), dtype))
    # Rounding must not put a sample on or beyond a bound.
    least = lax.nextafter(lax.stop_gradient(lower), np.array(np.inf, dtype))
    most = lax.nextafter(lax.stop_gradient(upper), np.array(-np.inf, dtype))
    return clip(out, _fitted(least, shape), _fitted(most, shape))


@lays_out_result
def multivariate_normal(
    key: Any,
    mean: Any,
    cov: Any,
    shape: Any = None,
    dtype: Any = None,
    method: str = "cholesky",
    *,
    out_sharding: Any = None,
) -> Array:
    """Draw vectors of normal numbers with the given `mean` and covariance matrix `cov`.

    `mean` (..., n) and `cov` (..., n, n) have leading dims that broadcast to `shape`, which is
    by default theirs; the result has shape `shape + (n,)`. `dtype` is by default their common
    float dtype. `method` says how a root of the matrix is found: "cholesky", or the slower
    "eigh" and "svd", which also take singular matrices. `out_sharding`, a sharding or spec over
    `Explicit` mesh axes, is the layout of the result. Raises `ShapeError` if shapes do not fit,
    `DtypeError` if `dtype` is no float, and `ArgumentError` for another method or if `key` is
    no single key.

    >>> spmd.random.multivariate_normal(spmd.random.key(0), np.zeros(2), np.eye(2), (5,)).shape
    (5, 2)
    """
    if method not in ("cholesky", "eigh", "svd"):
        raise ArgumentError(
            f"multivariate_normal: method must be 'cholesky', 'eigh' or 'svd', got {method!r}"
        )
    mean, cov = promote_dtypes_inexact(plain(mean), plain(cov))
    found = typeof(mean).dtype if dtype is None else float_dtype(dtype, "multivariate_normal")
    n = typeof(mean).shape[-1:]
    if not n or typeof(cov).shape[-2:] != (*n, *n):
        raise ShapeError(
            f"multivariate_normal: mean must be (..., n) and cov (..., n, n), got "
            f"{typeof(mean).shape} and {typeof(cov).shape}"
        )
    lead = sample_shape(
        "multivariate_normal",
        shape,
        np.empty(typeof(mean).shape[:-1], bool),
        np.empty(typeof(cov).shape[:-2], bool),
    )
    samples = normal_typed(single(key, "multivariate_normal"), (*lead, *n), found)
    return add(mean, einsum("...ij,...j->...i", _root(cov, method), samples))


def _root(cov: Any, method: str) -> Any:
    """A matrix whose product with its transpose is `cov`."""
    if method == "cholesky":
        return linalg.cholesky(cov)
    if method == "eigh":
        sizes, directions = linalg.eigh(cov)
    else:
        directions, sizes, _ = linalg.svd(cov)
    return multiply(directions, lax.expand_dims(lax.sqrt(sizes), (typeof(sizes).ndim - 1,)))


@lays_out_result
def orthogonal(
    key: Any,
    n: int,
    shape: Any = (),
    dtype: Any = None,
    m: int | None = None,
    *,
    out_sharding: Any = None,
) -> Array:
    """Draw matrices with orthonormal columns or rows, uniformly among all such matrices.

    Matrices have shape (n, m), and `m` is by default `n`; orthonormal are the columns if `n >=
    m`, else the rows. The result has shape `shape + (n, m)`; `dtype` is a float or complex
    dtype, by default float32. The signs of a QR factorization are fixed as Mezzadri (2007)
    proposes. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the
    result. Raises `ArgumentError` if a number is no integer or `key` is no single key, and
    `DtypeError` for another dtype.

    >>> q = spmd.random.orthogonal(spmd.random.key(0), 3)
    >>> bool(snp.allclose(q @ q.T, snp.eye(3), atol=1e-6))
    True
    """
    rows, columns = count_of("orthogonal", n), count_of("orthogonal", n if m is None else m)
    long, short = max(rows, columns), min(rows, columns)
    lead = canonical_shape(shape, "orthogonal")
    q, r = linalg.qr(normal(key, (*lead, long, short), dtype))
    # Signs that make the factorization unique make its first factor uniform (Mezzadri 2007).
    signs = lax.sign(diagonal(r, 0, -2, -1))
    q = multiply(q, lax.expand_dims(signs, (len(lead),)))
    return matrix_transpose(q) if rows < columns else q


# ---- inverse distribution functions ------------------------------------------------------------


@lays_out_result
def exponential(key: Any, shape: Any = (), dtype: Any = None, *, out_sharding: Any = None) -> Array:
    """Draw exponentially distributed numbers with mean 1.

    `shape` is the result's; `dtype` is a float dtype, by default float32. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `DtypeError`
    for another, `ShapeError` if a size is negative, and `ArgumentError` if `key` is no single
    key.

    >>> x = spmd.random.exponential(spmd.random.key(0), (10_000,))
    >>> round(float(x.mean()), 1)
    1.0
    """
    found = float_dtype(dtype, "exponential")
    whole = canonical_shape(shape, "exponential")
    return exponential_typed(single(key, "exponential"), whole, found)


@one_program("shape", "dtype")
def exponential_typed(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """`exponential` of a typed key."""
    return lax.neg(lax.log1p(lax.neg(uniform_typed(key, shape, dtype))))


@lays_out_result
def gumbel(
    key: Any,
    shape: Any = (),
    dtype: Any = None,
    mode: str | None = None,
    *,
    out_sharding: Any = None,
) -> Array:
    """Draw Gumbel distributed numbers: `-log(-log(u))` of uniform `u`.

    `shape` is the result's; `dtype` is a float dtype, by default float32. `mode="high"` uses
    twice the bits and has a finer upper tail than "low", the default; "highest" is finer still
    for float32. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the
    result. Raises `DtypeError` for another dtype, `ShapeError` if a size is negative, and
    `ArgumentError` for another mode or if `key` is no single key.

    >>> x = spmd.random.gumbel(spmd.random.key(0), (10_000,))
    >>> round(float(x.mean()), 1)
    0.6
    """
    found = float_dtype(dtype, "gumbel")
    whole = canonical_shape(shape, "gumbel")
    return gumbel_typed(single(key, "gumbel"), whole, found, gumbel_mode("gumbel", mode))


def gumbel_mode(name: str, mode: str | None) -> str:
    """The mode that a user chose, or the setting's; raises his error."""
    if mode is None:
        return "high" if config.high_dynamic_range_gumbel else "low"
    if mode not in ("low", "high", "highest"):
        raise ArgumentError(f"{name}: mode must be 'low', 'high' or 'highest', got {mode!r}")
    return mode


@one_program("shape", "dtype", "mode")
def gumbel_typed(key: Any, shape: tuple[int, ...], dtype: np.dtype, mode: str = "low") -> Any:
    """`gumbel` of a typed key."""
    info = dtypes.finfo(dtype)
    tiny = np.array(info.tiny, dtype)
    if mode == "low":
        u = uniform_typed(key, shape, dtype, tiny, 1.0)
        return lax.neg(lax.log(lax.neg(lax.log(u))))
    if mode == "highest" and dtype == np.float32:
        return _gumbel_of_64_bits(key, shape)
    both = uniform_typed(key, (2, *shape), dtype)
    high, low = (lax.index_in_dim(both, k, 0, keepdims=False) for k in (0, 1))
    fine = lax.add(lax.mul(low, np.array(2.0**-info.nmant, dtype)), tiny)
    x = select(lax.ge(high, np.array(0.5, dtype)), high, lax.add(high, fine))
    return lax.neg(lax.log(lax.neg(lax.log1p(lax.neg(x)))))


def _gumbel_of_64_bits(key: Any, shape: tuple[int, ...]) -> Any:
    """Gumbel noise of 64 bits a number, taken as a distance to the nearer end of (0, 1).

    The distance is a float32 of full precision however small it is: `log1p` of it near 1.
    """
    word = np.dtype(np.uint32)
    both = typed_bits(key, (2, *shape), word)
    high, low = (lax.index_in_dim(both, k, 0, keepdims=False) for k in (0, 1))
    near_zero = lax.lt(high, np.uint32(1 << 31))
    # One minus the fraction: the two's complement of both words, with a carry.
    rest_high, rest_low = lax.bitwise_not(high), lax.bitwise_not(low)
    carry = lax.convert_element_type(lax.eq(rest_low, np.uint32(2**32 - 1)), word)
    x = _fraction(
        select(near_zero, high, lax.add(rest_high, carry)),
        select(near_zero, low, lax.add(rest_low, np.uint32(1))),
    )
    close = lax.log(lax.neg(lax.log1p(lax.neg(x))))
    return lax.neg(select(near_zero, close, lax.log(lax.neg(lax.log(x)))))


def _fraction(high: Any, low: Any) -> Any:
    """The float32 of 64 bits that are a fraction of one: leading zeros are its exponent."""
    word = np.dtype(np.uint32)
    zeros_high, zeros_low = lax.clz(high), lax.clz(low)
    is_low = lax.eq(zeros_high, np.uint32(32))
    mantissa = lax.bitwise_or(
        lax.shift_left(high, zeros_high),
        select(
            is_low,
            lax.shift_left(low, zeros_low),
            lax.shift_right_logical(low, lax.sub(np.uint32(32), zeros_high)),
        ),
    )
    mantissa = lax.bitwise_and(
        lax.shift_right_logical(mantissa, np.uint32(8)), np.uint32(2**23 - 1)
    )
    zeros = select(is_low, lax.add(zeros_low, np.uint32(32)), zeros_high)
    exponent = lax.shift_left(lax.sub(np.uint32(126), zeros), np.uint32(23))
    exponent = lax.bitwise_and(exponent, np.uint32((1 << 30) - (1 << 22)))
    bits = lax.convert_element_type(lax.bitwise_or(exponent, mantissa), word)
    return lax.bitcast_convert_type(bits, np.dtype(np.float32))


@lays_out_result
def laplace(key: Any, shape: Any = (), dtype: Any = None, *, out_sharding: Any = None) -> Array:
    """Draw Laplace distributed numbers: exponential ones with a random sign.

    `shape` is the result's; `dtype` is a float dtype, by default float32. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `DtypeError`
    for another, `ShapeError` if a size is negative, and `ArgumentError` if `key` is no single
    key.

    >>> spmd.random.laplace(spmd.random.key(0), (2, 3)).shape
    (2, 3)
    """
    found = float_dtype(dtype, "laplace")
    whole = canonical_shape(shape, "laplace")
    return _laplace(single(key, "laplace"), whole, found)


@one_program("shape", "dtype")
def _laplace(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    u = uniform_typed(key, shape, dtype, -1.0 + float(dtypes.finfo(dtype).epsneg), 1.0)
    return lax.mul(lax.sign(u), lax.log1p(lax.neg(lax.abs(u))))


@lays_out_result
def logistic(key: Any, shape: Any = (), dtype: Any = None, *, out_sharding: Any = None) -> Array:
    """Draw logistic distributed numbers: `log(u / (1 - u))` of uniform `u`.

    `shape` is the result's; `dtype` is a float dtype, by default float32. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `DtypeError`
    for another, `ShapeError` if a size is negative, and `ArgumentError` if `key` is no single
    key.

    >>> spmd.random.logistic(spmd.random.key(0), (2, 3)).shape
    (2, 3)
    """
    found = float_dtype(dtype, "logistic")
    whole = canonical_shape(shape, "logistic")
    return _logistic(single(key, "logistic"), whole, found)


@one_program("shape", "dtype")
def _logistic(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    x = uniform_typed(key, shape, dtype, np.array(dtypes.finfo(dtype).tiny, dtype), 1.0)
    return lax.sub(lax.log(x), lax.log1p(lax.neg(x)))


@lays_out_result
def cauchy(key: Any, shape: Any = (), dtype: Any = None, *, out_sharding: Any = None) -> Array:
    """Draw Cauchy distributed numbers: `tan(pi * (u - 1/2))` of uniform `u`.

    `shape` is the result's; `dtype` is a float dtype, by default float32. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `DtypeError`
    for another, `ShapeError` if a size is negative, and `ArgumentError` if `key` is no single
    key.

    >>> spmd.random.cauchy(spmd.random.key(0), (2, 3)).shape
    (2, 3)
    """
    found = float_dtype(dtype, "cauchy")
    whole = canonical_shape(shape, "cauchy")
    return _cauchy(single(key, "cauchy"), whole, found)


@one_program("shape", "dtype")
def _cauchy(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    u = uniform_typed(key, shape, dtype, np.array(dtypes.finfo(dtype).eps, dtype), 1.0)
    centered = lax.sub(u, np.array(0.5, dtype))
    return lax.tan(lax.mul(centered, np.array(np.pi, dtype)))


@lays_out_result
def pareto(
    key: Any, b: Any, shape: Any = None, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw Pareto distributed numbers with exponent `b`: at least 1, with density `b / x**(b + 1)`.

    `b` broadcasts to `shape`, which is by default its own; `dtype` is a float dtype, by default
    float32. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the
    result. Raises `DtypeError` for another, `ShapeError` if `b` does not broadcast, and
    `ArgumentError` if `key` is no single key.

    >>> bool((spmd.random.pareto(spmd.random.key(0), 3.0, (100,)) >= 1).all())
    True
    """
    found = float_dtype(dtype, "pareto")
    whole = parameters_shape("pareto", shape, found, b)
    b = _fitted(lax.convert_element_type(plain(b), found), whole)
    return _pareto(single(key, "pareto"), b, whole, found)


@one_program("shape", "dtype")
def _pareto(key: Any, b: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return lax.exp(lax.div(exponential_typed(key, shape, dtype), b))


@lays_out_result
def rayleigh(
    key: Any, scale: Any, shape: Any = None, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw Rayleigh distributed numbers: lengths of normal vectors in the plane, times `scale`.

    `scale` broadcasts to `shape`, which is by default its own; `dtype` is a float dtype, by
    default float32. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout
    of the result. Raises `DtypeError` for another, `ShapeError` if `scale` does not broadcast,
    and `ArgumentError` if `key` is no single key.

    >>> bool((spmd.random.rayleigh(spmd.random.key(0), 2.0, (100,)) >= 0).all())
    True
    """
    found = float_dtype(dtype, "rayleigh")
    whole = parameters_shape("rayleigh", shape, found, scale)
    scale = _fitted(lax.convert_element_type(plain(scale), found), whole)
    return _rayleigh(single(key, "rayleigh"), scale, whole, found)


@one_program("shape", "dtype")
def _rayleigh(key: Any, scale: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    logarithm = lax.log(uniform_typed(key, shape, dtype))
    return lax.mul(lax.sqrt(lax.mul(logarithm, np.array(-2, dtype))), scale)


def weibull_min(
    key: Any, scale: Any, concentration: Any, shape: Any = (), dtype: Any = None
) -> Array:
    """Draw Weibull distributed numbers: `scale * e**(1 / concentration)` of exponential `e`.

    `shape` is that of `e`, with which `scale` and `concentration` broadcast; `dtype` is a float
    dtype, by default float32. Raises `DtypeError` for another, `ShapeError` if a size is negative,
    and `ArgumentError` if `key` is no single key.

    >>> spmd.random.weibull_min(spmd.random.key(0), 1.0, 2.0, (2, 3)).shape
    (2, 3)
    """
    found = float_dtype(dtype, "weibull_min")
    whole = canonical_shape(shape, "weibull_min")
    args = plain(scale), plain(concentration)
    return _weibull(single(key, "weibull_min"), *args, whole, found)


@one_program("shape", "dtype")
def _weibull(
    key: Any, scale: Any, concentration: Any, shape: tuple[int, ...], dtype: np.dtype
) -> Any:
    waited = exponential_typed(key, shape, dtype)
    return multiply(power(waited, divide(1.0, concentration)), scale)


@lays_out_result
def maxwell(key: Any, shape: Any = (), dtype: Any = None, *, out_sharding: Any = None) -> Array:
    """Draw Maxwell distributed numbers: lengths of normal vectors in space.

    `shape` is the result's; `dtype` is a float dtype, by default float32. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `DtypeError`
    for another, `ShapeError` if a size is negative, and `ArgumentError` if `key` is no single
    key.

    >>> bool((spmd.random.maxwell(spmd.random.key(0), (100,)) > 0).all())
    True
    """
    found = float_dtype(dtype, "maxwell")
    whole = canonical_shape(shape, "maxwell")
    return maxwell_typed(single(key, "maxwell"), whole, found)


@one_program("shape", "dtype")
def maxwell_typed(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """`maxwell` of a typed key."""
    return norm(normal_typed(key, (*shape, 3), dtype), axis=-1)
