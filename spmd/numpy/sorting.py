"""Order: `sort`, `argsort`, `lexsort`, `searchsorted`, `unique`, `partition`, `bincount`."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import (
    ArgumentError,
    ConcretizationError,
    DtypeError,
    RefusedError,
    ShapeError,
)
from spmd.core.aval import typeof
from spmd.core.explicit import lays_out_result
from spmd.core.trace import Tracer
from spmd.numpy.creation import asarray
from spmd.numpy.logic import as_bool
from spmd.numpy.manipulation import flip, moveaxis, ravel, reshape
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    constant_like,
    convert,
    default_int,
    operand,
    plain,
    promote_dtypes,
    promote_dtypes_inexact,
    select,
    whole_number,
)
from spmd.numpy.ranges import linspace
from spmd.numpy.reductions import any as _any
from spmd.numpy.reductions import canonical_axes, canonical_axis, cumsum
from spmd.numpy.reductions import max as _max
from spmd.numpy.reductions import min as _min
from spmd.numpy.reductions import sum as _sum
from spmd.numpy.searching import concrete_size, nonzero
from spmd.numpy.taking import take
from spmd.sharding.array import Array, ArrayLike

# ---- sort --------------------------------------------------------------------------------------


def _check_kind(name: str, kind: Any, order: Any) -> None:
    if kind is not None or order is not None:
        raise ArgumentError(
            f"{name}: kind and order are not supported; stable= and descending= are"
        )


def sort(
    a: ArrayLike,
    axis: int | None = -1,
    *,
    kind: None = None,
    order: None = None,
    stable: bool = True,
    descending: bool = False,
) -> Array:
    """Sort the elements along a dim; NaN comes last.

    `axis=None` sorts the flat array. Shape and dtype are those of `a`; complex numbers are ordered
    by real part, then by imaginary part. `stable` keeps the order of equal elements; `descending`
    reverses it all. Raises an `ArgumentError` for `kind` and `order`, which are NumPy's and not
    supported.

    >>> snp.sort(np.array([3, 1, 2]))
    Array([1, 2, 3], dtype=int32)
    """
    _check_kind("sort", kind, order)
    check_arraylike("sort", a)
    a, d = _along("sort", a, axis)
    result = lax.sort(a, d, stable)
    return flip(result, d) if descending else as_array(result)


def argsort(
    a: ArrayLike,
    axis: int | None = -1,
    *,
    kind: None = None,
    order: None = None,
    stable: bool = True,
    descending: bool = False,
    dtype: Any = None,
) -> Array:
    """The positions that sort the elements along a dim, for `take_along_axis`.

    `axis=None` sorts the flat array. The result has the shape of `a` and the integer type `dtype`,
    the default one if it is None. `stable` keeps the order of equal elements, with `descending`
    too. Raises an `ArgumentError` for `kind` and `order`, which are not supported, and a
    `DtypeError` if `dtype` is no integer.

    >>> snp.argsort(np.array([30, 10, 20]))
    Array([1, 2, 0], dtype=int32)
    """
    _check_kind("argsort", kind, order)
    check_arraylike("argsort", a)
    a, d = _along("argsort", a, axis)
    n = typeof(a).shape[d]
    # Descending and stable: the array is turned round, sorted, and the result turned back.
    keys = lax.rev(a, (d,)) if descending else a
    integer = default_int() if dtype is None else dtypes.canonical(dtype)
    if not dtypes.is_integer(integer):
        raise DtypeError(f"argsort: dtype={integer.name} must be an integer type")
    places = lax.broadcasted_iota(integer, typeof(a).shape, d)
    positions = lax.sort_key_val(keys, places, d, stable)[1]
    if not descending:
        return positions
    return lax.sub(np.array(n - 1, integer), lax.rev(positions, (d,)))


def _along(name: str, a: Any, axis: int | None) -> tuple[Any, int]:
    a = plain(a)
    if axis is None:
        return ravel(a), 0
    return a, canonical_axis(axis, typeof(a).ndim, name)


def lexsort(keys: Any, axis: int = -1) -> Array:
    """The positions that sort by several keys along a dim, of which the last is the most important.

    `keys` is a list of arrays of one shape, or an array with the keys along its first dim. The
    result has the default integer dtype. Raises an `ArgumentError` if there is no key.

    >>> snp.lexsort([np.array([2, 1, 0]), np.array([0, 1, 0])])
    Array([2, 0, 1], dtype=int32)
    """
    items = [asarray(k) for k in keys]
    if items and typeof(items[0]).ndim == 0:  # the elements of a vector: one position, sorted
        return lax.full((), 0, default_int())
    if not items:
        raise ArgumentError("lexsort: need at least one key")
    d = canonical_axis(axis, typeof(items[0]).ndim, "lexsort")
    places = lax.broadcasted_iota(default_int(), typeof(items[0]).shape, d)
    return lax.sort((*items[::-1], places), d, num_keys=len(items))[-1]


def partition(a: ArrayLike, kth: int, axis: int = -1) -> Array:
    """Put the element `kth` where sorting would put it; here the array is sorted altogether.

    Shape and dtype are those of `a`.

    >>> snp.partition(np.array([3, 1, 2]), 1)
    Array([1, 2, 3], dtype=int32)
    """
    check_arraylike("partition", a)
    _check_kth("partition", kth, a, axis)
    return sort(a, axis)


def _check_kth(name: str, kth: Any, a: Any, axis: Any) -> None:
    """Raise the user's error if `kth` is no position along the dim."""
    shape = typeof(plain(a)).shape
    size = int(np.prod(shape)) if axis is None else shape[canonical_axis(axis, len(shape), name)]
    if not -size <= whole_number(name, "kth", kth) < size:
        raise ArgumentError(f"{name}: kth={kth} is out of bounds for a dim of size {size}")


