"""Complex functions at the edges: no overflow or cancellation that the result has not."""

import numpy as np
import pytest

import spmd
from spmd import lax

MOST, LEAST = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal


def samples() -> np.ndarray:
    rng = np.random.default_rng(0)
    size = np.exp(rng.uniform(-100, 88, (2, 2000)))
    plain = rng.standard_normal((2, 1000))
    angle = rng.uniform(-np.pi, np.pi, 1000)
    unit = np.stack([np.cos(angle), np.sin(angle)]) * (1 + rng.standard_normal(1000) * 1e-3)
    corners = np.array([0.0, -0.0, 1.0, -1.0, MOST, -MOST, LEAST, 1e-30, 0.6, 0.8])
    grid = np.stack([part.ravel() for part in np.meshgrid(corners, corners)])
    signs = rng.choice([-1, 1], size.shape)
    real, imag = np.concatenate([size * signs, plain, unit, grid], axis=1).astype(np.float32)
    return (real + 1j * imag.astype(np.float64)).astype(np.complex64)


def assert_close(got: np.ndarray, exact: np.ndarray, ulps: float) -> None:
    """Compare parts, relative to the modulus of the exact result (complex128)."""
    with np.errstate(all="ignore"):
        size = np.abs(exact).clip(2.0**-126, None)
        fits = np.maximum(np.abs(exact.real), np.abs(exact.imag)) < MOST
        assert np.isfinite(got[fits]).all(), exact[fits][~np.isfinite(got[fits])][:5]
        error = np.abs(got.astype(np.complex128) - exact)[fits] / size[fits] / 2.0**-23
    assert error.max() <= ulps, (error.max(), exact[fits][error.argmax()])


@pytest.mark.parametrize("name", ["log", "sqrt", "abs"])
def test_complex_functions_are_accurate_over_the_whole_range(name):
    z = samples()
    z = z[z != 0] if name == "log" else z
    got = np.asarray(spmd.jit(getattr(lax, name))(z))
    with np.errstate(all="ignore"):
        exact = getattr(np, name)(z.astype(np.complex128))
    assert_close(got, exact, 4)


def test_log_keeps_the_digits_of_its_real_part_near_the_unit_circle():
    z = np.array([1 + 1e-4j, 1 - 1e-4j, 1e-3 + 1j, -1 + 1e-5j], np.complex64)
    got = np.asarray(spmd.jit(lax.log)(z)).real
    wide = z.astype(np.complex128)
    exact = 0.5 * np.log1p((np.abs(wide.real) - 1) * (np.abs(wide.real) + 1) + wide.imag**2)
    np.testing.assert_allclose(got, exact, rtol=1e-5)


def test_exp_overflows_only_where_the_result_does():
    z = np.array([89 + 1.5707964j, 100 + 3.1415927j, 80.5 + 1j, -100 + 2j, 5 - 3j], np.complex64)
    got = np.asarray(spmd.jit(lax.exp)(z))
    exact = np.exp(z.astype(np.complex128))
    for part in ("real", "imag"):
        mine, other = getattr(got, part), getattr(exact, part)
        fits = np.abs(other) < MOST
        np.testing.assert_allclose(mine[fits], other[fits], rtol=1e-5, atol=1e-44)
        assert np.isinf(mine[~fits]).all()
