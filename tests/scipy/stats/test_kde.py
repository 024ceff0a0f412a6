"""`gaussian_kde` and `mode` against SciPy, under transformations."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import random
from spmd.errors import ArgumentError, ShapeError
from spmd.scipy import stats

oracle = pytest.importorskip("scipy.stats")
RNG = np.random.default_rng(1)


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.config.override("enable_x64", True):
        yield


WEIGHTS = RNG.uniform(0.5, 2, 30)
CASES = {
    "one dimension": (RNG.normal(size=30), {}),
    "silverman": (RNG.normal(size=30), {"bw_method": "silverman"}),
    "a number": (RNG.normal(size=(3, 30)), {"bw_method": 0.4}),
    "weights": (RNG.normal(size=(2, 30)), {"weights": WEIGHTS}),
    "a function": (RNG.normal(size=(2, 30)), {"bw_method": lambda kde: kde.neff**-0.2}),
}


@pytest.mark.parametrize("name", CASES)
def test_densities_and_integrals(name):
    data, options = CASES[name]
    rng = np.random.default_rng(2)
    ours, theirs = stats.gaussian_kde(data, **options), oracle.gaussian_kde(data, **options)
    np.testing.assert_allclose(ours.covariance, theirs.covariance)
    np.testing.assert_allclose(ours.neff, theirs.neff)
    points = rng.normal(size=(theirs.d, 7))
    np.testing.assert_allclose(ours(points), theirs(points))
    np.testing.assert_allclose(
        spmd.jit(lambda k, p: k.logpdf(p))(ours, points), theirs.logpdf(points)
    )
    mean, cov = rng.normal(size=theirs.d), np.eye(theirs.d) * 0.3
    np.testing.assert_allclose(
        ours.integrate_gaussian(mean, cov), theirs.integrate_gaussian(mean, cov)
    )
    other = rng.normal(size=(theirs.d, 12)) + 0.5
    np.testing.assert_allclose(
        ours.integrate_kde(stats.gaussian_kde(other)),
        theirs.integrate_kde(oracle.gaussian_kde(other)),
    )
    if theirs.d == 1:
        want = theirs.integrate_box_1d(-0.3, 1.2)
        np.testing.assert_allclose(ours.integrate_box_1d(-0.3, 1.2), want)


def test_it_is_a_pytree_with_derivatives():
    data = RNG.normal(size=(2, 20))
    at = np.array([[0.1], [0.2]])
    slope = spmd.grad(lambda d: stats.gaussian_kde(d).logpdf(at)[0])(data)
    step = 1e-6
    moved = [data.copy() for _ in range(2)]
    moved[0][1, 3] += step
    moved[1][1, 3] -= step
    ends = [oracle.gaussian_kde(d).logpdf(at)[0] for d in moved]
    np.testing.assert_allclose(slope[1, 3], (ends[0] - ends[1]) / (2 * step), rtol=1e-5)
    kde = stats.gaussian_kde(data)
    assert len(spmd.tree.leaves(kde)) == 5 and type(spmd.tree.map(lambda x: x, kde)) is type(kde)


def test_draws_have_the_moments_of_the_estimate():
    kde = stats.gaussian_kde(np.concatenate([RNG.normal(size=40), 5 + RNG.normal(size=40)]))
    drawn = kde.resample(random.key(0), (20_000,))
    assert drawn.shape == (1, 20_000)
    np.testing.assert_allclose(drawn.mean(), kde.dataset.mean(), atol=0.1)
    wide = kde.dataset.var() + kde.covariance[0, 0]
    np.testing.assert_allclose(drawn.var(), wide, rtol=0.05)


def test_modes():
    a = RNG.integers(0, 4, (9, 5))
    for options in ({}, {"axis": 1}, {"axis": None}, {"axis": 1, "keepdims": True}):
        found, want = stats.mode(a, **options), oracle.mode(a, **options)
        np.testing.assert_array_equal(found.mode, want.mode)
        np.testing.assert_array_equal(found.count, want.count)
    jitted = spmd.jit(spmd.vmap(stats.mode))
    np.testing.assert_array_equal(jitted(a).mode, oracle.mode(a, axis=1).mode)
    value, count = stats.mode(np.array([np.nan, 1.0, np.nan]))
    assert np.isnan(value) and count == 2
    value, count = stats.mode(np.zeros((0, 2)))
    assert np.isnan(value).all() and (count == 0).all()


def test_mistakes_are_named():
    with pytest.raises(ShapeError, match="weights must have shape"):
        stats.gaussian_kde(np.ones(4), weights=np.ones(3))
    with pytest.raises(ArgumentError, match="bw_method='wide' must be"):
        stats.gaussian_kde(np.arange(4.0), bw_method="wide")
    with pytest.raises(ShapeError, match="points have dimension 3, the dataset has 2"):
        stats.gaussian_kde(RNG.normal(size=(2, 5)))(np.ones((3, 4)))
    with pytest.raises(ArgumentError, match="nan_policy must be 'propagate'"):
        stats.mode(snp.ones(3), nan_policy="omit")
