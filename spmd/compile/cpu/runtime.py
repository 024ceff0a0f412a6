"""The native runtime of this process: compiled once, shared by all programs.

The one idea: pool, executor, queue and collectives are one module of IR text, so they call each
other directly and live in one cached object. This file compiles it at first use, tells the pool how
many threads it may have, and keeps a forked child away from its parent's threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping

from spmd.compile.cpu.loader import available_cores, compile_written
from spmd.compile.cpu.pool_words import MOST_WORKERS, POOL_BYTES, WORKERS
from spmd.core.config import config
from spmd.core.deferred import Deferred
from spmd.core.errors import ArgumentError
from spmd.core.forks import guard
from spmd.core.record import record

# Written once a machine.
_texts = Deferred("spmd.compile.cpu.runtime_text")
_lock = guard("runtime")


@record
class Runtime:
    """The entry points of the native runtime."""

    # (program header, frames) -> status; the first keeps the GIL, the second releases it.
    run_short: Callable[[int, int], int]
    run_long: Callable[[int, int], int]
    # (function, args, sizes, units, chunk)
    parallel_kernel: Callable[[int, int, int, int, int], None]
    run_address: int
    stop: Callable[[], int]
    reset: Callable[[int], None]
    pool: ctypes.Array
    queue: QueueCalls


@record
class QueueCalls:
    """The functions of `runtime_ir_queue.py`; `wait` and `stop` release the GIL."""

    submit: Callable[[int], None]
    wait: Callable[[int, int, int], int]
    done: Callable[[], int]
    cancel: Callable[[], None]
    stop: Callable[[], None]
    reset: Callable[[], None]


_runtime: list[Runtime] = []


def runtime() -> Runtime:
    """The runtime, compiled at the first call."""
    if not _runtime:
        with _lock:
            if not _runtime:
                _runtime.append(_load())
    return _runtime[0]


def _load() -> Runtime:
    symbols = compile_written("runtime", lambda: _texts.runtime_text())
    address = ctypes.c_void_p
    run = (ctypes.c_int64, address, address)
    kernel = (None, address, address, address, ctypes.c_int64, ctypes.c_int64)
    loaded = Runtime(
        run_short=ctypes.PYFUNCTYPE(*run)(symbols["spmd_run"]),
        run_long=ctypes.CFUNCTYPE(*run)(symbols["spmd_run"]),
        run_address=symbols["spmd_run"],
        parallel_kernel=ctypes.CFUNCTYPE(*kernel)(symbols["spmd_parallel_kernel"]),
        stop=ctypes.CFUNCTYPE(ctypes.c_int64)(symbols["spmd_pool_stop"]),
        reset=ctypes.CFUNCTYPE(None, ctypes.c_int64)(symbols["spmd_pool_reset"]),
        pool=(ctypes.c_byte * POOL_BYTES).from_address(symbols["spmd_pool"]),
        queue=_queue_calls(symbols),
    )
    error = ctypes.CFUNCTYPE(ctypes.c_int32)(symbols["spmd_initialize"])()
    if error:
        raise OSError(error, os.strerror(error))
    loaded.reset(_wanted_workers())
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: loaded.reset(_wanted_workers()))
    config.on_update("num_threads", lambda _: set_workers(loaded, _wanted_workers()))
    return loaded


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


def set_workers(loaded: Runtime, workers: int) -> None:
    """Change the number of workers; waits for a job that is running."""
    while not loaded.stop():
        os.sched_yield()
    ctypes.c_int64.from_buffer(loaded.pool, WORKERS).value = workers
