"""`spmd.numpy.fft`: discrete Fourier transforms over any dims, of any length, with three norms.

Every transform is the same four steps: crop or pad the dims to the lengths asked for, bring them to
the end, one `lax.fft`, and one factor for the norm.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeArgumentError, ShapeError
from spmd.base.util import canonical_dim
from spmd.core.aval import typeof
from spmd.lax import FftType
from spmd.numpy.creation import asarray
from spmd.numpy.manipulation import moveaxis, roll
from spmd.numpy.promotion import as_array, check_arraylike, operand, promote_args_inexact
from spmd.numpy.ufuncs import conjugate, divide, multiply
from spmd.sharding.array import Array, ArrayLike

__all__ = [
    "fft",
    "fft2",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifft2",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfft2",
    "irfftn",
    "rfft",
    "rfft2",
    "rfftfreq",
    "rfftn",
]

# ---- what all transforms share -----------------------------------------------------------------


def _transform(
    name: str, kind: FftType, a: Any, s: Any, axes: Sequence[int] | None, norm: str | None
) -> Any:
    (a,) = promote_args_inexact(name, a)
    aval = typeof(a)
    if dtypes.is_float(aval.dtype) and aval.dtype.itemsize < 4:
        a = lax.convert_element_type(a, np.float32)
    if kind is FftType.RFFT and dtypes.is_complex(aval.dtype):
        raise DtypeArgumentError(
            f"{name}: transforms real arrays, got {aval}; take its .real, or use "
            f"{name.replace('rfft', 'fft')}, which transforms complex ones"
        )
    chosen = _axes(name, aval.shape, s, axes)
    if not chosen:
        is_whole = kind in (FftType.FFT, FftType.IFFT) and dtypes.is_float(typeof(a).dtype)
        complex_dtype = dtypes.complex_of(typeof(a).dtype)
        return as_array(lax.convert_element_type(a, complex_dtype) if is_whole else a)
    lengths = _lengths(name, kind, aval.shape, s, chosen)
    needed = list(lengths)
    if kind is FftType.IRFFT:
        needed[-1] = lengths[-1] // 2 + 1
    for d, n in zip(chosen, needed, strict=True):
        a = _resized(a, d, n)
    at_end = tuple(range(aval.ndim - len(chosen), aval.ndim))
    out = lax.fft(moveaxis(a, chosen, at_end), kind, lengths)
    return _scaled(name, moveaxis(out, at_end, chosen), kind, lengths, norm)


def _axes(name: str, shape: tuple[int, ...], s: Any, axes: Any) -> tuple[int, ...]:
    """The dims to transform, counted from the front."""
    ndim = len(shape)
    if axes is None:
        count = ndim if s is None else len(s)
        if count > ndim:
            raise ShapeError(f"{name}: s={s} has more numbers than {shape} has dims")
        return tuple(range(ndim - count, ndim))
    if s is not None and len(s) != len(axes):
        raise ArgumentError(f"{name}: s={s} and axes={axes} need equal lengths")
    chosen = tuple(canonical_dim(d, ndim, "axes") for d in axes)
    if len(set(chosen)) != len(chosen):
        raise ArgumentError(f"{name}: axes={axes} name a dim twice")
    return chosen


def _lengths(
    name: str, kind: FftType, shape: tuple[int, ...], s: Any, axes: tuple[int, ...]
) -> tuple[int, ...]:
    """The sizes of the transformed dims in space."""
    if s is not None:
        lengths = tuple(operator.index(n) for n in s)
    else:
        lengths = tuple(shape[d] for d in axes)
        if kind is FftType.IRFFT:
            lengths = (*lengths[:-1], max(0, 2 * (lengths[-1] - 1)))
    if min(lengths) < 1:
        raise ShapeError(
            f"{name}: a transform needs at least one point along each dim, got lengths {lengths} "
            f"for an array of shape {shape}"
        )
    return lengths


def _resized(a: Any, d: int, n: int) -> Any:
    """`a` cropped, or padded with zeros, to size n along a dim."""
    aval = typeof(a)
    if aval.shape[d] == n:
        return a
    config = [(0, 0, 0)] * aval.ndim
    config[d] = (0, n - aval.shape[d], 0)
    return lax.pad(a, np.zeros((), aval.dtype), config)


def _scaled(name: str, out: Any, kind: FftType, lengths: Sequence[int], norm: str | None) -> Any:
    count = math.prod(lengths)
    backward = kind in (FftType.IFFT, FftType.IRFFT)
    if norm is None or norm == "backward":
        return out
    if norm == "ortho":
        factor = math.sqrt(count) if backward else 1.0 / math.sqrt(count)
    elif norm == "forward":
        factor = float(count) if backward else 1.0 / count
    else:
        raise ArgumentError(
            f"{name}: norm must be None, 'backward', 'ortho' or 'forward', got {norm!r}"
        )
    return multiply(out, factor)


def _one(name: str, kind: FftType, a: Any, n: Any, axis: Any, norm: str | None) -> Any:
    if isinstance(axis, (tuple, list)):
        raise ArgumentError(f"{name}: axis must be an integer, got {axis}; {name}n takes several")
    return _transform(name, kind, a, None if n is None else (n,), (axis,), norm)


# ---- complex transforms ------------------------------------------------------------------------


def fft(a: ArrayLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """The Fourier transform along a dim, `out[k] = sum of a[j] exp(-2 pi i j k / n)`.

    The dim is cropped, or padded with zeros, to size `n` first. `norm` says where the factor 1/n
    goes: "backward" (the inverse has it), "forward", or "ortho" (its root in both). The result is
    complex64, or complex128 for 64-bit dtypes.

    >>> snp.fft.fft(np.array([1.0, 2.0, 1.0, 2.0]))
    Array([ 6.+0.j,  0.+0.j, -2.+0.j,  0.+0.j], dtype=complex64)
    """
    return _one("fft", FftType.FFT, a, n, axis, norm)


def ifft(a: ArrayLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """The inverse of `fft` along a dim, `out[j] = sum of a[k] exp(2 pi i j k / n) / n`.

    The dim is cropped, or padded with zeros, to size `n` first. `norm` is that of `fft`. The result
    is complex64, or complex128 for 64-bit dtypes.

    >>> snp.fft.ifft(np.array([6.0, 0.0, -2.0, 0.0]))
    Array([1.+0.j, 2.+0.j, 1.+0.j, 2.+0.j], dtype=complex64)
    """
    return _one("ifft", FftType.IFFT, a, n, axis, norm)


def fft2(
    a: ArrayLike, s: Any = None, axes: Sequence[int] = (-2, -1), norm: str | None = None
) -> Array:
    """The Fourier transform over two dims, the last two by default.

    The dims `axes` are cropped, or padded with zeros, to the sizes `s` first. `norm` is that of
    `fft`. The result is complex64, or complex128 for 64-bit dtypes.

    >>> snp.fft.fft2(np.ones((2, 2)))
    Array([[4.+0.j, 0.+0.j],
           [0.+0.j, 0.+0.j]], dtype=complex64)
    """
    return _transform("fft2", FftType.FFT, a, s, axes, norm)


def ifft2(
    a: ArrayLike, s: Any = None, axes: Sequence[int] = (-2, -1), norm: str | None = None
) -> Array:
    """The inverse of `fft2`, over the last two dims by default.

    The dims `axes` are cropped, or padded with zeros, to the sizes `s` first. `norm` is that of
    `fft`. The result is complex64, or complex128 for 64-bit dtypes.

    >>> snp.fft.ifft2(np.array([[4.0, 0.0], [0.0, 0.0]]))
    Array([[1.+0.j, 1.+0.j],
           [1.+0.j, 1.+0.j]], dtype=complex64)
    """
    return _transform("ifft2", FftType.IFFT, a, s, axes, norm)


def fftn(a: ArrayLike, s: Any = None, axes: Any = None, norm: str | None = None) -> Array:
    """The Fourier transform over several dims: all, or the last `len(s)` if only `s` is given.

    The dims `axes` are cropped, or padded with zeros, to the sizes `s` first. `norm` is that of
    `fft`. The result is complex64, or complex128 for 64-bit dtypes.

    >>> snp.fft.fftn(np.ones((2, 2)))
    Array([[4.+0.j, 0.+0.j],
           [0.+0.j, 0.+0.j]], dtype=complex64)
    """
    return _transform("fftn", FftType.FFT, a, s, axes, norm)


def ifftn(a: ArrayLike, s: Any = None, axes: Any = None, norm: str | None = None) -> Array:
    """The inverse of `fftn`, over all dims, or the last `len(s)` if only `s` is given.

    The dims `axes` are cropped, or padded with zeros, to the sizes `s` first. `norm` is that of
    `fft`. The result is complex64, or complex128 for 64-bit dtypes.

    >>> snp.fft.ifftn(np.array([[4.0, 0.0], [0.0, 0.0]]))
    Array([[1.+0.j, 1.+0.j],
           [1.+0.j, 1.+0.j]], dtype=complex64)
    """
    return _transform("ifftn", FftType.IFFT, a, s, axes, norm)


# ---- transforms of real arrays -----------------------------------------------------------------


def rfft(a: ArrayLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """The first `n // 2 + 1` elements of `fft` of a real array; the others are their mirror image.

    The dim is cropped, or padded with zeros, to size `n` first. `norm` is that of `fft`. The result
    is complex64, or complex128 for 64-bit dtypes. Raises a `DtypeError` for complex numbers.

    >>> snp.fft.rfft(np.array([1.0, 2.0, 1.0, 2.0]))
    Array([ 6.+0.j,  0.+0.j, -2.+0.j], dtype=complex64)
    """
    return _one("rfft", FftType.RFFT, a, n, axis, norm)


def irfft(a: ArrayLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """The inverse of `rfft`: `n` real elements, by default `2 * (m - 1)` of m frequencies.

    The dim is cropped, or padded with zeros, to `n // 2 + 1` frequencies first. `norm` is that of
    `fft`. The result is float32, or float64 for 64-bit dtypes.

    >>> snp.fft.irfft(np.array([6.0, 0.0, -2.0]))
    Array([1., 2., 1., 2.], dtype=float32)
    """
    return _one("irfft", FftType.IRFFT, a, n, axis, norm)


def rfft2(
    a: ArrayLike, s: Any = None, axes: Sequence[int] = (-2, -1), norm: str | None = None
) -> Array:
    """The Fourier transform of a real array over two dims; the last holds half of it.

    The dims `axes` are cropped, or padded with zeros, to the sizes `s` first. `norm` is that of
    `fft`. The result is complex64, or complex128 for 64-bit dtypes. Raises a `DtypeError` for
    complex numbers.

    >>> snp.fft.rfft2(np.ones((2, 2)))
    Array([[4.+0.j, 0.+0.j],
           [0.+0.j, 0.+0.j]], dtype=complex64)
    """
    return _transform("rfft2", FftType.RFFT, a, s, axes, norm)


def irfft2(
    a: ArrayLike, s: Any = None, axes: Sequence[int] = (-2, -1), norm: str | None = None
) -> Array:
    """The inverse of `rfft2`: a real array of the sizes `s` along the dims `axes`.

    By default the last of them has size `2 * (m - 1)` for m frequencies. `norm` is that of `fft`.
    The result is float32, or float64 for 64-bit dtypes.

    >>> snp.fft.irfft2(np.array([[4.0, 0.0], [0.0, 0.0]]))
    Array([[1., 1.],
           [1., 1.]], dtype=float32)
    """
    return _transform("irfft2", FftType.IRFFT, a, s, axes, norm)


def rfftn(a: ArrayLike, s: Any = None, axes: Any = None, norm: str | None = None) -> Array:
    """The Fourier transform of a real array over several dims; the last holds half of it.

    The dims `axes`, all by default, are cropped, or padded with zeros, to the sizes `s` first.
    `norm` is that of `fft`. The result is complex64, or complex128 for 64-bit dtypes. Raises a
    `DtypeError` for complex numbers.

    >>> snp.fft.rfftn(np.ones((2, 2)))
    Array([[4.+0.j, 0.+0.j],
           [0.+0.j, 0.+0.j]], dtype=complex64)
    """
    return _transform("rfftn", FftType.RFFT, a, s, axes, norm)


def irfftn(a: ArrayLike, s: Any = None, axes: Any = None, norm: str | None = None) -> Array:
    """The inverse of `rfftn`: a real array of the sizes `s` along the dims `axes`, all by default.

    By default the last of them has size `2 * (m - 1)` for m frequencies. `norm` is that of `fft`.
    The result is float32, or float64 for 64-bit dtypes.

    >>> snp.fft.irfftn(np.array([[4.0, 0.0], [0.0, 0.0]]))
    Array([[1., 1.],
           [1., 1.]], dtype=float32)
    """
    return _transform("irfftn", FftType.IRFFT, a, s, axes, norm)


# A Hermitian signal is the conjugate of a real one's transform: forward and backward are swapped.
_SWAPPED = {None: "forward", "backward": "forward", "ortho": "ortho", "forward": "backward"}


def _swapped(name: str, norm: str | None) -> str:
    if norm not in _SWAPPED:
        raise ArgumentError(
            f"{name}: norm must be None, 'backward', 'ortho' or 'forward', got {norm!r}"
        )
    return _SWAPPED[norm]


def hfft(a: ArrayLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """The real Fourier transform of a signal with Hermitian symmetry, given by its first half.

    The result has size `n` along the dim, by default `2 * (m - 1)` for m elements. `norm` is that
    of `fft`. It is float32, or float64 for 64-bit dtypes.

    >>> snp.fft.hfft(np.array([1.0, 2.0]))
    Array([ 3., -1.], dtype=float32)
    """
    check_arraylike("hfft", a)
    return _one("hfft", FftType.IRFFT, conjugate(a), n, axis, _swapped("hfft", norm))


def ihfft(a: ArrayLike, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """The inverse of `hfft`: the first `n // 2 + 1` elements of a signal with Hermitian symmetry.

    The dim is cropped, or padded with zeros, to size `n` first. `norm` is that of `fft`. The result
    is complex64, or complex128 for 64-bit dtypes.

    >>> snp.fft.ihfft(np.array([5.0, -3.0])).real
    Array([1., 4.], dtype=float32)
    """
    return conjugate(_one("ihfft", FftType.RFFT, a, n, axis, _swapped("ihfft", norm)))


# ---- frequencies -------------------------------------------------------------------------------


def _count(name: str, n: Any) -> int:
    if isinstance(n, (tuple, list)) or not hasattr(n, "__index__"):
        raise ArgumentError(f"{name}: n must be one positive integer, got {n!r}")
    count = operator.index(n)
    if count < 1:
        raise ArgumentError(f"{name}: n must be one positive integer, got {count}")
    return count


def fftfreq(n: int, d: Any = 1.0, *, dtype: Any = None, device: Any = None) -> Array:
    """The frequencies of the elements of `fft`, for `n` samples a distance `d` apart.

    The result is a vector of size `n`: frequency 0, the positive ones, then the negative ones.
    `dtype` is the default float if it is None; `device` is a device or sharding for the result.

    >>> snp.fft.fftfreq(4)
    Array([ 0.  ,  0.25, -0.5 , -0.25], dtype=float32)
    """
    n = _count("fftfreq", n)
    cycles = np.concatenate([np.arange((n + 1) // 2), np.arange(-(n // 2), 0)])
    return _frequencies(cycles, n, d, dtype, device)


def rfftfreq(n: int, d: Any = 1.0, *, dtype: Any = None, device: Any = None) -> Array:
    """The frequencies of the elements of `rfft`, for `n` samples a distance `d` apart.

    The result is a vector of size `n // 2 + 1`. `dtype` is the default float if it is None;
    `device` is a device or sharding for the result.

    >>> snp.fft.rfftfreq(4)
    Array([0.  , 0.25, 0.5 ], dtype=float32)
    """
    n = _count("rfftfreq", n)
    return _frequencies(np.arange(n // 2 + 1), n, d, dtype, device)


def _frequencies(cycles: np.ndarray, n: int, d: Any, dtype: Any, device: Any) -> Any:
    check_arraylike("fftfreq", d)
    dtype = dtypes.canonical(np.float64 if dtype is None else dtype)
    return divide(asarray(cycles / n, dtype, device=device), asarray(d, dtype))


def fftshift(x: ArrayLike, axes: Any = None) -> Array:
    """Move the frequency zero to the middle of dims.

    `axes` is one dim, several, or None for all. Shape and dtype stay.

    >>> snp.fft.fftshift(snp.fft.fftfreq(4))
    Array([-0.5 , -0.25,  0.  ,  0.25], dtype=float32)
    """
    return _shifted("fftshift", x, axes, lambda n: n // 2)


def ifftshift(x: ArrayLike, axes: Any = None) -> Array:
    """The inverse of `fftshift`: move the frequency zero to the front of dims.

    `axes` is one dim, several, or None for all. Shape and dtype stay.

    >>> snp.fft.ifftshift(np.array([-0.5, -0.25, 0.0, 0.25]))
    Array([ 0.  ,  0.25, -0.5 , -0.25], dtype=float32)
    """
    return _shifted("ifftshift", x, axes, lambda n: -(n // 2))


def _shifted(name: str, x: Any, axes: Any, shift: Any) -> Any:
    shape = typeof(operand(name, x)).shape
    if axes is None:
        axes = tuple(range(len(shape)))
    elif not isinstance(axes, (tuple, list)):
        axes = (axes,)
    chosen = tuple(canonical_dim(d, len(shape), "axes") for d in axes)
    return roll(x, tuple(shift(shape[d]) for d in chosen), chosen)
