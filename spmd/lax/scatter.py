"""Scatters that replace, multiply, or keep the smallest or largest; scatter_add is in `gather`.

A scatter is defined to work through its updates in row-major order. So where several updates meet
in one element of `scatter`, the last one wins, on every backend; its gradient can rely on that.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import RefusedError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.primitive import Linear, Primitive, Refused, Zero, shown_as
from spmd.core.structural import add_any, broadcast_in_dim, reshape, to_front, zeros_like_aval
from spmd.core.vmap import BatchAxis, batch_flat
from spmd.lax.arithmetic import add, div, mul, neg
from spmd.lax.array import iota
from spmd.lax.control_while import while_loop
from spmd.lax.convert import convert_element_type
from spmd.lax.families import fail, linear_in
from spmd.lax.gather import gather_like_scatter, scatter_add, scatter_add_p
from spmd.lax.logic import eq, gt, lt, select
from spmd.lax.reduce import reduce_max
from spmd.lax.scatter_rules import (
    bind_scatter,
    scatter_abstract,
    scatter_batch,
    scatter_dims,
    scatter_impl,
)
from spmd.lax.windows import GatherScatterMode, ScatterDimensionNumbers

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- scatter -----------------------------------------------------------------------------------


def scatter(
    operand: Any,
    scatter_indices: Any,
    updates: Any,
    dimension_numbers: ScatterDimensionNumbers,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: str | GatherScatterMode | None = None,
) -> Array:
    """Write windows of `updates` over `operand` where `scatter_indices` says.

    The last dim of `scatter_indices`, an array of integers, holds index vectors;
    `dimension_numbers` says which operand dim each of their components addresses and which dims of
    `updates` run inside a window. The result has the shape and dtype of `operand`. Of several
    updates of one element the last wins. `mode=None` is "drop": windows that do not fit are left
    out; "clip" moves them inside. `unique_indices` and `indices_are_sorted` are promises of the
    caller. **Prefer `x.at[i].set(v)`, which writes these numbers for you.**

    Raises `ShapeError` if shapes or dimension numbers do not fit, `DtypeError` if dtypes differ or
    indices are no integers, and `ArgumentError` for another mode.

    >>> elements = lax.ScatterDimensionNumbers((), (0,), (0,))
    >>> lax.scatter(np.zeros(3), np.array([[0], [2], [2]]), np.array([1.0, 2.0, 3.0]), elements)
    Array([1., 0., 3.], dtype=float32)
    """
    how = dimension_numbers, indices_are_sorted, unique_indices, mode
    return bind_scatter(scatter_p, operand, scatter_indices, updates, *how)


def _scatter_transpose(
    ct: Any, operand: Any, indices: Any, updates: Any, **params: Any
) -> list[Any]:
    aval = updates.aval if isinstance(updates, Linear) else typeof(updates)
    ct_operand = ct_updates = None
    if isinstance(operand, Linear):
        zeros = zeros_like_aval(aval)
        ct_operand = scatter_p.bind(ct, indices, zeros, **params)
    if isinstance(updates, Linear):
        ct_updates = gather_like_scatter(ct, indices, aval, **params)
        if not params["unique_indices"]:
            survives = _survivors(typeof(ct), indices, aval, params)
            ct_updates = select(survives, ct_updates, zeros_like_aval(aval))
    return [ct_operand, None, ct_updates]


def _survivors(
    operand: ShapedArray, indices: Any, updates: ShapedArray, params: dict[str, Any]
) -> Any:
    """The mask of the updates' elements that are not overwritten by a later one.

    Every update writes its own number; those that find it again have survived.
    """
    numbers = broadcast_in_dim(np.int32(0), operand.shape, ())
    own = reshape(iota(np.int32, updates.size), updates.shape)
    written = scatter_p.bind(numbers, indices, own, **params)
    return eq(gather_like_scatter(written, indices, updates, **params), own)


scatter_p = Primitive(
    "scatter",
    abstract=scatter_abstract("scatter", None),
    impl=scatter_impl(lambda xp, out, index, v: operator.setitem(out, index, v)),
    # The same updates win for the tangents as for the primals: the indices decide it alone.
    jvp=linear_in(lambda: scatter_p, 0, 2),
    transpose=_scatter_transpose,
    batch=scatter_batch(lambda: scatter_p),
    dims=scatter_dims,
)


def scatter_sub(
    operand: Any,
    scatter_indices: Any,
    updates: Any,
    dimension_numbers: ScatterDimensionNumbers,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: str | GatherScatterMode | None = None,
) -> Array:
    """Subtract windows of `updates` from `operand` where `scatter_indices` says.

    It is `scatter_add` of their negatives. `dimension_numbers`, `indices_are_sorted`,
    `unique_indices`, `mode`, the shape and the dtype, which are those of `operand`, and the errors
    are as in `scatter`: `ShapeError`, `DtypeError` and `ArgumentError`.

    >>> elements = lax.ScatterDimensionNumbers((), (0,), (0,))
    >>> lax.scatter_sub(np.zeros(3), np.array([[0], [2], [2]]), np.ones(3), elements)
    Array([-1.,  0., -2.], dtype=float32)
    """
    how = dimension_numbers, indices_are_sorted, unique_indices, mode
    return bind_scatter(scatter_add_p, operand, scatter_indices, neg(updates), *how)


# ---- scatter_mul -------------------------------------------------------------------------------


def scatter_mul(
    operand: Any,
    scatter_indices: Any,
    updates: Any,
    dimension_numbers: ScatterDimensionNumbers,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: str | GatherScatterMode | None = None,
) -> Array:
    """Multiply `operand` by windows of `updates` where `scatter_indices` says.

    Several updates of one element are all multiplied. The derivative with respect to `updates`
    needs `unique_indices=True`, or `RefusedError` is raised. `dimension_numbers`,
    `indices_are_sorted`, `unique_indices`, `mode`, the shape and the dtype, which are those of
    `operand`, and the errors are as in `scatter`: `ShapeError`, `DtypeError` and `ArgumentError`.

    >>> elements = lax.ScatterDimensionNumbers((), (0,), (0,))
    >>> lax.scatter_mul(np.ones(3), np.array([[0], [2], [2]]), np.full(3, 5.0), elements)
    Array([ 5.,  1., 25.], dtype=float32)
    """
    how = dimension_numbers, indices_are_sorted, unique_indices, mode
    return bind_scatter(scatter_mul_p, operand, scatter_indices, updates, *how)


def _scatter_mul_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    operand, indices, updates = primals
    t_operand, _, t_updates = tangents
    out = scatter_mul_p.bind(operand, indices, updates, **params)
    terms = []
    if not isinstance(t_operand, Zero):
        terms.append(scatter_mul_p.bind(t_operand, indices, updates, **params))
    if not isinstance(t_updates, Zero):
        if not params["unique_indices"]:
            fail(
                RefusedError,
                "scatter_mul: the derivative with respect to the updates needs to know that no "
                "element is multiplied twice; pass unique_indices=True if that is so",
            )
        read = gather_like_scatter(operand, indices, typeof(updates), **params)
        zeros = zeros_like_aval(typeof(operand))
        terms.append(scatter_add_p.bind(zeros, indices, mul(read, t_updates), **params))
    return out, functools.reduce(add_any, terms)


scatter_mul_p = Primitive(
    "scatter_mul",
    abstract=scatter_abstract("scatter_mul", dtypes.NUMERIC),
    impl=scatter_impl(lambda xp, out, index, v: xp.multiply.at(out, index, v), in_float32=True),
    jvp=_scatter_mul_jvp,
    transpose=lambda ct, operand, *rest, **params: [
        scatter_mul_p.bind(ct, *rest, **params),
        None,
        None,
    ],
    batch=scatter_batch(lambda: scatter_mul_p),
    dims=scatter_dims,
    text=shown_as("scatter-mul"),
)

# ---- scatter_min, scatter_max ------------------------------------------------------------------


def scatter_min(
    operand: Any,
    scatter_indices: Any,
    updates: Any,
    dimension_numbers: ScatterDimensionNumbers,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: str | GatherScatterMode | None = None,
) -> Array:
    """Lower `operand` to windows of `updates` where `scatter_indices` says; NaN propagates.

    Where several values are the smallest, the derivative is their average. `dimension_numbers`,
    `indices_are_sorted`, `unique_indices`, `mode`, the shape and the dtype, which are those of
    `operand`, and the errors are as in `scatter`: `ShapeError`, `DtypeError` and `ArgumentError`.

    >>> elements = lax.ScatterDimensionNumbers((), (0,), (0,))
    >>> lax.scatter_min(np.ones(3), np.array([[0], [2]]), np.array([5.0, -5.0]), elements)
    Array([ 1.,  1., -5.], dtype=float32)
    """
    how = dimension_numbers, indices_are_sorted, unique_indices, mode
    return bind_scatter(scatter_min_p, operand, scatter_indices, updates, *how)


def scatter_max(
    operand: Any,
    scatter_indices: Any,
    updates: Any,
    dimension_numbers: ScatterDimensionNumbers,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: str | GatherScatterMode | None = None,
) -> Array:
    """Raise `operand` to windows of `updates` where `scatter_indices` says; NaN propagates.

    Where several values are the largest, the derivative is their average. `dimension_numbers`,
    `indices_are_sorted`, `unique_indices`, `mode`, the shape and the dtype, which are those of
    `operand`, and the errors are as in `scatter`: `ShapeError`, `DtypeError` and `ArgumentError`.

    >>> elements = lax.ScatterDimensionNumbers((), (0,), (0,))
    >>> lax.scatter_max(np.ones(3), np.array([[0], [2]]), np.array([5.0, -5.0]), elements)
    Array([5., 1., 1.], dtype=float32)
    """
    how = dimension_numbers, indices_are_sorted, unique_indices, mode
    return bind_scatter(scatter_max_p, operand, scatter_indices, updates, *how)


def _extremal_jvp(get_prim: Callable[[], Primitive]) -> Callable[..., Any]:
    """The average of the tangents of all values that equal the result, the operand's included."""

    def rule(primals: Any, tangents: Any, **params: Any) -> Any:
        operand, indices, updates = primals
        t_operand, _, t_updates = tangents
        out = get_prim().bind(operand, indices, updates, **params)
        aval = typeof(updates)
        kept = convert_element_type(eq(operand, out), aval.dtype)
        reached = gather_like_scatter(out, indices, aval, **params)
        won = convert_element_type(eq(updates, reached), aval.dtype)
        total = zeros_like_aval(typeof(operand))
        if not isinstance(t_operand, Zero):
            total = mul(kept, t_operand)
        if not isinstance(t_updates, Zero):
            total = scatter_add_p.bind(total, indices, mul(won, t_updates), **params)
        return out, div(total, scatter_add_p.bind(kept, indices, won, **params))

    return rule


