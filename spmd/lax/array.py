"""Making arrays and changing their shape: iota, full, broadcast, squeeze, rev and their helpers.

The one idea: only operations beyond structural.py are primitives here (`iota`, `squeeze`, `rev`);
everything else is a name for `broadcast_in_dim`, `reshape` or `permute_dims`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import context, dtypes
from spmd.base.errors import ArgumentError, ShapeError
from spmd.base.key_dtypes import visible
from spmd.base.util import canonical_dim
from spmd.core.aval import ShapedArray, typeof
from spmd.core.explicit import hooks, lays_out_result, match_type
from spmd.core.primitive import Primitive, dims, linear, remembered, shown_as
from spmd.core.structural import (
    broadcast_in_dim,
    permute_dims,
    reshape,
)
from spmd.core.trace import EVAL, Tracer, unchanged
from spmd.lax.arithmetic import add
from spmd.lax.concatenate import concatenate, split
from spmd.lax.convert import convert_element_type
from spmd.lax.families import MOVABLE, NUMERIC, check_dtype, const, fail, shifted
from spmd.lax.keys.words import random_wrap
from spmd.lax.logic import eq, ge

if TYPE_CHECKING:
    from spmd.sharding.array import Array


# ---- iota --------------------------------------------------------------------------------------


def iota(dtype: Any, size: int) -> Array:
    """Make the vector of the numbers 0, 1, ..., `size` - 1.

    `dtype` is an integer, float or complex dtype. Raises `DtypeError` for another, and `ShapeError`
    if `size` is negative.

    >>> lax.iota(np.float32, 4)
    Array([0., 1., 2., 3.], dtype=float32)
    """
    return broadcasted_iota(dtype, (size,), 0)


@lays_out_result
def broadcasted_iota(
    dtype: Any, shape: Sequence[int], dimension: int, *, out_sharding: Any = None
) -> Array:
    """Make an array of the given `shape` that counts up from 0 along dim `dimension`.

    `dtype` is an integer, float or complex dtype. `out_sharding`, a sharding or spec over
    `Explicit` mesh axes, is the layout of the result. Raises `DtypeError` for another,
    `ShapeError` if a size is negative, and `DimensionError` if `dimension` is out of range.

    >>> lax.broadcasted_iota(np.int32, (2, 3), 1)
    Array([[0, 1, 2],
           [0, 1, 2]], dtype=int32)
    """
    shape = static_shape("broadcasted_iota", shape)
    dimension = canonical_dim(int(dimension), len(shape), "broadcasted_iota: dimension")
    return iota_p.bind(dtype=dtypes.canonical(dtype), shape=shape, dimension=dimension)


def static_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of Python ints, none of them negative; raises the user's error."""
    try:
        shape = (shape,) if isinstance(shape, int) else shape
        sizes = tuple(operator.index(d) for d in shape)
    except TypeError:
        raise ShapeError(f"{name}: shape={shape!r} must be a sequence of integers") from None
    if any(d < 0 for d in sizes):
        fail(ShapeError, f"{name}: shape={sizes} has a negative size")
    return sizes


def _iota_abstract(*, dtype: np.dtype, shape: Any, dimension: int) -> ShapedArray:
    check_dtype("iota", "dtype", ShapedArray((), dtype), NUMERIC)
    return ShapedArray(shape, dtype)


def _iota_impl(xp: Any, *, dtype: np.dtype, shape: Any, dimension: int) -> Any:
    sizes = [1] * len(shape)
    sizes[dimension] = shape[dimension]
    with np.errstate(all="ignore"):
        counts = xp.arange(shape[dimension]).astype(dtype)
    return xp.broadcast_to(counts.reshape(sizes), shape)


def _no_operand(*_: Any, **__: Any) -> Any:
    raise AssertionError("iota has no operands, so no transformation reaches it")


iota_p = Primitive(
    "iota",
    abstract=_iota_abstract,
    impl=_iota_impl,
    jvp=_no_operand,
    transpose=_no_operand,
    batch=_no_operand,
    dims=lambda *, dtype, shape, dimension: dims([], [range(len(shape))], whole=[dimension]),
    text=shown_as("iota", sharding=None),
)


