"""Distributions of whole numbers, each by the logarithm of its probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import lax
from spmd import numpy as snp
from spmd.scipy import special
from spmd.scipy.stats.family import discrete


def _log_choose(n: Any, k: Any) -> Any:
    return -special.betaln(n - k + 1, k + 1) - snp.log(n + 1)


def _below(x: Any) -> Any:
    """The largest number below `x`."""
    x = lax.stop_gradient(x)
    return snp.nextafter(x, snp.zeros_like(x))


def _probability(p: Any) -> Any:
    return (p >= 0) & (p <= 1)


bernoulli = discrete(
    "bernoulli",
    "One trial that succeeds with probability p.",
    "p",
    lambda p: (0, 1),
    lambda k, p: special.xlogy(k, p) + special.xlog1py(1 - k, -p),
    cdf=lambda k, p: snp.where(k < 0, 0.0, snp.where(k < 1, 1 - p, 1.0)),
    ppf=lambda q, p: snp.where(
        (q >= 0) & (q <= 1) & (p >= 0) & (p <= 1), snp.where(q > 1 - p, 1.0, 0.0), np.nan
    ),
    valid=_probability,
)
binom = discrete(
    "binom",
    "The number of successes in n trials.",
    "n p",
    lambda n, p: (0, _below(n + 1)),
    lambda k, n, p: _log_choose(n, k) + special.xlogy(k, p) + special.xlog1py(n - k, -p),
    valid=lambda n, p: _probability(p),
)


def _log_betabinom(k: Any, n: Any, a: Any, b: Any) -> Any:
    return _log_choose(n, k) + special.betaln(k + a, n - k + b) - special.betaln(a, b)


betabinom = discrete(
    "betabinom",
    "The number of successes in n trials whose probability has a beta distribution.",
    "n a b",
    lambda n, a, b: (0, n),
    lambda k, n, a, b: _log_betabinom(snp.floor(k), n, a, b),
    valid=lambda n, a, b: (n >= 0) & (a > 0) & (b > 0),
)
geom = discrete(
    "geom",
    "The number of trials up to the first success.",
    "p",
    lambda p: (2.0**-14, np.inf),  # the least normal number of all dtypes: all but 0
    lambda k, p: special.xlog1py(k - 1, -p) + snp.log(p),
    valid=_probability,
)
nbinom = discrete(
    "nbinom",
    "The number of failures before the n-th success.",
    "n p",
    lambda n, p: (0, np.inf),
    lambda k, n, p: (
        special.gammaln(k + n)
        - special.gammaln(n)
        - special.gammaln(k + 1)
        + special.xlogy(n, p)
        + special.xlog1py(k, -p)
    ),
    valid=lambda n, p: _probability(p),
)
# Up to this mean a sum over the counts gives the entropy. Above it the asymptotic expansion does,
# the first term of which that is left out is below 4e-9.
_SUMMED = 40.0
_COUNTS = 160  # more than 15 standard deviations above that mean


def _poisson_entropy(mu: Any) -> Any:
    small = snp.clip(mu, 0.0, _SUMMED)
    k = snp.arange(_COUNTS, dtype=mu.dtype)
    log_p = special.xlogy(k, small[..., None]) - special.gammaln(k + 1) - small[..., None]
    summed = -snp.sum(snp.where(log_p > -np.inf, snp.exp(log_p) * log_p, 0.0), axis=-1)
    large = snp.maximum(mu, _SUMMED)
    falling = snp.polyval(snp.array([9 / 80, 19 / 360, 1 / 24, 1 / 12, 0], mu.dtype), 1 / large)
    expanded = 0.5 * snp.log(2 * np.pi * np.e * large) - falling
    return snp.where(mu < 0, np.nan, snp.where(mu <= _SUMMED, summed, expanded))


poisson = discrete(
    "poisson",
    "The number of independent events, mu on average.",
    "mu",
    lambda mu: (0, np.inf),
    lambda k, mu: special.xlogy(k, mu) - special.gammaln(k + 1) - mu,
    whole=True,
    cdf=lambda k, mu: snp.where(k < 0, 0.0, special.gammaincc(snp.maximum(k, 0) + 1, mu)),
    entropy=_poisson_entropy,
)
