"""Slices of static size at a position that is computed: read one, or write one.

A position never leaves the array: start indices are moved so that the whole slice lies inside. The
two primitives are each other's transpose. Where the positions themselves are batched, they become
a gather and a scatter.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import DtypeError, ShapeError
from spmd.base.util import canonical_dim
from spmd.core.aval import ShapedArray, typeof
from spmd.core.primitive import Linear, Primitive, remembered
from spmd.core.structural import reshape, to_front, zeros_like_aval
from spmd.core.trace import Tracer, unchanged
from spmd.lax.arithmetic import add
from spmd.lax.array import expand_dims, squeeze
from spmd.lax.concatenate import concatenate
from spmd.lax.convert import convert_element_type
from spmd.lax.families import fail, linear_in
from spmd.lax.gather import gather_p
from spmd.lax.logic import lt, select
from spmd.lax.scatter import scatter_p
from spmd.lax.slicing import index_in_dim, untouched_dims
from spmd.lax.windows import (
    GatherDimensionNumbers,
    GatherScatterMode,
    ScatterDimensionNumbers,
    starts_as_int64,
)

if TYPE_CHECKING:
    from spmd.sharding.array import Array

_INT32 = np.iinfo(np.int32)

# ---- positions ---------------------------------------------------------------------------------


def start_scalars(
    name: str, operand: Any, start_indices: Any, allow_negative: bool | Sequence[bool] = True
) -> list[Any]:
    """One scalar for each dim, counted from the end where negative and `allow_negative`.

    Static starts become literals; of traced ones the sign is looked at when the program runs.
    """
    aval = typeof(operand)
    if not isinstance(start_indices, (list, tuple)):
        given = typeof(start_indices)
        if given.ndim != 1:
            fail(ShapeError, f"{name}: start_indices must be a sequence or 1-d array, got {given}")
        start_indices = [index_in_dim(start_indices, k, 0, False) for k in range(given.shape[0])]
    if len(start_indices) != aval.ndim:
        fail(
            ShapeError,
            f"{name}: start_indices must have one entry for each of the {aval.ndim} dims of "
            f"{aval}, got {len(start_indices)}",
        )
    if isinstance(allow_negative, bool):
        allow_negative = [allow_negative] * aval.ndim
    return [
        _start_scalar(name, start, size, wraps)
        for start, size, wraps in zip(start_indices, aval.shape, allow_negative, strict=True)
    ]


def _start_scalar(name: str, start: Any, size: int, wraps: bool) -> Any:
    aval = typeof(start)
    if not dtypes.is_integer(aval.dtype) or aval.shape:
        fail(ShapeError, f"{name}: start_indices must be integer scalars, got {aval}")
    if not isinstance(start, Tracer):
        value = int(np.asarray(start))
        value = value + size if wraps and value < 0 else value
        return np.int32(min(max(value, _INT32.min), _INT32.max))
    if dtypes.is_unsigned(aval.dtype):
        return start
    if aval.dtype.itemsize < 4:
        start = convert_element_type(start, np.int32)
    if not wraps:
        return start
    return select(lt(start, 0), add(start, size), start)


def _index_vector(starts: Sequence[Any], at: Sequence[int | None], size: int) -> tuple[Any, Any]:
    """Starts, some of them batched, as an index array, with its batched dim (0 or None)."""
    batched = any(d is not None for d in at)
    wide = np.result_type(*(typeof(s).dtype for s in starts))
    columns = []
    for start, d in zip(starts, at, strict=True):
        start = convert_element_type(start, wide if wide.kind in "iu" else np.int64)
        if batched:
            columns.append(reshape(to_front(start, d, size), (size, 1)))
        else:
            columns.append(reshape(start, (1,)))
    return concatenate(columns, int(batched)), 0 if batched else None


def _check_starts(name: str, starts: Sequence[ShapedArray], operand: ShapedArray) -> None:
    if len(starts) != operand.ndim:
        fail(
            ShapeError,
            f"{name}: needs one start index for each of the {operand.ndim} dims of {operand}, "
            f"got {len(starts)}",
        )
    for k, start in enumerate(starts):
        if start.shape or not dtypes.is_integer(start.dtype):
            fail(ShapeError, f"{name}: start index {k} must be an integer scalar, got {start}")


def _region(xp: Any, shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Any]) -> Any:
    """The slices of a region of `sizes`, moved inside `shape`."""
    region = []
    for whole, size, start in zip(shape, sizes, starts, strict=True):
        first = min(max(int(starts_as_int64(xp, start)), 0), whole - size)
        region.append(builtins.slice(first, first + size))
    return tuple(region)


# ---- dynamic_slice -----------------------------------------------------------------------------


def dynamic_slice(
    operand: Any,
    start_indices: Any,
    slice_sizes: Sequence[int],
    *,
    allow_negative_indices: bool | Sequence[bool] = True,
) -> Array:
    """Cut out the part of `operand` of `slice_sizes` that starts at `start_indices`.

    `start_indices` holds one integer scalar for each dim and may be traced; `slice_sizes` is static
    and the shape of the result. The dtype stays. Negative starts count from the end, unless
    `allow_negative_indices` is False (or a sequence that is False for that dim). **A start that
    would reach over the end is moved back**, so that the result always has its full size.

    Raises `ShapeError` if starts or sizes do not fit the dims of `operand`.

    >>> lax.dynamic_slice(np.arange(5), (3,), (3,))
    Array([2, 3, 4], dtype=int32)
    >>> spmd.jit(lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 2)))(np.arange(6).reshape(3, 2), 1)
    Array([[2, 3]], dtype=int32)
    """
    starts = start_scalars("dynamic_slice", operand, start_indices, allow_negative_indices)
    sizes = tuple(s.__index__() for s in slice_sizes)
    if sizes == typeof(operand).shape:
        return unchanged(operand)
    return dynamic_slice_p.bind(operand, *starts, slice_sizes=sizes)


@remembered
def _dynamic_slice_abstract(
    x: ShapedArray, *starts: ShapedArray, slice_sizes: tuple[int, ...]
) -> ShapedArray:
    _check_starts("dynamic_slice", starts, x)
    if len(slice_sizes) != x.ndim or any(
        not 0 <= size <= whole for size, whole in zip(slice_sizes, x.shape, strict=True)
    ):
        fail(
            ShapeError,
            f"dynamic_slice: slice_sizes={slice_sizes} must have a size between 0 and the dim's "
            f"for each of the {x.ndim} dims of {x}",
        )
    return x.update(shape=slice_sizes)


def _dynamic_slice_impl(xp: Any, x: Any, *starts: Any, slice_sizes: tuple[int, ...]) -> Any:
    return x[_region(xp, x.shape, slice_sizes, starts)]


def _dynamic_slice_transpose(
    ct: Any, x: Linear, *starts: Any, slice_sizes: tuple[int, ...]
) -> list[Any]:
    out = dynamic_update_slice_p.bind(zeros_like_aval(x.aval), ct, *starts)
    return [out, *(None for _ in starts)]


def _dynamic_slice_batch(axis: Any, operands: Any, at: Any, *, slice_sizes: Any) -> Any:
    x, *starts = operands
    d, *start_dims = at
    if all(k is None for k in start_dims):
        starts.insert(d, np.int32(0))
        sizes = (*slice_sizes[:d], axis.size, *slice_sizes[d:])
        return dynamic_slice_p.bind(x, *starts, slice_sizes=sizes), d
    window = tuple(range(len(slice_sizes)))
    indices, _ = _index_vector(starts, start_dims, axis.size)
    numbers = GatherDimensionNumbers(window, (), window)
    rule = gather_p.rule("batch")
    return rule(
        axis,
        (x, indices),
        (d, 0),
        dimension_numbers=numbers,
        slice_sizes=slice_sizes,
        unique_indices=True,
        indices_are_sorted=True,
        mode=GatherScatterMode.CLIP,
        fill_value=None,
    )


def _dynamic_slice_dims(x: ShapedArray, *starts: ShapedArray, slice_sizes: Any) -> Any:
    whole = [size == full for size, full in zip(slice_sizes, x.shape, strict=True)]
    return untouched_dims([range(x.ndim), *(() for _ in starts)], whole)


dynamic_slice_p = Primitive(
    "dynamic_slice",
    abstract=_dynamic_slice_abstract,
    impl=_dynamic_slice_impl,
    jvp=linear_in(lambda: dynamic_slice_p, 0),
    transpose=_dynamic_slice_transpose,
    batch=_dynamic_slice_batch,
    dims=_dynamic_slice_dims,
)

# ---- dynamic_update_slice ----------------------------------------------------------------------


def dynamic_update_slice(
    operand: Any,
    update: Any,
    start_indices: Any,
    *,
    allow_negative_indices: bool | Sequence[bool] = True,
) -> Array:
    """Return `operand` with `update` written over the part that starts at `start_indices`.

    `update` has as many dims as `operand` and in no dim a larger size; the result has the shape and
    dtype of `operand`. `start_indices` holds one integer scalar for each dim and may be traced.
    Negative starts count from the end, unless `allow_negative_indices` is False (or a sequence that
    is False for that dim). **A start from which the update would reach over the end is moved
    back.**

    Raises `ShapeError` if sizes or starts do not fit, and `DtypeError` if the dtypes differ.

    >>> lax.dynamic_update_slice(np.zeros(5), np.ones(2), (3,))
    Array([0., 0., 0., 1., 1.], dtype=float32)
    >>> lax.dynamic_update_slice(np.zeros(5), np.ones(2), (9,))
    Array([0., 0., 0., 1., 1.], dtype=float32)
    """
    name = "dynamic_update_slice"
    if isinstance(update, (bool, int, float, complex)):
        update = np.asarray(update, typeof(operand).dtype)
    starts = start_scalars(name, operand, start_indices, allow_negative_indices)
    return dynamic_update_slice_p.bind(operand, update, *starts)


def _update_abstract(x: ShapedArray, update: ShapedArray, *starts: ShapedArray) -> ShapedArray:
    _check_starts("dynamic_update_slice", starts, x)
    if update.dtype != x.dtype:
        fail(
            DtypeError,
            f"dynamic_update_slice: operand and update must have one dtype, got {x} and {update}; "
            "convert one with lax.convert_element_type",
        )
    if update.ndim != x.ndim or any(
        size > whole for size, whole in zip(update.shape, x.shape, strict=True)
    ):
        fail(
            ShapeError,
            f"dynamic_update_slice: update {update} must have as many dims as operand {x} and be "
            "larger in none",
        )
    return x.update(weak_type=x.weak_type and update.weak_type)


def _update_impl(xp: Any, x: Any, update: Any, *starts: Any) -> Any:
    out = xp.array(x, copy=True)
    out[_region(xp, x.shape, update.shape, starts)] = update
    return out


def _update_transpose(ct: Any, x: Any, update: Any, *starts: Any) -> list[Any]:
    aval = update.aval if isinstance(update, Linear) else typeof(update)
    ct_x = ct_update = None
    if isinstance(x, Linear):
        ct_x = dynamic_update_slice_p.bind(ct, zeros_like_aval(aval), *starts)
    if isinstance(update, Linear):
        ct_update = dynamic_slice_p.bind(ct, *starts, slice_sizes=aval.shape)
    return [ct_x, ct_update, *(None for _ in starts)]


def _update_batch(axis: Any, operands: Any, at: Any) -> Any:
    x, update, *starts = operands
    d, update_dim, *start_dims = at
    if all(k is None for k in start_dims):
        x, update = to_front(x, d, axis.size), to_front(update, update_dim, axis.size)
        return dynamic_update_slice_p.bind(x, update, np.int32(0), *starts), 0
    window = tuple(range(len(starts)))
    indices, _ = _index_vector(starts, start_dims, axis.size)
    rule = scatter_p.rule("batch")
    return rule(
        axis,
        (x, indices, update),
        (d, 0, update_dim),
        dimension_numbers=ScatterDimensionNumbers(window, (), window),
        indices_are_sorted=True,
        unique_indices=True,
        mode=GatherScatterMode.CLIP,
    )


def _update_dims(x: ShapedArray, update: ShapedArray, *starts: ShapedArray) -> Any:
    whole = [size == full for size, full in zip(update.shape, x.shape, strict=True)]
    own = [k if same else -1000 - k for k, same in enumerate(whole)]
    return untouched_dims([range(x.ndim), own, *(() for _ in starts)], whole)


dynamic_update_slice_p = Primitive(
    "dynamic_update_slice",
    abstract=_update_abstract,
    impl=_update_impl,
    jvp=linear_in(lambda: dynamic_update_slice_p, 0, 1),
    transpose=_update_transpose,
    batch=_update_batch,
    dims=_update_dims,
)

# ---- along one dim -----------------------------------------------------------------------------


def _starts_in_dim(ndim: int, axis: int, start: Any) -> list[Any]:
    starts: list[Any] = [0] * ndim
    starts[axis] = start
    return starts


def dynamic_slice_in_dim(
    operand: Any,
    start_index: Any,
    slice_size: int,
    axis: int = 0,
    *,
    allow_negative_indices: bool = True,
) -> Array:
    """Cut `slice_size` entries out of one dim of `operand`, from `start_index` on.

    `start_index` may be traced; the other dims of the shape and the dtype stay. As in
    `dynamic_slice`, negative starts count from the end unless `allow_negative_indices` is False,
    and a start that would reach over the end is moved back. Raises `ShapeError` if the size does
    not fit.

    >>> lax.dynamic_slice_in_dim(np.arange(6), 2, 3)
    Array([2, 3, 4], dtype=int32)
    """
    aval = typeof(operand)
    axis = canonical_dim(axis, aval.ndim)
    sizes = list(aval.shape)
    sizes[axis] = slice_size
    starts = _starts_in_dim(aval.ndim, axis, start_index)
    return dynamic_slice(operand, starts, sizes, allow_negative_indices=allow_negative_indices)


def dynamic_index_in_dim(
    operand: Any,
    index: Any,
    axis: int = 0,
    keepdims: bool = True,
    *,
    allow_negative_indices: bool = True,
) -> Array:
    """Take the entry at `index` of one dim of `operand`; `index` may be traced.

    The dim stays with size 1 if `keepdims`, and disappears otherwise; the dtype stays. As in
    `dynamic_slice`, a negative `index` counts from the end unless `allow_negative_indices` is
    False, and an index beyond the end is clamped to it. Raises `ShapeError` if `index` is no
    integer scalar.

    >>> lax.dynamic_index_in_dim(np.array([[1, 2], [3, 4]]), 1, keepdims=False)
    Array([3, 4], dtype=int32)
    """
    aval = typeof(operand)
    axis = canonical_dim(axis, aval.ndim)
    out = dynamic_slice_in_dim(
        operand, index, 1, axis, allow_negative_indices=allow_negative_indices
    )
    return out if keepdims else squeeze(out, (axis,))


def dynamic_update_slice_in_dim(
    operand: Any,
    update: Any,
    start_index: Any,
    axis: int,
    *,
    allow_negative_indices: bool = True,
) -> Array:
    """Return `operand` with `update` written over one dim, from `start_index` on.

    `update` has the shape of `operand` but a smaller size along `axis`; the result has the shape
    and dtype of `operand`. `start_index` may be traced; as in `dynamic_update_slice`, negative
    starts count from the end unless `allow_negative_indices` is False, and a start from which the
    update would reach over the end is moved back. Raises `ShapeError` and `DtypeError` as that
    does.

    >>> lax.dynamic_update_slice_in_dim(np.zeros((2, 3)), np.ones((2, 1)), 1, axis=1)
    Array([[0., 1., 0.],
           [0., 1., 0.]], dtype=float32)
    """
    ndim = typeof(operand).ndim
    starts = _starts_in_dim(ndim, canonical_dim(axis, ndim), start_index)
    return dynamic_update_slice(
        operand, update, starts, allow_negative_indices=allow_negative_indices
    )


def dynamic_update_index_in_dim(
    operand: Any,
    update: Any,
    index: Any,
    axis: int,
    *,
    allow_negative_indices: bool = True,
) -> Array:
    """Return `operand` with `update` written over the entry at `index` of one dim.

    `update` has the shape of the other dims, or has size 1 along `axis`; the result has the shape
    and dtype of `operand`. `index` may be traced; a negative one counts from the end unless
    `allow_negative_indices` is False, and one beyond the end is clamped to it. Raises `ShapeError`
    and `DtypeError` as `dynamic_update_slice` does.

    >>> lax.dynamic_update_index_in_dim(np.zeros((2, 3)), np.ones(3), 1, axis=0)
    Array([[0., 0., 0.],
           [1., 1., 1.]], dtype=float32)
    """
    aval = typeof(operand)
    axis = canonical_dim(axis, aval.ndim)
    if typeof(update).ndim != aval.ndim:
        update = expand_dims(update, (axis,))
    return dynamic_update_slice_in_dim(
        operand, update, index, axis, allow_negative_indices=allow_negative_indices
    )
