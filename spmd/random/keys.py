"""Keys: `key`, `split`, `fold_in`, `bits`. Every sampler begins with one key and uses it once.

Functions take typed keys (dtype `key<fry>`) and, as before JAX had those, raw uint32 arrays of the
words of the default generator; returned keys are of the same sort.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.errors import (
    ArgumentError,
    DtypeArgumentError,
    DtypeError,
    IntegerRangeError,
    ShapeError,
    TypePromotionError,
)
from spmd.base.lazy_import import Deferred
from spmd.base.source import current_source
from spmd.core.aval import is_arraylike, typeof
from spmd.core.explicit import lays_out_result
from spmd.lax.keys.threefry import key_bits, threefry2x32
from spmd.lax.keys.words import random_unwrap, random_wrap
from spmd.numpy.creation import canonical_shape
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import as_array, broadcast_shapes_of, plain, user_dtype
from spmd.random.generators import find, is_named, of_dtype

if TYPE_CHECKING:
    from spmd.sharding.array import Array

_WORD = np.dtype(np.uint32)
_markers: Any = Deferred("spmd.lax.keys.markers")

# ---- making keys -------------------------------------------------------------------------------


def key(seed: Any, *, impl: Any = None, dtype: Any = None) -> Array:
    """Make a typed key from an integer seed.

    `seed` is a scalar; without x64, only its low 32 bits count. The result is a scalar of dtype
    `key<fry>`. `dtype` (or `impl`, not both) names the generator: "threefry2x32", "threefry4x32",
    "philox2x32", "philox4x32", "rbg", "unsafe_rbg", the dtype of keys, or what `define_prng_impl`
    returned; by default `config.default_prng_impl`. Raises `ArgumentError` for another one or if
    `seed` is no number, `DtypeError` if it is no integer, and `ShapeError` if it is no scalar.

    >>> spmd.random.key(0)
    Array((), dtype=key<fry>) overlaying:
    [0 0]
    >>> spmd.random.key(0, impl="rbg").dtype
    key<rbg>
    """
    return _made("key", seed, _one_spec("key", impl, dtype))


def PRNGKey(seed: Any, *, impl: Any = None) -> Array:
    """Make a raw key, words of uint32, from an integer seed; prefer `key`.

    The result has shape (2,) for the default generator. It does not say what generator it is for:
    functions that take it use `config.default_prng_impl`. With `config.enable_custom_prng`, a typed
    key is made. `seed`, `impl` and the errors are those of `key`: `ArgumentError`, `DtypeError` and
    `ShapeError`.

    >>> spmd.random.PRNGKey(42)
    Array([ 0, 42], dtype=uint32)
    """
    made = _made("PRNGKey", seed, impl)
    return made if config.enable_custom_prng else random_unwrap(made)


def _one_spec(name: str, impl: Any, dtype: Any) -> Any:
    if impl is not None and dtype is not None:
        raise ArgumentError(f"{name}: impl and dtype both name the generator; give one of them")
    return dtype if impl is None else impl


def _made(name: str, seed: Any, spec: Any) -> Any:
    generator = find(name, spec)
    return new(random_wrap(generator.seed(_seed(name, seed)), generator.kind.ident))


def _seed(name: str, seed: Any) -> Any:
    """A seed as a scalar integer array."""
    if not is_arraylike(seed) or dtypes.is_key(typeof(seed).dtype):
        raise ArgumentError(f"{name}: the seed must be an integer, got {seed!r}")
    seed = plain(seed)
    offset = config.random_seed_offset
    if isinstance(seed, int):
        # As JAX: without 64-bit integers only the low word of a seed counts.
        whole = np.asarray(dtypes.exact_integer(seed, np.dtype(np.int64)))
        whole = np.add(whole, offset, dtype=np.int64) if offset else whole
        return as_array(whole.astype(dtypes.canonical(np.int64)))
    aval = typeof(seed)
    if aval.shape:
        raise ShapeError(
            f"{name}: the seed must be a scalar, got shape {aval.shape}; use vmap for many keys"
        )
    if not dtypes.is_integer(aval.dtype):
        raise DtypeError(f"{name}: the seed must be an integer, got {aval}")
    return lax.add(seed, np.asarray(offset).astype(aval.dtype)) if offset else seed


def key_data(keys: Any) -> Array:
    """Return the words of `keys`: uint32 with one more dim, of size 2 for the default generator.

    `keys` are typed keys of any shape, or words already. Raises `ArgumentError` for anything else.

    >>> spmd.random.key_data(spmd.random.key(42))
    Array([ 0, 42], dtype=uint32)
    """
    return random_unwrap(typed(keys, "key_data"))


def wrap_key_data(key_bits_array: Any, *, impl: Any = None, dtype: Any = None) -> Array:
    """Make typed keys of their words.

    `key_bits_array` has dtype uint32 and last dims of the shape of one key's words, which disappear
    from the shape. `dtype` or `impl` names the generator as for `key`. Raises `ArgumentError` if
    both are given or name no generator, and `DtypeError` for words of another shape or dtype.

    >>> spmd.random.wrap_key_data(np.array([0, 42], np.uint32)).shape
    ()
    """
    generator = find("wrap_key_data", _one_spec("wrap_key_data", impl, dtype))
    if not is_arraylike(key_bits_array) or not hasattr(key_bits_array, "dtype"):
        raise DtypeError(f"wrap_key_data: needs an array of uint32, got {key_bits_array!r}")
    return new(random_wrap(key_bits_array, generator.kind.ident))


def key_impl(keys: Any) -> Any:
    """Return the name of the generator that `keys` are for.

    `keys` may have any shape, and their dtype is that of typed keys or uint32. A generator of a
    user's has no name: the result is what `define_prng_impl` returned. Raises `ArgumentError` for
    anything else.

    >>> spmd.random.key_impl(spmd.random.key(0))
    'threefry2x32'
    """
    generator = of_dtype(typeof(typed(keys, "key_impl")).dtype)
    return generator.name if is_named(generator) else generator


def key_dtype(impl_spec: Any = None) -> Any:
    """Return the dtype of typed keys, of any shape.

    `impl_spec` names the generator as for `key`. Raises `ArgumentError` if there is no such.

    >>> spmd.random.key(0).dtype == spmd.random.key_dtype()
    True
    """
    return find("key_dtype", impl_spec).kind


def clone(key: Any) -> Array:
    """Return the same key once more, for tools that check that keys are used once.

    The shape and dtype of `key` stay.

    >>> k = spmd.random.key(0)
    >>> bool((spmd.random.key_data(spmd.random.clone(k)) == spmd.random.key_data(k)).all())
    True
    """
    return _like(key, _markers.clone(typed(key, "clone")))


# ---- key arguments of functions ----------------------------------------------------------------


def typed(keys: Any, name: str) -> Any:
    """Keys as typed keys; raises the user's error if they are neither typed nor words."""
    if not is_arraylike(keys):
        raise ArgumentError(f"{name}: the key must be made by random.key, got {keys!r}")
    keys = plain(keys)
    aval = typeof(keys)
    if dtypes.is_key(aval.dtype):
        return keys
    kind = find(name, None).kind
    if (
        aval.dtype == _WORD
        and aval.shape[max(0, aval.ndim - len(kind.key_shape)) :] == kind.key_shape
    ):
        if config.legacy_prng_key != "allow":
            _tell_of_raw_key(name)
        return random_wrap(keys, kind.ident)
    raise ArgumentError(
        f"{name}: the key must be a typed key (random.key) or words of uint32, of shape "
        f"{kind.key_shape} for {config.default_prng_impl}, got {aval.strip_weak()}; "
        "make one from a seed with random.key(seed)"
    )


