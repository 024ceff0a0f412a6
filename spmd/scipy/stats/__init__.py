"""Probability distributions and statistics of samples, as in `jax.scipy.stats`.

This file only lists the public names, file by file.
"""

# ruff: noqa: F401

from spmd.scipy.stats.continuous import (
    beta,
    cauchy,
    chi2,
    expon,
    gamma,
    gennorm,
    gumbel_l,
    gumbel_r,
    laplace,
    logistic,
    norm,
    pareto,
    t,
    truncnorm,
    uniform,
    vonmises,
    wrapcauchy,
)
from spmd.scipy.stats.discrete import bernoulli, betabinom, binom, geom, nbinom, poisson
from spmd.scipy.stats.family import Distribution
from spmd.scipy.stats.joint import dirichlet, multinomial, multivariate_normal
from spmd.scipy.stats.kde import gaussian_kde
from spmd.scipy.stats.samples import ModeResult, mode, rankdata, sem
