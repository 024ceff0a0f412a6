"""all_to_all: every device sends a different part of its value to every other."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.collectives.groups import (
    NO_IMPL,
    NOT_PARTITIONED,
    Groups,
    group_size,
    in_groups,
    make_varying,
    names_of,
    normal_groups,
    only_axis,
    out_of_groups,
    rows_of,
    stack_rows,
)
from spmd.core.aval import ShapedArray, typeof
from spmd.core.errors import ShapeError
from spmd.core.primitive import Primitive, linear
from spmd.core.source import current_source
from spmd.core.structural import broadcast_leading, move_dim
from spmd.core.tree import tree_map
from spmd.core.util import canonical_dim
from spmd.lax.concatenate import concatenate
from spmd.lax.slicing import index_in_dim, slice_in_dim


def all_to_all(
    x: Any,
    axis_name: Any,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Any = None,
    tiled: bool = False,
) -> Any:
    """Cut dim `split_axis` into one part for each device, and join what arrives at `concat_axis`.

    Per device: dim `split_axis` of `x` must have the size n of the axis; it disappears, and a new
    dim of size n appears at `concat_axis`. With `tiled`, dim `split_axis` shrinks by n and dim
    `concat_axis` grows by n.
    """
    axes = names_of(axis_name)
    groups = normal_groups("all_to_all", axes, axis_index_groups)
    size = group_size(axes, groups)

    def one(leaf: Any) -> Any:
        aval = typeof(leaf)
        split = canonical_dim(split_axis, aval.ndim, "all_to_all: split_axis")
        concat = canonical_dim(concat_axis, aval.ndim, "all_to_all: concat_axis")
        have = aval.shape[split]
        if (tiled and have % size) or (not tiled and have != size):
            wanted = f"a multiple of {size}" if tiled else f"equal to {size}"
            raise ShapeError(
                f"{current_source()}: all_to_all: dim split_axis={split} of the operand {aval} has "
                f"size {have}; it must be {wanted}, the number of devices"
            )
        return all_to_all_p.bind(
            make_varying(leaf, axes),
            axes=axes,
            groups=groups,
            split=split,
            concat=concat,
            size=size,
            tiled=tiled,
        )

    return tree_map(one, x)


def pswapaxes(x: Any, axis_name: Any, axis: int, *, axis_index_groups: Any = None) -> Any:
    """Exchange a named axis with dim `axis` of `x`, which has the axis' size."""
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


def _abstract(
    x: ShapedArray, *, split: int, concat: int, size: int, tiled: bool, **_: Any
) -> ShapedArray:
    shape = list(x.shape)
    if tiled:
        shape[split] //= size
        shape[concat] *= size
    else:
        del shape[split]
        shape.insert(concat, size)
    return x.update(shape=tuple(shape))


def _members(operands: list[Any], *, split: int, concat: int, tiled: bool, **_: Any) -> list[Any]:
    n = len(operands)
    parts = [np.split(x, n, split) for x in operands]
    if tiled:
        return [np.concatenate([parts[j][k] for j in range(n)], concat) for k in range(n)]
    return [np.stack([np.squeeze(parts[j][k], split) for j in range(n)], concat) for k in range(n)]


def _exchange(rows: list[Any], split: int, concat: int, tiled: bool) -> list[Any]:
    """The same in lax operations, for vmapped axes."""
    n = len(rows)
    out = []
    for k in range(n):
        if tiled:
            step = typeof(rows[0]).shape[split] // n
            mine = [slice_in_dim(r, k * step, (k + 1) * step, 1, split) for r in rows]
        else:
            mine = [index_in_dim(r, k, split, keepdims=False) for r in rows]
            mine = [broadcast_leading(r, 1, concat) for r in mine]
        out.append(concatenate(mine, concat))
    return out


def _batch(
    axis: Any,
    operands: Any,
    at: Any,
    *,
    axes: Any,
    groups: Groups | None,
    split: int,
    concat: int,
    size: int,
    tiled: bool,
) -> Any:
    (x,), (here,) = operands, at
    params = {"axes": axes, "groups": groups, "size": size, "tiled": tiled}
    if axis.name not in axes:
        if here is None:
            return all_to_all_p.bind(x, split=split, concat=concat, **params), None
        x = move_dim(x, here, 0)
        return all_to_all_p.bind(x, split=split + 1, concat=concat + 1, **params), 0
    only_axis("all_to_all", axis, axes)
    parts = [
        _exchange(part, split, concat, tiled)
        for part in in_groups(rows_of(x, here, axis.size), groups)
    ]
    return stack_rows(out_of_groups(parts, groups)), 0


def _transpose(ct: Any, x: Any, *, split: int, concat: int, **params: Any) -> Any:
    return [all_to_all_p.bind(ct, split=concat, concat=split, **params)]


all_to_all_p = Primitive(
    "all_to_all",
    abstract=_abstract,
    impl=NO_IMPL,
    jvp=linear,
    transpose=_transpose,
    batch=_batch,
    dims=NOT_PARTITIONED,
    axes=lambda params: params["axes"],
    members=_members,
)
