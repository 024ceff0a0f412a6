"""Special functions as programs, against their `impl` over NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base.config import config
from spmd.compile.definitions import COMPLEX_SERIES, SERIES
from spmd.compile.definitions.series import write_series
from spmd.lax.special_hypergeometric import hyp1f1_slope_p, hyp2f1_slope_p
from spmd.scipy import special
from tests.compile.definitions.compiled import by_definition

RNG = np.random.default_rng(0)


def positive(dtype: str) -> np.ndarray:
    return np.concatenate([RNG.gamma(2.0, 2.0, 90), [0, 1e-3, 30, 200, np.nan, -1]]).astype(dtype)


def real(dtype: str) -> np.ndarray:
    points = [0, -0.0, np.inf, -np.inf, np.nan, 1]
    return np.concatenate([RNG.normal(0, 8, 90), points]).astype(dtype)


def whole(dtype: str) -> np.ndarray:
    return RNG.integers(0, 5, 96).astype(dtype)


def portion(dtype: str) -> np.ndarray:
    return np.concatenate([RNG.uniform(0, 1, 90), [0, 1, 0.5, np.nan, 2, -1]]).astype(dtype)


def moderate(dtype: str) -> np.ndarray:
    """Parameters of hypergeometric functions; some series end by themselves, some have poles."""
    return np.concatenate([RNG.normal(0, 3, 90), [-2, 0, 1, -3, 2, np.nan]]).astype(dtype)


def plane(dtype: str) -> np.ndarray:
    x, y = RNG.normal(0, 4, (2, 90))
    points = np.concatenate([x + 1j * y, [0, 1, -2j, 5 + 0j, 20 + 20j, -9 + 0.01j]])
    return points.astype(np.result_type(dtype, np.complex64))


CASES = {
    "hyp1f1": (special.hyp1f1, moderate, moderate, real),
    "hyp2f1": (special.hyp2f1, moderate, moderate, moderate, portion),
    "hyp1f1_slope": (
        lambda a, b, x: hyp1f1_slope_p.bind(a, b, x, which=1),
        moderate,
        moderate,
        real,
    ),
    "hyp2f1_slope": (
        lambda a, b, c, x: hyp2f1_slope_p.bind(a, b, c, x, which=0),
        moderate,
        moderate,
        moderate,
        portion,
    ),
    "wofz": (special.wofz, plane),
    "bessel_i0e": (lax.bessel_i0e, real),
    "bessel_i1e": (lax.bessel_i1e, real),
    "bessel_over_power": (special.i0, real),
    "dawsn": (special.dawsn, real),
    "erfcx": (special.erfcx, real),
    "exp1": (special.exp1, positive),
    "expi": (special.expi, real),
    "expn": (lambda n, x: special.expn(n.astype(int), x), whole, positive),
    "fresnel_c": (lambda x: special.fresnel(x)[1], real),
    "fresnel_s": (lambda x: special.fresnel(x)[0], real),
    "cosine_integral": (lambda x: special.sici(x)[1], real),
    "sine_integral": (lambda x: special.sici(x)[0], real),
    "igamma": (lax.igamma, positive, positive),
    "igammac": (lax.igammac, positive, positive),
    "igamma_grad_a": (lax.igamma_grad_a, positive, positive),
    "random_gamma_grad": (lax.random_gamma_grad, positive, positive),
    "owens_t": (special.owens_t, real, real),
    "polygamma": (lax.polygamma, whole, positive),
    "regularized_incomplete_beta": (lax.betainc, positive, positive, portion),
    "spence": (special.spence, positive),
    "zeta": (lax.zeta, lambda dtype: whole(dtype) + 2, positive),
}


def test_all_are_here():
    assert CASES.keys() == SERIES | COMPLEX_SERIES


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_the_program_has_the_values_of_numpy(name: str, dtype: str):
    function, *makers = CASES[name]
    operands = [make(dtype) for make in makers]
    with config.override("enable_x64", True):
        expected = np.asarray(function(*operands))
        text = spmd.jit(function).lower(*operands).compile().as_text()
        assert ("host" in text) == (name in COMPLEX_SERIES)
        (found,) = by_definition(function, name, *operands)
    rtol = 1e-6 if dtype == "float32" else 1e-8 if "hyp" in name else 1e-12
    np.testing.assert_allclose(found, expected, rtol=rtol)


def test_numbers_alone_are_compiled_too():
    """A jitted function is called often: NumPy takes a thousand times as long for one number."""
    closed = spmd.make_jaxpr(special.i0)(np.float32(2))
    assert "bessel_over_power" not in str(write_series(closed))
    found = spmd.jit(special.i0)(np.float32(2))
    np.testing.assert_allclose(found, special.i0(np.float32(2)), rtol=1e-6)


@pytest.mark.parametrize("x64", [False, True])
def test_programs_are_compiled_with_and_without_wide_numbers(x64: bool):
    """Constants of 64 bits keep them where users' arrays have 32."""
    a, x = RNG.gamma(2.0, 2.0, (2, 4096)).astype(np.float32)
    with config.override("enable_x64", x64):
        program = spmd.jit(lax.igammac)
        assert "host" not in program.lower(a, x).compile().as_text()
        found = np.asarray(program(a, x))
        expected = [np.asarray(lax.igammac(p, q)) for p, q in zip(a[:64], x[:64], strict=True)]
    np.testing.assert_allclose(found[:64], expected, rtol=1e-6)


def test_incomplete_gamma_functions_end_soon():
    """A fraction whose last digits alternate has converged: it went on for 20,000 steps."""
    steps = []

    class Counting:
        def __getattr__(self, name: str):
            return getattr(np, name)

        def any(self, moving: np.ndarray) -> bool:
            steps.append(moving)
            return bool(np.any(moving))

    a, x = RNG.gamma(2.0, 2.0, (2, 2000))
    for prim in (lax.igammac_p, lax.igamma_grad_a_p):
        steps.clear()
        prim.impl(Counting(), a, x)
        assert len(steps) < 500
