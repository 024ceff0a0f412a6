"""Legalisation for CUDA: steps without a kernel become steps of the host.

Contractions over windows have no CUDA kernel yet. The host computes them by their definitions; the
program's text shows them as host steps, so nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd.compile.kernel.dtypes import DTYPES
from spmd.compile.kernel.ir import Arg
from spmd.compile.kernel.window_contraction import Contraction, interpret_contraction
from spmd.compile.lower.steps import Contract, Ref, Schedule, Step, View
from spmd.compile.native.program.steps import Host, with_blocks


def legalise(schedule: Schedule) -> Schedule:
    """The schedule with steps that the backend has; the one given is changed in place."""
    schedule.steps = _steps(schedule.steps)
    return schedule


def _steps(steps: Sequence[Step]) -> list[Step]:
    return [_legal(with_blocks(step, _steps)) for step in steps]


def _legal(step: Step) -> Step:
    return _contract(step) if isinstance(step, Contract) else step


# ---- contractions ------------------------------------------------------------------------------


def _contract(step: Contract) -> Host[Ref]:
    """A contraction by its definition; out is read too, where it has elements between others."""
    given = step.contraction
    dtype = DTYPES[given.dtype].numpy
    starts, sizes = _extents(given)
    views = [
        View(ref.shifted(start * dtype.itemsize), (size,), dtype)
        for ref, start, size in zip(step.refs[:3], starts, sizes, strict=True)
    ]
    rest: tuple[Arg, ...] = () if given.epilogue is None else given.epilogue.args[1:]
    views += [
        View(ref, (arg.size,), DTYPES[arg.dtype].numpy)
        for ref, arg in zip(step.refs[3:], rest, strict=True)
    ]
    roles = ["in", "in", "inout", *("inout" if arg.role != "in" else "in" for arg in rest)]
    written = [k for k, role in enumerate(roles) if role != "in"]

    def contract(device: int, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
        arrays = [np.array(x) if k in written else x for k, x in enumerate(inputs)]
        a, b = (_Moved(x, start) for x, start in zip(arrays[:2], starts[:2], strict=True))
        interpret_contraction(given, a, b, *arrays[2:])
        for k, out in zip(written, outputs, strict=True):
            out[...] = arrays[k]

    return Host(contract, tuple(views), tuple([views[k] for k in written]), step.name, step.source)


class _Moved:
    """A flat array that begins at the element with index `start`: strides may be negative."""

    def __init__(self, array: np.ndarray, start: int):
        self.array, self.start = array, start

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        return self.array[index - self.start]


def _extents(given: Contraction) -> tuple[list[int], list[int]]:
    """Of A, B and out: the first element that is touched, and how many there are up to the last."""
    rows, depth = given.rows.offsets(), given.depth.offsets()
    count, *steps = given.batch
    columns = given.columns - 1
    ends = []
    for step, parts, width in zip(
        steps,
        ((rows[:, 0], depth[:, 0]), (depth[:, 1],), (rows[:, 1],)),
        (0, columns, columns),
        strict=True,
    ):
        parts = [p for p in parts if p.size]
        low = sum(int(p.min()) for p in parts) + min((count - 1) * step, 0)
        high = sum(int(p.max()) for p in parts) + max((count - 1) * step, 0) + width
        ends.append((low, high))
    if not depth.size:  # nothing is read
        ends[:2] = [(0, -1), (0, -1)]
    return [low for low, _ in ends], [high - low + 1 for low, high in ends]