def argpartition(a: ArrayLike, kth: int, axis: int = -1) -> Array:
    """The positions that put the element `kth` where sorting would; here those of `argsort`.

    The result has the shape of `a` and the default integer dtype.

    >>> snp.argpartition(np.array([30, 10, 20]), 1)
    Array([1, 2, 0], dtype=int32)
    """
    check_arraylike("argpartition", a)
    _check_kth("argpartition", kth, a, axis)
    return argsort(a, axis)


def sort_complex(a: ArrayLike) -> Array:
    """Sort the elements along the last dim, as complex numbers.

    The shape is that of `a`. They are ordered by real part, then by imaginary part.

    >>> snp.sort_complex(np.array([3.0, 1.0]))
    Array([1.+0.j, 3.+0.j], dtype=complex64)
    """
    check_arraylike("sort_complex", a)
    result = sort(a)
    (result,) = promote_dtypes_inexact(result)
    dtype = typeof(result).dtype
    return (
        result
        if dtypes.is_complex(dtype)
        else lax.convert_element_type(result, dtypes.complex_of(dtype))
    )


# ---- search ------------------------------------------------------------------------------------


def searchsorted(
    a: ArrayLike, v: ArrayLike, side: str = "left", sorter: Any = None, *, method: str = "scan"
) -> Array:
    """The positions at which elements of `v` would be inserted into a sorted vector `a`.

    `side` says whether an element goes before ("left") or behind ("right") those equal to it.
    `sorter` is `argsort(a)` if `a` is not sorted. `a` and `v` are promoted to one dtype; the result
    has the shape of `v` and the default integer dtype. `method` changes nothing: the search is
    always binary. Raises a `ShapeError` if `a` is no vector, and an `ArgumentError` for another
    `side`.

    >>> snp.searchsorted(np.array([1, 3, 5]), np.array([0, 3, 9]))
    Array([0, 1, 3], dtype=int32)
    """
    check_arraylike("searchsorted", a, v)
    if side not in ("left", "right"):
        raise ArgumentError(f"searchsorted: side must be 'left' or 'right', got {side!r}")
    if method not in ("scan", "scan_unrolled", "sort", "compare_all"):
        raise ArgumentError(
            f"searchsorted: method={method!r} must be 'scan', 'scan_unrolled', 'sort' or "
            "'compare_all'; all give the same"
        )
    a, v = promote_dtypes(plain(a), plain(v))
    if typeof(a).ndim != 1:
        raise ShapeError(f"searchsorted: a must have one dim, got {typeof(a)}")
    if sorter is not None:
        a = take(a, sorter)
    return _places(a, v, side, default_int())


