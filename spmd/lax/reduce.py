"""Reductions: elements along some dims combined into one.

The one idea: a reduction over no elements gives the identity of its operator (0 for a sum, minus
infinity for max), and max, min, argmax and argmin let NaN win.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.base.tree import tree_flatten, tree_unflatten
from spmd.core.aval import ShapedArray, typeof
from spmd.core.explicit import hooks, laid_out, lays_out_result, match_sharding
from spmd.core.jvp import zero_tangent
from spmd.core.primitive import Primitive, dims
from spmd.core.structural import (
    broadcast_in_dim,
    permute_dims,
    reduce_sum,
    reduced_shape,
    reshape,
    to_front,
)
from spmd.core.trace import unchanged
from spmd.core.vmap import batch_flat, leading_axis
from spmd.lax.arithmetic import add, complex, div, imag, log, max, min, mul, real, sub
from spmd.lax.convert import convert_element_type, stop_gradient
from spmd.lax.elementwise import exp
from spmd.lax.families import (
    BITS,
    NUMERIC,
    ORDERED,
    check_dtype,
    const,
    fail,
    nonlinear,
    quiet,
    reduction,
    shifted,
)
from spmd.lax.logic import bitwise_and, bitwise_or, bitwise_xor, eq, ne, select
from spmd.lax.slicing import index_in_dim, slice_in_dim

if TYPE_CHECKING:
    from spmd.sharding.array import Array


# ---- max, min ----------------------------------------------------------------------------------


def reduce_max(operand: Any, axes: Sequence[int]) -> Array:
    """Take the largest element of `operand` along the given `axes`, which disappear from the shape.

    The dtype stays; NaN wins. Over no elements the result is minus infinity (the smallest integer,
    False). Elements that tie share the derivative equally. Raises `ShapeError` if a dim is out of
    range or named twice. Complex numbers are compared by their real parts first.

    >>> lax.reduce_max(np.array([[3, 1], [4, 1]]), (0,))
    Array([4, 1], dtype=int32)
    """
    return _extreme(reduce_max_p, operand, axes)


def reduce_min(operand: Any, axes: Sequence[int]) -> Array:
    """Take the smallest element of `operand` along the `axes`, which disappear from the shape.

    The dtype stays; NaN wins. Over no elements the result is infinity (the largest integer, True).
    Elements that tie share the derivative equally. Raises `ShapeError` if a dim is out of range or
    named twice. Complex numbers are compared by their real parts first.

    >>> lax.reduce_min(np.array([[3, 1], [4, 1]]), (1,))
    Array([1, 1], dtype=int32)
    """
    return _extreme(reduce_min_p, operand, axes)


def _bind(prim: Primitive, operand: Any, axes: Sequence[int]) -> Any:
    axes = tuple(int(d) for d in axes)
    return prim.bind(operand, axes=axes) if axes else unchanged(operand)


def _extreme(prim: Primitive, operand: Any, axes: Sequence[int]) -> Any:
    """The extreme of reals, or that of complex numbers in lexicographic order, where NaN wins."""
    if not dtypes.is_complex(typeof(operand).dtype):
        return _bind(prim, operand, axes)
    axes = tuple(int(d) for d in axes)
    parts = real(operand), imag(operand)
    first, second = (stop_gradient(part) for part in parts)
    worst = const(
        first, (dtypes.min_value if prim is reduce_max_p else dtypes.max_value)(typeof(first).dtype)
    )
    # The winners alone are left, so that they share the derivative as reals do.
    won = eq(first, restored(_bind(prim, first, axes), first, axes))
    second = select(won, second, worst)
    won = bitwise_and(won, eq(second, restored(_bind(prim, second, axes), second, axes)))
    undefined = reduce_or(ne(operand, operand), axes)
    ends = (_bind(prim, select(won, part, worst), axes) for part in parts)
    return complex(*(select(undefined, const(end, np.nan), end) for end in ends))


def restored(out: Any, x: Any, axes: Sequence[int]) -> Any:
    """A reduction's result, repeated along the dims that it combined."""
    shape = typeof(x).shape
    return broadcast_in_dim(out, shape, [d for d in range(len(shape)) if d not in axes])


