"""Keys and the words that they are made of: `random_wrap` and `random_unwrap`, the same bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import DtypeError
from spmd.base.key_dtypes import KeyDType, key_dtype_of, visible
from spmd.core.aval import ShapedArray
from spmd.core.primitive import Primitive, Refused, dims
from spmd.core.structural import move_dim
from spmd.lax.families import fail

_WORD = np.dtype(np.uint32)
_NO_JVP = Refused("keys are integers, which have no derivative")
_NO_TRANSPOSE = Refused("keys are not linear in anything")


def random_wrap(words: Any, impl: str = "fry") -> Any:
    """Keys made of uint32 words: the last dims, of the shape of one key's words, disappear.

    `impl` is the identity of the keys' dtype.
    """
    return random_wrap_p.bind(words, impl=impl)


def _wrap_abstract(words: ShapedArray, *, impl: str) -> ShapedArray:
    kind = key_dtype_of(impl)
    if words.dtype != _WORD:
        fail(DtypeError, f"random_wrap: key data must be uint32, got {words}")
    count = len(kind.key_shape)
    if words.ndim < count or words.shape[words.ndim - count :] != kind.key_shape:
        fail(
            DtypeError,
            f"random_wrap: key data of {kind.name} must have a shape that ends with "
            f"{kind.key_shape}, got {words}",
        )
    return ShapedArray(words.shape[: words.ndim - count], kind.dtype)


def _wrap_impl(xp: Any, words: Any, *, impl: str) -> Any:
    kind = key_dtype_of(impl)
    shape = words.shape[: words.ndim - len(kind.key_shape)]
    flat = xp.ascontiguousarray(words).reshape(*shape, math.prod(kind.key_shape))
    return flat.view(kind.dtype).reshape(shape)


def _wrap_batch(axis: Any, operands: Any, at: Any, *, impl: str) -> Any:
    return random_wrap(move_dim(operands[0], at[0], 0), impl), 0


def _wrap_dims(x: ShapedArray, *, impl: str) -> Any:
    keys = x.ndim - len(key_dtype_of(impl).key_shape)
    return dims([range(x.ndim)], [range(keys)], whole=range(keys, x.ndim))


random_wrap_p = Primitive(
    "random_wrap",
    abstract=_wrap_abstract,
    impl=_wrap_impl,
    jvp=_NO_JVP,
    transpose=_NO_TRANSPOSE,
    batch=_wrap_batch,
    dims=_wrap_dims,
)


def random_unwrap(keys: Any) -> Any:
    """The words of keys: new last dims, of the shape of one key's words."""
    return random_unwrap_p.bind(keys)


def _kind(keys: ShapedArray) -> KeyDType:
    if not dtypes.is_key(keys.dtype):
        fail(DtypeError, f"random_unwrap: needs keys, got {keys}")
    return visible(keys.dtype)


def _unwrap_abstract(keys: ShapedArray) -> ShapedArray:
    return ShapedArray((*keys.shape, *_kind(keys).key_shape), _WORD)


def _unwrap_impl(xp: Any, keys: Any) -> Any:
    kind = visible(keys.dtype)
    return xp.ascontiguousarray(keys).view(_WORD).reshape(*keys.shape, *kind.key_shape)


def _unwrap_dims(x: ShapedArray) -> Any:
    end = x.ndim + len(_kind(x).key_shape)
    return dims([range(x.ndim)], [range(end)], whole=range(x.ndim, end))


random_unwrap_p = Primitive(
    "random_unwrap",
    abstract=_unwrap_abstract,
    impl=_unwrap_impl,
    jvp=_NO_JVP,
    transpose=_NO_TRANSPOSE,
    batch=lambda axis, xs, at: (random_unwrap(move_dim(xs[0], at[0], 0)), 0),
    dims=_unwrap_dims,
)


def words_of(keys: np.ndarray) -> np.ndarray:
    """The words of an array of keys on the host."""
    return _unwrap_impl(np, keys)
