"""Special functions of several parameters or results against SciPy, with their derivatives."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.errors import ArgumentError, DtypeError, RefusedError
from spmd.scipy import special
from spmd.testing import check_grads

oracle = pytest.importorskip("scipy.special")

LINE = np.concatenate([np.linspace(-26, 30, 601), [0.0, 1e-9, 1e5, np.inf, np.nan]])
FEW = np.array([-2.3, -0.4, 0.7, 1.9, 3.1])


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.config.override("enable_x64", True):
        yield


def rng():
    """Of each test its own: their order makes no difference."""
    return np.random.default_rng(0)


def test_the_scaled_error_function_and_faddeevas():
    random = rng()
    np.testing.assert_allclose(special.erfcx(LINE), oracle.erfcx(LINE), rtol=1e-13)
    sizes = random.choice([0.1, 1.0, 5.0, 20.0], 3000)
    z = (random.normal(size=3000) + 1j * random.normal(size=3000)) * sizes
    want = oracle.wofz(z)
    seen = np.isfinite(want)
    error = np.abs(special.wofz(z) - want)[seen] / np.abs(want)[seen]
    assert error.max() < 1e-12
    x = np.array([0.0, 1e-8, 0.5, 5.0, 9.0, -20.0])
    np.testing.assert_allclose(np.imag(special.wofz(x)), oracle.wofz(x).imag, rtol=1e-13)
    np.testing.assert_allclose(np.real(special.wofz(x)), oracle.wofz(x).real, rtol=1e-13)
    w = np.array([1 + 2j, 0.3 - 0.5j])
    np.testing.assert_allclose(special.erfcx(w), oracle.erfcx(w), rtol=1e-12)


@pytest.mark.parametrize("name", ["fresnel", "sici"])
def test_pairs_of_integrals(name):
    x = np.concatenate([LINE, [-0.0, -1e5, 4e4, 3e8]])
    found, want = getattr(special, name)(x), getattr(oracle, name)(x)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-13, atol=1e-16)
    for k in range(2):
        one = lambda x, k=k: getattr(special, name)(x)[k]  # noqa: E731
        check_grads(one, [np.abs(FEW)], 2)
    assert float(spmd.grad(spmd.grad(lambda x: special.sici(x)[0]))(0.0)) == 0.0


def test_owens_t():
    random = rng()
    h = np.concatenate([random.normal(size=2000) * 3, [0, 0, 1, 1, 2, 0, np.nan, 30]])
    a = random.normal(size=2000) * random.choice([0.1, 1, 10], 2000)
    a = np.concatenate([a, [1, np.inf, np.inf, -np.inf, 0, 0.3, 1, 1]])
    np.testing.assert_allclose(special.owens_t(h, a), oracle.owens_t(h, a), rtol=1e-11, atol=1e-200)
    check_grads(special.owens_t, [FEW, np.array([0.3, 2.0, -1.0, 0.9, 1.5])], 2)


def test_hypergeometric_functions():
    random = rng()
    a, b, c = random.uniform(0.2, 6, (3, 400))
    x = random.uniform(-30, 60, 400)
    np.testing.assert_allclose(special.hyp1f1(a, b, x), oracle.hyp1f1(a, b, x), rtol=1e-10)
    x = random.uniform(-5, 0.95, 400)
    np.testing.assert_allclose(special.hyp2f1(a, b, c, x), oracle.hyp2f1(a, b, c, x), rtol=1e-9)
    ends = ([1.0, 2, -2, 0.5, 0], [2.0, 3, 3, 0.3, 1], [4.0, -1, 1.5, 2, 2], [1.0, 0.5, 3, 1, 0.2])
    np.testing.assert_allclose(special.hyp2f1(*map(np.array, ends)), oracle.hyp2f1(*ends))
    edges = ([2.0, 1, -2, 3], [2.0, 0, 3, -1], [1.0, 1, 4, 0.5])
    np.testing.assert_allclose(special.hyp1f1(*map(np.array, edges)), oracle.hyp1f1(*edges))
    assert special.hyp1f1(0.0, 0.0, 1.0) == 1  # as in JAX


def test_derivatives_of_hypergeometric_functions():
    operands = [np.array([0.5, 2.0]), np.array([1.3, 0.7]), np.array([2.5, 3.0])]
    x = np.array([0.4, -0.6])
    check_grads(special.hyp2f1, [*operands, x], 1)
    check_grads(lambda x: special.hyp2f1(*operands, x), [x], 2)
    check_grads(special.hyp1f1, [*operands[:2], 4 * x], 1)
    check_grads(lambda x: special.hyp1f1(*operands[:2], x), [4 * x], 2)
    with pytest.raises(RefusedError, match="only first derivatives with respect to the parameters"):
        spmd.grad(spmd.grad(special.hyp1f1))(1.5, 2.0, 1.0)


def test_bessel_functions_of_whole_order():
    z = np.concatenate([np.linspace(-20, 20, 81), [1e-4, 1e-12]])
    found = special.bessel_jn(z, v=6, n_iter=60)
    want = np.stack([oracle.jv(k, z) for k in range(7)])
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-14)
    assert special.bessel_jn(np.ones((2, 3), np.float32), v=2).shape == (3, 2, 3)
    check_grads(lambda z: special.bessel_jn(z, v=3), [FEW], 2, rtol=1e-4)


def test_spherical_harmonics():
    random = rng()
    n, m = np.array([(n, m) for n in range(6) for m in range(-n, n + 1)]).T
    theta, phi = random.uniform(0, np.pi, n.size), random.uniform(0, 2 * np.pi, n.size)
    want = oracle.sph_harm_y(n, m, theta, phi)
    np.testing.assert_allclose(special.sph_harm_y(n, m, theta, phi), want, rtol=1e-11, atol=1e-14)
    jitted = spmd.jit(special.sph_harm_y, static_argnames="n_max")
    np.testing.assert_allclose(jitted(n, m, theta, phi, n_max=5), want, rtol=1e-11, atol=1e-14)
    table = special.sph_harm_y(n[:, None], m[:, None], theta, phi)
    np.testing.assert_allclose(np.diagonal(table), want, rtol=1e-11, atol=1e-14)

    def density(theta):
        return snp.abs(special.sph_harm_y(3, 2, theta, 0.4)) ** 2

    check_grads(density, [np.array(0.8)], 2)
    with pytest.raises(ArgumentError, match="n_max, its largest value, is needed"):
        jitted(n, m, theta, phi)


def test_mistakes_are_named():
    with pytest.raises(ArgumentError, match="v=60 must be between 0 and n_iter=50"):
        special.bessel_jn(1.0, v=60)
    with pytest.raises(DtypeError, match="does not support complex input"):
        special.sici(1j)
