"""axis_index, axis_size and pvary: a device's position along an axis, values that vary over it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base.errors import ArgumentError
from spmd.base.tree import tree_flatten, tree_map
from spmd.collectives.groups import NO_IMPL, NOT_PARTITIONED, names_of
from spmd.core.aval import ShapedArray, typeof
from spmd.core.axis import axis_frame, size_of, vma_hooks
from spmd.core.explicit import hooks
from spmd.core.primitive import Primitive, Refused, dims, linear
from spmd.core.trace import unchanged
from spmd.lax.arithmetic import add, div, mul
from spmd.lax.array import iota

if TYPE_CHECKING:
    from spmd.sharding.array import Array

# ---- axis_size, axis_index ---------------------------------------------------------------------


def axis_size(axis_name: Any) -> int:
    """Return the number of devices along a named axis as a Python integer.

    For a tuple of names, `axis_name` stands for the product of their sizes. The result is an int,
    not a tracer, so shapes can depend on it. Raises `AxisError` if the axis is not in scope.

    >>> f = lambda x: x / lax.axis_size("i")
    >>> spmd.pmap(f, axis_name="i")(np.ones(4))
    Array([0.25, 0.25, 0.25, 0.25], dtype=float32)
    """
    return size_of(axis_name)


def axis_index(axis_name: Any) -> Array:
    """Return the position of this device along a named axis, an int32 scalar.

    For a tuple of names in `axis_name`, the result is the row-major position over all of them.
    Raises `AxisError` if the axis is not in scope.

    >>> f = lambda x: 10 * lax.axis_index("i") + x
    >>> spmd.pmap(f, axis_name="i")(np.arange(4))
    Array([ 0, 11, 22, 33], dtype=int32)
    """
    out: Any = None
    for name in names_of(axis_name):
        here = axis_index_p.bind(axis_name=name)
        if out is None:
            out = here
        else:
            out = add(mul(out, np.int32(size_of(name))), here)
    return unchanged(np.int32(0)) if out is None else out


def _index_batch(axis: Any, operands: Any, at: Any, *, axis_name: Any) -> Any:
    return iota(np.int32, axis.size), 0


def _index_vma(avals: Any, params: dict[str, Any]) -> frozenset[Any]:
    name = params["axis_name"]
    return frozenset((name,)) if axis_frame(name).kind == "manual" else frozenset()


axis_index_p = Primitive(
    "axis_index",
    abstract=lambda *, axis_name: ShapedArray((), np.int32),
    impl=NO_IMPL,
    jvp=Refused("axis_index has no operand to differentiate"),
    transpose=Refused("axis_index has no operand to differentiate"),
    batch=_index_batch,
    dims=NOT_PARTITIONED,
    axes=lambda params: (params["axis_name"],),
    vma=_index_vma,
)

# ---- pvary -------------------------------------------------------------------------------------


def pcast(x: Any, axis_name: Any, *, to: str) -> Any:
    """Change what the type of a value says of an axis; no data moves.

    `x` keeps its shape and dtype, and `axis_name` is that of `pvary`. `to="varying"` is `pvary` of
    a value that does not vary over the axis yet. Inside of a `shard_map` with types,
    `to="unreduced"` makes what each device has of a varying value its term of a sum, which is the
    new value, and `to="reduced"` makes the cotangents of an unvarying value unreduced. Raises
    `ArgumentError` for any other `to` or a value of another state, and `AxisError` if the axis is
    not in scope.

    >>> f = lambda x: lax.pcast(x, "i", to="varying")
    >>> spmd.pmap(f, axis_name="i")(np.arange(4))
    Array([0, 1, 2, 3], dtype=int32)
    """
    if to in ("unreduced", "reduced"):
        return hooks.pcast(x, axis_name, to)
    if to != "varying":
        raise ArgumentError(
            f"pcast: to={to!r} must be 'varying', 'unreduced' or 'reduced'; psum makes a value "
            "unvarying"
        )
    for leaf in tree_flatten(x)[0]:
        have = typeof(leaf).vma
        again = [a for a in names_of(axis_name) if a in have and axis_frame(a).kind == "manual"]
        if again:
            raise ArgumentError(
                f"pcast: a value of {typeof(leaf).short()} varies over {again[0]!r} already; leave "
                "the axis out, or use pvary, which casts where it has to"
            )
    return pvary(x, axis_name)


def pvary(x: Any, axis_name: Any) -> Any:
    """Let a value that is equal on all devices of an axis count as one that varies over it.

    `x` is an array or a pytree; shapes, dtypes and values stay, and no data moves. `axis_name` is a
    name or a tuple of names. Inside `shard_map` casts are inserted where they are needed, so a call
    is never required; its transpose is `psum`. Outside `shard_map` it does nothing. Raises
    `AxisError` if the axis is not in scope.

    >>> mesh = spmd.make_mesh((4,), ("i",))
    >>> f = lambda x: spmd.typeof(lax.pvary(x, "i")).vma and x
    >>> spmd.shard_map(f, mesh=mesh, in_specs=spmd.P("i"), out_specs=spmd.P("i"))(np.arange(4))
    Array([0, 1, 2, 3], dtype=int32)
    """
    axes = names_of(axis_name)

    def one(leaf: Any) -> Any:
        have = typeof(leaf).vma
        typed = [a for a in axes if axis_frame(a).kind == "manual" and a not in have]
        return pvary_p.bind(leaf, axes=tuple(typed)) if typed else unchanged(leaf)

    return tree_map(one, x)


def _pvary_transpose(ct: Any, x: Any, *, axes: Any) -> Any:
    # A jaxpr evaluated again on values that vary already has casts that change nothing. Cotangents
    # of a reduced value stay terms of a sum.
    reduced = x.aval.manual_sets()[1]
    new = tuple(a for a in axes if a not in x.aval.vma and a not in reduced)
    return [vma_hooks.total(ct, new) if new else ct]


pvary_p = Primitive(
    "pvary",
    abstract=lambda x, *, axes: x,
    impl=lambda xp, x, *, axes: x,
    jvp=linear,
    transpose=_pvary_transpose,
    batch=lambda axis, operands, at, *, axes: (pvary_p.bind(operands[0], axes=axes), at[0]),
    dims=NOT_PARTITIONED,
    vma=lambda avals, params: avals[0].vma | frozenset(params["axes"]),
    members=lambda operands, **_: operands,
)


# ---- unvary ------------------------------------------------------------------------------------


def unvary(x: Any, axes: tuple[Any, ...]) -> Any:
    """A value that its user says is equal along axes over which its type varies."""
    varying = tuple(a for a in axes if a in typeof(x).vma)
    if not varying:
        return x
    size = math.prod(axis_frame(a).size for a in varying)
    return unvary_p.bind(x, axes=varying, size=size)


def _unvary_transpose(ct: Any, x: Any, *, axes: Any, size: int) -> Any:
    # A value that all devices have is their mean, so each device gets its share of the cotangent.
    share = div(ct, np.asarray(size, typeof(ct).dtype)[()])
    missing = tuple(a for a in axes if a not in typeof(share).vma)
    return [pvary_p.bind(share, axes=missing) if missing else share]


# `size` is the number of devices along the axes.
unvary_p = Primitive(
    "unvary",
    abstract=lambda x, *, axes, size: x,
    impl=lambda xp, x, *, axes, size: x,
    jvp=linear,
    transpose=_unvary_transpose,
    batch=lambda axis, operands, at, **params: (unvary_p.bind(operands[0], **params), at[0]),
    dims=lambda x, *, axes, size: dims([range(x.ndim)], [range(x.ndim)]),
    vma=lambda avals, params: avals[0].vma - frozenset(params["axes"]),
)


# ---- pcast -------------------------------------------------------------------------------------


def _pcast_transpose(ct: Any, x: Any, *, axes: Any, to: str, mesh: Any) -> Any:
    have = typeof(ct).vma
    if to == "unreduced":  # the cotangent is that of each term
        missing = tuple(a for a in axes if a not in have)
        return [pvary_p.bind(ct, axes=missing) if missing else ct]
    varying = tuple(a for a in axes if a in have)
    return [vma_hooks.total(ct, varying) if to == "reduced" and varying else ct]


# Between the states of types along manual axes: `to` is "unreduced", "reduced" or, where neither
# matters any more, "plain". `mesh` has the manual axes of the type that is made.
pcast_p = Primitive(
    "pcast",
    abstract=lambda x, *, axes, to, mesh: hooks.cast_aval(x, axes, to, mesh),
    impl=lambda xp, x, *, axes, to, mesh: x,
    jvp=linear,
    transpose=_pcast_transpose,
    batch=lambda axis, operands, at, **params: (pcast_p.bind(operands[0], **params), at[0]),
    dims=NOT_PARTITIONED,
    vma="given",
)


def _cast(x: Any, axes: tuple[Any, ...]) -> Any:
    return pvary_p.bind(x, axes=axes)


vma_hooks.cast = _cast
