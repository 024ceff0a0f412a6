"""Distributions of vectors: Dirichlet, multinomial and normal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd import numpy as snp
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.numpy.promotion import as_array, promote_dtypes_inexact
from spmd.scipy import special
from spmd.scipy.stats.family import Distribution

if TYPE_CHECKING:
    from spmd.sharding.array import Array


def _dirichlet_logpdf(x: Any, alpha: Any) -> Array:
    """Compute the logarithm of the probability density at the vectors `x`.

    `x` has a first dim of the size of `alpha`, a vector, or of one less: then the last probability
    is the rest up to 1. That dim disappears from the shape. Both are promoted to one float dtype.
    It is minus infinity for vectors that are no probabilities. Raises `ShapeError` if the sizes
    differ.

    >>> spmd.scipy.stats.dirichlet.logpdf(np.array([0.5, 0.5]), np.array([1.0, 1.0]))
    Array(0., dtype=float32)
    """
    x, alpha = (as_array(v) for v in promote_dtypes_inexact(as_array(x), as_array(alpha)))
    (size,) = typeof(alpha).shape if typeof(alpha).ndim == 1 else (None,)
    if size is None or typeof(x).ndim == 0 or typeof(x).shape[0] not in (size, size - 1):
        raise ShapeError(
            f"stats.dirichlet.logpdf: alpha must be a vector and the first dim of x as long "
            f"(or one less), got x {typeof(x).shape} and alpha {typeof(alpha).shape}"
        )
    if typeof(x).shape[0] == size - 1:
        x = snp.concatenate([x, 1 - snp.sum(x, axis=0, keepdims=True)], axis=0)
    column = snp.reshape(alpha, (size,) + (1,) * (typeof(x).ndim - 1))
    normaliser = snp.sum(special.gammaln(alpha)) - special.gammaln(snp.sum(alpha))
    value = snp.sum(special.xlogy(column - 1, x), axis=0) - normaliser
    tolerance = 8 * size * float(np.finfo(typeof(x).dtype).eps)
    on_simplex = snp.all(x >= 0, axis=0) & (snp.abs(snp.sum(x, axis=0) - 1) <= tolerance)
    return snp.where(on_simplex, value, -np.inf)


def _dirichlet_pdf(x: Any, alpha: Any) -> Array:
    """Compute the probability density at the vectors `x`.

    `x`, `alpha`, the shape, the dtype rule and the errors are those of `logpdf`: `ShapeError`.

    >>> spmd.scipy.stats.dirichlet.pdf(np.array([0.5, 0.5]), np.array([2.0, 2.0])).round(3)
    Array(1.5, dtype=float32)
    """
    return snp.exp(_dirichlet_logpdf(x, alpha))


dirichlet = Distribution(
    "dirichlet",
    "The Dirichlet distribution of vectors of probabilities, along the first dim of x.",
    {"logpdf": _dirichlet_logpdf, "pdf": _dirichlet_pdf},
)


def _multinomial_logpmf(x: Any, n: Any, p: Any) -> Array:
    """Compute the logarithm of the probability of the counts `x` in `n` trials.

    The counts and the probabilities `p` of the categories are along the last dim, which disappears
    from the shape; the others broadcast with `n`. The result has the float dtype of `p`. It is
    minus infinity for counts that do not sum to `n`.

    >>> spmd.scipy.stats.multinomial.logpmf(np.array([2, 0]), 2, np.array([1.0, 0.0]))
    Array(0., dtype=float32)
    """
    (p,) = promote_dtypes_inexact(as_array(p))
    x, n = (as_array(v).astype(typeof(p).dtype) for v in (x, n))
    terms = special.xlogy(x, p) - special.gammaln(x + 1)
    value = special.gammaln(n + 1) + snp.sum(terms, axis=-1)
    return snp.where(snp.sum(x, axis=-1) == n, value, -np.inf)


def _multinomial_pmf(x: Any, n: Any, p: Any) -> Array:
    """Compute the probability of the counts `x` in `n` trials.

    `p`, the shape and the float dtype are those of `logpmf`.

    >>> spmd.scipy.stats.multinomial.pmf(np.array([1, 1]), 2, np.array([0.5, 0.5]))
    Array(0.5, dtype=float32)
    """
    return snp.exp(_multinomial_logpmf(x, n, p))


multinomial = Distribution(
    "multinomial",
    "The multinomial distribution of counts, along the last dim of x.",
    {"logpmf": _multinomial_logpmf, "pmf": _multinomial_pmf},
)

# ---- multivariate_normal -----------------------------------------------------------------------


def _normal_logpdf(x: Any, mean: Any, cov: Any, allow_singular: None = None) -> Array:
    """Compute the logarithm of the probability density at the vectors `x`.

    The last dim of `x` and of `mean` is that of the vectors, and `cov` has two of its size; all
    are promoted to one float dtype, and other dims broadcast to the result's shape. Scalars stand
    for vectors of size 1, and a `mean` or `cov` of rank 0 for a distribution of independent
    numbers. `allow_singular` must be None: `ArgumentError`. Raises `ShapeError` if sizes differ.

    >>> spmd.scipy.stats.multivariate_normal.logpdf(np.zeros(2), np.zeros(2), np.eye(2))
    Array(-1.837877, dtype=float32)
    """
    if allow_singular is not None:
        raise ArgumentError(
            f"stats.multivariate_normal.logpdf: allow_singular={allow_singular!r} must be None"
        )
    x, mean, cov = (
        as_array(v) for v in promote_dtypes_inexact(as_array(x), as_array(mean), as_array(cov))
    )
    if not mean.ndim:
        return -0.5 * ((x - mean) ** 2 / cov + snp.log(2 * np.pi) + snp.log(cov))
    size = mean.shape[-1]
    if not cov.ndim:
        rest = snp.sum((x - mean) ** 2, axis=-1) / cov
        return -0.5 * (rest + size * (snp.log(2 * np.pi) + snp.log(cov)))
    if cov.ndim < 2 or cov.shape[-2:] != (size, size):
        raise ShapeError(
            f"stats.multivariate_normal.logpdf: mean has vectors of size {size}, so the last dims "
            f"of cov must be ({size}, {size}), got shape {cov.shape}"
        )
    lower = snp.linalg.cholesky(cov)
    shape = snp.broadcast_shapes((x - mean).shape[:-1], cov.shape[:-2])
    apart = snp.broadcast_to(x - mean, (*shape, size))[..., None]
    lower = snp.broadcast_to(lower, (*shape, size, size))
    scaled = lax.linalg.triangular_solve(lower, apart, left_side=True, lower=True)[..., 0]
    spread = snp.sum(snp.log(snp.diagonal(lower, axis1=-2, axis2=-1)), axis=-1)
    return -0.5 * snp.sum(scaled**2, axis=-1) - spread - 0.5 * size * np.log(2 * np.pi)


def _normal_pdf(x: Any, mean: Any, cov: Any) -> Array:
    """Compute the probability density at the vectors `x`.

    `x`, `mean`, `cov`, the shape, the dtype rule and the errors are those of `logpdf`:
    `ArgumentError` and `ShapeError`.

    >>> spmd.scipy.stats.multivariate_normal.pdf(np.zeros(2), np.zeros(2), np.eye(2)).round(4)
    Array(0.1592, dtype=float32)
    """
    return snp.exp(_normal_logpdf(x, mean, cov))


multivariate_normal = Distribution(
    "multivariate_normal",
    "The normal distribution of vectors, along the last dim of x.",
    {"logpdf": _normal_logpdf, "pdf": _normal_pdf},
)
