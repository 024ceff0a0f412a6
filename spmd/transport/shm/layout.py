"""The layout of the shared segment: a page a rank that says where it is, then two slots a rank.

    | control page | page of rank 0 | page of rank 1 | ... | slot 0 even | slot 0 odd | slot 1 ...

A rank writes only its own page and slots. Its `arrived` word counts *steps*: it goes up when the
rank has put its data for the step into its slot. A step's data goes to the slot of the step's
parity, and a rank leaves a step only when all have arrived in it, so a slot is written again only
two steps later, when all ranks have certainly read it: one meeting a step is enough.

The rest of the page is readable by the others, and by a supervisor, without the rank's help: the
call it entered, how many it completed, whether it failed and its message.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import numpy as np

from spmd.transport.call_signature import CALL_BYTES, Call, call_text
from spmd.transport.shm.wait import fence, wake

PAGE = 4096
_WORD = 8

# Words of a rank's page. `ARRIVED` has its own cache line: the others poll it.
ARRIVED = 0
WAITED_FOR = 8
STATE = 16
EXIT_CODE = 17
PROCESS = 18
CORE = 20  # 1 + the core that native code last ran on, 0 where that is not known
HELD = 19  # 1 while this rank is held in a debugger
ENTERED = 24
DIGEST = 25  # and 26: of the last two calls
SHOWN = 32  # and following: addresses in this rank's process that the others may read from
MOST_SHOWN = 64
# Bytes of a rank's page.
CALLS = 1024
_TEXT = 2048
_TEXT_BYTES = PAGE - _TEXT

# The one word of the control page: 1 + the rank that failed first, 0 while none has.
FAILED = 0

RUNNING, RAISED, LEFT = 0, 1, 2

SLOT_BYTES = 1 << 20
LEAST_SLOT_BYTES = 64 << 10
# All slots of a group together: a container's default /dev/shm (64 MiB) can hold them.
BUDGET_BYTES = 48 << 20


def slot_bytes(size: int) -> int:
    """The size of one slot in a group of `size` ranks: a multiple of the page."""
    share = BUDGET_BYTES // (2 * size) // PAGE * PAGE
    return max(LEAST_SLOT_BYTES, min(SLOT_BYTES, share))


def segment_bytes(size: int) -> int:
    """The size of the whole segment."""
    return PAGE * (1 + size) + 2 * size * slot_bytes(size)


class ControlBlocks:
    """One process's view of the pages and slots of its group."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int):
        self.rank = rank
        self.size = size
        self.bytes = memoryview(memory)
        self.words = self.bytes[: PAGE * (1 + size)].cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.arrived = [self.word(r, ARRIVED) for r in range(size)]
        self._own_arrived = self.arrived[rank]
        self._own_waited_for = self.word(rank, WAITED_FOR)
        # digests[parity][rank]: where the ranks say which call they are in
        self.digests = [[self.word(r, DIGEST + odd) for r in range(size)] for odd in (0, 1)]
        start = PAGE * (1 + size)
        self.slot_bytes = width = slot_bytes(size)
        self.slots_address = self.address + start
        whole = np.frombuffer(memory, np.uint8)
        # slots[parity][rank]
        self.slots = [
            [whole[at : at + width] for at in range(start + odd * width, whole.size, 2 * width)]
            for odd in (0, 1)
        ]
        self.words[self.word(rank, PROCESS)] = os.getpid()
        # told[parity]: the call that this rank's page describes, if Python wrote it
        self._told: list[Call | None] = [None, None]

    def word(self, rank: int, which: int) -> int:
        """The index in `words` of one word of a rank's page."""
        return (PAGE * (1 + rank)) // _WORD + which

    # ---- arriving ------------------------------------------------------------------------------

    def post(self, step: int) -> None:
        """Make this rank's data of `step` visible, and wake the ranks that wait for it."""
        fence()
        words = self.words
        words[self._own_arrived] = step
        fence()  # the count must be out before we look whether someone went to sleep over it
        if words[self._own_waited_for]:
            words[self._own_waited_for] = 0
            wake(self.address_of(self.rank))

    def address_of(self, rank: int) -> int:
        """The address of a rank's `arrived` word in this process's memory."""
        return self.address + _WORD * self.arrived[rank]

    def missing(self, step: int) -> list[int]:
        """The ranks that have not arrived in `step`."""
        return [r for r, word in enumerate(self.arrived) if self.words[word] < step]

    # ---- calls ---------------------------------------------------------------------------------

    def enter(self, sequence: int, call: Call) -> None:
        """Show the call this rank enters, its `sequence`-th."""
        odd = sequence & 1
        shown = self.digests[odd][self.rank]
        # Most programs repeat few calls. Calls of one digest may come from different lines.
        if self.words[shown] != call.digest or self._told[odd] is not call:
            self._told[odd] = call
            at = self._call_at(self.rank, sequence)
            self.bytes[at : at + CALL_BYTES] = call.packed
            self.words[shown] = call.digest
        self.words[self.word(self.rank, ENTERED)] = sequence + 1

    def agree(self, sequence: int, call: Call) -> bool:
        """Whether every rank has entered the same `sequence`-th call."""
        words = self.words
        return all([words[at] == call.digest for at in self.digests[sequence & 1]])

    def call(self, rank: int, sequence: int) -> bytes:
        """The packed call of a rank."""
        at = self._call_at(rank, sequence)
        return bytes(self.bytes[at : at + CALL_BYTES])

    # ---- reading from each other -----------------------------------------------------------------

    def show(self, addresses: Sequence[int]) -> None:
        """Say where in this process the others may read, until all have met again."""
        first = self.word(self.rank, SHOWN)
        for k, address in enumerate(addresses):
            self.words[first + k] = address

    def shown(self, rank: int, number: int) -> int:
        """An address that a rank showed."""
        return self.words[self.word(rank, SHOWN) + number]

    def _call_at(self, rank: int, sequence: int) -> int:
        return PAGE * (1 + rank) + CALLS + CALL_BYTES * (sequence & 1)

    def whereabouts(self, rank: int) -> str:
        """A rank's last action, in words."""
        entered = self.words[self.word(rank, ENTERED)]
        if not entered:
            return "it has entered no collective of this group"
        return f"its last was {call_text(self.call(rank, entered - 1))} (#{entered - 1})"

    # ---- failure -------------------------------------------------------------------------------

    def set_text(self, state: int, text: str, code: int = 1) -> None:
        """Say how this rank ended."""
        encoded = text.encode()[: _TEXT_BYTES - 1]
        at = PAGE * (1 + self.rank) + _TEXT
        self.bytes[at : at + len(encoded) + 1] = encoded + b"\0"
        self.words[self.word(self.rank, EXIT_CODE)] = code
        fence()
        self.words[self.word(self.rank, STATE)] = state
        if state == RAISED and not self.words[FAILED]:
            self.words[FAILED] = self.rank + 1
        wake(self.address_of(self.rank))

    def text(self, rank: int) -> str:
        """How a rank said that it ended."""
        at = PAGE * (1 + rank) + _TEXT
        return bytes(self.bytes[at : at + _TEXT_BYTES]).split(b"\0", 1)[0].decode(errors="replace")

    def state(self, rank: int) -> int:
        """Whether a rank runs, raised or left."""
        return self.words[self.word(rank, STATE)]

    def set_held(self, held: bool) -> None:
        """Say whether this rank is held in a debugger."""
        self.words[self.word(self.rank, HELD)] = int(held)

    def is_held(self, rank: int) -> bool:
        """Whether a rank is held in a debugger."""
        return bool(self.words[self.word(rank, HELD)])

    def process(self, rank: int) -> int:
        """A rank's process id."""
        return self.words[self.word(rank, PROCESS)]


def is_alive(pid: int) -> bool:
    """Whether a process of this host still runs; a dead one waiting for its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # The state follows the name, which is in parentheses and may hold anything.
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return os.path.exists(f"/proc/{pid}") or not os.path.exists("/proc/self")
