"""The time of a program by steps: a twin of the executable reads the clock between steps.

The one idea: a clock is a kernel. After each step of the program the twin runs a native function
that adds the time since its last call to the step's account, in memory that is one more base of the
frame. So steps run as always, on real data, in loops and branches, and nothing returns to Python;
a reading costs some 30 ns.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd.compile.cpu.assemble.assemble import Builder
from spmd.compile.executable.executable import Executable
from spmd.compile.executable.mesh_program import MeshProgram
from spmd.compile.lower.steps import Parallel, Schedule, Step, blocks
from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.program.steps import LANE, KernelStep, Slot
from spmd.compile.native.program.steps import Program as NativeProgram
from spmd.compile.native.program.steps import Step as NativeStep
from spmd.compile.native.runtime.run import build_program
from spmd.compile.schedule.memory_plan import Plan
from spmd.compile.schedule.thread_plan import rounded
from spmd.debug.program import Program, StepInfo, amount, columns, compile_call, duration, steps_of

# A record of 64-bit words: when the clock was last read, then nanoseconds and calls for each
# account. Account 0 takes time of no step; step k of n has account k, and n + k for the time
# before a round of it begins.
_STAMP = """
%timespec = type { i64, i64 }
declare i32 @clock_gettime(i32, ptr)
define void @spmd_profile_stamp(ptr %args, ptr %sizes, i64 %begin, i64 %end) {
  %now = alloca %timespec, align 16
  %status = call i32 @clock_gettime(i32 1, ptr %now)
  %seconds = load i64, ptr %now, align 8
  %place = getelementptr i8, ptr %now, i64 8
  %rest = load i64, ptr %place, align 8
  %most = mul i64 %seconds, 1000000000
  %time = add i64 %most, %rest
  %record = load ptr, ptr %args, align 8
  %account = load i64, ptr %sizes, align 8
  %twice = mul i64 %account, 2
  %at = add i64 %twice, 1
  %spent = getelementptr i64, ptr %record, i64 %at
  %calls = getelementptr i64, ptr %spent, i64 1
  %last = load i64, ptr %record, align 8
  %delta = sub i64 %time, %last
  %before = load i64, ptr %spent, align 8
  %after = add i64 %before, %delta
  store i64 %after, ptr %spent, align 8
  %count = load i64, ptr %calls, align 8
  %more = add i64 %count, 1
  store i64 %more, ptr %calls, align 8
  store i64 %time, ptr %record, align 8
  ret void
}
"""
_STAMP_NS = 30.0


@dataclass(frozen=True)
class StepTime:
    """A step and the seconds that it took in one run, with the times it ran.

    Of a loop, `seconds` include those of its steps; `own` is the time of the loop itself.
    """

    info: StepInfo
    seconds: float
    own: float
    calls: int

    @property
    def bandwidth(self) -> float:
        """Bytes moved each second, or 0 if not known."""
        return self.info.cost.moved * max(self.calls, 1) / self.seconds if self.seconds else 0.0

    @property
    def flop_rate(self) -> float:
        """Operations each second."""
        return self.info.cost.flops * max(self.calls, 1) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Profile:
    """The times of a program's steps; printed, a table with the slowest lines of the user first."""

    name: str
    steps: tuple[StepTime, ...]
    seconds: float
    call_seconds: float
    repeats: int
    devices: int

    @property
    def by_line(self) -> dict[str, float]:
        """Seconds by the user's line, most first; loops count by the steps inside."""
        found: dict[str, float] = {}
        for step in self.steps:
            line = str(step.info.source) if step.info.source.line else "without a line"
            found[line] = found.get(line, 0.0) + step.own
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        on = f" on each of {self.devices} devices" if self.devices > 1 else ""
        head = (
            f"{self.name}: {duration(self.call_seconds)} a call, {duration(self.seconds)} in "
            f"{len(self.steps)} steps{on} (medians of {self.repeats} runs)"
        )

        def leaf(step: StepTime) -> bool:
            return not blocks(step.info.step)

        rows = [["time", "part", "calls", "step", "B/s", "flop/s", "line"]]
        for step in self.steps:
            info = step.info
            rows.append(
                [
                    duration(step.seconds),
                    f"{step.seconds / self.seconds:.1%}" if self.seconds else "",
                    str(step.calls),
                    "  " * info.depth + f"{info.kind} {info.name}".rstrip(),
                    amount(step.bandwidth) if leaf(step) and info.cost.moved else "",
                    amount(step.flop_rate, "") if leaf(step) and info.cost.flops else "",
                    str(info.source) if info.source.line else "",
                ]
            )
        lines = [[duration(t), line] for line, t in list(self.by_line.items())[:10]]
        return "\n".join(
            [head, "", columns(rows, (0, 1, 2, 4, 5)), "", "by line:", columns(lines, (0,))]
        )


def measure(fun: Callable[..., Any], args: Any, kwargs: Any, repeats: int) -> Profile:
    """The result of `profile(fun)(*args)`."""
    program = compile_call(fun, args, kwargs)
    twin, builder, records = watched_twin(program)
    leaves = program.traced.split.leaves
    runs, calls = [], []
    for _ in range(2):
        run_once(twin, leaves)
        run_once(program.executable, leaves)
    for _ in range(repeats):
        for record in records:
            record[:] = 0
        run_once(twin, leaves)
        runs.append(np.array([record.reshape(-1) for record in records]))
        started = time.perf_counter()
        run_once(program.executable, leaves)
        calls.append(time.perf_counter() - started)
    spent, called = _accounts(builder, np.array(runs))
    steps = _steps(builder, spent, called)
    total = sum(step.seconds for step in steps if step.info.depth == 0)
    name = program.traced.fun_name
    return Profile(name, steps, total, float(np.median(calls)), repeats, program.devices)


