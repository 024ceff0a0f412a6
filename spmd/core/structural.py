"""The five primitives that transformations themselves need: they move and add values.

Everything else is in `spmd.lax`. `broadcast_in_dim` and `reduce_sum` are each other's transpose;
`reshape` and `permute_dims` are their own inverses; `add_any` adds cotangents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import DtypeError, InternalError, KeyOperationError, ShapeError
from spmd.base.util import inverse_permutation
from spmd.core.aval import ShapedArray, typeof
from spmd.core.explicit import laid_out, match_type
from spmd.core.primitive import Linear, Primitive, dims, linear, remembered, shown_as
from spmd.core.trace import unchanged

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- helpers that use them ---------------------------------------------------------------------


def zeros_like_aval(aval: ShapedArray) -> Any:
    """An array of zeros of an aval's shape, dtype, sharding and varying axes."""
    if aval.dtype == dtypes.float0:
        return np.zeros(aval.shape, dtypes.float0)
    zero = np.zeros((), aval.dtype)
    zeros = broadcast_in_dim(zero, aval.shape, ()) if aval.shape else zero
    return zeros if aval.is_plain else match_type(zeros, aval)


def move_dim(x: Any, source: int, to: int) -> Any:
    """Move one dim of `x`, the others keep their order."""
    ndim = typeof(x).ndim
    source, to = source % ndim, to % ndim
    if source == to:
        return x
    perm = [k for k in range(ndim) if k != source]
    perm.insert(to, source)
    return permute_dims(x, perm)


def broadcast_leading(x: Any, size: int, at: int = 0) -> Any:
    """Repeat `x` along a new dim of `size` at position `at`."""
    shape = list(typeof(x).shape)
    shape.insert(at, size)
    return broadcast_in_dim(x, shape, [k + (k >= at) for k in range(len(shape) - 1)])


def to_front(x: Any, dim: int | None, size: int) -> Any:
    """`x` with its batched dim first; broadcast along a new one if it has none."""
    return broadcast_leading(x, size) if dim is None else move_dim(x, dim, 0)


def unbroadcast(x: Any, aval: ShapedArray) -> Any:
    """Sum `x` to the shape of an operand that was a scalar broadcast against it."""
    shape = typeof(x).shape
    if shape == aval.shape:
        return x
    if aval.shape:
        raise InternalError(f"unbroadcast: {shape} to {aval.shape}")
    return reduce_sum(x, tuple(range(len(shape))))


# ---- add_any -----------------------------------------------------------------------------------


def add_any(x: Any, y: Any) -> Any:
    """Add two values of the same type: cotangents of a value used twice need it."""
    return add_any_p.bind(x, y)


def _add_any_abstract(x: ShapedArray, y: ShapedArray) -> ShapedArray:
    if x.shape != y.shape or x.dtype != y.dtype:
        raise InternalError(f"add_any: {x} and {y} differ")
    return x.update(weak_type=x.weak_type and y.weak_type)


def _add_any_batch(axis: Any, operands: Any, at: Any) -> Any:
    x, y = (to_front(v, d, axis.size) for v, d in zip(operands, at, strict=True))
    return add_any(x, y), 0


def _same_dims(x: ShapedArray, *rest: ShapedArray, **_: Any) -> Any:
    labels = range(x.ndim)
    return dims([labels] * (1 + len(rest)), [labels])


def _add_any(xp: Any, x: Any, y: Any) -> Any:
    # Infinite cotangents of both signs make a NaN, which is no fault of the user's Python code.
    with np.errstate(all="ignore"):
        return xp.add(x, y)


add_any_p = Primitive(
    "add_any",
    abstract=_add_any_abstract,
    impl=_add_any,
    jvp=linear,
    transpose=lambda ct, x, y: [ct, ct],
    batch=_add_any_batch,
    dims=_same_dims,
)

# ---- broadcast_in_dim --------------------------------------------------------------------------


