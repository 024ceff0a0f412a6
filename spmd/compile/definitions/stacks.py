"""Stacks of matrices (b, m, n), as definitions of factorizations see them.

A loop of such a definition is a scan over the columns. An iteration changes the whole stack, point
by point, which is one kernel: columns and rows that are done stay by a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.core.aval import typeof
from spmd.core.structural import broadcast_in_dim, permute_dims, reduce_sum, reshape
from spmd.lax.arithmetic import abs as absolute
from spmd.lax.arithmetic import div, mul, sqrt, square
from spmd.lax.array import broadcasted_iota
from spmd.lax.control_scan import scan
from spmd.lax.convert import convert_element_type
from spmd.lax.dynamic import dynamic_index_in_dim
from spmd.lax.logic import bitwise_and, gt, lt, ne, select
from spmd.lax.reduce import reduce_max
from spmd.lax.sort import take_along


def flat(x: Any, core: int = 2) -> Any:
    """A stack with one leading dim."""
    shape = typeof(x).shape
    split = len(shape) - core
    return reshape(x, (math.prod(shape[:split]), *shape[split:]))


def like_leading(x: Any, given: Any, core: int = 2) -> Any:
    """A stack with the leading dims of `given`, whose own core has so many dims."""
    shape = typeof(given).shape
    return reshape(x, (*shape[: len(shape) - core], *typeof(x).shape[1:]))


def places(x: Any, dim: int) -> Any:
    """The number of each element of a stack along a dim."""
    return broadcasted_iota(np.int32, typeof(x).shape, dim)


def full(value: Any, like: Any, dtype: Any = None) -> Any:
    """An array of one number, in the shape of another one."""
    aval = typeof(like)
    return broadcast_in_dim(np.asarray(value, dtype or aval.dtype), aval.shape, ())


def spread(x: Any, like: Any, dims: Sequence[int]) -> Any:
    """`x` in the shape of `like`, whose dims `dims` are those of x."""
    return broadcast_in_dim(x, typeof(like).shape, tuple(dims))


def zero_unless(mask: Any, x: Any) -> Any:
    """`x` where the mask is true, zeros elsewhere."""
    return select(mask, x, full(0, x))


def both(*masks: Any) -> Any:
    """The places where all masks are true."""
    first, *rest = masks
    for mask in rest:
        first = bitwise_and(first, mask)
    return first


def at(x: Any, k: Any, dim: int) -> Any:
    """The part of a stack at place k along a dim, for all its matrices."""
    return dynamic_index_in_dim(x, k, dim, keepdims=False)


def pick(x: Any, where: Any) -> Any:
    """The elements x[b, where[b]] of vectors (b, n); or the rows of matrices (b, m, n)."""
    b, _, *rest = typeof(x).shape
    spot = broadcast_in_dim(where, (b, 1, *rest), (0,))
    return reshape(take_along(x, spot, 1), (b, *rest))


def outer(x: Any, y: Any) -> Any:
    """The products (b, m, n) of vectors (b, m) and (b, n)."""
    (b, m), (_, n) = typeof(x).shape, typeof(y).shape
    return mul(broadcast_in_dim(x, (b, m, n), (0, 1)), broadcast_in_dim(y, (b, m, n), (0, 2)))


def loop(count: int, step: Callable[[Any, Any], Any], carry: Any, reverse: bool = False) -> Any:
    """The carry after `step(k, carry)` for each k, and nothing else."""

    def body(carry: Any, k: Any) -> Any:
        return step(k, carry), None

    return scan(body, carry, np.arange(count, dtype=np.int32), reverse=reverse)[0]


def swapped(x: Any) -> Any:
    """The transposes of a stack (b, m, n)."""
    return permute_dims(x, (0, 2, 1))


def lengths(x: Any, dim: int) -> Any:
    """Euclidean lengths along a dim, whose squares may be out of range."""
    size = absolute(x)
    most = reduce_max(size, (dim,))
    safe = select(both(gt(most, full(0, most)), lt(most, full(np.inf, most))), most, full(1, most))
    rest = [d for d in range(typeof(x).ndim) if d != dim]
    total = reduce_sum(square(div(size, spread(safe, size, rest))), (dim,))
    return mul(safe, sqrt(total))


def all_finite(x: Any) -> Any:
    """Whether all numbers of each matrix are finite, as a mask of its stack's leading dim."""
    size = absolute(x)
    most = reduce_max(select(ne(size, size), full(np.inf, size), size), (1, 2))
    return lt(most, full(np.inf, most))


def nan_unless(good: Any, x: Any) -> Any:
    """NaN for the members of a stack that are not good."""
    return select(spread(good, x, (0,)), x, full(np.nan, x))


def as_dtype(x: Any, dtype: Any) -> Any:
    """Convert; a real number becomes a complex one where that is asked for."""
    return x if typeof(x).dtype == dtype else convert_element_type(x, dtype)
