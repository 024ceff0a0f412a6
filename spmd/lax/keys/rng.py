"""`rng_bit_generator` and `rng_uniform`: the bits that XLA's operation gives on CPUs.

The state is a key of 64 bits and a counter of 64 bits, four uint32 words. Philox encrypts blocks of
four words, with the key as the high half of its counter too; threefry encrypts pairs of words, and
halves the result along a dim of even size. Vectorised, the state of the first example gives the
bits of all of them, as in XLA: `spmd.random` with the generators "rbg" and "unsafe_rbg" says so.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.base.key_dtypes import visible
from spmd.core.aval import ShapedArray, ShapeDtypeStruct, typeof
from spmd.core.explicit import lays_out_result
from spmd.core.primitive import Primitive, Refused, dims
from spmd.core.structural import move_dim
from spmd.lax.array import expand_dims, static_shape
from spmd.lax.callback import io_callback
from spmd.lax.concatenate import concatenate
from spmd.lax.families import fail
from spmd.lax.keys.threefry import encrypt
from spmd.lax.keys.words import random_unwrap, random_wrap
from spmd.lax.slicing import index_in_dim, slice_in_dim

if TYPE_CHECKING:
    from spmd.sharding.array import Array

_WORD = np.dtype(np.uint32)
_LONG = np.dtype(np.uint64)
_DRAWN = frozenset(np.dtype(t) for t in (np.uint8, np.uint16, np.uint32, np.uint64))


class RandomAlgorithm(enum.IntEnum):
    """The algorithms of `rng_bit_generator`: the default is Philox."""

    RNG_DEFAULT = 0
    RNG_THREE_FRY = 1
    RNG_PHILOX = 2

    def __str__(self) -> str:
        return self.name


# ---- the ciphers, on the host ------------------------------------------------------------------


def philox(counter: Sequence[Any], key: Sequence[Any]) -> list[Any]:
    """Ten rounds of philox4x32 on NumPy's uint64 arrays that hold 32-bit words."""
    low, shift = _LONG.type(0xFFFFFFFF), _LONG.type(32)
    x0, x1, x2, x3 = counter
    k0, k1 = key
    with np.errstate(over="ignore"):
        for _ in range(10):
            first, second = x0 * _LONG.type(0xD2511F53), x2 * _LONG.type(0xCD9E8D57)
            x0, x1 = (second >> shift) ^ x1 ^ k0, second & low
            x2, x3 = (first >> shift) ^ x3 ^ k1, first & low
            k0, k1 = (k0 + _LONG.type(0x9E3779B9)) & low, (k1 + _LONG.type(0xBB67AE85)) & low
    return [x0, x1, x2, x3]


def _halves(x: Any) -> tuple[Any, Any]:
    """The low and the high word of 64-bit numbers, as 64-bit numbers."""
    return x & _LONG.type(0xFFFFFFFF), x >> _LONG.type(32)


