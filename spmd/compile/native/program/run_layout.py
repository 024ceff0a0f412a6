"""The words that describe a program to the executor, and a run to its caller.

The native code that reads and writes these words (`native/runtime/ir/execute.py`) is written once a
machine; this file is needed in every process.
"""

from __future__ import annotations

# i64 words of the program header.
CODE, CODE_WORDS, DEVICES, BASES, LEVELS, MAX_ARGS, CALLBACK, ALL_DEVICES, RUN, FAILURE = range(10)
FLIGHT = 10  # the address of the process's flight record
HEADER_WORDS = 11

# Results of a run.
OK, RAISED, MISMATCH, TOO_MANY_TRIPS, NO_MEMORY, TROUBLE, INTERRUPTED = range(7)

# The report stands behind the frames: the id of the step that failed, then a word per device, 1
# where the device had reached it.
REPORT_STEP, REPORT_REACHED = 0, 1

# Threads share work from this much on, in picoseconds: an awake pool costs about 1 us to fork and
# join.
PARALLEL_PS = 3_000_000
# Up to here one chunk a thread, beyond it many, so that a slow thread can be helped out, and a job
# that runs backwards finds its data in the caches before it is overwritten (4 MB to 4 MB on
# two threads: 16 chunks each take 0.9 of the time of 4).
COARSE_PS = 50_000_000

# The slots in the table of the core of the Python functions by which a loop hears of signals, under
# their names, and behind them the three words of the exception that a handler raised.
PYTHON = 20
PYTHON_CALLS = ("PyGILState_Ensure", "PyGILState_Release", "PyErr_CheckSignals", "PyErr_Fetch")
RAISED_THERE = PYTHON + len(PYTHON_CALLS)

# The parts of the runtime beside its core (`native/runtime/ir/module.py`): the pool, the queue, and
# the functions that run a kind of steps.
POOL, QUEUE = "pool", "queue"
PARTS = (
    POOL,
    QUEUE,
    "callback",
    "for",
    "while",
    "cond",
    "segment",
    "parallel",
    "collective",
    "batch",
    "ranks",
    "once",
)


def setup_symbol(part: str) -> str:
    """The function that is given the table, once, before anything of a part runs."""
    return f"spmd_setup_{part}"
