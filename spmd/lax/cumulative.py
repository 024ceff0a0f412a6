"""Running sums, products, extremes and logsumexps along one dim.

The one idea: only a running sum is linear. The tangents of the others come from differentiating an
`associative_scan` of elementwise operations, as in JAX: equal elements share the derivative of a
running extreme in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spmd.base import dtypes
from spmd.base.errors import ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.jvp import jvp_flat
from spmd.core.primitive import Primitive, dims, linear
from spmd.lax.arithmetic import add, is_finite, log, max, min, mul, sub
from spmd.lax.control_maps import associative_scan
from spmd.lax.convert import stop_gradient
from spmd.lax.elementwise import exp
from spmd.lax.families import (
    FLOAT,
    NUMERIC,
    ORDERED,
    DtypeSet,
    Rule,
    check_dtype,
    const,
    fail,
    nonlinear,
    quiet,
)
from spmd.lax.logic import ne, select

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- the public functions ----------------------------------------------------------------------


def cumsum(operand: Any, axis: int = 0, reverse: bool = False) -> Array:
    """Sum all elements up to each one along dim `axis` (from each one on, if `reverse`).

    `operand` keeps its shape and its dtype, so integers can wrap around. Raises `ShapeError` if
    `axis` is not in `range(operand.ndim)`, and `DtypeError` for booleans.

    >>> lax.cumsum(np.array([1, 2, 3]))
    Array([1, 3, 6], dtype=int32)
    >>> lax.cumsum(np.array([1, 2, 3]), reverse=True)
    Array([6, 5, 3], dtype=int32)
    """
    return cumsum_p.bind(operand, axis=int(axis), reverse=bool(reverse))


def cumprod(operand: Any, axis: int = 0, reverse: bool = False) -> Array:
    """Multiply all elements up to each one along dim `axis` (from each one on, if `reverse`).

    `operand` keeps its shape and its dtype, so integers can wrap around. Raises `ShapeError` if
    `axis` is not in `range(operand.ndim)`, and `DtypeError` for booleans.

    >>> lax.cumprod(np.array([1, 2, 3, 4]))
    Array([ 1,  2,  6, 24], dtype=int32)
    """
    return cumprod_p.bind(operand, axis=int(axis), reverse=bool(reverse))


def cummax(operand: Any, axis: int = 0, reverse: bool = False) -> Array:
    """Take the largest of all elements up to each one along dim `axis`.

    With `reverse`, the elements from each one on count. `operand` keeps its shape and its dtype;
    NaN wins. Complex numbers are compared by their real, then by their imaginary parts. Raises
    `ShapeError` if `axis` is not in `range(operand.ndim)`.

    >>> lax.cummax(np.array([1, 3, 2, 5]))
    Array([1, 3, 3, 5], dtype=int32)
    """
    return _extreme(cummax_p, max, operand, int(axis), bool(reverse))


def cummin(operand: Any, axis: int = 0, reverse: bool = False) -> Array:
    """Take the smallest of all elements up to each one along dim `axis`.

    With `reverse`, the elements from each one on count. `operand` keeps its shape and its dtype;
    NaN wins. Complex numbers are compared by their real, then by their imaginary parts. Raises
    `ShapeError` if `axis` is not in `range(operand.ndim)`.

    >>> lax.cummin(np.array([5, 3, 4, 1]))
    Array([5, 3, 3, 1], dtype=int32)
    """
    return _extreme(cummin_p, min, operand, int(axis), bool(reverse))


def _extreme(
    prim: Primitive, combine: Callable[[Any, Any], Any], x: Any, axis: int, reverse: bool
) -> Any:
    """A running extreme; of complex numbers, which no kernel orders, by pairs."""
    aval = typeof(x)
    if not dtypes.is_complex(aval.dtype):
        return prim.bind(x, axis=axis, reverse=reverse)
    if not 0 <= axis < aval.ndim:
        fail(
            ShapeError,
            f"{prim.name}: axis={axis} must be in range({aval.ndim}), as operand is {aval}",
        )
    return associative_scan(combine, x, reverse, axis)


def cumlogsumexp(operand: Any, axis: int = 0, reverse: bool = False) -> Array:
    """Compute the logarithm of the running sum of exponentials along dim `axis`.

    With `reverse`, the sum runs from each element on. `operand` keeps its shape and its float
    dtype. Raises `ShapeError` if `axis` is not in `range(operand.ndim)`, and `DtypeError` for other
    dtypes.

    >>> lax.cumlogsumexp(np.zeros(3))
    Array([0.       , 0.6931472, 1.0986123], dtype=float32)
    """
    return cumlogsumexp_p.bind(operand, axis=int(axis), reverse=bool(reverse))


# ---- the family --------------------------------------------------------------------------------


def _cumulative(
    name: str, accepts: DtypeSet, accumulate: Rule, combine: Callable[[Any, Any], Any]
) -> Primitive:
    """One member: `accumulate(xp, x, axis)` gives the values, `combine(x, y)` joins two of them."""

    def abstract(x: ShapedArray, *, axis: int, reverse: bool) -> ShapedArray:
        check_dtype(name, "operand", x, accepts)
        if not 0 <= axis < x.ndim:
            fail(ShapeError, f"{name}: axis={axis} must be in range({x.ndim}), as operand is {x}")
        return x

    def impl(xp: Any, x: Any, *, axis: int, reverse: bool) -> Any:
        if not reverse:
            return accumulate(xp, x, axis)
        return xp.flip(accumulate(xp, xp.flip(x, axis), axis), axis)

    def jvp(primals: Any, tangents: Any, *, axis: int, reverse: bool) -> Any:
        out = prim.bind(primals[0], axis=axis, reverse=reverse)
        _, (tangent,) = jvp_flat(
            lambda x: [associative_scan(combine, x, reverse, axis)], primals, tangents
        )
        return out, tangent

    def batch(vmapped: Any, operands: Any, at: Any, *, axis: int, reverse: bool) -> Any:
        return prim.bind(operands[0], axis=axis + (axis >= at[0]), reverse=reverse), at[0]

    prim = Primitive(
        name,
        abstract=abstract,
        impl=quiet(impl),
        jvp=jvp,
        transpose=nonlinear(name),
        batch=batch,
        dims=lambda x, *, axis, reverse: dims([range(x.ndim)], [range(x.ndim)], whole=[axis]),
    )
    return prim


def logaddexp(x: Any, y: Any) -> Any:
    """`log(exp(x) + exp(y))`; where that is infinite or NaN, the larger of the two."""
    larger = max(x, y)
    finite = is_finite(larger)
    top = stop_gradient(select(finite, larger, const(x, 0)))
    total = add(*(exp(sub(select(finite, v, const(x, 0)), top)) for v in (x, y)))
    # The derivative of NaN is NaN. Elsewhere the factor is 1, not a NaN that a select hides:
    # backwards 0 times NaN would come out of it.
    factor = select(ne(larger, larger), const(x, math.nan), const(x, 1))
    return select(finite, add(top, log(total)), mul(larger, factor))


cumsum_p = _cumulative(
    "cumsum", NUMERIC, lambda xp, x, axis: xp.cumsum(x, axis, dtype=x.dtype), add
)
cumsum_p.jvp = linear
cumsum_p.transpose = lambda ct, x, *, axis, reverse: [cumsum(ct, axis, not reverse)]
cumprod_p = _cumulative(
    "cumprod", NUMERIC, lambda xp, x, axis: xp.cumprod(x, axis, dtype=x.dtype), mul
)
cummax_p = _cumulative("cummax", ORDERED, lambda xp, x, axis: xp.maximum.accumulate(x, axis), max)
cummin_p = _cumulative("cummin", ORDERED, lambda xp, x, axis: xp.minimum.accumulate(x, axis), min)
cumlogsumexp_p = _cumulative(
    "cumlogsumexp", FLOAT, lambda xp, x, axis: xp.logaddexp.accumulate(x, axis), logaddexp
)
