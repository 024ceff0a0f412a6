"""Distributions of vectors: Dirichlet and multinomial."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import numpy as snp
from spmd.base.errors import ShapeError
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

    >>> spmd.scipy.stats.dirichlet.pdf(np.array([0.5, 0.5]), np.array([2.0, 2.0]))
    Array(1.5000001, dtype=float32)
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
