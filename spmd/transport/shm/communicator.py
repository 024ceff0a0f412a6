"""Ranks of one host: collectives through memory that the processes share.

Every collective is a sequence of steps. In a step each rank copies a chunk into its slot, says so,
waits for the others, and reads what it needs from their slots (`layout` says why that is safe).
A reduction reads the slots in rank order. Only `gather` at the start uses MPI.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base.config import config
from spmd.base.errors import CollectiveError, LaunchError, PeerError
from spmd.transport.call_signature import Call, Kind, mismatch, ranks_text
from spmd.transport.checked import OPEN_GROUPS, CheckedCommunicator, blocks
from spmd.transport.communicator import Counts, ReduceOp
from spmd.transport.origin import NOWHERE, Origin
from spmd.transport.progress_thread import PROGRESS
from spmd.transport.reduction import accumulator, combine
from spmd.transport.shm import direct_read
from spmd.transport.shm import layout as shm_layout
from spmd.transport.shm import segment as shm_segment
from spmd.transport.shm.direct_plan import DirectPlanner
from spmd.transport.shm.layout import FAILED, LEFT, RAISED, ControlBlocks
from spmd.transport.shm.native_state import (
    DIFFERENT,
    SEQUENCE,
    STEP,
    UNREAD,
    UNREADABLE,
    NativeState,
)
from spmd.transport.shm.plan import (
    Barrier,
    Clear,
    Copy,
    ExchangePlan,
    Limits,
    Member,
    Memory,
    Operand,
    Place,
    Planner,
    Publish,
    Read,
    Reduce,
)
from spmd.transport.shm.wait import (
    FIRST_PARK_SECONDS,
    LONGEST_PARK_SECONDS,
    Patience,
    cores_of,
    fence,
    own_cores,
    park,
)
from spmd.transport.single import SingleCommunicator

# Below this every rank reduces the whole array for itself, in one step. From there on each reduces
# its part and a second step shares the parts: n times less arithmetic for one more meeting.
REDUCE_PARTS_FROM_BYTES = 32 << 10

# The chunk of a reduction: data stays in the caches between one rank's write and another's read.
REDUCE_CHUNK_BYTES = 256 << 10

# From this size on one copy by a system call costs less than two through the slots. If ranks share
# cores, each further meeting switches processes, and all of them reduce on the same few cores.
DIRECT_FROM_BYTES = DIRECT_SUM_FROM_BYTES = 16 << 10
DIRECT_FROM_BYTES_SHARED, DIRECT_SUM_FROM_BYTES_SHARED = 64 << 10, 2 << 20

Gather = Callable[[Any], list[Any]]


def connect(
    rank: int, size: int, gather: Gather, end_job: Callable[[], None], name: str = "world"
) -> ShmCommunicator | None:
    """Join `size` processes of one host; None on every rank if they turn out not to share memory.

    `gather(obj)` returns the list of all ranks' objects. It is called `CONNECT_GATHERS` times,
    whatever happens, so that several groups can connect through one larger group at once.
    """
    segment, problem = None, ""
    if rank == 0:
        try:
            segment = shm_segment.create(shm_layout.segment_bytes(size))
        except LaunchError as error:
            problem = str(error)
    path, problem = gather((segment.path if segment else "", problem))[0]
    if segment is None and not problem:
        try:
            segment = shm_segment.attach(path, shm_layout.segment_bytes(size))
        except (OSError, ValueError):
            segment = None  # a host of another name, or a container with a /dev/shm of its own
    pages = ControlBlocks(segment.memory, rank, size) if segment else None
    trial = direct_read.Trial()
    if config.direct_reads:
        direct_read.let_siblings_read()
    joined = gather((segment is not None, own_cores(), trial.offer))
    if rank == 0 and segment is not None:
        segment.unlink()
    sees = pages is not None and all(is_running(pages, r) for r in range(size))
    reads = sees and config.direct_reads and all(direct_read.can_read(t) for *_, t in joined)
    found = gather((sees, reads))
    if problem:
        raise LaunchError(problem)
    if pages is None or not all(attached for attached, *_ in joined):
        return None
    patience = Patience.for_load(size, cores_of([cores for _, cores, _ in joined]))
    sees_all, all_read = (all(one) for one in zip(*found, strict=True))
    return ShmCommunicator(pages, patience, sees_all, all_read, end_job, name)


CONNECT_GATHERS = 3

# Seconds to wait until a process whose memory is gone shows as dead.
DEATH_SECONDS = 5.0


class ShmCommunicator(CheckedCommunicator):
    """One of several ranks that are processes of one host."""

    def __init__(
        self,
        pages: ControlBlocks,
        patience: Patience,
        sees_processes: bool,
        reads_directly: bool,
        end_job: Callable[[], None],
        name: str,
    ):
        super().__init__(pages.rank, pages.size, name)
        self._pages = pages
        self._patience = patience
        # False where ranks live in process namespaces of their own: then a process id says nothing.
        self._sees_processes = sees_processes
        self._end = end_job
        self._slots = pages.slots
        self._slot_bytes = pages.slot_bytes
        # 0: nothing is read where it lies. A different number on some ranks would be a disaster.
        own_core = patience.pauses > 0
        chosen = DIRECT_FROM_BYTES if own_core else DIRECT_FROM_BYTES_SHARED
        self._direct_from = chosen if reads_directly else 0
        self._direct_sum_from = DIRECT_SUM_FROM_BYTES if own_core else DIRECT_SUM_FROM_BYTES_SHARED
        self._reduce_bytes = min(REDUCE_CHUNK_BYTES, pages.slot_bytes)
        self._peers = [word for r, word in enumerate(pages.arrived) if r != pages.rank]
        self.state = NativeState(pages, patience, self._trouble)
        self._counters = self.state.words
        self._calls: dict[int, Call] = {}
        self._waits = (-1, 0.0)
        self._views: dict[tuple[np.dtype, int], tuple[list[np.ndarray], ...]] = {}
        self._plans: dict[tuple[Any, ...], ExchangePlan] = {}
        OPEN_GROUPS.add(self)

    @property
    def reads_directly(self) -> bool:
        """Whether ranks read large blocks in each other's memory."""
        return self._direct_from > 0

    def trouble(self) -> str:
        """See `CheckedCommunicator`."""
        pages = self._pages
        if failed := pages.words[FAILED]:
            return pages.text(failed - 1) or f"rank {failed - 1} failed"
        for r in range(self.size):
            # Read the state first: a rank that left in good order is no reason.
            if self._sees_processes and pages.state(r) != LEFT and not is_running(pages, r):
                return self._ended(r, f"while rank {self.rank} waited")
        return ""

    def announce_failure(self, text: str) -> None:
        """See `CheckedCommunicator`; waiting ranks notice within a few milliseconds."""
        self._pages.set_text(RAISED, text)

    def announce_exit(self, code: int) -> None:
        """See `CheckedCommunicator`."""
        self._pages.set_text(LEFT, f"left the program (exit code {code})", code)

    def announce_held(self, held: bool) -> None:
        """See `CheckedCommunicator`."""
        self._pages.set_held(held)

    def all_ranks_left(self) -> bool:
        """See `CheckedCommunicator`."""
        return all(self._pages.state(r) == LEFT for r in range(self.size))

    # ---- steps ---------------------------------------------------------------------------------

    def _next_slots(self, dtype: np.dtype, count: int) -> list[np.ndarray]:
        """All ranks' slots of the coming step, as arrays of `count` elements."""
        views = self._views.get((dtype, count))
        if views is None:
            if len(self._views) >= 256:
                self._views.clear()
            nbytes = dtype.itemsize * count
            views = tuple([slot[:nbytes].view(dtype) for slot in slots] for slots in self._slots)
            self._views[dtype, count] = views
        return views[(self._counters[STEP] + 1) & 1]

    def _enter(self, call: Call) -> None:
        self._counters[SEQUENCE] += 1
        self._pages.enter(self._counters[SEQUENCE], call)

    def _meet(self, call: Call, first: bool) -> None:
        """Say that this rank's slot is filled, and wait until all are.

        In the `first` step of a call the ranks compare their calls: before any of them reads
        data of another call.
        """
        pages, words = self._pages, self._pages.words
        step = self._counters[STEP] = self._counters[STEP] + 1
        pages.post(step)
        for peer in self._peers:
            if words[peer] < step:
                for _ in range(self._patience.spins):
                    if words[peer] >= step:
                        break
                else:
                    self._wait(call, step)
                    break
        fence()
        if first and not pages.agree(self._counters[SEQUENCE], call):
            raise self._difference()

    def _difference(self) -> CollectiveError:
        sequence = self._counters[SEQUENCE]
        return mismatch(sequence, [self._pages.call(r, sequence) for r in range(self.size)])

    def _wait(self, call: Call, step: int) -> None:
        """Wait for all ranks beyond the first spin: yield, then park, then look for the reason."""
        pages = self._pages
        for _ in range(self._patience.yields):
            if not pages.missing(step):
                return
            os.sched_yield()
        began = time.monotonic()
        seconds = FIRST_PARK_SECONDS
        while missing := pages.missing(step):
            self._park(missing[0], step, seconds)
            seconds = min(2 * seconds, LONGEST_PARK_SECONDS)
            still = pages.missing(step)
            if still:
                began = self._look_for_failure(call, step, still, began)

    def _park(self, awaited: int, step: int, seconds: float) -> None:
        pages = self._pages
        pages.words[pages.word(awaited, shm_layout.WAITED_FOR)] = 1
        fence()
        seen = pages.words[pages.arrived[awaited]]
        if seen < step:
            park(pages.address_of(awaited), seen, seconds)

    def _look_for_failure(self, call: Call, step: int, missing: list[int], began: float) -> float:
        """Raise if there is a reason to; returns since when this rank has been waiting in vain."""
        PROGRESS.check()
        pages = self._pages
        waiting = f"while rank {self.rank} waited for it in {call}"
        failed = pages.words[FAILED]
        if failed:
            raise PeerError(pages.text(failed - 1) or f"rank {failed - 1} failed")
        for r in missing:
            # Read the state first: a rank that left cannot arrive any more after that.
            left = pages.state(r) == LEFT
            fence()
            if left and r in pages.missing(step):
                raise PeerError(f"rank {r} {pages.text(r)} {waiting}; {pages.whereabouts(r)}")
            if self._sees_processes and not is_running(pages, r):
                raise PeerError(self._ended(r, waiting))
        held = [r for r in missing if pages.is_held(r)]
        if held:
            self.tell_held(held, call)
            # The patience starts anew: one that is let go needs a moment to come.
            return time.monotonic()
        waited = time.monotonic() - began
        if waited > config.collective_timeout:
            last = "\n".join(f"  rank {r}: {pages.whereabouts(r)}" for r in missing[:8])
            raise CollectiveError(
                f"rank {self.rank} | {call} (#{self._counters[SEQUENCE]} of {self.name}) waited "
                f"{waited:.1f} s for {ranks_text(missing)}:\n{last}\n"
                "If they are only slow, raise SPMD_COLLECTIVE_TIMEOUT (seconds)."
            )
        return began

    # ---- rounds --------------------------------------------------------------------------------

    def run_rounds(
        self,
        rounds: ExchangePlan,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        call: Call | None = None,
    ) -> None:
        """Run these rounds as native code does, over the buffers of the devices as bytes.

        `call` is the call that needs them, if it is another one than the plan's own.
        """
        call = call or rounds.call
        self._enter(call)
        buffers = {
            Memory.INPUT: [_bytes(x) for x in inputs],
            Memory.OUTPUT: [_bytes(x) for x in outputs],
            Memory.SCRATCH: [np.empty(rounds.scratch, np.uint8)],
            Memory.CONSTANT: [np.frombuffer(rounds.constant, np.uint8)],
        }

        def at(place: Place, nbytes: int) -> np.ndarray:
            step = self._counters[STEP] + (place.memory == Memory.NEXT)
            index = self.rank if place.memory == Memory.NEXT else place.index
            whole = buffers.get(place.memory, self._slots[step & 1])[index]
            return whole[place.offset : place.offset + nbytes]

        for action in rounds.actions:
            match action:
                case Barrier():
                    self._meet(call, action.first)
                case Publish():
                    self._pages.show([at(place, 0).ctypes.data for place in action.places])
                case Read():
                    for row in range(action.rows):
                        target = at(action.target + row * action.target_stride, action.width)
                        offset = action.offset + row * action.source_stride
                        self._read(action.rank, action.shown, offset, target)
                case Clear():
                    at(action.target, action.nbytes)[...] = 0
                case Copy():
                    for row in range(action.rows):
                        target = at(action.target + row * action.target_stride, action.width)
                        source = action.source + row * action.source_stride
                        target[...] = at(source, action.width)
                case Reduce():
                    given = action.count * action.dtype.itemsize
                    parts = [at(s, given).view(action.dtype) for s in action.sources]
                    total = np.empty(action.count, accumulator(action.op, action.dtype))
                    combine(action.op, [p.astype(total.dtype, copy=False) for p in parts], total)
                    made = total.astype(action.result, copy=False).view(np.uint8)
                    for place in action.targets:
                        at(place, made.size)[...] = made

    # ---- native code ---------------------------------------------------------------------------

    def planner(self, origin: Origin = NOWHERE) -> Planner:
        """The planner of this group's collectives, for native code."""
        direct = self._direct_from
        limits = Limits(
            self._slot_bytes,
            self._reduce_bytes,
            REDUCE_PARTS_FROM_BYTES,
            direct,
            self._direct_sum_from,
        )
        return (DirectPlanner if direct else Planner)(self.rank, self.size, limits, origin)

    def announce(self, call: Call) -> None:
        """Know a call that native code will make, to be able to name it."""
        self._calls[call.digest] = call

    def _trouble(self, what: int, digest: int) -> None:
        """Native code waits, beyond a first sleep, or found that the ranks' calls differ."""
        if what == DIFFERENT:
            raise self._difference()
        if what == UNREADABLE:
            raise self._unreadable(self._counters[UNREAD], "")
        step = self._counters[STEP]
        if self._waits[0] != step:
            self._waits = step, time.monotonic()
        missing = self._pages.missing(step)
        if missing:
            call, began = self._calls[digest], self._waits[1]
            self._waits = step, self._look_for_failure(call, step, missing, began)

    def _read(self, rank: int, shown: int, offset: int, target: np.ndarray) -> None:
        """Read the data that a rank shows."""
        address = self._pages.shown(rank, shown) + offset
        try:
            direct_read.read(self._pages.process(rank), address, target)
        except OSError as error:
            raise self._unreadable(rank, f" ({error.strerror})") from None

    def _unreadable(self, rank: int, why: str) -> Exception:
        """The error for memory of a rank that can't be read: the rank is no more, most likely."""
        pages = self._pages
        deadline = time.monotonic() + DEATH_SECONDS
        while is_running(pages, rank) and time.monotonic() < deadline:
            time.sleep(FIRST_PARK_SECONDS)  # its memory goes first, then it counts as dead
        if failed := pages.words[FAILED]:
            return PeerError(pages.text(failed - 1) or f"rank {failed - 1} failed")
        if not is_running(pages, rank):
            return PeerError(self._ended(rank, f"while rank {self.rank} read from it"))
        return CollectiveError(
            f"rank {self.rank} | could no longer read the memory of rank {rank} (process "
            f"{pages.process(rank)}){why}.\n"
            "SPMD_DIRECT_READS=0 sends large arrays through shared memory instead."
        )

    def _ended(self, rank: int, when: str) -> str:
        """The end of a rank whose process is gone, and the others that are gone without a word.

        One rank's death ends others: the first that this rank misses need not be the cause.
        """
        pages = self._pages
        if pages.state(rank) == LEFT:
            return f"rank {rank} {pages.text(rank)} {when}; {pages.whereabouts(rank)}"
        others = [
            r
            for r in range(self.size)
            if r not in (rank, self.rank) and pages.state(r) != LEFT and not is_running(pages, r)
        ]
        also = "".join(
            f"\nrank {r} (process {pages.process(r)}) is gone, too; {pages.whereabouts(r)}"
            for r in others
        )
        return (
            f"rank {rank} (process {pages.process(rank)}) ended without a word (killed, or out of "
            f"memory) {when}; {pages.whereabouts(rank)}{also}"
        )

    def _plan(self, key: tuple[Any, ...], make: Callable[[Planner], ExchangePlan]) -> ExchangePlan:
        """The plan of a collective over flat arrays, which `key` describes; made once."""
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= 256:
                self._plans.clear()
            plan = self._plans[key] = make(self.planner())
        return plan

    # ---- collectives ---------------------------------------------------------------------------

    def _chunks(self, count: int, itemsize: int):
        """Slices of at most a slot; one empty slice for nothing, so that ranks still meet."""
        most = max(1, self._slot_bytes // itemsize)
        for at in range(0, max(count, 1), most):
            yield at, min(count - at, most)

    def _all_reduce(self, call: Call, buf: np.ndarray, op: ReduceOp) -> None:
        ranks = [Member(r, 0) for r in range(self.size)]
        key = Kind.ALL_REDUCE, buf.dtype, buf.size, op
        plan = self._plan(key, lambda p: p.all_reduce(op, _operand(buf), [ranks], b""))
        out = np.empty_like(buf) if plan.is_direct else buf  # then the others read from `buf`
        self.run_rounds(plan, [buf], [out], call)
        if out is not buf:
            np.copyto(buf, out)

    def _all_gather(self, call: Call, buf: np.ndarray, out: np.ndarray) -> None:
        key, order = (Kind.ALL_GATHER, buf.dtype, buf.size), range(self.size)
        plan = self._plan(key, lambda p: p.all_gather(_operand(buf), order))
        self.run_rounds(plan, [buf], [out], call)

    def _reduce_scatter(self, call: Call, buf: np.ndarray, out: np.ndarray, op: ReduceOp) -> None:
        key, order = (Kind.REDUCE_SCATTER, buf.dtype, buf.size, op), range(self.size)
        plan = self._plan(key, lambda p: p.reduce_scatter(op, _operand(out), order))
        self.run_rounds(plan, [buf], [out], call)

    def _all_to_all(self, call: Call, buf: np.ndarray, out: np.ndarray) -> None:
        key, order = (Kind.ALL_TO_ALL, buf.dtype, buf.size), range(self.size)
        block = Operand(buf.dtype, 1, buf.size // self.size)
        plan = self._plan(key, lambda p: p.all_to_all(block, order))
        self.run_rounds(plan, [buf], [out], call)

    def _all_to_all_of(self, call: Call, buf: np.ndarray, out: np.ndarray, counts: Counts) -> None:
        """Each shows its buffer, chunk by chunk, until the largest is done."""
        self._enter(call)
        arrived = blocks(out, [row[self.rank] for row in counts])
        starts = [sum(row[: self.rank]) for row in counts]
        for at, count in self._chunks(max(map(sum, counts)), buf.itemsize):
            slots = self._next_slots(buf.dtype, count)
            shown = buf[at : at + count]
            np.copyto(slots[self.rank][: shown.size], shown)
            self._meet(call, first=at == 0)
            for slot, start, part in zip(slots, starts, arrived, strict=True):
                low, high = max(start, at), min(start + part.size, at + count)
                if low < high:
                    np.copyto(part[low - start : high - start], slot[low - at : high - at])

    def _permute(
        self, call: Call, buf: np.ndarray, out: np.ndarray, pairs: Sequence[tuple[int, int]]
    ) -> None:
        key = Kind.PERMUTE, buf.dtype, buf.size, tuple(pairs)
        plan = self._plan(key, lambda p: p.permute(_operand(buf), pairs))
        self.run_rounds(plan, [buf], [out], call)

    def _broadcast(self, call: Call, buf: np.ndarray, root: int) -> None:
        self._enter(call)
        for at, count in self._chunks(buf.size, buf.itemsize):
            slots = self._next_slots(buf.dtype, count)
            if self.rank == root:
                np.copyto(slots[root], buf[at : at + count])
            self._meet(call, first=at == 0)
            if self.rank != root:
                np.copyto(buf[at : at + count], slots[root])

    def _barrier(self, call: Call) -> None:
        self._enter(call)
        self._meet(call, first=True)

    def _subgroup(self, groups: list[list[int]]) -> CheckedCommunicator | None:
        """Connect all groups at once, through this group, which all their ranks are in."""
        place = self._place(groups)
        if place is None or len(place[1]) == 1:
            for _ in range(CONNECT_GATHERS):
                self.all_gather_object(None)
            return SingleCommunicator(f"{self.name}/{place[0]}") if place else None
        index, members = place

        def gather(obj: Any) -> list[Any]:
            objects = self.all_gather_object(obj)
            return [objects[r] for r in members]

        name = f"{self.name}/{index}"
        return connect(members.index(self.rank), len(members), gather, self._end, name)

    def _end_job(self) -> None:
        self._end()


def _operand(buf: np.ndarray) -> Operand:
    return Operand(buf.dtype, 1, buf.size)


def _bytes(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint8)


def is_running(pages: ControlBlocks, rank: int) -> bool:
    """Whether the process of a rank still exists."""
    return shm_layout.is_alive(pages.process(rank))