def _extreme_jvp(t: Any, x: Any, out: Any, axes: tuple[int, ...]) -> Any:
    """The winners share the derivative equally."""
    won = convert_element_type(eq(x, restored(out, x, axes)), typeof(t).dtype)
    return div(reduce_sum(mul(t, won), axes), reduce_sum(won, axes))


reduce_max_p = reduction(
    "reduce_max",
    accepts=ORDERED,
    impl=lambda xp, x, axes: xp.max(x, axis=axes, initial=dtypes.min_value(x.dtype)[()]),
    combine="max",
    jvp=_extreme_jvp,
)
reduce_min_p = reduction(
    "reduce_min",
    accepts=ORDERED,
    impl=lambda xp, x, axes: xp.min(x, axis=axes, initial=dtypes.max_value(x.dtype)[()]),
    combine="min",
    jvp=_extreme_jvp,
)

# ---- prod --------------------------------------------------------------------------------------


def reduce_prod(operand: Any, axes: Sequence[int]) -> Array:
    """Multiply the elements of `operand` along the given `axes`, which disappear from the shape.

    The dtype stays, so integers can wrap around. Over no elements the result is 1. Raises
    `ShapeError` if a dim is out of range or named twice, and `DtypeError` for booleans.

    >>> lax.reduce_prod(np.array([[3, 1], [4, 2]]), (0,))
    Array([12,  2], dtype=int32)
    """
    return _bind(reduce_prod_p, operand, axes)


