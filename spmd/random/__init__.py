"""Random numbers from explicit keys, bit for bit those of `jax.random`'s default generator.

>>> from spmd import random
>>> key, subkey = random.split(random.key(0))
>>> random.randint(subkey, (3,), 0, 10).shape
(3,)
"""

# ruff: noqa: F401

import typing as _typing

from spmd.base.lazy_import import without as _without
from spmd.random.binomial import binomial, multinomial
from spmd.random.continuous import (
    cauchy,
    exponential,
    gumbel,
    laplace,
    logistic,
    maxwell,
    multivariate_normal,
    normal,
    orthogonal,
    pareto,
    rayleigh,
    truncated_normal,
    uniform,
    weibull_min,
)
from spmd.random.derived import (
    ball,
    double_sided_maxwell,
    f,
    generalized_normal,
    geometric,
    lognormal,
    triangular,
    wald,
)
from spmd.random.discrete import (
    bernoulli,
    categorical,
    choice,
    permutation,
    rademacher,
    randint,
)
from spmd.random.gamma import beta, chisquare, dirichlet, gamma, loggamma, poisson, t
from spmd.random.generators import define_prng_impl
from spmd.random.keys import (
    PRNGKey,
    bits,
    clone,
    fold_in,
    key,
    key_data,
    key_dtype,
    key_impl,
    split,
    wrap_key_data,
)

if not _typing.TYPE_CHECKING:  # which knows what is missing by itself
    __getattr__ = _without(__name__)
