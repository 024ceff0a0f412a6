"""all_gather: every device gets the values of all devices along an axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.base.errors import ArgumentError, RefusedError
from spmd.base.util import canonical_dim
from spmd.collectives.axis import pcast, unvary
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
from spmd.core.ir import Eqn, Names
from spmd.core.primitive import Primitive
from spmd.core.structural import broadcast_leading, move_dim, reshape
from spmd.core.trace import unchanged
from spmd.lax.concatenate import concatenate


def all_gather(
    x: Any,
    axis_name: Any,
    *,
    axis_index_groups: Any = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
) -> Any:
    """Gather the values of every device along a named axis.

    Per device, a leaf of `x` of shape `S` becomes `S` with a new dim of the axis' size n at
    position `axis`; with `tiled=True`, dim `axis` grows by the factor n instead. Every device gets
    the same result: globally, `pmap` turns (n, *S) into (n, n, *S). The dtype stays. `axis_name` is
    a name or a tuple of names; `axis_index_groups` gathers inside each group of positions, as in
    `psum`. In a `shard_map` with types the result varies over the axis; with `to="invarying"` its
    type says that it is equal on all devices, and with `to="reduced"` its cotangents are terms of
    a sum besides.

    Raises `AxisError` if the axis is not in scope, `DimensionError` if `axis` is out of range,
    `ArgumentError` if the groups do not divide the axis into parts of equal size or for another
    `to`, and `RefusedError` for groups with a `to`.

    >>> spmd.pmap(lambda x: lax.all_gather(x, "i"), axis_name="i")(np.arange(4))
    Array([[0, 1, 2, 3],
           [0, 1, 2, 3],
           [0, 1, 2, 3],
           [0, 1, 2, 3]], dtype=int32)
    >>> f = lambda x: lax.all_gather(x, "i", tiled=True)
    >>> spmd.pmap(f, axis_name="i")(np.arange(8).reshape(4, 2)).shape
    (4, 8)
    """
    axes = names_of(axis_name)
    if to not in ("varying", "invarying", "reduced"):
        raise ArgumentError(f"all_gather: to={to!r} must be 'varying', 'invarying' or 'reduced'")
    if not axes:  # as in JAX, without a new dim
        return map_leaves(unchanged, x)
    groups = normal_groups("all_gather", axes, axis_index_groups)
    if groups is not None and to != "varying":
        raise RefusedError(f"all_gather: to={to!r} cannot be said of axis_index_groups")
    size = group_size(axes, groups)

    def one(leaf: Any) -> Any:
        ndim = typeof(leaf).ndim
        dim = canonical_dim(axis, ndim if tiled else ndim + 1, "all_gather: axis")
        leaf = make_varying(leaf, axes)
        whole = all_gather_p.bind(leaf, axes=axes, groups=groups, dim=dim, size=size, tiled=tiled)
        if to != "varying":
            whole = unvary(whole, axes)
        return pcast(whole, axes, to="reduced") if to == "reduced" else whole

    return map_leaves(one, x)


def _abstract(x: ShapedArray, *, dim: int, size: int, tiled: bool, **_: Any) -> ShapedArray:
    shape = list(x.shape)
    if tiled:
        shape[dim] *= size
    else:
        shape.insert(dim, size)
    return x.update(shape=tuple(shape))


def _members(operands: list[Any], *, dim: int, tiled: bool, **_: Any) -> list[Any]:
    joined = np.concatenate(operands, dim) if tiled else np.stack(operands, dim)
    return [joined] * len(operands)


def _join(rows: list[Any], dim: int, tiled: bool) -> Any:
    if tiled:
        return concatenate(rows, dim)
    return concatenate([broadcast_leading(r, 1, dim) for r in rows], dim)


def _batch(
    axis: Any, operands: Any, at: Any, *, axes: Any, groups: Groups | None, dim: int, **rest: Any
) -> Any:
    (x,), (here,) = operands, at
    if axis.name not in axes:
        if here is None:
            return all_gather_p.bind(x, axes=axes, groups=groups, dim=dim, **rest), None
        x = move_dim(x, here, 0)
        return all_gather_p.bind(x, axes=axes, groups=groups, dim=dim + 1, **rest), 0
    only_axis("all_gather", axis, axes)
    if groups is not None:
        parts = in_groups(rows_of(x, here, axis.size), groups)
        joined = [[_join(part, dim, rest["tiled"])] * len(part) for part in parts]
        return stack_rows(out_of_groups(joined, groups)), 0
    x = broadcast_leading(x, axis.size) if here is None else move_dim(x, here, 0)
    x = move_dim(x, 0, dim)
    if rest["tiled"]:
        shape = typeof(x).shape
        x = reshape(x, (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))
    return x, None


def _transpose(ct: Any, x: Any, *, axes: Any, groups: Any, dim: int, size: int, tiled: bool) -> Any:
    params = {"axes": axes, "groups": groups, "dim": dim, "size": size, "tiled": tiled}
    return [transposes["all_gather"].bind(make_varying(ct, axes), **params)]


# all_gather and reduce_scatter are each other's transpose; the second file puts itself here.
transposes: dict[str, Primitive] = {}


def _text(eqn: Eqn, names: Names) -> tuple[str, dict[str, Any]]:
    """The name and the parameters that the text of an equation shows, those of JAX."""
    params = eqn.params
    return "all_gather", {
        "all_gather_dimension": params["dim"],
        "axis_index_groups": params["groups"],
        "axis_name": params["axes"],
        "axis_size": params["size"],
        "tiled": params["tiled"],
    }


all_gather_p = collective(
    "all_gather",
    text=_text,
    abstract=_abstract,
    transpose=_transpose,
    batch=_batch,
    members=_members,
)
