"""The rounds of a collective primitive between processes that share memory.

`HostCollective` is its slow twin: the same meaning as calls of a transport, from Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from spmd.collectives.exchange_across import copies_of_groups, with_gaps
from spmd.collectives.host_execution import OPS, HostCollective
from spmd.transport.communicator import ReduceOp
from spmd.transport.reduction import accumulator
from spmd.transport.shm.communicator import ShmCommunicator
from spmd.transport.shm.plan import (
    Clear,
    ExchangePlan,
    Member,
    Memory,
    Operand,
    Place,
    Planner,
    Sum,
    Take,
)
from spmd.transport.shm.redistribution import Move, redistribution
from spmd.transport.strided import strided

# Native code reduces these; others (floats of eight bits) go through Python.
NATIVE_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 bfloat16 float32 float64 complex64 complex128".split()
)


def make_plan(collective: HostCollective, operand: Operand) -> ExchangePlan | None:
    """This process's plan for one collective; None if it goes through messages.

    `operand` is the input of one device, in rows of blocks: of one for each member where members
    get different parts, else of a single one.
    """
    comm = collective.comm
    devices = len(collective.local)
    if not isinstance(comm, ShmCommunicator) or len(collective.order) != devices * comm.size:
        return None
    name = collective.prim.name
    if name in (*OPS, "reduce_scatter") and operand.dtype.name not in NATIVE_DTYPES:
        return None
    members = {k: Member(n // devices, n % devices) for n, k in enumerate(collective.order)}
    groups = [[members[k] for k in group] for group in collective.groups]
    planner = comm.planner(collective.origin)
    plan: ExchangePlan | None
    if name == "exchange":
        plan = _rectangles(planner, collective, members)
    elif name in OPS:
        op, _, identity = OPS[name]
        wide = accumulator(ReduceOp.SUM, operand.dtype)
        plan = planner.all_reduce(op, operand, groups, np.asarray(identity(wide)).tobytes())
    elif devices == 1:
        plan = _alone(planner, collective, operand, [m.rank for m in groups[0]])
    else:
        plan = _together(planner, collective, operand, groups)
    if plan is not None:
        comm.announce(plan.call)
    return plan


def _rectangles(
    planner: Planner, collective: HostCollective, members: Mapping[int, Member]
) -> ExchangePlan | None:
    """The copies between devices as bytes; zeros where no device sends."""
    copies, shape = collective.params["copies"], collective.params["shape"]
    itemsize = collective.dtype.itemsize
    moves = [
        Move(
            members[copy.source],
            members[copy.target],
            strided(collective.shape, copy.start, shape, copy.place, copy.sizes, itemsize),
        )
        for copy in copies_of_groups(copies, collective.groups)
    ]
    nbytes = math.prod(shape) * itemsize
    clears = [
        Clear(Place(Memory.OUTPUT, collective.where[k]), nbytes)
        for k in sorted(with_gaps(copies, collective.groups, shape))
        if k in collective.where
    ]
    devices = len(collective.local)
    return redistribution(planner, collective.dtype, devices, moves, clears, collective.nbytes)


def _alone(
    planner: Planner, collective: HostCollective, x: Operand, order: Sequence[int]
) -> ExchangePlan:
    """With one device a process there is one group; `order` are its ranks, member by member."""
    match collective.prim.name:
        case "all_gather":
            return planner.all_gather(x, order)
        case "all_to_all":
            return planner.all_to_all(x, order)
        case "reduce_scatter":
            return planner.reduce_scatter(ReduceOp.SUM, x, order)
    pairs = [(order[source], order[target]) for source, target in collective.params["perm"]]
    return planner.permute(x, pairs)


def _together(
    planner: Planner, collective: HostCollective, x: Operand, groups: Sequence[Sequence[Member]]
) -> ExchangePlan:
    """Each process shows the inputs of all its devices, and takes what its devices need."""
    name, takes, sums = collective.prim.name, list[Take](), list[Sum]()
    width = len(groups[0])
    scratch = 0
    mine = [(g, k, m) for g in groups for k, m in enumerate(g) if m.rank == planner.rank]
    for group, number, member in mine:
        output = Place(Memory.OUTPUT, member.device)
        part = 0 if name == "all_gather" else number
        if name == "ppermute":
            sources = [group[source] for source, to in collective.params["perm"] if to == number]
            takes += [Take(source, 0, output, x.block) for source in sources]
        elif name == "reduce_scatter":
            parts = [Place(Memory.SCRATCH, 0, scratch + j * x.whole) for j in range(width)]
            scratch += width * x.whole
            takes += [Take(m, part, p, x.block) for m, p in zip(group, parts, strict=True)]
            sums.append(Sum(ReduceOp.SUM, member.device, tuple(parts)))
        else:
            rows = enumerate(group)
            takes += [Take(m, part, output + j * x.block, width * x.block) for j, m in rows]
    blocks = width if name in ("all_to_all", "reduce_scatter") else 1
    return planner.exchange(x, blocks, len(collective.local), takes, sums)
