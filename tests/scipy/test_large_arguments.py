"""Functions of large arguments and of probabilities near 1, beside SciPy and mpmath."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import spmd
from spmd import numpy as snp
from spmd.base.config import config
from spmd.scipy import special, stats

mpmath = pytest.importorskip("mpmath")
oracle = pytest.importorskip("scipy.stats")
their_stats = pytest.importorskip("jax.scipy.stats")


# ---- large arguments ---------------------------------------------------------------------------

SIZES = [0.25, 1.0, 2.5, 9.5, 10.0, 34.5, 100.0, 1e5, 1e8]
PAIRS = np.array([(a, b) for a in SIZES for b in SIZES] + [(-20.5, 1e5), (-3.5, 100.0)]).T


def log_beta(a, b):
    with mpmath.workdps(50):
        return float(mpmath.re(mpmath.loggamma(a) + mpmath.loggamma(b) - mpmath.loggamma(a + b)))


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [("float64", 2e-14), ("float32", 1e-6), ("float16", 1e-3), ("bfloat16", 8e-3)],
)
def test_betaln_of_large_numbers(dtype, rtol):
    with config.override("enable_x64", dtype == "float64"):
        a, b = (snp.array(p).astype(dtype) for p in PAIRS)
        a, b = (v[snp.isfinite(a) & snp.isfinite(b)] for v in (a, b))
        found = special.betaln(a, b)
        assert found.dtype == np.dtype(a.dtype)
        exact = [log_beta(float(x), float(y)) for x, y in zip(a, b, strict=True)]
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("a", "b"), [(2.0, 30.0), (12.0, 15.0), (0.5, 0.7), (10.0, 10.5)])
def test_derivatives_of_betaln(a, b):
    first = spmd.grad(special.betaln)(a, b)
    second = spmd.grad(spmd.grad(special.betaln, 1), 1)(a, b)
    assert float(first) == pytest.approx(float(mpmath.psi(0, a) - mpmath.psi(0, a + b)), rel=2e-6)
    assert float(second) == pytest.approx(float(mpmath.psi(1, b) - mpmath.psi(1, a + b)), rel=2e-5)


def test_choices_of_large_numbers():
    for n, k in ((1e5, 0.5), (1e5, 3.0), (1e4, 2.0), (20.0, 10.0)):
        exact = float(mpmath.binomial(n, k))
        assert float(special.comb(n, k)) == pytest.approx(exact, rel=5e-6)
    found = stats.binom.logpmf(np.float32(3), np.float32(1e5), np.float32(1e-5))
    assert float(found) == pytest.approx(oracle.binom.logpmf(3, 1e5, 1e-5), rel=2e-6)


# ---- distributions -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["expon", "norm", "logistic", "laplace", "gumbel_l", "gumbel_r"])
@pytest.mark.parametrize("method", ["logcdf", "logsf"])
def test_logarithms_of_probabilities_near_one(name, method):
    x = np.array([-12, -8, -3, -0.5, 0, 0.5, 3, 8, 12], np.float32)
    x = np.abs(x) if name == "expon" else x
    found = getattr(getattr(stats, name), method)(x)
    wanted = getattr(getattr(oracle, name), method)(x.astype(np.float64))
    np.testing.assert_allclose(found, wanted, rtol=3e-5, atol=1e-30)
    x = x[(x != 0) & (np.abs(x) < 12)]
    slope = spmd.vmap(spmd.grad(getattr(getattr(stats, name), method)))(x)
    of_log = getattr(getattr(oracle, name), method)(x.astype(np.float64))
    density = getattr(oracle, name).logpdf(x.astype(np.float64))
    wanted = np.exp(density - of_log) * (1 if method == "logcdf" else -1)
    np.testing.assert_allclose(slope, wanted, rtol=1e-3)


def test_parameters_of_distributions_are_jax_s():
    wrong = []
    for name, theirs in vars(their_stats).items():
        if not inspect.ismodule(theirs) or not theirs.__name__.startswith("jax.scipy.stats"):
            continue
        for method, function in vars(theirs).items():
            if method.startswith("_") or not inspect.isfunction(inspect.unwrap(function)):
                continue
            wanted = list(inspect.signature(function).parameters)
            ours = getattr(getattr(stats, name), method, None)
            found = list(inspect.signature(ours).parameters) if ours else None
            if found is None or found[: len(wanted)] != wanted:
                wrong.append(f"{name}.{method}: {found}, JAX has {wanted}")
    assert not wrong, "\n".join(wrong)