_NOT_LINEAR = Refused("is not linear; differentiate it with grad, which uses its jvp")

scatter_min_p = Primitive(
    "scatter_min",
    abstract=scatter_abstract("scatter_min", dtypes.ORDERED),
    impl=scatter_impl(lambda xp, out, index, v: xp.minimum.at(out, index, v), in_float32=True),
    jvp=_extremal_jvp(lambda: scatter_min_p),
    transpose=_NOT_LINEAR,
    batch=scatter_batch(lambda: scatter_min_p),
    dims=scatter_dims,
    text=shown_as("scatter-min"),
)

scatter_max_p = Primitive(
    "scatter_max",
    abstract=scatter_abstract("scatter_max", dtypes.ORDERED),
    impl=scatter_impl(lambda xp, out, index, v: xp.maximum.at(out, index, v), in_float32=True),
    jvp=_extremal_jvp(lambda: scatter_max_p),
    transpose=_NOT_LINEAR,
    batch=scatter_batch(lambda: scatter_max_p),
    dims=scatter_dims,
    text=shown_as("scatter-max"),
)


# ---- scatter_apply -----------------------------------------------------------------------------


def scatter_apply(
    operand: Any,
    scatter_indices: Any,
    func: Callable[[Any], Any],
    dimension_numbers: ScatterDimensionNumbers,
    *,
    update_shape: Sequence[int] = (),
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: str | GatherScatterMode | None = None,
) -> Array:
    """Replace elements of `operand` by `func` of them where `scatter_indices` says.

    `func` is a function of one scalar. An element that is addressed twice is replaced twice,
    unless `unique_indices` says that there is none. `update_shape` is the shape that `updates`
    would have in `scatter`: batch dims, and those of a window. `dimension_numbers`,
    `indices_are_sorted`, `mode`, the shape and the dtype, which are those of `operand`, and the
    errors are as there: `ShapeError`, `DtypeError` and `ArgumentError`.
    **Prefer `x.at[i].apply(func)`.**

    >>> elements = lax.ScatterDimensionNumbers((), (0,), (0,))
    >>> lax.scatter_apply(
    ...     np.arange(3.0), np.array([[1], [2], [2]]), lambda x: 2 * x, elements, update_shape=(3,)
    ... )
    Array([0., 2., 8.], dtype=float32)
    """
    aval = typeof(operand)
    one = broadcast_in_dim(np.int32(1), tuple(update_shape), ())
    times = scatter_add(
        broadcast_in_dim(np.int32(0), aval.shape, ()),
        scatter_indices,
        one,
        dimension_numbers,
        indices_are_sorted=indices_are_sorted,
        unique_indices=unique_indices,
        mode=mode,
    )

    def replaced(x: Any, count: Any) -> Any:
        flat = [reshape(x, (aval.size,))]
        axis = BatchAxis(None, aval.size)
        (out,), (dim,) = batch_flat(lambda element: [func(element)], axis, flat, [0])
        new = reshape(to_front(out, dim, aval.size), aval.shape)
        return select(gt(times, count), convert_element_type(new, aval.dtype), x)

    zero = broadcast_in_dim(np.int32(0), aval.shape, ())
    if unique_indices:
        return replaced(operand, zero)
    most = reduce_max(times, tuple(range(aval.ndim)))
    out, _ = while_loop(
        lambda state: lt(state[1], most),
        lambda state: (
            replaced(state[0], broadcast_in_dim(state[1], aval.shape, ())),
            add(state[1], np.int32(1)),
        ),
        (operand, np.int32(0)),
    )
    return out
