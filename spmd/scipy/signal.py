"""`spmd.scipy.signal`: convolution in any number of dims, detrending, and spectra of segments.

The one idea of the spectra: cut the signal into overlapping segments, transform each, and either
keep them (`stft`), or average their products (`csd`, `welch`). All sizes are static.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd import numpy as snp
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, RefusedError, ShapeError
from spmd.base.util import canonical_dim
from spmd.core.aval import typeof
from spmd.numpy.promotion import as_array, promote_dtypes_inexact, promotes_inside

if TYPE_CHECKING:
    from spmd.sharding.array import Array

__all__ = [
    "convolve",
    "convolve2d",
    "correlate",
    "correlate2d",
    "csd",
    "detrend",
    "fftconvolve",
    "istft",
    "stft",
    "welch",
]

# ---- convolution -------------------------------------------------------------------------------

_MODES = ("full", "same", "valid")


def _pair(name: str, in1: Any, in2: Any, mode: str) -> list[Any]:
    if mode not in _MODES:
        raise ArgumentError(f"{name}: mode must be one of {_MODES}, got {mode!r}")
    in1, in2 = promote_dtypes_inexact(as_array(in1), as_array(in2))
    if typeof(in1).ndim != typeof(in2).ndim:
        raise ShapeError(
            f"{name}: in1 and in2 need equal numbers of dims, got {typeof(in1).shape} and "
            f"{typeof(in2).shape}"
        )
    return [in1, in2]


def _full(in1: Any, in2: Any, precision: Any) -> Any:
    """The whole convolution, by one `conv_general_dilated`; the smaller array is the kernel."""
    if typeof(in1).size < typeof(in2).size:
        in1, in2 = in2, in1
    ndim = typeof(in1).ndim
    if ndim == 0:
        return in1 * in2
    padding = [(n - 1, n - 1) for n in typeof(in2).shape]
    kernel = snp.flip(in2)[None, None]
    out = lax.conv_general_dilated(
        in1[None, None], kernel, (1,) * ndim, padding, precision=precision
    )
    return out[0, 0]


def _cut(full: Any, mode: str, first: Sequence[int], second: Sequence[int]) -> Any:
    """`mode`'s part of a full convolution: all, the size of `first`, or where both overlap."""
    if mode == "full":
        return full
    if mode == "same":
        starts = [(n - 1) // 2 for n in second]
        sizes = first
    else:
        starts = [min(n, m) - 1 for n, m in zip(first, second, strict=True)]
        sizes = [abs(n - m) + 1 for n, m in zip(first, second, strict=True)]
    return full[tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))]


def _check_overlap(name: str, first: Sequence[int], second: Sequence[int]) -> None:
    larger = all(n >= m for n, m in zip(first, second, strict=True))
    smaller = all(n <= m for n, m in zip(first, second, strict=True))
    if not (larger or smaller):
        raise ShapeError(
            f"{name}: one input must be at least as large as the other in every "
            f"dim, got {tuple(first)} and {tuple(second)}"
        )


def _convolved(name: str, in1: Any, in2: Any, mode: str, method: str, precision: Any) -> Any:
    shapes = typeof(in1).shape, typeof(in2).shape
    if 0 in shapes[0] or 0 in shapes[1]:
        raise ShapeError(f"{name}: the inputs must have elements, got {shapes[0]} and {shapes[1]}")
    if mode == "valid" or name.endswith("2d"):
        _check_overlap(name, *shapes)
    if method == "fft":
        return fftconvolve(in1, in2, mode)
    if method not in ("auto", "direct"):
        raise ArgumentError(f"{name}: method must be 'auto', 'direct' or 'fft', got {method!r}")
    return _cut(_full(in1, in2, precision), mode, *shapes)


