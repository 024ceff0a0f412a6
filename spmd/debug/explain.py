"""The form of a call: jaxpr, passes, steps with their bytes and flops, the memory plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spmd.compile.executable.memory_analysis import MemoryAnalysis, memory_of
from spmd.compile.executable.mesh_program import MeshProgram
from spmd.compile.passes.pipeline import PASSES, Report, run_passes
from spmd.compile.schedule.cost_model import Cost, cost_of
from spmd.compile.schedule.overlap_collectives import HALVES
from spmd.core.ir import ClosedJaxpr, Jaxpr, subjaxprs
from spmd.debug.program import Program, StepInfo, amount, columns, compile_call, duration, steps_of


@dataclass(frozen=True)
class PassInfo:
    """One pass: how many equations it left (those in loops and branches too), and its seconds.

    The equations inside a fused group are not counted; `fused` says how many groups there are.
    """

    name: str
    equations: int
    fused: int
    seconds: float


@dataclass(frozen=True, repr=False)
class Explanation:
    """A compiled call as figures; `str` of it is the text of `show`.

    `bytes` and `flops` are counted from the program for one call (on one device of a mapped
    function): see `spmd.compile.schedule.cost_model` for the rules.
    """

    name: str
    jaxpr: ClosedJaxpr
    optimised: ClosedJaxpr
    passes: tuple[PassInfo, ...]
    steps: tuple[StepInfo, ...]
    cost: Cost
    memory: MemoryAnalysis
    devices: int
    trace_seconds: float
    compile_seconds: float
    lines: int
    # `psum: 62 tensors in 3 exchanges, ...`: the exchanges of collectives between processes.
    exchanges: tuple[str, ...] = ()

    @property
    def kernels(self) -> tuple[StepInfo, ...]:
        """The steps that are generated kernels."""
        return tuple(step for step in self.steps if step.kind == "kernel")

    @property
    def products(self) -> tuple[StepInfo, ...]:
        """The steps that are matrix products."""
        return tuple(step for step in self.steps if step.kind == "product")

    @property
    def collectives(self) -> tuple[StepInfo, ...]:
        """The steps in which devices exchange data, in this process or between processes.

        Of an exchange in flight that is its start.
        """
        return tuple(s for s in self.steps if s.kind == "collective" or _is_exchange(s))

    @property
    def host_steps(self) -> tuple[StepInfo, ...]:
        """The steps that return to Python."""
        return tuple(step for step in self.steps if step.is_host)

    @property
    def bytes(self) -> int:
        """The bytes that all steps read and write."""
        return self.cost.moved

    @property
    def flops(self) -> int:
        """The operations of all steps."""
        return self.cost.flops

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a call holds, arguments and results included."""
        return self.memory.peak_memory_in_bytes

    def __repr__(self) -> str:
        return (
            f"<compiled {self.name}: {len(self.steps)} steps, {len(self.kernels)} of them kernels, "
            f"{amount(self.bytes)} moved, {amount(self.flops, 'flop')}, "
            f"{amount(self.peak_bytes)} held>"
        )

    def __str__(self) -> str:
        parts = [
            f"{self.name}: traced in {duration(self.trace_seconds)}, compiled in "
            f"{duration(self.compile_seconds)} (what was compiled before comes from the caches)",
            "",
            _cut(str(self.jaxpr), self.lines, "jaxpr"),
            "",
            _passes_text(self.passes),
            "",
            self._heading(),
            *self.exchanges,
            _cut(_steps_text(self.steps), self.lines, "steps"),
            "",
            _memory_text(self.memory, self.devices),
        ]
        if self.host_steps:
            parts += ["", "steps that return to Python:"]
            parts += [f"  {step.name}: {reason(step)}" for step in self.host_steps]
        return "\n".join(parts)

    def _heading(self) -> str:
        kernels = len({step.step.kernel for step in self.kernels})  # type: ignore[union-attr]
        on = f", on each of {self.devices} devices" if self.devices > 1 else ""
        return (
            f"{len(self.steps)} steps{on}: {len(self.kernels)} kernels ({kernels} different), "
            f"{len(self.products)} products, {len(self.collectives)} collectives, "
            f"{len(self.host_steps)} in Python; {amount(self.cost.read)} read, "
            f"{amount(self.cost.written)} written, {amount(self.flops, 'flop')}"
        )


def reason(step: StepInfo) -> str:
    """The reason for which a step runs in Python."""
    if _is_exchange(step):
        return "it exchanges data with other processes"
    if getattr(step.step, "together", False):
        return "it waits for an exchange in flight"
    if step.name.startswith("shard_map"):
        return "a program of several devices inside one of a single device"
    return f"there is no native step for {step.name}; NumPy runs it"


