"""Discrete distributions and orderings: `randint`, `bernoulli`, `categorical`, `permutation`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import (
    ArgumentError,
    DtypeArgumentError,
    DtypeError,
    IntegerRangeError,
    ShapeError,
)
from spmd.core.aval import is_arraylike, typeof
from spmd.core.explicit import lays_out_result
from spmd.core.trace import Tracer
from spmd.numpy.manipulation import moveaxis
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    as_array,
    broadcast_to,
    check_arraylike,
    default_int,
    operand,
    plain,
    promote_args_inexact,
    select,
    user_dtype,
)
from spmd.numpy.reductions import argmax, canonical_axis, cumsum
from spmd.numpy.sorting import searchsorted
from spmd.numpy.taking import take
from spmd.numpy.ufuncs import add
from spmd.random.continuous import gumbel_mode, gumbel_typed, uniform_typed
from spmd.random.keys import canonical_shape, count_of, pair, sample_shape, single, typed_bits

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- integers ----------------------------------------------------------------------------------


@lays_out_result
def randint(
    key: Any, shape: Any, minval: Any, maxval: Any, dtype: Any = None, *, out_sharding: Any = None
) -> Array:
    """Draw integers uniformly distributed in [`minval`, `maxval`).

    The bounds broadcast to `shape`; floats are truncated. `dtype` is by default the default
    integer dtype, int32 without x64. Where the interval is empty the result is `minval`.
    Integers are found from twice their bits by a remainder, whose bias is negligible.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises `DtypeError` if `dtype` is no integer dtype, an `OverflowError` for a Python integer
    that does not fit the default integer dtype, `ShapeError` if a bound does not
    broadcast, and `ArgumentError` if `key` is no single key.

    >>> x = spmd.random.randint(spmd.random.key(0), (100,), 3, 6)
    >>> sorted(set(x.tolist()))
    [3, 4, 5]
    """
    found = default_int() if dtype is None else user_dtype(dtype, "randint")
    if not dtypes.is_integer(found):
        raise DtypeArgumentError(f"randint: dtype must be an integer, got {found}")
    whole = sample_shape("randint", shape, minval, maxval)
    sampled = found if found.itemsize >= 4 else np.dtype(np.int32)
    low, _ = _bound("minval", minval, found, sampled)
    high, beyond = _bound("maxval", maxval, found, sampled)
    out = _randint(single(key, "randint"), whole, low, high, beyond, sampled)
    return lax.convert_element_type(out, found)


def _bound(name: str, value: Any, dtype: np.dtype, sampled: np.dtype) -> tuple[Any, Any]:
    """A bound clipped to the range of `sampled`, and whether it lay above that."""
    if not is_arraylike(value):
        raise ArgumentError(f"randint: {name} must be an integer, got {value!r}")
    value = plain(value)
    info, wide = dtypes.iinfo(dtype), dtypes.iinfo(sampled)
    # A narrow dtype is sampled as int32, which also holds the number after its largest.
    most = int(info.max) + (sampled != dtype and name == "maxval")
    if isinstance(value, int) and value not in _range_of(default_int()):
        raise IntegerRangeError(
            f"randint: {name}={value} does not fit {default_int()}, the dtype of Python's numbers; "
            "give the bound as an array of a wider dtype, or enable x64"
        )
    if isinstance(value, (int, float)):
        clipped = min(max(int(value), int(info.min)), most)
        return np.array(clipped, sampled), np.bool_(int(value) > wide.max)
    if not dtypes.is_integer(typeof(value).dtype):
        value = lax.convert_element_type(value, default_int())
    own = dtypes.iinfo(typeof(value).dtype)
    beyond = lax.gt(value, np.array(min(wide.max, own.max), own.dtype))
    low, high = max(int(info.min), own.min), min(most, own.max)
    clipped = lax.clamp(np.array(low, own.dtype), value, np.array(high, own.dtype))
    return lax.convert_element_type(clipped, sampled), beyond


def _range_of(dtype: np.dtype) -> range:
    info = dtypes.iinfo(dtype)
    return range(int(info.min), int(info.max) + 1)


@one_program("shape", "dtype")
def _randint(
    key: Any, shape: tuple[int, ...], low: Any, high: Any, beyond: Any, dtype: np.dtype
) -> Any:
    """From twice the bits, reduced modulo the span: the remainder's bias is negligible."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    first, second = pair(key)
    upper, lower = (typed_bits(k, shape, unsigned) for k in (first, second))
    low, high, beyond = (_spread(v, shape) for v in (low, high, beyond))
    one = np.array(1, unsigned)
    empty = lax.le(high, low)
    span = lax.convert_element_type(lax.sub(high, low), unsigned)
    span = select(empty, one, span)
    # maxval was one above the largest number: the span is one more (and may wrap to "all").
    whole = lax.bitwise_and(beyond, lax.bitwise_not(empty))
    span = select(whole, lax.add(span, one), span)
    half = lax.rem(np.array(2 ** (4 * unsigned.itemsize), unsigned), span)
    factor = lax.rem(lax.mul(half, half), span)
    offset = lax.add(lax.mul(lax.rem(upper, span), factor), lax.rem(lower, span))
    return lax.add(low, lax.convert_element_type(lax.rem(offset, span), dtype))


