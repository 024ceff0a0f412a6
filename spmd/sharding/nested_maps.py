"""A map inside a map becomes one map over a mesh of both axes, before anything runs.

The outer body runs alike on all devices of the inner axis. Where the inner map starts, each takes
its row of the operands; where it ends, the rows are gathered again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.context import state
from spmd.base.device import Device, devices, too_few_devices
from spmd.base.source import current_source
from spmd.collectives.all_gather import all_gather_p
from spmd.collectives.axis import axis_index_p
from spmd.core.aval import typeof
from spmd.core.ir import ClosedJaxpr, Eqn, Literal, all_eqns, subjaxprs
from spmd.core.rewrite import close
from spmd.core.structural import reshape
from spmd.lax.arithmetic import mul
from spmd.lax.dynamic import dynamic_slice_in_dim
from spmd.sharding.shard_map_rules import mesh_axes
from spmd.sharding.spec import Mesh, PartitionSpec


def is_inside_map() -> bool:
    """Whether the running code is the body of a pmap or shard_map."""
    return any(frame.kind in ("pmap", "manual") for frame in state.axes)


def inner_mesh(axis: Any, size: int) -> Mesh:
    """The mesh of a map inside another: its devices are chosen when the two become one."""
    outer = math.prod(f.size for f in state.axes if f.kind in ("pmap", "manual"))
    pool = devices()
    if outer * size > len(pool):
        raise too_few_devices(
            f"{current_source()}: a map over {size} rows inside a map over {outer} devices",
            outer * size,
            len(pool),
        )
    return Mesh(np.asarray(pool[:size], dtype=object), (axis,))


def flatten_maps(jaxpr: ClosedJaxpr, mesh: Mesh, kind: str) -> tuple[ClosedJaxpr, Mesh]:
    """A per-device jaxpr without inner maps, and the mesh that it runs on."""
    inner = [e for e in all_eqns(jaxpr) if e.prim.name == "shard_map"]
    if not inner:
        return jaxpr, mesh
    sizes = dict(mesh.shape)
    for eqn in inner:
        sizes.update(eqn.params["mesh"].shape)
    grown = Mesh(_device_grid(mesh, sizes), tuple(sizes))
    with mesh_axes(grown, kind):
        outer = jaxpr.jaxpr
        flat = close(_Flattened(jaxpr), jaxpr.in_avals, outer.name, outer.arg_names)
    return flat, grown


def _device_grid(mesh: Mesh, sizes: dict[Any, int]) -> np.ndarray:
    """The outer devices first, so that results stay where they were; then the others, in order."""
    wanted = math.prod(sizes.values())
    first = mesh.flat_devices()
    rest: list[Device] = [d for d in devices() if d not in first]
    per_row = wanted // len(first)
    rows = [[d, *rest[k * (per_row - 1) : (k + 1) * (per_row - 1)]] for k, d in enumerate(first)]
    return np.asarray(rows, dtype=object).reshape(tuple(sizes.values()))


class _Flattened:
    """The body, evaluated with its inner maps taken apart."""

    def __init__(self, closed: ClosedJaxpr):
        self.closed = closed

    def __call__(self, *args: Any) -> list[Any]:
        jaxpr = self.closed.jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            outs = _apply(eqn, [read(a) for a in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]


def _apply(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    if eqn.prim.name == "shard_map":
        return _inner_map(operands, **eqn.params)
    if eqn.prim.inline is not None:
        return _Flattened(eqn.prim.inline(eqn.params))(*operands)
    params = {k: _inside(v) for k, v in eqn.params.items()} if _holds_map(eqn) else eqn.params
    outs = eqn.prim.bind(*operands, **params)
    return outs if eqn.prim.multiple else [outs]


def _holds_map(eqn: Eqn) -> bool:
    return any(
        e.prim.name == "shard_map" for _, inner in subjaxprs(eqn.params) for e in all_eqns(inner)
    )


def _inside(value: Any) -> Any:
    """A parameter's jaxprs, flattened too."""
    if isinstance(value, ClosedJaxpr):
        return close(_Flattened(value), value.in_avals, value.jaxpr.name)
    return tuple(_inside(v) for v in value) if isinstance(value, tuple) else value


def _inner_map(
    operands: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    **_: Any,
) -> list[Any]:
    rows = [_take_piece(x, s, mesh) for x, s in zip(operands, in_specs, strict=True)]
    outs = _Flattened(jaxpr)(
        *[reshape(r, a.shape) for r, a in zip(rows, jaxpr.in_avals, strict=True)]
    )
    return [_give_whole(x, s, mesh) for x, s in zip(outs, out_specs, strict=True)]


def _take_piece(x: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    for d in range(len(spec)):
        for axis in spec.axes_of(d):
            step = typeof(x).shape[d] // mesh.shape[axis]
            start = mul(axis_index_p.bind(axis_name=axis), np.int32(step))
            x = dynamic_slice_in_dim(x, start, step, d)
    return x


def _give_whole(x: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    for d in range(len(spec)):
        for axis in reversed(spec.axes_of(d)):
            size = mesh.shape[axis]
            x = all_gather_p.bind(x, axes=(axis,), groups=None, dim=d, size=size, tiled=True)
    return x
