"""Sets given as arrays: `union1d`, `intersect1d`, `setdiff1d`, `setxor1d`, `unique_all`.

How many elements a result has depends on data, so under a transformation give `size=`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from spmd import lax
from spmd.base.errors import ConcretizationError
from spmd.core.aval import typeof
from spmd.core.trace import Tracer
from spmd.numpy.creation import asarray, full
from spmd.numpy.joining import concatenate
from spmd.numpy.manipulation import ravel
from spmd.numpy.promotion import check_arraylike, default_int, promote_dtypes, select
from spmd.numpy.searching import compress
from spmd.numpy.sorting import first_of_runs, isin, unique
from spmd.sharding.array import Array, ArrayLike


def _sets(name: str, *sets: Any) -> list[Any]:
    check_arraylike(name, *sets)
    return promote_dtypes(*(ravel(x) for x in sets))


def union1d(
    ar1: ArrayLike, ar2: ArrayLike, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> Array:
    """The elements that are in one of two arrays or in both, in ascending order and once each.

    `ar1` and `ar2` have any shape and are promoted to one dtype; the result is a vector of that
    dtype. Traced arrays need `size`, the number of elements: those missing are `fill_value`, by
    default the smallest, and those beyond are left out. Raises a `ConcretizationError` without it.

    >>> snp.union1d(np.array([3, 1]), np.array([1, 2]))
    Array([1, 2, 3], dtype=int32)
    >>> snp.union1d(np.array([3, 1]), np.array([1, 2]), size=4, fill_value=-1)
    Array([ 1,  2,  3, -1], dtype=int32)
    """
    return unique(concatenate(_sets("union1d", ar1, ar2)), size=size, fill_value=fill_value)


def intersect1d(
    ar1: ArrayLike,
    ar2: ArrayLike,
    assume_unique: bool = False,
    return_indices: bool = False,
    *,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
) -> Any:
    """The elements that are in both of two arrays, in ascending order and once each.

    `ar1` and `ar2` have any shape and are promoted to one dtype; the result is a vector of that
    dtype. NaN equals nothing. `assume_unique` promises that neither array has an element twice.
    With `return_indices` the result is a tuple: the elements, and their first positions in the flat
    `ar1` and in the flat `ar2`, as default integers.

    Traced arrays need `size`, the number of elements: those missing are `fill_value`, by default
    the smallest, and those beyond are left out. Raises a `ConcretizationError` without it.

    >>> snp.intersect1d(np.array([3, 1, 2, 3]), np.array([2, 3]))
    Array([2, 3], dtype=int32)
    """
    first, second = _sets("intersect1d", ar1, ar2)
    values, _, twice, origin = _in_order(first, second, assume_unique)
    found = _kept("intersect1d", values, twice, size, fill_value)
    if not return_indices:
        return found
    after = lax.concatenate([lax.slice_in_dim(origin, 1, None), lax.slice_in_dim(origin, 0, 1)], 0)
    return found, *(
        _kept("intersect1d", places, twice, size, typeof(x).shape[0])
        for places, x in ((origin, first), (after, second))
    )


def _in_order(first: Any, second: Any, assume_unique: bool) -> tuple[Any, Any, Any, Any]:
    """The elements of two sets side by side in order, those that count before all others.

    With them: whether each counts, whether it equals the one after it, and where it was in its
    set. An element counts once in each set (any number of times, if they are said to be unique).
    NaN equals nothing.
    """
    parts = []
    for x in (first, second):
        n = typeof(x).shape[0]
        if assume_unique:
            parts.append((x, lax.full((n,), True, np.dtype(np.bool_)), lax.iota(default_int(), n)))
        else:
            rows, counts, order = first_of_runs(lax.reshape(x, (n, 1)), equal_nan=True)
            parts.append((lax.reshape(rows, (n,)), counts, order))
    values, counts, origin = (
        lax.concatenate(list(column), 0) for column in zip(*parts, strict=True)
    )
    rest, values, origin = lax.sort((lax.bitwise_not(counts), values, origin), 0, num_keys=2)
    counts = lax.bitwise_not(rest)
    n = typeof(values).shape[0]
    if n == 0:
        return values, counts, counts, origin
    after = slice(1, n)
    equal = lax.eq(values[after], values[: n - 1])
    last = lax.full((1,), False, np.dtype(np.bool_))
    twice = lax.concatenate([lax.bitwise_and(equal, counts[after]), last], 0)
    return values, counts, twice, origin


def setdiff1d(
    ar1: ArrayLike,
    ar2: ArrayLike,
    assume_unique: bool = False,
    *,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
) -> Array:
    """The elements of the first array that are not in the second, in ascending order and once each.

    `ar1` and `ar2` have any shape; the result is a vector with the dtype of `ar1`. NaN equals
    nothing. `assume_unique` promises that `ar1` has no element twice; the elements then stay in its
    order.

    Traced arrays need `size`, the number of elements: those missing are `fill_value`, 0 by default,
    and those beyond are left out. Raises a `ConcretizationError` without it.

    >>> snp.setdiff1d(np.array([5, 3, 1, 3]), np.array([5, 2]))
    Array([1, 3], dtype=int32)
    """
    check_arraylike("setdiff1d", ar1, ar2)
    first = ravel(ar1)
    fill = 0 if fill_value is None else fill_value
    if not assume_unique:
        n = typeof(first).shape[0]
        rows, counts, _ = first_of_runs(lax.reshape(first, (n, 1)), equal_nan=True)
        first = lax.reshape(rows, (n,))
        mask = lax.bitwise_and(counts, isin(first, ar2, invert=True))
    else:
        mask = isin(first, ar2, invert=True)
    return _kept("setdiff1d", first, mask, size, fill)


def setxor1d(
    ar1: ArrayLike,
    ar2: ArrayLike,
    assume_unique: bool = False,
    *,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
) -> Array:
    """The elements that are in exactly one of two arrays, in ascending order and once each.

    `ar1` and `ar2` have any shape and are promoted to one dtype; the result is a vector of that
    dtype. NaN equals nothing. `assume_unique` promises that neither array has an element twice.

    Traced arrays need `size`, the number of elements: those missing are `fill_value`, by default
    the smallest, and those beyond are left out. Raises a `ConcretizationError` without it.

    >>> snp.setxor1d(np.array([3, 1]), np.array([1, 2]))
    Array([2, 3], dtype=int32)
    """
    first, second = _sets("setxor1d", ar1, ar2)
    values, counts, twice, _ = _in_order(first, second, assume_unique)
    n = typeof(values).shape[0]
    before = lax.concatenate([lax.full((min(n, 1),), False, np.dtype(np.bool_)), twice[:-1]], 0)
    once = lax.bitwise_not(lax.bitwise_or(before, twice))
    return _kept("setxor1d", values, lax.bitwise_and(counts, once), size, fill_value)


def _kept(name: str, x: Any, mask: Any, size: int | None, fill_value: Any) -> Any:
    """The elements where the mask holds; missing ones are `fill_value`, or the smallest of them."""
    if size is None:
        if any(isinstance(v, Tracer) for v in (x, mask)):
            raise ConcretizationError(
                f"{name}: the number of elements of the result depends on traced data; give size="
            )
        return asarray(np.asarray(x)[np.asarray(mask)])
    fill = 0 if fill_value is None else fill_value
    if typeof(x).shape[0] == 0:
        return full((size,), fill, typeof(x).dtype)
    found = compress(mask, x, size=size, fill_value=fill)
    if fill_value is not None or size == 0:
        return found
    # The elements are in order: the smallest is the first, if there is one, and NaN the last.
    count = lax.reduce_sum(lax.convert_element_type(mask, np.dtype(np.int32)), (0,))
    largest = lax.clamp(np.int32(0), lax.sub(count, np.int32(1)), np.int32(size - 1))
    last = lax.dynamic_index_in_dim(found, largest, 0, keepdims=False)
    smallest = select(lax.eq(last, last), lax.index_in_dim(found, 0, 0, keepdims=False), last)
    missing = lax.ge(lax.iota(np.dtype(np.int32), size), count)
    return select(missing, lax.broadcast_in_dim(smallest, (size,), ()), found)


# ---- the different elements, by the array API standard -----------------------------------------


class UniqueAll(NamedTuple):
    """The result of `unique_all`."""

    values: Any
    indices: Any
    inverse_indices: Any
    counts: Any


class UniqueCounts(NamedTuple):
    """The result of `unique_counts`."""

    values: Any
    counts: Any


class UniqueInverse(NamedTuple):
    """The result of `unique_inverse`."""

    values: Any
    inverse_indices: Any


def unique_all(
    x: ArrayLike, /, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> UniqueAll:
    """The different elements in ascending order, with their positions and counts.

    The result is a named tuple. `values` are the elements, as a vector with the dtype of `x`.
    `indices` are their first positions in the flat `x`, and `counts` the numbers of their
    occurrences. `inverse_indices`, in the shape of `x`, is the position of each of its elements in
    `values`. These three are default integers. Each NaN is different. `size` and `fill_value` are
    those of `unique`. Raises a `ConcretizationError` for a traced `x` without `size`.

    >>> unique_all(np.array([3, 1, 3])).counts
    Array([1, 2], dtype=int32)
    """
    wanted = {"return_index": True, "return_inverse": True, "return_counts": True}
    return UniqueAll(*unique(x, **wanted, equal_nan=False, size=size, fill_value=fill_value))


def unique_counts(
    x: ArrayLike, /, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> UniqueCounts:
    """The different elements in ascending order, and their counts.

    The result is a named tuple: `values`, a vector with the dtype of `x`, and `counts`, a vector of
    default integers. Each NaN is different. `size` and `fill_value` are those of `unique`. Raises a
    `ConcretizationError` for a traced `x` without `size`.

    >>> unique_counts(np.array([3, 1, 3]))
    UniqueCounts(values=Array([1, 3], dtype=int32), counts=Array([1, 2], dtype=int32))
    """
    found = unique(x, return_counts=True, equal_nan=False, size=size, fill_value=fill_value)
    return UniqueCounts(*found)


def unique_inverse(
    x: ArrayLike, /, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> UniqueInverse:
    """The different elements in ascending order, and the position of each element of `x` in them.

    The result is a named tuple: `values`, a vector with the dtype of `x`, and `inverse_indices`,
    default integers in the shape of `x`; `values[inverse_indices]` gives `x`. Each NaN is
    different. `size` and `fill_value` are those of `unique`. Raises a `ConcretizationError` for a
    traced `x` without `size`.

    >>> unique_inverse(np.array([3, 1, 3])).inverse_indices
    Array([1, 0, 1], dtype=int32)
    """
    found = unique(x, return_inverse=True, equal_nan=False, size=size, fill_value=fill_value)
    return UniqueInverse(*found)
