"""The kind of program that a jaxpr becomes: one of a single device, or one over a mesh.

A program is over a mesh if an argument is laid out over one, if its user constrains a value to one,
or if there is a `shard_map` in it. It is partitioned then (`spmd/partition/`): its jaxpr becomes
one `shard_map` equation, and results stay where they are. A jaxpr that is one `shard_map` already
is compiled as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from spmd.base.amounts import size_text
from spmd.base.config import config
from spmd.base.device import MEMORY_KINDS, Device, default_device
from spmd.base.errors import DeviceError, ShardingError
from spmd.base.source import UNKNOWN, current_source
from spmd.base.util import collector_paused
from spmd.compile.executable.executable import Executable, compile_jaxpr
from spmd.compile.executable.mesh_program import OVER_MESHES, MeshProgram, cause_text, over_meshes
from spmd.compile.lazy import device_orders, partition, pipeline, process_program, unasked
from spmd.core.ir import ClosedJaxpr, Eqn, all_eqns
from spmd.sharding.abstract_mesh import AxisType
from spmd.sharding.array import usable
from spmd.sharding.named import NamedSharding, Sharding, SingleDeviceSharding
from spmd.sharding.operand_layouts import Layouts, spec_over
from spmd.sharding.process_rows import CONVERSIONS, over_processes
from spmd.sharding.spec import Mesh, PartitionSpec


def compile_program(
    closed: ClosedJaxpr,
    donated: Sequence[bool] = (),
    optimised: ClosedJaxpr | None = None,
    layouts: Layouts | None = None,
    wanted: Sequence[Sharding | None] = (),
    device: Device | None = None,
) -> Executable | MeshProgram:
    """The executable of a closed jaxpr: over a mesh if arguments, constraints or maps name one.

    `optimised` is the result of the passes, if they have run; `layouts` are those of the arguments,
    and `wanted` is what the user says of those of the results. `device` is that of `device_of`, for
    a program of one device.
    """
    with collector_paused():
        names = closed.jaxpr.primitives
        if "shard_map" in names and _is_one_map(closed):
            flat = pipeline.inline_calls(closed)
            if not set(flat.jaxpr.outvars) - set(flat.eqns[0].outvars):
                return MeshProgram(flat, flat.eqns[0], donated, names=closed.jaxpr.arg_names)
        if not CONVERSIONS.isdisjoint(names):
            return process_program.ProcessProgram(closed, donated, layouts)
        if layouts is not None and "shard_map" in names:
            _check_devices(closed, layouts)
        mesh = mesh_of(closed, layouts or ())
        if mesh is not None and _may_have_other_orders(closed, mesh, layouts or ()):
            ordered = device_orders.ordered(closed, mesh, layouts, wanted)
            made = ordered and partitioned(ordered.closed, ordered.layouts)
            if ordered is not None and made is not None:
                return device_orders.OrderedProgram(closed, ordered, made, donated)
        plans: list[Any] = []
        made = partitioned(closed, layouts, plans, wanted)
        if "inspect_sharding" in names:
            closed = _told(closed, plans, device)
        if made is not None:
            return MeshProgram(made, made.eqns[0], donated, closed)
        if "shard_map" in names:
            _check_no_partly_manual_map(closed)
        if layouts is not None and config.unasked_gathers != "allow":
            _tell_of_gathers(closed, layouts)
        sizes = [a.nbytes for a in closed.in_avals], [a.nbytes for a in closed.out_avals]
        donated = usable(donated, *sizes) if True in donated else donated
        return compile_jaxpr(closed, donated, optimised, device)


def _told(closed: ClosedJaxpr, plans: Sequence[Any], device: Device | None) -> ClosedJaxpr:
    """Call back with the layouts for which a program asks; the program for one device."""
    if plans:
        partition.tell_layouts(plans[-1])
        return closed
    place = SingleDeviceSharding(device or default_device())
    for eqn in all_eqns(closed):
        if eqn.prim.name == "inspect_sharding":
            eqn.params["callback"](place)
    return closed


def _check_devices(closed: ClosedJaxpr, layouts: Layouts) -> None:
    """Raise a DeviceError if an argument lies on other devices than a map is over."""
    for eqn in over_meshes(closed):
        if eqn.prim.name != "shard_map":
            continue  # partitioning reads constraints
        devices = eqn.params["mesh"].flat_devices()
        for k, (sharding, aval) in enumerate(zip(layouts, closed.in_avals, strict=True)):
            if sharding is None or sharding.device_set == set(devices):
                continue
            names = closed.jaxpr.arg_names
            name = names[k] if k < len(names) and names[k] else f"argument {k}"
            raise DeviceError(
                f"{current_source()}: jit({closed.jaxpr.name}): {name} ({aval.short()}) is "
                f"committed to devices {list(sharding.layout[0])}, and {cause_text(eqn)} is over "
                f"devices {[d.id for d in devices]}; nothing is moved silently. Pass "
                f"device_put({name}, NamedSharding(mesh, spec))"
            )


def _tell_of_gathers(closed: ClosedJaxpr, layouts: Layouts) -> None:
    """Warn of the arguments that a program of one device gathers, as `unasked_gathers` says."""
    rows = []
    for k, (sharding, aval) in enumerate(zip(layouts, closed.in_avals, strict=True)):
        if sharding is None:
            continue
        lacks = aval.nbytes - math.prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize
        if lacks > config.unasked_gathers_from:
            names = closed.jaxpr.arg_names
            name = names[k] if k < len(names) else f"argument {k}"
            rows.append(f"{name} ({aval.short()}, laid out by {sharding.spec}): {size_text(lacks)}")
    if rows:
        source = next((e.source for e in closed.eqns if e.source is not UNKNOWN), current_source())
        text = "\n  ".join(rows)
        unasked.tell(
            f"{source}: {closed.jaxpr.name} is not partitioned, so its arguments are gathered on "
            f"one device, for which no sharding asks (config.unasked_gathers="
            f"{config.unasked_gathers!r}): there is a map over another order or grid of "
            "the devices in it, or a callback that returns keys. Take that out of the jitted "
            "function\n  "
            f"{text}",
            source,
        )


def partitioned(
    closed: ClosedJaxpr,
    layouts: Layouts | None,
    plans: list[Any] | None = None,
    wanted: Sequence[Sharding | None] = (),
) -> ClosedJaxpr | None:
    """A program over a mesh as one `shard_map` equation; None if it is not over one.

    The partitioner's plan is added to `plans`. Results that lie as the user `wanted`, or else as an
    argument does, have its very spec.
    """
    if not CONVERSIONS.isdisjoint(closed.jaxpr.primitives):
        return process_program.partitioned(over_processes(closed, layouts), plans)
    mesh = mesh_of(closed, layouts or ())
    if mesh is None:
        return None
    given = layouts or [None] * len(closed.in_avals)
    specs = [None if s is None else spec_over(mesh, s) for s in given]
    uneven = any(s is not None and s.uneven for s in given)
    free = [None] * len(closed.out_avals)
    found = partition.partition(closed, mesh, specs, free, plans, uneven)
    return None if found is None else _with_specs_as_given(found, closed, mesh, specs, wanted)


def _with_specs_as_given(
    made: ClosedJaxpr,
    closed: ClosedJaxpr,
    mesh: Mesh,
    specs: Sequence[PartitionSpec | None],
    wanted: Sequence[Sharding | None],
) -> ClosedJaxpr:
    """The program with those specs of results that users have written, of several that say alike.

    Results are in the memory that users say. Their layouts come first, then the specs of arguments
    that are read and have as many dims; where types say all, specs of results are in full.
    """
    (eqn,) = made.eqns
    outer, jaxpr = eqn.params.get("outer"), closed.jaxpr
    outs = eqn.params["out_specs"] if outer is None else outer[2]
    read = set[Any](jaxpr.outvars).union(*[e.invars for e in closed.eqns])
    given: dict[Any, PartitionSpec] = {}
    for v, s in zip(jaxpr.invars, () if mesh.are_all_axes_explicit else specs, strict=False):
        if s and v in read:
            given.setdefault((v.aval.ndim, s.without_trailing()), s)
    chosen = []
    for k, (spec, aval) in enumerate(zip(outs, closed.out_avals, strict=True)):
        asked, splits = wanted[k] if wanted else None, spec.without_trailing()
        own = asked.spec if isinstance(asked, NamedSharding) and asked.mesh == mesh else None
        if own is None or own.without_trailing() != splits:
            own = given.get((aval.ndim, splits), spec)
        chosen.append(own)
    kinds = tuple([None if s is None else s.memory_kind for s in wanted])
    asks_for_memory = any(kind not in (None, MEMORY_KINDS[0]) for kind in kinds)
    if tuple(chosen) == outs and not asks_for_memory:
        return made
    changed: dict[str, Any] = {"out_specs": tuple(chosen)}
    if outer is not None:
        changed = {"outer": (*outer[:2], tuple(chosen))}
    if asks_for_memory:
        changed["memory_kinds"] = kinds
    eqn = eqn.replace(params=eqn.params | changed)
    return ClosedJaxpr(made.jaxpr.replace(eqns=(eqn,)), made.consts)


def mesh_of(closed: ClosedJaxpr, layouts: Sequence[NamedSharding | None]) -> Mesh | None:
    """The mesh of a program: its first argument's, else that of its first map or constraint.

    A map over the same devices in another grid counts more, as its body cannot change. The axes
    have the types that those of arguments and results say.
    """
    mesh = next((s.mesh for s in layouts if s is not None), None) or _first_mesh(closed)
    if mesh is None:
        return None
    typed = [a.explicit.mesh for a in (*closed.out_avals, *closed.in_avals) if a.explicit]
    if "shard_map" in closed.jaxpr.primitives and not typed:
        mesh = _mesh_of_map(closed, mesh)
    types = typed[0].axis_types if typed else (AxisType.Auto,) * len(mesh.axis_names)
    if types == mesh.axis_types or len(types) != len(mesh.axis_types):
        return mesh
    return mesh.update(axis_types=types)


def _mesh_of_map(closed: ClosedJaxpr, mesh: Mesh) -> Mesh:
    """The mesh of the first map with types that is over another grid of a mesh's devices."""
    devices = set(mesh.flat_devices())
    for eqn in all_eqns(closed):
        if eqn.prim.name != "shard_map" or eqn.params["kind"] != "manual":
            continue
        own = eqn.params["mesh"]
        if not isinstance(own, Mesh) or mesh.has_grid_of(own):
            return mesh
        if set(own.flat_devices()) == devices:
            return own
    return mesh


