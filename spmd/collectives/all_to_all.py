"""all_to_all: every device sends a different part of its value to every other.

The primitive exchanges along one dim that has a row for each device; the public function makes
that dim before and moves it into place after, so that all layouts are one primitive.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base.errors import ShapeError
from spmd.base.source import current_source
from spmd.base.util import canonical_dim
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
from spmd.core.structural import move_dim, permute_dims, reshape
from spmd.lax.concatenate import concatenate
from spmd.lax.slicing import slice_in_dim


def all_to_all(
    x: Any,
    axis_name: Any,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Any = None,
    tiled: bool = False,
) -> Any:
    """Cut dim `split_axis` into one part for each device, and join the arrivals at `concat_axis`.

    Per device, dim `split_axis` of each leaf of `x` must have the size n of the axis; it
    disappears, and a new dim of size n appears at `concat_axis`: part k goes to device k. With
    `tiled=True`, dim `split_axis` shrinks by the factor n and dim `concat_axis` grows by it. The
    dtype stays. `axis_name` is a name or a tuple of names; `axis_index_groups` exchanges inside
    each group of positions, as in `psum`.

    Raises `ShapeError` if dim `split_axis` has another size (with `tiled`, is no multiple of n),
    `DimensionError` if a dim is out of range, `AxisError` if the axis is not in scope, and
    `ArgumentError` if the groups do not divide the axis into parts of equal size.

    >>> x = np.arange(16).reshape(4, 4)
    >>> spmd.pmap(lambda row: lax.all_to_all(row, "i", 0, 0), axis_name="i")(x)
    Array([[ 0,  4,  8, 12],
           [ 1,  5,  9, 13],
           [ 2,  6, 10, 14],
           [ 3,  7, 11, 15]], dtype=int32)
    """
    axes = names_of(axis_name)
    groups = normal_groups("all_to_all", axes, axis_index_groups)
    size = group_size(axes, groups)

    def one(leaf: Any) -> Any:
        aval = typeof(leaf)
        split = canonical_dim(split_axis, aval.ndim, "all_to_all: split_axis")
        concat = canonical_dim(concat_axis, aval.ndim, "all_to_all: concat_axis")
        _check(aval, split, size, tiled)
        leaf = make_varying(leaf, axes)
        shape = aval.shape
        if tiled:
            leaf = reshape(leaf, (*shape[:split], size, shape[split] // size, *shape[split + 1 :]))
        out = all_to_all_p.bind(leaf, axes=axes, groups=groups, dim=split, size=size)
        out = move_dim(out, split, concat)
        if not tiled:
            return out
        shape = typeof(out).shape
        return reshape(out, (*shape[:concat], size * shape[concat + 1], *shape[concat + 2 :]))

    return map_leaves(one, x)


def _check(aval: ShapedArray, split: int, size: int, tiled: bool) -> None:
    have = aval.shape[split]
    if (tiled and have % size) or (not tiled and have != size):
        wanted = f"a multiple of {size}" if tiled else f"equal to {size}"
        raise ShapeError(
            f"{current_source()}: all_to_all: dim split_axis={split} of the operand {aval} has "
            f"size {have}; it must be {wanted}, the number of devices"
        )


def pswapaxes(x: Any, axis_name: Any, axis: int, *, axis_index_groups: Any = None) -> Any:
    """Exchange a named axis with dim `axis` of `x`, which has the axis' size.

    Per device the shape and the dtype stay: this is `all_to_all` with `axis` as both dims.
    `axis_name` and `axis_index_groups` are those of `all_to_all`, and so are the errors:
    `ShapeError`, `DimensionError`, `AxisError`, `ArgumentError`.

    >>> x = np.arange(16).reshape(4, 4)
    >>> out = spmd.pmap(lambda row: lax.pswapaxes(row, "i", 0), axis_name="i")(x)
    >>> bool((out == x.T).all())
    True
    """
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


# ---- rules -------------------------------------------------------------------------------------


def _members(operands: list[Any], *, dim: int, **_: Any) -> list[Any]:
    n = len(operands)
    return [np.stack([np.take(x, k, dim) for x in operands], dim) for k in range(n)]


def _exchange(rows: list[Any], dim: int) -> list[Any]:
    """The same in lax operations, for vmapped axes."""
    return [
        concatenate([slice_in_dim(r, k, k + 1, 1, dim) for r in rows], dim)
        for k in range(len(rows))
    ]


def _batch(
    axis: Any, operands: Any, at: Any, *, axes: Any, groups: Groups | None, dim: int, size: int
) -> Any:
    (x,), (here,) = operands, at
    params = {"axes": axes, "groups": groups, "size": size}
    if axis.name not in axes:
        if here is None:
            return all_to_all_p.bind(x, dim=dim, **params), None
        return all_to_all_p.bind(move_dim(x, here, 0), dim=dim + 1, **params), 0
    only_axis("all_to_all", axis, axes)
    if groups is None and here is not None:
        # The mapped dim and the exchanged dim change places.
        x = move_dim(x, here, 0)
        order = list(range(typeof(x).ndim))
        order[0], order[dim + 1] = order[dim + 1], order[0]
        return permute_dims(x, order), 0
    parts = [_exchange(part, dim) for part in in_groups(rows_of(x, here, axis.size), groups)]
    return stack_rows(out_of_groups(parts, groups)), 0


all_to_all_p = collective(
    "all_to_all",
    abstract=lambda x, **_: x.strip_weak(),
    transpose=lambda ct, x, **params: [all_to_all_p.bind(ct, **params)],
    batch=_batch,
    members=_members,
)
