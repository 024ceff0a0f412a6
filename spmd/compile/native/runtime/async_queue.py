"""The queue of this process: calls of long programs that go on while Python does something else.

The one idea: a queue is a stream. Its jobs run one after the other, in the order of their
submission, natively (`ir/async_queue.py`), so a job may be given the addresses of results that
the jobs before it have yet to write, and all jobs compute in one arena. The memory that a job reads
and writes is kept alive here until it has ended, whatever becomes of the arrays meanwhile.

Programs that call Python or meet other processes never come here; they run where they are called.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from spmd.base.config import config
from spmd.base.context import attributed_to
from spmd.base.errors import SpmdError
from spmd.base.fork import after_fork_in_child, before_fork
from spmd.base.source import current_source
from spmd.compile.native.program.run_layout import INTERRUPTED
from spmd.compile.native.runtime import queue_layout
from spmd.compile.native.runtime.allocator import Block, alloc
from spmd.compile.native.runtime.load import QueueCalls, queue_calls
from spmd.compile.native.runtime.run import NativeProgram
from spmd.transport import flight_recorder as flight
from spmd.transport.flight_recorder import FLIGHT

# A loop that submits faster than the jobs run waits for them from here on: so many jobs, or results
# of so many bytes (one job may always wait behind the one that runs). More would only cost memory,
# and drive results out of the caches before they are read.
MOST_JOBS = 32
MOST_BYTES = 64 * 2**20
assert MOST_JOBS < queue_layout.RING_JOBS

# A thread that waits for a job which has not started runs it itself: waking the queue's thread, and
# being woken by it, takes up to 100 us. Longer jobs stay with the queue: a caller hears a signal
# only between two jobs.
MOST_HELP_NS = 20_000_000
# How often a waiting thread looks for signals.
SLICE_NS = 50_000_000

# If the caller waits for a job within this time of its call, running it at once is faster: the way
# through the queue takes half of this time (waking a thread, and Python code that has left the
# caches after a long program). Then so many of the program's next calls run at once, before one is
# queued again.
AT_ONCE_NS = 300_000
MOST_TRUST = 15

# How long an interrupted process waits for the job that runs: one round of its loop.
SECONDS_TO_STOP = 0.5

# The status of a job that a parent process had when this one was forked.
LOST = 65


class Job:
    """One call of a program. Satisfies `sharding.pending.Work`."""

    __slots__ = (
        "called", "causes", "closed", "kept", "memory", "nbytes", "program", "source",
    )  # fmt: skip

    def __init__(
        self, program: NativeProgram, kept: Mapping[int, Any], causes: Sequence[Job], closed: Any
    ):
        self.program = program
        self.closed = closed  # which errors are told from, in case the program fails
        self.kept = kept  # the memory that the job reads and writes, by id
        self.causes = causes  # jobs that had not ended, whose results it reads
        self.source = current_source()
        self.nbytes = 0
        self.called = 0  # when; 0 if that says nothing about its caller any more

    def write(self, words: Sequence[int], at_once: bool) -> int:
        """Write the job down for native code; gives the address."""
        program, record, sequence = self.program, 0, 0
        if FLIGHT.keeps_programs:
            label = FLIGHT.label("program", program=program.name, queued=True)
            place = FLIGHT.begin(label, 0, entered=False)
            record, sequence = FLIGHT.address + 8 * place, FLIGHT.words[place]
        state = (queue_layout.WAITING, 0)
        header, count = program.header_address, len(self.causes)
        head = (*state, header, 0, record, sequence, at_once, 0, count)
        causes = [cause.memory.buffer_info()[0] for cause in self.causes]
        report = (0,) * (program.words_needed - program.frame_words)
        self.memory = array("q", (*head, *causes, *words, *report))
        address = self.memory.buffer_info()[0]
        self.memory[queue_layout.FRAMES] = address + 8 * (queue_layout.CAUSE + len(causes))
        return address

    @property
    def number(self) -> int:
        """Its place in the order of all jobs, from 1; 0 when it is over."""
        return self.memory[queue_layout.NUMBER]

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.number <= queue_calls().done()

    def wait(self) -> None:
        """Return when it has ended well; raise its error, each time."""
        if self.called:
            self._learn()
        QUEUE.wait(self)
        if self.memory[queue_layout.STATUS]:
            self._fail()

    def _learn(self) -> None:
        """Note how long after its call the job is waited for first."""
        program, passed = self.program, time.perf_counter_ns() - self.called
        self.called = 0
        program.trust = min(2 * program.trust + 1, MOST_TRUST) if passed < AT_ONCE_NS else 0
        program.calls_at_once = program.trust

    def release(self) -> None:
        """Let go of the memory of a job that has ended."""
        self.kept = {}
        self.memory[queue_layout.NUMBER] = 0  # numbers begin anew in a forked child
        if not self.memory[queue_layout.STATUS]:
            self.causes, self.closed = (), None

    def _fail(self) -> NoReturn:
        status = self.memory[queue_layout.STATUS]
        if status == queue_layout.CANCELLED:
            for cause in self.causes:
                cause.wait()
        try:
            with attributed_to(self.source):
                self._raise(status)
        except Exception as error:
            error.add_note(
                f"{self.program.name or 'a program'} was called at {self.source} and ran beside "
                "Python (asynchronous dispatch); its failure shows where its results are needed"
            )
            raise

    def _raise(self, status: int) -> NoReturn:
        if status == queue_layout.CANCELLED:
            raise SpmdError("this program was cancelled: the process ends")
        if status == INTERRUPTED:
            raise SpmdError(
                "this program was interrupted (Ctrl-C) in a loop, while its result was waited for; "
                "call it again for its result"
            )
        if status == LOST:
            raise SpmdError(
                "this process was forked while its parent computed the array; wait for it with "
                "block_until_ready() before the fork"
            )
        self.program.fail(status, self.memory[queue_layout.FRAMES])


class Queue:
    """The jobs under way, and their common state."""

    def __init__(self) -> None:
        self.is_open = _is_wanted()
        # Guards all below. Its holder never waits for a job.
        self.lock = threading.RLock()
        self.jobs: deque[Job] = deque()  # under way, or ended and not looked at since
        self._nbytes = 0
        self._arenas: dict[int, Block] = {}
        self._is_registered = False

    @property
    def _calls(self) -> QueueCalls:
        return queue_calls()

    # ---- submitting ----

    def make_room(self, nbytes: int) -> None:
        """Wait until one more job with results of so many bytes may be under way."""
        while True:
            self.reap()
            jobs = self.jobs
            if len(jobs) < 2:
                return
            if len(jobs) < MOST_JOBS and self._nbytes + nbytes <= MOST_BYTES:
                return
            try:
                first = jobs[0]
            except IndexError:  # another thread has cleared it
                continue
            self.wait(first)

    def arena(self, device: int, nbytes: int) -> Block:
        """The memory for temporary values of a device, shared by all jobs: one runs at a time."""
        with self.lock:
            arena = self._arenas.get(device)
            if arena is None or arena.capacity < nbytes:
                arena = self._arenas[device] = alloc(nbytes)
            return arena

    def release_arenas(self) -> None:
        """Let go of the arenas, which jobs under way keep until they end."""
        with self.lock:
            self._arenas.clear()

    def holders(self, block: Any) -> int:
        """The number of jobs under way that keep a block. The lock is held."""
        key = id(block)
        return sum(key in job.kept for job in self.jobs)

    def submit(
        self,
        program: NativeProgram,
        words: Sequence[int],
        kept: Mapping[int, Any],
        causes: Sequence[Job],
        nbytes: int,
        closed: Any = None,
    ) -> Job:
        """Run a program over frames of these words, after all jobs so far.

        It holds `kept`, by id, until the job has ended; `closed` is the program's jaxpr.
        """
        job = Job(program, kept, causes, closed)
        job.nbytes = nbytes
        if not self._is_registered:
            self._register()
        with self.lock:
            is_first = not self.jobs
            if is_first:
                job.called = time.perf_counter_ns()
            address = job.write(words, is_first)
            self._nbytes += nbytes
            self.jobs.append(job)
            self._calls.submit(address)
        FLIGHT.words[flight.PROGRAMS] += 1
        return job

    # ---- waiting ----

    def wait(self, job: Job) -> None:
        """Return when a job has ended, well or not; signals are served meanwhile."""
        calls = self._calls
        if job.number > calls.done():
            helps = int(self._cost_until(job) < MOST_HELP_NS)
            is_rank = FLIGHT.words[flight.SIZE] > 1
            before = FLIGHT.set_phase(flight.PROGRAM) if is_rank else flight.HOST
            try:
                while not calls.wait(job.number, helps, SLICE_NS):
                    pass
            except KeyboardInterrupt:
                self._stop_loops(job.number)
                raise
            finally:
                if is_rank:
                    FLIGHT.set_phase(before)
        self.reap()

    def _cost_until(self, job: Job) -> float:
        return sum(j.program.cost_ns for j in list(self.jobs) if j.number <= job.number)

    def _stop_loops(self, number: int) -> None:
        """Have the loops of all jobs up to a number end: no thread waits for them any more."""
        for job in list(self.jobs):
            if job.number <= number:
                job.memory[queue_layout.STOP] = 1

    def drain(self) -> None:
        """Return when no job is under way."""
        while self.jobs:
            try:
                last = self.jobs[-1]
            except IndexError:
                return
            self.wait(last)

    def reap(self) -> None:
        """Let go of the memory of jobs that have ended."""
        if not self.jobs:
            return
        with self.lock:
            done = self._calls.done()
            while self.jobs and self.jobs[0].number <= done:
                job = self.jobs.popleft()
                self._nbytes -= job.nbytes
                job.release()
            if not self.jobs:
                self._arenas.clear()
                self._nbytes = 0

    # ---- the process ----

    def follow_settings(self) -> None:
        """Open or close the queue as the settings say; jobs under way end first."""
        self.is_open = _is_wanted()
        if not self.is_open:
            self.drain()

    def _register(self) -> None:
        self._is_registered = True
        atexit.register(self.close)
        # A child has the memory of its parent, but not the thread that writes to it.
        before_fork(self.drain)
        after_fork_in_child(self._forget)

    def close(self) -> None:
        """End all jobs, at the end of the process: the memory that they use is about to go.

        Where an interrupt ends it, those that have not begun are cancelled, and the loops of the
        one that runs end.
        """
        self.is_open = False
        interrupted = getattr(sys, "last_type", None)
        try:
            if interrupted is not None and issubclass(interrupted, KeyboardInterrupt):
                self._abandon()
            else:
                self.drain()
        except KeyboardInterrupt:
            self._abandon()
            raise
        finally:
            if not self.jobs:
                self._calls.stop()

    def _abandon(self) -> None:
        """End all jobs soon, or leave the one that runs to the end of the process."""
        self._calls.cancel()
        if not self.jobs:
            return
        last = self.jobs[-1]
        self._stop_loops(last.number)
        deadline = time.perf_counter() + SECONDS_TO_STOP
        while last.number > self._calls.done() and time.perf_counter() < deadline:
            self._calls.wait(last.number, 0, SLICE_NS)
        self.reap()
        for job in self.jobs:
            # In a long kernel: Python must not take away what it reads and writes.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(job))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._arenas))

    def _forget(self) -> None:
        """In a forked child: there are no jobs, and some results will never come."""
        self.lock = threading.RLock()
        self._calls.reset()
        for job in self.jobs:
            if job.memory[queue_layout.STATUS] == queue_layout.WAITING:
                job.memory[queue_layout.STATUS] = LOST
            job.release()
        self.jobs.clear()
        self._arenas.clear()
        self._nbytes = 0


def _is_wanted() -> bool:
    """Whether programs may run beside Python: not while their user looks closely."""
    watched = config.debug_nans or config.debug_infs or config.debug or config.disable_jit
    return config.cpu_enable_async_dispatch and not watched


QUEUE = Queue()
for _name in ("cpu_enable_async_dispatch", "debug_nans", "debug_infs", "debug", "disable_jit"):
    config.on_update(_name, lambda _: QUEUE.follow_settings())
# Only the thread that holds the pool changes it.
config.on_update("num_threads", lambda _: QUEUE.drain())