def broadcast_in_dim(
    operand: Any,
    shape: Sequence[int],
    broadcast_dimensions: Sequence[int],
    *,
    out_sharding: Any = None,
) -> Array:
    """Repeat `operand` to `shape`: dim k of it becomes dim `broadcast_dimensions[k]`.

    Dims of size 1 are stretched; dims of `shape` that are not named are new. The dtype stays.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises `ShapeError` if sizes do not fit or the dims are not in ascending order.

    >>> lax.broadcast_in_dim(np.array([1, 2]), (2, 3), (0,))
    Array([[1, 1, 1],
           [2, 2, 2]], dtype=int32)
    """
    if out_sharding is not None:
        call = lambda x: broadcast_in_dim(x, shape, broadcast_dimensions)  # noqa: E731
        return laid_out(out_sharding, call, operand)
    shape = tuple(map(int, shape))
    where = tuple(map(int, broadcast_dimensions))
    if typeof(operand).shape == shape and where == tuple(range(len(shape))):
        return unchanged(operand)
    return broadcast_in_dim_p.bind(operand, shape=shape, broadcast_dimensions=where)


@remembered
def _broadcast_abstract(x: ShapedArray, *, shape: Any, broadcast_dimensions: Any) -> ShapedArray:
    where = broadcast_dimensions
    if len(where) != x.ndim or list(where) != sorted(set(where)):
        raise ShapeError(
            f"broadcast_in_dim: broadcast_dimensions={where} must name one result dim, in "
            f"increasing order, for each of the {x.ndim} dims of {x}"
        )
    for k, d in enumerate(where):
        if not 0 <= d < len(shape) or x.shape[k] not in (1, shape[d]):
            raise ShapeError(
                f"broadcast_in_dim: dim {k} of {x} (size {x.shape[k]}) cannot become dim {d} "
                f"of shape {shape}; sizes must be equal or 1"
            )
    return x.update(shape=shape)


def _broadcast_impl(xp: Any, x: Any, *, shape: Any, broadcast_dimensions: Any) -> Any:
    full = [1] * len(shape)
    for k, d in enumerate(broadcast_dimensions):
        full[d] = x.shape[k]
    return xp.broadcast_to(xp.reshape(x, full), shape)


def _broadcast_transpose(ct: Any, x: Any, *, shape: Any, broadcast_dimensions: Any) -> Any:
    aval = x.aval
    where = broadcast_dimensions
    stretched = [d for k, d in enumerate(where) if aval.shape[k] == 1 and shape[d] != 1]
    new = [d for d in range(len(shape)) if d not in where]
    return [reshape(reduce_sum(ct, tuple(sorted(new + stretched))), aval.shape)]


def _broadcast_batch(axis: Any, operands: Any, at: Any, *, shape: Any, broadcast_dimensions: Any):
    x = move_dim(operands[0], at[0], 0)
    where = (0, *(d + 1 for d in broadcast_dimensions))
    return broadcast_in_dim(x, (axis.size, *shape), where), 0


def _broadcast_dims(x: ShapedArray, *, shape: Any, broadcast_dimensions: Any) -> Any:
    where = broadcast_dimensions
    labels = [d if x.shape[k] == shape[d] else -1 - k for k, d in enumerate(where)]
    return dims([labels], [range(len(shape))])


def _broadcast_text(eqn: Any, names: Any) -> tuple[str, dict[str, Any]]:
    places = eqn.params["broadcast_dimensions"]
    return "broadcast_in_dim", {"broadcast_dimensions": places} if places else {}


broadcast_in_dim_p = Primitive(
    "broadcast_in_dim",
    abstract=_broadcast_abstract,
    impl=_broadcast_impl,
    jvp=linear,
    transpose=_broadcast_transpose,
    batch=_broadcast_batch,
    dims=_broadcast_dims,
    text=_broadcast_text,
)

# ---- reduce_sum --------------------------------------------------------------------------------


