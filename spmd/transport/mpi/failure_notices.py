"""Notices from a rank that fails or leaves to ranks on other hosts that wait for it.

Notices are single messages on a communicator of their own, so they never meet data. A waiting rank
looks for them now and then. Nothing here imports mpi4py; `communicator` hands its module over.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from spmd.transport.call_signature import ranks_text

NOTICE_BYTES = 1024
_FAILED, _LEFT, _HELD, _RELEASED = 1, 2, 3, 4
# Seconds at exit to receive the other ranks' exit notices: some MPIs complain about messages that
# are never received. MPI_Finalize waits for the other ranks anyway.
EXIT_SECONDS = 5.0


class Notices:
    """Sends this rank's notices to all, and keeps those of others."""

    def __init__(self, mpi: Any, comm: Any):
        self._mpi = mpi
        self._comm = comm
        self._sent: list[tuple[np.ndarray, Any]] = []
        self.failure: str | None = None
        self.left: dict[int, str] = {}
        self.held: set[int] = set()  # ranks that are held in a debugger
        self._ended = False
        self._looking = threading.Lock()

    def send_failure(self, text: str) -> None:
        """Tell every rank that this one failed."""
        if self._ended:
            return  # another group of this process has said so
        self._ended = True
        self._send(_FAILED, text)

    def send_exit(self, text: str, wait: bool) -> None:
        """Tell every rank that this one makes no more calls; `wait` for the same of the others."""
        if self._ended:
            return
        self._ended = True
        self._send(_LEFT, text)
        deadline = time.monotonic() + EXIT_SECONDS
        others = self._comm.Get_size() - 1
        while (
            wait
            and self.failure is None
            and len(self.left) < others
            and time.monotonic() < deadline
        ):
            self.look()
            time.sleep(0.001)

    def send_held(self, held: bool) -> None:
        """Tell every rank that this one is held in a debugger, or no longer."""
        self._send(_HELD if held else _RELEASED, "")

    def look(self) -> None:
        """Take in the notices that have arrived, and MPI's own reports of ranks that died."""
        if not self._looking.acquire(blocking=False):
            return  # another thread does
        try:
            self._receive()
        except self._mpi.Exception as error:
            if not is_death(self._mpi, error, self._comm):
                raise
            self.failure = self.failure or dead_text(self._mpi, self._comm)
        finally:
            self._looking.release()

    def _receive(self) -> None:
        status = self._mpi.Status()
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
            source, kind = status.Get_source(), status.Get_tag()
            notice = np.zeros(NOTICE_BYTES, np.uint8)
            self._comm.Recv([notice, self._mpi.BYTE], source, kind)
            text = notice.tobytes().split(b"\0", 1)[0].decode(errors="replace")
            if kind == _FAILED:
                self.failure = self.failure or text
            elif kind == _HELD:
                self.held.add(source)
            elif kind == _RELEASED:
                self.held.discard(source)
            else:
                self.left[source] = text

    def _send(self, kind: int, text: str) -> None:
        notice = np.zeros(NOTICE_BYTES, np.uint8)
        encoded = text.encode()[: NOTICE_BYTES - 1]
        notice[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        for rank in range(self._comm.Get_size()):
            if rank != self._comm.Get_rank():
                try:
                    request = self._comm.Isend([notice, self._mpi.BYTE], rank, kind)
                except self._mpi.Exception as error:
                    if not is_death(self._mpi, error, self._comm):
                        raise
                    continue  # one that died needs no notice
                self._sent.append((notice, request))


def is_death(mpi: Any, error: Any, comm: Any) -> bool:
    """Whether an MPI error reports the death of a rank, seen by this rank or by another one."""
    kind = error.Get_error_class()
    if kind == mpi.ERR_IN_STATUS:  # of several requests: which, and why, is in none of them
        return bool(comm.Is_revoked() or dead_ranks(mpi, comm))
    names = "ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED"
    return kind in [getattr(mpi, name) for name in names if hasattr(mpi, name)]


def dead_ranks(mpi: Any, comm: Any) -> list[int]:
    """The ranks of a communicator of which MPI knows that they died."""
    failed = comm.Get_failed()
    return sorted(failed.Translate_ranks(list(range(failed.Get_size())), comm.Get_group()))


def dead_text(mpi: Any, comm: Any) -> str:
    """The ranks that died, as the beginning of a sentence."""
    dead = dead_ranks(mpi, comm)
    if not dead:
        return "a rank ended without a word"
    return f"{ranks_text(dead)} ended without a word (killed, or out of memory)"