@one_program("side", "index")
def _places(a: Any, v: Any, side: str, index: np.dtype) -> Any:
    n = typeof(a).shape[0]
    v = as_array(v)
    place = lax.full(typeof(v).shape, 0, index)
    # Binary search from the highest bit: `place` elements are known to lie before v.
    for bit in reversed(range(n.bit_length())):
        guess = lax.add(place, np.array(1 << bit, index))
        inside = lax.le(guess, np.array(n, index))
        probe = lax.min(lax.sub(guess, np.array(1, index)), np.array(n - 1, index))
        element = take(a, probe, 0, mode="clip")
        before = _before(element, v, side)
        place = select(lax.bitwise_and(inside, before), guess, place)
    return place


def _before(element: Any, v: Any, side: str) -> Any:
    """Whether an element lies before the place of v; NaN lies behind all numbers."""
    dtype = typeof(v).dtype
    if dtypes.is_complex(dtype):
        raise DtypeError("searchsorted: complex numbers are not supported; search by .real")
    if side == "left":
        order = lax.lt(element, v)
        if dtypes.is_float(dtype):
            order = lax.bitwise_or(order, lax.bitwise_and(lax.ne(v, v), lax.eq(element, element)))
        return order
    order = lax.le(element, v)
    return lax.bitwise_or(order, lax.ne(v, v)) if dtypes.is_float(dtype) else order


def digitize(
    x: ArrayLike, bins: ArrayLike, right: bool = False, *, method: str | None = None
) -> Array:
    """The number of the bin into which each element falls: k if `bins[k-1] <= x < bins[k]`.

    `bins` is a vector of edges, ascending or descending; `right` says that bins contain their right
    edge instead of the left. The result is int32 and has the shape of `x`. `method` changes
    nothing. Raises a `ShapeError` if `bins` is no vector.

    >>> snp.digitize(np.array([0.5, 1.0, 9.0]), np.array([1.0, 2.0]))
    Array([0, 1, 2], dtype=int32)
    """
    check_arraylike("digitize", x, bins)
    x, bins = plain(x), plain(bins)
    if typeof(bins).ndim != 1:
        raise ShapeError(f"digitize: bins must have one dim, got {typeof(bins)}")
    n = typeof(bins).shape[0]
    side = "left" if right else "right"
    if n == 0:
        return lax.full(typeof(x).shape, 0, np.int32)
    rising = lax.ge(
        lax.index_in_dim(bins, n - 1, 0, keepdims=False), lax.index_in_dim(bins, 0, 0, False)
    )
    # Numbers of bins have 32 bits under x64 too, as JAX's; the places of `searchsorted` have the
    # default width there, which the array API standard demands.
    bins, x = promote_dtypes(bins, x)
    forward = _places(bins, x, side, dtypes.int32)
    backward = _places(lax.rev(bins, (0,)), x, side, dtypes.int32)
    backward = lax.sub(np.array(n, np.int32), backward)
    return select(lax.broadcast_in_dim(rising, typeof(x).shape, ()), forward, backward)


# ---- counts ------------------------------------------------------------------------------------