def eye(dtype: Any, shape: Sequence[int], offset: int = 0) -> Array:
    """Make a matrix with ones on the diagonal that starts at column `offset`, zeros elsewhere.

    `shape` is the result's (leading dims repeat the matrix) and `dtype` its dtype. Raises
    `ShapeError` if a size is negative.

    >>> lax.eye(np.float32, (2, 3), 1)
    Array([[0., 1., 0.],
           [0., 0., 1.]], dtype=float32)
    """
    rows, columns = _row_and_column(shape, offset)
    return convert_element_type(eq(rows, columns), dtype)


def tri(dtype: Any, shape: Sequence[int], offset: int = 0) -> Array:
    """Make a matrix with ones on and below the diagonal that starts at column `offset`.

    `shape` is the result's (leading dims repeat the matrix) and `dtype` its dtype. Raises
    `ShapeError` if a size is negative.

    >>> lax.tri(np.int32, (2, 3))
    Array([[1, 0, 0],
           [1, 1, 0]], dtype=int32)
    """
    rows, columns = _row_and_column(shape, offset)
    return convert_element_type(ge(rows, columns), dtype)


def _row_and_column(shape: Sequence[int], offset: int) -> tuple[Any, Any]:
    rows = broadcasted_iota(np.int32, shape, len(shape) - 2)
    columns = broadcasted_iota(np.int32, shape, len(shape) - 1)
    return add(rows, const(rows, offset)), columns


# ---- full --------------------------------------------------------------------------------------


def full(
    shape: Sequence[int], fill_value: Any, dtype: Any = None, *, sharding: Any = None
) -> Array:
    """Make an array of the given `shape` whose elements are all `fill_value`.

    `dtype` is by default that of `fill_value`, a scalar; a Python number gives a weak type. The
    array is laid out by `sharding` if it is given, and has no weak type then. Raises `ShapeError`
    if `fill_value` is no scalar or a size is negative, and `ShardingError` if it cannot be laid out
    so.

    >>> lax.full((2, 2), 7.0)
    Array([[7., 7.],
           [7., 7.]], dtype=float32, weak_type=True)
    """
    shape = static_shape("full", shape)
    aval = typeof(fill_value)
    if aval.shape:
        fail(ShapeError, f"full: fill_value must be a scalar, got {aval}")
    weak = dtype is None and aval.weak_type and sharding is None
    dtype = aval.dtype if dtype is None else dtypes.canonical(dtype)
    if dtypes.is_key(dtype) and not dtypes.is_key(aval.dtype):
        fill_value, weak = _key_of_words(fill_value, dtype), False
    out = broadcast_in_dim(convert_element_type(fill_value, dtype, weak), shape, ())
    return out if sharding is None else hooks.put(out, sharding)


def _key_of_words(fill_value: Any, dtype: np.dtype) -> Any:
    """A key all of whose words are `fill_value`."""
    kind = visible(dtype)
    word = convert_element_type(fill_value, np.uint32)
    return random_wrap(broadcast_in_dim(word, kind.key_shape, ()), kind.ident)


def full_like(
    x: Any,
    fill_value: Any,
    dtype: Any = None,
    shape: Sequence[int] | None = None,
    sharding: Any = None,
) -> Array:
    """Make an array like `x` whose elements are all `fill_value`.

    `dtype` and `shape` are by default those of `x`, whose weak type is kept then too. `fill_value`
    is a scalar. The array is laid out by `sharding`, by default as `x` if its shape is the same.
    Raises `ShapeError` if `fill_value` is no scalar, and `ShardingError` if the array cannot be
    laid out so.

    >>> lax.full_like(np.zeros((1, 2), np.int32), 7)
    Array([[7, 7]], dtype=int32)
    """
    aval = typeof(x)
    shape = aval.shape if shape is None else shape
    placed: Any = None if isinstance(x, Tracer) else x
    if sharding is None and tuple(shape) == aval.shape and getattr(placed, "committed", False):
        is_traced = isinstance(fill_value, Tracer) or context.state.trace is not EVAL
        sharding = None if is_traced or placed.is_unreduced else placed.sharding
    if dtype is not None:
        out = full(shape, fill_value, dtype)
    elif dtypes.is_key(aval.dtype):
        out = full(shape, fill_value, aval.dtype)
    else:
        value = convert_element_type(fill_value, aval.dtype, aval.weak_type)
        out = broadcast_in_dim(value, static_shape("full_like", shape), ())
    if sharding is not None:
        return hooks.put(out, sharding)
    return match_type(out, aval) if isinstance(x, Tracer) else out


