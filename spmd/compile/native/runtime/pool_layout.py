"""The memory of the worker pool in words.

The native code that reads and writes them (`ir/thread_pool.py`, `ir/thread_affinity.py`) is written
once a machine; this file is needed in every process.
"""

from __future__ import annotations

# The cores that a thread may use, as the system writes them: a bit each.
MASK_BYTES = 128

# More workers are left alone: one that comes late is a small loss then, since the others do its
# part, and a system call for each of them a large one.
MOST_PLACED = 8

# Byte offsets in @spmd_pool. Words that are written while others spin have a cache line each.
EPOCH = 0  # i64: number of the present job
GATE = 64  # i64: OPEN + workers inside
ALONE = 128  # i64: when a job was last done without waking anybody
SLEEPERS = 192  # i64: workers parked or about to park
CALLER_PARKED = 256  # i64: the caller waits for the workers inside
BUSY = 320  # i64: a caller has a job
STOPPING = 328  # i64
WORKERS = 336  # i64: workers wanted
STARTED = 344  # i64: workers running
BODY, CONTEXT, UNITS, CHUNK, CHUNKS, PARTS, BACKWARDS = range(384, 440, 8)
MUTEX, WORK, DONE = 448, 576, 704  # pthread_mutex_t and two pthread_cond_t
SIGNALS = 832  # sigset_t, twice
THREADS = 1152  # pthread_t of each worker
MOST_WORKERS = 255
CORES = THREADS + 8 * (MOST_WORKERS + 1)  # those that workers may use; see `ir/thread_affinity.py`
AVOIDED = CORES + MASK_BYTES  # of each worker that is placed
TICKETS = AVOIDED + 8 * MOST_PLACED  # of each part: i64, chunks that are taken
TICKET_BYTES = 64
LINES = TICKETS + TICKET_BYTES * (MOST_WORKERS + 1)  # of the caller and of each worker
# The words in a thread's line that others read: whether it has work, and until when it sleeps
# instead of waiting awake, two words (see `ir/wait.py`).
LINE_BYTES = 64
INSIDE, CONTENDED = 0, 8
POOL_BYTES = LINES + LINE_BYTES * (MOST_WORKERS + 1)