def reduce_sum(operand: Any, axes: Sequence[int], *, out_sharding: Any = None) -> Array:
    """Sum over the given `axes`, which disappear from the shape.

    `operand` keeps its dtype, so integers can wrap around. Over no elements the result is 0.
    `out_sharding`, a sharding or spec over `Explicit` mesh axes, is the layout of the result.
    Raises `ShapeError` if a dim is out of range or named twice, and `DtypeError` for booleans.

    >>> lax.reduce_sum(np.array([[1, 2], [3, 4]]), (0,))
    Array([4, 6], dtype=int32)
    """
    if out_sharding is not None:
        return laid_out(out_sharding, lambda x: reduce_sum(x, axes), operand)
    axes = tuple(map(int, axes))
    return reduce_sum_p.bind(operand, axes=axes) if axes else unchanged(operand)


def reduced_shape(x: ShapedArray, axes: Sequence[int], name: str) -> tuple[int, ...]:
    """The shape of `x` without `axes`; raises the user's error if they do not fit."""
    if len(set(axes)) != len(axes) or any(not 0 <= d < x.ndim for d in axes):
        raise ShapeError(
            f"{name}: axes={tuple(axes)} must be different numbers in range({x.ndim}), "
            f"as the operand is {x}"
        )
    return tuple(s for d, s in enumerate(x.shape) if d not in axes)


@remembered
def _sum_abstract(x: ShapedArray, *, axes: Any) -> ShapedArray:
    if dtypes.is_bool(x.dtype) or x.dtype.names:
        kind = KeyOperationError if x.dtype.names else DtypeError
        raise kind(f"reduce_sum: cannot add values of dtype {x}; convert with .astype first")
    return x.update(shape=reduced_shape(x, axes, "reduce_sum"))


def _sum_impl(xp: Any, x: Any, *, axes: Any) -> Any:
    if x.dtype in (dtypes.bfloat16, np.float16):
        return xp.sum(x.astype(np.float32), axis=axes).astype(x.dtype)
    return xp.sum(x, axis=axes, dtype=x.dtype)


def _sum_transpose(ct: Any, x: Any, *, axes: Any) -> Any:
    kept = [d for d in range(x.aval.ndim) if d not in axes]
    return [broadcast_in_dim(ct, x.aval.shape, kept)]


def _sum_batch(axis: Any, operands: Any, at: Any, *, axes: Any) -> Any:
    x = move_dim(operands[0], at[0], 0)
    return reduce_sum(x, tuple(d + 1 for d in axes)), 0


def reduction_dims(combine: str) -> Any:
    """The `dims` rule of a reduction whose partial results are combined with `combine`."""

    def rule(x: ShapedArray, *, axes: Any, **_: Any) -> Any:
        kept = [d for d in range(x.ndim) if d not in axes]
        return dims([range(x.ndim)], [kept], reduces=combine)

    return rule


reduce_sum_p = Primitive(
    "reduce_sum",
    abstract=_sum_abstract,
    impl=_sum_impl,
    jvp=linear,
    transpose=_sum_transpose,
    batch=_sum_batch,
    dims=reduction_dims("add"),
    text=shown_as("reduce_sum", out_sharding=None),
)

# ---- reshape -----------------------------------------------------------------------------------


def reshape(
    operand: Any,
    new_sizes: Sequence[int],
    dimensions: Sequence[int] | None = None,
    *,
    out_sharding: Any = None,
) -> Array:
    """Give the elements of `operand`, in row-major order, another shape.

    `new_sizes` is that shape, of as many elements; the dtype stays. With `dimensions`, the dims
    of `operand` are permuted in that order first. `out_sharding`, a sharding or spec over
    `Explicit` mesh axes, is the layout of the result. Raises `ShapeError` if the numbers of
    elements differ or a size is negative.

    >>> lax.reshape(np.arange(6), (2, 3))
    Array([[0, 1, 2],
           [3, 4, 5]], dtype=int32)
    """
    if out_sharding is not None:
        call = lambda x: reshape(x, new_sizes, dimensions)  # noqa: E731
        return laid_out(out_sharding, call, operand)
    new_sizes = (new_sizes,) if isinstance(new_sizes, int) else tuple(map(int, new_sizes))
    if dimensions is not None:
        operand = permute_dims(operand, dimensions)
    if typeof(operand).shape == new_sizes:
        return unchanged(operand)
    return reshape_p.bind(operand, new_sizes=new_sizes)


