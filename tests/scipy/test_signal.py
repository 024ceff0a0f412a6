"""`spmd.scipy.signal` against SciPy: convolution, detrending, spectra; and gradients."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd.base.errors import ArgumentError, ShapeError
from spmd.scipy import signal
from spmd.testing import check_grads

oracle = pytest.importorskip("scipy.signal")
RNG = np.random.default_rng(0)
MODES = ["full", "same", "valid"]


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.config.override("enable_x64", True):
        yield


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["direct", "fft"])
@pytest.mark.parametrize("name", ["convolve", "correlate"])
def test_convolution_of_any_rank(name, method, mode):
    for first, second in [((7,), (3,)), ((3,), (8,)), ((5, 6), (2, 3)), ((4, 5, 3), (2, 2, 3))]:
        x, y = RNG.normal(size=first), RNG.normal(size=second)
        if name == "correlate" and mode == "valid" and first < second:
            continue  # SciPy exchanges the two and reverses the result
        close(getattr(signal, name)(x, y, mode, method), getattr(oracle, name)(x, y, mode))
    z = RNG.normal(size=5) + 1j * RNG.normal(size=5)
    close(getattr(signal, name)(z, z[:3], mode, method), getattr(oracle, name)(z, z[:3], mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["convolve2d", "correlate2d"])
def test_matrices(name, mode):
    x, y = RNG.normal(size=(5, 6)), RNG.normal(size=(3, 2))
    close(getattr(signal, name)(x, y, mode), getattr(oracle, name)(x, y, mode))
    if mode != "same":
        close(getattr(signal, name)(y, x, mode), getattr(oracle, name)(y, x, mode))


@pytest.mark.parametrize("mode", MODES)
def test_fftconvolve_along_some_axes(mode):
    x, y = RNG.normal(size=(3, 8)), RNG.normal(size=(1, 4))
    close(signal.fftconvolve(x, y, mode, axes=1), oracle.fftconvolve(x, y, mode, axes=1))


def test_detrend():
    x = RNG.normal(size=(3, 20)).cumsum(1)
    for how in ({}, {"type": "constant"}, {"axis": 0}, {"bp": [5, 12]}):
        close(signal.detrend(x, **how), oracle.detrend(x, **how))


@pytest.mark.parametrize(
    "how",
    [
        {"nperseg": 100},
        {"fs": 10.0, "nperseg": 16, "noverlap": 4, "nfft": 20, "scaling": "spectrum"},
        {"nperseg": 15, "average": "median", "window": "hamming", "detrend": "linear"},
        {"nperseg": 16, "return_onesided": False, "detrend": False},
        {"nperseg": 16, "axis": 0},
    ],
)
def test_spectral_densities(how):
    shape = (100, 2) if "axis" in how else (2, 100)
    x, y = RNG.normal(size=shape), RNG.normal(size=shape)
    for found, wanted in zip(signal.welch(x, **how), oracle.welch(x, **how), strict=True):
        close(found, wanted)
    for found, wanted in zip(signal.csd(x, y, **how), oracle.csd(x, y, **how), strict=True):
        close(found, wanted)


@pytest.mark.parametrize(
    "how",
    [
        {"nperseg": 16},
        {"nperseg": 15, "noverlap": 10, "fs": 8.0, "padded": False},
        {"nperseg": 16, "boundary": None, "nfft": 32, "window": "hamming"},
        {"nperseg": 16, "return_onesided": False, "window": "boxcar"},
    ],
)
def test_short_time_transform_and_back(how):
    x = RNG.normal(size=(2, 96))
    for found, wanted in zip(signal.stft(x, **how), oracle.stft(x, **how), strict=True):
        close(found, wanted)
    back = {k: how[k] for k in ("fs", "noverlap", "nfft", "window") if k in how}
    back |= {"nperseg": how["nperseg"], "boundary": how.get("boundary", "zeros") is not None}
    back["input_onesided"] = how.get("return_onesided", True)
    spectrum = oracle.stft(x, **how)[2]
    times, found = signal.istft(spectrum, **back)
    close(found, oracle.istft(spectrum, **back)[1])
    # SciPy counts the rows of a batch here.
    close(times, np.arange(found.shape[-1]) / how.get("fs", 1.0))


def test_gradients():
    x, w = RNG.normal(size=(4, 5)), RNG.normal(size=(2, 3))
    check_grads(lambda x, w: signal.convolve(x, w, "same"), [x, w], 2)
    check_grads(lambda x, w: signal.fftconvolve(x, w, "valid"), [x, w], 2)
    check_grads(lambda x: signal.welch(x, nperseg=8)[1], [RNG.normal(size=24)], 2)


def test_vmap_and_jit():
    x, w = RNG.normal(size=(3, 9)), RNG.normal(size=4)
    found = spmd.jit(spmd.vmap(signal.convolve, in_axes=(0, None)))(x, w)
    close(found, np.stack([np.convolve(row, w) for row in x]))


def test_mistakes_are_named():
    x = np.ones(4)
    with pytest.raises(ArgumentError, match="mode must be one of"):
        signal.convolve(x, x, "circular")
    with pytest.raises(ShapeError, match="equal numbers of dims"):
        signal.convolve(x, x[None])
    with pytest.raises(ShapeError, match="at least as large"):
        signal.convolve(np.ones((2, 5)), np.ones((3, 4)), "valid")
    with pytest.raises(ArgumentError, match="boundary='fill'"):
        signal.convolve2d(x[None], x[None], boundary="wrap")
    with pytest.raises(ArgumentError, match="noverlap=8"):
        signal.welch(np.ones(32), nperseg=8, noverlap=8)
    with pytest.raises(ArgumentError, match="window must be one of"):
        signal.stft(np.ones(32), window="dolph")


WINDOWS = """hann hamming blackman nuttall blackmanharris flattop barthann bartlett bohman boxcar
cosine exponential lanczos parzen triang tukey""".split()
WITH_PARAMETERS = [
    ("exponential", None, 3.0),
    ("gaussian", 3.0),
    ("general_cosine", [0.5, 0.3, 0.2]),
    ("general_gaussian", 1.5, 3.0),
    ("general_hamming", 0.6),
    ("kaiser", 4.0),
    ("tukey", 0.3),
    ("tukey", 0.0),
]


@pytest.mark.parametrize("window", [*WINDOWS, *WITH_PARAMETERS], ids=str)
def test_windows_by_name_and_parameters(window):
    x = RNG.normal(size=40)
    for nperseg in (1, 2, 7, 8):
        close(
            signal.welch(x, window=window, nperseg=nperseg, detrend=False)[1],
            oracle.welch(x, window=window, nperseg=nperseg, detrend=False)[1],
        )


def test_windows_without_their_parameters_are_refused():
    with pytest.raises(ArgumentError, match="window='kaiser' has not the parameters"):
        signal.welch(np.ones(8), window="kaiser", nperseg=4)
    with pytest.raises(ArgumentError, match="a tuple of such a name"):
        signal.welch(np.ones(8), window=("dolph", 2.0), nperseg=4)


@pytest.mark.parametrize("boundary", ["even", "odd", "constant", "zeros", None])
@pytest.mark.parametrize("nperseg", [8, 9])
def test_boundaries_of_stft(boundary, nperseg):
    x = RNG.normal(size=30)
    for found, wanted in zip(
        signal.stft(x, nperseg=nperseg, boundary=boundary),
        oracle.stft(x, nperseg=nperseg, boundary=boundary),
        strict=True,
    ):
        close(found, wanted)


ODD_CALLS = {
    "convolve2d whose inputs cross": lambda s, x: s.convolve2d(x[:2], x[:3, :2]),
    "csd of other ranks": lambda s, x: s.csd(x, x[0], nperseg=2),
    "nperseg that is a float": lambda s, x: s.stft(x[0], nperseg=2.0),
    "nperseg that is no number": lambda s, x: s.stft(x[0], nperseg="two"),
    "overwrite_data": lambda s, x: s.detrend(x, overwrite_data=True),
    "detrend of a list": lambda s, x: s.detrend(x[0].tolist(), type="constant"),
    "istft": lambda s, x: s.istft(x + 0j),
    "istft of complex64": lambda s, x: s.istft((x + 0j).astype(np.complex64), fs=2.0),
}


@pytest.mark.parametrize("name", ODD_CALLS)
def test_odd_calls_give_what_jax_gives(name, from_jax):
    def outcome(library):
        try:
            made = ODD_CALLS[name](library, np.arange(12.0).reshape(3, 4))
        except Exception as error:
            found = [c.__name__ for c in type(error).__mro__]
            return next(c for c in found if c in ("NotImplementedError", "TypeError", "ValueError"))
        made = made if isinstance(made, tuple) else [made]
        return [[str(x.dtype), list(x.shape), bool(x.weak_type)] for x in made]

    def ask():
        import jax
        import jax.scipy.signal

        with jax.enable_x64(True):
            return outcome(jax.scipy.signal)

    wanted = from_jax(ask)
    if isinstance(wanted, str):
        with pytest.raises(Exception) as caught:
            ODD_CALLS[name](signal, np.arange(12.0).reshape(3, 4))
        assert wanted in [c.__name__ for c in type(caught.value).__mro__]
    else:
        assert outcome(signal) == wanted