def convolve(
    in1: Any, in2: Any, mode: str = "full", method: str = "auto", precision: Any = None
) -> Array:
    """Convolve two arrays of any, equal, number of dims.

    `mode` is "full", "same" (the shape of `in1`) or "valid" (where `in1` and `in2` overlap
    entirely); `method` is "direct" (also "auto") or "fft". The dtypes are promoted to one float or
    complex dtype; `precision` is that of `lax.dot_general`. Raises `ArgumentError` for another mode
    or method, and `ShapeError` if the arrays do not fit.

    >>> spmd.scipy.signal.convolve(np.array([1.0, 2.0]), np.array([1.0, 1.0]))
    Array([1., 3., 2.], dtype=float32)
    """
    in1, in2 = _pair("convolve", in1, in2, mode)
    return _convolved("convolve", in1, in2, mode, method, precision)


def correlate(
    in1: Any, in2: Any, mode: str = "full", method: str = "auto", precision: Any = None
) -> Array:
    """Cross-correlate two arrays: the convolution with `in2` conjugated and reversed.

    `in1`, `in2`, `mode`, `method`, `precision`, the shape, the dtype rule and the errors are those
    of `convolve`: `ArgumentError` and `ShapeError`.

    >>> spmd.scipy.signal.correlate(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    Array([3., 7., 2.], dtype=float32)
    """
    in1, in2 = _pair("correlate", in1, in2, mode)
    in2 = snp.flip(snp.conj(in2))
    return _convolved("correlate", in1, in2, mode, method, precision)


def _two_dims(name: str, in1: Any, in2: Any, mode: str, boundary: str, fillvalue: Any) -> list[Any]:
    if boundary != "fill" or fillvalue != 0:
        raise RefusedError(
            f"{name}: only boundary='fill' with fillvalue=0 is there, got {boundary!r} and "
            f"{fillvalue!r}; pad in1 with spmd.numpy.pad and use mode='valid'"
        )
    if any(typeof(as_array(x)).ndim != 2 for x in (in1, in2)):
        raise ShapeError(f"{name}: takes matrices, got {snp.shape(in1)} and {snp.shape(in2)}")
    return _pair(name, in1, in2, mode)


def convolve2d(
    in1: Any,
    in2: Any,
    mode: str = "full",
    boundary: str = "fill",
    fillvalue: float = 0,
    precision: Any = None,
) -> Array:
    """Convolve two matrices, with zeros around them.

    `in1`, `in2`, `mode`, `precision`, the shape, the dtype rule and the errors are those of
    `convolve`: `ArgumentError` and `ShapeError`. `boundary` must be "fill", and `fillvalue` 0.

    >>> spmd.scipy.signal.convolve2d(np.ones((2, 2)), np.ones((2, 2)), mode="valid")
    Array([[4.]], dtype=float32)
    """
    in1, in2 = _two_dims("convolve2d", in1, in2, mode, boundary, fillvalue)
    return _convolved("convolve2d", in1, in2, mode, "direct", precision)


def correlate2d(
    in1: Any,
    in2: Any,
    mode: str = "full",
    boundary: str = "fill",
    fillvalue: float = 0,
    precision: Any = None,
) -> Array:
    """Cross-correlate two matrices, with zeros around them.

    `in1`, `in2`, `mode`, `precision`, the shape, the dtype rule and the errors are those of
    `convolve`: `ArgumentError` and `ShapeError`. `boundary` must be "fill", and `fillvalue` 0.

    >>> spmd.scipy.signal.correlate2d(np.ones((2, 2)), np.ones((2, 2)), mode="valid")
    Array([[4.]], dtype=float32)
    """
    in1, in2 = _two_dims("correlate2d", in1, in2, mode, boundary, fillvalue)
    if mode == "same":  # centred as SciPy does: an even size leaves one more on the left
        in1, in2 = snp.flip(in1), snp.conj(in2)
        return snp.flip(_convolved("correlate2d", in1, in2, mode, "direct", precision))
    smaller = typeof(in1).size < typeof(in2).size
    if mode == "valid" and smaller:
        in1, in2 = snp.conj(in1), snp.flip(in2)
    else:
        in2 = snp.flip(snp.conj(in2))
    return _convolved("correlate2d", in1, in2, mode, "direct", precision)


