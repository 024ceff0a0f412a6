"""Fourier transforms of sizes with large primes, which are convolutions by native ones."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.config import config

RNG = np.random.default_rng(0)

CASES = {
    "prime": ("fft", (521,), {}),
    "backward": ("ifft", (521,), {}),
    "twice a prime": ("fft", (1018,), {}),
    "rows": ("fft", (3, 4, 67), {}),
    "columns": ("fft", (67, 9), {"axis": 0}),
    "real": ("rfft", (8, 101), {}),
    "real, even": ("rfft", (8, 202), {}),
    "to real": ("irfft", (16, 51), {"n": 101}),
    "to real, even": ("irfft", (16, 102), {"n": 202}),
    "one of two dims": ("fft2", (17, 64), {}),
    "both dims": ("fft2", (2, 17, 34), {}),
    "real plane": ("rfft2", (34, 34), {}),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_numpy(name: str, dtype: str):
    function, shape, options = CASES[name]
    x = RNG.normal(size=shape).astype(dtype)
    if function == "irfft":
        x = x + 1j * RNG.normal(size=shape).astype(dtype)
    with config.override("enable_x64", True):
        program = spmd.jit(lambda x: getattr(snp.fft, function)(x, **options))
        assert "host" not in program.lower(x).compile().as_text()
        found = np.asarray(program(x))
    expected = getattr(np.fft, function)(x.astype(np.result_type(x.dtype, np.float64)), **options)
    assert found.dtype.itemsize == expected.dtype.itemsize // (2 if dtype == "float32" else 1)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < (1e-6 if dtype == "float32" else 1e-14)


def test_gradients_are_those_of_numpy_s_transform():
    x = RNG.normal(size=521).astype(np.float32)
    gradient = spmd.grad(lambda x: snp.sum(snp.abs(snp.fft.rfft(x)) ** 2))
    np.testing.assert_allclose(spmd.jit(gradient)(x), gradient(x), rtol=1e-4, atol=1e-3)


def test_short_transforms_are_numpy_s():
    assert "host" in spmd.jit(snp.fft.fft).lower(np.ones(37, np.float32)).compile().as_text()
