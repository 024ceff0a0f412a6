"""`spmd.scipy.stats` against SciPy: every function of every distribution, and derivatives."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd.base.errors import ArgumentError
from spmd.scipy import stats
from spmd.testing import check_grads

oracle = pytest.importorskip("scipy.stats")

# Distribution: its shape parameters, and standard points with some outside of the support.
LINE = np.array([-9.0, -2.0, -0.3, 0.0, 0.4, 1.0, 3.0, 12.0, np.nan])
HALF = np.array([-1.0, 0.0, 0.2, 1.0, 2.5, 9.0, np.nan])
UNIT = np.array([-0.5, 0.0, 0.2, 0.7, 1.0, 1.5])
CONTINUOUS = {
    "norm": ((), LINE),
    "cauchy": ((), LINE),
    "laplace": ((), LINE),
    "logistic": ((), LINE),
    "gennorm": ((1.5,), LINE),
    "gumbel_r": ((), LINE),
    "gumbel_l": ((), LINE[LINE < 4]),
    "t": ((2.5,), LINE),
    "expon": ((), HALF),
    "gamma": ((2.5,), HALF),
    "chi2": ((3.0,), HALF),
    "pareto": ((2.5,), HALF),
    "uniform": ((), UNIT),
    "beta": ((2.5, 1.5), UNIT),
    "truncnorm": ((-0.4, 1.2), UNIT),
    "vonmises": ((1.5,), np.array([-3.0, 0.0, 0.4, 3.0])),
    "wrapcauchy": ((0.4,), np.array([0.1, 2.0, 6.0])),
}
DISCRETE = {
    "bernoulli": (0.3,),
    "binom": (5.0, 0.3),
    "betabinom": (5.0, 1.5, 2.5),
    "geom": (0.3,),
    "nbinom": (4.0, 0.3),
    "poisson": (2.5,),
}
COUNTS = np.array([-1.0, 0.0, 1.0, 2.0, 4.0, 7.0])
OF_X = ("logpdf", "pdf", "cdf", "logcdf", "sf", "logsf")


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.config.override("enable_x64", True):
        yield


def functions(name, among):
    return [f for f in among if hasattr(getattr(stats, name), f)]


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous(name):
    shapes, z = CONTINUOUS[name]
    loc, scale = 0.7, 1.6
    for operation in functions(name, OF_X):
        found = getattr(getattr(stats, name), operation)(loc + scale * z, *shapes, loc, scale)
        with np.errstate(all="ignore"):
            wanted = getattr(getattr(oracle, name), operation)(loc + scale * z, *shapes, loc, scale)
        # The density at the very end of the support depends on rounding in (x - loc) / scale.
        keep = ~np.isin(z, [0.0, 1.0]) | np.isclose(found, wanted, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(
            np.asarray(found)[keep], wanted[keep], rtol=1e-9, atol=1e-13, err_msg=operation
        )
    for operation in functions(name, ("ppf", "isf")):
        q = np.array([0.01, 0.3, 0.5, 0.99, -0.1, 1.1])
        found = getattr(getattr(stats, name), operation)(q, *shapes, loc=loc, scale=scale)
        wanted = getattr(getattr(oracle, name), operation)(q, *shapes, loc=loc, scale=scale)
        np.testing.assert_allclose(found, wanted, rtol=1e-10, err_msg=operation)


@pytest.mark.parametrize("name", ["uniform", "beta", "expon", "gamma"])
def test_ends_of_the_support(name):
    shapes, z = CONTINUOUS[name]
    for operation in functions(name, OF_X):
        found = getattr(getattr(stats, name), operation)(z, *shapes)
        with np.errstate(all="ignore"):
            wanted = getattr(getattr(oracle, name), operation)(z, *shapes)
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-300, err_msg=operation)


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete(name):
    shapes = DISCRETE[name]
    for operation in functions(name, ("logpmf", "pmf", "cdf")):
        found = getattr(getattr(stats, name), operation)(COUNTS + 2, *shapes, loc=2)
        wanted = getattr(getattr(oracle, name), operation)(COUNTS + 2, *shapes, loc=2)
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-300, err_msg=operation)
    if name == "poisson":
        assert float(stats.poisson.pmf(1.5, *shapes)) == 0.0


@pytest.mark.parametrize("name", CONTINUOUS)
def test_derivatives_of_densities(name):
    shapes, _ = CONTINUOUS[name]
    x = np.array([0.3, 0.8]) + (name == "pareto") * 1.2
    f = getattr(stats, name).logpdf
    check_grads(
        lambda x, loc, *s: f(x, *s, loc, 1.1), [x, np.array(0.1), *map(np.array, shapes)], 2
    )


def test_derivatives_outside_the_support_are_zero():
    for name in ("gamma", "beta", "pareto"):
        f = getattr(stats, name).pdf
        slopes = spmd.grad(f, tuple(range(1 + len(CONTINUOUS[name][0]))))(
            -1.0, *CONTINUOUS[name][0]
        )
        assert all(float(s) == 0.0 for s in slopes)


def test_far_tails_keep_their_digits():
    np.testing.assert_allclose(stats.norm.logsf(50.0), oracle.norm.logsf(50.0), rtol=1e-6)
    np.testing.assert_allclose(stats.norm.sf(20.0), oracle.norm.sf(20.0), rtol=1e-12)
    np.testing.assert_allclose(stats.cauchy.sf(1e20), oracle.cauchy.sf(1e20), rtol=1e-12)
    wanted = oracle.truncnorm.logpdf(8.5, 8.0, 9.0)
    np.testing.assert_allclose(stats.truncnorm.logpdf(8.5, 8.0, 9.0), wanted, rtol=1e-9)


def test_vmap_and_jit():
    x = np.linspace(0.1, 3, 5)
    f = spmd.jit(spmd.vmap(stats.gamma.logpdf, in_axes=(0, None)))
    np.testing.assert_allclose(f(x, 2.0), oracle.gamma.logpdf(x, 2.0), rtol=1e-12)


def test_joint_distributions():
    alpha, x = np.array([1.5, 2.0, 0.7]), np.array([0.2, 0.5, 0.3])
    np.testing.assert_allclose(stats.dirichlet.logpdf(x, alpha), oracle.dirichlet.logpdf(x, alpha))
    np.testing.assert_allclose(stats.dirichlet.pdf(x[:2], alpha), oracle.dirichlet.pdf(x, alpha))
    assert float(stats.dirichlet.logpdf(x + 0.1, alpha)) == -np.inf
    counts = np.array([[1, 2, 3], [0, 5, 1], [1, 1, 1]])
    found = stats.multinomial.logpmf(counts, 6, x)
    np.testing.assert_allclose(found, oracle.multinomial.logpmf(counts, 6, x), rtol=1e-12)


@pytest.mark.parametrize("method", ["average", "min", "max", "dense", "ordinal"])
def test_ranks(method):
    a = np.array([[3.0, 1.0, 3.0, 2.0], [1.0, 1.0, 1.0, 0.0]])
    np.testing.assert_allclose(stats.rankdata(a, method), oracle.rankdata(a, method))
    assert stats.rankdata(np.array([3, 1, 1]), method).dtype == np.float64
    for axis in (0, 1):
        found = stats.rankdata(a, method, axis=axis)
        np.testing.assert_allclose(found, oracle.rankdata(a, method, axis=axis))


def test_standard_error():
    a = np.random.default_rng(0).normal(size=(4, 5))
    np.testing.assert_allclose(stats.sem(a), oracle.sem(a))
    np.testing.assert_allclose(stats.sem(a, axis=None, ddof=0), oracle.sem(a, None, 0))
    a[0, 0] = np.nan
    wanted = oracle.sem(a, axis=1, nan_policy="omit")
    np.testing.assert_allclose(stats.sem(a, axis=1, nan_policy="omit"), wanted)


def test_mistakes_are_named():
    with pytest.raises(TypeError, match=r"stats\.gamma\.logpdf\(x, a, loc=0, scale=1\)"):
        stats.gamma.logpdf(1.0)
    with pytest.raises(ArgumentError, match="method must be one of"):
        stats.rankdata(np.ones(3), "fair")
    with pytest.raises(ArgumentError, match="nan_policy"):
        stats.sem(np.ones(3), nan_policy="raise")
