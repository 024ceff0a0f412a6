"""Comparing, choosing, and the bits of integers.

The one idea: a choice is `select_n`, whose cases are both computed; comparisons and bit operations
have no derivative, and neither has the predicate of a choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.jvp import zero_tangent
from spmd.core.primitive import Primitive, Zero
from spmd.core.structural import is_linear, unbroadcast
from spmd.lax.convert import matched
from spmd.lax.families import (
    ANY,
    BITS,
    INTEGER,
    MOVABLE,
    ORDERED,
    WORDS,
    align_batch,
    binary,
    check_dtype,
    check_same_dtype,
    common_shape,
    comparison,
    const,
    elementwise,
    elementwise_dims,
    fail,
    quiet,
    spread,
    unary,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- comparisons -------------------------------------------------------------------------------


def eq(x: Any, y: Any) -> Array:
    """Tell whether `x` equals `y`, elementwise; NaN equals nothing.

    `x` and `y` have one shape, or are scalars, and one dtype; a Python number takes that of the
    other. The result is of dtype bool. Raises `ShapeError` or `DtypeError` if shapes or dtypes
    differ: lax does not broadcast or promote, `snp.equal` does.

    >>> lax.eq(np.array([1.0, np.nan]), np.array([1.0, np.nan]))
    Array([ True, False], dtype=bool)
    """
    return eq_p.bind(*matched(x, y))


def ne(x: Any, y: Any) -> Array:
    """Tell whether `x` differs from `y`, elementwise; NaN differs from all.

    `x` and `y` have one shape, or are scalars, and one dtype; a Python number takes that of the
    other. The result is of dtype bool. Raises `ShapeError` or `DtypeError` if shapes or dtypes
    differ: lax does not broadcast or promote, `snp.not_equal` does.

    >>> lax.ne(np.array([1.0, np.nan]), np.array([1.0, np.nan]))
    Array([False,  True], dtype=bool)
    """
    return ne_p.bind(*matched(x, y))


def lt(x: Any, y: Any) -> Array:
    """Tell whether `x` is less than `y`, elementwise.

    `x` and `y` have one shape, or are scalars, and one bool, integer or float dtype; a Python
    number takes that of the other. The result is of dtype bool. Raises `ShapeError` or `DtypeError`
    if shapes or dtypes differ: lax does not broadcast or promote, `snp.less` does.

    >>> lax.lt(np.array([1, 2, 3]), 2)
    Array([ True, False, False], dtype=bool)
    """
    return lt_p.bind(*matched(x, y))


def le(x: Any, y: Any) -> Array:
    """Tell whether `x` is less than or equal to `y`, elementwise.

    `x` and `y` have one shape, or are scalars, and one bool, integer or float dtype; a Python
    number takes that of the other. The result is of dtype bool. Raises `ShapeError` or `DtypeError`
    if shapes or dtypes differ: lax does not broadcast or promote, `snp.less_equal` does.

    >>> lax.le(np.array([1, 2, 3]), 2)
    Array([ True,  True, False], dtype=bool)
    """
    return le_p.bind(*matched(x, y))


def gt(x: Any, y: Any) -> Array:
    """Tell whether `x` is greater than `y`, elementwise.

    `x` and `y` have one shape, or are scalars, and one bool, integer or float dtype; a Python
    number takes that of the other. The result is of dtype bool. Raises `ShapeError` or `DtypeError`
    if shapes or dtypes differ: lax does not broadcast or promote, `snp.greater` does.

    >>> lax.gt(np.array([1, 2, 3]), 2)
    Array([False, False,  True], dtype=bool)
    """
    return gt_p.bind(*matched(x, y))


def ge(x: Any, y: Any) -> Array:
    """Tell whether `x` is greater than or equal to `y`, elementwise.

    `x` and `y` have one shape, or are scalars, and one bool, integer or float dtype; a Python
    number takes that of the other. The result is of dtype bool. Raises `ShapeError` or `DtypeError`
    if shapes or dtypes differ: lax does not broadcast or promote, `snp.greater_equal` does.

    >>> lax.ge(np.array([1, 2, 3]), 2)
    Array([False,  True,  True], dtype=bool)
    """
    return ge_p.bind(*matched(x, y))


# Typed keys are structured elements, which NumPy's operators compare and its ufuncs do not.
eq_p = comparison("eq", accepts=MOVABLE, impl=lambda xp, x, y: x == y)
ne_p = comparison("ne", accepts=MOVABLE, impl=lambda xp, x, y: x != y)
lt_p = comparison("lt", accepts=ORDERED, impl="less")
le_p = comparison("le", accepts=ORDERED, impl="less_equal")
gt_p = comparison("gt", accepts=ORDERED, impl="greater")
ge_p = comparison("ge", accepts=ORDERED, impl="greater_equal")

# ---- bits --------------------------------------------------------------------------------------


def bitwise_not(x: Any) -> Array:
    """Flip every bit of `x`, elementwise; for bool, logical negation.

    `x` keeps its shape and its bool or integer dtype. Raises `DtypeError` for floats and complex
    numbers.

    >>> lax.bitwise_not(np.array([True, False]))
    Array([False,  True], dtype=bool)
    """
    return not_p.bind(x)


def bitwise_and(x: Any, y: Any) -> Array:
    """Keep the bits that are set in both `x` and `y`, elementwise.

    `x` and `y` have one shape, or are scalars, and one bool or integer dtype; a Python number takes
    that of the other. Raises `ShapeError` or `DtypeError` if shapes or dtypes differ: lax does not
    broadcast or promote, `snp.bitwise_and` does.

    >>> lax.bitwise_and(np.array([6, 3]), 2)
    Array([2, 2], dtype=int32)
    """
    return and_p.bind(*matched(x, y))


def bitwise_or(x: Any, y: Any) -> Array:
    """Keep the bits that are set in `x` or `y` or both, elementwise.

    `x` and `y` have one shape, or are scalars, and one bool or integer dtype; a Python number takes
    that of the other. Raises `ShapeError` or `DtypeError` if shapes or dtypes differ: lax does not
    broadcast or promote, `snp.bitwise_or` does.

    >>> lax.bitwise_or(np.array([6, 3]), 8)
    Array([14, 11], dtype=int32)
    """
    return or_p.bind(*matched(x, y))


def bitwise_xor(x: Any, y: Any) -> Array:
    """Keep the bits that are set in exactly one of `x` and `y`, elementwise.

    `x` and `y` have one shape, or are scalars, and one bool or integer dtype; a Python number takes
    that of the other. Raises `ShapeError` or `DtypeError` if shapes or dtypes differ: lax does not
    broadcast or promote, `snp.bitwise_xor` does.

    >>> lax.bitwise_xor(np.array([6, 3]), 2)
    Array([4, 1], dtype=int32)
    """
    return xor_p.bind(*matched(x, y))


def population_count(x: Any) -> Array:
    """Count the bits that are set in `x`, elementwise.

    `x` keeps its shape and its integer dtype. Raises `DtypeError` for other dtypes.

    >>> lax.population_count(np.array([0, 7, -1]))
    Array([ 0,  3, 32], dtype=int32)
    """
    return population_count_p.bind(x)


def clz(x: Any) -> Array:
    """Count the leading bits of `x` that are zero, elementwise.

    `x` keeps its shape and its integer dtype. Raises `DtypeError` for other dtypes.

    >>> lax.clz(np.array([0, 7, -1]))
    Array([32, 29,  0], dtype=int32)
    """
    return clz_p.bind(x)


def _unsigned(x: Any) -> Any:
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def _clz(xp: Any, x: Any) -> Any:
    width = 8 * x.dtype.itemsize
    bits = _unsigned(x)
    step = 1
    while step < width:  # copy the highest set bit into all lower ones
        bits = bits | (bits >> bits.dtype.type(step))
        step *= 2
    return (width - xp.bitwise_count(bits)).astype(x.dtype)


not_p = unary("not", accepts=BITS, impl="invert")
and_p = binary("and", accepts=BITS, impl="bitwise_and")
or_p = binary("or", accepts=BITS, impl="bitwise_or")
xor_p = binary("xor", accepts=BITS, impl="bitwise_xor")
population_count_p = unary(
    "population_count",
    accepts=WORDS,
    impl=lambda xp, x: xp.bitwise_count(_unsigned(x)).astype(x.dtype),
)
clz_p = unary("clz", accepts=WORDS, impl=_clz)

# ---- shifts ------------------------------------------------------------------------------------


def shift_left(x: Any, y: Any) -> Array:
    """Shift the bits of `x` left by `y` places, elementwise.

    `x` and `y` have one shape, or are scalars, and one integer dtype; a Python number takes that of
    the other. The result is 0 where `y` is not in `range(bits of x)`. Raises `ShapeError` or
    `DtypeError` if shapes or dtypes differ: lax does not broadcast or promote, `snp.left_shift`
    does.

    >>> lax.shift_left(np.array([1, 3]), 2)
    Array([ 4, 12], dtype=int32)
    """
    return shift_left_p.bind(*matched(x, y))


def shift_right_logical(x: Any, y: Any) -> Array:
    """Shift the bits of `x` right by `y` places, elementwise, with zeros moving in.

    `x` and `y` have one shape, or are scalars, and one integer dtype; a Python number takes that of
    the other. The result is 0 where `y` is not in `range(bits of x)`. Raises `ShapeError` or
    `DtypeError` if shapes or dtypes differ.

    >>> lax.shift_right_logical(np.array([8, -1]), 2)
    Array([         2, 1073741823], dtype=int32)
    """
    return shift_right_logical_p.bind(*matched(x, y))


def shift_right_arithmetic(x: Any, y: Any) -> Array:
    """Shift the bits of `x` right by `y` places, elementwise, with copies of the sign moving in.

    `x` and `y` have one shape, or are scalars, and one integer dtype; a Python number takes that of
    the other. Copies of the sign are left where `y` is not in `range(bits of x)`. Raises
    `ShapeError` or `DtypeError` if shapes or dtypes differ: lax does not broadcast or promote,
    `snp.right_shift` does.

    >>> lax.shift_right_arithmetic(np.array([8, -8]), 2)
    Array([ 2, -2], dtype=int32)
    """
    return shift_right_arithmetic_p.bind(*matched(x, y))


def _shift_left(xp: Any, x: Any, y: Any) -> Any:
    width = 8 * x.dtype.itemsize
    amount = _unsigned(y)
    shifted = _unsigned(x) << xp.minimum(amount, amount.dtype.type(width - 1))
    return xp.where(amount < width, shifted, shifted.dtype.type(0)).view(x.dtype)


def _shift_right_logical(xp: Any, x: Any, y: Any) -> Any:
    width = 8 * x.dtype.itemsize
    amount = _unsigned(y)
    shifted = _unsigned(x) >> xp.minimum(amount, amount.dtype.type(width - 1))
    return xp.where(amount < width, shifted, shifted.dtype.type(0)).view(x.dtype)


def _shift_right_arithmetic(xp: Any, x: Any, y: Any) -> Any:
    last = 8 * x.dtype.itemsize - 1
    amount = _unsigned(y)
    signed = x.view(np.dtype(f"i{x.dtype.itemsize}"))
    return (signed >> xp.minimum(amount, amount.dtype.type(last)).astype(signed.dtype)).view(
        x.dtype
    )


shift_left_p = binary("shift_left", accepts=INTEGER, impl=_shift_left)
shift_right_logical_p = binary("shift_right_logical", accepts=WORDS, impl=_shift_right_logical)
shift_right_arithmetic_p = binary(
    "shift_right_arithmetic", accepts=INTEGER, impl=_shift_right_arithmetic
)

# ---- select ------------------------------------------------------------------------------------


def select_n(which: Any, *cases: Any) -> Array:
    """Choose, elementwise, `cases[which]`.

    `which` is bool (False takes the first of two cases) or an integer (an index out of range takes
    the first or the last case); it and each of the `cases` is a scalar or has the result's shape.
    All cases have one dtype. **All cases are computed**; `lax.switch` computes one. Raises
    `ShapeError` or `DtypeError` if shapes or dtypes differ, and `ArgumentError` without a case.

    >>> lax.select_n(np.array([0, 2, 1]), np.zeros(3), np.ones(3), np.full(3, 7.0))
    Array([0., 7., 1.], dtype=float32)
    """
    if not cases:
        raise ArgumentError("select_n: at least one case is needed")
    return select_n_p.bind(which, *matched(*cases))


def select(pred: Any, on_true: Any, on_false: Any) -> Array:
    """Choose, elementwise, `on_true` where `pred` holds and `on_false` elsewhere.

    `pred` is boolean; each of the three is a scalar or has the result's shape. The two cases must
    have one dtype, where a Python number takes that of the other. **Both cases are computed**;
    `lax.cond` computes one. Raises `ShapeError` or `DtypeError` if shapes or dtypes differ: lax
    does not broadcast or promote, `snp.where` does.

    >>> lax.select(np.array([True, False]), np.array([1, 2]), np.array([10, 20]))
    Array([ 1, 20], dtype=int32)
    """
    return select_n(pred, on_false, on_true)


def _select_abstract(which: ShapedArray, *cases: ShapedArray) -> ShapedArray:
    names = [f"cases[{k}]" for k in range(len(cases))]
    check_dtype("select_n", "which", which, BITS)
    for name, case in zip(names, cases, strict=True):
        check_dtype("select_n", name, case, MOVABLE)
    check_same_dtype("select_n", names, cases)
    if dtypes.is_bool(which.dtype) and len(cases) != 2:
        fail(DtypeError, f"select_n: a bool `which` chooses between 2 cases, got {len(cases)}")
    shape = common_shape("select_n", ("which", *names), (which, *cases))
    return ShapedArray(shape, cases[0].dtype, all(c.weak_type for c in cases))


def _select_impl(xp: Any, which: Any, *cases: Any) -> Any:
    if dtypes.is_bool(which.dtype):
        return xp.where(which, cases[1], cases[0])
    shape = np.broadcast_shapes(which.shape, *(c.shape for c in cases))
    out = xp.broadcast_to(cases[0], shape)
    for k in range(1, len(cases)):  # an index beyond the last case takes the last
        out = xp.where(which >= k, cases[k], out)
    return out


def _select_jvp(primals: Any, tangents: Any) -> Any:
    out = select_n_p.bind(*primals)
    if all(isinstance(t, Zero) for t in tangents[1:]):
        return out, zero_tangent(out)
    zero = const(out, 0)
    cases = [zero if isinstance(t, Zero) else t for t in tangents[1:]]
    return out, spread(select_n_p.bind(primals[0], *cases), typeof(out).shape)


def _select_transpose(ct: Any, which: Any, *cases: Any) -> list[Any]:
    zero = const(ct, 0)
    if dtypes.is_bool(typeof(which).dtype):
        chosen = [
            select_n_p.bind(which, *pair) if is_linear(case) else None
            for case, pair in zip(cases, ((ct, zero), (zero, ct)), strict=True)
        ]
    else:
        chosen = [
            select(_takes(which, k, len(cases)), ct, zero) if is_linear(case) else None
            for k, case in enumerate(cases)
        ]
    return [None] + [
        None if c is None else unbroadcast(c, case.aval)
        for c, case in zip(chosen, cases, strict=True)
    ]


def _takes(which: Any, k: int, count: int) -> Any:
    """Whether `which` takes case k: the first and last also serve numbers beyond them."""
    if k == 0:
        return le(which, const(which, 0)) if count > 1 else ge(which, which)
    return ge(which, const(which, k)) if k == count - 1 else eq(which, const(which, k))


def _select_batch(axis: Any, operands: Any, at: Any) -> Any:
    operands, to = align_batch(axis, operands, at)
    return select_n_p.bind(*operands), to


select_n_p = Primitive(
    "select_n",
    abstract=_select_abstract,
    impl=quiet(_select_impl, widen=False),
    jvp=_select_jvp,
    transpose=_select_transpose,
    batch=_select_batch,
    dims=elementwise_dims,
)

# ---- clamp -------------------------------------------------------------------------------------


def clamp(min: Any, x: Any, max: Any) -> Array:
    """Limit `x`, elementwise, to at least `min` and at most `max`.

    The bounds are scalars or have the shape of `x`, and its dtype; Python numbers take that of `x`.
    Where `x` equals a bound, its derivative is 0. Raises `ShapeError` if shapes differ, and
    `DtypeError` if dtypes do: `snp.clip` broadcasts and promotes.

    >>> lax.clamp(0.0, np.array([-1.0, 0.5, 2.0]), 1.0)
    Array([0. , 0.5, 1. ], dtype=float32)
    """
    return clamp_p.bind(*matched(min, x, max))


def _kept(low: Any, x: Any, high: Any) -> Any:
    return bitwise_and(gt(x, low), lt(x, high))


def _zero_unless(where: Any, t: Any) -> Any:
    return select(where, t, const(t, 0))


# Where x equals a bound the derivative is 0, as in JAX.
clamp_p = elementwise(
    "clamp",
    ("min", "x", "max"),
    accepts=ANY,
    impl=lambda xp, low, x, high: xp.minimum(xp.maximum(x, low), high),
    jvp=(
        lambda t, low, x, high, out: _zero_unless(bitwise_and(gt(low, x), lt(low, high)), t),
        lambda t, low, x, high, out: _zero_unless(_kept(low, x, high), t),
        lambda t, low, x, high, out: _zero_unless(lt(high, x), t),
    ),
)
