"""What native code must know of a group of ranks: a few words that it and Python share.

A compiled program meets the other ranks without Python. It finds the pages and slots through these
words, and keeps the counters here that `ShmCommunicator` goes on from. Where all is well nothing
else is needed; where a rank has waited for long, or finds that calls differ, native code calls
`trouble`, and Python raises what it would have raised itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from spmd.collectives.transport.shm_pages import Pages
from spmd.collectives.transport.shm_wait import Patience

# The words. STEP is the step met last, SEQUENCE the number of the last call (-1: none yet).
PAGES, SLOTS, SLOT_BYTES, RANK, SIZE, STEP, SEQUENCE, PAUSES, YIELDS, TROUBLE = range(10)
WORDS = 16

# What native code says when it calls `trouble(what, digest of the call)`; 0 lets it go on waiting.
WAITING, DIFFERENT = 0, 1

_TROUBLE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class Road:
    """The words of one group, and the way back from native code into Python."""

    def __init__(self, pages: Pages, patience: Patience, trouble: Callable[[int, int], None]):
        memory = bytearray(8 * WORDS)
        self.words = memoryview(memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._trouble = trouble
        self._raised: BaseException | None = None
        self._native = _TROUBLE(self._call)
        words = self.words
        words[PAGES], words[SLOTS] = pages.address, pages.slots_address
        words[SLOT_BYTES] = pages.slot_bytes
        words[RANK], words[SIZE] = pages.rank, pages.size
        words[SEQUENCE] = -1
        words[PAUSES], words[YIELDS] = patience.pauses, patience.yields
        words[TROUBLE] = ctypes.cast(self._native, ctypes.c_void_p).value or 0

    def take(self) -> BaseException:
        """What made native code stop."""
        raised, self._raised = self._raised, None
        assert raised is not None
        return raised

    def _call(self, what: int, digest: int) -> int:
        try:
            self._trouble(what, digest)
        except BaseException as error:  # it cannot pass through native code
            self._raised = error
            return 1
        return 0
