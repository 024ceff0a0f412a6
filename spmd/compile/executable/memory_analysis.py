"""The memory that a compiled program needs, from its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spmd.base.record import record, replace
from spmd.compile.lower.steps import TEMP, Buffer, Schedule
from spmd.compile.schedule.memory_plan import Plan
from spmd.compile.schedule.thread_plan import rounded

if TYPE_CHECKING:
    from spmd.compile.executable.executable import Executable
    from spmd.compile.executable.mesh_program import MeshProgram


@record
class MemoryAnalysis:
    """Bytes that one call needs on a device; the first four have JAX's names and meaning.

    Temporaries share one arena of `temp_size_in_bytes`, but for those that lie in the memory of a
    result that is not written yet; `live_temp_size_in_bytes` of the arena are in use at once at
    some time, so that no plan can do with less. Aliased are results that are written
    over donated arguments or are arguments themselves. `peak_memory_in_bytes` is the sum of
    arguments, results, constants and arena, aliased bytes counted once.
    """

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    constant_size_in_bytes: int
    live_temp_size_in_bytes: int
    temp_buffers: int
    temp_buffer_size_in_bytes: int

    @property
    def peak_memory_in_bytes(self) -> int:
        """The most bytes that a call holds, its arguments included."""
        held = self.argument_size_in_bytes + self.output_size_in_bytes + self.temp_size_in_bytes
        return held + self.constant_size_in_bytes - self.alias_size_in_bytes

    def __str__(self) -> str:
        return (
            f"arguments {self.argument_size_in_bytes}, results {self.output_size_in_bytes} "
            f"({self.alias_size_in_bytes} of them in the place of arguments), constants "
            f"{self.constant_size_in_bytes}, temporaries {self.temp_size_in_bytes} "
            f"({self.temp_buffers} of {self.temp_buffer_size_in_bytes}): "
            f"{self.peak_memory_in_bytes} bytes"
        )


def memory_of(executable: Executable | MeshProgram) -> MemoryAnalysis:
    """The memory of a call; of a mapped function, on one device."""
    core = executable.core
    found = analyse(core.schedule, core.plan, executable.takes)
    # A plan that was made for this has no scratch arrays of kernels, which assembly adds for GPUs.
    arena = max(found.temp_size_in_bytes, *core.frames.arenas)
    return replace(found, temp_size_in_bytes=arena)


def analyse(schedule: Schedule, plan: Plan, takes: dict[int, int]) -> MemoryAnalysis:
    """The memory of a program; `takes` maps outputs to the inputs whose place they take."""
    temps = [b for b in plan.lives if b.kind == TEMP]
    own = [b for b in temps if b not in plan.aliased_into]
    forwarded = [schedule.inputs[r].nbytes for r in schedule.results if isinstance(r, int)]
    return MemoryAnalysis(
        argument_size_in_bytes=_total(schedule.inputs),
        output_size_in_bytes=_total(schedule.outputs) + sum(forwarded),
        alias_size_in_bytes=_total([schedule.outputs[k] for k in takes]) + sum(forwarded),
        temp_size_in_bytes=plan.arena,
        constant_size_in_bytes=_total([buffer for buffer, _ in schedule.consts]),
        live_temp_size_in_bytes=_most_alive(own, plan),
        temp_buffers=len(temps),
        temp_buffer_size_in_bytes=sum(_room(b, plan) for b in temps),
    )


def _total(buffers: Sequence[Buffer]) -> int:
    return sum(b.nbytes for b in buffers)


def _room(buffer: Buffer, plan: Plan) -> int:
    """The bytes of a temporary: a place in each lane of the loop that keeps it."""
    if plan.lane_stride(buffer):
        return plan.lanes.count * rounded(buffer.nbytes)
    return buffer.nbytes


def _most_alive(temps: Sequence[Buffer], plan: Plan) -> int:
    """The largest sum of temporaries that are in use at one time.

    Where a step writes a result over an operand that dies there, both have one place.
    """
    ends = {(plan.offsets[b], plan.lives[b].last, b.nbytes) for b in temps}
    changes: dict[int, int] = {}
    for buffer in temps:
        life, room = plan.lives[buffer], _room(buffer, plan)
        inherits = (plan.offsets[buffer], life.first, buffer.nbytes) in ends
        first = life.first + 1 if inherits and life.last > life.first else life.first
        changes[first] = changes.get(first, 0) + room
        changes[life.last + 1] = changes.get(life.last + 1, 0) - room
    alive = most = 0
    for position in sorted(changes):
        alive += changes[position]
        most = max(most, alive)
    return most
