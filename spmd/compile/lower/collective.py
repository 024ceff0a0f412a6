"""Rules for collectives: exchanges between the devices that run a program in lockstep.

Where all members of the mesh are in this process an exchange is one native step over the devices'
memory. Where some are elsewhere on this host, a native step meets them in shared memory; on other
hosts, one Python call serves all local devices and the transport.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base.errors import InternalError
from spmd.collectives.async_collectives import AsyncCollective
from spmd.collectives.groups import Groups, device_groups
from spmd.collectives.host_execution import HostCollective
from spmd.collectives.order_check import entry_of
from spmd.collectives.rectangles import Copies, gaps
from spmd.collectives.shm_plans import make_plan
from spmd.collectives.volume import KINDS
from spmd.compile.lower.lowering import Lowering, rule
from spmd.compile.lower.mesh_layout import PerDevice, Topology
from spmd.compile.lower.steps import Exchange, Host, RankExchange, Ref, view
from spmd.compile.native.program.steps import Box, Meeting
from spmd.core.aval import ShapedArray
from spmd.core.ir import Eqn
from spmd.transport.origin import Origin
from spmd.transport.shm.communicator import ShmCommunicator
from spmd.transport.shm.plan import Operand
from spmd.transport.strided import strided


def _topology(lowering: Lowering, eqn: Eqn) -> Topology:
    if lowering.topology is None:
        raise InternalError(f"{eqn.prim} at {eqn.source} outside of a multi-device program")
    return lowering.topology


@rule("axis_index")
def axis_index(lowering: Lowering, eqn: Eqn) -> None:
    """A constant of each device."""
    along = _topology(lowering, eqn).along(eqn.params["axis_name"])
    value = PerDevice([np.asarray(k, np.int32) for k in along])
    out = eqn.outvars[0]
    lowering.copy(lowering.place(out), lowering.const(value, out.aval), out.aval.nbytes)


@rule("psum", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute", "exchange")
def collective(lowering: Lowering, eqn: Eqn) -> None:
    """One exchange."""
    topology = _topology(lowering, eqn)
    x, out = eqn.invars[0], eqn.outvars[0]
    groups = device_groups(topology.sizes, eqn.params["axes"], eqn.params.get("groups"))
    source, target = lowering.ref(x), lowering.place(out)
    if topology.is_spread:
        lowering.steps.append(_between_processes(lowering, eqn, topology, groups))
        return
    kind, rows, count = _shape(eqn, len(groups[0]))
    lowering.steps.append(
        Exchange(
            kind=kind,
            input=source,
            output=target,
            dtype=x.aval.dtype,
            rows=rows,
            count=count,
            groups=groups,
            op=_OPS.get(eqn.prim.name),
            pairs=eqn.params.get("perm", ()),
            boxes=_boxes(eqn, len(groups[0])) if kind == "exchange" else (),
            name=f"{eqn.prim.name} {eqn.source.short}",
        )
    )


def _between_processes(
    lowering: Lowering, eqn: Eqn, topology: Topology, groups: Groups
) -> Host[Ref] | RankExchange[Ref]:
    """The step of a collective with other processes, by the first way that is possible.

    The ways are the devices' own memory (NCCL), two halves that overlap with computation, a native
    step over shared memory, and one call of Python for all local devices.
    """
    x, out = eqn.invars[0], eqn.outvars[0]
    source, target = lowering.ref(x), lowering.refs[out]
    origin = topology.origins.get(eqn) or Origin(str(entry_of(eqn)), source=eqn.source.short)
    collective = HostCollective(
        eqn.prim,
        eqn.params,
        groups,
        topology.processes,
        origin,
        x.aval,
        eqn.source,
        lowering.program,
    )
    ins, outs = (view(source, x.aval),), (view(target, out.aval),)
    meeting = Meeting(groups, KINDS[eqn.prim.name] in ("all_reduce", "all_gather"))
    kind, rows, count = _shape(eqn, len(groups[0]))
    if topology.direct is not None and not collective.is_watched:
        run = topology.direct(collective, topology.devices, kind, rows, count)
        if run is not None:
            name = f"{eqn.prim.name} {eqn.source.short}"
            how = {"together": True, "meeting": meeting, "on_device": True}
            return Host(run, ins, outs, name, eqn.source, **how)
    if topology.overlaps:
        halves = AsyncCollective(collective)
        both = halves.start, halves.wait
        name = f"{eqn.prim.name} {eqn.source.short}"
        return Host(
            collective.run, ins, outs, name, eqn.source, together=True, halves=both, meeting=meeting
        )
    plan = None
    if not collective.is_watched:
        plan = make_plan(collective, Operand(x.aval.dtype, rows, count))
    if plan is not None:
        assert isinstance(collective.comm, ShmCommunicator)
        state = collective.comm.state
        room = ShapedArray((plan.scratch,), np.dtype(np.uint8))
        scratch = lowering.temp(room) if plan.scratch else None
        name = f"{eqn.prim.name} {eqn.source.short}"
        state.record(collective.comm.log)
        return RankExchange(
            plan,
            state.address,
            state.take,
            source,
            target,
            scratch,
            collective.label,
            name,
            meeting,
        )
    name = eqn.prim.name
    return Host(collective.run, ins, outs, name, eqn.source, together=True, meeting=meeting)


_OPS = {"psum": "sum", "pmax": "max", "pmin": "min", "reduce_scatter": "sum"}


def _shape(eqn: Eqn, members: int) -> tuple[Any, int, int]:
    """The kind of exchange, and its operand as rows of blocks; see the runner's table."""
    aval = eqn.invars[0].aval
    kind = KINDS[eqn.prim.name]
    if kind in ("all_reduce", "permute"):
        return kind, 1, aval.size
    if kind == "exchange":
        return kind, 1, eqn.outvars[0].aval.size
    rows = math.prod(aval.shape[: eqn.params["dim"]])
    parts = 1 if kind == "all_gather" else members
    return kind, rows, aval.size // max(rows * parts, 1)


def _boxes(eqn: Eqn, members: int) -> tuple[Box, ...]:
    aval, params = eqn.invars[0].aval, eqn.params
    return boxes_of(params["copies"], aval.shape, params["shape"], aval.dtype.itemsize, members)


def boxes_of(
    copies: Copies, source: Sequence[int], target: Sequence[int], itemsize: int, members: int
) -> tuple[Box, ...]:
    """The rectangles of an exchange as bytes, and those that become zeros, of each member."""
    found = [
        Box(c.source, c.target, strided(source, c.start, target, c.place, c.sizes, itemsize))
        for c in copies.items
        if c.count
    ]
    for member in range(members):
        for gap in gaps(copies, member, target):
            place, sizes = [a for a, _ in gap], [b - a for a, b in gap]
            zeros = strided(target, place, target, place, sizes, itemsize)
            found.append(Box(-1, member, zeros))
    return tuple(found)
