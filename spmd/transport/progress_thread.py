"""Exchanges in flight: one thread makes them while programs go on computing.

A program hands an exchange over (`send`) and later waits for it. One thread takes them in that
order, so all ranks, which run the same programs, meet in the same order. A thread that calls a
communicator itself waits first until nothing is in flight: there is one order for all calls.

MPI has nonblocking collectives, but neither Open MPI nor MPICH moves their data unless it is
called; a thread that asks now and then does, and sleeps in between, so that it takes no core.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from spmd.base.background import Worker
from spmd.base.errors import SpmdError
from spmd.base.fork import after_fork_in_child

# Seconds that a failed program lets exchanges finish before it cancels them, so that healthy ranks
# get their data.
GRACE_SECONDS = 2.0
# Seconds between two polls of the network while no thread waits: sockets buffer data meanwhile.
PAUSE_SECONDS = 1e-4


class Request:
    """One exchange in flight."""

    __slots__ = ("_ended", "error", "move")

    def __init__(self, move: Callable[[], None]):
        self.move = move
        self.error: BaseException | None = None
        self._ended = threading.Event()

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._ended.is_set()

    def end(self, error: BaseException | None) -> None:
        """Say that it has ended, and its error."""
        self.error = error
        self._ended.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended; False if that takes longer."""
        return self._ended.wait(seconds)


class CalledOffError(SpmdError):
    """The error of a transfer that was cancelled because its program failed."""


class ProgressThread:
    """The thread that makes exchanges, started with the first of them."""

    def __init__(self) -> None:
        self._worker = Worker("spmd progress", daemon=True)
        self._forget()
        after_fork_in_child(self._forget)

    def _forget(self) -> None:
        """Begin anew: in a forked child nothing is in flight."""
        self._lock = threading.Lock()
        self._newest: Request | None = None
        self._error: BaseException | None = None
        self._called_off = False
        self._awaited = 0
        self._looks: list[Callable[[], bool]] = []

    @property
    def is_here(self) -> bool:
        """Whether this is the progress thread."""
        thread = self._worker.thread
        return thread is not None and thread.ident == threading.get_ident()

    def send(self, move: Callable[[], None]) -> Request:
        """Let the thread call `move` when it has made the transfers before."""
        transfer = Request(move)
        with self._lock:
            if not self._worker.submit(lambda: self._make(transfer)):
                self._make(transfer)  # without a thread nothing else is in flight
            self._newest = transfer
        return transfer

    def _make(self, transfer: Request) -> None:
        # After an error the ranks are no longer in step: later transfers are not begun.
        error = self._error
        if error is None:
            try:
                transfer.move()
            except BaseException as raised:
                error = self._error = raised
        transfer.end(error)

    def give_up(self, transfer: Request) -> None:
        """Leave a transfer that does not end to its thread, and go on with another thread."""
        with self._lock:
            self._worker = Worker("spmd progress", daemon=True)
            if self._looks:
                self._worker.submit(self._look_again)
        transfer.end(CalledOffError("an exchange was given up"))

    # ---- looking after exchanges that others make ----------------------------------------------

    def watch(self, look: Callable[[], bool]) -> None:
        """Call `look` now and then, between exchanges and within them, until it gives False."""
        with self._lock:
            if look in self._looks:
                return
            self._looks.append(look)
            if len(self._looks) == 1:
                self._worker.submit(self._look_again)

    def _look_again(self) -> None:
        self._look()
        time.sleep(PAUSE_SECONDS)
        with self._lock:
            if self._looks:
                self._worker.submit(self._look_again)

    def _look(self) -> None:
        for look in list(self._looks):
            if not look():
                with self._lock:
                    # It may have got something to look after meanwhile.
                    if not look():
                        self._looks.remove(look)

    def await_(self, transfer: Request, seconds: float | None = None) -> bool:
        """Wait for a transfer, which may take the waiter's core; False if it takes longer."""
        with self._lock:
            self._awaited += 1
        try:
            return transfer.wait(seconds)
        finally:
            with self._lock:
                self._awaited -= 1

    def pause(self) -> None:
        """Sleep between two polls, in the progress thread, so that other threads compute."""
        if self._awaited:
            os.sched_yield()
        else:
            time.sleep(PAUSE_SECONDS)

    def drain(self) -> None:
        """Return when nothing is in flight; at once in the progress thread itself."""
        newest = self._newest
        if newest is not None and not newest.has_ended and not self.is_here:
            self.await_(newest)

    def settle(self) -> None:
        """After a failure: return when no thread touches the memory of the program any more."""
        newest = self._newest
        if newest is None or self.is_here:
            return
        if not self.await_(newest, GRACE_SECONDS):
            self._called_off = True
            self.await_(newest)
        self._called_off = False
        self._error = None

    def check(self) -> None:
        """Poll watchers, in the progress thread, and raise if the exchange was cancelled."""
        if not self.is_here:
            return
        self._look()
        if self._called_off:
            raise CalledOffError("an exchange in flight was called off: its program has failed")


PROGRESS = ProgressThread()
