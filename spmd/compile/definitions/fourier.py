"""Fourier transforms as products with small matrices, and as convolutions where sizes are prime.

A size that has a factor up to `LARGEST` is split (Cooley and Tukey): products with the matrix of
the factor, a twiddle for each element, and a transform of the rest. A larger prime is a convolution
with a chirp (Bluestein), whose size is a power of two. Twiddles are constants, made in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.compile.definitions.table import defines
from spmd.core.aval import typeof
from spmd.core.structural import broadcast_in_dim, move_dim, permute_dims, reshape
from spmd.lax.arithmetic import conj, mul, real
from spmd.lax.array import rev
from spmd.lax.concatenate import concatenate
from spmd.lax.convert import convert_element_type
from spmd.lax.dot import dot_general
from spmd.lax.fft import FftType
from spmd.lax.precision import Precision
from spmd.lax.slicing import pad, slice_in_dim

# The largest size that is one product.
LARGEST = 32


@defines("fft")
def fft(x: Any, *, fft_type: FftType, fft_lengths: tuple[int, ...]) -> Any:
    """A transform along each of the last dims."""
    aval, count = typeof(x), len(fft_lengths)
    if fft_type is FftType.RFFT:
        x = convert_element_type(x, dtypes.complex_of(aval.dtype))
    sign = -1 if fft_type in (FftType.FFT, FftType.RFFT) else 1
    axes = range(aval.ndim - count, aval.ndim)
    last = axes[-1]
    if fft_type is FftType.IRFFT:
        for axis in axes[:-1]:
            x = _along(x, axis, sign)
        return real(_along(_mirrored(x, fft_lengths[-1]), last, sign))
    for axis in axes:
        x = _along(x, axis, sign)
    if fft_type is FftType.RFFT:
        x = slice_in_dim(x, 0, fft_lengths[-1] // 2 + 1, axis=last)
    return x


def _mirrored(x: Any, size: int) -> Any:
    """All frequencies of a real array along the last dim, of which x has the first half."""
    axis = typeof(x).ndim - 1
    others = slice_in_dim(x, 1, (size + 1) // 2, axis=axis)
    return concatenate([x, conj(rev(others, (axis,)))], axis)


def _along(x: Any, axis: int, sign: int) -> Any:
    """The transform along a dim; the backward one divides by its size."""
    moved = move_dim(x, axis, typeof(x).ndim - 1)
    shape = typeof(moved).shape
    found = _transform(reshape(moved, (-(-typeof(x).size // shape[-1]), shape[-1])), sign)
    if sign > 0:
        found = mul(found, np.asarray(1 / shape[-1], typeof(found).dtype))
    return move_dim(reshape(found, shape), len(shape) - 1, axis)


def _transform(x: Any, sign: int) -> Any:
    """The transform of the rows of a matrix."""
    rows, size = typeof(x).shape
    dtype = typeof(x).dtype
    if size <= LARGEST:
        return _product(x, 1, size, sign)
    factor = next((f for f in range(LARGEST, 1, -1) if size % f == 0), None)
    if factor is None:
        return _as_convolution(x, sign)
    # Element `rest * j + i` goes to frequency `k + factor * l`: a sum over j, then one over i.
    rest = size // factor
    made = _product(reshape(x, (rows, factor, rest)), 1, factor, sign)  # (rows, i, k)
    turns = np.arange(rest)[:, None] * np.arange(factor)
    made = mul(made, _constant(_roots(turns, size, sign), dtype, typeof(made).shape))
    made = reshape(permute_dims(made, (0, 2, 1)), (rows * factor, rest))
    made = reshape(_transform(made, sign), (rows, factor, rest))
    return reshape(permute_dims(made, (0, 2, 1)), (rows, size))


def _product(x: Any, dim: int, size: int, sign: int) -> Any:
    """The transform of a dim by its matrix; its frequencies are the last dim of the result."""
    matrix = _roots(np.arange(size)[:, None] * np.arange(size), size, sign)
    dims = (((dim,), (0,)), ((), ()))
    return dot_general(x, matrix.astype(typeof(x).dtype), dims, precision=Precision.HIGHEST)


def _roots(turns: np.ndarray, size: int, sign: int) -> np.ndarray:
    """The roots of unity to these powers; 1, i, -1 and -i are exact."""
    turns = turns % size
    quarters = (8 * turns + size) // (2 * size)
    angles = sign * np.pi * (4 * turns - quarters * size) / (2 * size)
    return np.array([1, sign * 1j, -1, -sign * 1j])[quarters % 4] * np.exp(1j * angles)


def _constant(values: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
    """Values of the last dims of a shape, in that shape."""
    dims = tuple(range(len(shape) - values.ndim, len(shape)))
    return broadcast_in_dim(values.astype(dtype), shape, dims)


def _as_convolution(x: Any, sign: int) -> Any:
    """With `2jk = j*j + k*k - (k-j)**2`, a transform is a convolution with a chirp."""
    rows, size = typeof(x).shape
    dtype = typeof(x).dtype
    wide = 1 << (2 * size - 2).bit_length()
    chirp = _roots(np.arange(size) ** 2, 2 * size, sign)
    kernel = np.zeros(wide, np.complex128)
    kernel[:size] = np.conj(chirp)
    kernel[wide - size + 1 :] = np.conj(chirp[:0:-1])
    zero = np.zeros((), dtype)
    spread = pad(
        mul(x, _constant(chirp, dtype, (rows, size))), zero, [(0, 0, 0), (0, wide - size, 0)]
    )
    weights = _constant(np.fft.fft(kernel) / wide, dtype, (rows, wide))
    found = _transform(mul(_transform(spread, -1), weights), 1)
    return mul(slice_in_dim(found, 0, size, axis=1), _constant(chirp, dtype, (rows, size)))
