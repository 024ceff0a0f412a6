"""Keeps the records that the flight recorder would overwrite, all of this rank, for timelines.

A thread copies finished records from the ring to `rank-N.trace` a few dozen times a second, so
recording costs the program nothing more, and a rank that is killed loses the last moments only.
`launch/flight/timeline.py` merges the files of all ranks.

    | page of the rank (4096 B) | labels: 512 KiB of JSON lines | records of 64 B, as they end |
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np

from spmd.base.background import start_thread
from spmd.base.config import config
from spmd.transport import flight_recorder as flight
from spmd.transport.flight_recorder import FLIGHT, RECORDS

# Words of the page that only a trace has: records that were overwritten before they were copied,
# and whether the rank has written all.
LOST, FINISHED = 12, 13
RECORDS_AT = flight.PAGE + flight.LABEL_TABLE_BYTES

PAUSE_SECONDS = 0.02
BUSY_PAUSE_SECONDS = 0.001
# For the other ranks to finish their files, when the job ends in good order.
SECONDS_FOR_OTHERS = 5.0
MERGE_SECONDS = 120.0


class Tracer:
    """Copies the records of this process to a file until it is finished."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rank, self.size = (
            FLIGHT.words[flight.RANK],
            FLIGHT.words[flight.SIZE],
        )
        self._remove_what_a_former_job_left()
        self.path = self.folder / f"rank-{self.rank}.trace"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._process = os.getpid()
        self._ring = np.frombuffer(FLIGHT.bytes[flight.RING : flight.LABELS], np.int64)
        self._ring = self._ring.reshape(RECORDS, flight.RECORD_WORDS)
        self._next = FLIGHT.words[flight.COUNT]
        self._unfinished = np.zeros(0, np.int64)
        self._lost = 0
        self._labels = -1
        self._at = RECORDS_AT
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._write_page(finished=False)
        # Without a thread the file gets the ring's last records, and the number of lost ones.
        self._thread = start_thread(self._run, "spmd trace", daemon=True)

    def _remove_what_a_former_job_left(self) -> None:
        if self.rank == 0:
            (self.folder / "trace.json").unlink(missing_ok=True)
            for path in self.folder.glob("rank-*.trace"):
                number = path.stem.removeprefix("rank-")
                if number.isdigit() and int(number) >= self.size:
                    path.unlink(missing_ok=True)

    def _run(self) -> None:
        pause = PAUSE_SECONDS
        while not self._stop.wait(pause):
            pause = BUSY_PAUSE_SECONDS if self.drain() > RECORDS // 8 else PAUSE_SECONDS

    def drain(self) -> int:
        """Copy records that have ended since the last time; gives the number of those looked at."""
        with self._lock:
            count = FLIGHT.words[flight.COUNT]
            fresh = np.arange(max(self._next, count + 1 - RECORDS), count)
            numbers = np.concatenate([self._unfinished, fresh])
            rows = self._ring[numbers % RECORDS]
            # A record that was replaced during the copy is invalid.
            oldest = FLIGHT.words[flight.COUNT] + 1 - RECORDS
            whole = (rows[:, flight.SEQUENCE] == numbers + 1) & (numbers >= oldest)
            done = whole & (rows[:, flight.COMPLETED] != 0)
            self._lost += int(count - self._next - len(fresh) + np.count_nonzero(~whole))
            self._append(rows[done])
            self._unfinished = numbers[whole & ~done]
            self._next = count
            if self._labels != FLIGHT.words[flight.LABEL_BYTES]:
                self._write_page(finished=False)
            return len(numbers)

    def _append(self, rows: np.ndarray) -> None:
        if len(rows):
            self._at += os.pwrite(self._fd, rows.tobytes(), self._at)

    def _write_page(self, finished: bool) -> None:
        used = FLIGHT.words[flight.LABEL_BYTES]
        page = bytearray(FLIGHT.bytes[: flight.PAGE])
        words = memoryview(page).cast("q")
        words[LOST], words[FINISHED] = self._lost, int(finished)
        labels = bytes(FLIGHT.bytes[flight.LABELS : flight.LABELS + used])
        os.pwrite(self._fd, labels, flight.PAGE)
        os.pwrite(self._fd, page, 0)  # last: it says how many bytes of labels there are
        self._labels = used

    def finish(self) -> None:
        """Write the remaining records, also unended ones, and close the file."""
        if os.getpid() != self._process or self._stop.is_set():
            return
        self._stop.set()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(5.0)
        self.drain()
        self._append(self._ring[self._unfinished % RECORDS])
        self._write_page(finished=True)
        os.close(self._fd)

    def merge(self) -> None:
        """On rank 0, once all ranks have finished: write `trace.json`, in a process of its own."""
        import subprocess  # not every start of a program needs it

        command = _merger()
        if self.rank or command is None:
            return
        deadline = time.monotonic() + SECONDS_FOR_OTHERS
        while not all(map(self._is_finished, range(self.size))) and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            subprocess.run([*command, str(self.folder)], timeout=MERGE_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            sys.stderr.write(f"spmd: the traces in {self.folder} were not merged: {error}\n")

    def _is_finished(self, rank: int) -> bool:
        try:
            with open(self.folder / f"rank-{rank}.trace", "rb") as file:
                words = np.frombuffer(file.read(8 * (FINISHED + 1)), np.int64)
        except OSError:
            return False
        return len(words) > FINISHED and bool(words[FINISHED])


def _merger() -> list[str] | None:
    """How to merge traces: the launcher's program, installed or beside this package."""
    import importlib.util

    beside = Path(__file__).resolve().parents[2] / "launch"
    found = None if beside.is_dir() else importlib.util.find_spec("spmd_launch")
    if found is not None and found.origin:
        beside = Path(found.origin).parent
    program = beside / "merge.py"
    return [sys.executable, "-I", "-S", str(program)] if program.exists() else None


class _CurrentTrace:
    """The one trace of this process."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None


_current = _CurrentTrace()


def start(folder: str | Path) -> Tracer:
    """Begin to keep all records of this process, in `folder`."""
    stop()
    _current.tracer = Tracer(folder)
    FLIGHT.keeps_programs = True
    config.update("trace", str(folder))  # calls that were made ready before know of no records
    return _current.tracer


def stop() -> Tracer | None:
    """Write the remaining records; gives the trace that was under way."""
    tracer, _current.tracer = _current.tracer, None
    if tracer is not None:
        FLIGHT.keeps_programs = False
        config.update("trace", "")
        tracer.finish()
    return tracer


def finish(failed: bool) -> None:
    """At the end of the process: after a good one rank 0 merges the files of all."""
    tracer = stop()
    if tracer is not None and not failed:
        tracer.merge()


def start_with_the_job(folder: str) -> None:
    """Begin when this rank joins its job, and end with the process, however it ends."""
    start(folder)
    FLIGHT.at_end.append(finish)
    if FLIGHT.words[flight.SIZE] == 1:
        atexit.register(finish, False)
