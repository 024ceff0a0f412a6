"""Maps without types in a partitioned program: pmaps, and shard_maps with `check_vma=False`.

Such a map becomes one along all axes of the program's mesh, whose body is written once more, with
types. Its axes get the names of the mesh's axes that lie along the same devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd.collectives.axis import axis_index_p
from spmd.core.aval import ShapedArray
from spmd.core.ir import NO_EFFECTS, ClosedJaxpr, Eqn, Literal, Var
from spmd.lax.arithmetic import add_p, mul_p
from spmd.sharding.operand_layouts import axes_over
from spmd.sharding.shard_map_rules import shard_map_p
from spmd.sharding.spec import Mesh, PartitionSpec

# For each axis of a map, the axes of the program's mesh that stand for it, major first.
Names = Mapping[Any, tuple[Any, ...]]

_INDEX = ShapedArray((), np.dtype(np.int32))


def with_typed_maps(closed: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """A program whose maps without types are maps along all axes of a mesh.

    A map over other devices, or over axes of other sizes, stays as it is.
    """
    if shard_map_p.name not in closed.jaxpr.primitives:
        return closed

    def change(eqn: Eqn) -> list[Eqn] | None:
        is_untyped = eqn.prim is shard_map_p and eqn.params["kind"] != "manual"
        return [_typed(eqn, mesh)] if is_untyped else None

    return _each(closed, change)


def _typed(eqn: Eqn, mesh: Mesh) -> Eqn:
    own: Mesh = eqn.params["mesh"]
    names = axes_over(mesh, own)
    if len(names) < len(own.axis_names):
        return eqn
    renamed = {
        "jaxpr": _each(eqn.params["jaxpr"], lambda inner: _renamed(inner, names, mesh)),
        "in_specs": tuple([_spec(spec, names) for spec in eqn.params["in_specs"]]),
        "out_specs": tuple([_spec(spec, names) for spec in eqn.params["out_specs"]]),
        "mesh": mesh,
        "kind": "manual",
        "manual": mesh.axis_names,
    }
    return eqn.replace(params=eqn.params | renamed)


def _spec(spec: PartitionSpec, names: Names) -> PartitionSpec:
    entries = [tuple(b for a in spec.axes_of(d) for b in names[a]) for d in range(len(spec))]
    return PartitionSpec(*[axes or None for axes in entries])


def _renamed(eqn: Eqn, names: Names, mesh: Mesh) -> list[Eqn] | None:
    """A collective over the mesh's axes; None for any other equation."""
    if eqn.prim is axis_index_p:
        return _position(eqn, names[eqn.params["axis_name"]], mesh)
    if "axes" not in eqn.params or not eqn.prim.axes(eqn.params):
        return None
    axes = tuple([b for a in eqn.params["axes"] for b in names[a]])
    return [eqn.replace(params=eqn.params | {"axes": axes})]


def _position(eqn: Eqn, axes: Sequence[Any], mesh: Mesh) -> list[Eqn]:
    """The row-major position along some axes."""
    made: list[Eqn] = []

    def write(prim: Any, operands: Sequence[Any], params: dict[str, Any]) -> Var:
        var = Var(_INDEX)
        made.append(Eqn(prim, tuple(operands), (var,), params, NO_EFFECTS, eqn.source))
        return var

    place: Any = Literal(np.int32(0), _INDEX)
    for n, axis in enumerate(axes):
        here = write(axis_index_p, (), {"axis_name": axis})
        if n:
            size = Literal(np.int32(mesh.shape[axis]), _INDEX)
            here = write(add_p, (write(mul_p, (place, size), {}), here), {})
        place = here
    if not made:  # an axis of one device
        made.append(Eqn(add_p, (place, place), (), {}, NO_EFFECTS, eqn.source))
    made[-1] = made[-1].replace(outvars=eqn.outvars)
    return made


def _each(closed: ClosedJaxpr, change: Any) -> ClosedJaxpr:
    """A jaxpr with other equations in the place of some, in those inside of it, too.

    `change` gives the equations for one, or None to keep it and change what it holds.
    """
    eqns: list[Eqn] = []
    for eqn in closed.eqns:
        found = change(eqn)
        if found is not None:
            eqns += found
        elif eqn in closed.jaxpr.nested:
            params = {name: _inside(value, change) for name, value in eqn.params.items()}
            eqns.append(eqn.replace(params=params))
        else:
            eqns.append(eqn)
    return ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)


def _inside(value: Any, change: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return _each(value, change)
    return tuple([_inside(v, change) for v in value]) if type(value) is tuple else value