@lays_out_result
def bincount(
    x: ArrayLike,
    weights: ArrayLike | None = None,
    minlength: int = 0,
    *,
    length: int | None = None,
    out_sharding: Any = None,
) -> Array:
    """How often each of the numbers 0, 1, 2, ... occurs in a vector of integers.

    With `weights`, of the shape of `x`, it is the sum of the weights at its occurrences, of
    their dtype. The size is the largest number plus 1, at least `minlength`, or `length`, which
    a traced `x` needs. Negative numbers count as 0. `out_sharding`, a sharding or spec over
    `Explicit` mesh axes, is the layout of the result. Raises an `ArgumentError` if `x` is no
    vector of integers.

    >>> snp.bincount(np.array([0, 1, 1, 3]))
    Array([1, 2, 0, 1], dtype=int32)
    """
    x = operand("bincount", x)
    if typeof(x).ndim != 1 or dtypes.is_inexact(typeof(x).dtype):
        raise ArgumentError(f"bincount: x must be a vector of integers, got {typeof(x)}")
    if typeof(x).dtype == dtypes.bool_:
        x = lax.convert_element_type(x, default_int())
    if length is None:
        largest = np.array(-1) if typeof(x).size == 0 else _max(x)
        length = max(concrete_size("bincount", largest, None) + 1, minlength)
    if weights is None:
        weights = lax.full(typeof(x).shape, 1, default_int())
    else:
        check_arraylike("bincount", weights)
        weights = as_array(plain(weights))
    x = lax.max(x, constant_like(x, 0))
    zeros = lax.full((length,), 0, typeof(weights).dtype)
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    return lax.scatter_add(zeros, lax.expand_dims(x, (1,)), weights, numbers)


def histogram_bin_edges(a: Any, bins: Any = 10, range: Any = None, weights: Any = None) -> Array:
    """The edges of the bins in which `histogram` counts.

    `bins` is the number of bins of equal width, or a vector of edges; `range` is a pair of bounds,
    by default the smallest and largest element. The result has the floating dtype to which `a` is
    promoted and one element more than there are bins; `weights` change nothing. Raises an
    `ArgumentError` if `bins` is a string or a fraction, or `range` no pair.

    >>> snp.histogram_bin_edges(np.array([0.0, 4.0]), bins=2)
    Array([0., 2., 4.], dtype=float32)
    """
    check_arraylike("histogram_bin_edges", a)
    if isinstance(bins, (str, float)):
        raise RefusedError(
            f"histogram_bin_edges: bins={bins!r} must be an integer or a vector of edges"
        )
    check_arraylike("histogram_bin_edges", bins)
    if range is not None and not (hasattr(range, "__len__") and len(range) == 2):
        raise ArgumentError(f"histogram_bin_edges: range={range!r} must be (low, high) or None")
    (a,) = promote_dtypes_inexact(plain(a))
    dtype = typeof(a).dtype
    if np.ndim(bins) == 1:
        return lax.convert_element_type(asarray(bins), dtype)
    low, high = (_min(a), _max(a)) if range is None else (convert(r, dtype) for r in range)
    flat = lax.eq(low, high)
    half = constant_like(low, 0.5)
    low = select(flat, lax.sub(low, half), low)
    high = select(flat, lax.add(high, half), high)
    return linspace(low, high, int(bins) + 1, dtype=dtype)


def histogram(
    a: Any, bins: Any = 10, range: Any = None, weights: Any = None, density: bool | None = None
) -> tuple[Array, Array]:
    """The number of elements that fall into each bin, and the edges of the bins.

    `bins` is the number of bins of equal width between the bounds `range`, by default the smallest
    and largest element, or a vector of edges. The last bin contains its right edge too. `weights`,
    of the shape of `a`, say how much an element counts; with `density` the area is 1. Both results
    have the floating dtype to which `a` and `weights` are promoted.

    >>> snp.histogram(np.array([1.0, 2.0, 2.0, 5.0]), bins=2)
    (Array([3., 1.], dtype=float32), Array([1., 3., 5.], dtype=float32))
    """
    check_arraylike("histogram", a)
    (a,) = promote_dtypes_inexact(ravel(a))
    if weights is None:
        weights = lax.full(typeof(a).shape, 1, typeof(a).dtype)
    else:
        check_arraylike("histogram", weights)
        a, weights = promote_dtypes_inexact(a, ravel(weights))
    edges = histogram_bin_edges(a, bins, range)
    count = typeof(edges).shape[0]
    last = lax.index_in_dim(edges, count - 1, 0, keepdims=False)
    place = searchsorted(edges, a, "right")
    # The last bin is closed: what equals the last edge belongs to it.
    place = select(lax.eq(a, last), np.array(count - 1, typeof(place).dtype), place)
    sums = lax.slice_in_dim(bincount(place, weights, length=count), 1, count)
    if density:
        upper = lax.slice_in_dim(edges, 1, count)
        widths = lax.sub(upper, lax.slice_in_dim(edges, 0, count - 1))
        sums = lax.div(lax.div(sums, widths), lax.broadcast_in_dim(_sum(sums), (count - 1,), ()))
    return sums, edges


