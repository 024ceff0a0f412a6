"""The generator: threefry2x32, a block cipher that turns counters into random bits.

The one idea: a key is two 32-bit words, and so is an encrypted counter, so encryption maps keys and
counters to keys: `split` is "encrypt 0, 1, 2, ..." and `fold_in` "encrypt this number". Random bits
are the words of the encrypted counters, mixed. All of it is elementwise: any part of the result can
be computed anywhere, and bits agree with JAX's default generator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import DtypeError
from spmd.core.aval import ShapedArray
from spmd.core.primitive import Primitive, Refused
from spmd.lax.families import align_batch, common_shape, elementwise_dims, fail

_WORD = np.dtype(np.uint32)
_FIELDS: Any = dtypes.key_dtype.names
_NO_JVP = Refused("random bits and keys are integers, which have no derivative")
_NO_TRANSPOSE = Refused("random bits and keys are not linear in anything")

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
# After each group of four rounds: which of the three key words are added to the two halves.
KEY_SCHEDULE = ((1, 2), (2, 0), (0, 1), (1, 2), (2, 0))

# ---- threefry2x32 ------------------------------------------------------------------------------


def threefry2x32(key: Any, high: Any, low: Any) -> Any:
    """Encrypt the counters `(high, low)` with keys, element by element; the results are keys.

    Operands have one shape or are rank 0: one key for many counters, or one counter for many keys.
    """
    return threefry2x32_p.bind(key, high, low)


def _threefry_abstract(key: ShapedArray, high: ShapedArray, low: ShapedArray) -> ShapedArray:
    if key.dtype != dtypes.key_dtype or high.dtype != _WORD or low.dtype != _WORD:
        fail(DtypeError, f"threefry2x32: needs (key, uint32, uint32), got {key}, {high}, {low}")
    shape = common_shape("threefry2x32", ("key", "high", "low"), (key, high, low))
    return ShapedArray(shape, dtypes.key_dtype)


def _threefry_impl(xp: Any, key: Any, high: Any, low: Any) -> Any:
    first, second = _FIELDS
    x0, x1 = encrypt(key[first], key[second], high, low)
    out = xp.empty(x0.shape, dtypes.key_dtype)
    out[first], out[second] = x0, x1
    return out


def encrypt(k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Twenty rounds of threefry on NumPy's uint32 words."""
    with np.errstate(over="ignore"):
        keys = (k0, k1, k0 ^ k1 ^ _WORD.type(PARITY))
        x0, x1 = x0 + keys[0], x1 + keys[1]
        for group, (i, j) in enumerate(KEY_SCHEDULE):
            for by in ROTATIONS[group % 2]:
                x0 = x0 + x1
                x1 = (x1 << _WORD.type(by)) | (x1 >> _WORD.type(32 - by))
                x1 = x0 ^ x1
            x0 = x0 + keys[i]
            x1 = x1 + keys[j] + _WORD.type(group + 1)
    return np.asarray(x0), np.asarray(x1)


def _threefry_batch(axis: Any, operands: Any, at: Any) -> Any:
    operands, to = align_batch(axis, operands, at)
    return threefry2x32_p.bind(*operands), to


threefry2x32_p = Primitive(
    "threefry2x32",
    abstract=_threefry_abstract,
    impl=_threefry_impl,
    jvp=_NO_JVP,
    transpose=_NO_TRANSPOSE,
    batch=_threefry_batch,
    dims=elementwise_dims,
)

# ---- key_bits ----------------------------------------------------------------------------------


def key_bits(keys: Any, dtype: np.dtype) -> Any:
    """An unsigned integer from each key: both words for 64 bits, else their exclusive or."""
    return key_bits_p.bind(keys, dtype=np.dtype(dtype))


def _key_bits_abstract(keys: ShapedArray, *, dtype: np.dtype) -> ShapedArray:
    if keys.dtype != dtypes.key_dtype or dtype not in dtypes.UNSIGNED:
        fail(DtypeError, f"key_bits: needs keys and an unsigned dtype, got {keys} and {dtype}")
    return ShapedArray(keys.shape, dtype)


def _key_bits_impl(xp: Any, keys: Any, *, dtype: np.dtype) -> Any:
    first, second = _FIELDS
    if dtype.itemsize == 8:
        high = keys[first].astype(dtype) << dtype.type(32)
        return xp.asarray(high | keys[second].astype(dtype))
    return xp.asarray(keys[first] ^ keys[second]).astype(dtype)


key_bits_p = Primitive(
    "key_bits",
    abstract=_key_bits_abstract,
    impl=_key_bits_impl,
    jvp=_NO_JVP,
    transpose=_NO_TRANSPOSE,
    batch=lambda axis, xs, at, **params: (key_bits_p.bind(*xs, **params), at[0]),
    dims=elementwise_dims,
)