def fftconvolve(
    in1: Any, in2: Any, mode: str = "full", axes: int | Sequence[int] | None = None
) -> Array:
    """Convolve two arrays along `axes` by Fourier transforms.

    The default is all dims; the others broadcast. `in1`, `in2`, `mode`, the shape, the dtype rule
    and the errors are those of `convolve`: `ArgumentError` and `ShapeError`; an axis out of range
    raises `ValueError`.

    >>> spmd.scipy.signal.fftconvolve(np.array([1.0, 2.0]), np.array([1.0, 1.0])).round(4)
    Array([1., 3., 2.], dtype=float32)
    """
    in1, in2 = _pair("fftconvolve", in1, in2, mode)
    first, second = typeof(in1).shape, typeof(in2).shape
    if axes is None:
        axes = range(len(first))
    elif isinstance(axes, int):
        axes = (axes,)
    chosen = sorted({canonical_dim(d, len(first), "axes") for d in axes})
    if not chosen:
        return in1 * in2
    n, m = ([s[d] for d in chosen] for s in (first, second))
    if mode == "valid":
        _check_overlap("fftconvolve", n, m)
    lengths = [a + b - 1 for a, b in zip(n, m, strict=True)]
    if dtypes.is_complex(typeof(in1).dtype):
        spectra = [snp.fft.fftn(x, lengths, chosen) for x in (in1, in2)]
        full = snp.fft.ifftn(spectra[0] * spectra[1], lengths, chosen)
    else:
        spectra = [snp.fft.rfftn(x, lengths, chosen) for x in (in1, in2)]
        full = snp.fft.irfftn(spectra[0] * spectra[1], lengths, chosen)
    whole = list(typeof(full).shape)
    kept_first, kept_second = list(whole), [1] * len(whole)
    for d, a, b in zip(chosen, n, m, strict=True):
        kept_first[d], kept_second[d] = a, b
    return _cut(full, mode, kept_first, kept_second)


# ---- detrending --------------------------------------------------------------------------------


@promotes_inside(1)
def detrend(
    data: Any,
    axis: int = -1,
    type: str = "linear",
    bp: int | Sequence[int] | np.ndarray = 0,
    overwrite_data: None = None,
) -> Array:
    """Subtract from `data` its mean or its line of least squares along `axis`.

    `type` is "constant" for the mean or "linear" for the line; with the latter, `bp` are the places
    where a new line begins. The shape stays; integers become float32 and floats keep their dtype.
    `overwrite_data` must be None. Raises `ArgumentError` for another `type`, for breaks outside of
    the dim, and `RefusedError` for `overwrite_data`.

    >>> spmd.scipy.signal.detrend(np.array([1.0, 2.0, 6.0]), type="constant")
    Array([-2., -1.,  3.], dtype=float32)
    """
    if overwrite_data is not None:
        raise RefusedError("detrend: arrays are immutable, overwrite_data must be None")
    if type not in ("constant", "linear"):
        raise ArgumentError(f"detrend: type must be 'constant' or 'linear', got {type!r}")
    (data,) = promote_dtypes_inexact(snp.asarray(data))
    if type == "constant":
        return data - snp.mean(data, axis=axis, keepdims=True)
    axis = canonical_dim(axis, typeof(data).ndim)
    size = typeof(data).shape[axis]
    cuts = sorted({0, size, *(int(b) for b in np.atleast_1d(bp))})
    if cuts[0] < 0 or cuts[-1] > size:
        raise ArgumentError(f"detrend: the breaks bp={bp!r} must lie in 0..{size}")
    moved = snp.moveaxis(data, axis, -1)
    parts = [_less_line(moved[..., a:b]) for a, b in itertools.pairwise(cuts)]
    return snp.moveaxis(snp.concatenate(parts, axis=-1), -1, axis)


def _less_line(x: Any) -> Any:
    size = typeof(x).shape[-1]
    x = x - snp.mean(x, axis=-1, keepdims=True)
    places = np.arange(size) - (size - 1) / 2
    if size < 2:
        return x
    places = (places / np.sqrt(np.sum(places**2))).astype(typeof(x).dtype)
    return x - snp.sum(x * places, axis=-1, keepdims=True) * places


# ---- segments ----------------------------------------------------------------------------------

