"""Unreduced and reduced axes inside of `shard_map`: what types say along manual axes, and casts.

A value that is unreduced along a manual axis varies over it: each device has its term. A reduced
value does not. The casts change types and move nothing; their transposes are casts, or `psum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.context import state
from spmd.base.errors import ArgumentError
from spmd.base.source import current_source
from spmd.base.tree import tree_map
from spmd.collectives.axis import axis_index, pcast_p, pvary
from spmd.collectives.groups import names_of
from spmd.core.aval import ShapedArray, typeof
from spmd.core.explicit import hooks
from spmd.lax.array import full_like
from spmd.lax.logic import eq, select
from spmd.sharding.abstract_mesh import AbstractMesh, AxisType
from spmd.sharding.explicit_layouts import lay_out
from spmd.sharding.named import NamedSharding
from spmd.sharding.spec import PartitionSpec


def pcast(x: Any, axis_name: Any, to: str) -> Any:
    """`lax.pcast` to "unreduced" or "reduced"."""
    axes = names_of(axis_name)
    what = f"{current_source()}: pcast(to={to!r})"
    manual = {frame.name for frame in state.axes if frame.kind == "manual"}

    def one(leaf: Any) -> Any:
        aval = typeof(leaf)
        unreduced, reduced = aval.manual_sets()
        for axis in axes:
            if axis not in manual:
                raise ArgumentError(
                    f"{what}: {axis!r} is no axis of a shard_map with types (check_vma=True)"
                )
            varies = axis in aval.vma and axis not in unreduced
            if varies is not (to == "unreduced") or axis in (unreduced | reduced):
                raise ArgumentError(
                    f"{what}: the value is {aval.short()}; one that varies over {axis!r} can "
                    "become unreduced, and one that is equal there can become reduced"
                )
        return pcast_p.bind(leaf, axes=axes, to=to, mesh=_mesh_of(aval))

    return tree_map(one, x)


def aval_with_sets(
    aval: ShapedArray, unreduced: Any = (), reduced: Any = (), mesh: Any = None
) -> ShapedArray:
    """The type of a shard with other sets of manual axes, which `mesh` has."""
    sharding = aval.explicit
    if sharding is None:
        if not unreduced and not reduced:
            return aval
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim))
    else:
        outer = sharding.spec
        own = sharding.manual_sets()
        unreduced = (outer.unreduced - own[0]) | frozenset(unreduced)
        reduced = (outer.reduced - own[1]) | frozenset(reduced)
    spec = sharding.spec.update(unreduced=frozenset(unreduced), reduced=frozenset(reduced))
    return aval.update(sharding=NamedSharding(sharding.mesh, spec).explicit_part(aval.ndim))


def _mesh_of(aval: ShapedArray) -> AbstractMesh:
    """The mesh of a value's type, else one of the manual axes in scope."""
    if aval.explicit is not None:
        return aval.explicit.mesh
    frames = [frame for frame in state.axes if frame.kind == "manual"]
    sizes, names = tuple(f.size for f in frames), tuple(f.name for f in frames)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Manual,) * len(names))


def _cast_aval(x: ShapedArray, axes: Sequence[Any], to: str, mesh: Any) -> ShapedArray:
    """The type of a cast value; to "plain" it says nothing of these axes."""
    unreduced, reduced = x.manual_sets()
    unreduced, reduced = unreduced.difference(axes), reduced.difference(axes)
    if to == "unreduced":
        unreduced |= frozenset(axes)
    elif to == "reduced":
        reduced |= frozenset(axes)
    return aval_with_sets(x, unreduced, reduced, mesh)


def match(x: Any, want: NamedSharding) -> Any:
    """`x`, a value or cotangent of the same shape, with the sharding of another's type."""
    unreduced, reduced = want.manual_sets()
    if unreduced or reduced:
        own = typeof(x).manual_sets()
        for axis in sorted(unreduced - own[0], key=repr):
            if axis not in typeof(x).vma:
                # The value is counted once: one device has it, the others 0.
                x = pvary(x, axis)
                x = select(eq(axis_index(axis), np.int32(0)), x, full_like(x, 0))
            x = pcast_p.bind(x, axes=(axis,), to="unreduced", mesh=want.mesh)
        missing = tuple(sorted(reduced - own[1], key=repr))
        if missing:
            x = pcast_p.bind(x, axes=missing, to="reduced", mesh=want.mesh)
        if typeof(x).explicit == want:
            return x
    return lay_out(x, want)


def without_sets(x: Any) -> Any:
    """`x`, whose type says nothing of sums along manual axes; terms of one just vary."""
    aval = typeof(x)
    axes = tuple(sorted(frozenset().union(*aval.manual_sets()), key=repr))
    return pcast_p.bind(x, axes=axes, to="plain", mesh=aval.explicit.mesh) if axes else x


hooks.match = match
hooks.cast_aval = _cast_aval
hooks.pcast = pcast
