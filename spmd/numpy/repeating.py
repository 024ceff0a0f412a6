"""Arrays made larger: `tile`, `repeat`, `pad`, and `insert`, `delete`, `resize`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ConcretizationError, RefusedError, ShapeError
from spmd.core.aval import typeof
from spmd.core.explicit import lays_out_result
from spmd.core.trace import Tracer
from spmd.numpy.creation import asarray
from spmd.numpy.joining import concatenate
from spmd.numpy.manipulation import broadcast_to, moveaxis, ravel, reshape
from spmd.numpy.promotion import as_array, check_arraylike, constant_like, convert, operand, plain
from spmd.numpy.quantiles import median
from spmd.numpy.ranges import linspace
from spmd.numpy.reductions import canonical_axis, cumsum
from spmd.numpy.reductions import max as _max
from spmd.numpy.reductions import min as _min
from spmd.numpy.searching import flatnonzero
from spmd.numpy.sorting import searchsorted
from spmd.numpy.statistics import mean
from spmd.numpy.taking import take
from spmd.numpy.ufuncs import remainder
from spmd.sharding.array import Array, ArrayLike

# ---- repeating ---------------------------------------------------------------------------------


def tile(A: ArrayLike, reps: Any) -> Array:
    """Repeat an array as a whole along its dims.

    `reps` is a number for the last dim of `A`, or a tuple of numbers for the last dims; the shorter
    of shape and `reps` gets ones in front. The dtype stays. Raises an `ArgumentError` if one of
    `reps` is negative.

    >>> snp.tile(np.array([1, 2]), 2)
    Array([1, 2, 1, 2], dtype=int32)
    """
    a = operand("tile", A)
    times = [operator.index(r) for r in (reps if np.iterable(reps) else (reps,))]
    if any(n < 0 for n in times):
        raise ArgumentError(f"tile: reps must not be negative, got {reps}")
    sizes = typeof(a).shape
    rank = max(len(times), len(sizes))
    times = [1] * (rank - len(times)) + times
    sizes = (1,) * (rank - len(sizes)) + sizes
    spread = [n for pair in zip(times, sizes, strict=True) for n in pair]
    grown = lax.broadcast_in_dim(lax.reshape(a, sizes), spread, range(1, 2 * rank, 2))
    return as_array(lax.reshape(grown, [r * n for r, n in zip(times, sizes, strict=True)]))


@lays_out_result
def repeat(
    a: ArrayLike,
    repeats: ArrayLike,
    axis: int | None = None,
    *,
    total_repeat_length: int | None = None,
    out_sharding: Any = None,
) -> Array:
    """Repeat each element along a dim.

    `repeats` is one number for all elements, or one for each; with `axis=None` the array is
    flattened first. The dtype stays. Traced `repeats` need `total_repeat_length`, the size of
    the result's dim: what is missing is filled with the last element, what is too much left
    out. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the
    result. Raises a `ShapeError` if `repeats` does not fit the dim.

    >>> snp.repeat(np.array([1, 2]), np.array([2, 3]))
    Array([1, 1, 2, 2, 2], dtype=int32)
    """
    a = operand("repeat", a)
    check_arraylike("repeat", repeats)
    if axis is None:
        a, axis = ravel(a), 0
    d = canonical_axis(axis, typeof(a).ndim, "repeat")
    n = typeof(a).shape[d]
    if isinstance(repeats, Tracer) or total_repeat_length is not None:
        return _repeat_to_length(a, repeats, d, total_repeat_length)
    counts = np.asarray(repeats)
    if counts.size and counts.min() < 0:
        raise ArgumentError(f"repeat: repeats must not be negative, got {repeats}")
    if counts.ndim == 0 or counts.size == 1:
        return _repeat_equally(a, int(counts.reshape(())), d)
    if counts.shape != (n,):
        raise ShapeError(
            f"repeat: repeats has shape {counts.shape}, but dim {d} of the array has size {n}"
        )
    return take(a, np.repeat(np.arange(n), counts), d)


def _repeat_equally(a: Any, times: int, d: int) -> Any:
    sizes = typeof(a).shape
    spread = (*sizes[: d + 1], times, *sizes[d + 1 :])
    grown = lax.broadcast_in_dim(a, spread, [k for k in range(len(spread)) if k != d + 1])
    return as_array(lax.reshape(grown, (*sizes[:d], sizes[d] * times, *sizes[d + 1 :])))


def _repeat_to_length(a: Any, repeats: Any, d: int, length: int | None) -> Any:
    if length is None:
        raise ConcretizationError(
            "repeat: repeats is traced, so the size of the result is unknown; give "
            "total_repeat_length"
        )
    n = typeof(a).shape[d]
    repeats = repeats if isinstance(repeats, Tracer) else np.asarray(repeats)
    ends = cumsum(broadcast_to(ravel(repeats), (n,)))
    source = searchsorted(ends, lax.iota(typeof(ends).dtype, operator.index(length)), "right")
    return take(a, lax.min(source, constant_like(source, n - 1)), d, mode="clip")


def resize(a: ArrayLike, new_shape: Any) -> Array:
    """Give an array another shape, with its elements repeated as often as needed.

    `new_shape` is an integer or a tuple of integers. The dtype stays.

    >>> snp.resize(np.array([1, 2, 3]), (2, 2))
    Array([[1, 2],
           [3, 1]], dtype=int32)
    """
    check_arraylike("resize", a)
    shape = tuple(new_shape) if np.iterable(new_shape) else (new_shape,)
    flat, total = ravel(a), math.prod(shape)
    n = typeof(flat).shape[0]
    if n == 0 or total == 0:
        return lax.full(shape, 0, typeof(flat).dtype)
    copies = -(-total // n)
    return reshape(lax.slice_in_dim(lax.concatenate([flat] * copies, 0), 0, total), shape)


# ---- padding -----------------------------------------------------------------------------------

_PAD_OPTIONS = {
    "constant": "constant_values",
    "edge": None,
    "empty": None,
    "wrap": None,
    "linear_ramp": "end_values",
    "reflect": "reflect_type",
    "symmetric": "reflect_type",
    "maximum": "stat_length",
    "minimum": "stat_length",
    "mean": "stat_length",
    "median": "stat_length",
}


def pad(array: Any, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> Array:
    """Put more elements before and after those of each dim.

    `pad_width` is a number, a pair (before, after), or a pair for each dim of `array`. `mode` says
    what is put there: "constant" (`constant_values`), "edge", "reflect" and "symmetric"
    (`reflect_type`), "wrap", "linear_ramp" (`end_values`), "maximum", "minimum", "mean" and
    "median" (`stat_length`), or "empty", which is zeros; the word in parentheses is its option in
    `kwargs`. The dtype stays. Raises an `ArgumentError` for a negative width, an unknown mode or
    another option, and a `ShapeError` if there is nothing to repeat.

    >>> snp.pad(np.array([1, 2]), (1, 2), constant_values=9)
    Array([9, 1, 2, 9, 9], dtype=int32)
    """
    check_arraylike("pad", array)
    array = as_array(plain(array))
    widths = _pairs("pad_width", pad_width, typeof(array).ndim)
    widths = [tuple(operator.index(w) for w in pair) for pair in widths]
    if any(w < 0 for pair in widths for w in pair):
        raise ArgumentError(f"pad: pad_width must not be negative, got {pad_width}")
    if mode not in _PAD_OPTIONS:
        raise RefusedError(f"pad: mode must be one of {', '.join(_PAD_OPTIONS)}, got {mode!r}")
    extra = set(kwargs) - {_PAD_OPTIONS[mode]}
    if extra:
        raise ArgumentError(f"pad: mode {mode!r} takes no argument {', '.join(sorted(extra))}")
    option = next(iter(kwargs.values()), None)
    if mode in ("constant", "empty"):
        return _pad_constant(array, widths, 0 if option is None else option)
    rule = _pad_rule(mode, option, typeof(array).ndim)
    for d, (before, after) in enumerate(widths):
        if before or after:
            if typeof(array).shape[d] == 0:
                raise ShapeError(f"pad: cannot extend empty axis {d} using mode {mode!r}")
            array = rule(array, d, before, after)
    return array


def _pairs(name: str, value: Any, ndim: int) -> list[Any]:
    """A number, a pair, or a pair for each dim: as a pair for each dim."""
    shape = np.shape(value) if not isinstance(value, dict) else None
    if isinstance(value, dict):
        return [value.get(d, value.get(d - ndim, (0, 0))) for d in range(ndim)]
    if shape == ():
        return [(value, value)] * ndim
    if shape == (1,):
        return [(value[0], value[0])] * ndim
    if shape in ((2,), (1, 2)):
        pair = value if len(shape or ()) == 1 else value[0]
        return [(pair[0], pair[1])] * ndim
    if shape == (ndim, 2):
        return [(row[0], row[1]) for row in value]
    raise ArgumentError(f"pad: {name} must be a number, a pair, or {ndim} pairs, got {value!r}")


def _pad_constant(array: Any, widths: Sequence[Any], value: Any) -> Any:
    dtype = typeof(array).dtype
    if np.shape(value) == ():
        fill = lax.convert_element_type(convert(value, dtype), dtype)
        return lax.pad(array, fill, [(before, after, 0) for before, after in widths])
    for d, (fills, (before, after)) in enumerate(
        zip(_pairs("constant_values", value, len(widths)), widths, strict=True)
    ):
        for fill, low, high in ((fills[0], before, 0), (fills[1], 0, after)):
            config = [(low, high, 0) if k == d else (0, 0, 0) for k in range(len(widths))]
            array = lax.pad(array, convert(fill, dtype), config)
    return array


def _pad_rule(mode: str, option: Any, ndim: int) -> Callable[[Any, int, int, int], Any]:
    """How one dim is padded: `rule(array, dim, before, after)`."""
    if mode == "edge":
        return _pad_edge
    if mode == "wrap":
        return _pad_wrap
    if mode in ("reflect", "symmetric"):
        return lambda a, d, before, after: _pad_mirror(a, d, before, after, mode, option or "even")
    if mode == "linear_ramp":
        ends = _pairs("end_values", 0 if option is None else option, ndim)
        return lambda a, d, before, after: _pad_ramp(a, d, before, after, ends[d])
    lengths = None if option is None else _pairs("stat_length", option, ndim)
    reduce = {"maximum": _max, "minimum": _min, "mean": mean, "median": median}[mode]
    return lambda a, d, before, after: _pad_statistic(
        a, d, before, after, reduce, None if lengths is None else lengths[d]
    )


def _ends(a: Any, d: int, before: int, after: int) -> tuple[Any, Any]:
    n = typeof(a).shape[d]
    return lax.slice_in_dim(a, 0, before, axis=d), lax.slice_in_dim(a, n - after, n, axis=d)


def _spread_along(a: Any, d: int, size: int) -> Any:
    shape = list(typeof(a).shape)
    shape[d] = size
    return lax.broadcast_in_dim(a, shape, range(len(shape)))


def _pad_edge(a: Any, d: int, before: int, after: int) -> Any:
    first, last = _ends(a, d, 1, 1)
    return lax.concatenate([_spread_along(first, d, before), a, _spread_along(last, d, after)], d)


def _pad_wrap(a: Any, d: int, before: int, after: int) -> Any:
    n = typeof(a).shape[d]
    head = lax.slice_in_dim(a, n - before % n, n, axis=d)
    tail = lax.slice_in_dim(a, 0, after % n, axis=d)
    copies = before // n + 1 + after // n
    return lax.concatenate([head, *[a] * copies, tail], d)


def _pad_mirror(a: Any, d: int, before: int, after: int, mode: str, kind: str) -> Any:
    if kind not in ("even", "odd"):
        raise ArgumentError(f"pad: reflect_type must be 'even' or 'odd', got {kind!r}")
    skip = 1 if mode == "reflect" else 0
    if typeof(a).shape[d] == 1 and skip:
        return _pad_edge(a, d, before, after)
    while before or after:
        # Each round adds at most one mirror image of what there is.
        n = typeof(a).shape[d]
        low, high = min(before, n - skip), min(after, n - skip)
        first, last = _ends(a, d, 1, 1)
        head = lax.rev(lax.slice_in_dim(a, skip, skip + low, axis=d), (d,))
        tail = lax.rev(lax.slice_in_dim(a, n - skip - high, n - skip, axis=d), (d,))
        if kind == "odd":
            two = constant_like(a, 2)
            head = lax.sub(lax.mul(two, _spread_along(first, d, low)), head)
            tail = lax.sub(lax.mul(two, _spread_along(last, d, high)), tail)
        a = lax.concatenate([head, a, tail], d)
        before, after = before - low, after - high
    return a


def _pad_ramp(a: Any, d: int, before: int, after: int, ends: Any) -> Any:
    first, last = (lax.squeeze(e, (d,)) for e in _ends(a, d, 1, 1))
    dtype = typeof(a).dtype
    # A ramp of integers may begin at a fraction.
    low, high = (convert(e, dtype) for e in ends) if dtypes.is_inexact(dtype) else ends
    head = linspace(low, first, before, endpoint=False, dtype=dtype, axis=d)
    tail = lax.rev(linspace(high, last, after, endpoint=False, dtype=dtype, axis=d), (d,))
    return lax.concatenate([head, a, tail], d)


def _pad_statistic(
    a: Any, d: int, before: int, after: int, reduce: Callable[..., Any], lengths: Any
) -> Any:
    n = typeof(a).shape[d]
    low, high = (n, n) if lengths is None else (min(int(k), n) for k in lengths)
    head, tail = _ends(a, d, low, high)
    parts = []
    for part, size in ((head, before), (tail, after)):
        value = reduce(part, d, keepdims=True)
        if dtypes.is_integer(typeof(a).dtype) and typeof(value).dtype != typeof(a).dtype:
            value = lax.round(value, lax.RoundingMethod.TO_NEAREST_EVEN)
        value = lax.convert_element_type(value, typeof(a).dtype)
        parts.append(_spread_along(value, d, size))
    return lax.concatenate([parts[0], a, parts[1]], d)


# ---- inserting and deleting --------------------------------------------------------------------


def _concrete_indices(name: str, obj: Any, n: int) -> np.ndarray:
    if isinstance(obj, Tracer):
        raise ConcretizationError(f"{name}: the indices must be concrete, got {obj!r}")
    if isinstance(obj, slice):
        return np.arange(n)[obj]
    indices = np.asarray(obj)
    return indices.astype(np.int64) if indices.size == 0 else indices


def delete(
    arr: ArrayLike, obj: Any, axis: int | None = None, *, assume_unique_indices: bool = False
) -> Array:
    """Remove the slices at the indices `obj` along a dim.

    With `axis=None` the array is flattened first. The dtype of `arr` stays. The integers `obj` must
    be concrete, or traced with `assume_unique_indices`: how many slices go is then known from their
    shape, if none is there twice. Raises an `ArgumentError` for one index out of bounds, and an
    IndexError for one among several.

    >>> snp.delete(np.array([5, 6, 7]), 1)
    Array([5, 7], dtype=int32)
    """
    a = operand("delete", arr)
    if not isinstance(obj, slice):
        check_arraylike("delete", obj)
    if axis is None:
        a, axis = ravel(a), 0
    d = canonical_axis(axis, typeof(a).ndim, "delete")
    n = typeof(a).shape[d]
    if assume_unique_indices and not isinstance(obj, slice):
        gone = ravel(asarray(obj))
        hit = lax.broadcasted_iota(np.dtype(np.int32), (n, typeof(gone).shape[0]), 0)
        wrapped = lax.convert_element_type(remainder(gone, n), np.dtype(np.int32))
        hit = lax.eq(hit, lax.broadcast_in_dim(wrapped, typeof(hit).shape, (1,)))
        left = lax.bitwise_not(lax.reduce_or(hit, (1,)))
        return take(a, flatnonzero(left, size=n - typeof(gone).shape[0]), d)
    keep = np.ones(n, bool)
    gone = _concrete_indices("delete", obj, n)
    if gone.ndim == 0 and gone.dtype != bool and not -n <= gone < n:  # of many: an IndexError
        raise ArgumentError(f"delete: index {obj} is out of bounds for dim {d} of size {n}")
    keep[gone] = False
    return take(a, np.flatnonzero(keep), d)


def insert(arr: ArrayLike, obj: Any, values: ArrayLike, axis: int | None = None) -> Array:
    """Put values in before the indices `obj` along a dim.

    `obj` is a concrete integer, slice or array of integers. `values` broadcast to the slices, and
    are converted to the dtype of `arr`. With `axis=None` the array is flattened first.

    >>> snp.insert(np.array([5, 6, 7]), 1, 9)
    Array([5, 9, 6, 7], dtype=int32)
    """
    check_arraylike("insert", arr, values, *(() if isinstance(obj, slice) else (obj,)))
    a = plain(arr)
    if axis is None:
        a, axis = ravel(a), 0
    d = canonical_axis(axis, typeof(a).ndim, "insert")
    n = typeof(a).shape[d]
    indices = _concrete_indices("insert", obj, n)
    rows = moveaxis(a, d, 0)
    new = convert(plain(values), typeof(a).dtype)
    if indices.ndim == 0 and typeof(new).ndim:
        new = (
            reshape(new, (1, *typeof(new).shape))
            if typeof(new).ndim < typeof(a).ndim
            else (moveaxis(new, d, 0))
        )
    elif typeof(new).ndim == typeof(a).ndim:
        new = moveaxis(new, d, 0)
    count = typeof(new).shape[0] if typeof(new).ndim == typeof(rows).ndim else indices.size
    indices = np.broadcast_to(indices.reshape(-1), (max(indices.size, count),))
    new = broadcast_to(new, (indices.size, *typeof(rows).shape[1:]))
    at = np.clip(np.where(indices < 0, indices + n, indices), 0, n)
    order = np.argsort(at, kind="stable")
    places = at.copy()
    places[order] += np.arange(at.size)
    # Where each row of the result comes from: the old rows in order, the new ones at `places`.
    source = np.empty(n + at.size, np.int64)
    is_new = np.zeros(n + at.size, bool)
    is_new[places] = True
    source[places] = n + np.arange(at.size)
    source[~is_new] = np.arange(n)
    return moveaxis(take(concatenate([rows, new], 0), source, 0), 0, d)


def diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Array:
    """The differences of neighbours along a dim, `a[1:] - a[:-1]`, taken `n` times.

    The size of the dim falls by `n`. `prepend` and `append` are joined to `a` before; scalars
    broadcast. The dtype is that of `a`; differences of bools are bools. Raises an `ArgumentError`
    if `a` has no dim or `n` is negative.

    >>> snp.diff(np.array([1, 4, 9]))
    Array([3, 5], dtype=int32)
    """
    a = operand("diff", a)
    if typeof(a).ndim == 0 or n < 0:
        raise ArgumentError(f"diff: an array of at least one dim and n >= 0 are needed, got n={n}")
    if n == 0:
        return as_array(a)
    d = canonical_axis(axis, typeof(a).ndim, "diff")
    row = [1 if k == d else size for k, size in enumerate(typeof(a).shape)]
    parts = []
    for part in (prepend, a, append):
        if part is not None:
            part = operand("diff", part)
            parts.append(part if typeof(part).ndim else broadcast_to(part, row))
    a = concatenate(parts, d)
    differ = lax.ne if typeof(a).dtype == np.bool_ else lax.sub
    for _ in range(n):
        size = typeof(a).shape[d]
        upper = lax.slice_in_dim(a, min(1, size), size, axis=d)
        a = differ(upper, lax.slice_in_dim(a, 0, max(size - 1, 0), axis=d))
    return a


def ediff1d(ary: ArrayLike, to_end: Any = None, to_begin: Any = None) -> Array:
    """The differences of neighbours of the flat array, as a vector.

    `ary` has any shape, and the differences are one fewer than its elements. `to_begin` is put
    before them and `to_end` behind, in the dtype of `ary`, which the result has.

    >>> snp.ediff1d(np.array([1, 4, 9]), to_end=0)
    Array([3, 5, 0], dtype=int32)
    """
    check_arraylike("ediff1d", ary)
    ary = plain(ary)
    dtype = typeof(ary).dtype
    flat = ravel(ary)
    count = typeof(flat).shape[0]
    # Not `diff`, which compares bools: these have no differences here.
    before, behind = (lax.slice_in_dim(flat, k, max(count - 1 + k, k)) for k in (0, min(1, count)))
    middle = lax.sub(behind, before)
    ends = [None if e is None else ravel(convert(plain(e), dtype)) for e in (to_begin, to_end)]
    parts = [p for p in (ends[0], middle, ends[1]) if p is not None]
    return concatenate(parts, 0)
