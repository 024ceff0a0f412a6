"""Convolution of vectors, and the windows that go with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd import lax
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
    padded = lax.pad(a, np.zeros((), typeof(a).dtype), [(before, after, 0)])
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
    """The convolution of two vectors."""
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
    """The cross-correlation of two vectors, the second conjugated."""
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


bartlett = _window("bartlett", "The Bartlett window: a triangle.")
blackman = _window("blackman", "The Blackman window.")
hamming = _window("hamming", "The Hamming window.")
hanning = _window("hanning", "The Hann window.")


def kaiser(M: int, beta: float) -> Array:
    """The Kaiser window with shape parameter `beta`."""
    return as_array(np.asarray(np.kaiser(M, beta), default_float()))
