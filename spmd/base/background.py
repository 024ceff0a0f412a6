"""Threads of this process that do work beside the program: one way to start, end and fork them.

All of them can rely on this:

* **Start.** `start_thread` and `Worker.submit` say if no thread can be started, and the caller does
  the work itself. There is a limit of the system; and after the end of the main thread nothing
  would wait for a new thread (Python 3.12 starts none).
* **Exit.** The end of the program waits for threads, so all work that was submitted is done; long
  work asks `is_ending` between its parts. The end does not wait for a daemon.
* **Ctrl-C.** Python raises KeyboardInterrupt in the main thread alone: no work is interrupted.
* **Fork.** A child has none of these threads. Its workers have no jobs and start new threads.

Not here: `stack_dump.py` (it precedes all other imports), `transport/threads.py` (simulated ranks:
all of them or none), and native threads, which Python neither starts nor ends.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from spmd.base.fork import after_fork_in_child


def is_ending() -> bool:
    """Whether the main thread has ended: the interpreter then waits for non-daemon threads."""
    return not threading.main_thread().is_alive()


def start_thread(
    work: Callable[[], object], name: str, daemon: bool = False
) -> threading.Thread | None:
    """A new thread that does some work; None where none can be started."""
    thread = threading.Thread(target=work, name=name, daemon=daemon)
    if is_ending() and not daemon:
        return None
    try:
        thread.start()
    except RuntimeError:  # there are as many threads as there may be, or the program ends
        return None
    return thread


def wait_for_rest(
    last_active: Callable[[], float], pause: Callable[[float], object], rest: float, most: float
) -> None:
    """Wait until a program has rested for `rest` seconds, for `most` seconds at the longest.

    `last_active()` is the time of its last activity, by `time.monotonic`. `pause(seconds)` waits at
    most so long, and returns whether to wait no longer.
    """
    now = time.monotonic()
    latest = now + most
    while (until := min(last_active() + rest, latest)) > now and not pause(until - now):
        now = time.monotonic()


class Worker:
    """Calls the submitted functions, one after the other, on a thread of its own.

    The thread starts with the first job and ends after the last; a daemon waits for further jobs,
    as starting a thread takes longer than waking one. A job must not raise. All methods may be
    called from any thread, and `submit` from the handler of a signal.
    """

    def __init__(self, name: str, daemon: bool = False):
        self._name = name
        self._daemon = daemon
        self._forget()
        after_fork_in_child(self._forget)

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def submit(self, job: Callable[[], object]) -> bool:
        """Queue a job for the thread; False if no thread can start: the caller does the job."""
        with self._lock:
            if self.thread is None:
                self.thread = start_thread(self._run, self._name, self._daemon)
            if self.thread is not None:
                self._jobs.put(job)
            return self.thread is not None

    def flush(self) -> None:
        """Wait until all jobs that were submitted are done."""
        if self.thread is not None:
            done = threading.Event()
            if self.submit(done.set):
                done.wait()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(block=self._daemon)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self.thread = None
                        return
            else:
                job()
