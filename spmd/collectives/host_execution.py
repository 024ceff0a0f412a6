"""Collectives with members in several processes, as compiled programs call them.

Local members are combined first, then one exchange follows between the processes that share a
group. Reductions associate by device within a process and then by process, so the same mesh gives
the same bits on every device and in every run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import CollectiveError
from spmd.base.source import UNKNOWN, Source
from spmd.collectives import verify
from spmd.collectives.exchange_across import Parcels
from spmd.collectives.groups import Groups
from spmd.core.aval import ShapedArray
from spmd.core.primitive import Primitive
from spmd.transport import world as bootstrap
from spmd.transport.checked import CheckedCommunicator
from spmd.transport.communicator import ReduceOp
from spmd.transport.flight_recorder import FLIGHT, source_text
from spmd.transport.origin import NOWHERE, Origin
from spmd.transport.progress_thread import PROGRESS

OPS = {
    "psum": (ReduceOp.SUM, np.add, lambda dtype: np.zeros((), dtype)),
    "pmax": (ReduceOp.MAX, np.maximum, dtypes.min_value),
    "pmin": (ReduceOp.MIN, np.minimum, dtypes.max_value),
}

# Communicators by the partition of processes they stand for. Every process asks for them in the
# same order, as all compile the same programs.
_communicators: dict[Any, CheckedCommunicator] = {}
bootstrap.after_recovery(_communicators.clear)


def communicator(
    groups: Groups, processes: Sequence[int], origin: Origin = NOWHERE
) -> CheckedCommunicator:
    """The communicator of the processes that groups connect with this one.

    `origin` is the program that asks for it, should other ranks be elsewhere.
    """
    parts = _components(groups, processes)
    if parts not in _communicators:
        world = bootstrap.world()
        mine = [k for k, part in enumerate(parts) if world.rank in part]
        if len(set(processes)) != world.size or not mine:
            raise CollectiveError(
                f"a mesh over several processes must have devices of all {world.size}; this one "
                f"has devices of {sorted(set(processes))}"
            )
        whose = Origin(program=origin.program)
        made = world if len(parts) == 1 else world.split(mine[0], world.rank, whose)
        assert made is not None
        _communicators[parts] = made
    return _communicators[parts]


def _components(groups: Groups, processes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Processes that share a group, directly or through others; each part sorted."""
    parts: list[set[int]] = []
    for group in groups:
        joined = {processes[k] for k in group}
        apart = []
        for part in parts:
            if part & joined:
                joined |= part
            else:
                apart.append(part)
        parts = [*apart, joined]
    return tuple(sorted(tuple(sorted(p)) for p in parts))