def _tell_of_raw_key(name: str) -> None:
    text = (
        f"{current_source()}: random.{name}: a raw key (random.PRNGKey) is given, and "
        f"legacy_prng_key is {config.legacy_prng_key!r}; make typed keys with random.key"
    )
    if config.legacy_prng_key == "error":
        raise ArgumentError(text)
    warnings.warn(text, UserWarning, stacklevel=2)


def single(keys: Any, name: str, uses: bool = True) -> Any:
    """One typed key; more than one is an error that advises `vmap`.

    With `uses` the key is used up: `debug_key_reuse` finds a second use.
    """
    found = typed(keys, name)
    shape = typeof(found).shape
    if shape:
        raise ArgumentError(
            f"{name} accepts a single key, but was given a key array of shape {shape}; "
            "use vmap to draw with each of them"
        )
    if config.debug_key_reuse:
        return _markers.draw(found, f"random.{name}", uses)
    return found


def new(keys: Any) -> Any:
    """Keys that a function returns, which may be used once."""
    return _markers.clone(keys) if config.debug_key_reuse else keys


def _like(keys: Any, result: Any) -> Any:
    """Keys in the form in which the user gave his."""
    is_typed = dtypes.is_key(typeof(plain(keys)).dtype) or config.enable_custom_prng
    return new(result) if is_typed else random_unwrap(result)


