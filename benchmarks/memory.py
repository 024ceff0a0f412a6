"""Memory: what a call holds at most, arguments and results included, as both compilers plan it.

Nothing is timed: each side compiles a case and says what it planned. `temporaries` is what lies
between arguments and results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.case import BOTH, Case
from benchmarks.measure import BYTES, Failure, Result, Team, WorkerError
from benchmarks.sides import Side


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


def measure_memory(
    cases: Sequence[Case], team: Team, progress: Callable[[str], None]
) -> list[Result | Failure]:
    """The planned bytes of cases, spmd beside JAX."""
    results: list[Result | Failure] = []
    for case in cases:
        label = f"memory/{case.name.partition('/')[2]}"
        progress(label)
        for side in BOTH:
            try:
                found = team[side].ask(memory=case.name)
            except WorkerError as error:
                results.append(Failure(label, side, str(error)))
                continue
            for part, nbytes in found.items():
                name = label if part == "all" else f"{label}, {part}"
                results.append(Result(name, side, nbytes, nbytes, nbytes, 1, 1, BYTES))
    return results
