"""Distributions of vectors: Dirichlet and multinomial."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import numpy as snp
from spmd.base.errors import ShapeError
from spmd.core.aval import typeof
from spmd.numpy.promotion import as_array, promote_dtypes_inexact
from spmd.scipy import special
from spmd.scipy.stats.family import Distribution


def _dirichlet_logpdf(x: Any, alpha: Any) -> Any:
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


dirichlet = Distribution(
    "dirichlet",
    "The Dirichlet distribution of vectors of probabilities, along the first dim of x.",
    {"logpdf": _dirichlet_logpdf, "pdf": lambda x, alpha: snp.exp(_dirichlet_logpdf(x, alpha))},
)


def _multinomial_logpmf(x: Any, n: Any, p: Any) -> Any:
    """The counts x, along the last dim, of n trials with probabilities p."""
    (p,) = promote_dtypes_inexact(as_array(p))
    x, n = (as_array(v).astype(typeof(p).dtype) for v in (x, n))
    terms = special.xlogy(x, p) - special.gammaln(x + 1)
    value = special.gammaln(n + 1) + snp.sum(terms, axis=-1)
    return snp.where(snp.sum(x, axis=-1) == n, value, -np.inf)


multinomial = Distribution(
    "multinomial",
    "The multinomial distribution of counts, along the last dim of x.",
    {
        "logpmf": _multinomial_logpmf,
        "pmf": lambda x, n, p: snp.exp(_multinomial_logpmf(x, n, p)),
    },
)
