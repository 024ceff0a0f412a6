"""How a rank ends, so that the others never wait for it.

A rank that raises prints its traceback, tells the ranks that wait for it, gives them a moment to
raise `PeerError` and to run their own clean-up, and then ends the whole job through MPI. A rank
that leaves in good order says so too: one that still waits for it then knows that it does so in
vain.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import opcode
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from spmd.base.errors import PeerError
from spmd.base.record import record
from spmd.base.source import is_ours
from spmd.base.traceback_filter import simplify_at_exit
from spmd.transport.checked import OPEN_GROUPS, CheckedCommunicator
from spmd.transport.failure_message import (
    REPORT_FILE,
    failure_text,
    first_error,
    is_supervised,
    user_line,
)
from spmd.transport.flight_recorder import FLIGHT, LEFT, RAISED

# Seconds for ranks in a wait to raise and report: they look every 50 ms at the latest.
MOMENT_FOR_PEERS = 1.0
# A rank stopped by another's failure gives that rank so long to end the job.
MOMENT_FOR_CAUSE = 2.0
# On a machine with more running programs than cores, a wake-up has taken more than a second.
PATIENCE_UNDER_LOAD = 3
INTERRUPTED = 130


def _longer_under_load(seconds: float) -> float:
    """A wait for other ranks, longer on an overloaded machine; spmdrun scales its own waits."""
    is_crowded = os.getloadavg()[0] > (os.cpu_count() or 1)
    return seconds * PATIENCE_UNDER_LOAD if is_crowded and not is_supervised() else seconds


class ExitHooks:
    """Watches the ways out of this process on behalf of its rank."""

    def __init__(self, comm: CheckedCommunicator, end_job: Callable[[int], None]):
        self._rank = comm.rank
        self._comm = comm
        self._end_job = end_job
        self._process = os.getpid()
        self._exit: NotedExit | None = None
        self._handling = threading.Lock()

    def install(self) -> None:
        """Take over the hooks of `sys`, `threading` and `atexit`."""
        self._previous = sys.excepthook
        self._previous_thread = threading.excepthook
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        # Python shows the code of SystemExit to no hook, so it is noted where it is raised.
        sys.exit = self._on_sys_exit
        atexit.register(self._on_exit)

    def follow(self, comm: CheckedCommunicator) -> None:
        """Speak for another communicator from now on: that of the ranks which are left."""
        self._rank, self._comm = comm.rank, comm

    # ---- exceptions ----------------------------------------------------------------------------

    def _on_exception(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._process:  # a forked child is no rank
            self._previous(kind, error, trace)
            return
        if not self._handling.acquire(blocking=False):
            return  # another thread is ending the job already
        self._show(kind, error, trace)
        first = first_error(error)
        self._write_report(first)
        text = failure_text(self._rank, first)
        if isinstance(error, PeerError):
            FLIGHT.end(RAISED, f"stopped: {error}")
        else:
            FLIGHT.end(RAISED, text)
        if not isinstance(error, PeerError):
            for group in OPEN_GROUPS:
                group.announce_failure(text)
            time.sleep(_longer_under_load(MOMENT_FOR_PEERS))
        elif not is_supervised():
            time.sleep(_longer_under_load(MOMENT_FOR_CAUSE))
        self._end(INTERRUPTED if kind is KeyboardInterrupt else 1)

    def _end(self, code: int) -> None:
        """End this process, and the job with it."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if is_supervised():
            os._exit(code)  # spmdrun ends the others, and knows better which was first
        self._end_job(code)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is SystemExit or args.exc_value is None:
            return
        self._on_exception(args.exc_type, args.exc_value, args.exc_traceback)

    def _show(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        sys.stdout.flush()
        if isinstance(error, PeerError):
            where = user_line(error)
            text = f"stopped{' at ' + where if where else ''}: {error}\n"
        elif getattr(self._previous, "follows", self._previous) is not sys.__excepthook__:
            self._previous(kind, error, trace)  # a debugger's or a prettier one
            return
        else:
            simplify_at_exit(error)
            text = "".join(traceback.format_exception(kind, error, error.__traceback__ or trace))
        if not is_supervised():
            mark = f"spmd rank {self._rank} | "
            text = "".join(mark + line for line in text.splitlines(keepends=True))
        sys.stderr.write(text)  # at once, so that other ranks' lines stay outside
        sys.stderr.flush()

    def _write_report(self, error: BaseException) -> None:
        path = os.environ.get(REPORT_FILE)
        if not path:
            return
        report = {
            "rank": self._rank,
            "time": time.time(),
            "secondary": isinstance(error, PeerError),
            "exception": type(error).__name__,
            "message": str(error),
            "line": user_line(error),
            "traceback": _traceback(error),
        }
        text = json.dumps(report)
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(text)  # the traceback is on stderr already

    # ---- leaving -------------------------------------------------------------------------------

    def _on_sys_exit(self, status: Any = None, /) -> None:
        if threading.current_thread() is threading.main_thread():
            self._exit = NotedExit.here(status)
        raise SystemExit(status)

    def _on_exit(self) -> None:
        if os.getpid() != self._process or self._handling.locked():
            return
        code = self._exit.code if self._exit and self._exit.was_uncaught() else 0
        FLIGHT.end(LEFT, f"left the program (exit code {code})")
        for group in OPEN_GROUPS:
            group.announce_exit(code)
        if code and not self._all_ranks_left():
            # MPI_Finalize would wait for the others, and they may be waiting for us.
            self._end(code)

    def _all_ranks_left(self) -> bool:
        deadline = time.monotonic() + _longer_under_load(MOMENT_FOR_PEERS)
        while not self._comm.all_ranks_left():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def _traceback(error: BaseException) -> str:
    """The whole traceback; of a `PeerError`, where this rank waited, without how it waits."""
    if not isinstance(error, PeerError):
        return "".join(traceback.format_exception(error))
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not is_ours(frame.filename)]
    last = "".join(traceback.format_exception_only(error))
    return "Traceback (most recent call last):\n" + "".join(traceback.format_list(theirs)) + last


@record
class NotedExit:
    """A call of `sys.exit`: its code, and the outermost frame of the program that made it."""

    code: int
    outermost: FrameType

    @staticmethod
    def here(status: Any) -> NotedExit:
        """Note an exit that the caller's caller asks for."""
        frame = sys._getframe(2)
        while frame.f_back is not None:
            frame = frame.f_back
        return NotedExit(_exit_code(status), frame)

    def was_uncaught(self) -> bool:
        """Whether the exception left the program, now that the program has ended.

        A program that caught it came to its end, so its outermost frame returned; one that it left
        stands where it raised, or where a `finally` raised it again.
        """
        code = self.outermost.f_code.co_code
        return not opcode.opname[code[self.outermost.f_lasti]].startswith("RETURN")


def _exit_code(status: Any) -> int:
    """The process's exit code, as Python derives it from the argument of `sys.exit`."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1
