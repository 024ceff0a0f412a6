"""Counts of successes: `binomial`, and `multinomial` as a chain of those.

Two methods with JAX's sequence of keys: counting geometric gaps where few successes are expected,
Hormann's transformed rejection (BTRS, 1993) elsewhere. Both are loops without derivatives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.core.aval import typeof
from spmd.numpy.manipulation import moveaxis
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    broadcast_to,
    check_arraylike,
    plain,
    promote_dtypes_inexact,
    select,
)
from spmd.numpy.reductions import any as _any
from spmd.numpy.selection import clip
from spmd.numpy.taking import take
from spmd.random.continuous import uniform_typed
from spmd.random.keys import (
    canonical_shape,
    float_dtype,
    pair,
    sample_shape,
    several,
    single,
    split_typed,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# log(k!) less Stirling's formula for it, k = 0 to 9. For larger k JAX evaluates the series at 9, so
# that such tails cancel in the bound that uses them; samples agree only if that is done here too.
_TAILS = (
    0.0810614667953272, 0.0413406959554092, 0.0276779256849983, 0.02079067210376509,
    0.0166446911898211, 0.0138761288230707, 0.0118967099458917, 0.0104112652619720,
    0.00925546218271273, 0.00833056343336287,
)  # fmt: skip

# ---- binomial ----------------------------------------------------------------------------------


def binomial(key: Any, n: Any, p: Any, shape: Any = None, dtype: Any = None) -> Array:
    """Draw how many of `n` trials succeed, each with probability `p`.

    The result is NaN where the parameters are impossible. The parameters broadcast to `shape`,
    which is by default theirs; `dtype` is a float dtype, by default float32. Few expected successes
    are counted by their gaps, many by Hörmann's transformed rejection (1993). Raises `DtypeError`
    for another dtype, `ShapeError` if a parameter does not broadcast, and `ArgumentError` if one is
    no array or `key` is no single key.

    >>> spmd.random.binomial(spmd.random.key(0), 12.0, 1.0, (3,))
    Array([12., 12., 12.], dtype=float32)
    """
    check_arraylike("binomial", n, p)
    found, whole = float_dtype(dtype, "binomial"), sample_shape("binomial", shape, n, p)
    (p,) = promote_dtypes_inexact(plain(p))
    own = typeof(p).dtype
    n, p = (broadcast_to(lax.convert_element_type(plain(v), own), whole) for v in (n, p))
    return _binomial(single(key, "binomial"), n, p, found)


@one_program("dtype")
def _binomial(key: Any, n: Any, p: Any, dtype: np.dtype) -> Any:
    own = typeof(p).dtype

    def const(value: float) -> np.ndarray:
        return np.array(value, own)

    # The rarer of success and failure is counted.
    rare = lax.lt(p, const(0.5))
    q = lax.select(rare, p, lax.sub(const(1), p))
    no_n = lax.bitwise_or(lax.ne(n, n), lax.lt(n, const(0)))
    endless = lax.eq(lax.abs(n), const(np.inf))
    undefined, negative = lax.ne(q, q), lax.lt(q, const(0))
    q = select(lax.bitwise_or(undefined, negative), const(0.01), q)
    few = lax.bitwise_or(no_n, lax.le(lax.mul(n, q), const(10)))
    n = lax.floor(n)
    # Each method gets parameters in its own range; its results for other elements are not used.
    by_gaps = _by_gaps(key, select(few, n, const(0)), q)
    by_rejection = _by_rejection(key, select(few, const(1e4), n), select(few, const(0.5), q))
    drawn = lax.convert_element_type(lax.select(few, by_gaps, by_rejection), dtype)
    invalid = lax.bitwise_or(lax.bitwise_or(negative, undefined), no_n)
    drawn = select(invalid, np.array(np.nan, dtype), drawn)
    unbounded = lax.bitwise_and(endless, lax.bitwise_not(invalid))
    drawn = select(unbounded, np.array(np.inf, dtype), drawn)
    direct = lax.bitwise_or(lax.bitwise_or(rare, no_n), lax.bitwise_or(undefined, endless))
    return lax.select(direct, drawn, lax.sub(lax.convert_element_type(n, dtype), drawn))


def _by_gaps(key: Any, n: Any, p: Any) -> Any:
    """How many successes come before the trials are used up, by geometric distances between them.

    Each loop below ends when all elements are done; JAX's bound on rounds, the largest float, is
    never reached.
    """
    shape, dtype = typeof(p).shape, typeof(p).dtype
    one, log_fail = np.array(1, dtype), lax.log1p(lax.neg(p))

    def step(state: Any) -> Any:
        k, used, key = state
        fresh, key = pair(key)
        k = lax.select(lax.le(used, n), lax.add(k, one), k)
        gap = lax.ceil(lax.div(lax.log(uniform_typed(fresh, shape, dtype)), log_fail))
        return k, lax.add(used, gap), key

    zero = lax.full_like(p, 0)
    return lax.sub(lax.while_loop(lambda s: _any(lax.le(s[1], n)), step, (zero, zero, key))[0], one)


def _by_rejection(key: Any, n: Any, p: Any) -> Any:
    """BTRS: a transformed uniform number is accepted by squeeze or by the density's logarithm."""
    shape, dtype = typeof(p).shape, typeof(p).dtype

    def const(value: float) -> np.ndarray:
        return np.array(value, dtype)

    half, one, two = const(0.5), const(1), const(2)
    fail = lax.sub(one, p)
    spread = lax.sqrt(lax.mul(lax.mul(n, p), fail))
    b = lax.add(const(1.15), lax.mul(const(2.53), spread))
    a = lax.add(lax.add(const(-0.0873), lax.mul(const(0.0248), b)), lax.mul(const(0.01), p))
    center = lax.add(lax.mul(n, p), half)
    v_r = lax.sub(const(0.92), lax.div(const(4.2), b))
    odds = lax.div(p, fail)
    alpha = lax.mul(lax.add(const(2.83), lax.div(const(5.1), b)), spread)
    mode = lax.floor(lax.mul(lax.add(n, one), p))

    def step(state: Any) -> Any:
        found, accepted, key = state
        key, u_key, v_key = several(key, 3)
        u = lax.sub(uniform_typed(u_key, shape, dtype), half)
        v = uniform_typed(v_key, shape, dtype)
        room = lax.sub(half, lax.abs(u))
        surely = lax.bitwise_and(lax.ge(room, const(0.07)), lax.le(v, v_r))
        slope = lax.add(lax.div(lax.mul(two, a), room), b)
        k = lax.floor(lax.add(lax.mul(slope, u), center))
        outside = lax.bitwise_or(lax.lt(k, const(0)), lax.gt(k, n))
        height = lax.add(lax.div(a, lax.mul(room, room)), b)
        v = lax.log(lax.div(lax.mul(v, alpha), height))
        fits = lax.bitwise_and(lax.bitwise_not(outside), lax.le(v, _bound(n, odds, mode, k)))
        accept = lax.bitwise_or(surely, fits)
        return lax.select(accept, k, found), lax.bitwise_or(accepted, accept), key

    start = (lax.full_like(p, -1), lax.full_like(p, False, dtypes.bool_), key)
    return lax.while_loop(lambda s: _any(lax.bitwise_not(s[1])), step, start)[0]