_COSINES = {  # the windows that are sums of cosines, by their coefficients
    "hann": (0.5, 0.5),
    "hamming": (0.54, 0.46),
    "blackman": (0.42, 0.5, 0.08),
    "nuttall": (0.3635819, 0.4891775, 0.1365995, 0.0106411),
    "blackmanharris": (0.35875, 0.48829, 0.14128, 0.01168),
    "flattop": (0.21557895, 0.41663158, 0.277263158, 0.083578947, 0.006947368),
}


def _cosines(t: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    angle = math.pi * (t + 1)
    return sum(((-1) ** k * c * np.cos(k * angle) for k, c in enumerate(coefficients)), 0.0 * t)


def _tukey(t: np.ndarray, alpha: float = 0.5) -> np.ndarray:
    if alpha <= 0:
        return np.ones_like(t)
    outside = np.maximum(np.abs(t) - (1 - min(alpha, 1.0)), 0) / min(alpha, 1.0)
    return 0.5 + 0.5 * np.cos(math.pi * outside)


def _parzen(t: np.ndarray, n: int) -> np.ndarray:
    u = np.abs(t) * (n - 1) / n
    return np.where(u <= 0.5, 1 - 6 * u**2 * (1 - u), 2 * (1 - u) ** 3)


def _bohman(t: np.ndarray, n: int) -> np.ndarray:
    u = np.abs(t)
    return (1 - u) * np.cos(math.pi * u) + np.sin(math.pi * u) / math.pi


# Windows of n points, as functions of t in [-1, 1]; further arguments are their parameters.
_WINDOWS: dict[str, Callable[..., Any]] = {
    **{k: (lambda t, n, c=c: _cosines(t, c)) for k, c in _COSINES.items()},
    "barthann": lambda t, n: 0.62 - 0.24 * np.abs(t) + 0.38 * np.cos(math.pi * t),
    "bartlett": lambda t, n: 1 - np.abs(t),
    "bohman": _bohman,
    "boxcar": lambda t, n: np.ones_like(t),
    "cosine": lambda t, n: np.cos(math.pi / 2 * t * (n - 1) / n),
    "exponential": lambda t, n, center=None, tau=1.0: np.exp(
        -np.abs((t + 1) * (n - 1) / 2 - ((n - 1) / 2 if center is None else center)) / tau
    ),
    "gaussian": lambda t, n, std: np.exp(-0.5 * (t * (n - 1) / 2 / std) ** 2),
    "general_cosine": lambda t, n, coefficients: _cosines(t, coefficients),
    "general_gaussian": lambda t, n, p, sig: np.exp(
        -0.5 * np.abs(t * (n - 1) / 2 / sig) ** (2 * p)
    ),
    "general_hamming": lambda t, n, alpha: _cosines(t, (alpha, 1.0 - alpha)),
    "kaiser": lambda t, n, beta: np.i0(beta * np.sqrt(np.maximum(1 - t * t, 0))) / np.i0(beta),
    "lanczos": lambda t, n: np.sinc(t),
    "parzen": _parzen,
    "triang": lambda t, n: 1 - np.abs(t) * (n - 1) / (n + n % 2),
    "tukey": lambda t, n, alpha=0.5: _tukey(t, alpha),
}


def _named_window(name: str, window: str | tuple[Any, ...], count: int) -> np.ndarray:
    kind, *parameters = (window,) if isinstance(window, str) else window
    if kind not in _WINDOWS:
        raise ArgumentError(
            f"{name}: window must be one of {tuple(_WINDOWS)}, a tuple of such a name and its "
            f"parameters, or a vector; got {window!r}"
        )
    # Periodic: the last of one point more would be the first of the next period.
    points = np.linspace(-1.0, 1.0, count + 1)
    try:
        values = _WINDOWS[kind](points, count + 1, *parameters)[:-1]
    except TypeError:
        raise ArgumentError(
            f"{name}: window={window!r} has not the parameters of {kind!r}; SciPy's "
            f"scipy.signal.windows.{kind} has their names"
        ) from None
    return values if count > 1 else np.ones(1)


def _count(name: str, argument: str, value: Any) -> int:
    """A static number of samples; as in JAX, a float of an integer's value counts."""
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name}: {argument} must be an integer, got {value!r}") from None


