"""Memory: what a call holds at most, arguments and results included, as both compilers plan it.

Nothing is timed: each side compiles a case and says what it planned. `temporaries` is what lies
between arguments and results. What libraries take for themselves while they run is in neither
plan: XLA hands products, and what is fused with them, to one (YNNPACK) that allocates its own
scratch; spmd's kernels have blocks on their threads' stacks. So the process is asked too:
`measured` is by how much its resident memory grows at most in a call, for results, temporaries and
whatever else, where the plan is large enough to be seen among the pages of a process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import BOTH, Case
from benchmarks.measure import BYTES, Failure, Result, Team, WorkerError
from benchmarks.sides import Side

# A process grows by pages, and the kernel counts them loosely, in each thread by itself.
MEASURED_FROM = 2 * 10**6
# Calls before the first that is measured, which compile and start threads; and measured ones.
CALLS_BEFORE, CALLS_MEASURED = 3, 5
# Tells the C library to give freed memory back, so that it is not there already in the next call.
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class _CompiledError(Exception):
    """Ends a case when its function is compiled."""


def planned(case: Case, side: Side) -> dict[str, int]:
    """The bytes that a side plans for a call of a case, in this process."""
    found: dict[str, int] = {}

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            plan = side.jit(function, **options).lower(*args, **kwargs).compile().memory_analysis()
            ends = plan.argument_size_in_bytes + plan.output_size_in_bytes
            found["temporaries"] = plan.temp_size_in_bytes
            found["all"] = ends + plan.temp_size_in_bytes - plan.alias_size_in_bytes
            raise _CompiledError

        return call

    try:
        case.make(dataclasses.replace(side, jit=compiled))()
    except _CompiledError:
        return found
    raise ValueError(f"{case.name} does not call a jitted function")


def measured(case: Case, side: Side) -> dict[str, int]:
    """The most bytes by which this process grows in a call of a case, arguments not counted.

    Nothing where the system doesn't say.
    """
    if not sys.platform.startswith("linux"):
        return {}
    run = case.make(side)
    for _ in range(CALLS_BEFORE):
        side.ready(run())
    grown = []
    for _ in range(CALLS_MEASURED):
        _release(side)
        try:
            _CLEAR.write_text("5")  # the largest size is now the present one
        except OSError:
            return {}
        before = _kilobytes("VmRSS")
        result = run()
        side.ready(result)
        grown.append(_kilobytes("VmHWM") - before)
        del result
    return {"measured": 1024 * sorted(grown)[CALLS_MEASURED // 2]}


def _release(side: Side) -> None:
    """Give the system what this process keeps for later."""
    gc.collect()
    if side.name == "spmd":
        importlib.import_module("spmd.compile.native.runtime.async_queue").QUEUE.release_arenas()
        importlib.import_module("spmd.compile.native.runtime.allocator").trim()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _kilobytes(name: str) -> int:
    line = next(x for x in _STATUS.read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1])


def measure_memory(
    cases: Sequence[Case], team: Team, progress: Callable[[str], None]
) -> list[Result | Failure]:
    """The planned bytes of cases, and the measured ones of large cases, spmd beside JAX."""
    results: list[Result | Failure] = []
    for case in cases:
        label = f"memory/{case.name.partition('/')[2]}"
        progress(label)
        found: dict[str, dict[str, int]] = {}
        for side in BOTH:
            try:
                found[side] = team[side].ask(memory=case.name)
            except WorkerError as error:
                results.append(Failure(label, side, str(error)))
        if max((parts["all"] for parts in found.values()), default=0) >= MEASURED_FROM:
            for side in found:
                found[side] |= team[side].ask(measured=case.name)
        for side, parts in found.items():
            for part, nbytes in parts.items():
                name = label if part == "all" else f"{label}, {part}"
                results.append(Result(name, side, nbytes, nbytes, nbytes, 1, 1, BYTES))
    return results
