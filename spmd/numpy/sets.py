"""Sets given as arrays: `union1d`, `intersect1d`, `setdiff1d`, `setxor1d`, `unique_all`.

How many elements a result has depends on data, so under a transformation give `size=`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from spmd import lax
from spmd.core.aval import typeof
from spmd.core.errors import ConcretizationError
from spmd.core.trace import Tracer
from spmd.numpy.creation import asarray
from spmd.numpy.joining import concatenate
from spmd.numpy.manipulation import ravel
from spmd.numpy.promotion import check_arraylike, promote_dtypes
from spmd.numpy.reductions import argmax
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


def intersect1d(
    ar1: Any,
    ar2: Any,
    assume_unique: bool = False,
    return_indices: bool = False,
    *,
    size: int | None = None,
    fill_value: Any = None,
) -> Any:
    """The elements that are in both of two arrays, in order.

    With `return_indices` also where each occurs first in the one and in the other array.
    `assume_unique` promises that no array has an element twice; it changes nothing here.
    """
    first, second = _sets("intersect1d", ar1, ar2)
    found = _kept("intersect1d", first, isin(first, second), size, fill_value)
    if not return_indices:
        return found
    return found, *(_first_places(found, x) for x in (first, second))


def _first_places(values: Any, x: Any) -> Any:
    """Where each value occurs first in a vector."""
    table = (typeof(values).shape[0], typeof(x).shape[0])
    hit = lax.eq(lax.broadcast_in_dim(values, table, (0,)), lax.broadcast_in_dim(x, table, (1,)))
    return argmax(hit, 1)


def setdiff1d(
    ar1: Any,
    ar2: Any,
    assume_unique: bool = False,
    *,
    size: int | None = None,
    fill_value: Any = None,
) -> Any:
    """The elements of the first array that are not in the second, in order.

    With `assume_unique` they are in the order of the first array.
    """
    first, second = _sets("setdiff1d", ar1, ar2)
    mask = isin(first, second, invert=True)
    fill = 0 if fill_value is None else fill_value
    if assume_unique:
        if size is None:
            _concrete("setdiff1d", first, second)
        return compress(mask, first, size=size, fill_value=fill)
    return _kept("setdiff1d", first, mask, size, fill)


def setxor1d(
    ar1: Any,
    ar2: Any,
    assume_unique: bool = False,
    *,
    size: int | None = None,
    fill_value: Any = None,
) -> Any:
    """The elements that are in exactly one of two arrays, in order.

    `assume_unique` promises that no array has an element twice; it changes nothing here.
    """
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


# ---- the different elements, by the array API standard -----------------------------------------


class UniqueAll(NamedTuple):
    """What `unique_all` returns."""

    values: Any
    indices: Any
    inverse_indices: Any
    counts: Any


class UniqueCounts(NamedTuple):
    """What `unique_counts` returns."""

    values: Any
    counts: Any


class UniqueInverse(NamedTuple):
    """What `unique_inverse` returns."""

    values: Any
    inverse_indices: Any


def unique_all(x: Any, /, *, size: int | None = None, fill_value: Any = None) -> UniqueAll:
    """The different elements, where each occurs first, which one each element is, and how often.

    Each NaN counts as different. Under a transformation give `size`, as for `unique`.

    >>> unique_all(np.array([3, 1, 3])).counts
    Array([1, 2], dtype=int32)
    """
    wanted = {"return_index": True, "return_inverse": True, "return_counts": True}
    return UniqueAll(*unique(x, **wanted, equal_nan=False, size=size, fill_value=fill_value))


def unique_counts(x: Any, /, *, size: int | None = None, fill_value: Any = None) -> UniqueCounts:
    """The different elements, and how often each occurs."""
    found = unique(x, return_counts=True, equal_nan=False, size=size, fill_value=fill_value)
    return UniqueCounts(*found)


def unique_inverse(x: Any, /, *, size: int | None = None, fill_value: Any = None) -> UniqueInverse:
    """The different elements, and which one each element of `x` is."""
    found = unique(x, return_inverse=True, equal_nan=False, size=size, fill_value=fill_value)
    return UniqueInverse(*found)
