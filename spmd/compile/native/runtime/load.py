"""The native runtime of this process, shared by all programs: its parts, loaded as they are needed.

The one idea: the steps of its programs decide which parts of the runtime a process needs. A
program names its parts when it is built (`ir/module.py`), so with an empty disk cache no process
waits for LLVM to compile parts that it does not use. This file loads parts, tells the pool
how many threads it may have, and keeps a forked child away from its parent's threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from spmd.base.config import config
from spmd.base.errors import ArgumentError
from spmd.base.fork import after_fork_in_child, guard
from spmd.base.record import record
from spmd.compile.lazy import runtime_ir
from spmd.compile.native.llvm.compiler import Written, available_cores, compile_written, loader
from spmd.compile.native.program.run_layout import (
    POOL,
    PYTHON,
    PYTHON_CALLS,
    QUEUE,
    RAISED_THERE,
    setup_symbol,
)
from spmd.compile.native.runtime.pool_layout import MOST_WORKERS, POOL_BYTES, WORKERS

_lock = guard("runtime")


@record
class Runtime:
    """The entry points of the core."""

    # (program header, frames) -> status; the first keeps the GIL, the second releases it.
    run_short: Callable[[int, int], int]
    run_long: Callable[[int, int], int]
    run_address: int
    table: int


@record
class PoolCalls:
    """The functions of `ir/thread_pool.py` that Python calls, and the words of the pool."""

    # (function, args, sizes, units, chunk)
    parallel_kernel: Callable[[int, int, int, int, int], None]
    stop: Callable[[], int]
    reset: Callable[[int], None]
    words: ctypes.Array


@record
class QueueCalls:
    """The functions of `ir/async_queue.py`; `wait` and `stop` release the GIL."""

    submit: Callable[[int], None]
    wait: Callable[[int, int, int], int]
    done: Callable[[], int]
    cancel: Callable[[], None]
    stop: Callable[[], None]
    reset: Callable[[], None]


# ---- parts -------------------------------------------------------------------------------------


def runtime_source() -> Written:
    """The text of the core."""
    return Written("runtime", lambda: runtime_ir.core())


def part_source(part: str) -> Written:
    """The text of a part."""
    return Written(f"runtime {part}", lambda: runtime_ir.part(part))


# ---- loading -----------------------------------------------------------------------------------

_runtime: list[Runtime] = []
# The symbols that the parts define, and the functions that are called of them.
_parts: dict[str, Mapping[str, int]] = {}
_pool: list[PoolCalls] = []
_queue: list[QueueCalls] = []


def runtime() -> Runtime:
    """The core, compiled at the first call."""
    if not _runtime:
        with _lock:
            if not _runtime:
                _runtime.append(_load())
    return _runtime[0]


def load_parts(names: Iterable[str], patient: bool = True) -> None:
    """Have these parts ready; without `patient`, do not wait for the pool.

    Programs run on one thread until it is there, with the same results.
    """
    for name in names:
        if name == POOL:
            if patient or not loader.is_pending(part_source(POOL)):
                pool_calls()
        elif name not in _parts:
            with _lock:
                _part(name)


@cache
def warm_up_runtime() -> None:
    """Begin with the code of most larger programs: the runtime's core, the pool, kernel batches.

    A program that has to be compiled says so first. Nothing happens where the code is on the disk,
    nor on one core, where this work would delay the program. Entry points are not part of it: while
    larger programs are compiled they need the other core more. The first result begins with these.
    """
    if available_cores() > 1:
        pool, batch = part_source(POOL), part_source("batch")
        loader.begin_early({runtime_source(): None, pool: pool_calls, batch: None})


def pool_calls() -> PoolCalls:
    """The pool, compiled at the first call."""
    if not _pool:
        with _lock:
            if not _pool:
                _load_pool()
    return _pool[0]


def queue_calls() -> QueueCalls:
    """The queue, compiled at the first call."""
    if not _queue:
        with _lock:
            if not _queue:
                _queue.append(_queue_calls(_part(QUEUE)))
    return _queue[0]


def _part(name: str) -> Mapping[str, int]:
    """The symbols of a part, which is in the table then. The lock is held."""
    symbols = _parts.get(name)
    if symbols is None:
        table = runtime().table
        symbols = compile_written(part_source(name))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(symbols[setup_symbol(name)])(table)
        _parts[name] = symbols
    return symbols


def _load() -> Runtime:
    _wanted_workers()  # a wrong setting is told of now, not by the first program that has threads
    symbols = compile_written(runtime_source())
    run = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    loaded = Runtime(
        run_short=ctypes.PYFUNCTYPE(*run)(symbols["spmd_run"]),
        run_long=ctypes.CFUNCTYPE(*run)(symbols["spmd_run"]),
        run_address=symbols["spmd_run"],
        table=symbols["spmd_table"],
    )
    words = _table_words(loaded.table)
    for i, name in enumerate(PYTHON_CALLS):
        words[PYTHON + i] = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0
    error = ctypes.CFUNCTYPE(ctypes.c_int32)(symbols["spmd_initialize"])()
    if error:
        raise OSError(error, os.strerror(error))
    return loaded


def _table_words(table: int) -> ctypes.Array:
    return (ctypes.c_int64 * (RAISED_THERE + 3)).from_address(table)


def raise_signal() -> None:
    """Raise the exception of a signal handler that ran during a loop."""
    words = _table_words(runtime().table)
    raised = [words[RAISED_THERE + i] or None for i in range(3)]
    words[RAISED_THERE:] = [0, 0, 0]
    restore = ctypes.PYFUNCTYPE(None, *[ctypes.c_void_p] * 3)(("PyErr_Restore", ctypes.pythonapi))
    restore(*raised)


def _load_pool() -> None:
    symbols = _part(POOL)
    kernel = (None, *[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int64)
    calls = PoolCalls(
        parallel_kernel=ctypes.CFUNCTYPE(*kernel)(symbols["spmd_parallel_kernel"]),
        stop=ctypes.CFUNCTYPE(ctypes.c_int64)(symbols["spmd_pool_stop"]),
        reset=ctypes.CFUNCTYPE(None, ctypes.c_int64)(symbols["spmd_pool_reset"]),
        words=(ctypes.c_byte * POOL_BYTES).from_address(symbols["spmd_pool"]),
    )
    calls.reset(_wanted_workers())
    after_fork_in_child(lambda: calls.reset(_wanted_workers()))
    _pool.append(calls)


def _queue_calls(symbols: Mapping[str, int]) -> QueueCalls:
    number, keeps = ctypes.c_int64, ctypes.PYFUNCTYPE
    return QueueCalls(
        submit=keeps(None, ctypes.c_void_p)(symbols["spmd_queue_submit"]),
        wait=ctypes.CFUNCTYPE(number, number, number, number)(symbols["spmd_queue_wait"]),
        done=keeps(number)(symbols["spmd_queue_done"]),
        cancel=keeps(None)(symbols["spmd_queue_cancel"]),
        stop=ctypes.CFUNCTYPE(None)(symbols["spmd_queue_stop"]),
        reset=keeps(None)(symbols["spmd_queue_reset"]),
    )


def _wanted_workers() -> int:
    """Workers beside the calling thread."""
    threads = config.num_threads
    if threads is None:
        threads = available_cores()
    if threads < 1:
        raise ArgumentError(f"num_threads={threads}: at least the calling thread must compute")
    return min(threads - 1, MOST_WORKERS)


def num_threads() -> int:
    """The threads that may compute together, the calling one included."""
    return ctypes.c_int64.from_buffer(pool_calls().words, WORKERS).value + 1


def _follow_setting() -> None:
    """Have as many workers as the settings say, from the next job on."""
    workers = _wanted_workers()
    if _pool:
        set_workers(_pool[0], workers)


config.on_update("num_threads", lambda _: _follow_setting())


def set_workers(calls: PoolCalls, workers: int) -> None:
    """Change the number of workers; waits for a job that is running."""
    while not calls.stop():
        os.sched_yield()
    ctypes.c_int64.from_buffer(calls.words, WORKERS).value = workers
