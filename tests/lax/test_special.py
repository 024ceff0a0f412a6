"""Special functions in float64 over their whole range, against SciPy and Python's `math`."""

from __future__ import annotations

import math

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.errors import RefusedError

special = pytest.importorskip("scipy.special")
LINE = np.concatenate([np.linspace(-6, 6, 2001), np.linspace(-27, 26, 301), [0.0, -0.0, 1e-300]])
ENDS = np.array([np.inf, -np.inf, np.nan])


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.config.override("enable_x64", True):
        yield


def assert_relative(found, wanted, tolerance):
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=1e-300)


@pytest.mark.parametrize("name", ["erf", "erfc"])
def test_error_functions(name):
    x = np.concatenate([LINE, ENDS])
    assert_relative(getattr(lax, name)(x), np.vectorize(getattr(math, name))(x), 2e-15)


def test_erf_inv():
    x = np.concatenate([np.linspace(-1, 1, 2001), 1 - 10.0 ** -np.arange(17), [1.5, np.nan]])
    x = np.concatenate([x, 10.0 ** -np.arange(1, 300, 7.0)])
    assert_relative(lax.erf_inv(x), special.erfinv(x), 2e-15)


def test_lgamma():
    x = np.concatenate([np.linspace(0.01, 20, 3001), 10.0 ** np.arange(-300, 300, 10.0)])
    np.testing.assert_allclose(lax.lgamma(x), np.vectorize(math.lgamma)(x), rtol=2e-15, atol=2e-15)
    negative = np.linspace(-19.97, -0.03, 1501)
    np.testing.assert_allclose(
        lax.lgamma(negative), special.gammaln(negative), rtol=1e-13, atol=1e-13
    )
    poles = np.array([0.0, -1.0, -2.0, np.inf, -np.inf])
    np.testing.assert_array_equal(lax.lgamma(poles), np.inf)


def test_lgamma_keeps_its_digits_at_its_zeros():
    z = 1e-9
    slope_at_one, slope_at_two = -np.euler_gamma, 1 - np.euler_gamma
    near = np.asarray(lax.lgamma(np.array([1 + z, 2 + z])))
    exact = np.array([(1 + z) - 1, (2 + z) - 2])
    np.testing.assert_allclose(near / exact, [slope_at_one, slope_at_two], rtol=1e-8)


def test_digamma():
    x = np.concatenate([np.linspace(0.01, 30, 3001), np.linspace(-9.97, -0.03, 1001), [1e8]])
    np.testing.assert_allclose(lax.digamma(x), special.digamma(x), rtol=1e-12, atol=1e-13)
    assert np.isnan(lax.digamma(np.array([0.0, -1.0, -7.0]))).all()


def test_polygamma_and_zeta():
    x = np.linspace(0.1, 20, 300)
    for m in (0, 1, 2, 5):
        found = lax.polygamma(float(m), x)
        np.testing.assert_allclose(found, special.polygamma(m, x), rtol=1e-12)
    q = np.linspace(0.1, 9, 300)
    np.testing.assert_allclose(lax.zeta(2.5, q), special.zeta(2.5, q), rtol=1e-13)
    np.testing.assert_array_equal(lax.zeta(np.array([1.0, 2.0]), np.array([3.0, -1.0])), np.inf)


def test_incomplete_gamma():
    a, x = (
        v.ravel() for v in np.meshgrid(np.geomspace(0.05, 300, 40), np.geomspace(0.01, 500, 40))
    )
    assert_relative(lax.igamma(a, x), special.gammainc(a, x), 1e-11)
    assert_relative(lax.igammac(a, x), special.gammaincc(a, x), 1e-11)
    found = lax.igamma(np.array([2.0, 2.0, -1.0, 2.0]), np.array([0.0, np.inf, 1.0, -1.0]))
    np.testing.assert_array_equal(found, [0, 1, np.nan, np.nan])


@pytest.mark.parametrize(
    "f, argument",
    [(lax.polygamma, "m"), (lax.igamma_grad_a, "a"), (lax.random_gamma_grad, "a")],
)
def test_derivative_that_does_not_exist_says_so(f, argument):
    with pytest.raises(RefusedError, match=f"with respect to {argument}"):
        spmd.grad(lambda a: f(a, 2.0))(3.0)


@pytest.mark.parametrize("name", ["erf", "erfc", "erf_inv", "lgamma", "digamma"])
def test_float32_is_rounded_once(name):
    """What runs without a kernel computes in float64; kernels have their own tests of accuracy."""
    x = np.linspace(0.05, 0.95, 500).astype(np.float32)
    formula = getattr(lax, f"{name}_p").rule("impl")
    found, wide = formula(np, x), formula(np, x.astype(np.float64))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wide.astype(np.float32))
