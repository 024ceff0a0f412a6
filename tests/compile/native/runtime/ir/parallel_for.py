"""One kernel call spread over the worker pool, and what the pool's words say of its workers.

Programs reach the pool natively (`ir/thread_pool.py`); tests call single kernels on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from spmd.compile.native.runtime.load import num_threads, pool_calls
from spmd.compile.native.runtime.pool_layout import SLEEPERS, STARTED


def running_workers() -> int:
    """The workers that exist at this moment; none before the first job and after a fork."""
    return _word(STARTED)


def parked_workers() -> int:
    """The workers that sleep; the others compute or are about to fall asleep."""
    return _word(SLEEPERS)


def parallel_for(
    function: int, args: Sequence[int], sizes: Sequence[int], units: int, grain: int | None = None
) -> None:
    """Run the kernel at address `function` over [0, units), `grain` units at a time.

    `args` are addresses, `sizes` numbers. Units may run in any order and on any thread. While a
    job runs, other callers compute alone. The GIL is released.
    """
    if grain is None:
        grain = -(-units // (4 * num_threads()))
    if units < 0 or (units and grain < 1):
        raise ValueError(f"parallel_for over {units} units, {grain} at a time")
    if units == 0:
        return
    arg_words = (ctypes.c_int64 * max(len(args), 1))(*args)
    size_words = (ctypes.c_int64 * max(len(sizes), 1))(*sizes)
    pool_calls().parallel_kernel(
        function, ctypes.addressof(arg_words), ctypes.addressof(size_words), units, grain
    )


def _word(offset: int) -> int:
    return ctypes.c_int64.from_buffer(pool_calls().words, offset).value