# ---- unique ------------------------------------------------------------------------------------


def unique(
    ar: ArrayLike,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
    size: int | None = None,
    fill_value: ArrayLike | None = None,
    sorted: bool = True,
) -> Any:
    """The different elements, in ascending order.

    With `axis` they are the different slices along a dim of `ar`. The dtype stays. `return_index`,
    `return_inverse` and `return_counts` add to a tuple: the first position of each, the number of
    each element of `ar` among them, and how often each occurs, as default integers. NaN is equal to
    NaN if `equal_nan`. `sorted` changes nothing.

    Traced arrays need `size`, the number of elements: those missing are `fill_value`, by default
    the smallest. Raises a `ConcretizationError` without it.

    >>> snp.unique(np.array([3, 1, 3]), return_counts=True)
    (Array([1, 3], dtype=int32), Array([1, 2], dtype=int32))
    """
    ar = operand("unique", ar)
    if size is None and isinstance(ar, Tracer) and ar.concrete() is None:
        raise ConcretizationError(
            "unique: how many different elements there are depends on traced data; give size="
        )
    shape = typeof(ar).shape
    rows = reshape(ar, (-1, 1)) if axis is None else moveaxis(ar, axis, 0)
    item = typeof(rows).shape[1:]
    flat = lax.reshape(rows, (typeof(rows).shape[0], int(np.prod(item))))
    ordered, is_first, order = first_of_runs(flat, equal_nan)
    shape_is_empty = typeof(flat).shape[0] == 0
    found = _sum(is_first)
    count = concrete_size("unique", found, size)
    (starts,) = nonzero(is_first, size=count)
    if shape_is_empty and count and fill_value is None:
        raise ShapeError(f"unique: size={count} of an empty array needs fill_value")
    if shape_is_empty and count:
        ordered = lax.full((1, *typeof(ordered).shape[1:]), 0, typeof(ordered).dtype)
    values = take(ordered, starts, 0, mode="clip")
    missing = lax.ge(lax.iota(default_int(), count), found)
    if fill_value is not None:
        fill = convert(plain(fill_value), typeof(values).dtype)
        values = select(lax.broadcast_in_dim(missing, typeof(values).shape, (0,)), fill, values)
    values = lax.reshape(values, (count,) if axis is None else (count, *item))
    results = [values if axis is None else moveaxis(values, 0, axis)]
    if return_index:
        results.append(take(order, starts, 0, mode="clip"))
    if return_inverse:
        inverse = _inverse(is_first, order)
        results.append(lax.reshape(inverse, shape) if axis is None else inverse)
    if return_counts:
        results.append(_run_lengths(is_first, count))
    return results[0] if len(results) == 1 else tuple(results)


def first_of_runs(rows: Any, equal_nan: bool) -> tuple[Any, Any, Any]:
    """Rows in order, whether each differs from the one before, and where each came from.

    A complex number with a NaN is one NaN, whatever its other part is.
    """
    n, width = typeof(rows).shape
    if dtypes.is_complex(typeof(rows).dtype):
        rows = select(lax.ne(rows, rows), constant_like(rows, np.nan), rows)
    places = lax.iota(default_int(), n)
    if n == 0 or width == 0:
        return rows, lax.eq(places, np.array(0, default_int())), places
    columns = [lax.squeeze(lax.slice_in_dim(rows, k, k + 1, axis=1), (1,)) for k in range(width)]
    *columns, order = lax.sort((*columns, places), 0, num_keys=width)
    ordered = lax.concatenate([lax.expand_dims(c, (1,)) for c in columns], 1)
    after, before = lax.slice_in_dim(ordered, 1, n), lax.slice_in_dim(ordered, 0, n - 1)
    differs = lax.ne(after, before)
    if equal_nan and dtypes.is_inexact(typeof(rows).dtype):
        both_nan = lax.bitwise_and(lax.ne(after, after), lax.ne(before, before))
        differs = lax.bitwise_and(differs, lax.bitwise_not(both_nan))
    first = lax.full((1,), True, np.dtype(np.bool_))
    return ordered, lax.concatenate([first, _any(differs, 1)], 0), order


