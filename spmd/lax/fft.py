"""Discrete Fourier transforms: `fft` over the last dims, of complex or of real arrays.

The one idea: all four kinds are linear, so their jvp is themselves and only the transpose needs
thought. The matrix of a complex transform is symmetric; one of a real array is the complex one cut
at both ends. The values are the library's.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeArgumentError, ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.primitive import Dims, Primitive, dims, linear
from spmd.core.structural import move_dim
from spmd.core.trace import unchanged
from spmd.lax.arithmetic import conj, mul, real
from spmd.lax.convert import convert_element_type
from spmd.lax.families import fail
from spmd.lax.slicing import pad

if TYPE_CHECKING:
    from spmd.sharding.array import Array


class FftType(enum.Enum):
    """The kinds of transforms: complex forward and backward, and the two of real arrays."""

    FFT = "fft"
    IFFT = "ifft"
    RFFT = "rfft"
    IRFFT = "irfft"


_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def _kind(fft_type: FftType | str) -> FftType:
    if isinstance(fft_type, FftType):
        return fft_type
    try:
        return FftType[str(fft_type).upper()]
    except KeyError:
        raise ArgumentError(
            f"fft: fft_type must be one of {[k.name for k in FftType]}, got {fft_type!r}"
        ) from None


def fft(x: Any, fft_type: FftType | str, fft_lengths: Sequence[int]) -> Array:
    """Compute the discrete Fourier transform over the last `len(fft_lengths)` dims.

    `fft_type` is an `FftType` or its name: "FFT", "IFFT", "RFFT" or "IRFFT". `fft_lengths` are the
    sizes of the transformed dims of the array in space: those of the operand, or, for IRFFT, of the
    result (of which the operand holds `n // 2 + 1` along the last dim). The backward transforms
    divide by the number of elements. FFT and IFFT convert reals to complex. Raises `ShapeError` if
    the lengths do not fit, `DtypeError` for integers, and `ArgumentError` for another type.

    >>> lax.fft(np.array([1.0, 0.0, 0.0], np.float32), "RFFT", (3,))
    Array([1.+0.j, 1.+0.j], dtype=complex64)
    """
    kind = _kind(fft_type)
    lengths = tuple(n.__index__() for n in fft_lengths)
    if not lengths:
        return unchanged(x)
    dtype = typeof(x).dtype
    if kind in (FftType.FFT, FftType.IFFT, FftType.IRFFT) and dtype in _FLOATS:
        x = convert_element_type(x, dtypes.complex_of(dtype))
    return fft_p.bind(x, fft_type=kind, fft_lengths=lengths)


def _abstract(x: ShapedArray, *, fft_type: FftType, fft_lengths: tuple[int, ...]) -> ShapedArray:
    name, count = fft_type.name, len(fft_lengths)
    _check_dtype(x, fft_type)
    if count > x.ndim:
        fail(
            ShapeError,
            f"fft: {count} fft_lengths {fft_lengths} need as many dims, but the operand is {x}",
        )
    space = x.shape[-count:]
    last = fft_lengths[-1]
    needed = (*fft_lengths[:-1], last // 2 + 1) if fft_type is FftType.IRFFT else fft_lengths
    if space != needed:
        fail(
            ShapeError,
            f"fft: {name} with fft_lengths={fft_lengths} needs an operand whose last dims are "
            f"{needed}, got {x}; pad or slice it, as spmd.numpy.fft does",
        )
    if math.prod(fft_lengths) == 0:
        fail(ShapeError, f"fft: a transform needs at least one point, got {fft_lengths=}")
    if fft_type is FftType.RFFT:
        shape = (*x.shape[:-1], last // 2 + 1)
        return ShapedArray(shape, dtypes.complex_of(x.dtype))
    if fft_type is FftType.IRFFT:
        return ShapedArray((*x.shape[:-1], last), dtypes.real_of(x.dtype))
    return ShapedArray(x.shape, x.dtype)


def _check_dtype(x: ShapedArray, fft_type: FftType) -> None:
    accepted = _FLOATS if fft_type is FftType.RFFT else dtypes.COMPLEX
    if x.dtype not in accepted:
        names = " or ".join(np.dtype(d).name for d in accepted)
        fail(
            DtypeArgumentError,
            f"fft: {fft_type.name} takes {names}, got {x}; convert it with .astype, or use "
            "spmd.numpy.fft, which promotes",
        )


def _impl(xp: Any, x: Any, *, fft_type: FftType, fft_lengths: tuple[int, ...]) -> Any:
    function = getattr(xp.fft, fft_type.value + "n")
    axes = tuple(range(x.ndim - len(fft_lengths), x.ndim))
    aval = _abstract(typeof(x), fft_type=fft_type, fft_lengths=fft_lengths)
    if 0 in x.shape:
        return xp.zeros(aval.shape, aval.dtype)
    return xp.ascontiguousarray(function(x, fft_lengths, axes)).astype(aval.dtype, copy=False)


def _transpose(ct: Any, x: Any, *, fft_type: FftType, fft_lengths: tuple[int, ...]) -> list[Any]:
    if fft_type is FftType.RFFT:
        return [_rfft_transpose(ct, fft_lengths)]
    if fft_type is FftType.IRFFT:
        return [_irfft_transpose(ct, fft_lengths)]
    return [fft(ct, fft_type, fft_lengths)]


def _rfft_transpose(ct: Any, fft_lengths: tuple[int, ...]) -> Any:
    """rfft is "to complex, fft, cut", so its transpose is "pad, fft, real part"."""
    aval = typeof(ct)
    missing = fft_lengths[-1] - aval.shape[-1]
    config = [(0, 0, 0)] * (aval.ndim - 1) + [(0, missing, 0)]
    return real(fft(pad(ct, np.zeros((), aval.dtype), config), FftType.FFT, fft_lengths))


def _irfft_transpose(ct: Any, fft_lengths: tuple[int, ...]) -> Any:
    """Each frequency but the first (and the middle one) counts for itself and its mirror image.

    The transpose of the backward transform runs backward too: the conjugate of rfft.
    """
    out = fft(ct, FftType.RFFT, fft_lengths)
    aval = typeof(out)
    count = aval.shape[-1]
    weights = np.full(count, 2.0)
    weights[0] = 1.0
    if fft_lengths[-1] % 2 == 0:
        weights[-1] = 1.0
    weights = np.broadcast_to(weights / math.prod(fft_lengths), aval.shape)
    return mul(conj(out), np.asarray(weights, aval.dtype))


def _batch(axis: Any, operands: Any, at: Any, **params: Any) -> Any:
    return fft_p.bind(move_dim(operands[0], at[0], 0), **params), 0


def _dims(x: ShapedArray, *, fft_type: FftType, fft_lengths: tuple[int, ...]) -> Dims:
    kept = x.ndim - len(fft_lengths)
    operand, result = list(range(x.ndim)), list(range(x.ndim))
    if fft_type in (FftType.RFFT, FftType.IRFFT):
        operand[-1], result[-1] = -1, -2
    return dims([operand], [result], whole=[d for d in operand[kept:] if d >= 0])


fft_p = Primitive(
    "fft",
    abstract=_abstract,
    impl=_impl,
    jvp=linear,
    transpose=_transpose,
    batch=_batch,
    dims=_dims,
)