def _may_have_other_orders(
    closed: ClosedJaxpr, mesh: Mesh, layouts: Sequence[NamedSharding | None]
) -> bool:
    """Whether an argument or a constraint is over another grid of devices than a program's."""
    if any(s is not None and not mesh.has_grid_of(s.mesh) for s in layouts):
        return True
    if _CONSTRAINTS.isdisjoint(closed.jaxpr.primitives):
        return False
    found = (e.params["mesh"] for e in all_eqns(closed) if e.prim.name in _CONSTRAINTS)
    return any(not mesh.has_grid_of(other) for other in found)


def _first_mesh(closed: ClosedJaxpr) -> Mesh | None:
    if OVER_MESHES.isdisjoint(closed.jaxpr.primitives):
        return None
    return next((eqn.params["mesh"] for eqn in over_meshes(closed)), None)


_CONSTRAINTS = frozenset(("sharding_constraint", "reshard"))


def _check_no_partly_manual_map(closed: ClosedJaxpr) -> None:
    """Raise if a map leaves axes to the compiler in a program that is not partitioned."""
    for eqn in all_eqns(closed):
        if eqn.prim.name == "shard_map" and eqn.params.get("manual") is not None:
            raise ShardingError(
                f"{eqn.source}: shard_map({eqn.params['name']}): axis_names="
                f"{set(eqn.params['manual'])!r} leaves axes to the compiler, and there is other "
                "work in this program that is not partitioned: a map over another order or grid of "
                "the devices, or a callback that returns keys. Take it out of the jitted function"
            )


def _is_one_map(closed: ClosedJaxpr) -> bool:
    """Whether all there is in a program, in calls or not, is one shard_map."""
    first = list(itertools.islice(_called(closed), 2))
    if len(first) != 1 or first[0].prim.name != "shard_map":
        return False
    return first[0].params.get("manual") is None


def _called(closed: ClosedJaxpr) -> Iterator[Eqn]:
    """The equations of a jaxpr and, in the place of calls, of their bodies."""
    for eqn in closed.eqns:
        inside = eqn.stands_for()
        if inside is None:
            yield eqn
        else:
            yield from _called(inside)
