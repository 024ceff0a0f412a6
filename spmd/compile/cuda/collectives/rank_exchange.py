"""Exchanges between GPUs of several processes, by NCCL, in the devices' own memory.

The one idea: a collective is a few calls of NCCL for each device, known but for the addresses when
it is compiled. They are put into the devices' exchange streams as one group, between events; the
host waits for no GPU. Moves are of bytes, whatever the dtype. Reductions that NCCL lacks, and moves
of too many rows, go through the host (`collectives/host_execution.py`); all ranks decide alike, as
they compile the same program.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from spmd.base.device import Device
from spmd.collectives.host_execution import OPS, HostCollective
from spmd.compile.cuda.driver import Driver, driver
from spmd.compile.lower.collective import boxes_of
from spmd.transport import nccl
from spmd.transport.call_signature import Kind, make_call
from spmd.transport.communicator import ReduceOp
from spmd.transport.flight_recorder import COLLECTIVE, FLIGHT
from spmd.transport.origin import Origin
from spmd.transport.progress_thread import PROGRESS
from spmd.transport.world import after_recovery

# Each row of a collective that is not along the first dim is a call of its own.
MOST_ROWS = 64

# The dtypes that NCCL reduces: its name for each, and how many of its elements one of ours has.
_NUMBERS = {
    "int8": ("NCCL_INT8", 1),
    "uint8": ("NCCL_UINT8", 1),
    "int32": ("NCCL_INT32", 1),
    "uint32": ("NCCL_UINT32", 1),
    "int64": ("NCCL_INT64", 1),
    "uint64": ("NCCL_UINT64", 1),
    "float32": ("NCCL_FLOAT32", 1),
    "float64": ("NCCL_FLOAT64", 1),
    "complex64": ("NCCL_FLOAT32", 2),
    "complex128": ("NCCL_FLOAT64", 2),
}
_NAMES = {ReduceOp.SUM: "NCCL_SUM", ReduceOp.MAX: "NCCL_MAX", ReduceOp.MIN: "NCCL_MIN"}

# A call for one device, with the addresses of its operand and its result still to come: NCCL's
# name, then offsets and the other arguments.
Calls = Iterator[tuple[str, tuple[Any, ...]]]


def direct(
    collective: HostCollective, devices: Sequence[Device], kind: str, rows: int, count: int
) -> Callable[..., None] | None:
    """The function of a step that enqueues a collective; None if it goes through the host.

    `devices` are those of the whole mesh, the operand is in `rows` of blocks of `count` elements.
    """
    if not is_agreed(collective.origin):
        return None
    gpu, numbers = driver(), [devices[k].local_hardware_id for k in collective.local]
    made = RankExchange(gpu, collective, numbers, kind, rows, count)
    if not made.is_possible:
        return None
    made.connect(devices)
    return made.run


def is_agreed(origin: Origin) -> bool:
    """Whether the ranks use NCCL; all ask at the same place of their programs."""
    gpu, host = driver(), socket.gethostname()
    carried = "" if gpu.carries_nccl else f"the driver {gpu.name} has no NCCL"
    gpus = [f"{host} {gpu.bus_id(k)}" for k in range(gpu.device_count())] if not carried else []
    return nccl.is_agreed(gpus, carried, origin)


# By the devices of all groups; every process asks for them in the same order.
_groups: dict[Any, nccl.NcclGroup] = {}
after_recovery(_groups.clear)


class RankExchange:
    """One collective of one program: `run` enqueues it for all local devices."""

    def __init__(
        self,
        gpu: Driver,
        collective: HostCollective,
        numbers: Sequence[int],
        kind: str,
        rows: int,
        count: int,
    ):
        self.gpu, self.collective, self.numbers, self.kind = gpu, collective, numbers, kind
        # For each local device its number among the members of its group.
        self.ranks = [
            next(g.index(k) for g in collective.groups if k in g) for k in collective.local
        ]
        self.size = len(collective.groups[0])
        self.rows, self.count = rows, count
        self.block = count * collective.dtype.itemsize
        self.op = OPS.get(collective.prim.name, (ReduceOp.SUM,))[0]
        self.what = f"put {collective.origin.label} into the streams of GPUs"
        self.label = collective.label_of(overlapped=True, via="NCCL")
        is_reduced = kind in ("all_reduce", "reduce_scatter")
        self.call = make_call(
            Kind["ALL_TO_ALL" if kind == "exchange" else kind.upper()],
            self.op if is_reduced else None,
            collective.dtype.name,
            rows * count,
            "by NCCL",
            collective.origin,
        )
        self.number = self._number() if is_reduced else ("NCCL_UINT8", 1, "")
        self._boxes = self._rows_of_boxes() if kind == "exchange" else []

    def _number(self) -> tuple[str, int, str] | None:
        """NCCL's dtype and operator for a reduction, and the elements of it in one of ours."""
        dtype, op = self.collective.dtype, self.op
        if dtype.kind == "b":  # sums and maxima are *or*, minima *and*
            return "NCCL_UINT8", 1, _NAMES[ReduceOp.MAX if op is ReduceOp.SUM else op]
        # NCCL's maximum of a NaN and a number may be the number.
        if dtype.name not in _NUMBERS or (op is not ReduceOp.SUM and dtype.kind not in "iu"):
            return None
        return *_NUMBERS[dtype.name], _NAMES[op]

    def _rows_of_boxes(self) -> list[tuple[int, int, int, int, int]]:
        """The parts of an exchange: source (-1 for zeros), target, where they lie, bytes."""
        c, params = self.collective, self.collective.params
        itemsize = c.dtype.itemsize
        boxes = boxes_of(params["copies"], c.shape, params["shape"], itemsize, self.size)
        return [
            (box.source, box.target, row.start, row.place, row.width)
            for box in boxes
            for row in box.copy.flattened(0)
            if row.width
        ]

    @property
    def is_possible(self) -> bool:
        """Whether NCCL can do it, in a bearable number of calls."""
        return (
            self.number is not None
            and self.rows <= MOST_ROWS
            and len(self._boxes) <= MOST_ROWS * self.size
        )

    def connect(self, devices: Sequence[Device]) -> None:
        """Have the communicators of its groups, which all their processes make here if need be."""
        collective = self.collective
        ids = tuple(tuple(devices[k].id for k in group) for group in collective.groups)
        if ids not in _groups:
            members = [
                nccl.Member(number, g, group.index(k), self.size)
                for g, group in enumerate(collective.groups)
                for k, number in zip(collective.local, self.numbers, strict=True)
                if k in group
            ]
            made = nccl.connect(collective.comm, members, self.gpu.at, collective.origin)
            _groups[ids] = made
        self.group = _groups[ids]

    # -- calling --

    def run(self, devices: Any, inputs: list[Any], outputs: list[Any]) -> None:
        """Put it into the streams, once all ranks have come here."""
        PROGRESS.drain()
        calls = []
        for j, number in enumerate(self.numbers):
            given, got = _address(inputs[j][0]), _address(outputs[j][0])
            stream = self.gpu.exchange_stream(number)
            for name, args in self._calls(number, self.ranks[j], given, got):
                calls.append((number, name, (*args, stream)))
        log = self.collective.comm.log
        place = 0
        if log is not None:
            place = log.enqueue(self.label, self.collective.nbytes)
            log.take_up(place)
        before = FLIGHT.set_phase(COLLECTIVE)
        try:
            self.collective.comm.meet(self.call)
            self.group.call(self.what, calls)
        finally:
            FLIGHT.set_phase(before)
            if log is not None:
                log.landed(place, succeeded=False)  # the stream says when
        gpu = self.gpu
        marks = [gpu.mark(number, gpu.exchange_stream(number)) for number in self.numbers]
        nccl.WATCH.add(lambda: all([mark() for mark in marks]), place)

    def _calls(self, number: int, rank: int, given: int, got: int) -> Calls:
        """The calls of one device, without their streams; zeros are put into the stream at once."""
        assert self.number is not None
        library = nccl.library()
        kind, block, size, move = self.kind, self.block, self.size, library.NCCL_UINT8
        name, elements, op = self.number
        if kind in ("all_reduce", "reduce_scatter"):
            how = getattr(library, name), getattr(library, op)
            count = self.count * elements
        if not self.rows * self.count:
            return
        if kind == "all_reduce":
            yield "allReduce", (given, got, self.rows * count, *how)
        elif kind == "permute":
            yield from self._permute(number, rank, given, got)
        elif kind == "exchange":
            yield from self._exchange(number, rank, given, got)
        for row in range(self.rows):
            whole, part = row * size * block, row * block
            if kind == "all_gather":
                yield "allGather", (given + part, got + whole, block, move)
            elif kind == "reduce_scatter":
                yield "reduceScatter", (given + whole, got + part, count, *how)
            elif kind == "all_to_all":
                for j in range(size):
                    yield "send", (given + whole + j * block, block, move, j)
                    yield "recv", (got + whole + j * block, block, move, j)

    def _permute(self, number: int, rank: int, given: int, got: int) -> Calls:
        move, nbytes = nccl.library().NCCL_UINT8, self.rows * self.block
        pairs = self.collective.params["perm"]
        if all(target != rank for _, target in pairs):
            self._clear(number, got, nbytes)
        for source, target in pairs:
            if source == rank:
                yield "send", (given, nbytes, move, target)
            if target == rank:
                yield "recv", (got, nbytes, move, source)

    def _exchange(self, number: int, rank: int, given: int, got: int) -> Calls:
        move = nccl.library().NCCL_UINT8
        for source, target, start, place, nbytes in self._boxes:
            if source == -1 and target == rank:
                self._clear(number, got + place, nbytes)
                continue
            if source == rank:
                yield "send", (given + start, nbytes, move, target)
            if target == rank:
                yield "recv", (got + place, nbytes, move, source)

    def _clear(self, number: int, address: int, nbytes: int) -> None:
        self.gpu.clear(number, address, nbytes, self.gpu.exchange_stream(number))


def _address(view: np.ndarray) -> int:
    return view.__array_interface__["data"][0]