def _window(name: str, window: Any, nperseg: int | None, size: int | None) -> tuple[Any, int]:
    """The window's values, and the size of a segment: at most `size`, by default 256."""
    if not isinstance(window, (str, tuple)):
        values = as_array(window)
        if typeof(values).ndim != 1 or nperseg not in (None, typeof(values).shape[0]):
            raise ArgumentError(f"{name}: an array as window must be a vector of nperseg elements")
        return values, typeof(values).shape[0]
    count = 256 if nperseg is None else _count(name, "nperseg", nperseg)
    if count < 1:
        raise ArgumentError(f"{name}: nperseg must be positive, got {count}")
    count = count if size is None else min(count, size)
    return _named_window(name, window, count), count


def _overlap(name: str, noverlap: int | None, nperseg: int, nfft: int | None) -> tuple[int, int]:
    overlap = nperseg // 2 if noverlap is None else _count(name, "noverlap", noverlap)
    points = nperseg if nfft is None else _count(name, "nfft", nfft)
    if not 0 <= overlap < nperseg:
        raise ArgumentError(f"{name}: noverlap={overlap} must be in range({nperseg}), or nperseg")
    if points < nperseg:
        raise ArgumentError(f"{name}: nfft={points} must be at least nperseg={nperseg}")
    return overlap, points


def _spectra(x: Any, window: Any, step: int, nfft: int, trend: Any, onesided: bool) -> Any:
    """The transforms of all segments of the last dim: (..., segment, frequency)."""
    nperseg = len(window)
    count = (typeof(x).shape[-1] - nperseg) // step + 1
    places = np.arange(count)[:, None] * step + np.arange(nperseg)
    segments = x[..., places]
    if callable(trend):
        segments = trend(segments)
    elif trend:
        segments = detrend(segments, type=trend)
    segments = segments * window
    transform = snp.fft.rfft if onesided else snp.fft.fft
    return transform(segments, nfft)


def _frequencies(nfft: int, fs: Any, onesided: bool) -> Any:
    function = snp.fft.rfftfreq if onesided else snp.fft.fftfreq
    return function(nfft, 1 / fs)


