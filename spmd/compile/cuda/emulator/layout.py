"""The words through which a launch, its threads and the checks speak: one table of offsets.

A launch fills an array of 8-byte words, its *environment*, which native code reads. The addresses
that kernels see are those of the device; `delta` leads from them to the host's memory.
"""

from __future__ import annotations

from typing import Literal

Mode = Literal["plain", "checked", "counted"]
MODES: tuple[Mode, ...] = ("plain", "checked", "counted")

WORDS = (
    "grid",
    "block_x",
    "block_y",
    "shared_bytes",
    "block",  # the number of the block that runs: the kth is k * block_step + block_first,
    "block_step",  # modulo the grid
    "block_first",
    "arguments",  # host addresses: of the arguments,
    "shared",  # the shared memory,
    "nowhere",  # and what refused accesses touch instead of their target
    "delta",  # host addresses minus device addresses
    "base",  # the device's memory: first address
    "extent",  # and bytes
    "granules",  # for each 16 bytes of it, how many of them are allocated
    "tables_begin",  # the device addresses of a function's own constants
    "tables_end",
    "report",  # REPORT words
    "epoch",  # barriers so far
    "warp_epochs",  # for each warp: __syncwarp()s so far
    "touched",  # for each shared byte: who wrote it and who read it (checks.py)
    "states",  # for each thread: a byte (coroutines.py)
    "masks",  # for each thread: the lanes it waits for
    "places",  # for each thread: where it waits
    "given",  # for each thread: LANE_WORDS numbers of 4 bytes for its warp
    "taken",  # the same, as they were when the warp met
    "handles",  # for each thread: its coroutine
    "copies",  # for each thread: a queue of cp.async copies (late_copies.py)
    "block_epoch",  # the epoch in which the present block began
    "seed",  # of the errors of approximate instructions
    "trace",  # counted accesses: how many words of the trace are used, how many there are, then
    # four for each access: its number in the function, the address, the thread, the block
    "accessed",  # for each 16 bytes of the device, 1 if they were read, 2 if written (races.py)
)
INDEX = {name: k for k, name in enumerate(WORDS)}

# The fields of a report. The first mistake of a launch is kept.
REPORT = ("kind", "address", "nbytes", "thread", "block", "place", "other", "other_place")

# Kinds of reports. `other` is the thread that it races with, which was at `other_place`.
NONE, READ_OUTSIDE, WRITE_OUTSIDE, MISALIGNED, SHARED_OUTSIDE, RACE, LANE_MISSING = range(7)
THREAD_ENDED, MASKS_DIFFER, TRAP, UNDER_WAY = range(7, 11)

WARP = 32
LANE_WORDS = 8
# Copies in the queue of a thread, the words of each, and the bytes of a queue with its head.
COPY_SLOTS, COPY_WORDS = 64, 6
QUEUE_BYTES = 32 + 8 * COPY_SLOTS * COPY_WORDS
MOST_THREADS = 1024
# The most shared memory that a block of any GPU so far can have.
MOST_SHARED = 228 * 1024
GRANULE = 16
TRACE_WORDS = 4

# A place is a line of the text of one function, and above these bits the line of the call where the
# first is inside of a function that was inlined.
PLACE_BITS = 32


def place(line: int, called_at: int) -> int:
    """Two lines as one number."""
    return line | called_at << PLACE_BITS


def native_symbol(symbol: str, mode: Mode) -> str:
    """The name of the native function that runs a launch of a kernel."""
    return f"emulated_{mode}_{symbol}"