def _is_fast(key: Any) -> bool:
    """Whether a key is of the default generator, whose counters are encrypted in one operation."""
    return typeof(key).dtype == dtypes.key_dtype and config.threefry_partitionable


# ---- new keys from old -------------------------------------------------------------------------


def split(key: Any, num: int | Sequence[int] = 2) -> Array:
    """Make new keys from one; the old one must not be used again.

    `num` is their number, or the shape of the result. The keys are of the dtype of `key`: typed, or
    words with one more dim. Raises `ArgumentError` if `key` is no key or more than one (use
    `vmap`), and `ShapeError` if `num` is negative.

    >>> first, second = spmd.random.split(spmd.random.key(0))
    >>> spmd.random.split(first, (2, 3)).shape
    (2, 3)
    """
    shape = canonical_shape(num, "split")
    return _like(key, split_typed(single(key, "split"), shape))


@one_program("shape")
def split_typed(key: Any, shape: tuple[int, ...]) -> Any:
    """`split` of a typed key."""
    if _is_fast(key):
        return lax.reshape(_blocks(key, math.prod(shape)), shape)
    generator = of_dtype(typeof(key).dtype)
    return random_wrap(generator.split(random_unwrap(key), shape), generator.kind.ident)


def pair(key: Any) -> tuple[Any, Any]:
    """Two new typed keys."""
    first, second = several(key, 2)
    return first, second


@one_program("count")
def several(key: Any, count: int) -> tuple[Any, ...]:
    """A few new typed keys, as a tuple."""
    keys = _blocks(key, count) if _is_fast(key) else split_typed(key, (count,))
    return tuple(lax.index_in_dim(keys, k, 0, keepdims=False) for k in range(count))


def fold_in(key: Any, data: Any) -> Array:
    """Make a new key from a key and an integer: the same for the same pair.

    For loops: `fold_in(key, step)` needs no key carried along. `data` is a scalar that fits uint32;
    an array of another dtype is converted. The shape and dtype of `key` stay. Raises
    an `OverflowError` if `data` does not fit, and `ArgumentError` if it is no scalar or `key` is no
    single key.

    >>> k = spmd.random.key(0)
    >>> spmd.random.key_data(spmd.random.fold_in(k, 7))
    Array([2716826189,  292468403], dtype=uint32)
    """
    if not is_arraylike(data) or typeof(data).shape:
        raise ArgumentError(f"fold_in: data must be one integer, got {data!r}")
    data = plain(data)
    if isinstance(data, int):
        if not 0 <= data < 2**32:
            raise IntegerRangeError(f"fold_in: data={data} does not fit uint32")
        data = np.array(data, _WORD)
    if dtypes.is_key(typeof(data).dtype):
        raise ArgumentError(f"fold_in: data must be an integer, got {typeof(data)}")
    low = lax.convert_element_type(data, _WORD)
    return _like(key, _fold_in_typed(single(key, "fold_in", uses=False), low))


