"""Making arrays and changing their shape: iota, full, broadcast, squeeze, rev and their helpers.

The one idea: only what structural.py cannot say is a primitive here (`iota`, `squeeze`, `rev`);
everything else is a name for `broadcast_in_dim`, `reshape` or `permute_dims`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ShapeError
from spmd.base.util import canonical_dim, product
from spmd.core.aval import ShapedArray, typeof
from spmd.core.primitive import Primitive, dims, linear, remembered
from spmd.core.structural import (
    broadcast_in_dim,
    broadcast_in_dim_p,
    permute_dims,
    permute_dims_p,
    reshape,
    reshape_p,
    zeros_like_aval,
)
from spmd.core.trace import unchanged
from spmd.lax.arithmetic import add
from spmd.lax.concatenate import concatenate, split
from spmd.lax.convert import convert_element_type
from spmd.lax.families import MOVABLE, NUMERIC, check_dtype, const, fail, shifted
from spmd.lax.logic import eq, ge

__all__ = [
    "broadcast",
    "broadcast_in_dim",
    "broadcast_in_dim_p",
    "broadcast_like",
    "broadcast_shapes",
    "broadcast_to_rank",
    "broadcasted_iota",
    "collapse",
    "empty",
    "expand_dims",
    "eye",
    "full",
    "full_like",
    "iota",
    "iota_p",
    "permute_dims",
    "permute_dims_p",
    "reshape",
    "reshape_p",
    "rev",
    "rev_p",
    "squeeze",
    "squeeze_p",
    "stack",
    "tile",
    "transpose",
    "tri",
    "unstack",
    "zeros_like_array",
]

# ---- iota --------------------------------------------------------------------------------------


def iota(dtype: Any, size: int) -> Any:
    """The numbers 0, 1, ..., size - 1."""
    return broadcasted_iota(dtype, (size,), 0)


def broadcasted_iota(dtype: Any, shape: Sequence[int], dimension: int) -> Any:
    """An array of `shape` that counts up from 0 along one dim."""
    shape = static_shape("broadcasted_iota", shape)
    dimension = canonical_dim(int(dimension), len(shape), "broadcasted_iota: dimension")
    return iota_p.bind(dtype=dtypes.canonical(dtype), shape=shape, dimension=dimension)


def static_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of Python ints, none of them negative; raises the user's error."""
    try:
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
)


def eye(dtype: Any, shape: Sequence[int], offset: int = 0) -> Any:
    """A matrix with ones on the diagonal that starts at column `offset`, zeros elsewhere."""
    rows, columns = _row_and_column(shape, offset)
    return convert_element_type(eq(rows, columns), dtype)


def tri(dtype: Any, shape: Sequence[int], offset: int = 0) -> Any:
    """A matrix with ones on and below the diagonal that starts at column `offset`."""
    rows, columns = _row_and_column(shape, offset)
    return convert_element_type(ge(rows, columns), dtype)


def _row_and_column(shape: Sequence[int], offset: int) -> tuple[Any, Any]:
    rows = broadcasted_iota(np.int32, shape, len(shape) - 2)
    columns = broadcasted_iota(np.int32, shape, len(shape) - 1)
    return add(rows, const(rows, offset)), columns


# ---- full --------------------------------------------------------------------------------------


def full(shape: Sequence[int], fill_value: Any, dtype: Any = None) -> Any:
    """An array of `shape`, each element `fill_value`."""
    shape = static_shape("full", shape)
    aval = typeof(fill_value)
    if aval.shape:
        fail(ShapeError, f"full: fill_value must be a scalar, got {aval}")
    weak = dtype is None and aval.weak_type
    dtype = aval.dtype if dtype is None else dtypes.canonical(dtype)
    return broadcast_in_dim(convert_element_type(fill_value, dtype, weak), shape, ())


def full_like(
    x: Any, fill_value: Any, dtype: Any = None, shape: Sequence[int] | None = None
) -> Any:
    """An array of the shape and dtype of x (if not given), each element `fill_value`."""
    aval = typeof(x)
    shape = aval.shape if shape is None else shape
    if dtype is not None:
        return full(shape, fill_value, dtype)
    if dtypes.is_key(aval.dtype):
        return unchanged(zeros_like_aval(aval.update(shape=static_shape("full_like", shape))))
    value = convert_element_type(fill_value, aval.dtype, aval.weak_type)
    return broadcast_in_dim(value, static_shape("full_like", shape), ())