@remembered
def _reshape_abstract(x: ShapedArray, *, new_sizes: Any) -> ShapedArray:
    if any(d < 0 for d in new_sizes) or math.prod(new_sizes) != x.size:
        sizes = " * ".join(map(str, new_sizes)) or "1"
        raise ShapeError(
            f"reshape: {x} has {x.size} elements, but the new shape {new_sizes} has "
            f"{sizes} = {math.prod(new_sizes)}"
        )
    return x.update(shape=new_sizes)


def _reshape_batch(axis: Any, operands: Any, at: Any, *, new_sizes: Any) -> Any:
    return reshape(move_dim(operands[0], at[0], 0), (axis.size, *new_sizes)), 0


def _reshape_dims(x: ShapedArray, *, new_sizes: Any) -> Any:
    """Dims keep their label where the sizes before them agree and they are not merged or cut."""
    labels_in = [-1 - k for k in range(x.ndim)]
    labels_out = [-101 - k for k in range(len(new_sizes))]
    for i in range(x.ndim):
        for j in range(len(new_sizes)):
            lead = math.prod(x.shape[:i])  # behind an empty dim nothing tells dims apart
            if lead == math.prod(new_sizes[:j]) > 0 and x.shape[i] == new_sizes[j] > 1:
                labels_in[i] = labels_out[j] = i
    return dims([labels_in], [labels_out])


reshape_p = Primitive(
    "reshape",
    abstract=_reshape_abstract,
    impl=lambda xp, x, *, new_sizes: xp.reshape(x, new_sizes),
    jvp=linear,
    transpose=lambda ct, x, *, new_sizes: [reshape(ct, x.aval.shape)],
    batch=_reshape_batch,
    dims=_reshape_dims,
    text=shown_as("reshape", dimensions=None, sharding=None),
)

# ---- permute_dims ------------------------------------------------------------------------------


def permute_dims(operand: Any, permutation: Sequence[int]) -> Array:
    """Reorder dims: `out.shape[k] == operand.shape[permutation[k]]`.

    `permutation` names each dim of `operand` once; the dtype stays. Raises `ShapeError` if it does
    not.

    >>> lax.permute_dims(np.array([[1, 2], [3, 4]]), (1, 0))
    Array([[1, 3],
           [2, 4]], dtype=int32)
    """
    permutation = tuple(map(int, permutation))
    if permutation == tuple(range(typeof(operand).ndim)):
        return unchanged(operand)
    return permute_dims_p.bind(operand, permutation=permutation)


@remembered
def _permute_abstract(x: ShapedArray, *, permutation: Any) -> ShapedArray:
    if sorted(permutation) != list(range(x.ndim)):
        raise ShapeError(
            f"permute_dims: permutation={permutation} must use each of the {x.ndim} dims "
            f"of {x} once"
        )
    return x.update(shape=tuple(x.shape[k] for k in permutation))


def _permute_batch(axis: Any, operands: Any, at: Any, *, permutation: Any) -> Any:
    x = move_dim(operands[0], at[0], 0)
    return permute_dims(x, (0, *(d + 1 for d in permutation))), 0


permute_dims_p = Primitive(
    "permute_dims",
    abstract=_permute_abstract,
    impl=lambda xp, x, *, permutation: xp.transpose(x, permutation),
    jvp=linear,
    transpose=lambda ct, x, *, permutation: [permute_dims(ct, inverse_permutation(permutation))],
    batch=_permute_batch,
    dims=lambda x, *, permutation: dims([range(x.ndim)], [permutation]),
    text=shown_as("transpose"),
)


def is_linear(x: Any) -> bool:
    """Whether an operand of a transpose rule is the one (or one of those) transposed."""
    return isinstance(x, Linear)
