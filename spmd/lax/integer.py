"""Arithmetic that only integers have: `mulhi`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import DtypeError
from spmd.core.aval import typeof
from spmd.core.structural import broadcast_in_dim
from spmd.lax.arithmetic import add, mul, sub
from spmd.lax.convert import convert_element_type
from spmd.lax.families import fail
from spmd.lax.logic import bitwise_and, lt, select, shift_right_logical

if TYPE_CHECKING:
    from spmd.sharding.array import Array


def mulhi(x: Any, y: Any, /) -> Array:
    """Compute the upper half of the bits of the exact product of n-bit integers, elementwise.

    `x` and `y` have one shape, or are scalars, and one integer dtype, which is the result's.
    Warren, Hacker's Delight (2nd ed.), 8-2, is the source: schoolbook multiplication of halves.
    Raises `DtypeError` or `ShapeError` for other operands.

    >>> lax.mulhi(np.uint32(1 << 31), np.uint32(6))
    Array(3, dtype=uint32)
    """
    dtype = typeof(x).dtype
    if not dtypes.is_integer(dtype) or typeof(y).dtype != dtype:
        fail(DtypeError, f"mulhi: takes two integers of one dtype, got {typeof(x)} and {typeof(y)}")
    bits = 8 * dtype.itemsize
    unsigned = np.dtype(f"uint{bits}")
    half, low = np.array(bits // 2, unsigned), np.array((1 << bits // 2) - 1, unsigned)
    a, b = (convert_element_type(v, unsigned) for v in (x, y))
    a1, a0, b1, b0 = (
        part(v)
        for v in (a, b)
        for part in (lambda v: shift_right_logical(v, half), lambda v: bitwise_and(v, low))
    )
    inner = add(mul(a1, b0), shift_right_logical(mul(a0, b0), half))
    other = add(mul(a0, b1), bitwise_and(inner, low))
    high = add(mul(a1, b1), shift_right_logical(inner, half))
    high = add(high, shift_right_logical(other, half))
    if dtype != unsigned:
        # A negative factor counts as 2^n too much of the other one.
        zero = np.array(0, unsigned)
        for v, factor in ((x, b), (y, a)):
            negative = lt(v, np.array(0, dtype))
            spread = broadcast_in_dim(factor, typeof(high).shape, range(typeof(factor).ndim))
            mask = broadcast_in_dim(negative, typeof(high).shape, range(typeof(negative).ndim))
            nothing = broadcast_in_dim(zero, typeof(high).shape, ())
            high = sub(high, select(mask, spread, nothing))
    return convert_element_type(high, dtype)
