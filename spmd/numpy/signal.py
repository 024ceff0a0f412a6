"""Convolution of vectors, and the windows that go with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    default_float,
    plain,
    promote_dtypes_inexact,
)
from spmd.numpy.taking import take
from spmd.numpy.ufuncs import conjugate, named
from spmd.sharding.array import Array, ArrayLike


def _windows(name: str, a: Any, v: Any, mode: str, precision: Any, wide: Any) -> Any:
    """Scalar products of `v` with all windows of `a`, padded as `mode` says."""
    n, m = typeof(a).shape[0], typeof(v).shape[0]
    paddings = {"valid": (0, 0), "same": (m // 2, m - m // 2 - 1), "full": (m - 1, m - 1)}
    if mode not in paddings:
        raise ArgumentError(f"{name}: mode must be 'full', 'same' or 'valid', got {mode!r}")
    before, after = paddings[mode]
    dtype, kept = typeof(a).dtype, dtypes.is_complex(typeof(a).dtype)
    if not kept and wide is None:
        # One feature of one image: a convolution, whose windows are read where they lie.
        given = lax.reshape(a, (1, 1, n)), lax.reshape(v, (1, 1, m))
        made = lax.conv_general_dilated(*given, (1,), [paddings[mode]], precision=precision)
        return lax.reshape(made, (n + before + after - m + 1,))
    padded = lax.pad(a, np.zeros((), dtype), [(before, after, 0)])
    count = n + before + after - m + 1
    starts = np.arange(count, dtype=np.int32)[:, None] + np.arange(m, dtype=np.int32)
    rows = take(padded, starts, 0, mode="clip")
    return lax.dot_general(rows, v, (((1,), (0,)), ((), ())), precision, wide)


def _vectors(name: str, a: Any, v: Any) -> list[Any]:
    check_arraylike(name, a, v)
    a, v = promote_dtypes_inexact(plain(a), plain(v))
    shapes = [typeof(x).shape for x in (a, v)]
    if any(len(s) != 1 or not s[0] for s in shapes):
        raise ShapeError(f"{name}: two vectors with elements are needed, got {shapes}")
    return [a, v]


def convolve(
    a: ArrayLike,
    v: ArrayLike,
    mode: str = "full",
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """The convolution of two vectors, `out[k] = sum of a[j] v[k - j]`.

    For vectors `a` and `v` of n and m elements, n >= m, the result has n + m - 1 elements. `mode`
    may also be "same" (n of them, in the middle) or "valid" (n - m + 1, those whose sum has m
    products) instead of "full". The operands are promoted to one floating or complex dtype.
    `precision` and `preferred_element_type`, the dtype of the result if it is given, are those of
    `lax.dot_general`. Raises a `ShapeError` if the operands are empty or no vectors, and an
    `ArgumentError` for another `mode`.

    >>> snp.convolve(np.array([1, 2, 3]), np.array([1, 1]))
    Array([1., 3., 5., 3.], dtype=float32)
    >>> snp.convolve(np.array([1, 2, 3]), np.array([1, 1]), mode="valid")
    Array([3., 5.], dtype=float32)
    """
    a, v = _vectors("convolve", a, v)
    if typeof(a).shape[0] < typeof(v).shape[0]:
        a, v = v, a
    return _windows("convolve", a, lax.rev(v, (0,)), mode, precision, preferred_element_type)


def correlate(
    a: ArrayLike,
    v: ArrayLike,
    mode: str = "valid",
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """The cross-correlation of two vectors, `out[k] = sum of a[j + k] conj(v[j])`.

    `mode` says for which k: "full" (all for which the vectors overlap), "same" (the middle part, of
    the size of the longer one), or "valid" (those for which the shorter one lies inside the longer
    one, the default). The operands are promoted to one floating or complex dtype. `precision` and
    `preferred_element_type`, the dtype of the result if it is given, are those of
    `lax.dot_general`. Raises a `ShapeError` if the operands are empty or no vectors, and an
    `ArgumentError` for another `mode`.

    >>> snp.correlate(np.array([1, 2, 3]), np.array([0, 1]))
    Array([2., 3.], dtype=float32)
    """
    a, v = _vectors("correlate", a, v)
    v = conjugate(v)
    if typeof(a).shape[0] >= typeof(v).shape[0]:
        return _windows("correlate", a, v, mode, precision, preferred_element_type)
    return lax.rev(_windows("correlate", v, a, mode, precision, preferred_element_type), (0,))


def _window(name: str, doc: str) -> Callable[[int], Any]:
    """NumPy's window of M points: its size is known, so it is a constant."""

    def f(M: int) -> Any:
        return as_array(np.asarray(getattr(np, name)(M), default_float()))

    return named(f, name, doc)


bartlett = _window(
    "bartlett",
    """The Bartlett window: a triangle that is zero at both ends.

    `M` is the number of points, which must not be traced: the result is a vector of that size, of
    the default float.

    >>> snp.bartlett(5)
    Array([0. , 0.5, 1. , 0.5, 0. ], dtype=float32)
    """,
)
blackman = _window(
    "blackman",
    """The Blackman window: a sum of cosines that is almost zero at both ends.

    `M` is the number of points, which must not be traced: the result is a vector of that size, of
    the default float.

    >>> snp.blackman(5)[1:4]
    Array([0.34, 1.  , 0.34], dtype=float32)
    """,
)
hamming = _window(
    "hamming",
    """The Hamming window: a raised cosine that is 0.08 at both ends.

    `M` is the number of points, which must not be traced: the result is a vector of that size, of
    the default float.

    >>> snp.hamming(5)
    Array([0.08, 0.54, 1.  , 0.54, 0.08], dtype=float32)
    """,
)
hanning = _window(
    "hanning",
    """The Hann window: a raised cosine that is zero at both ends.

    `M` is the number of points, which must not be traced: the result is a vector of that size, of
    the default float.

    >>> snp.hanning(5)
    Array([0. , 0.5, 1. , 0.5, 0. ], dtype=float32)
    """,
)


def kaiser(M: int, beta: float) -> Array:
    """The Kaiser window with shape parameter `beta`, which is a number.

    `M` is the number of points: the result is a vector of that size, of the default float. A larger
    `beta` makes the window narrower. Neither may be traced.

    >>> snp.kaiser(5, 0.0)
    Array([1., 1., 1., 1., 1.], dtype=float32)
    """
    return as_array(np.asarray(np.kaiser(M, beta), default_float()))