def _bound(n: Any, odds: Any, mode: Any, k: Any) -> Any:
    """log of the probability of `k` over that of the most probable count."""
    one, half = np.array(1, typeof(k).dtype), np.array(0.5, typeof(k).dtype)
    above_mode, above_k = (lax.add(lax.sub(n, v), one) for v in (mode, k))
    ratio = lax.div(lax.add(mode, one), lax.mul(odds, above_mode))
    total = lax.mul(lax.add(mode, half), lax.log(ratio))
    shrink = lax.log(lax.div(above_mode, above_k))
    total = lax.add(total, lax.mul(lax.add(n, one), shrink))
    ratio = lax.div(lax.mul(odds, above_k), lax.add(k, one))
    total = lax.add(total, lax.mul(lax.add(k, half), lax.log(ratio)))
    gained = lax.add(lax.add(total, _tail(mode)), _tail(lax.sub(n, mode)))
    return lax.sub(lax.sub(gained, _tail(k)), _tail(lax.sub(n, k)))


def _tail(k: Any) -> Any:
    """log(k!) less Stirling's formula for it."""
    dtype = typeof(k).dtype

    def const(value: float) -> np.ndarray:
        return np.array(value, dtype)

    small = lax.le(k, const(9))
    k = lax.clamp(const(0), k, const(9))
    next_one = lax.add(k, const(1))
    squared = lax.mul(next_one, next_one)
    series = lax.sub(const(1 / 360), lax.div(const(1 / 1260), squared))
    series = lax.sub(const(1 / 12), lax.div(series, squared))
    exact = take(np.array(_TAILS, dtype), lax.convert_element_type(k, dtypes.int32))
    return lax.select(small, exact, lax.div(series, next_one))


# ---- multinomial -------------------------------------------------------------------------------


def multinomial(
    key: Any, n: Any, p: Any, *, shape: Any = None, dtype: Any = None, unroll: int | bool = 1
) -> Array:
    """Draw how often each category comes in `n` draws, with probabilities `p` along the last dim.

    `shape` is the result's, by default that of `p`; `n` and `p` broadcast to it. `dtype` is a float
    dtype, by default float32. `unroll` is accepted for JAX's sake. Raises `DtypeError` for another
    dtype, and `ArgumentError` if a parameter is no array or `key` is no single key.

    >>> counts = spmd.random.multinomial(spmd.random.key(0), 10, np.array([0.2, 0.3, 0.5]))
    >>> float(counts.sum())
    10.0
    """
    check_arraylike("multinomial", n, p)
    found = float_dtype(dtype, "multinomial")
    n, p = promote_dtypes_inexact(plain(n), plain(p))
    whole = typeof(p).shape if shape is None else canonical_shape(shape, "multinomial")
    own = typeof(p).dtype
    n, p = (lax.convert_element_type(v, own) for v in (n, p))
    n, p = broadcast_to(n, whole[:-1]), moveaxis(broadcast_to(p, whole), -1, 0)
    rest = lax.cumsum(p, 0, reverse=True)
    # Each category takes its share of the rest that those before it leave.
    shares = lax.div(p, select(lax.eq(rest, np.array(0, own)), np.array(1, own), rest))

    def step(left: Any, given: Any) -> Any:
        share, key = given
        count = binomial(key, left, clip(share, 0, 1), dtype=own)
        return lax.sub(left, count), count

    keys = split_typed(single(key, "multinomial"), (whole[-1],))
    counts = lax.scan(step, n, (shares, keys), unroll=unroll)[1]
    return lax.convert_element_type(moveaxis(counts, 0, -1), found)
