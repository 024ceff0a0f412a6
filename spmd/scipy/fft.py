"""`spmd.scipy.fft`: discrete cosine transforms of the second type, and their inverses.

A DCT of n numbers is an FFT of the same numbers in another order: first those at even places, then
those at odd places backwards, with each output turned by a fraction of a circle.
Source: Makhoul, "A fast cosine transform in one and two dimensions", IEEE Trans. ASSP 28 (1980).
"""

from __future__ import annotations

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

__all__ = ["dct", "dctn", "idct", "idctn"]


def dct(
    x: Any, type: int = 2, n: int | None = None, axis: int = -1, norm: str | None = None
) -> Array:
    """Compute the discrete cosine transform of type 2 along `axis`.

    It is `2 sum_m x[m] cos(pi k (2m + 1) / 2n)`. The dim is cut or filled with zeros to the size
    `n`; the other dims of the shape stay. `norm="ortho"` makes it orthogonal; "backward" (None) and
    "forward" are as in `numpy.fft`. Integers and narrower floats become float32, float64 and
    complex dtypes stay; real and imaginary parts are transformed apart. Raises `ArgumentError` for
    another `type` or `norm`, and `ShapeError` if `n` is not positive.

    >>> spmd.scipy.fft.dct(np.array([1.0, 1.0, 1.0]))
    Array([6., 0., 0.], dtype=float32)
    """
    return _along("dct", _cosines, x, type, n, axis, norm)


def idct(
    x: Any, type: int = 2, n: int | None = None, axis: int = -1, norm: str | None = None
) -> Array:
    """Compute the inverse of `dct` along `axis`.

    `type`, `n`, `norm`, the shape, the dtype rule and the errors are those of `dct`:
    `ArgumentError` and `ShapeError`.

    >>> spmd.scipy.fft.idct(np.array([6.0, 0.0, 0.0]))
    Array([1., 1., 1.], dtype=float32)
    """
    return _along("idct", _from_cosines, x, type, n, axis, norm)


def dctn(
    x: Any,
    type: int = 2,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
) -> Array:
    """Compute `dct` along several dims.

    `axes` names them: all by default, or the last ones for which `s` has sizes. `type`, `norm`, the
    dtype rule and the errors are those of `dct`: `ArgumentError`, and `ShapeError` if `s` has not
    one size for each dim.

    >>> spmd.scipy.fft.dctn(np.ones((2, 2)))
    Array([[16.,  0.],
           [ 0.,  0.]], dtype=float32)
    """
    return _over_dims(dct, "dctn", x, type, s, axes, norm)


def idctn(
    x: Any,
    type: int = 2,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
) -> Array:
    """Compute the inverse of `dctn`.

    `type`, `s`, `axes`, `norm`, the shape, the dtype rule and the errors are those of `dctn`:
    `ArgumentError` and `ShapeError`.

    >>> spmd.scipy.fft.idctn(np.array([[16.0, 0.0], [0.0, 0.0]]))
    Array([[1., 1.],
           [1., 1.]], dtype=float32)
    """
    return _over_dims(idct, "idctn", x, type, s, axes, norm)


def _over_dims(
    one: Callable[..., Any], name: str, x: Any, type: int, s: Any, axes: Any, norm: Any
) -> Any:
    x = as_array(x)
    ndim = typeof(x).ndim
    axes, s = ((v,) if isinstance(v, int) else v for v in (axes, s))
    if axes is None:
        axes = range(0 if s is None else ndim - len(s), ndim)
    axes = list(axes)
    sizes = [None] * len(axes) if s is None else list(s)
    if len(sizes) != len(axes):
        raise ShapeError(f"{name}: s={tuple(sizes)} needs one size for each of axes={tuple(axes)}")
    for axis, n in zip(axes, sizes, strict=True):
        x = one(x, type, n, axis, norm)
    return x


@promotes_inside(0)
def _along(
    name: str, f: Callable[..., Any], x: Any, type: int, n: Any, axis: int, norm: Any
) -> Any:
    if type != 2:
        raise RefusedError(f"{name}: type={type}: only type 2 is implemented, as in JAX")
    if norm not in (None, "backward", "forward", "ortho"):
        raise ArgumentError(
            f"{name}: norm={norm!r} must be 'backward' (None), 'ortho' or 'forward'"
        )
    (x,) = promote_dtypes_inexact(as_array(x))
    if dtypes.is_complex(typeof(x).dtype):
        parts = (_along(name, f, g(x), type, n, axis, norm) for g in (lax.real, lax.imag))
        return lax.complex(*parts)
    if typeof(x).dtype.itemsize < 4:  # as for Fourier transforms
        x = x.astype(np.float32)
    at = canonical_dim(axis, typeof(x).ndim, f"{name}: axis")
    x = snp.moveaxis(x, at, -1)
    size = typeof(x).shape[-1]
    if n is not None and n != size:
        if n < 1:
            raise ShapeError(f"{name}: n={n} must be at least 1")
        x = (
            x[..., :n]
            if n < size
            else snp.pad(x, [(0, 0)] * (typeof(x).ndim - 1) + [(0, n - size)])
        )
    return snp.moveaxis(f(x, norm), -1, at)


def _weights(n: int, norm: str | None, dtype: Any) -> np.ndarray:
    """The factors of the outputs of the plain transform."""
    if norm == "ortho":
        weights = np.full(n, np.sqrt(1 / (2 * n)))
        weights[0] = np.sqrt(1 / (4 * n))
    else:
        weights = np.full(n, 1 / (2 * n) if norm == "forward" else 1.0)
    return weights.astype(dtype)


def _order(n: int) -> np.ndarray:
    """The even places, then the odd ones backwards."""
    return np.concatenate([np.arange(0, n, 2), np.arange(1, n, 2)[::-1]])


def _turn(n: int, sign: int, dtype: Any) -> np.ndarray:
    return np.exp(sign * 0.5j * np.pi * np.arange(n) / n).astype(dtypes.complex_of(dtype))


def _cosines(x: Any, norm: str | None) -> Any:
    n, dtype = typeof(x).shape[-1], typeof(x).dtype
    turned = snp.fft.fft(snp.take(x, _order(n), -1), axis=-1) * _turn(n, -1, dtype)
    return 2 * lax.real(turned) * _weights(n, norm, dtype)


def _from_cosines(x: Any, norm: str | None) -> Any:
    n, dtype = typeof(x).shape[-1], typeof(x).dtype
    x = x / _weights(n, norm, dtype)
    # Output n - k of the plain transform is the sine part of output k.
    backwards = snp.concatenate([snp.zeros_like(x[..., :1]), x[..., :0:-1]], -1)
    spectrum = lax.complex(x, -backwards) * _turn(n, 1, dtype) / 2
    found = lax.real(snp.fft.ifft(spectrum, axis=-1))
    return snp.take(found, np.argsort(_order(n)), -1)
