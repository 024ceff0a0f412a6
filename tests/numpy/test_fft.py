"""`spmd.numpy.fft` against NumPy's: lengths, axes and norms, and gradients through them."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.testing import check_grads

NORMS = [None, "ortho", "forward", "backward"]


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.config.override("enable_x64", True):
        yield


def values(*shape, complex=True, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    return x + 1j * rng.normal(size=shape) if complex else x


def compare(name, x, *args, **how):
    found = getattr(snp.fft, name)(x, *args, **how)
    wanted = getattr(np.fft, name)(x, *args, **how)
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
def test_one_dim(name, norm):
    x = values(3, 7, complex=name not in ("rfft", "ihfft"))
    for n in (None, 4, 7, 10):
        compare(name, x, n, norm=norm)
        compare(name, x, n, axis=0, norm=norm)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn", "fft2", "ifft2", "rfft2"])
def test_several_dims(name, norm):
    x = values(3, 4, 5, complex="r" not in name or name.startswith("ir"))
    compare(name, x, norm=norm)
    compare(name, x, (4, 3), (-1, 0), norm=norm)
    compare(name, x, axes=(1, 0), norm=norm)
    compare("irfft2", values(3, 4, 5), (4, 7), (0, 2), norm=norm)


def test_four_dims_at_once():
    x = values(2, 3, 2, 3)
    compare("fftn", x)


def test_integers_and_narrow_floats_are_promoted():
    assert snp.fft.fft(np.arange(4)).dtype == np.complex128
    assert snp.fft.rfft(np.arange(4, dtype=np.float16)).dtype == np.complex64
    assert snp.fft.fft(np.ones(4, np.float32)).dtype == np.complex64
    assert snp.fft.irfft(np.ones(3, np.complex64)).dtype == np.float32


def test_empty_batch():
    assert snp.fft.fft(np.zeros((0, 4))).shape == (0, 4)
    assert snp.fft.irfftn(np.zeros((0, 4, 3), complex), axes=(1, 2)).shape == (0, 4, 4)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_frequencies_and_shifts(n):
    np.testing.assert_allclose(snp.fft.fftfreq(n, 0.3), np.fft.fftfreq(n, 0.3), rtol=1e-15)
    np.testing.assert_allclose(snp.fft.rfftfreq(n, 0.3), np.fft.rfftfreq(n, 0.3), rtol=1e-15)
    assert snp.fft.fftfreq(n, dtype=np.float32).dtype == np.float32
    x = np.arange(3 * n).reshape(3, n)
    for axes in (None, 0, (1,), (0, 1)):
        for name in ("fftshift", "ifftshift"):
            found = getattr(snp.fft, name)(x, axes)
            np.testing.assert_array_equal(found, getattr(np.fft, name)(x, axes))


def test_compiled_is_eager():
    x = values(4, 6)

    def f(x):
        return snp.fft.irfft(snp.fft.fft(x)[:, :4] * 2, 7)

    np.testing.assert_allclose(spmd.jit(f)(x), f(x), rtol=1e-12, atol=1e-12)


def test_gradients_of_filters():
    x, w = values(2, 6, complex=False), values(4, seed=1)

    def spectral_filter(x, w):
        return snp.fft.irfft(snp.fft.rfft(x, norm="ortho") * w, 6, norm="ortho")

    check_grads(spectral_filter, [x, w], 2)


def test_vmap_over_a_middle_dim():
    x = values(3, 2, 4)
    found = spmd.vmap(snp.fft.fftn, in_axes=1, out_axes=1)(x)
    np.testing.assert_allclose(found, np.fft.fftn(x, axes=(0, 2)), rtol=1e-12, atol=1e-12)


def test_mistakes_are_named():
    x = np.ones((2, 3))
    with pytest.raises(ArgumentError, match="norm must be"):
        snp.fft.fft(x, norm="unitary")
    with pytest.raises(ArgumentError, match="name a dim twice"):
        snp.fft.fftn(x, axes=(0, 0))
    with pytest.raises(ArgumentError, match="equal lengths"):
        snp.fft.fftn(x, s=(2,), axes=(0, 1))
    with pytest.raises(DtypeError, match=r"take its \.real"):
        snp.fft.rfft(x.astype(complex))
    with pytest.raises(ShapeError, match="at least one point"):
        snp.fft.fft(x, n=0)
    with pytest.raises(ShapeError, match="needs an operand whose last dims are"):
        spmd.lax.fft(x.astype(complex), "FFT", (4,))
    with pytest.raises(ArgumentError, match="fft_type must be one of"):
        spmd.lax.fft(x, "DCT", (3,))
    with pytest.raises(ArgumentError, match="positive integer"):
        snp.fft.fftfreq(0)


def test_complex_numbers_are_a_value_error_of_real_transforms_as_in_jax():
    for transform in (snp.fft.rfft, snp.fft.ihfft, snp.fft.rfft2):
        with pytest.raises(ValueError, match="real arrays"):
            transform(np.ones((2, 2), np.complex64))
