"""Native code's state of a group of ranks: a few words that it and Python share.

A compiled program meets the other ranks without Python. It finds the pages and slots through these
words, and keeps the counters here that `ShmCommunicator` goes on from. A call that succeeds needs
nothing else. If a rank has waited for long, or finds that calls differ, native code calls
`trouble`, and Python raises its own error for that.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Generator

from spmd.transport.flight_recorder import FLIGHT, GroupLog
from spmd.transport.shm.layout import ControlBlocks
from spmd.transport.shm.wait import Patience

# The words. STEP is the step met last, SEQUENCE the number of the last call (-1: none yet).
PAGES, SLOTS, SLOT_BYTES, RANK, SIZE, STEP, SEQUENCE, PAUSES, YIELDS, TROUBLE = range(10)
# The flight record (0: none is written), the group's number there, where its calls are counted.
RECORD, GROUP, CALLS = range(10, 13)
DIGEST = 13  # of the call that there is trouble with
UNREAD = 14  # the rank whose memory could not be read
WORDS = 16

# The reasons for which native code calls `trouble(what)`; it waits on if the answer is 0.
WAITING, DIFFERENT, UNREADABLE = range(3)

_TROUBLE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


class NativeState:
    """The words of one group, and the way back from native code into Python."""

    def __init__(
        self, pages: ControlBlocks, patience: Patience, trouble: Callable[[int, int], None]
    ):
        memory = bytearray(8 * WORDS)
        self.words = memoryview(memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._trouble = trouble
        self._log: GroupLog | None = None
        self._raised: BaseException | None = None
        answers = self._answers()
        next(answers)
        self._native = _TROUBLE(answers.send)
        words = self.words
        words[PAGES], words[SLOTS] = pages.address, pages.slots_address
        words[SLOT_BYTES] = pages.slot_bytes
        words[RANK], words[SIZE] = pages.rank, pages.size
        words[SEQUENCE] = -1
        words[PAUSES], words[YIELDS] = patience.pauses, patience.yields
        words[TROUBLE] = ctypes.cast(self._native, ctypes.c_void_p).value or 0

    def record(self, log: GroupLog | None) -> None:
        """Let native code write to the flight record, for the group that a log is of."""
        if log is not None:
            self._log = log  # its memory is written to
            self.words[GROUP], self.words[CALLS] = log.group, log.calls_address
            self.words[RECORD] = FLIGHT.address

    def detach(self, trouble: Callable[[int, int], None]) -> None:
        """Let native code meet no other rank, on pages of its own, and ask `trouble` about it."""
        words = self.words
        start = words[SLOTS] - words[PAGES]
        self._own = mmap.mmap(-1, start + 2 * words[SIZE] * words[SLOT_BYTES])
        words[PAGES] = ctypes.addressof(ctypes.c_char.from_buffer(self._own))
        words[SLOTS] = words[PAGES] + start
        words[RECORD] = 0
        self._trouble = trouble

    def take(self) -> BaseException:
        """The exception that made native code stop."""
        raised, self._raised = self._raised, None
        assert raised is not None
        return raised

    def _answers(self) -> Generator[int, int, None]:
        """The callback of native code: a generator, so that each call begins inside of the `try`.

        A signal that came while native code waited, Ctrl-C above all, is handled as soon as Python
        runs. At the begin of a function that is before its first `try`, and the exception is lost.
        """
        answer = 0
        while True:
            try:
                what = yield answer
                self._trouble(what, self.words[DIGEST])
                answer = 0
            except GeneratorExit:
                return
            except BaseException as error:  # it cannot pass through native code
                self._raised = error
                answer = 1