def _prod_jvp(t: Any, x: Any, out: Any, axes: tuple[int, ...]) -> Any:
    """Pairs are multiplied until one is left; unlike `out / x`, this is right where x is 0."""
    x, t = (_reduced_dims_first(v, axes) for v in (x, t))
    if typeof(x).shape[0] == 0:
        return mul(out, const(out, 0))

    def combine(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
        (x1, t1), (x2, t2) = left, right
        return mul(x1, x2), add(mul(t1, x2), mul(x1, t2))

    return _halved(combine, (x, t))[1]


def _reduced_dims_first(x: Any, axes: Sequence[int]) -> Any:
    """The dims `axes` merged into one leading dim, the others behind it."""
    shape = typeof(x).shape
    kept = [d for d in range(len(shape)) if d not in axes]
    sizes = (math.prod(shape[d] for d in axes), *(shape[d] for d in kept))
    return reshape(permute_dims(x, (*axes, *kept)), sizes)


def _halved(combine: Callable[[Any, Any], Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Combine along the leading dim, first half with second half, until none is left."""
    rest: Any = None
    while (size := typeof(values[0]).shape[0]) > 1:
        half = size // 2
        if size % 2:
            last = tuple(slice_in_dim(v, size - 1, size) for v in values)
            rest = last if rest is None else combine(last, rest)
        left = tuple(slice_in_dim(v, 0, half) for v in values)
        right = tuple(slice_in_dim(v, half, 2 * half) for v in values)
        values = combine(left, right)
    if rest is not None:
        values = combine(values, rest)
    return tuple(reshape(v, typeof(v).shape[1:]) for v in values)


reduce_prod_p = reduction(
    "reduce_prod",
    accepts=NUMERIC,
    impl=lambda xp, x, axes: xp.prod(x, axis=axes, dtype=x.dtype),
    combine="mul",
    jvp=_prod_jvp,
)

# ---- and, or, xor ------------------------------------------------------------------------------


def reduce_and(operand: Any, axes: Sequence[int]) -> Array:
    """Combine the elements of `operand` along the given `axes` with a bitwise "and".

    For bool this tells whether all elements are True. The dims disappear from the shape; the dtype
    stays. Over no elements all bits are set. Raises `DtypeError` for floats and complex numbers,
    and `ShapeError` if a dim is out of range or named twice.

    >>> lax.reduce_and(np.array([[True, False], [True, True]]), (0,))
    Array([ True, False], dtype=bool)
    """
    return _bind(reduce_and_p, operand, axes)


def reduce_or(operand: Any, axes: Sequence[int]) -> Array:
    """Combine the elements of `operand` along the given `axes` with a bitwise "or".

    For bool this tells whether any element is True. The dims disappear from the shape; the dtype
    stays. Over no elements no bit is set. Raises `DtypeError` for floats and complex numbers, and
    `ShapeError` if a dim is out of range or named twice.

    >>> lax.reduce_or(np.array([[True, False], [False, False]]), (0,))
    Array([ True, False], dtype=bool)
    """
    return _bind(reduce_or_p, operand, axes)


def reduce_xor(operand: Any, axes: Sequence[int]) -> Array:
    """Combine the elements of `operand` along the given `axes` with a bitwise "exclusive or".

    For bool this tells whether an odd number of elements is True. The dims disappear from the
    shape; the dtype stays. Raises `DtypeError` for floats and complex numbers, and `ShapeError` if
    a dim is out of range or named twice.

    >>> lax.reduce_xor(np.array([5, 3, 1]), (0,))
    Array(7, dtype=int32)
    """
    return _bind(reduce_xor_p, operand, axes)


def _all_bits(dtype: np.dtype) -> Any:
    return np.asarray(True) if dtypes.is_bool(dtype) else np.asarray(-1).astype(dtype)


reduce_and_p = reduction(
    "reduce_and",
    accepts=BITS,
    impl=lambda xp, x, axes: xp.bitwise_and.reduce(x, axis=axes, initial=_all_bits(x.dtype)[()]),
    combine="and",
    weak=False,
)
reduce_or_p = reduction(
    "reduce_or",
    accepts=BITS,
    impl=lambda xp, x, axes: xp.bitwise_or.reduce(x, axis=axes, initial=x.dtype.type(0)),
    combine="or",
    weak=False,
)
reduce_xor_p = reduction(
    "reduce_xor",
    accepts=BITS,
    impl=lambda xp, x, axes: xp.bitwise_xor.reduce(x, axis=axes, initial=x.dtype.type(0)),
    combine="xor",
    weak=False,
)

# ---- argmax, argmin ----------------------------------------------------------------------------


def argmax(operand: Any, axis: int, index_dtype: Any) -> Array:
    """Find the position of the largest element along dim `axis`, which disappears.

    The result has dtype `index_dtype`, an integer dtype. Of equal elements the first wins; NaN wins
    over all numbers. Raises `DtypeError` for complex numbers or another `index_dtype`, and
    `ShapeError` if the dim of `operand` is empty or out of range.

    >>> lax.argmax(np.array([3.0, 7.0, 7.0]), 0, np.int32)
    Array(1, dtype=int32)
    """
    return argmax_p.bind(operand, axes=(int(axis),), index_dtype=dtypes.canonical(index_dtype))


def argmin(operand: Any, axis: int, index_dtype: Any) -> Array:
    """Find the position of the smallest element along dim `axis`, which disappears.

    The result has dtype `index_dtype`, an integer dtype. Of equal elements the first wins; NaN wins
    over all numbers. Raises `DtypeError` for complex numbers or another `index_dtype`, and
    `ShapeError` if the dim of `operand` is empty or out of range.

    >>> lax.argmin(np.array([3.0, 1.0, 1.0]), 0, np.int32)
    Array(1, dtype=int32)
    """
    return argmin_p.bind(operand, axes=(int(axis),), index_dtype=dtypes.canonical(index_dtype))


def _arg_reduction(name: str) -> Primitive:
    """The primitive for the position of an extreme along one dim."""

    def abstract(x: ShapedArray, *, axes: Any, index_dtype: np.dtype) -> ShapedArray:
        check_dtype(name, "operand", x, ORDERED)
        if not dtypes.is_integer(index_dtype):
            fail(DtypeError, f"{name}: index_dtype={index_dtype} must be an integer dtype")
        shape = reduced_shape(x, axes, name)
        if x.shape[axes[0]] == 0:
            fail(ShapeError, f"{name}: dim {axes[0]} of {x} is empty, so no element can be named")
        return ShapedArray(shape, index_dtype)

    def impl(xp: Any, x: Any, *, axes: Any, index_dtype: np.dtype) -> Any:
        return getattr(xp, name)(x, axis=axes[0]).astype(index_dtype)

    def batch(axis: Any, operands: Any, at: Any, *, axes: Any, index_dtype: np.dtype) -> Any:
        moved = shifted(axes, at[0])
        out = prim.bind(operands[0], axes=moved, index_dtype=index_dtype)
        return out, at[0] - (moved[0] < at[0])

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = prim.bind(*primals, **params)
        return out, zero_tangent(out)

    def dims_rule(x: ShapedArray, *, axes: Any, index_dtype: np.dtype) -> Any:
        kept = [d for d in range(x.ndim) if d not in axes]
        return dims([range(x.ndim)], [kept], whole=axes)

    prim = Primitive(
        name,
        abstract=abstract,
        impl=quiet(impl),
        jvp=jvp,
        transpose=nonlinear(name),
        batch=batch,
        dims=dims_rule,
    )
    return prim


argmax_p = _arg_reduction("argmax")
argmin_p = _arg_reduction("argmin")

# ---- any monoid --------------------------------------------------------------------------------

_KNOWN = {
    add: reduce_sum,
    mul: reduce_prod,
    max: reduce_max,
    min: reduce_min,
    bitwise_and: reduce_and,
    bitwise_or: reduce_or,
    bitwise_xor: reduce_xor,
}


# The most elements that `reduce` combines one after the other, each with the result so far.
MAX_IN_ORDER = 16


@lays_out_result
def reduce(
    operands: Any,
    init_values: Any,
    computation: Callable[..., Any],
    dimensions: Sequence[int],
    out_sharding: Any = None,
) -> Any:
    """Combine elements along `dimensions` with any associative function of two scalars.

    `operands` is an array or a pytree of arrays of one shape, `init_values` the like of scalars,
    with which each reduction starts. `computation(x, y)` takes and returns that pytree of scalars,
    and must not care how elements are grouped: up to `MAX_IN_ORDER` are combined one after the
    other, more are not. The `dimensions` disappear from the shape; the dtype stays. `lax.add`,
    `lax.max` and their like become the reductions of that name, which are the fast cases.

    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises `ShapeError` if the shapes of the arrays differ or a dim is out of range, and
    `ArgumentError` if the two pytrees have different structures.

    >>> lax.reduce(np.array([[3, 1], [4, 1]]), 0, lax.max, (0,))
    Array([4, 1], dtype=int32)
    >>> lax.reduce(np.arange(1, 5), 1, lambda x, y: x * y, (0,))
    Array(24, dtype=int32)
    """
    arrays, tree = tree_flatten(operands)
    inits, init_tree = tree_flatten(init_values)
    dimensions = tuple(int(d) for d in dimensions)
    _check_reduce(arrays, inits, tree == init_tree, dimensions)
    known = _KNOWN.get(computation)
    if known is not None and len(arrays) == 1:
        out = computation(known(arrays[0], dimensions), inits[0])
        return tree_unflatten(tree, [out])
    lies = typeof(arrays[0]).explicit
    if len(arrays) == 1 and lies is not None and any(lies.spec[d] for d in dimensions):
        # The result has the layout of the dims that are left; the compiler chooses the collective.
        for d in sorted(dimensions, reverse=True):
            lies = hooks.without_dim(lies, d)

        def reduced(x: Any) -> Any:
            return _reduce_any([x], inits, tree, computation, dimensions)[0]

        return tree_unflatten(tree, [laid_out(lies, reduced, arrays[0])])
    return tree_unflatten(tree, _reduce_any(arrays, inits, tree, computation, dimensions))


def _check_reduce(arrays: Any, inits: Any, same_tree: bool, dimensions: Any) -> None:
    if not arrays or not same_tree:
        raise ArgumentError(
            "reduce: operands and init_values must be pytrees of the same structure, with at "
            f"least one array; got {len(arrays)} and {len(inits)} values"
        )
    check_reduced("reduce", arrays, inits)
    reduced_shape(typeof(arrays[0]), dimensions, "reduce")


def check_reduced(name: str, arrays: Sequence[Any], inits: Sequence[Any]) -> None:
    """Arrays that are reduced together have one shape, and start from scalars."""
    shape = typeof(arrays[0]).shape
    for k, (x, init) in enumerate(zip(arrays, inits, strict=True)):
        if typeof(x).shape != shape or typeof(init).shape:
            fail(
                ShapeError,
                f"{name}: operand {k} is {typeof(x)} with init value {typeof(init)}; all operands "
                f"must have the shape of the first, {shape}, and init values be scalars",
            )


def _along_first(f: Callable[..., Sequence[Any]], size: int, *arrays: Any) -> list[Any]:
    """`f` of the slices along the first dim of arrays, whose size is `size`."""
    outs, at = batch_flat(f, leading_axis(arrays, size), arrays, [0] * len(arrays))
    return [to_front(out, d, size) for out, d in zip(outs, at, strict=True)]


def combine_arrays(computation: Callable[..., Any], tree: Any) -> Callable[..., Any]:
    """A function of pytrees of scalars, as one of two tuples of arrays, element by element."""

    def on_scalars(*flat: Any) -> list[Any]:
        count = len(flat) // 2
        x, y = (tree_unflatten(tree, part) for part in (flat[:count], flat[count:]))
        return tree_flatten(computation(x, y))[0]

    def combine(left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[Any, ...]:
        shape = typeof(left[0]).shape
        along = on_scalars
        for size in reversed(shape):  # a dim at a time: the flat arrays may lie otherwise
            along = functools.partial(_along_first, along, size)
        return tuple(along(*left, *right))

    return combine


def _reduce_any(
    arrays: Any, inits: Any, tree: Any, computation: Callable[..., Any], dimensions: Any
) -> list[Any]:
    columns = tuple(_reduced_dims_first(x, dimensions) for x in arrays)
    inits = tuple(
        convert_element_type(init, typeof(x).dtype) for x, init in zip(arrays, inits, strict=True)
    )

    combine = combine_arrays(computation, tree)
    kept = typeof(columns[0]).shape[1:]
    start = tuple(broadcast_in_dim(init, kept, ()) for init in inits)
    if typeof(columns[0]).shape[0] == 0:
        return list(start)
    if (size := typeof(columns[0]).shape[0]) <= MAX_IN_ORDER:
        parts = [tuple(index_in_dim(v, k, keepdims=False) for v in columns) for k in range(size)]
    else:
        parts = [_halved(combine, columns)]
    laid = tuple(match_sharding(x, typeof(y)) for x, y in zip(start, parts[0], strict=True))
    return list(functools.reduce(combine, parts, laid))


def logsumexp(operand: Any, axes: Sequence[int]) -> Array:
    """Compute `log(sum(exp(operand)))` along the given `axes`, without overflow.

    The dims disappear from the shape; the dtype, a float one, stays. The largest element is
    subtracted before the exponential and added to the logarithm. Raises `DtypeError` for other
    dtypes, and `ShapeError` if a dim is out of range or named twice.

    >>> lax.logsumexp(np.array([1000.0, 1000.0]), (0,))
    Array(1000.6932, dtype=float32)
    """
    top = stop_gradient(reduce_max(operand, axes))
    finite = eq(sub(top, top), const(top, 0))
    top = select(finite, top, const(top, 0))
    shifted_down = sub(operand, restored(top, operand, axes))
    return add(log(reduce_sum(exp(shifted_down), tuple(axes))), top)