@one_program()
def _fold_in_typed(key: Any, data: Any) -> Any:
    """`fold_in` of a typed key and a word."""
    if typeof(key).dtype == dtypes.key_dtype:
        return threefry2x32(key, np.uint32(0), data)
    generator = of_dtype(typeof(key).dtype)
    return random_wrap(generator.fold_in(random_unwrap(key), data), generator.kind.ident)


# ---- bits --------------------------------------------------------------------------------------


def _blocks(key: Any, count: int) -> Any:
    """The encrypted counters 0, 1, ..., count - 1: a vector of keys."""
    if count > 2**32:
        raise ArgumentError(
            f"random: {count} numbers were asked of one key, which gives at most 2**32; split it"
        )
    return threefry2x32(key, np.uint32(0), lax.iota(_WORD, count))


@lays_out_result
def bits(key: Any, shape: Any = (), dtype: Any = None, *, out_sharding: Any = None) -> Array:
    """Draw random bits, as unsigned integers of the given `shape`.

    `dtype` is an unsigned integer dtype, by default uint32 (uint64 under x64). `out_sharding`,
    a sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises
    `DtypeError` for another, `ShapeError` if a size is negative, and `ArgumentError` if `key`
    is no single key.

    >>> spmd.random.bits(spmd.random.key(0), (2,)).dtype
    dtype('uint32')
    """
    found = dtypes.canonical(np.uint64) if dtype is None else user_dtype(dtype, "bits")
    if not dtypes.is_unsigned(found):
        raise ArgumentError(f"bits: dtype must be an unsigned integer, got {found}")
    found = np.dtype(f"uint{8 * found.itemsize}")  # small ones are drawn as bytes
    return typed_bits(single(key, "bits"), canonical_shape(shape, "bits"), found)


@one_program("shape", "dtype")
def typed_bits(key: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """`bits` of a typed key."""
    if _is_fast(key):
        return lax.reshape(key_bits(_blocks(key, math.prod(shape)), dtype), shape)
    generator = of_dtype(typeof(key).dtype)
    return generator.random_bits(random_unwrap(key), 8 * dtype.itemsize, shape)


# ---- other arguments of samplers ---------------------------------------------------------------


def float_dtype(dtype: Any, name: str) -> np.dtype:
    """The floating dtype of a sampler's result, float32 by default."""
    found = dtypes.canonical(np.float64) if dtype is None else user_dtype(dtype, name)
    if not dtypes.is_float(found):
        raise DtypeArgumentError(f"{name}: dtype must be a float, got {found}")
    return found


def parameters_shape(name: str, shape: Any, dtype: np.dtype, *parameters: Any) -> tuple[int, ...]:
    """`sample_shape` of parameters that the dtype of the result must be able to hold."""
    for p in parameters:
        aval = typeof(plain(p))
        common = dtypes.promote(((aval.dtype, aval.weak_type), (dtype, False)))[0]
        if common != dtype:
            raise TypePromotionError(
                f"{name}: a parameter is {aval.strip_weak()}, which {dtypes.long_name(dtype)} does "
                f"not hold; convert it with .astype, or draw in {dtypes.long_name(common)}"
            )
    return sample_shape(name, shape, *parameters)


def sample_shape(name: str, shape: Any, *parameters: Any) -> tuple[int, ...]:
    """The shape of a draw: that given, into which the parameters must broadcast, or theirs."""
    given = [typeof(plain(p)).shape for p in parameters]
    if shape is None:
        return broadcast_shapes_of(name, given)
    whole = canonical_shape(shape, name)
    if given and broadcast_shapes_of(name, [whole, *given]) != whole:
        raise ShapeError(
            f"{name}: parameters of shapes {', '.join(map(str, given))} do not broadcast into "
            f"shape {whole}"
        )
    return whole


def count_of(name: str, n: Any) -> int:
    """A concrete number of elements."""
    try:
        return operator.index(n)
    except TypeError:
        raise ArgumentError(f"{name}: an integer is needed, got {n!r}") from None