def run_once(executable: Executable | MeshProgram, leaves: Sequence[Any]) -> None:
    """A call, to its end."""
    for out in executable(leaves):
        out.block_until_ready()


# ---- the twin ----------------------------------------------------------------------------------


class _Watched(Builder):
    """Builds a program that reads the clock after each step and at the begin of each block."""

    # A loop that is one function has no steps between which a clock could be read.
    compiles_loops = False

    def __init__(self, schedule: Schedule, plan: Plan):
        super().__init__(schedule, plan)
        self.infos = steps_of(schedule)
        self._stamp = compile_texts([_STAMP])["spmd_profile_stamp"]
        self._base = 1 + len(self.named)
        self.record_bytes = rounded(8 * (1 + 2 * (1 + 2 * len(self.infos))))
        # The account of the step around, of which lanes there are, and how many steps were met.
        self._around = 0
        self._in_lanes = False
        self._met = 0

    def program(self, devices: int) -> NativeProgram:
        made = super().program(devices)
        return NativeProgram((*made.bases, self.nbytes), made.steps, devices)

    @property
    def nbytes(self) -> int:
        """A record for the program, and one for each lane of its parallel loops."""
        return self.record_bytes * (1 + self.plan.lanes.count)

    def steps(self, steps: Sequence[Step]) -> list[NativeStep]:
        outside = self._around
        begin = outside + len(self.infos) if outside else 0
        made: list[NativeStep] = [self._clock(begin)]
        for step in steps:
            self._met += 1
            account = self._around = self._met
            made += [*self.step(step), self._clock(account)]
            self._around = outside
        return made

    def parallel(self, step: Parallel[Step]) -> NativeStep:
        if step.number not in self.plan.lanes.chosen:
            return super().parallel(step)
        # Each lane has a record of its own, in which nothing was measured before its first round.
        self._around, self._in_lanes = 0, True
        made = super().parallel(step)
        self._in_lanes = False
        return made

    def _clock(self, account: int) -> KernelStep:
        slot = Slot(self._base)
        if self._in_lanes:
            slot = Slot(self._base, self.record_bytes, ((LANE, self.record_bytes),))
        return KernelStep(self._stamp, (slot,), 1, _STAMP_NS, (account,), name="clock")


def watched_twin(program: Program) -> tuple[Executable | MeshProgram, _Watched, list[np.ndarray]]:
    """An executable that also writes records, one array of them for each local device."""
    builder = _Watched(program.schedule, program.plan)
    records = [np.zeros(builder.nbytes // 8, np.int64) for _ in range(program.devices)]
    twin = copy.copy(program.core)
    twin.native = build_program(builder.program(program.devices))
    pairs = zip(twin.const_pointers, records, strict=True)
    twin.const_pointers = [[*each, r.__array_interface__["data"][0]] for each, r in pairs]
    if not isinstance(program.executable, MeshProgram):
        return twin, builder, records
    whole = copy.copy(program.executable)
    whole.core = twin
    return whole, builder, records


def _accounts(builder: _Watched, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and calls of each step, from records by run and device; the slowest device counts."""
    count, words = len(builder.infos), builder.record_bytes // 8
    # By run, device, record (the program's, then those of lanes), account: nanoseconds and calls.
    table = runs.reshape(*runs.shape[:2], -1, words)[..., 1 : 3 + 4 * count]
    table = table.reshape(*table.shape[:3], 1 + 2 * count, 2)
    spent = np.median(table[..., 0].max(axis=1), axis=0) * 1e-9
    spent = spent[:, 1 : 1 + count] + spent[:, 1 + count :]
    called = table[0, ..., 1].max(axis=0)[:, 1 : 1 + count]
    lanes = max(builder.plan.lanes.count, 1)
    mine = called[0] > 0
    return (
        np.where(mine, spent[0], spent[1:].sum(axis=0) / lanes),
        np.where(mine, called[0], called[1:].sum(axis=0)),
    )


def _steps(builder: _Watched, own: np.ndarray, calls: np.ndarray) -> tuple[StepTime, ...]:
    """Times with those of the steps inside added, but for loops whose rounds ran side by side."""
    infos, chosen = builder.infos, builder.plan.lanes.chosen
    seconds = own.copy()
    for k in range(len(infos) - 1, -1, -1):
        step = infos[k].step
        inside = sum(seconds[inner] for inner in _children(infos, k))
        if isinstance(step, Parallel) and step.number in chosen:
            own[k] = max(own[k] - inside, 0.0)
        else:
            seconds[k] += inside
    return tuple(
        StepTime(info, float(seconds[k]), float(own[k]), int(calls[k]))
        for k, info in enumerate(infos)
    )


def _children(infos: Sequence[StepInfo], k: int) -> Iterator[int]:
    """The numbers of the steps right inside step k."""
    for inner in range(k + 1, len(infos)):
        if infos[inner].depth <= infos[k].depth:
            return
        if infos[inner].depth == infos[k].depth + 1:
            yield inner
