"""Sets given as arrays: `union1d`, `intersect1d`, `setdiff1d`, `setxor1d`.

How many elements a result has depends on data, so under a transformation give `size=`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import lax
from spmd.core.aval import typeof
from spmd.core.errors import ConcretizationError
from spmd.core.trace import Tracer
from spmd.numpy.creation import asarray
from spmd.numpy.joining import concatenate
from spmd.numpy.manipulation import ravel
from spmd.numpy.promotion import check_arraylike, promote_dtypes
from spmd.numpy.searching import compress
from spmd.numpy.sorting import isin, unique


def _sets(name: str, *sets: Any) -> list[Any]:
    check_arraylike(name, *sets)
    return promote_dtypes(*(ravel(x) for x in sets))


def _concrete(name: str, *sets: Any) -> None:
    if any(isinstance(x, Tracer) for x in sets):
        raise ConcretizationError(
            f"{name}: the number of elements of the result depends on traced data; give size="
        )


def union1d(ar1: Any, ar2: Any, *, size: int | None = None, fill_value: Any = None) -> Any:
    """The elements that are in one of two arrays, in order."""
    return unique(concatenate(_sets("union1d", ar1, ar2)), size=size, fill_value=fill_value)


def intersect1d(ar1: Any, ar2: Any, *, size: int | None = None, fill_value: Any = None) -> Any:
    """The elements that are in both of two arrays, in order."""
    first, second = _sets("intersect1d", ar1, ar2)
    return _kept("intersect1d", first, isin(first, second), size, fill_value)


def setdiff1d(ar1: Any, ar2: Any, *, size: int | None = None, fill_value: Any = None) -> Any:
    """The elements of the first array that are not in the second, in order."""
    first, second = _sets("setdiff1d", ar1, ar2)
    fill = 0 if fill_value is None else fill_value
    return _kept("setdiff1d", first, isin(first, second, invert=True), size, fill)


def setxor1d(ar1: Any, ar2: Any, *, size: int | None = None, fill_value: Any = None) -> Any:
    """The elements that are in exactly one of two arrays, in order."""
    first, second = _sets("setxor1d", ar1, ar2)
    either = concatenate([first, second])
    mask = concatenate([isin(first, second, invert=True), isin(second, first, invert=True)])
    return _kept("setxor1d", either, mask, size, fill_value)


def _kept(name: str, x: Any, mask: Any, size: int | None, fill_value: Any) -> Any:
    """The different elements where the mask holds."""
    if size is None:
        _concrete(name, x, mask)
        return unique(asarray(np.asarray(x)[np.asarray(mask)]))
    # First all that hold, then one of each: both steps keep what is missing out of the result.
    wide = max(size, typeof(x).shape[0])
    held = lax.reduce_sum(lax.convert_element_type(mask, np.dtype(np.int32)), (0,))
    chosen = compress(mask, x, size=wide, fill_value=0)
    # Places beyond those that hold repeat the first, which `unique` then drops.
    beyond = lax.ge(lax.iota(np.dtype(np.int32), wide), held)
    first = lax.broadcast_in_dim(lax.index_in_dim(chosen, 0, 0, keepdims=False), (wide,), ())
    return unique(lax.select(beyond, first, chosen), size=size, fill_value=fill_value)
