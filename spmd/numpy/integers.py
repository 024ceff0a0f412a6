"""Number theory and packed bits: `gcd`, `lcm`, `packbits`, `unpackbits`."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeArgumentError, DtypeError
from spmd.core.aval import typeof
from spmd.numpy.joining import concatenate
from spmd.numpy.logic import as_bool
from spmd.numpy.manipulation import moveaxis, ravel
from spmd.numpy.programs import one_program
from spmd.numpy.promotion import (
    broadcast_shapes_of,
    broadcast_to,
    check_arraylike,
    constant_like,
    plain,
    promote_args,
    select,
)
from spmd.numpy.reductions import any as _any
from spmd.numpy.reductions import canonical_axis
from spmd.sharding.array import Array, ArrayLike

_BYTE = np.dtype(np.uint8)

# ---- divisors and multiples --------------------------------------------------------------------


def _integers(name: str, x1: Any, x2: Any) -> list[Any]:
    """Two arrays of integers of one shape."""
    found = promote_args(name, x1, x2)
    if not dtypes.is_integer(typeof(found[0]).dtype):
        raise DtypeArgumentError(f"{name}: integers are needed, got {typeof(found[0]).dtype}")
    shape = broadcast_shapes_of(name, [typeof(x).shape for x in found])
    return [broadcast_to(x, shape) for x in found]


def _size(x: Any) -> Any:
    return x if dtypes.is_unsigned(typeof(x).dtype) else lax.abs(x)


def gcd(x1: ArrayLike, x2: ArrayLike) -> Array:
    """The greatest common divisor, by Euclid's algorithm; gcd(0, 0) is 0.

    `x1` and `x2` broadcast to one shape and are promoted to one integer dtype, which the result
    has. Their signs do not matter. Raises a `DtypeError` if they are no integers.

    >>> gcd(np.array([12, 0, -9]), np.array([18, 5, 6]))
    Array([6, 5, 3], dtype=int32)
    """
    return _gcd(*_integers("gcd", x1, x2))


@one_program()
def _gcd(x1: Any, x2: Any) -> Any:
    zero, one = (constant_like(x1, v) for v in (0, 1))

    def step(state: Any) -> Any:
        a, b = state
        done = lax.eq(b, zero)
        rest = lax.rem(a, select(done, one, b))
        return lax.select(done, a, b), select(done, zero, rest)

    return lax.while_loop(lambda s: _any(lax.ne(s[1], zero)), step, (_size(x1), _size(x2)))[0]


def lcm(x1: ArrayLike, x2: ArrayLike) -> Array:
    """The least common multiple; it is 0 where one of the two is.

    `x1` and `x2` broadcast to one shape and are promoted to one integer dtype, which the result
    has. Their signs do not matter. Raises a `DtypeError` if they are no integers.

    >>> lcm(np.array([4, 0]), 6)
    Array([12,  0], dtype=int32)
    """
    x1, x2 = _integers("lcm", x1, x2)
    return _lcm(x1, x2)


@one_program()
def _lcm(x1: Any, x2: Any) -> Any:
    x1, x2 = _size(x1), _size(x2)
    divisor = _gcd(x1, x2)
    none = lax.eq(divisor, constant_like(divisor, 0))
    # Divided first: the product of the two may overflow where their multiple does not.
    share = lax.div(x2, select(none, constant_like(divisor, 1), divisor))
    return select(none, constant_like(divisor, 0), lax.mul(x1, share))


# ---- bits --------------------------------------------------------------------------------------


def _weights(bitorder: str, name: str) -> np.ndarray:
    if bitorder not in ("big", "little"):
        raise ArgumentError(f"{name}: bitorder must be 'big' or 'little', got {bitorder!r}")
    weights = np.uint8(1) << np.arange(8, dtype=np.uint8)
    return weights[::-1] if bitorder == "big" else weights


# Byte k of a word goes to bit 27 - k, or to bit 24 + k; all other products are elsewhere.
_GATHERS = {
    "big": 1 << 27 | 1 << 18 | 1 << 9 | 1,
    "little": 1 << 24 | 1 << 17 | 1 << 10 | 1 << 3,
}


def packbits(a: ArrayLike, axis: int | None = None, bitorder: str = "big") -> Array:
    """Pack every eight truth values into a byte, along a dim or of the flat array.

    `a` has bools or integers, of which those that are not zero count as true. `axis` is the dim, or
    None for the flat array. Its size n becomes n / 8, rounded up; the last byte is filled with
    zeros. `bitorder` says whether the first of eight is the highest bit ("big", the default) or the
    lowest ("little"). The result is uint8. Raises a `DtypeError` if `a` has another dtype, and an
    `ArgumentError` for another `bitorder`.

    >>> packbits(np.array([1, 0, 0, 0, 0, 0, 0, 1, 1]))
    Array([129, 128], dtype=uint8)
    """
    check_arraylike("packbits", a)
    _weights(bitorder, "packbits")
    a = plain(a)
    dtype = typeof(a).dtype
    if not dtypes.is_bool(dtype) and not dtypes.is_integer(dtype):
        raise DtypeError(f"packbits: integers or bools are needed, got {dtype}")
    a, d = (ravel(a), 0) if axis is None else (a, canonical_axis(axis, typeof(a).ndim, "packbits"))
    bits = moveaxis(lax.convert_element_type(as_bool(a), _BYTE), d, -1)
    *lead, n = typeof(bits).shape
    count = -(-n // 8)
    bits = lax.pad(bits, np.uint8(0), [*[(0, 0, 0)] * len(lead), (0, 8 * count - n, 0)])
    # Four bytes are a word: a product moves its ones side by side, to the bits from 24 on.
    words = lax.bitcast_convert_type(lax.reshape(bits, (*lead, count, 2, 4)), np.uint32)
    fours = (words * np.uint32(_GATHERS[bitorder]) >> np.uint32(24)) & np.uint32(15)
    first, second = fours[..., 0], fours[..., 1]
    packed = (first << 4) | second if bitorder == "big" else first | (second << 4)
    return moveaxis(packed.astype(_BYTE), -1, d)


def unpackbits(
    a: ArrayLike, axis: int | None = None, count: int | None = None, bitorder: str = "big"
) -> Array:
    """Unpack the bits of bytes into zeros and ones, along a dim or of the flat array.

    `a` is uint8, and so is the result. `axis` is the dim, or None for the flat array; its size n
    becomes 8 n, or `count`. Like the end of a slice, a negative `count` counts from the end; a
    `count` above 8 n adds zeros. `bitorder` says whether the first bit is the highest of its byte
    ("big", the default) or the lowest ("little"). Raises a `DtypeError` if `a` has another dtype,
    and an `ArgumentError` for another `bitorder`.

    >>> unpackbits(np.array([129], np.uint8))
    Array([1, 0, 0, 0, 0, 0, 0, 1], dtype=uint8)
    >>> unpackbits(np.array([129], np.uint8), count=-5)
    Array([1, 0, 0], dtype=uint8)
    """
    check_arraylike("unpackbits", a)
    weights, a = _weights(bitorder, "unpackbits"), plain(a)
    if typeof(a).dtype != _BYTE:
        raise DtypeError(f"unpackbits: bytes (uint8) are needed, got {typeof(a).dtype}")
    if axis is None:
        a, d = ravel(a), 0
    else:
        d = canonical_axis(axis, typeof(a).ndim, "unpackbits")
    a = moveaxis(a, d, -1)
    *lead, n = typeof(a).shape
    whole = (*lead, n, 8)
    spread = lax.broadcast_in_dim(a, whole, range(len(lead) + 1))
    held = lax.bitwise_and(spread, broadcast_to(weights, whole))
    bits = lax.convert_element_type(lax.ne(held, np.uint8(0)), _BYTE)
    bits = lax.reshape(bits, (*lead, 8 * n))
    if count is not None:
        kept = min(count, 8 * n) if count >= 0 else max(8 * n + count, 0)
        bits = lax.slice_in_dim(bits, 0, kept, axis=len(lead))
        if count > kept:
            missing = lax.full((*lead, count - kept), 0, _BYTE)
            bits = concatenate([bits, missing], len(lead))
    return moveaxis(bits, -1, d)