def _spread(x: Any, shape: tuple[int, ...]) -> Any:
    own = typeof(x).shape
    return x if not own or own == shape else broadcast_to(x, shape)


@lays_out_result
def bernoulli(
    key: Any, p: Any = 0.5, shape: Any = None, mode: str = "low", *, out_sharding: Any = None
) -> Array:
    """Draw booleans that are True with probability `p`.

    `p` is a float and broadcasts to `shape`, which is by default its own. The dtype of the
    result is bool. `mode="high"` uses twice the bits, and resolves very small probabilities;
    "low" does not. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout
    of the result. Raises `DtypeError` if `p` is no float, `ShapeError` if it does not
    broadcast, and `ArgumentError` for another mode or if `key` is no single key.

    >>> bool(spmd.random.bernoulli(spmd.random.key(0), 1.0))
    True
    >>> spmd.random.bernoulli(spmd.random.key(0), np.array([0.0, 1.0]))
    Array([False,  True], dtype=bool)
    """
    p = operand("bernoulli", p)
    dtype = typeof(p).dtype
    if not dtypes.is_float(dtype):
        raise DtypeError(f"bernoulli: the probability p must be a float, got {typeof(p)}")
    if mode not in ("low", "high"):
        raise ArgumentError(f"bernoulli: mode must be 'low' or 'high', got {mode!r}")
    whole = sample_shape("bernoulli", shape, p)
    key, p = single(key, "bernoulli"), _spread(lax.convert_element_type(p, dtype), whole)
    if mode == "low":
        return lax.lt(uniform_typed(key, whole, dtype), p)
    both = uniform_typed(key, (2, *whole), dtype)
    coarse, fine = (lax.index_in_dim(both, k, 0, keepdims=False) for k in (0, 1))
    fine = lax.mul(fine, np.array(2.0 ** -dtypes.finfo(dtype).nmant, dtype))
    return lax.lt(fine, lax.sub(p, coarse))


@lays_out_result
def rademacher(key: Any, shape: Any = (), dtype: Any = None, *, out_sharding: Any = None) -> Array:
    """Draw -1 or 1, each with probability 1/2, in the given `shape`.

    `dtype` is by default the default integer dtype. `out_sharding`, a sharding or spec over
    `Explicit` mesh axes, is the layout of the result. Raises `ShapeError` if a size is
    negative, and `ArgumentError` if `key` is no single key.

    >>> x = spmd.random.rademacher(spmd.random.key(0), (100,))
    >>> sorted(set(x.tolist()))
    [-1, 1]
    """
    found = default_int() if dtype is None else user_dtype(dtype, "rademacher")
    coin = bernoulli(key, 0.5, canonical_shape(shape, "rademacher"))
    if dtypes.is_bool(found):  # both of -1 and 1 are True
        return lax.full_like(coin, True)
    coin = lax.convert_element_type(coin, found)
    return lax.sub(lax.mul(coin, np.array(2, found)), np.array(1, found))


