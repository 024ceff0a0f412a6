"""Concatenation and its inverse: one array of many along a dim, and many of one.

They are each other's transpose, so the gradient of cutting one projection into three (queries,
keys, values) is a single concatenation and not a sum of padded pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.base.util import canonical_dim
from spmd.core.aval import ShapedArray, typeof
from spmd.core.jvp import instantiate
from spmd.core.primitive import Linear, Primitive, dims, linear, remembered
from spmd.core.structural import move_dim, to_front
from spmd.core.trace import unchanged
from spmd.lax.families import fail

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- concatenate -------------------------------------------------------------------------------


def concatenate(operands: Sequence[Any], dimension: int) -> Array:
    """Join the arrays in `operands` along dim `dimension`.

    All have one dtype, which the result has, and shapes that are equal in the other dims. Raises
    `ShapeError` if shapes do not fit or `dimension` is out of range, `DtypeError` if dtypes differ,
    and `ArgumentError` without an operand.

    >>> lax.concatenate([np.array([1, 2]), np.array([3])], 0)
    Array([1, 2, 3], dtype=int32)
    """
    operands = list(operands)
    if not operands:
        fail(ArgumentError, "concatenate: needs at least one operand, got an empty sequence")
    ndim = typeof(operands[0]).ndim
    if len(operands) == 1 and 0 <= dimension < ndim:
        return operands[0]
    return concatenate_p.bind(*operands, dimension=int(dimension))


@remembered
def _concatenate_abstract(*xs: ShapedArray, dimension: int) -> ShapedArray:
    first = xs[0]
    if not 0 <= dimension < first.ndim:
        fail(
            ShapeError,
            f"concatenate: dimension={dimension} must be in range({first.ndim}), "
            f"as the first operand is {first}",
        )
    for k, x in enumerate(xs):
        if x.dtype != first.dtype:
            fail(
                DtypeError,
                f"concatenate: operands must have one dtype; operand 0 is {first}, operand {k} is "
                f"{x}. Convert one with lax.convert_element_type",
            )
        rest, first_rest = list(x.shape), list(first.shape)
        if x.ndim == first.ndim:
            rest[dimension] = first_rest[dimension] = 0
        if rest != first_rest:
            fail(
                ShapeError,
                f"concatenate: operands must have equal shapes apart from dim {dimension}; "
                f"operand 0 is {first}, operand {k} is {x}",
            )
    shape = list(first.shape)
    shape[dimension] = sum(x.shape[dimension] for x in xs)
    return first.update(shape=tuple(shape), weak_type=all(x.weak_type for x in xs))


def _concatenate_transpose(ct: Any, *xs: Any, dimension: int) -> list[Any]:
    avals = [x.aval if isinstance(x, Linear) else typeof(x) for x in xs]
    pieces = split(ct, [a.shape[dimension] for a in avals], dimension)
    return [p if isinstance(x, Linear) else None for p, x in zip(pieces, xs, strict=True)]


def _concatenate_batch(axis: Any, operands: Any, at: Any, *, dimension: int) -> Any:
    d = next(d for d in at if d is not None)
    moved = [
        move_dim(x, k, d) if k is not None else move_dim(to_front(x, None, axis.size), 0, d)
        for x, k in zip(operands, at, strict=True)
    ]
    return concatenate(moved, dimension + (d <= dimension)), d


def _concatenate_dims(*xs: ShapedArray, dimension: int) -> Any:
    ndim = xs[0].ndim
    labels = [[-1 - k if d == dimension else d for d in range(ndim)] for k in range(len(xs) + 1)]
    return dims(labels[:-1], labels[-1:])


concatenate_p = Primitive(
    "concatenate",
    abstract=_concatenate_abstract,
    impl=lambda xp, *xs, dimension: xp.concatenate(xs, axis=dimension),
    jvp=linear,
    transpose=_concatenate_transpose,
    batch=_concatenate_batch,
    dims=_concatenate_dims,
)

# ---- split -------------------------------------------------------------------------------------


def split(operand: Any, sizes: Sequence[int], axis: int = 0) -> list[Array]:
    """Cut `operand` along `axis` into parts of the given `sizes`.

    The result is a list of arrays with the dtype of `operand` and its shape in the other dims.
    Raises `ShapeError` if the sizes do not add up to the dim's.

    >>> lax.split(np.arange(5), [2, 3])
    [Array([0, 1], dtype=int32), Array([2, 3, 4], dtype=int32)]
    """
    axis = canonical_dim(axis, typeof(operand).ndim)
    sizes = tuple(s.__index__() for s in sizes)
    if sizes == (typeof(operand).shape[axis],):
        return [unchanged(operand)]
    return list(split_p.bind(operand, sizes=sizes, axis=axis))


def _split_abstract(x: ShapedArray, *, sizes: Any, axis: int) -> list[ShapedArray]:
    if not sizes or any(s < 0 for s in sizes) or sum(sizes) != x.shape[axis]:
        fail(
            ShapeError,
            f"split: sizes={sizes} add up to {sum(sizes)}, but dim {axis} of {x} has size "
            f"{x.shape[axis]}",
        )
    return [x.update(shape=(*x.shape[:axis], s, *x.shape[axis + 1 :])) for s in sizes]


def _split_impl(xp: Any, x: Any, *, sizes: Any, axis: int) -> list[Any]:
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes) - 1)]
    return xp.split(x, ends, axis=axis)


def _split_transpose(cts: Any, x: Linear, *, sizes: Any, axis: int) -> list[Any]:
    return [concatenate([instantiate(ct) for ct in cts], axis)]


def _split_batch(vmapped: Any, operands: Any, at: Any, *, sizes: Any, axis: int) -> Any:
    (x,), (d,) = operands, at
    return split_p.bind(x, sizes=sizes, axis=axis + (d <= axis)), [d] * len(sizes)


def _split_dims(x: ShapedArray, *, sizes: Any, axis: int) -> Any:
    labels = [[-1 - k if d == axis else d for d in range(x.ndim)] for k in range(len(sizes) + 1)]
    return dims(labels[:1], labels[1:])


split_p = Primitive(
    "split",
    abstract=_split_abstract,
    impl=_split_impl,
    jvp=linear,
    transpose=_split_transpose,
    batch=_split_batch,
    dims=_split_dims,
    multiple=True,
)