class HostCollective:
    """One collective of one program: `run` serves all local devices at once."""

    def __init__(
        self,
        prim: Primitive,
        params: dict[str, Any],
        groups: Groups,
        processes: Sequence[int],
        origin: Origin,
        aval: ShapedArray,
        source: Source = UNKNOWN,
        program: str = "",
    ):
        self.prim = prim
        self.origin = origin
        self.params = {k: v for k, v in params.items() if k not in ("axes", "groups")}
        self.comm = communicator(groups, processes, origin)
        rank = bootstrap.process_index()
        ours = _component_of(rank, groups, processes)
        self.groups = tuple(g for g in groups if processes[g[0]] in ours)
        self.local = [k for k, p in enumerate(processes) if p == rank]
        self.where = {k: j for j, k in enumerate(self.local)}
        # Positions of all members, process by process: the order of a gathered buffer.
        self.order = [k for p in ours for k, q in enumerate(processes) if q == p]
        self.shape, self.dtype = aval.shape, aval.dtype
        self.nbytes = aval.nbytes * len(self.local)
        # The ranks, in the communicator, of the processes of all devices.
        self.ranks = {k: ours.index(processes[k]) for k in self.order}
        if prim.name == "exchange":
            self.nbytes = self._received()
        self.fields: dict[str, Any] = {
            "dtype": aval.dtype.name,
            "shape": aval.shape,
            "axes": tuple(str(axis) for axis in params.get("axes", ())),
            "source": source_text(source),
            "scope": source.scope,
            "path": origin.operand,
            "program": program,
        }
        self.label = self.label_of()
        # Asked for by SPMD_DEBUG: each call then goes through Python.
        self.is_watched = verify.is_on() or verify.prints()
        self.move = verify.watched(self, self._choose(processes))
        self.run: Callable[..., None] = self._recorded(self.move)

    def _received(self) -> int:
        """The bytes that this process's devices get from other devices."""
        counts = self.params["copies"].received()
        got = [
            counts.get(n, 0)
            for group in self.groups
            for n, k in enumerate(group)
            if k in self.where
        ]
        return sum(got) * self.dtype.itemsize

    def label_of(self, **more: Any) -> int:
        """The number of its label in the flight recorder."""
        return FLIGHT.label(self.prim.name, **self.fields, **more)

    def _recorded(self, move: Callable[..., None]) -> Callable[..., None]:
        """The same with a record of the flight recorder around it."""
        log = self.comm.log
        if log is None:
            return move

        def run(devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
            PROGRESS.drain()
            place = log.begin(self.label, self.nbytes)
            try:
                move(devices, inputs, outputs)
            except BaseException:
                log.stopped()
                raise
            log.completed(place)

        return run

    def _choose(self, processes: Sequence[int]) -> Callable[..., None]:
        if self.prim.name in OPS:
            return self._reduce_one if len(self.groups) == len(self.local) == 1 else self._reduce
        if self.prim.name == "exchange":
            copies, shape = self.params["copies"], self.params["shape"]
            how = self.groups, self.ranks, self.where, self.comm, self.origin
            return Parcels(copies, shape, *how).run
        ranks = [processes[k] for k in self.groups[0]]
        one_each = len(self.groups) == 1 and ranks == sorted(ranks) and len(self.local) == 1
        if one_each and self.prim.name == "ppermute":
            return self._permute
        if one_each and self.params.get("dim") == 0 and self.prim.name in self._DIRECT:
            return functools.partial(self._DIRECT[self.prim.name], self)
        return self._gather

    # -- reductions --

    def _reduce_one(self, devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        out = outputs[0][0]
        np.copyto(out, inputs[0][0])
        self.comm.all_reduce(out, OPS[self.prim.name][0], self.origin)

    def _reduce(self, devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        op, combine, identity = OPS[self.prim.name]
        xs = [x[0] for x in inputs]
        dtype = xs[0].dtype
        wide = np.dtype(np.float32) if dtype in (dtypes.bfloat16, np.float16) else dtype
        buffer = np.empty((len(self.groups), *xs[0].shape), wide)
        rows = [buffer[k, ...] for k in range(len(self.groups))]  # views, of scalars too
        for row, group in zip(rows, self.groups, strict=True):
            members = [xs[self.where[k]] for k in group if k in self.where]
            if not members:
                row[...] = identity(wide)
                continue
            row[...] = members[0]
            for x in members[1:]:
                combine(row, x, out=row)
        self.comm.all_reduce(buffer, op, self.origin)
        for row, group in zip(rows, self.groups, strict=True):
            for k in group:
                if k in self.where:
                    outputs[self.where[k]][0][...] = row

    # -- one device a process: the transport does it all --

    def _permute(self, devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        self.comm.permute(inputs[0][0], outputs[0][0], self.params["perm"], self.origin)

    def _all_gather(self, devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        self.comm.all_gather(inputs[0][0], outputs[0][0], self.origin)

    def _all_to_all(self, devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        self.comm.all_to_all(inputs[0][0], outputs[0][0], self.origin)

    def _reduce_scatter(self, devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        self.comm.reduce_scatter(inputs[0][0], outputs[0][0], ReduceOp.SUM, self.origin)

    _DIRECT = {  # noqa: RUF012
        "all_gather": _all_gather,
        "all_to_all": _all_to_all,
        "reduce_scatter": _reduce_scatter,
    }

    # -- everything else: all members' values everywhere, then the definition --

    def _gather(self, devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        mine = np.stack([x[0] for x in inputs])
        gathered = np.empty((len(self.order), *mine.shape[1:]), mine.dtype)
        assert gathered.size == mine.size * self.comm.size, math.prod(mine.shape)
        self.comm.all_gather(mine, gathered, self.origin)
        value = dict(zip(self.order, gathered, strict=True))
        assert self.prim.members is not None
        for group in self.groups:
            if not any(k in self.where for k in group):
                continue
            found = self.prim.members([value[k] for k in group], **self.params)
            for k, x in zip(group, found, strict=True):
                if k in self.where:
                    outputs[self.where[k]][0][...] = x


def _component_of(rank: int, groups: Groups, processes: Sequence[int]) -> tuple[int, ...]:
    return next(part for part in _components(groups, processes) if rank in part)
