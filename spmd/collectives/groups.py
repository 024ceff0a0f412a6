"""Groups of devices that take part together, from axis names and index groups.

Devices are numbered by their position in the mesh, row-major. The order of a group's members is the
order in which reductions associate, so it never depends on time or rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.context import state
from spmd.base.errors import ArgumentError
from spmd.base.source import current_source
from spmd.base.tree import keystr, tree_map_with_path
from spmd.core.aval import typeof
from spmd.core.axis import axis_frame, axis_names, size_of, vma_hooks
from spmd.core.primitive import Primitive, Refused, linear
from spmd.core.structural import broadcast_leading, to_front
from spmd.core.trace import Tracer
from spmd.lax.concatenate import concatenate
from spmd.lax.slicing import index_in_dim

Groups = tuple[tuple[int, ...], ...]

NO_IMPL = Refused(
    "a collective works between devices; call it inside pmap, shard_map or vmap(axis_name=...)"
)
NOT_PARTITIONED = Refused("a collective is what partitioning makes; it is not partitioned again")


def collective(name: str, *, jvp: Any = linear, **rules: Any) -> Primitive:
    """A primitive that moves data between the devices along the axes of its parameter `axes`."""
    return Primitive(
        name,
        impl=NO_IMPL,
        jvp=jvp,
        dims=NOT_PARTITIONED,
        axes=lambda params: params["axes"],
        **rules,
    )


def device_groups(
    sizes: dict[Any, int], axes: Sequence[Any], index_groups: Groups | None
) -> Groups:
    """The groups of mesh positions that a collective over `axes` connects.

    `sizes` is the size of each mesh axis, in mesh order; positions count row-major.

    >>> device_groups({"x": 2, "y": 2}, ("y",), None)
    ((0, 1), (2, 3))
    """
    strides: dict[Any, int] = {}
    stride = 1
    for name in reversed(list(sizes)):
        strides[name] = stride
        stride *= sizes[name]
    fixed = [n for n in sizes if n not in axes]
    starts = _offsets(fixed, sizes, strides)
    steps = _offsets(axes, sizes, strides)
    whole = [tuple(start + step for step in steps) for start in starts]
    if index_groups is None:
        return tuple(whole)
    return tuple(tuple(members[k] for k in group) for members in whole for group in index_groups)


def _offsets(names: Sequence[Any], sizes: dict[Any, int], strides: dict[Any, int]) -> list[int]:
    out = [0]
    for name in names:
        out = [base + k * strides[name] for base in out for k in range(sizes[name])]
    return out


def normal_groups(
    what: str, axes: Sequence[Any], groups: Any, any_size: bool = False
) -> Groups | None:
    """`axis_index_groups` as tuples; they must divide the axis, and, unless `any_size`, evenly."""
    if groups is None:
        return None
    out = tuple(tuple(int(k) for k in g) for g in groups)
    n = size_of(tuple(axes))
    flat = sorted(k for g in out for k in g)
    if flat != list(range(n)):
        raise ArgumentError(
            f"{current_source()}: {what}: axis_index_groups={groups} must name each of the indices "
            f"0 to {n - 1} of the axis exactly once"
        )
    if not any_size and len({len(g) for g in out}) != 1:
        raise ArgumentError(
            f"{current_source()}: {what}: axis_index_groups={groups} must all have the same size"
        )
    return out


def group_size(axes: Sequence[Any], groups: Groups | None) -> int:
    """The number of devices that take part in one group."""
    return len(groups[0]) if groups is not None else size_of(tuple(axes))


def names_of(axis_name: Any) -> tuple[Any, ...]:
    """One axis name or several as a tuple, each in scope."""
    return axis_names(axis_name)


def map_leaves(one: Callable[[Any], Any], x: Any) -> Any:
    """`one` of each leaf of a pytree; its errors name the leaf's path."""
    if isinstance(x, Tracer):
        return one(x)
    before = state.operand

    def named(path: Any, leaf: Any) -> Any:
        if path:  # else the whole operand, which may itself be a leaf of a caller's
            state.operand = before + keystr(path)
        return one(leaf)

    try:
        return tree_map_with_path(named, x)
    finally:
        state.operand = before


def make_varying(x: Any, axes: Sequence[Any]) -> Any:
    """`x` cast to vary over the typed axes among `axes`: as collectives want their operand."""
    have = typeof(x).vma
    missing = [a for a in axes if axis_frame(a).kind == "manual" and a not in have]
    return vma_hooks.cast(x, tuple(missing)) if missing else x


def only_axis(what: str, axis: Any, axes: Sequence[Any]) -> None:
    """Raise unless a vmapped axis is the only one of a collective that cannot be split."""
    if tuple(axes) != (axis.name,):
        raise ArgumentError(
            f"{what} over the axes {tuple(axes)} cannot be split into a vmapped axis "
            f"({axis.name!r}) and others; call it once for each axis"
        )


def rows_of(x: Any, dim: int | None, size: int) -> list[Any]:
    """The operand of each member of a vmapped axis."""
    front = broadcast_leading(x, size) if dim is None else to_front(x, dim, size)
    return [index_in_dim(front, k, 0, keepdims=False) for k in range(size)]


def stack_rows(rows: Sequence[Any]) -> Any:
    """Results of the members of a vmapped axis, stacked along a new leading dim."""
    return concatenate([broadcast_leading(r, 1) for r in rows], 0)


def in_groups(rows: list[Any], groups: Groups | None) -> list[list[Any]]:
    """Rows sorted into groups."""
    return [[rows[k] for k in g] for g in groups or (tuple(range(len(rows))),)]


def out_of_groups(parts: list[list[Any]], groups: Groups | None) -> list[Any]:
    """Undo `in_groups`."""
    if groups is None:
        return parts[0]
    out: list[Any] = [None] * sum(len(g) for g in groups)
    for group, part in zip(groups, parts, strict=True):
        for k, x in zip(group, part, strict=True):
            out[k] = x
    return out
