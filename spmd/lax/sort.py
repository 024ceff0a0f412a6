"""Sorting: along one dim, by one or several keys, any number of arrays moved alike.

The order is total: numbers ascending, -0.0 equal to 0.0, NaN after everything; complex numbers by
their real part, then by their imaginary part; False before True. The derivative is the same
permutation of the tangents, which a gather makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import (
    ArgumentError,
    DtypeError,
    KeyOperationError,
    OptionError,
    ShapeError,
)
from spmd.base.util import canonical_dim
from spmd.core.aval import ShapedArray, typeof
from spmd.core.jvp import zero_tangent
from spmd.core.primitive import Primitive, Refused, Zero, dims
from spmd.core.structural import move_dim, to_front
from spmd.lax.arithmetic import neg
from spmd.lax.array import broadcasted_iota, expand_dims
from spmd.lax.families import fail
from spmd.lax.gather import gather
from spmd.lax.windows import GatherDimensionNumbers, GatherScatterMode

if TYPE_CHECKING:
    from spmd.sharding.array import Array

_NOT_LINEAR = Refused("is not linear; differentiate it with grad, which uses its jvp")

# ---- sort --------------------------------------------------------------------------------------


@overload
def sort(
    operand: list[Any] | tuple[Any, ...],
    dimension: int = -1,
    is_stable: bool = True,
    num_keys: int = 1,
) -> tuple[Array, ...]: ...


@overload
def sort(operand: Any, dimension: int = -1, is_stable: bool = True, num_keys: int = 1) -> Array: ...


def sort(operand: Any, dimension: int = -1, is_stable: bool = True, num_keys: int = 1) -> Any:
    """Sort `operand` along `dimension`; of a sequence of arrays, sort all by the first ones.

    The order is ascending and total: NaN comes after all numbers, -0.0 equals 0.0, and complex
    numbers are ordered by their real, then their imaginary part. Shapes and dtypes stay. In a tuple
    or list of arrays of one shape, the first `num_keys` are the keys, the first of them the most
    important. Equal keys keep their order: every sort is stable, whatever `is_stable` says.

    Raises `ShapeError` if shapes differ, `ArgumentError` if there is no array or no such number of
    keys, `DtypeError` if a key has no order, and `DimensionError` if `dimension` is out of range.

    >>> lax.sort(np.array([3.0, np.nan, 1.0]))
    Array([ 1.,  3., nan], dtype=float32)
    >>> lax.sort((np.array([2, 1, 2]), np.array([9, 8, 7])), num_keys=2)
    (Array([1, 2, 2], dtype=int32), Array([8, 7, 9], dtype=int32))
    """
    if not isinstance(operand, (list, tuple)):
        return sort((operand,), dimension, is_stable, num_keys)[0]
    if not operand:
        raise ArgumentError("sort: needs at least one operand, got an empty sequence")
    if not 1 <= num_keys <= len(operand):
        raise ArgumentError(
            f"sort: num_keys={num_keys} must be between 1 and the number of operands, "
            f"{len(operand)}"
        )
    dimension = canonical_dim(dimension, typeof(operand[0]).ndim, "dimension")
    return tuple(
        sort_p.bind(
            *operand, dimension=dimension, is_stable=bool(is_stable), num_keys=int(num_keys)
        )
    )


def sort_key_val(
    keys: Any, values: Any, dimension: int = -1, is_stable: bool = True
) -> tuple[Array, Array]:
    """Sort `keys` along `dimension` and give `values` the same permutation.

    Both arrays have one shape, and keep it and their dtypes. The order is that of `sort`; it is
    stable, whatever `is_stable` says. Raises `ShapeError` if shapes differ, and `DtypeError` if the
    keys have no order.

    >>> lax.sort_key_val(np.array([3, 1, 2]), np.array([30, 10, 20]))
    (Array([1, 2, 3], dtype=int32), Array([10, 20, 30], dtype=int32))
    """
    keys, values = sort((keys, values), dimension, is_stable)
    return keys, values


def argsort(operand: Any, dimension: int = -1, is_stable: bool = True) -> Array:
    """Find the int32 positions along `dimension` that sort `operand`.

    The result has the shape of `operand`. The order is that of `sort`; it is stable, whatever
    `is_stable` says. Raises `DimensionError` if `dimension` is out of range, and `DtypeError` if
    the elements have no order.

    >>> lax.argsort(np.array([3.0, 1.0, 2.0]))
    Array([1, 2, 0], dtype=int32)
    """
    aval = typeof(operand)
    dimension = canonical_dim(dimension, aval.ndim, "dimension")
    places = broadcasted_iota(np.int32, aval.shape, dimension)
    return sort((operand, places), dimension, is_stable)[1]


def _sort_abstract(
    *xs: ShapedArray, dimension: int, is_stable: bool, num_keys: int
) -> list[ShapedArray]:
    for k, x in enumerate(xs):
        if x.shape != xs[0].shape:
            fail(
                ShapeError,
                f"sort: operands must have equal shapes; operand 0 is {xs[0]}, operand {k} is {x}",
            )
        if k < num_keys and x.dtype not in dtypes.ANY:
            kind = KeyOperationError if dtypes.is_key(x.dtype) else DtypeError
            fail(kind, f"sort: operand {k}, {x}, has no order and can be no key")
    return list(xs)


def _sort_impl(xp: Any, *xs: Any, dimension: int, is_stable: bool, num_keys: int) -> list[Any]:
    if len(xs) == 1:
        return [_sorted(xp, xs[0], dimension)]
    order = _order(xp, xs[:num_keys], dimension)
    return [xp.take_along_axis(x, order, dimension) for x in xs]


def _sorted(xp: Any, x: Any, dimension: int) -> Any:
    if x.dtype == dtypes.bfloat16:
        return xp.sort(x.astype(np.float32), axis=dimension, kind="stable").astype(x.dtype)
    return xp.sort(x, axis=dimension, kind="stable")


def _order(xp: Any, keys: Sequence[Any], dimension: int) -> Any:
    """The stable permutation along a dim that puts the keys in order, the first one primary."""
    parts = []
    for key in keys:
        key = key.astype(np.float32) if key.dtype == dtypes.bfloat16 else key
        parts += [key.real, key.imag] if dtypes.is_complex(key.dtype) else [key]
    return xp.lexsort(parts[::-1], axis=dimension)


def _sort_jvp(
    primals: Any, tangents: Any, *, dimension: int, is_stable: bool, num_keys: int
) -> Any:
    places = broadcasted_iota(np.int32, typeof(primals[0]).shape, dimension)
    *outs, order = sort_p.bind(
        *primals, places, dimension=dimension, is_stable=is_stable, num_keys=num_keys
    )
    moved = [
        zero_tangent(out) if isinstance(t, Zero) else take_along(t, order, dimension)
        for t, out in zip(tangents, outs, strict=True)
    ]
    return outs, moved


def take_along(x: Any, places: Any, dimension: int) -> Any:
    """Read `x` along one dim at places inside it that differ from row to row."""
    ndim = typeof(x).ndim
    others = tuple(d for d in range(ndim) if d != dimension)
    numbers = GatherDimensionNumbers((), (dimension,), (dimension,), others, others)
    return gather(
        x,
        expand_dims(places, (ndim,)),
        numbers,
        (1,) * ndim,
        unique_indices=True,
        mode=GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def _sort_batch(axis: Any, operands: Any, at: Any, *, dimension: int, **params: Any) -> Any:
    d = next(d for d in at if d is not None)
    moved = [
        move_dim(x, k, d) if k is not None else move_dim(to_front(x, None, axis.size), 0, d)
        for x, k in zip(operands, at, strict=True)
    ]
    outs = sort_p.bind(*moved, dimension=dimension + (d <= dimension), **params)
    return outs, [d] * len(outs)


def _sort_dims(*xs: ShapedArray, dimension: int, **_: Any) -> Any:
    labels = [range(xs[0].ndim)] * len(xs)
    return dims(labels, labels, whole=(dimension,))


sort_p = Primitive(
    "sort",
    abstract=_sort_abstract,
    impl=_sort_impl,
    jvp=_sort_jvp,
    transpose=_NOT_LINEAR,
    batch=_sort_batch,
    dims=_sort_dims,
    multiple=True,
)

# ---- top_k -------------------------------------------------------------------------------------


def top_k(operand: Any, k: int, *, axis: int = -1) -> list[Array]:
    """Find the `k` largest values along `axis`, largest first, and their int32 positions.

    Both results have the shape of `operand` but size `k` along `axis`; the values keep its dtype.
    Of equal values the one with the smaller position comes first; NaN counts as the largest, and
    0.0 as larger than -0.0. Raises `ShapeError` for a scalar or if `k` is larger than the dim,
    `DtypeError` for complex numbers, and `DimensionError` if `axis` is out of range.

    >>> lax.top_k(np.array([3, 9, 1, 9]), 2)
    [Array([9, 9], dtype=int32), Array([1, 3], dtype=int32)]
    """
    aval = typeof(operand)
    if aval.ndim == 0:
        fail(ShapeError, f"top_k: the operand must have at least one dim, got {aval}")
    axis = canonical_dim(axis, aval.ndim)
    return top_k_p.bind(operand, k=k.__index__(), axis=axis)


def _top_k_abstract(x: ShapedArray, *, k: int, axis: int) -> list[ShapedArray]:
    if x.dtype not in dtypes.ORDERED:
        fail(DtypeError, f"top_k: the elements of {x} have no order")
    if not 0 <= k <= x.shape[axis]:
        fail(
            ShapeError,
            f"top_k: k={k} must be between 0 and the size of dim {axis} of {x}, {x.shape[axis]}",
        )
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    return [x.update(shape=shape), ShapedArray(shape, np.int32)]


def _top_k_impl(xp: Any, x: Any, *, k: int, axis: int) -> list[Any]:
    # The last k of an ascending stable order, read backwards, has ties the wrong way around; so
    # reverse before sorting too, and count positions from the other end.
    size = x.shape[axis]
    backwards = xp.flip(x, axis)
    keys = [backwards]
    if dtypes.is_float(x.dtype):
        keys.append(~xp.signbit(backwards))  # 0.0 is larger than -0.0 here
    order = _order(xp, keys, axis)
    places = size - 1 - xp.flip(order, axis)
    places = xp.take(places, xp.arange(k), axis=axis)
    return [xp.take_along_axis(x, places, axis), places.astype(np.int32)]


def _top_k_jvp(primals: Any, tangents: Any, *, k: int, axis: int) -> Any:
    values, places = top_k_p.bind(*primals, k=k, axis=axis)
    return [values, places], [take_along(tangents[0], places, axis), zero_tangent(places)]


def _top_k_batch(vmapped: Any, operands: Any, at: Any, *, k: int, axis: int) -> Any:
    d = at[0]
    return top_k_p.bind(operands[0], k=k, axis=axis + (d <= axis)), [d, d]


def _top_k_dims(x: ShapedArray, *, k: int, axis: int) -> Any:
    operand = [-1 if d == axis else d for d in range(x.ndim)]
    result = [-2 if d == axis else d for d in range(x.ndim)]
    return dims([operand], [result, result])


top_k_p = Primitive(
    "top_k",
    abstract=_top_k_abstract,
    impl=_top_k_impl,
    jvp=_top_k_jvp,
    transpose=_NOT_LINEAR,
    batch=_top_k_batch,
    dims=_top_k_dims,
    multiple=True,
)


def approx_max_k(
    operand: Any,
    k: int,
    reduction_dimension: int = -1,
    recall_target: float = 0.95,
    reduction_input_size_override: int = -1,
    aggregate_to_topk: bool = True,
) -> list[Array]:
    """Find the `k` largest values of `operand` along `reduction_dimension`, and their positions.

    The result is exactly that of `top_k`, of its shape and dtypes: a recall of 1, whatever
    `recall_target` allows. Without `aggregate_to_topk` there are more of them: as many as XLA keeps
    of an operand of that size, or of the size `reduction_input_size_override`, for the recall.
    Raises the errors of `top_k`, `ShapeError`, `DtypeError` and `DimensionError`, and an
    `OptionError` for a recall that is not in (0, 1], and for an override below the operand's size.

    >>> lax.approx_max_k(np.array([3.0, 9.0, 1.0]), 2)
    [Array([9., 3.], dtype=float32), Array([1, 0], dtype=int32)]
    """
    given = reduction_dimension, recall_target, reduction_input_size_override, aggregate_to_topk
    return top_k(operand, _approximate_count("approx_max_k", operand, k, *given), axis=given[0])


def approx_min_k(
    operand: Any,
    k: int,
    reduction_dimension: int = -1,
    recall_target: float = 0.95,
    reduction_input_size_override: int = -1,
    aggregate_to_topk: bool = True,
) -> list[Array]:
    """Find the `k` smallest values of `operand` along `reduction_dimension`, and their positions.

    The result is exact, a recall of 1, whatever `recall_target` allows; its shape and dtypes are
    those of `top_k`. `reduction_input_size_override`, `aggregate_to_topk` and the errors are those
    of `approx_max_k`: `ShapeError`, `DtypeError`, `DimensionError` and `OptionError`.

    >>> lax.approx_min_k(np.array([3.0, 9.0, 1.0]), 2)
    [Array([1., 3.], dtype=float32), Array([2, 0], dtype=int32)]
    """
    given = reduction_dimension, recall_target, reduction_input_size_override, aggregate_to_topk
    count = _approximate_count("approx_min_k", operand, k, *given)
    values, places = top_k(neg(operand), count, axis=reduction_dimension)
    return [neg(values), places]


# XLA works on tiles of so many elements, of arrays with one dim and of others.
_TILE_OF_VECTORS, _TILE = 1024, 128


def _approximate_count(
    name: str, operand: Any, k: int, dim: int, recall: float, override: int, aggregate: bool
) -> int:
    """The number of results: `k`, or as many as XLA keeps before it sorts for the last time."""
    if not 0 < recall <= 1:
        fail(OptionError, f"{name}: recall_target={recall} must be larger than 0 and at most 1")
    aval = typeof(operand)
    if aggregate or not aval.ndim:
        return k
    size = aval.shape[canonical_dim(dim, aval.ndim)]
    if k > size:
        return k  # which top_k refuses
    if 0 <= override < size:
        fail(
            OptionError,
            f"{name}: reduction_input_size_override={override} must be at least {size}, the size "
            f"of dim {dim} of {aval}",
        )
    tile = _TILE_OF_VECTORS if aval.ndim == 1 else _TILE
    if size <= tile or recall == 1:
        return size
    if k == 1:
        return tile
    kept = min(max(int((1 - k) / math.log(recall)), tile), size)
    whole = override if override >= 0 else size
    tiles = -(-size // tile)
    halvings = min(int(math.log2(max(whole / kept, 1))), math.ceil(math.log2(tiles)))
    return size if not halvings else -(-tiles // (1 << halvings)) * tile