# ---- categories --------------------------------------------------------------------------------


@lays_out_result
def categorical(
    key: Any,
    logits: Any,
    axis: int = -1,
    shape: Any = None,
    replace: bool = True,
    mode: str | None = None,
    *,
    out_sharding: Any = None,
) -> Array:
    """Draw numbers of categories with probabilities `softmax(logits)` along `axis`.

    `shape` is the result's: leading dims for independent draws, then the shape of `logits`
    without `axis`, which is also the default. With `replace=False` no category is drawn twice.
    `mode="high"` has a finer upper tail of the underlying `gumbel` noise. The result's dtype is
    int32 without x64; the logits are floats. `out_sharding`, a sharding or spec over `Explicit`
    mesh axes, is the layout of the result. Raises `ShapeError` if `shape` does not end so,
    `ArgumentError` for too many draws without replacement or if `key` is no single key, and
    `DimensionError` if `axis` is out of range.

    >>> logits = np.log(np.array([1e-30, 0.5, 0.5]))
    >>> x = spmd.random.categorical(spmd.random.key(0), logits, shape=(100,))
    >>> sorted(set(x.tolist()))
    [1, 2]
    """
    logits = operand("categorical", logits)
    own = typeof(logits).shape
    d = canonical_axis(axis, len(own), "categorical")
    batch = own[:d] + own[d + 1 :]
    whole = batch if shape is None else canonical_shape(shape, "categorical")
    if whole[len(whole) - len(batch) :] != batch:
        raise ShapeError(
            f"categorical: shape {whole} must end with {batch}, the shape of logits without {axis=}"
        )
    lead = whole[: len(whole) - len(batch)]
    key, dtype = single(key, "categorical"), typeof(logits).dtype
    if replace:
        noise = gumbel_typed(key, (*lead, *own), dtype, gumbel_mode("categorical", mode))
        return argmax(add(noise, logits), axis=d - len(own))
    count = math.prod(lead)
    if count > own[d]:
        raise ArgumentError(
            f"categorical: {count} draws without replacement from {own[d]} categories"
        )
    noise = gumbel_typed(key, own, dtype, gumbel_mode("categorical", mode))
    _, chosen = lax.top_k(moveaxis(lax.add(noise, logits), d, -1), count)
    return lax.reshape(moveaxis(chosen, -1, 0), whole)


def choice(
    key: Any,
    a: Any,
    shape: Any = (),
    replace: bool = True,
    p: Any = None,
    axis: int = 0,
    mode: str | None = None,
) -> Array:
    """Draw elements of `a` along `axis`, or integers below `a` if it is an integer.

    `p` holds one probability for each element; the default is equal ones. The result has `shape` in
    place of that dim of `a`, and its dtype. With `replace=False` no element is drawn twice. `mode`
    is that of `gumbel`, for draws without replacement with probabilities. Raises `ShapeError` if
    `p` has another shape, and `ArgumentError` if there is nothing to choose from, if there are too
    many draws without replacement, if `shape` is no tuple or `key` no single key.

    >>> x = spmd.random.choice(spmd.random.key(0), np.array([10, 20, 30]), (3,), replace=False)
    >>> sorted(x.tolist())
    [10, 20, 30]
    """
    if not isinstance(shape, Sequence):
        raise ArgumentError(f"choice: shape must be a tuple, got {shape!r}")
    check_arraylike("choice", a)
    whole = canonical_shape(shape, "choice")
    a = plain(a)
    is_number = typeof(a).ndim == 0
    d = 0 if is_number else canonical_axis(axis, typeof(a).ndim, "choice")
    if is_number and dtypes.is_float(typeof(a).dtype) and not isinstance(a, Tracer):
        a = int(a)  # truncated, as in JAX
    count = count_of("choice", a) if is_number else typeof(a).shape[d]
    drawn = math.prod(whole)
    if drawn == 0:
        return lax.full(whole, 0, typeof(a).dtype)
    if count <= 0:
        raise ArgumentError("choice: there is nothing to choose from")
    if not replace and drawn > count:
        raise ArgumentError(f"choice: {drawn} draws without replacement from {count} elements")
    key = single(key, "choice")
    if p is None and not replace:
        shuffled = permutation(key, count if is_number else a, d)
        result = lax.slice_in_dim(shuffled, 0, drawn, axis=d)
    else:
        chosen = _chosen(key, count, whole, replace, p, mode)
        result = chosen if is_number else take(as_array(a), chosen, d)
    own = () if is_number else typeof(a).shape
    return lax.reshape(result, (*own[:d], *whole, *own[d + 1 :]))


