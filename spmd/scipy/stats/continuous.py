"""Continuous distributions, each by the formulas of its standard form.

`z` is the standard variable, inside the support; `q` a probability.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import numpy as np

from spmd import numpy as snp
from spmd.nn import log1mexp
from spmd.scipy import special
from spmd.scipy.stats.family import continuous

_LOG_2PI = math.log(2 * math.pi)


def _positive(*shapes: Any) -> tuple[Any, Any]:
    return 0.0, np.inf


def _unit(*shapes: Any) -> tuple[Any, Any]:
    return 0.0, 1.0


def _all_positive(*shapes: Any) -> Any:
    return functools.reduce(operator.and_, (x > 0 for x in shapes))


# ---- on the whole line -------------------------------------------------------------------------

norm = continuous(
    "norm",
    "The normal distribution.",
    log_scale=lambda scale: snp.log(snp.abs(scale)),
    logpdf=lambda z: -0.5 * (z * z + _LOG_2PI),
    cdf=special.ndtr,
    sf=lambda z: special.ndtr(-z),
    logcdf=special.log_ndtr,
    logsf=lambda z: special.log_ndtr(-z),
    ppf=special.ndtri,
    isf=lambda q: -special.ndtri(q),
    examples={
        "logpdf": ("0.0", "Array(-0.9189385, dtype=float32, weak_type=True)"),
        "pdf": ("np.array([0.0, 1.0])", "Array([0.3989423 , 0.24197073], dtype=float32)"),
        "cdf": ("12.0, loc=10.0, scale=2.0", "Array(0.8413447, dtype=float32)"),
        "sf": ("0.0", "Array(0.5, dtype=float32)"),
        "logcdf": ("-100.0", "Array(-5005.524, dtype=float32)"),
        "logsf": ("100.0", "Array(-5005.524, dtype=float32)"),
        "ppf": ("np.array([0.0, 0.5, 1.0])", "Array([-inf,   0.,  inf], dtype=float32)"),
        "isf": ("0.5", "Array(0., dtype=float32)"),
    },
)
# Of a module doctest finds the functions, not those of its objects.
__test__ = {f"norm.{name}": getattr(norm, name) for name in ("logpdf", "pdf", "cdf", "sf")}
__test__ |= {f"norm.{name}": getattr(norm, name) for name in ("logcdf", "logsf", "ppf", "isf")}
cauchy = continuous(
    "cauchy",
    "The Cauchy distribution.",
    logpdf=lambda z: -snp.log1p(z * z) - math.log(math.pi),
    cdf=lambda z: snp.arctan2(snp.ones_like(z), -z) / math.pi,
    sf=lambda z: snp.arctan2(snp.ones_like(z), z) / math.pi,
    ppf=lambda q: snp.tan(math.pi * (q - 0.5)),
    isf=lambda q: snp.tan(math.pi * (0.5 - q)),
)


def _laplace_cdf(z: Any) -> Any:
    tail = 0.5 * snp.exp(-snp.abs(z))
    return snp.where(z >= 0, 1 - tail, tail)


def _laplace_logcdf(z: Any) -> Any:
    """The tail below has the logarithm itself, which does not underflow."""
    return snp.where(z >= 0, snp.log1p(-0.5 * snp.exp(-snp.abs(z))), -snp.abs(z) - math.log(2))


laplace = continuous(
    "laplace",
    "The Laplace distribution.",
    logpdf=lambda z: -snp.abs(z) - math.log(2),
    cdf=_laplace_cdf,
    sf=lambda z: _laplace_cdf(-z),
    logcdf=_laplace_logcdf,
    logsf=lambda z: _laplace_logcdf(-z),
)
logistic = continuous(
    "logistic",
    "The logistic distribution.",
    logpdf=lambda z: -snp.abs(z) - 2 * snp.log1p(snp.exp(-snp.abs(z))),
    cdf=special.expit,
    sf=lambda z: special.expit(-z),
    probability="x",
    ppf=special.logit,
    isf=lambda q: -special.logit(q),
)


def _gennorm_cdf(z: Any, b: Any) -> Any:
    tail = 0.5 * special.gammaincc(1 / b, snp.abs(z) ** b)
    return snp.where(z >= 0, 1 - tail, tail)


gennorm = continuous(
    "gennorm",
    "The generalised normal distribution, whose density is that of `exp(-|z|**beta)`.",
    "beta",
    valid=_all_positive,
    logpdf=lambda z, b: snp.log(0.5 * b) - special.gammaln(1 / b) - snp.abs(z) ** b,
    cdf=_gennorm_cdf,
    sf=lambda z, b: _gennorm_cdf(-z, b),
)
gumbel_r = continuous(
    "gumbel_r",
    "The right-skewed Gumbel distribution, of maxima.",
    logpdf=lambda z: -z - snp.exp(-z),
    logcdf=lambda z: -snp.exp(-z),
    sf=lambda z: -snp.expm1(-snp.exp(-z)),
    probability="p",
    ppf=lambda q: -snp.log(-snp.log(q)),
)
gumbel_l = continuous(
    "gumbel_l",
    "The left-skewed Gumbel distribution, of minima.",
    logpdf=lambda z: z - snp.exp(z),
    logsf=lambda z: -snp.exp(z),
    cdf=lambda z: -snp.expm1(-snp.exp(z)),
    probability="p",
    ppf=lambda q: snp.log(-snp.log1p(-q)),
)


def _t_logpdf(z: Any, df: Any) -> Any:
    constant = special.gammaln(0.5 * (df + 1)) - special.gammaln(0.5 * df)
    return constant - 0.5 * snp.log(math.pi * df) - 0.5 * (df + 1) * snp.log1p(z * z / df)


def _t_cdf(z: Any, df: Any) -> Any:
    normal = snp.isinf(df)
    safe = snp.where(normal, 1.0, df)
    tail = 0.5 * special.betainc(0.5 * safe, snp.full_like(safe, 0.5), safe / (safe + z * z))
    return snp.where(normal, special.ndtr(z), snp.where(z > 0, 1 - tail, tail))


t = continuous(
    "t",
    "Student's t distribution.",
    "df",
    valid=_all_positive,
    logpdf=_t_logpdf,
    cdf=_t_cdf,
    sf=lambda z, df: _t_cdf(-z, df),
)

# ---- on the positive half ----------------------------------------------------------------------

expon = continuous(
    "expon",
    "The exponential distribution.",
    "",
    _positive,
    logpdf=lambda z: -z,
    cdf=lambda z: -snp.expm1(-z),
    sf=lambda z: snp.exp(-z),
    logsf=lambda z: -z,
    ppf=lambda q: -snp.log1p(-q),
    isf=lambda q: -snp.log(q),
)
gamma = continuous(
    "gamma",
    "The gamma distribution.",
    "a",
    _positive,
    valid=_all_positive,
    logpdf=lambda z, a: special.xlogy(a - 1, z) - z - special.gammaln(a),
    cdf=lambda z, a: special.gammainc(a, z),
    sf=lambda z, a: special.gammaincc(a, z),
)
chi2 = continuous(
    "chi2",
    "The chi-squared distribution.",
    "df",
    _positive,
    valid=_all_positive,
    logpdf=lambda z, df: (
        special.xlogy(0.5 * df - 1, z)
        - 0.5 * z
        - special.gammaln(0.5 * df)
        - 0.5 * math.log(2) * df
    ),
    cdf=lambda z, df: special.gammainc(0.5 * df, 0.5 * z),
    sf=lambda z, df: special.gammaincc(0.5 * df, 0.5 * z),
)
pareto = continuous(
    "pareto",
    "The Pareto distribution, from 1 on.",
    "b",
    lambda b: (1.0, np.inf),
    valid=_all_positive,
    logpdf=lambda z, b: snp.log(b) - (b + 1) * snp.log(z),
    cdf=lambda z, b: -snp.expm1(-b * snp.log(z)),
    sf=lambda z, b: z**-b,
    logsf=lambda z, b: -b * snp.log(z),
    ppf=lambda q, b: (1 - q) ** (-1 / b),
    isf=lambda q, b: q ** (-1 / b),
)

# ---- on an interval ----------------------------------------------------------------------------

uniform = continuous(
    "uniform",
    "The uniform distribution on [loc, loc + scale].",
    "",
    _unit,
    logpdf=lambda z: snp.zeros_like(z),
    cdf=lambda z: z,
    ppf=lambda q: q,
)
beta = continuous(
    "beta",
    "The beta distribution.",
    "a b",
    _unit,
    valid=_all_positive,
    logpdf=lambda z, a, b: (
        special.xlogy(a - 1, z) + special.xlog1py(b - 1, -z) - special.betaln(a, b)
    ),
    cdf=lambda z, a, b: special.betainc(a, b, z),
    sf=lambda z, a, b: special.betainc(b, a, 1 - z),
)


def _log_mass(a: Any, b: Any) -> Any:
    """The logarithm of the normal probability between a and b, from the tail that is thinner."""
    right = a > 0
    low, high = snp.where(right, -b, a), snp.where(right, -a, b)
    top, bottom = special.log_ndtr(high), special.log_ndtr(low)
    empty = top <= bottom
    gap = snp.where(empty, 1.0, top - bottom)
    return snp.where(empty, -np.inf, top + log1mexp(gap))


truncnorm = continuous(
    "truncnorm",
    "The normal distribution between a and b (in units of the scale, from the location).",
    "a b",
    lambda a, b: (a, b),
    valid=lambda a, b: a < b,
    logpdf=lambda z, a, b: -0.5 * (z * z + _LOG_2PI) - _log_mass(a, b),
    logcdf=lambda z, a, b: _log_mass(a, z) - _log_mass(a, b),
    logsf=lambda z, a, b: _log_mass(z, b) - _log_mass(a, b),
)
vonmises = continuous(
    "vonmises",
    "The von Mises distribution of angles.",
    "kappa",
    valid=lambda kappa: kappa >= 0,
    logpdf=lambda z, kappa: kappa * (snp.cos(z) - 1) - _LOG_2PI - snp.log(special.i0e(kappa)),
)
wrapcauchy = continuous(
    "wrapcauchy",
    "The Cauchy distribution wrapped around a circle.",
    "c",
    lambda c: (0.0, 2 * math.pi),
    valid=lambda c: (c > 0) & (c < 1),
    logpdf=lambda z, c: snp.log1p(-c * c) - _LOG_2PI - snp.log1p(c * c - 2 * c * snp.cos(z)),
)