def _is_exchange(step: StepInfo) -> bool:
    waits = step.name.startswith(f"{HALVES[1]} ")
    return step.is_host and getattr(step.step, "together", False) and not waits


# ---- making ------------------------------------------------------------------------------------


def explain(fun: Callable[..., Any], args: Any, kwargs: Any, lines: int) -> Explanation:
    """Print and return the explanation of `show(fun)(*args)`."""
    program = compile_call(fun, args, kwargs, donate=True)
    traced, passes = _device_jaxpr(program)
    report = Report()
    optimised = run_passes(traced, report, passes)
    infos = [_pass_info("trace", traced, program.trace_seconds)]
    infos += [_pass_info(n, j, report.seconds[n]) for n, j in report.jaxprs.items()]
    return Explanation(
        name=program.traced.fun_name,
        jaxpr=program.traced.jaxpr,
        optimised=optimised,
        passes=tuple(infos),
        steps=tuple(steps_of(program.schedule)),
        cost=cost_of(program.schedule.steps),
        memory=memory_of(program.executable),
        devices=program.devices,
        trace_seconds=program.trace_seconds,
        compile_seconds=program.compile_seconds,
        lines=lines,
        exchanges=_exchanges(program),
    )


def _exchanges(program: Program) -> tuple[str, ...]:
    executable = program.executable
    return tuple(executable.core.exchanges) if isinstance(executable, MeshProgram) else ()


def _device_jaxpr(program: Program) -> tuple[ClosedJaxpr, Sequence[Any]]:
    """The input of the passes: of a mapped function, the program of a device."""
    executable = program.executable
    if isinstance(executable, MeshProgram):
        return executable.params["jaxpr"], executable.core.passes
    return program.traced.program, executable.backend.passes(PASSES)


def _pass_info(name: str, closed: ClosedJaxpr, seconds: float) -> PassInfo:
    equations, fused = _count(closed.jaxpr)
    return PassInfo(name, equations, fused, seconds)


def _count(jaxpr: Jaxpr) -> tuple[int, int]:
    """Equations and fused groups, those of loops, branches and calls included."""
    equations = fused = 0
    for eqn in jaxpr.eqns:
        equations += 1
        if eqn.prim.name == "fused":
            fused += 1
            continue
        for _, inner in subjaxprs(eqn.params):
            more, groups = _count(getattr(inner, "jaxpr", inner))
            equations, fused = equations + more, fused + groups
    return equations, fused


# ---- text --------------------------------------------------------------------------------------


def _cut(text: str, most: int, field: str) -> str:
    lines = text.splitlines()
    if len(lines) <= most:
        return text
    return "\n".join([*lines[:most], f"... {len(lines) - most} lines more; see .{field}"])


def _passes_text(passes: Sequence[PassInfo]) -> str:
    rows = [["pass", "equations", "fused groups", "time"]]
    for info in passes:
        groups = str(info.fused) if info.fused else ""
        rows.append([info.name, str(info.equations), groups, duration(info.seconds)])
    return columns(rows, (1, 2, 3))


def _steps_text(steps: Sequence[StepInfo]) -> str:
    rows = [["step", "rounds", "read", "written", "flop", "line"]]
    for step in steps:
        mark = "! " if step.is_host else "  "
        rows.append(
            [
                mark + "  " * step.depth + f"{step.kind} {step.name}".rstrip(),
                str(step.rounds) if step.rounds > 1 else "",
                amount(step.cost.read),
                amount(step.cost.written),
                amount(step.cost.flops, "") if step.cost.flops else "",
                str(step.source) if step.source.line else "",
            ]
        )
    return columns(rows, (1, 2, 3, 4))


def _memory_text(memory: MemoryAnalysis, devices: int) -> str:
    each = " on each device" if devices > 1 else ""
    rows = [
        [f"memory{each}", amount(memory.peak_memory_in_bytes), "held at most"],
        ["  arguments", amount(memory.argument_size_in_bytes), ""],
        [
            "  results",
            amount(memory.output_size_in_bytes),
            f"{amount(memory.alias_size_in_bytes)} of them in the place of arguments",
        ],
        ["  constants", amount(memory.constant_size_in_bytes), ""],
        [
            "  temporaries",
            amount(memory.temp_size_in_bytes),
            f"for {memory.temp_buffers} of {amount(memory.temp_buffer_size_in_bytes)}, of which "
            f"{amount(memory.live_temp_size_in_bytes)} are alive at once",
        ],
    ]
    return columns(rows, (1,))
