"""`spmd.scipy.special` against SciPy over wide ranges, its derivatives, and its edges."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd.base.errors import ArgumentError
from spmd.scipy import special
from spmd.testing import check_grads

oracle = pytest.importorskip("scipy.special")

LINE = np.concatenate([np.linspace(-30, 30, 601), [0.0, 1e-9, -1e-9, np.inf, -np.inf, np.nan]])
POSITIVE = np.concatenate([np.linspace(0.01, 60, 500), np.geomspace(1e-8, 700, 100), [np.nan]])
UNIT = np.concatenate([np.linspace(0, 1, 201), [-0.5, 1.5, np.nan]])


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.config.override("enable_x64", True):
        yield


def compare(name, *xs, rtol=2e-13, atol=1e-300):
    found = np.asarray(getattr(special, name)(*xs))
    np.testing.assert_allclose(found, getattr(oracle, name)(*xs), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "name, points",
    [
        ("ndtr", LINE), ("dawsn", LINE), ("erf", LINE), ("erfc", LINE), ("erfinv", UNIT),
        ("ndtri", UNIT), ("logit", UNIT), ("expit", LINE), ("entr", LINE), ("i0", LINE),
        ("i0e", LINE), ("i1", LINE), ("i1e", LINE), ("exp1", POSITIVE), ("expi", LINE),
        ("spence", POSITIVE), ("gammasgn", LINE[LINE != np.round(LINE)]), ("digamma", POSITIVE),
        ("gammaln", POSITIVE),
    ],
)  # fmt: skip
def test_functions_of_one_argument(name, points):
    near_a_zero = ("expi", "spence", "digamma", "gammaln", "ndtri", "logit")
    compare(name, points, rtol=1e-12, atol=1e-14 if name in near_a_zero else 1e-300)


def test_log_ndtr_in_both_tails():
    x = np.concatenate([np.linspace(-19.9, 30, 500), [-37.0, -200.0, -1e5]])
    np.testing.assert_allclose(
        special.log_ndtr(x, series_order=8), oracle.log_ndtr(x), rtol=1e-10, atol=1e-300
    )
    narrow = special.log_ndtr(x.astype(np.float32))
    np.testing.assert_allclose(narrow, oracle.log_ndtr(x.astype(np.float32)), rtol=1e-5, atol=1e-30)
    slopes = spmd.vmap(spmd.grad(special.log_ndtr))(np.array([-300.0, 0.0, 40.0]))
    np.testing.assert_allclose(slopes, [300.00333, np.sqrt(2 / np.pi), 0.0], rtol=1e-4, atol=1e-9)


def test_derivatives_of_exp1_are_nan_outside_its_domain():
    x = np.array([-2.0, np.nan, 0.0, 0.5, 2.0])
    first = spmd.vmap(spmd.grad(special.exp1))(x)
    np.testing.assert_allclose(first, [np.nan, np.nan, -np.inf, *-np.exp(-x[3:]) / x[3:]])
    second = spmd.vmap(spmd.grad(spmd.grad(special.exp1)))(x)
    wanted = np.exp(-x[3:]) * (1 / x[3:] + 1 / x[3:] ** 2)
    np.testing.assert_allclose(second, [np.nan, np.nan, np.inf, *wanted])


@pytest.mark.parametrize("name", ["xlogy", "xlog1py", "rel_entr", "kl_div", "betaln", "beta"])
def test_functions_of_two_arguments(name):
    x, y = np.meshgrid([0.0, 0.3, 1.0, 2.5, 7.0], [0.2, 1.0, 1.7, 6.0])
    compare(name, x + (name in ("betaln", "beta")), y, rtol=1e-12, atol=1e-14)


def test_domains_of_entropies():
    p, q = np.array([-1.0, 0.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0, -1.0])
    compare("rel_entr", p, q)
    compare("kl_div", p, q)


def test_gamma_functions():
    x = np.linspace(-4.9, 20, 160)
    compare("gamma", x, rtol=1e-11)
    compare("factorial", np.array([0.0, 1.0, 2.5, 10.0, -1.0]), rtol=1e-13)
    compare("poch", np.array([2.0, 0.5, 3.0]), np.array([3.0, 2.5, 0.0]), rtol=1e-13)
    compare("multigammaln", np.array([3.0, 7.5]), 4, rtol=1e-13)
    compare("comb", np.array([5.0, 10.0, 3.0]), np.array([2.0, 4.0, 5.0]), rtol=1e-12)
    assert float(special.comb(4, 2, repetition=True)) == oracle.comb(4, 2, repetition=True)
    np.testing.assert_allclose(special.bernoulli(20), oracle.bernoulli(20), rtol=1e-11)
    compare("polygamma", 2, np.linspace(0.5, 9, 30), rtol=1e-12)
    compare("zeta", 2.5, np.linspace(0.5, 9, 30), rtol=1e-13)
    np.testing.assert_allclose(special.zeta(2.0), np.pi**2 / 6, rtol=1e-14)


def test_incomplete_beta():
    grid = np.meshgrid(np.geomspace(0.1, 50, 9), np.geomspace(0.1, 50, 9), np.linspace(0, 1, 21))
    compare("betainc", *(v.ravel() for v in grid), rtol=1e-10)
    outside = np.asarray(special.betainc(np.array([-1.0, 1.0]), 1.0, np.array([0.5, 1.5])))
    assert np.isnan(outside).all()


def test_derivatives_of_incomplete_gamma_in_a():
    a, x = (v.ravel() for v in np.meshgrid(np.geomspace(0.1, 60, 9), np.geomspace(0.05, 90, 9)))
    step = 1e-5 * a
    wanted = (oracle.gammainc(a + step, x) - oracle.gammainc(a - step, x)) / (2 * step)
    np.testing.assert_allclose(spmd.lax.igamma_grad_a(a, x), wanted, rtol=1e-6, atol=1e-9)
    density = np.exp((a - 1) * np.log(x) - x - oracle.gammaln(a))
    samples = spmd.lax.random_gamma_grad(a, x)
    np.testing.assert_allclose(samples * density, -wanted, rtol=1e-6, atol=1e-9)
    found = spmd.grad(lambda a: special.gammaincc(a, x).sum())(a)
    np.testing.assert_allclose(found, -wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 12])
def test_exponential_integrals_of_order(n):
    compare("expn", n, np.concatenate([np.linspace(0.0, 5, 60), [50.0, 800.0]]), rtol=1e-12)


def test_expn_of_negative_order_is_nan():
    assert np.isnan(special.expn(-1, 1.0))


@pytest.mark.parametrize(
    "name, points",
    [
        ("log_ndtr", [-12.0, -3.0, 0.5, 4.0]), ("ndtri", [0.1, 0.7]), ("gamma", [0.5, 2.5, 4.0]),
        ("entr", [0.2, 1.5]), ("logit", [0.2, 0.8]), ("i1", [-1.0, 0.5]), ("spence", [0.5, 2.5]),
    ],
)  # fmt: skip
def test_derivatives_of_one_argument(name, points):
    check_grads(getattr(special, name), [np.array(points)], 2)


@pytest.mark.parametrize("name", ["xlogy", "xlog1py", "rel_entr", "beta", "boxcox", "poch"])
def test_derivatives_of_two_arguments(name):
    check_grads(getattr(special, name), [np.array([0.4, 1.3, 2.0]), np.array([0.7, 1.1, 0.3])], 2)


def test_derivatives_at_the_edges():
    assert float(spmd.grad(special.xlogy, 1)(0.0, 0.0)) == 0.0
    assert float(spmd.grad(special.spence)(1.0)) == -1.0
    assert float(spmd.grad(special.i1e)(0.0)) == 0.5
    expn_slope = spmd.grad(lambda x: spmd.grad(lambda y: special.expn(1, y))(x))(2.0)
    np.testing.assert_allclose(expn_slope, np.exp(-2.0) * (1 / 2 + 1 / 4), rtol=1e-13)


def test_softmax_is_over_all_dims_by_default():
    x = np.arange(6.0).reshape(2, 3)
    compare("softmax", x)
    np.testing.assert_allclose(special.log_softmax(x, axis=1), oracle.log_softmax(x, axis=1))


def test_boxcox_at_zero_is_the_logarithm():
    x = np.array([0.5, 1.0, 4.0])
    compare("boxcox", x, np.array([0.0, 1.0, 0.5]))
    compare("boxcox1p", x, np.array([0.0, -1.0, 1e-9]))


def test_integers_and_broadcasting():
    assert special.xlogy(np.arange(3)[:, None], np.ones(4)).shape == (3, 4)
    assert special.ndtr(np.arange(3, dtype=np.int32)).dtype == np.float32
    assert special.gammaln(np.zeros((0, 2))).shape == (0, 2)


def test_mistakes_are_named():
    with pytest.raises(ArgumentError, match=r"math\.factorial"):
        special.factorial(3, exact=True)
    with pytest.raises(ArgumentError, match="series_order"):
        special.log_ndtr(0.0, series_order=40)
    with pytest.raises(ArgumentError, match="must not be negative"):
        special.bernoulli(-1)
