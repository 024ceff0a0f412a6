"""psum_scatter: sum over the devices along an axis, and leave each with one part of the result."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ShapeError
from spmd.base.source import current_source
from spmd.base.util import canonical_dim
from spmd.collectives.all_gather import all_gather_p, transposes
from spmd.collectives.axis import unvary
from spmd.collectives.groups import (
    Groups,
    collective,
    group_size,
    in_groups,
    make_varying,
    map_leaves,
    names_of,
    normal_groups,
    only_axis,
    out_of_groups,
    rows_of,
    stack_rows,
)
from spmd.core.aval import ShapedArray, typeof
from spmd.core.structural import move_dim
from spmd.lax.arithmetic import add
from spmd.lax.slicing import index_in_dim, slice_in_dim


def psum_scatter(
    x: Any,
    axis_name: Any,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Any = None,
    tiled: bool = False,
) -> Any:
    """Sum `x` over a named axis and keep one part of the sum on each device.

    Per device, dim `scatter_dimension` of each leaf of `x` must have the size n of the axis; it
    disappears, as device k keeps index k of the sum. With `tiled=True` its size must be a multiple
    of n, and device k keeps the k-th n-th of it. The dtype stays; 16-bit floats are summed in
    float32 and rounded once. `axis_name` is a name or a tuple of names; `axis_index_groups` sums
    inside each group of positions, as in `psum`.

    Raises `ShapeError` if the dim has another size, `DimensionError` if it is out of range,
    `AxisError` if the axis is not in scope, and `ArgumentError` if the groups do not divide the
    axis into parts of equal size.

    >>> x = np.arange(16).reshape(4, 4)
    >>> spmd.pmap(lambda row: lax.psum_scatter(row, "i"), axis_name="i")(x)
    Array([24, 28, 32, 36], dtype=int32)
    """
    axes = names_of(axis_name)
    groups = normal_groups("psum_scatter", axes, axis_index_groups)
    size = group_size(axes, groups)

    def one(leaf: Any) -> Any:
        aval = typeof(leaf)
        dim = canonical_dim(scatter_dimension, aval.ndim, "psum_scatter: scatter_dimension")
        _check(aval, dim, size, tiled)
        leaf = make_varying(leaf, axes)
        params = {"axes": axes, "groups": groups, "dim": dim, "size": size, "tiled": tiled}
        return reduce_scatter_p.bind(leaf, **params)

    return map_leaves(one, x)


def _check(aval: ShapedArray, dim: int, size: int, tiled: bool) -> None:
    have = aval.shape[dim]
    if (tiled and have % size) or (not tiled and have != size):
        wanted = f"a multiple of {size}" if tiled else f"equal to {size}"
        raise ShapeError(
            f"{current_source()}: psum_scatter: dim {dim} of the operand {aval} has size {have}; "
            f"it must be {wanted}, the number of devices"
            + ("" if tiled else " (or use tiled=True)")
        )


def _abstract(x: ShapedArray, *, dim: int, size: int, tiled: bool, **_: Any) -> ShapedArray:
    shape = list(x.shape)
    if tiled:
        shape[dim] //= size
    else:
        del shape[dim]
    return x.update(shape=tuple(shape))


def _members(operands: list[Any], *, dim: int, tiled: bool, **_: Any) -> list[Any]:
    dtype = operands[0].dtype
    narrow = dtype in (dtypes.bfloat16, np.float16)
    wide = [x.astype(np.float32) if narrow else x for x in operands]
    total = functools.reduce(np.add, wide).astype(dtype)
    parts = np.split(total, len(operands), dim)
    return parts if tiled else [np.squeeze(p, dim) for p in parts]


def _parts(total: Any, n: int, dim: int, tiled: bool) -> list[Any]:
    if not tiled:
        return [index_in_dim(total, k, dim, keepdims=False) for k in range(n)]
    step = typeof(total).shape[dim] // n
    return [slice_in_dim(total, k * step, (k + 1) * step, 1, dim) for k in range(n)]


def _batch(
    axis: Any,
    operands: Any,
    at: Any,
    *,
    axes: Any,
    groups: Groups | None,
    dim: int,
    size: int,
    tiled: bool,
) -> Any:
    (x,), (here,) = operands, at
    params = {"axes": axes, "groups": groups, "size": size, "tiled": tiled}
    if axis.name not in axes:
        if here is None:
            return reduce_scatter_p.bind(x, dim=dim, **params), None
        return reduce_scatter_p.bind(move_dim(x, here, 0), dim=dim + 1, **params), 0
    only_axis("psum_scatter", axis, axes)
    parts = [
        _parts(functools.reduce(add, part), size, dim, tiled)
        for part in in_groups(rows_of(x, here, axis.size), groups)
    ]
    return stack_rows(out_of_groups(parts, groups)), 0


def _transpose(ct: Any, x: Any, *, axes: Any, **params: Any) -> Any:
    whole = all_gather_p.bind(make_varying(ct, axes), axes=axes, **params)
    # Where the type says that devices hold terms of a sum, the cotangent is equal on all devices.
    terms = x.aval.manual_sets()[0] if params["groups"] is None else frozenset()
    return [unvary(whole, tuple(a for a in axes if a in terms))]


reduce_scatter_p = collective(
    "reduce_scatter",
    abstract=_abstract,
    transpose=_transpose,
    batch=_batch,
    members=_members,
)
transposes["all_gather"] = reduce_scatter_p
