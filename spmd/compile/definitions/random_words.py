"""`rng_bit_generator`: the ciphers of XLA, on vectors of counters.

Words of 32 bits are held in 64, as their products have so many.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd.compile.definitions.stacks import full
from spmd.compile.definitions.table import defines
from spmd.core.aval import typeof
from spmd.core.structural import broadcast_in_dim, reshape
from spmd.lax.arithmetic import add, mul
from spmd.lax.array import broadcasted_iota, stack
from spmd.lax.convert import convert_element_type
from spmd.lax.keys.rng import RandomAlgorithm, halved
from spmd.lax.keys.threefry import KEY_SCHEDULE, PARITY, ROTATIONS
from spmd.lax.logic import (
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    lt,
    select,
    shift_left,
    shift_right_logical,
)
from spmd.lax.slicing import index_in_dim
from spmd.lax.slicing import slice as slice_of

_LONG = np.dtype(np.uint64)
_WORD = np.dtype(np.uint32)


@defines("rng_bit_generator")
def rng_bit_generator(
    state: Any, *, shape: tuple[int, ...], dtype: np.dtype, algorithm: RandomAlgorithm
) -> list[Any]:
    """The state after the draw, and the bits."""
    key, counter = _longs(state)
    if algorithm == RandomAlgorithm.RNG_THREE_FRY:
        bits, used = _threefry_bits(key, counter, shape, dtype)
    else:
        bits, used = _philox_bits(key, counter, shape, dtype)
    after = add(counter, _LONG.type(used))
    if typeof(state).dtype == _LONG:
        return [stack([key, after]), bits]
    words = [_word(half) for x in (key, after) for half in _halves(x)]
    return [stack(words), bits]


def _longs(state: Any) -> tuple[Any, Any]:
    """The key and the counter, 64 bits each."""
    words = [index_in_dim(state, k, 0, keepdims=False) for k in range(typeof(state).shape[0])]
    if typeof(state).dtype == _LONG:
        return words[0], words[1]
    low_key, high_key, low, high = (convert_element_type(word, _LONG) for word in words)
    return _joined(low_key, high_key), _joined(low, high)


def _halves(x: Any) -> tuple[Any, Any]:
    """The low and the high word of 64-bit numbers, as 64-bit numbers."""
    return bitwise_and(x, full(0xFFFFFFFF, x)), shift_right_logical(x, full(32, x))


def _joined(low: Any, high: Any) -> Any:
    return bitwise_or(low, shift_left(high, full(32, high)))


def _word(x: Any) -> Any:
    return convert_element_type(x, _WORD)


def _long(x: Any) -> Any:
    return convert_element_type(x, _LONG)


def _philox_bits(
    key: Any, counter: Any, shape: tuple[int, ...], dtype: np.dtype
) -> tuple[Any, int]:
    count = math.prod(shape)
    words = count * (2 if dtype == _LONG else 1)
    blocks = -(-words // 4)
    low = add(counter, broadcasted_iota(_LONG, (blocks,), 0))
    keys = broadcast_in_dim(key, (blocks,), ())
    high = select(lt(low, counter), add(keys, full(1, keys)), keys)
    made = _philox((*_halves(low), *_halves(high)), _halves(keys))
    if dtype == _LONG:
        flat = stack([_joined(*made[:2]), _joined(*made[2:])], 1)
    else:
        flat = stack(made, 1)
    flat = slice_of(reshape(flat, (typeof(flat).size,)), (0,), (count,))
    return convert_element_type(reshape(flat, shape), dtype), blocks


def _philox(counter: Any, key: Any) -> list[Any]:
    """Ten rounds of philox4x32."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(10):
        low, high = _halves(mul(x0, full(0xD2511F53, x0)))
        other_low, other_high = _halves(mul(x2, full(0xCD9E8D57, x2)))
        x0, x1 = bitwise_xor(bitwise_xor(other_high, x1), k0), other_low
        x2, x3 = bitwise_xor(bitwise_xor(high, x3), k1), low
        k0, _ = _halves(add(k0, full(0x9E3779B9, k0)))
        k1, _ = _halves(add(k1, full(0xBB67AE85, k1)))
    return [x0, x1, x2, x3]


def _threefry_bits(
    key: Any, counter: Any, shape: tuple[int, ...], dtype: np.dtype
) -> tuple[Any, int]:
    whole, at = (shape, None) if dtype == _LONG else halved(shape)
    count = math.prod(whole)
    # XLA numbers the elements with the last dims fastest.
    counters = reshape(add(counter, broadcasted_iota(_LONG, (count,), 0)), whole)
    first, second = map(_long, _encrypt(tuple(map(_word, _halves(key))), counters))
    if at is None:
        return _joined(first, second), count
    if not shape:
        return convert_element_type(reshape(first, ()), dtype), count
    made = stack([first, second], at + 1)
    made = reshape(made, (*whole[:at], 2 * whole[at], *whole[at + 1 :]))
    made = slice_of(made, (0,) * len(shape), shape)
    return convert_element_type(made, dtype), count


def _encrypt(key: tuple[Any, Any], counters: Any) -> tuple[Any, Any]:
    """Twenty rounds of threefry on the words of counters."""
    k0, k1 = (broadcast_in_dim(k, typeof(counters).shape, ()) for k in key)
    keys = k0, k1, bitwise_xor(bitwise_xor(k0, k1), full(PARITY, k0))
    x0, x1 = (add(_word(x), k) for x, k in zip(_halves(counters), keys[:2], strict=True))
    for group, (i, j) in enumerate(KEY_SCHEDULE):
        for by in ROTATIONS[group % 2]:
            x0 = add(x0, x1)
            left, right = shift_left(x1, full(by, x1)), shift_right_logical(x1, full(32 - by, x1))
            x1 = bitwise_xor(x0, bitwise_or(left, right))
        x0, x1 = add(x0, keys[i]), add(add(x1, keys[j]), full(group + 1, x1))
    return x0, x1