@promotes_inside(2)
def csd(
    x: Any,
    y: Any,
    fs: Any = 1.0,
    window: Any = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: Any = "constant",
    return_onesided: bool = True,
    scaling: str = "density",
    axis: int = -1,
    average: str = "mean",
) -> tuple[Array, Array]:
    """Compute the cross spectral density by Welch's method: (frequencies, averaged products).

    `y=None` stands for `x`. `fs` is the number of samples in a unit of time. Segments along `axis`
    have `nperseg` samples and share `noverlap`; each is multiplied by `window` (a name or an
    array), less what `detrend` names, and transformed over `nfft` points. With `return_onesided`,
    real arrays give the frequencies from 0 on. `scaling` is "density" or "spectrum", `average`
    "mean" or "median". The products have the frequencies in place of `axis` in their shape, and a
    complex dtype (a float one if `y` is None). Raises `ArgumentError` for another scaling, average
    or window, and for sizes of segments that do not fit.

    >>> f, p = spmd.scipy.signal.csd(np.ones(8), np.ones(8), nperseg=4)
    >>> f, p.shape
    (Array([0.  , 0.25, 0.5 ], dtype=float32), (3,))
    """
    if scaling not in ("density", "spectrum") or average not in ("mean", "median"):
        raise ArgumentError(
            "csd: scaling is 'density' or 'spectrum', average is 'mean' or 'median'; got "
            f"{scaling!r} and {average!r}"
        )
    arrays = promote_dtypes_inexact(*(as_array(v) for v in ((x,) if y is None else (x, y))))
    if typeof(arrays[0]).ndim != typeof(arrays[-1]).ndim:
        raise ShapeError(
            f"csd: x and y need equal numbers of dims, got {typeof(arrays[0]).shape} and "
            f"{typeof(arrays[-1]).shape}"
        )
    arrays = [snp.moveaxis(v, axis, -1) for v in arrays]
    size = max(typeof(v).shape[-1] for v in arrays)
    values, nperseg = _window("csd", window, nperseg, size)
    overlap, nfft = _overlap("csd", noverlap, nperseg, nfft)
    arrays = [_extended(v, size - typeof(v).shape[-1]) for v in arrays]
    onesided = return_onesided and not dtypes.is_complex(typeof(arrays[0]).dtype)
    values = as_array(values).astype(dtypes.real_of(typeof(arrays[0]).dtype))
    spectra = [_spectra(v, values, nperseg - overlap, nfft, detrend, onesided) for v in arrays]
    product = snp.conj(spectra[0]) * spectra[-1]
    power = snp.sum(values * values) * fs if scaling == "density" else snp.sum(values) ** 2
    product = product / power
    if onesided:
        doubled = np.full(nfft // 2 + 1, 2.0)
        doubled[0] = 1.0
        if nfft % 2 == 0:
            doubled[-1] = 1.0
        product = product * doubled.astype(dtypes.real_of(typeof(product).dtype))
    if y is None:
        product = snp.real(product)
    averaged = _average(product, average)
    return _frequencies(nfft, fs, onesided), snp.moveaxis(averaged, -1, axis)


def _average(product: Any, average: str) -> Any:
    """The mean over segments, or the median with its bias taken out (Percival and Walden)."""
    if average == "mean":
        return snp.mean(product, axis=-2)
    odd = 2 * np.arange(1, (typeof(product).shape[-2] - 1) // 2 + 1)
    bias = 1 + np.sum(1 / (odd + 1) - 1 / odd)
    if not dtypes.is_complex(typeof(product).dtype):
        return snp.median(product, axis=-2) / bias
    parts = (snp.median(f(product), axis=-2) for f in (snp.real, snp.imag))
    return lax.complex(*parts) / bias


def _extended(x: Any, count: int) -> Any:
    if count == 0:
        return x
    return snp.pad(x, [(0, 0)] * (typeof(x).ndim - 1) + [(0, count)])


def welch(
    x: Any,
    fs: Any = 1.0,
    window: Any = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: Any = "constant",
    return_onesided: bool = True,
    scaling: str = "density",
    axis: int = -1,
    average: str = "mean",
) -> tuple[Array, Array]:
    """Compute the power spectral density by Welch's method: (frequencies, powers).

    `fs`, `window`, `nperseg`, `noverlap`, `nfft`, `detrend`, `return_onesided`, `scaling`,
    `average`, the shape and the errors are those of `csd` of `x` with itself: `ArgumentError`. The
    powers have a float dtype.

    >>> f, p = spmd.scipy.signal.welch(np.ones(8), nperseg=4)
    >>> f, p.shape
    (Array([0.  , 0.25, 0.5 ], dtype=float32), (3,))
    """
    settings = (fs, window, nperseg, noverlap, nfft, detrend, return_onesided)
    return csd(x, None, *settings, scaling, axis, average)


_BOUNDARIES: dict[str, dict[str, Any]] = {
    "even": {"mode": "reflect"},
    "odd": {"mode": "reflect", "reflect_type": "odd"},
    "constant": {"mode": "edge"},
    "zeros": {"mode": "constant"},
}


@promotes_inside(1)
def stft(
    x: Any,
    fs: Any = 1.0,
    window: Any = "hann",
    nperseg: int = 256,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: Any = False,
    return_onesided: bool = True,
    boundary: str | None = "zeros",
    padded: bool = True,
    axis: int = -1,
) -> tuple[Array, Array, Array]:
    """Compute the short-time Fourier transform: (frequencies, times, transforms of the segments).

    `fs`, `window`, `nperseg`, `noverlap`, `nfft`, `detrend` and `return_onesided` are those of
    `csd`. The transforms have the frequencies in place of `axis` in their shape and the times last;
    their dtype is complex. `boundary` says how half a segment more at both ends continues `x`:
    "zeros", "constant" (the value at the end), "even" or "odd" (mirrored, "odd" around the value at
    the end), or None for no such half; `padded` fills up the last segment. Raises `ArgumentError`
    for another boundary.

    >>> f, t, z = spmd.scipy.signal.stft(np.ones(8), nperseg=4)
    >>> z.shape
    (3, 5)
    """
    if boundary is not None and boundary not in _BOUNDARIES:
        raise ArgumentError(
            f"stft: boundary must be one of {tuple(_BOUNDARIES)} or None, got {boundary!r}"
        )
    (x,) = promote_dtypes_inexact(as_array(x))
    axis = canonical_dim(axis, typeof(x).ndim)
    x = snp.moveaxis(x, axis, -1)
    values, nperseg = _window("stft", window, nperseg, typeof(x).shape[-1])
    overlap, nfft = _overlap("stft", noverlap, nperseg, nfft)
    step = nperseg - overlap
    if boundary is not None:
        around = (nperseg // 2, nperseg // 2)
        settings = _BOUNDARIES[boundary]
        x = snp.pad(x, [(0, 0)] * (typeof(x).ndim - 1) + [around], **settings)
    if padded:
        x = _extended(x, -(typeof(x).shape[-1] - nperseg) % step)
    onesided = return_onesided and not dtypes.is_complex(typeof(x).dtype)
    values = as_array(values).astype(dtypes.real_of(typeof(x).dtype))
    out = _spectra(x, values, step, nfft, detrend, onesided) / snp.sum(values)
    starts = np.arange(typeof(out).shape[-2]) * step + nperseg / 2
    times = starts - nperseg / 2 if boundary else starts
    out = snp.moveaxis(snp.swapaxes(out, -1, -2), -2, axis)
    return _frequencies(nfft, fs, onesided), as_array(times) / fs, out


@promotes_inside(1)
def istft(
    Zxx: Any,
    fs: Any = 1.0,
    window: Any = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    input_onesided: bool = True,
    boundary: bool = True,
    time_axis: int = -1,
    freq_axis: int = -2,
) -> tuple[Array, Array]:
    """Compute the inverse of `stft`: (times, signal), segments added where they overlap.

    `Zxx` holds the transforms, the frequencies along `freq_axis` and the times along `time_axis`,
    both of which one dim of samples replaces, the last of the signal's shape. `fs`, `window`,
    `nperseg`, `noverlap` and `nfft` are those of `stft`; `input_onesided` is its `return_onesided`,
    which gives a real float signal, and `boundary` says whether it put zeros around. Raises
    `ArgumentError` if the sizes of the segments do not fit.

    >>> f, t, z = spmd.scipy.signal.stft(np.arange(8.0), nperseg=4)
    >>> spmd.scipy.signal.istft(z, nperseg=4)[1].round(4)
    Array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float32)
    """
    Z = as_array(Zxx)
    Z = snp.moveaxis(Z, (freq_axis, time_axis), (-1, -2))
    count, bins = typeof(Z).shape[-2:]
    points = 2 * (bins - 1) if input_onesided else bins
    nperseg = _count("istft", "nperseg", nperseg) if nperseg else points
    if nfft is None:
        nfft = nperseg if input_onesided and nperseg == points + 1 else points
    values, nperseg = _window("istft", window, nperseg, None)
    overlap, nfft = _overlap("istft", noverlap, nperseg, nfft)
    step = nperseg - overlap
    segments = (snp.fft.irfft if input_onesided else snp.fft.ifft)(Z, nfft)[..., :nperseg]
    values = as_array(values).astype(dtypes.real_of(typeof(segments).dtype))
    size = nperseg + (count - 1) * step
    places = np.arange(count)[:, None] * step + np.arange(nperseg)
    empty = snp.zeros((*typeof(segments).shape[:-2], size), typeof(segments).dtype)
    x = empty.at[..., places].add(segments * values * snp.sum(values))
    weights = snp.zeros(size, typeof(values).dtype).at[places].add(values * values)
    if boundary:
        cut = slice(nperseg // 2, size - nperseg // 2)
        x, weights = x[..., cut], weights[cut]
    x = x / snp.where(weights > 1e-10, weights, 1.0)
    times = snp.arange(typeof(x).shape[-1], dtype=dtypes.real_of(typeof(x).dtype)) / fs
    rank = typeof(x).ndim
    if rank > 1:
        target = min(canonical_dim(time_axis, rank + 1), canonical_dim(freq_axis, rank + 1))
        x = snp.moveaxis(x, -1, target)
    return times, x