def zeros_like_array(x: Any) -> Array:
    """Make zeros of the shape and dtype of `x`.

    >>> lax.zeros_like_array(np.ones(2, np.int32))
    Array([0, 0], dtype=int32)
    """
    return full_like(x, 0)


@lays_out_result
def empty(shape: Sequence[int], dtype: Any, *, out_sharding: Any = None) -> Array:
    """Make an array of the given `shape` and `dtype` with unspecified elements.

    They are zeros here. `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the
    layout of the result. Raises `ShapeError` if a size is negative.

    >>> lax.empty((2,), np.float32).shape
    (2,)
    """
    return full(shape, 0, dtype)


# ---- broadcasting ------------------------------------------------------------------------------


@lays_out_result
def broadcast(operand: Any, sizes: Sequence[int], *, out_sharding: Any = None) -> Array:
    """Repeat `operand` along new leading dims of the given `sizes`.

    The shape of the result is `(*sizes, *operand.shape)`; the dtype stays. `out_sharding`, a
    sharding or spec over `Explicit` mesh axes, is the layout of the result. Raises `ShapeError`
    if a size is negative.

    >>> lax.broadcast(np.array([1, 2]), (2,))
    Array([[1, 2],
           [1, 2]], dtype=int32)
    """
    sizes = static_shape("broadcast", sizes)
    aval = typeof(operand)
    where = range(len(sizes), len(sizes) + aval.ndim)
    return broadcast_in_dim(operand, (*sizes, *aval.shape), where)


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that NumPy's broadcasting gives for arrays of the given `shapes`.

    Shapes are tuples of ints. Raises `ShapeError` if they do not broadcast.

    >>> lax.broadcast_shapes((2, 1), (3,))
    (2, 3)
    """
    tuples = [static_shape("broadcast_shapes", s) for s in shapes]
    ndim = max((len(s) for s in tuples), default=0)
    padded = [(1,) * (ndim - len(s)) + s for s in tuples]
    out = []
    for d, sizes in enumerate(zip(*padded, strict=True)):
        wanted = {size for size in sizes if size != 1}
        if len(wanted) > 1:
            fail(
                ShapeError,
                "Incompatible shapes for broadcasting: "
                f"shapes {', '.join(map(str, tuples))} do not broadcast: dim {d - ndim} has sizes "
                f"{' and '.join(map(str, sorted(wanted)))}, which must be equal or 1",
            )
        out.append(wanted.pop() if wanted else 1)
    return tuple(out)


def broadcast_to_rank(x: Any, rank: int) -> Array:
    """Prepend dims of size 1 to the shape of `x`, until it has `rank` dims.

    The dtype stays.

    >>> lax.broadcast_to_rank(np.ones(3), 2).shape
    (1, 3)
    """
    return expand_dims(x, range(rank - typeof(x).ndim))


def expand_dims(array: Any, dimensions: Sequence[int]) -> Array:
    """Insert dims of size 1 into the shape of `array`.

    `dimensions` are their positions in the result, where negative ones count from the end; the
    dtype stays. Raises `ArgumentError` if a position is named twice, and `DimensionError` if it is
    out of range.

    >>> lax.expand_dims(np.zeros((2, 3)), (0, 2)).shape
    (1, 2, 1, 3)
    """
    aval = typeof(array)
    dimensions = tuple(dimensions)
    ndim = aval.ndim + len(dimensions)
    new = [canonical_dim(operator.index(d), ndim, "expand_dims: dimension") for d in dimensions]
    if len(set(new)) != len(new):
        raise ArgumentError(f"expand_dims: dimensions={dimensions} names one twice")
    if not new:
        return unchanged(array)
    kept = [d for d in range(ndim) if d not in new]
    shape = [1] * ndim
    for d, size in zip(kept, aval.shape, strict=True):
        shape[d] = size
    return broadcast_in_dim(array, shape, kept)


def stack(operands: Sequence[Any], axis: int = 0) -> Array:
    """Join the arrays in `operands`, all of one shape and dtype, along a new dim at `axis`.

    Raises `ArgumentError` without an array, `ShapeError` or `DtypeError` if they differ, and
    `DimensionError` if `axis` is out of range.

    >>> lax.stack([np.array([1, 2]), np.array([3, 4])])
    Array([[1, 2],
           [3, 4]], dtype=int32)
    """
    arrays = list(operands)
    if not arrays:
        raise ArgumentError("stack: needs at least one array, got an empty sequence")
    where = canonical_dim(operator.index(axis), typeof(arrays[0]).ndim + 1, "stack: axis")
    return concatenate([expand_dims(x, (where,)) for x in arrays], where)


def unstack(x: Any, axis: int = 0) -> tuple[Array, ...]:
    """Cut an array into its parts along dim `axis`, which disappears from their shape.

    The result is a tuple of arrays of the dtype of `x`. Raises `DimensionError` if `axis` is out of
    range.

    >>> lax.unstack(np.array([[1, 2], [3, 4]]))
    (Array([1, 2], dtype=int32), Array([3, 4], dtype=int32))
    """
    aval = typeof(x)
    where = canonical_dim(operator.index(axis), aval.ndim, "unstack: axis")
    count = aval.shape[where]
    parts = split(x, [1] * count, where) if count else ()
    return tuple(squeeze(part, (where,)) for part in parts)


def tile(operand: Any, reps: Sequence[int]) -> Array:
    """Repeat the whole array `reps[d]` times along each dim d.

    The dtype of `operand` stays. Raises `ShapeError` if `reps` has not one number for each dim of
    its shape.

    >>> lax.tile(np.array([1, 2]), (2,))
    Array([1, 2, 1, 2], dtype=int32)
    """
    aval = typeof(operand)
    reps = static_shape("tile", reps)
    if len(reps) != aval.ndim:
        fail(ShapeError, f"tile: reps={reps} must have one number per dim of {aval}")
    shape = [size for pair in zip(reps, aval.shape, strict=True) for size in pair]
    spread_out = broadcast_in_dim(operand, shape, range(1, 2 * aval.ndim, 2))
    return reshape(spread_out, [r * s for r, s in zip(reps, aval.shape, strict=True)])


# ---- squeeze -----------------------------------------------------------------------------------


def squeeze(array: Any, dimensions: Sequence[int]) -> Array:
    """Remove dims of size 1 from the shape of `array`.

    `dimensions` names them, where negative ones count from the end; the dtype stays. Raises
    `ShapeError` if a dim has another size or is named twice, and `DimensionError` if it is out of
    range.

    >>> lax.squeeze(np.zeros((1, 3, 1)), (0,)).shape
    (3, 1)
    """
    ndim = typeof(array).ndim
    where = [canonical_dim(operator.index(d), ndim, "squeeze: dimension") for d in dimensions]
    if not where:
        return unchanged(array)
    return squeeze_p.bind(array, dimensions=tuple(sorted(where)))


@remembered
def _squeeze_abstract(x: ShapedArray, *, dimensions: Any) -> ShapedArray:
    if len(set(dimensions)) != len(dimensions):
        fail(ShapeError, f"squeeze: dimensions={dimensions} names a dim of {x} twice")
    for d in dimensions:
        if x.shape[d] != 1:
            fail(ShapeError, f"squeeze: dim {d} of {x} has size {x.shape[d]}; only 1 can go")
    return x.update(shape=tuple(s for d, s in enumerate(x.shape) if d not in dimensions))


def _squeeze_batch(axis: Any, operands: Any, at: Any, *, dimensions: Any) -> Any:
    moved = shifted(dimensions, at[0])
    out = squeeze_p.bind(operands[0], dimensions=moved)
    return out, at[0] - sum(d < at[0] for d in moved)


def _squeeze_dims(x: ShapedArray, *, dimensions: Any) -> Any:
    kept = [d for d in range(x.ndim) if d not in dimensions]
    return dims([range(x.ndim)], [kept], whole=dimensions)


squeeze_p = Primitive(
    "squeeze",
    abstract=_squeeze_abstract,
    impl=lambda xp, x, *, dimensions: xp.squeeze(x, axis=dimensions),
    jvp=linear,
    transpose=lambda ct, x, *, dimensions: [expand_dims(ct, dimensions)],
    batch=_squeeze_batch,
    dims=_squeeze_dims,
)

# ---- rev ---------------------------------------------------------------------------------------


def rev(operand: Any, dimensions: Sequence[int]) -> Array:
    """Reverse the order of the elements along the given dims.

    `dimensions` names each dim of `operand` at most once; the shape and the dtype stay. Raises
    `ShapeError` if a dim is out of range or named twice.

    >>> lax.rev(np.array([[1, 2], [3, 4]]), (1,))
    Array([[2, 1],
           [4, 3]], dtype=int32)
    """
    dimensions = tuple(operator.index(d) for d in dimensions)
    return rev_p.bind(operand, dimensions=dimensions) if dimensions else unchanged(operand)


@remembered
def _rev_abstract(x: ShapedArray, *, dimensions: Any) -> ShapedArray:
    check_dtype("rev", "operand", x, MOVABLE)
    if len(set(dimensions)) != len(dimensions) or any(not 0 <= d < x.ndim for d in dimensions):
        fail(
            ShapeError,
            f"rev: dimensions={dimensions} must be different numbers in range({x.ndim}), as the "
            f"operand is {x}",
        )
    return x


def _rev_batch(axis: Any, operands: Any, at: Any, *, dimensions: Any) -> Any:
    return rev_p.bind(operands[0], dimensions=shifted(dimensions, at[0])), at[0]


rev_p = Primitive(
    "rev",
    abstract=_rev_abstract,
    impl=lambda xp, x, *, dimensions: xp.flip(x, axis=dimensions),
    jvp=linear,
    transpose=lambda ct, x, *, dimensions: [rev(ct, dimensions)],
    batch=_rev_batch,
    dims=lambda x, *, dimensions: dims([range(x.ndim)], [range(x.ndim)], whole=dimensions),
)

# ---- other names for reshape and permute_dims --------------------------------------------------


def transpose(operand: Any, permutation: Sequence[int]) -> Array:
    """Reorder dims: `out.shape[k] == operand.shape[permutation[k]]`.

    `permutation` names each dim of `operand` once; the dtype stays. Raises `ShapeError` if it does
    not.

    >>> lax.transpose(np.zeros((2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    return permute_dims(operand, permutation)


def collapse(operand: Any, start_dimension: int, stop_dimension: int | None = None) -> Array:
    """Merge the dims from `start_dimension` up to (not including) `stop_dimension` into one.

    Negative dims count from the end, and None is the number of dims of `operand`; the dtype stays.
    Raises `ArgumentError` if the dims are no range.

    >>> lax.collapse(np.zeros((2, 3, 4)), 1).shape
    (2, 12)
    """
    shape = typeof(operand).shape
    ndim = len(shape)
    stop = ndim if stop_dimension is None else int(stop_dimension)
    start = int(start_dimension) + ndim * (start_dimension < 0)
    stop += ndim * (stop < 0)
    if not 0 <= start <= stop <= ndim:
        raise ArgumentError(
            f"collapse: dims {start_dimension} to {stop_dimension} are not a range of the {ndim} "
            f"dims of {typeof(operand)}"
        )
    return reshape(operand, (*shape[:start], math.prod(shape[start:stop]), *shape[stop:]))


def broadcast_like(arr: Any, like_arr: Any) -> Array:
    """Repeat `arr` to the shape of `like_arr`, by NumPy's rules of broadcasting.

    The dtype of `arr` stays. Raises `ShapeError` if it does not broadcast.

    >>> lax.broadcast_like(np.array([1, 2]), np.zeros((2, 2)))
    Array([[1, 2],
           [1, 2]], dtype=int32)
    """
    shape, have = typeof(like_arr).shape, typeof(arr).shape
    behind = shape[len(shape) - len(have) :]
    if len(have) > len(shape) or any(n not in (1, m) for n, m in zip(have, behind, strict=True)):
        fail(ShapeError, f"broadcast_like: {typeof(arr)} does not broadcast to shape {shape}")
    rest = len(shape) - len(have)
    kept = [d for d, n in enumerate(have) if n == shape[rest + d]]
    flat = reshape(arr, tuple(have[d] for d in kept))
    return broadcast_in_dim(flat, shape, tuple(rest + d for d in kept))