def _chosen(
    key: Any, count: int, shape: tuple[int, ...], replace: bool, p: Any, mode: str | None
) -> Any:
    if p is None:
        return randint(key, shape, 0, count)
    (p,) = promote_args_inexact("choice", p)
    if typeof(p).shape != (count,):
        raise ShapeError(f"choice: p must have shape ({count},), got {typeof(p).shape}")
    dtype = typeof(p).dtype
    if replace:
        total = cumsum(p)
        last = lax.index_in_dim(total, count - 1, 0, keepdims=False)
        u = lax.sub(np.array(1, dtype), uniform_typed(key, shape, dtype))
        return searchsorted(total, lax.mul(last, u))
    noise = lax.add(gumbel_typed(key, (count,), dtype, gumbel_mode("choice", mode)), lax.log(p))
    return lax.top_k(noise, math.prod(shape))[1]


# ---- orderings ---------------------------------------------------------------------------------


@lays_out_result
def permutation(
    key: Any, x: Any, axis: int = 0, independent: bool = False, *, out_sharding: Any = None
) -> Array:
    """Bring the elements of `x` along `axis` in random order.

    An integer `x` stands for the numbers below it. With `independent`, every line along the dim
    gets an order of its own. The shape and the dtype of `x` stay. `out_sharding`, a sharding or
    spec over `Explicit` mesh axes, is the layout of the result. Raises `DtypeError` if a scalar
    `x` is no integer, `DimensionError` if `axis` is out of range, and `ArgumentError` if `key`
    is no single key.

    >>> x = spmd.random.permutation(spmd.random.key(0), 5)
    >>> sorted(x.tolist())
    [0, 1, 2, 3, 4]
    """
    check_arraylike("permutation", x)
    key, x = single(key, "permutation"), plain(x)
    if typeof(x).ndim == 0:
        if not dtypes.is_integer(typeof(x).dtype):
            raise DtypeError("permutation: x must be an integer or have at least one dim")
        return _shuffled(key, lax.iota(default_int(), count_of("permutation", x)), 0)
    d = canonical_axis(axis, typeof(x).ndim, "permutation")
    if independent or typeof(x).ndim == 1:
        return _shuffled(key, as_array(x), d)
    order = _shuffled(key, lax.iota(default_int(), typeof(x).shape[d]), 0)
    return take(x, order, d)


@one_program("d")
def _shuffled(key: Any, x: Any, d: int) -> Any:
    """Sorted by random keys, often enough that equal keys leave no trace: as JAX does."""
    rounds = int(np.ceil(3 * np.log(max(1, typeof(x).size)) / np.log(np.iinfo(np.uint32).max)))
    for _ in range(rounds):
        key, fresh = pair(key)
        order = typed_bits(fresh, typeof(x).shape, np.dtype(np.uint32))
        x = lax.sort_key_val(order, x, d)[1]
    return x
