"""Static slices and padding: the two primitives that cut dims and grow them.

They are each other's transpose: the cotangent of a strided slice is padded back with interior
zeros, that of a padded array is cut out with a strided slice.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.errors import DtypeError, IndexingError, ShapeError
from spmd.base.util import canonical_dim
from spmd.core.aval import ShapedArray, typeof
from spmd.core.primitive import Linear, Primitive, dims, linear, remembered
from spmd.core.structural import (
    broadcast_in_dim,
    reduce_sum,
    to_front,
    zeros_like_aval,
)
from spmd.core.trace import unchanged
from spmd.lax.array import squeeze
from spmd.lax.convert import number_of_dtype
from spmd.lax.families import fail
from spmd.lax.logic import select

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- slice -------------------------------------------------------------------------------------


def slice(
    operand: Any,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None = None,
) -> Array:
    """Cut out `operand[start:limit:stride]` along every dim; all of them are static.

    `start_indices`, `limit_indices` and `strides` (None: all 1) hold one integer for each dim; the
    dtype stays. Unlike in Python's slices, negative numbers do not count from the end, and limits
    beyond the shape are errors. Raises `ShapeError` for those, and if a stride is not positive.

    >>> lax.slice(np.arange(12).reshape(3, 4), (1, 0), (3, 4), (1, 2))
    Array([[ 4,  6],
           [ 8, 10]], dtype=int32)
    """
    starts, limits = _integers(start_indices), _integers(limit_indices)
    steps = None if strides is None else _integers(strides)
    if steps is not None and all(s == 1 for s in steps):
        steps = None
    shape = typeof(operand).shape
    if steps is None and limits == shape and not any(starts) and len(starts) == len(shape):
        return unchanged(operand)
    return slice_p.bind(operand, start_indices=starts, limit_indices=limits, strides=steps)


def _integers(xs: Sequence[Any]) -> tuple[int, ...]:
    return tuple(x.__index__() for x in xs)


@remembered
def _slice_abstract(
    x: ShapedArray, *, start_indices: Any, limit_indices: Any, strides: Any
) -> ShapedArray:
    steps = strides or (1,) * x.ndim
    if not len(start_indices) == len(limit_indices) == len(steps) == x.ndim:
        fail(
            ShapeError,
            f"slice: needs one start, limit and stride for each of the {x.ndim} dims of {x}; got "
            f"start_indices={start_indices}, limit_indices={limit_indices}, strides={strides}",
        )
    for k, (start, limit, step) in enumerate(zip(start_indices, limit_indices, steps, strict=True)):
        if not 0 <= start <= limit <= x.shape[k]:
            fail(
                ShapeError,
                f"slice: dim {k} of {x} is cut from start_indices[{k}]={start} to "
                f"limit_indices[{k}]={limit}; needed is 0 <= start <= limit <= {x.shape[k]}",
            )
        if step < 1:
            fail(ShapeError, f"slice: strides[{k}]={step} must be positive; reverse with lax.rev")
    sizes = zip(start_indices, limit_indices, steps, strict=True)
    return x.update(shape=tuple(len(range(a, b, s)) for a, b, s in sizes))


def _slice_impl(xp: Any, x: Any, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    steps = strides or (1,) * x.ndim
    return x[tuple(map(builtins.slice, start_indices, limit_indices, steps))]


def _slice_transpose(
    ct: Any, x: Linear, *, start_indices: Any, limit_indices: Any, strides: Any
) -> list[Any]:
    steps = strides or (1,) * x.aval.ndim
    config = []
    for size, kept, start, step in zip(
        x.aval.shape, typeof(ct).shape, start_indices, steps, strict=True
    ):
        spread = (kept - 1) * step + 1 if kept else 0
        config.append((start, size - start - spread, step - 1))
    return [pad(ct, _zero_of(ct), config)]


def _slice_batch(
    axis: Any, operands: Any, at: Any, *, start_indices: Any, limit_indices: Any, strides: Any
) -> Any:
    (x,), (d,) = operands, at
    starts, limits = list(start_indices), list(limit_indices)
    starts.insert(d, 0)
    limits.insert(d, axis.size)
    steps = None
    if strides is not None:
        steps = list(strides)
        steps.insert(d, 1)
    return slice(x, starts, limits, steps), d


def _slice_dims(x: ShapedArray, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    steps = strides or (1,) * x.ndim
    whole = [
        start == 0 and limit == size and step == 1
        for size, start, limit, step in zip(
            x.shape, start_indices, limit_indices, steps, strict=True
        )
    ]
    return untouched_dims([range(x.ndim)], whole)


def untouched_dims(operands: Sequence[Sequence[int]], untouched: Sequence[bool]) -> Any:
    """`Dims` where result dim k equals dim k of the first operand if `untouched[k]`.

    Further operands in `operands` keep the labels they are given.
    """
    n = len(untouched)
    first = [k if same else -1 - k for k, same in enumerate(untouched)]
    result = [k if same else -1 - n - k for k, same in enumerate(untouched)]
    return dims([first, *operands[1:]], [result])


slice_p = Primitive(
    "slice",
    abstract=_slice_abstract,
    impl=_slice_impl,
    jvp=linear,
    transpose=_slice_transpose,
    batch=_slice_batch,
    dims=_slice_dims,
)


def slice_in_dim(
    operand: Any,
    start_index: int | None,
    limit_index: int | None,
    stride: int = 1,
    axis: int = 0,
) -> Array:
    """Slice one dim of `operand`; the others stay whole.

    `start_index`, `limit_index` and `stride` are static; None and negative numbers mean what they
    mean in Python's slices, but a limit beyond the size is an error. The dtype stays. Raises
    `ShapeError` for such a limit, and `DimensionError` if `axis` is out of range.

    >>> lax.slice_in_dim(np.arange(6), 1, -1, 2)
    Array([1, 3], dtype=int32)
    """
    aval = typeof(operand)
    axis = canonical_dim(axis, aval.ndim)
    size = aval.shape[axis]
    start = 0 if start_index is None else start_index.__index__()
    limit = size if limit_index is None else limit_index.__index__()
    starts, limits, strides = [0] * aval.ndim, list(aval.shape), [1] * aval.ndim
    starts[axis] = start + size if start < 0 else start
    limits[axis] = limit + size if limit < 0 else limit
    strides[axis] = stride.__index__()
    return slice(operand, starts, limits, strides)


def index_in_dim(operand: Any, index: int, axis: int = 0, keepdims: bool = True) -> Array:
    """Take the entry at a static `index` of one dim of `operand`.

    The dim stays with size 1 if `keepdims`, and disappears from the shape otherwise; the dtype
    stays. A negative `index` counts from the end. Raises `IndexingError` if it is out of range, and
    `DimensionError` if `axis` is.

    >>> lax.index_in_dim(np.array([[1, 2], [3, 4]]), -1, 0, keepdims=False)
    Array([3, 4], dtype=int32)
    """
    aval = typeof(operand)
    axis = canonical_dim(axis, aval.ndim)
    size, index = aval.shape[axis], index.__index__()
    wrapped = index + size if index < 0 else index
    if not 0 <= wrapped < size:
        fail(
            IndexingError,
            f"index_in_dim: index {index} is out of bounds for dim {axis} of {aval} (size {size})",
        )
    out = slice_in_dim(operand, wrapped, wrapped + 1, 1, axis)
    return out if keepdims else squeeze(out, (axis,))


# ---- pad ---------------------------------------------------------------------------------------


def pad(operand: Any, padding_value: Any, padding_config: Sequence[tuple[int, int, int]]) -> Array:
    """Put `padding_value` before, after and between the elements of `operand`.

    `padding_config[k]` is `(low, high, interior)` for dim k; negative `low` and `high` cut elements
    off instead, after the interior padding has been put in. `padding_value` is a scalar of the
    dtype of `operand`; Python numbers take it. Raises `DtypeError` if the dtypes differ, and
    `ShapeError` if `padding_config` does not fit the shape.

    >>> lax.pad(np.array([1, 2, 3]), 0, [(1, 2, 1)])
    Array([0, 1, 0, 2, 0, 3, 0, 0], dtype=int32)
    """
    aval = typeof(operand)
    config = tuple(_integers(entry) for entry in padding_config)
    if len(config) == aval.ndim and all(entry == (0, 0, 0) for entry in config):
        return unchanged(operand)
    if isinstance(padding_value, (bool, int, float, complex)):
        try:
            padding_value = number_of_dtype("pad", padding_value, aval.dtype)
        except DtypeError:
            _padded_shape(aval, config)  # JAX tells of sizes first
            raise
    return pad_p.bind(operand, padding_value, padding_config=config)


def _zero_of(x: Any) -> Any:
    return np.zeros((), typeof(x).dtype)


def _padded_size(size: int, low: int, high: int, interior: int) -> int:
    return low + high + size + max(size - 1, 0) * interior


@remembered
def _pad_abstract(x: ShapedArray, value: ShapedArray, *, padding_config: Any) -> ShapedArray:
    if value.shape:
        fail(ShapeError, f"pad: padding_value must be a scalar, got {value}")
    shape = _padded_shape(x, padding_config)
    if value.dtype != x.dtype:
        fail(
            DtypeError,
            f"pad: operand and padding_value must have one dtype, got {x} and {value}; "
            "convert one with lax.convert_element_type",
        )
    return x.update(shape=shape, weak_type=x.weak_type and value.weak_type)


def _padded_shape(x: ShapedArray, padding_config: Sequence[Sequence[int]]) -> tuple[int, ...]:
    if len(padding_config) != x.ndim or any(len(entry) != 3 for entry in padding_config):
        fail(
            ShapeError,
            f"pad: padding_config={padding_config} must hold (low, high, interior) for each of "
            f"the {x.ndim} dims of {x}",
        )
    shape = []
    for k, (low, high, interior) in enumerate(padding_config):
        size = _padded_size(x.shape[k], low, high, interior)
        if interior < 0 or size < 0:
            fail(
                ShapeError,
                f"pad: padding_config[{k}]={(low, high, interior)} gives dim {k} of {x} size "
                f"{size}; interior padding and the size must not be negative",
            )
        shape.append(size)
    return tuple(shape)


def _pad_impl(xp: Any, x: Any, value: Any, *, padding_config: Any) -> Any:
    """Element i of a dim lands at `low + i * (interior + 1)`, if that is inside."""
    shape, source, target = [], [], []
    for size, (low, high, interior) in zip(x.shape, padding_config, strict=True):
        step, padded = interior + 1, _padded_size(size, low, high, interior)
        first = max(0, -(low // step))
        behind = max(first, min(size, -((low - padded) // step)))
        shape.append(padded)
        source.append(builtins.slice(first, behind))
        stop = low + (behind - 1) * step + 1 if behind > first else low + first * step
        target.append(builtins.slice(low + first * step, stop, step))
    out = xp.empty(tuple(shape), x.dtype)
    out[...] = value
    out[tuple(target)] = x[tuple(source)]
    return out


def _pad_transpose(ct: Any, x: Any, value: Any, *, padding_config: Any) -> list[Any]:
    ct_x = ct_value = None
    if isinstance(x, Linear):
        grown = pad(ct, _zero_of(ct), [(-low, -high, 0) for low, high, _ in padding_config])
        shape = typeof(grown).shape
        ct_x = slice(grown, [0] * len(shape), shape, [k + 1 for *_, k in padding_config])
    if isinstance(value, Linear):
        shape = x.aval.shape if isinstance(x, Linear) else typeof(x).shape
        kept = select(_is_padding(shape, padding_config), ct, zeros_like_aval(typeof(ct)))
        ct_value = reduce_sum(kept, tuple(range(typeof(ct).ndim)))
    return [ct_x, ct_value]


def _is_padding(shape: Sequence[int], padding_config: Any) -> Any:
    inside = broadcast_in_dim(np.bool_(False), shape, ())
    return pad(inside, np.bool_(True), padding_config)


def _pad_batch(axis: Any, operands: Any, at: Any, *, padding_config: Any) -> Any:
    (x, value), (d, value_dim) = operands, at
    if value_dim is None:
        config = list(padding_config)
        config.insert(d, (0, 0, 0))
        return pad(x, value, config), d
    # Each example has its own padding value: pad with zeros, then choose by a mask.
    x = to_front(x, d, axis.size)
    config = [(0, 0, 0), *padding_config]
    padded = pad(x, _zero_of(x), config)
    values = broadcast_in_dim(value, typeof(padded).shape, (0,))
    return select(_is_padding(typeof(x).shape, config), values, padded), 0


def _pad_dims(x: ShapedArray, value: ShapedArray, *, padding_config: Any) -> Any:
    return untouched_dims([range(x.ndim), ()], [not any(entry) for entry in padding_config])


pad_p = Primitive(
    "pad",
    abstract=_pad_abstract,
    impl=_pad_impl,
    jvp=linear,
    transpose=_pad_transpose,
    batch=_pad_batch,
    dims=_pad_dims,
)