def zeros_like_array(x: Any) -> Any:
    """Zeros of the shape and dtype of x."""
    return full_like(x, 0)


def empty(shape: Sequence[int], dtype: Any) -> Any:
    """An array whose elements nobody should read; they are zeros here."""
    return full(shape, 0, dtype)


# ---- broadcasting ------------------------------------------------------------------------------


def broadcast(operand: Any, sizes: Sequence[int]) -> Any:
    """Repeat `operand` along new leading dims of the given sizes."""
    sizes = static_shape("broadcast", sizes)
    aval = typeof(operand)
    where = range(len(sizes), len(sizes) + aval.ndim)
    return broadcast_in_dim(operand, (*sizes, *aval.shape), where)


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that NumPy's broadcasting gives for arrays of the given shapes."""
    tuples = [static_shape("broadcast_shapes", s) for s in shapes]
    ndim = max((len(s) for s in tuples), default=0)
    padded = [(1,) * (ndim - len(s)) + s for s in tuples]
    out = []
    for d, sizes in enumerate(zip(*padded, strict=True)):
        wanted = {size for size in sizes if size != 1}
        if len(wanted) > 1:
            fail(
                ShapeError,
                f"shapes {', '.join(map(str, tuples))} do not broadcast: dim {d - ndim} has sizes "
                f"{' and '.join(map(str, sorted(wanted)))}, which must be equal or 1",
            )
        out.append(wanted.pop() if wanted else 1)
    return tuple(out)


def broadcast_to_rank(x: Any, rank: int) -> Any:
    """x with leading dims of size 1, until it has `rank` dims."""
    return expand_dims(x, range(rank - typeof(x).ndim))


def expand_dims(array: Any, dimensions: Sequence[int]) -> Any:
    """Insert dims of size 1, at the given positions of the result."""
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


def stack(operands: Sequence[Any], axis: int = 0) -> Any:
    """Join arrays of one shape along a new dim."""
    arrays = list(operands)
    if not arrays:
        raise ArgumentError("stack: needs at least one array, got an empty sequence")
    where = canonical_dim(operator.index(axis), typeof(arrays[0]).ndim + 1, "stack: axis")
    return concatenate([expand_dims(x, (where,)) for x in arrays], where)


def unstack(x: Any, axis: int = 0) -> tuple[Any, ...]:
    """Cut an array into its parts along a dim, which disappears."""
    aval = typeof(x)
    where = canonical_dim(operator.index(axis), aval.ndim, "unstack: axis")
    count = aval.shape[where]
    parts = split(x, [1] * count, where) if count else ()
    return tuple(squeeze(part, (where,)) for part in parts)


def tile(operand: Any, reps: Sequence[int]) -> Any:
    """Repeat the whole array `reps[d]` times along each dim d."""
    aval = typeof(operand)
    reps = static_shape("tile", reps)
    if len(reps) != aval.ndim:
        fail(ShapeError, f"tile: reps={reps} must have one number per dim of {aval}")
    shape = [size for pair in zip(reps, aval.shape, strict=True) for size in pair]
    spread_out = broadcast_in_dim(operand, shape, range(1, 2 * aval.ndim, 2))
    return reshape(spread_out, [r * s for r, s in zip(reps, aval.shape, strict=True)])


# ---- squeeze -----------------------------------------------------------------------------------


def squeeze(array: Any, dimensions: Sequence[int]) -> Any:
    """Remove dims of size 1."""
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


def rev(operand: Any, dimensions: Sequence[int]) -> Any:
    """Reverse the order of the elements along the given dims."""
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


def transpose(operand: Any, permutation: Sequence[int]) -> Any:
    """Reorder dims: `out.shape[k] == operand.shape[permutation[k]]`."""
    return permute_dims(operand, permutation)


def collapse(operand: Any, start_dimension: int, stop_dimension: int | None = None) -> Any:
    """Merge the dims from `start_dimension` up to (not including) `stop_dimension` into one."""
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
    return reshape(operand, (*shape[:start], product(shape[start:stop]), *shape[stop:]))


def broadcast_like(arr: Any, like_arr: Any) -> Any:
    """`arr` in the shape of `like_arr`, by NumPy's rules of broadcasting.

    >>> broadcast_like(np.array([1, 2]), np.zeros((2, 2)))
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
