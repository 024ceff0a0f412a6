"""The queue in words: the layout of its memory and of a job.

The native code that reads and writes these words (`ir/async_queue.py`) is written once a machine;
this file is needed in every process.
"""

from __future__ import annotations

# Byte offsets in @spmd_queue. Jobs are numbered from 1: those up to HEAD have begun, those up to
# TAIL were submitted, those up to DONE have ended.
HEAD, TAIL, DONE, RUNNING, STARTED, STOPPING = range(0, 48, 8)
MUTEX, WORK, FINISHED = 64, 192, 320  # pthread_mutex_t and two pthread_cond_t
SIGNALS = 448  # sigset_t, twice
THREAD = 704
RING = 768
RING_JOBS = 64
QUEUE_BYTES = RING + 8 * RING_JOBS

# i64 words of a job: its status and number (0: not submitted); header (0: it was cancelled) and
# frames of its program; its record in the flight recorder (0: none) and the number that the record
# must still have; whether its maker may wait for it at once; whether its loops are to end; how many
# jobs it needs the results of, and then the address of each.
STATUS, NUMBER, HEADER, FRAMES, RECORD, SEQUENCE, AT_ONCE, STOP, CAUSES, CAUSE = range(10)

# Statuses of a job beside those of a run: it has not ended; or it never began, because it
# was cancelled, or a job that it needs failed.
WAITING, CANCELLED = -1, 64