def _inverse(is_first: Any, order: Any) -> Any:
    """For each original element, the number of its run: undo the sort by sorting back."""
    run = lax.sub(cumsum(is_first), np.array(1, default_int()))
    return lax.sort_key_val(order, run)[1]


def _run_lengths(is_first: Any, count: int) -> Any:
    run = lax.sub(cumsum(is_first), np.array(1, default_int()))
    return bincount(run, length=count)


def _set_operand(x: Any) -> Any:
    return ravel(asarray(x))


def unique_values(
    x: ArrayLike, /, *, size: int | None = None, fill_value: ArrayLike | None = None
) -> Array:
    """The different elements, in ascending order, as the array API standard has it.

    The dtype stays; each NaN is different. `size` and `fill_value` are those of `unique`.

    >>> snp.unique_values(np.array([3, 1, 3]))
    Array([1, 3], dtype=int32)
    """
    return unique(x, size=size, fill_value=fill_value, equal_nan=False)


def isin(
    element: Any,
    test_elements: Any,
    assume_unique: bool = False,
    invert: bool = False,
    *,
    method: str = "auto",
) -> Array:
    """Whether each element is among the test elements.

    The result is bool and has the shape of `element`; `invert` negates it. `element` and
    `test_elements` are promoted to one dtype. `assume_unique` and `method` change nothing: each
    element is compared with each test element. Raises an `ArgumentError` for an unknown `method`.

    >>> snp.isin(np.array([1, 2, 3]), np.array([2, 9]))
    Array([False,  True, False], dtype=bool)
    """
    if method not in ("auto", "compare_all", "binary_search", "sort"):
        raise ArgumentError(
            f"isin: method={method!r} must be 'auto', 'compare_all', 'binary_search' or 'sort'"
        )
    check_arraylike("isin", element, test_elements)
    element, test = promote_dtypes(plain(element), _set_operand(test_elements))
    shape, count = typeof(element).shape, typeof(test).shape[0]
    whole = (*shape, count)
    left = lax.broadcast_in_dim(element, whole, range(len(shape)))
    found = _any(lax.eq(left, lax.broadcast_in_dim(test, whole, (len(shape),))), -1)
    return lax.bitwise_not(found) if invert else found


def trim_zeros(filt: ArrayLike, trim: str = "fb", axis: Any = None) -> Array:
    """Remove the zeros at the ends of a concrete array.

    `filt` is the array, whose dtype stays. `trim` says where: "f" at the front, "b" at the back.
    Along each dim of `axis`, all by default, slices that are zero as a whole go.

    >>> snp.trim_zeros(np.array([0, 1, 0, 2, 0]))
    Array([1, 0, 2], dtype=int32)
    """
    mask = np.asarray(as_bool(operand("trim_zeros", filt)))
    x = as_array(filt)
    ends = trim.lower()
    if "f" not in ends and "b" not in ends:
        return x
    for d in canonical_axes(axis, mask.ndim, "trim_zeros"):
        others = tuple(k for k in range(mask.ndim) if k != d)
        inner = np.flatnonzero(mask.any(axis=others))
        size = mask.shape[d]
        start = int(inner[0]) if len(inner) and "f" in ends else 0
        stop = int(inner[-1]) + 1 if len(inner) and "b" in ends else size
        x = lax.slice_in_dim(x, start, stop if len(inner) else start, axis=d)
    return x
