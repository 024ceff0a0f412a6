"""The input of `show` and `profile`: the program of a call, and its steps with their costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spmd.api.compiled import jit
from spmd.base.source import UNKNOWN, Source
from spmd.compile.dispatch.jit import JitFunction
from spmd.compile.dispatch.stages import Traced
from spmd.compile.executable.executable import Executable
from spmd.compile.executable.mesh_program import MeshProgram
from spmd.compile.executable.select import compile_program
from spmd.compile.lower.steps import (
    Branch,
    Contract,
    Copy,
    Exchange,
    Launch,
    Loop,
    Multiply,
    Once,
    Pack,
    Parallel,
    RankExchange,
    Schedule,
    Step,
    blocks,
)
from spmd.compile.native.program.steps import rounds_of
from spmd.compile.schedule.cost_model import Cost, step_cost
from spmd.compile.schedule.memory_plan import Plan
from spmd.sharding.operand_layouts import layouts_of


@dataclass(frozen=True)
class Program:
    """A traced and compiled call, and the seconds that both took."""

    traced: Traced
    executable: Executable | MeshProgram
    trace_seconds: float
    compile_seconds: float

    @property
    def core(self) -> Executable:
        """The owner of the schedule: of a mapped function, the program that each device runs."""
        return self.executable.core

    @property
    def schedule(self) -> Schedule:
        """The steps."""
        return self.core.schedule

    @property
    def plan(self) -> Plan:
        """The memory plan of temporaries."""
        return self.core.plan

    @property
    def devices(self) -> int:
        """The number of devices of this process that run the steps."""
        return self.core.count


def compile_call(
    fun: Callable[..., Any], args: Any, kwargs: Any, *, donate: bool = False
) -> Program:
    """Trace and compile a call of `fun`, jitted or not, mapped or not.

    To be run on the same arguments again and again it must not `donate` them.
    """
    jitted = fun if isinstance(fun, JitFunction) else jit(fun)
    started = time.perf_counter()
    traced = jitted.trace(*args, **kwargs)
    middle = time.perf_counter()
    donated, layouts = traced.donated if donate else (), layouts_of(traced.split.leaves)
    executable = compile_program(traced.program, donated, layouts=layouts)
    return Program(traced, executable, middle - started, time.perf_counter() - middle)


# ---- steps -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepInfo:
    """One step of a program: its kind, its source line, its cost each time."""

    kind: str
    name: str
    source: Source
    depth: int
    rounds: int
    cost: Cost
    step: Step

    @property
    def is_host(self) -> bool:
        """Whether the step returns to Python."""
        return self.kind == "host"


def steps_of(schedule: Schedule) -> list[StepInfo]:
    """All steps in order, those in loops and branches behind theirs and one deeper."""
    return list(_infos(schedule.steps, 0, 1))


def _infos(steps: Sequence[Step], depth: int, rounds: int) -> Iterator[StepInfo]:
    for step in steps:
        kind, name = describe(step)
        source = getattr(step, "source", UNKNOWN)
        source = source if isinstance(source, Source) else UNKNOWN
        yield StepInfo(kind, name, source, depth, rounds, step_cost(step), step)
        for block in blocks(step):
            yield from _infos(block, depth + 1, rounds * rounds_of(step))


def describe(step: Step) -> tuple[str, str]:
    """The kind of a step, in a word, and its difference from others of that kind."""
    match step:
        case Launch(name=name):
            return "kernel", name
        case Multiply(product=p, name=name):
            sizes = "x".join(map(str, (p.m, p.n, p.k)))
            batch = "x".join(map(str, p.batch))
            what = f"{batch} of {sizes}" if batch else sizes
            return "product", what if name == "dot" else f"{what} {name}"
        case Pack(packing=p):
            return "packing", "x".join(map(str, (*p.batch, p.k, p.n)))
        case Contract(contraction=c, name=name):
            sizes = "x".join(map(str, (c.rows.count, c.columns, c.depth.count)))
            what = sizes if c.batch[0] == 1 else f"{c.batch[0]} of {sizes}"
            return "contraction", what if name == "conv" else f"{what} {name}"
        case Copy(nbytes=nbytes):
            return "copy", f"{nbytes} bytes"
        case Exchange():
            return "collective", f"{step.kind} {step.name}"
        case RankExchange():
            return "collective", step.name
        case Loop(trips=trips):
            return "loop", f"{trips} rounds"
        case Parallel(trips=trips):
            return "parallel", f"{'x'.join(map(str, trips))} rounds"
        case Branch(branches=branches):
            return "branch", f"one of {len(branches)}"
        case Once(devices=devices):
            return "once", f"on device{'s' * (len(devices) > 1)} {' '.join(map(str, devices))}"
    return type(step).__name__.lower(), str(getattr(step, "name", ""))


# ---- text --------------------------------------------------------------------------------------


def amount(number: float, unit: str = "B") -> str:
    """A number with three digits: 1.23 MB."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def duration(seconds: float) -> str:
    """A time with three digits: 1.23 ms."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows as aligned text; the columns in `right` are flush right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if k in right else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