def _philox_bits(key: Any, counter: Any, count: int, dtype: np.dtype) -> tuple[Any, int]:
    """`count` numbers, and how many counters were used."""
    words = count * (2 if dtype == _LONG else 1)
    blocks = -(-words // 4)
    with np.errstate(over="ignore"):
        low = counter + np.arange(blocks, dtype=_LONG)
        high = np.where(low < counter, key + _LONG.type(1), key)
    out = np.stack(philox((*_halves(low), *_halves(high)), _halves(key)), axis=1)
    flat = np.ascontiguousarray(out.astype(_WORD)).reshape(-1)
    flat = flat.view(_LONG) if dtype == _LONG else flat
    return flat[:count].astype(dtype), blocks


def _threefry_bits(key: Any, counter: Any, shape: Any, dtype: np.dtype) -> tuple[Any, int]:
    k0, k1 = (part.astype(_WORD) for part in _halves(key))
    whole, at = (shape, None) if dtype == _LONG else halved(shape)
    count = math.prod(whole)
    # XLA numbers the elements with the last dims fastest.
    with np.errstate(over="ignore"):
        counters = (counter + np.arange(count, dtype=_LONG)).reshape(whole)
    low, high = (part.astype(_WORD) for part in _halves(counters))
    first, second = encrypt(k0, k1, low, high)
    if at is None:
        return first.astype(_LONG) | second.astype(_LONG) << _LONG.type(32), count
    if not shape:
        return first.reshape(()).astype(dtype), count
    out = np.stack([first, second], axis=at + 1)
    out = out.reshape(*whole[:at], 2 * whole[at], *whole[at + 1 :])
    return out[tuple(slice(n) for n in shape)].astype(dtype), count


def halved(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The shape with one dim halved: the first of even size, or else the largest; and which."""
    if not shape:
        return (1,), 0
    even = [d for d, n in enumerate(shape) if n % 2 == 0]
    at = even[0] if even else max(range(len(shape)), key=lambda d: (shape[d], -d))
    return (*shape[:at], -(-shape[at] // 2), *shape[at + 1 :]), at


# ---- rng_bit_generator -------------------------------------------------------------------------


def _abstract(
    key: ShapedArray, *, shape: tuple[int, ...], dtype: np.dtype, algorithm: RandomAlgorithm
) -> list[ShapedArray]:
    if (key.dtype, key.shape) not in ((_WORD, (4,)), (_LONG, (2,))):
        fail(ShapeError, f"rng_bit_generator: the key must be uint32[4] or uint64[2], got {key}")
    return [ShapedArray(key.shape, key.dtype), ShapedArray(shape, dtype)]


def _impl(
    xp: Any, state: Any, *, shape: tuple[int, ...], dtype: np.dtype, algorithm: RandomAlgorithm
) -> list[Any]:
    longs = np.ascontiguousarray(state).view(_LONG)
    key, counter = longs[0], longs[1]
    if algorithm == RandomAlgorithm.RNG_THREE_FRY:
        bits, used = _threefry_bits(key, counter, shape, dtype)
    else:
        bits, used = _philox_bits(key, counter, math.prod(shape), dtype)
    with np.errstate(over="ignore"):
        after = np.array([key, counter + _LONG.type(used)], _LONG)
    return [after.view(state.dtype), np.ascontiguousarray(bits).reshape(shape)]


def _batch(axis: Any, operands: Any, at: Any, *, shape: Any, **params: Any) -> Any:
    keys = move_dim(operands[0], at[0], 0)
    first = index_in_dim(keys, 0, 0, keepdims=False)
    after, bits = rng_bit_generator_p.bind(first, shape=(axis.size, *shape), **params)
    rest = slice_in_dim(keys, 1, None)
    return [concatenate([expand_dims(after, (0,)), rest], 0), bits], [0, 0]


def _dims(key: ShapedArray, *, shape: tuple[int, ...], **_: Any) -> Any:
    ends = [range(1), range(1, 1 + len(shape))]
    return dims([range(1)], ends, whole=range(1 + len(shape)))


rng_bit_generator_p = Primitive(
    "rng_bit_generator",
    abstract=_abstract,
    impl=_impl,
    jvp=Refused("random bits and keys are integers, which have no derivative"),
    transpose=Refused("random bits and keys are not linear in anything"),
    batch=_batch,
    dims=_dims,
    multiple=True,
)


@lays_out_result
def rng_bit_generator(
    key: Any,
    shape: Sequence[int],
    dtype: Any = np.uint32,
    algorithm: RandomAlgorithm = RandomAlgorithm.RNG_DEFAULT,
    *,
    out_sharding: Any = None,
) -> tuple[Array, Array]:
    """Draw random bits by an algorithm of XLA's; return the key after that, and the bits.

    `key` holds 128 bits, as uint32 of shape (4,), uint64 of shape (2,), or a typed key of "rbg".
    The bits have the given `shape` and the unsigned `dtype`. `algorithm` is Philox, the default,
    or threefry. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the
    bits. Most programs should use `spmd.random`. Vectorised over
    keys, the first one gives the bits for all. Raises `DtypeError` for another dtype, and
    `ShapeError` for a key of another shape.

    >>> _, bits = lax.rng_bit_generator(np.array([1, 2, 3, 4], np.uint32), (2,))
    >>> bits
    Array([ 512747620, 1298009047], dtype=uint32)
    """
    found = dtypes.canonical(dtype)
    if found not in _DRAWN:
        fail(DtypeError, f"rng_bit_generator: dtype must be uint8 to uint64, got {found}")
    whole = static_shape("rng_bit_generator", shape)
    aval = typeof(key)
    words = random_unwrap(key) if dtypes.is_key(aval.dtype) else key
    after, bits = rng_bit_generator_p.bind(
        words, shape=whole, dtype=found, algorithm=RandomAlgorithm(algorithm)
    )
    if words is not key:
        after = random_wrap(after, visible(aval.dtype).ident)
    return after, bits


# ---- rng_uniform -------------------------------------------------------------------------------


def rng_uniform(a: Any, b: Any, shape: Sequence[int]) -> Array:
    """Draw numbers of `a` to `b` from a generator that has a state: each call gives others.

    `a` and `b` are scalars of one dtype, integers or floats, which is the result's; `b` itself is
    not drawn. The result has the given `shape`. Most programs should use `spmd.random`, whose
    results depend on a key. Raises `ArgumentError` if the dtypes differ, and `ShapeError` if
    `a` or `b` is no scalar.

    >>> x = lax.rng_uniform(np.float32(2), np.float32(3), (100,))
    >>> bool((2 <= x).all() and (x < 3).all())
    True
    """
    low, high = typeof(a), typeof(b)
    if low.dtype != high.dtype:
        fail(ArgumentError, f"rng_uniform: a and b must have one dtype, got {low} and {high}")
    if low.shape or high.shape:
        fail(ShapeError, f"rng_uniform: a and b must be scalars, got {low} and {high}")
    dtype, whole = low.dtype, static_shape("rng_uniform", shape)
    if not (dtypes.is_integer(dtype) or dtypes.is_float(dtype)):
        fail(DtypeError, f"rng_uniform: draws integers and floats, got {low}")

    def draw(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        if dtypes.is_integer(dtype):
            return np.asarray(_stateful().integers(int(start), int(stop), whole), dtype)
        found = np.asarray(_stateful().uniform(float(start), float(stop), whole), dtype)
        return np.where(found < stop, found, start)

    return io_callback(draw, ShapeDtypeStruct(whole, dtype), a, b)


@cache
def _stateful() -> np.random.Generator:
    """The generator of `rng_uniform`; NumPy's module takes 12 ms to import, so not before."""
    return np.random.default_rng(0)
