"""The generators: what each makes of a key, as functions of the words of one key.

Block ciphers (threefry2x32 and 4x32, philox2x32 and 4x32) encrypt counters: `split` is "encrypt
0, 1, 2, ...", `fold_in` is "encrypt this number". "rbg" and "unsafe_rbg" draw with
`lax.rng_bit_generator`. The default, threefry2x32, is faster by its own way (`keys.py`), and has
its functions here too. Users add generators with `define_prng_impl`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.errors import ArgumentError, DtypeError
from spmd.base.key_dtypes import KeyDType, key_dtype, register_key_dtype, visible
from spmd.base.record import record
from spmd.core.aval import typeof
from spmd.lax.integer import mulhi
from spmd.lax.keys.rng import rng_bit_generator
from spmd.lax.keys.threefry import threefry2x32
from spmd.lax.keys.words import random_unwrap, random_wrap

_WORD = np.dtype(np.uint32)
Shape = tuple[int, ...]


@record
class Generator:
    """A generator: the dtype of its keys, and four functions of the words of one key.

    `seed(number)` makes words, `split(words, shape)` the words of many keys,
    `random_bits(words, width, shape)` unsigned integers, `fold_in(words, number)` words.
    """

    name: str
    kind: KeyDType
    seed: Callable[[Any], Any]
    split: Callable[[Any, Shape], Any]
    random_bits: Callable[[Any, int, Shape], Any]
    fold_in: Callable[[Any, Any], Any]

    def __repr__(self) -> str:
        return f"PRNGSpec({self.name!r})"

    def __str__(self) -> str:
        return self.kind.name[4:-1]


# By name, and by the identity of the keys' dtype.
_BY_NAME: dict[str, Generator] = {}
_BY_IDENT: dict[str, Generator] = {}


def _register(name: str, kind: KeyDType, *functions: Callable[..., Any]) -> None:
    _BY_NAME[name] = _BY_IDENT[kind.ident] = Generator(name, kind, *functions)


def define_prng_impl(
    *,
    key_shape: Sequence[int],
    seed: Callable[[Any], Any],
    split: Callable[[Any, Shape], Any],
    random_bits: Callable[[Any, int, Shape], Any],
    fold_in: Callable[[Any, Any], Any],
    name: str = "<unnamed>",
    tag: str = "?",
) -> Generator:
    """Define a generator of one's own; the result may be given as `impl` to `random.key`.

    A key is an array of uint32 of the given `key_shape`. Without a batch dim, `seed(number)` makes
    one of an integer, `split(key, shape)` an array of `(*shape, *key_shape)`,
    `random_bits(key, width, shape)` unsigned integers of 8, 16, 32 or 64 bits, and
    `fold_in(key, number)` another key. `name` and `tag` are what is printed. The dtype of its keys
    is another one than that of any other generator.

    >>> def seed(number):
    ...     return snp.stack([snp.uint32(number)])
    >>> def bits(key, width, shape):
    ...     return snp.broadcast_to(key[0], shape).astype(f"uint{width}")
    >>> spec = spmd.random.define_prng_impl(
    ...     key_shape=(1,), seed=seed, random_bits=bits, tag="same",
    ...     split=lambda key, shape: snp.broadcast_to(key, (*shape, 1)),
    ...     fold_in=lambda key, number: key + snp.uint32(number))
    >>> spmd.random.bits(spmd.random.key(3, impl=spec), (2,))
    Array([3, 3], dtype=uint32)
    """
    kind = register_key_dtype(tag, tuple(key_shape))
    made = Generator(name, kind, seed, split, random_bits, fold_in)
    _BY_IDENT[kind.ident] = made
    return made


def find(caller: str, spec: Any) -> Generator:
    """The generator that a user names: by name, by dtype, or itself; None for the default."""
    spec = config.default_prng_impl if spec is None else spec
    if isinstance(spec, Generator):
        return spec
    if isinstance(spec, (KeyDType, np.dtype)) and dtypes.is_key(spec):
        return of_dtype(spec)
    if isinstance(spec, str):
        if spec in _BY_NAME:
            return _BY_NAME[spec]
        raise ArgumentError(
            f"{caller}: there is no generator {spec!r}; the names are {', '.join(_BY_NAME)}"
        )
    raise DtypeError(f"{caller}: a generator is named by text or a key's dtype, got {spec!r}")


def of_dtype(dtype: Any) -> Generator:
    """The generator of keys of this dtype."""
    return _BY_IDENT[visible(np.dtype(dtype)).ident]


def is_named(generator: Generator) -> bool:
    """Whether the generator is found by its name."""
    return _BY_NAME.get(generator.name) is generator


# ---- words and counters ------------------------------------------------------------------------


def seed_words(seed: Any) -> Any:
    """The two words of a scalar integer, the high one first."""
    dtype = typeof(seed).dtype
    high: Any = np.zeros((1,), np.uint32)
    if dtype.itemsize == 8:
        shifted = lax.shift_right_logical(seed, np.array(32, dtype))
        high = lax.reshape(lax.convert_element_type(shifted, _WORD), (1,))
    low = lax.reshape(lax.convert_element_type(seed, _WORD), (1,))
    return lax.concatenate([high, low], 0)


def _word(words: Any, k: int) -> Any:
    return lax.index_in_dim(words, k, 0, keepdims=False)


def _words(words: Any) -> list[Any]:
    return [_word(words, k) for k in range(typeof(words).shape[0])]


def _counters(shape: Shape) -> Any:
    """0, 1, 2, ... in row-major order: the low words; the high ones are zero."""
    count = math.prod(shape)
    if count > 2**32:
        raise ArgumentError(f"random: {count} numbers of one key are too many; split it")
    return lax.reshape(lax.iota(_WORD, count), shape)


def _xor(parts: Sequence[Any]) -> Any:
    out = parts[0]
    for part in parts[1:]:
        out = lax.bitwise_xor(out, part)
    return out


def _joined(high: Any, low: Any, dtype: np.dtype) -> Any:
    """Numbers of 64 bits from two words."""
    high, low = (lax.convert_element_type(x, dtype) for x in (high, low))
    return lax.bitwise_or(lax.shift_left(high, np.array(32, dtype)), low)


# ---- ciphers of words --------------------------------------------------------------------------

Cipher = Callable[[Sequence[Any], Sequence[Any]], list[Any]]

_ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))


def _threefry4x32(key: Sequence[Any], counter: Sequence[Any]) -> list[Any]:
    """Twenty rounds; each mixes two pairs of words, and every fourth adds the key."""
    keys = [*key, lax.bitwise_xor(_xor(key), np.uint32(0x1BD11BDA))]
    x = [lax.add(c, k) for c, k in zip(counter, key, strict=True)]
    for step in range(20):
        pairs = ((0, 1), (2, 3)) if step % 2 == 0 else ((0, 3), (2, 1))
        for (a, b), by in zip(pairs, _ROTATIONS[step % 8], strict=True):
            x[a] = lax.add(x[a], x[b])
            left = lax.shift_left(x[b], np.uint32(by))
            right = lax.shift_right_logical(x[b], np.uint32(32 - by))
            x[b] = lax.bitwise_xor(x[a], lax.bitwise_or(left, right))
        if step % 4 == 3:
            group = step // 4 + 1
            x = [lax.add(v, keys[(group + k) % 5]) for k, v in enumerate(x)]
            x[3] = lax.add(x[3], np.uint32(group))
    return x


def _philox4x32(key: Sequence[Any], counter: Sequence[Any]) -> list[Any]:
    """Ten rounds of two products each; the key grows by constants from round to round."""
    k0, k1 = key
    x0, x1, x2, x3 = counter
    m0, m1 = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
    for step in range(10):
        if step:
            k0, k1 = lax.add(k0, np.uint32(0x9E3779B9)), lax.add(k1, np.uint32(0xBB67AE85))
        low, high = lax.mul(x0, m0), mulhi(x0, m0)
        x0, x1 = _xor([mulhi(x2, m1), x1, k0]), lax.mul(x2, m1)
        x2, x3 = _xor([high, x3, k1]), low
    return [x0, x1, x2, x3]


def _philox2x32(key: Sequence[Any], counter: Sequence[Any]) -> list[Any]:
    """Ten rounds of one product each."""
    (k0,), (x0, x1), m = key, counter, np.uint32(0xD256D193)
    for step in range(10):
        k0 = lax.add(k0, np.uint32(0x9E3779B9)) if step else k0
        x0, x1 = _xor([mulhi(x0, m), x1, k0]), lax.mul(x0, m)
    return [x0, x1]


def _of_cipher(
    cipher: Cipher,
    size: int,
    width: int,
    start: Callable[[Any, Any], Sequence[Any]],
    halves: Callable[[Sequence[Any]], tuple[Any, Any]],
) -> tuple[Callable[..., Any], ...]:
    """The functions of a cipher with keys of `size` words and counters of `width`.

    `start(high, low)` encrypts a seed; `halves(out)` are the words of a number of 64 bits.
    """
    zero = np.uint32(0)

    def words(out: Sequence[Any]) -> Any:
        ndim = typeof(out[0]).ndim
        return lax.concatenate([lax.expand_dims(x, (ndim,)) for x in out[:size]], ndim)

    def spread(x: Any, shape: Shape) -> Any:
        return lax.broadcast_in_dim(x, shape, range(typeof(x).ndim))

    def numbered(key: Any, shape: Shape, last: bool) -> list[Any]:
        """The encrypted counters, in the last two words or in the first two."""
        counts, none = _counters(shape), spread(zero, shape)
        ahead = [none] * (width - 2)
        counter = [*ahead, none, counts] if last else [none, counts, *ahead]
        return cipher(_words(key), counter)

    def seed(number: Any) -> Any:
        pair = seed_words(number)
        return words(start(_word(pair, 0), _word(pair, 1)))

    def split(key: Any, shape: Shape) -> Any:
        return words(numbered(key, shape, last=True))

    def fold_in(key: Any, number: Any) -> Any:
        data = lax.convert_element_type(number, _WORD)
        return words(cipher(_words(key), [*[zero] * (width - 1), data]))

    def random_bits(key: Any, bits: int, shape: Shape) -> Any:
        out, dtype = numbered(key, shape, last=False), np.dtype(f"uint{bits}")
        if bits == 64:
            return _joined(*halves(out), dtype)
        return lax.convert_element_type(_xor(out), dtype)

    return seed, split, random_bits, fold_in


_ZERO = np.uint32(0)


_register(
    "threefry4x32",
    register_key_dtype("fry4", (4,)),
    *_of_cipher(
        _threefry4x32,
        4,
        4,
        lambda high, low: _threefry4x32([high, low, _ZERO, _ZERO], [_ZERO] * 4),
        lambda out: (_xor([out[0], out[2]]), _xor([out[1], out[3]])),
    ),
)
_register(
    "philox2x32",
    register_key_dtype("phx2", (1,)),
    *_of_cipher(
        _philox2x32,
        1,
        2,
        lambda high, low: _philox2x32([_ZERO], [high, low]),
        lambda out: (out[0], out[1]),
    ),
)
_register(
    "philox4x32",
    register_key_dtype("phx4", (2,)),
    *_of_cipher(
        _philox4x32,
        2,
        4,
        lambda high, low: _philox4x32([_ZERO, _ZERO], [high, low, _ZERO, _ZERO]),
        lambda out: (out[0], out[1]),
    ),
)


# ---- threefry2x32 ------------------------------------------------------------------------------


def _threefry(words: Any, high: Any, low: Any) -> Any:
    """Encrypted counters: words with one more dim, of size 2."""
    return random_unwrap(threefry2x32(random_wrap(words), high, low))


def _threefry_of_list(words: Any, count: int) -> Any:
    """The encryption of 0, 1, ..., count - 1, of which the two halves make pairs."""
    half = -(-count // 2)
    low = lax.iota(_WORD, half)
    high = lax.add(low, np.uint32(half))
    if count % 2:  # one zero fills up the second half
        high = lax.select(lax.lt(high, np.uint32(count)), high, lax.full_like(high, 0))
    out = _threefry(words, low, high)
    return lax.slice_in_dim(lax.reshape(lax.transpose(out, (1, 0)), (2 * half,)), 0, count)


def _threefry_split(words: Any, shape: Shape) -> Any:
    if config.threefry_partitionable:
        return _threefry(words, np.uint32(0), _counters(shape))
    return lax.reshape(_threefry_of_list(words, 2 * math.prod(shape)), (*shape, 2))


def _threefry_bits(words: Any, width: int, shape: Shape) -> Any:
    dtype, size = np.dtype(f"uint{width}"), math.prod(shape)
    if config.threefry_partitionable:
        out = _threefry(words, np.uint32(0), _counters(shape))
        ndim = len(shape)
        first, second = (lax.index_in_dim(out, k, ndim, keepdims=False) for k in (0, 1))
        if width == 64:
            return _joined(first, second, dtype)
        return lax.convert_element_type(lax.bitwise_xor(first, second), dtype)
    count = -(-width * size // 32)
    bits = _threefry_of_list(words, count)
    if width == 64:
        half = count // 2
        high, low = lax.slice_in_dim(bits, 0, half), lax.slice_in_dim(bits, half, count)
        bits = _joined(high, low, dtype)
    elif width < 32:
        # Each word gives 4 or 2 numbers, the lowest bits first.
        parts = 32 // width
        by = lax.mul(lax.broadcasted_iota(_WORD, (count, parts), 1), np.uint32(width))
        spread = lax.broadcast_in_dim(bits, (count, parts), (0,))
        mask = np.uint32(2**width - 1)
        bits = lax.bitwise_and(lax.shift_right_logical(spread, by), mask)
        bits = lax.convert_element_type(lax.reshape(bits, (count * parts,)), dtype)
        bits = lax.slice_in_dim(bits, 0, size)
    return lax.reshape(bits, shape)


def _threefry_fold_in(words: Any, number: Any) -> Any:
    return _threefry(words, np.uint32(0), lax.convert_element_type(number, _WORD))


_register(
    "threefry2x32",
    visible(key_dtype),
    seed_words,
    _threefry_split,
    _threefry_bits,
    _threefry_fold_in,
)


# ---- rbg and unsafe_rbg ------------------------------------------------------------------------


def _rbg_seed(number: Any) -> Any:
    half = seed_words(number)
    return lax.concatenate([half, half], 0)


def _both(words: Any, f: Callable[[Any], Any]) -> Any:
    """A function of the two halves of a key, and the results side by side."""
    parts = [f(lax.slice_in_dim(words, k, k + 2)) for k in (0, 2)]
    return lax.concatenate(parts, typeof(parts[0]).ndim - 1)


def _rbg_split(words: Any, shape: Shape) -> Any:
    return _both(words, lambda half: _threefry_split(half, shape))


def _rbg_fold_in(words: Any, number: Any) -> Any:
    return _both(words, lambda half: _threefry_fold_in(half, number))


def _rbg_bits(words: Any, width: int, shape: Shape) -> Any:
    return rng_bit_generator(words, shape, np.dtype(f"uint{width}"))[1]


def _unsafe_rbg_split(words: Any, shape: Shape) -> Any:
    # Ten rows for a key: the others are thrown away.
    rows = rng_bit_generator(words, (10 * math.prod(shape), 4))[1]
    return lax.reshape(lax.slice_in_dim(rows, 0, None, 10), (*shape, 4))


def _unsafe_rbg_fold_in(words: Any, number: Any) -> Any:
    seeded = _rbg_seed(lax.convert_element_type(number, _WORD))
    rows = rng_bit_generator(seeded, (10, 4))[1]
    return lax.bitwise_xor(words, lax.index_in_dim(rows, 9, 0, keepdims=False))


_register("rbg", register_key_dtype("rbg", (4,)), _rbg_seed, _rbg_split, _rbg_bits, _rbg_fold_in)
_register(
    "unsafe_rbg",
    register_key_dtype("urbg", (4,)),
    _rbg_seed,
    _unsafe_rbg_split,
    _rbg_bits,
    _unsafe_rbg_fold_in,
)
