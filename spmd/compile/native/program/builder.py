"""The builder of native programs: steps over buffers become steps over slots, on any platform.

The one idea: places, loops, branches, callbacks and collectives are alike wherever kernels run. A
platform says what a compiled step becomes (`calls`): on the CPU a call of machine code, on a GPU a
launch.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.base.record import replace
from spmd.compile.lower.steps import (
    Buffer,
    Compiled,
    Copy,
    Exchange,
    Host,
    Loop,
    Parallel,
    Ref,
    Schedule,
    Step,
)
from spmd.compile.native.program.steps import LANE, Program, Slot, with_blocks, with_places
from spmd.compile.native.program.steps import Step as NativeStep
from spmd.compile.schedule.memory_plan import Plan


class ProgramBuilder:
    """Turns the steps of a schedule with planned memory into a program.

    A frame holds the arena, then inputs, outputs, the arenas in which values lie that devices
    share, and constants.
    """

    def __init__(self, schedule: Schedule, plan: Plan):
        self.schedule, self.plan = schedule, plan
        consts = [buffer for buffer, _ in schedule.consts]
        shared = plan.shared_homes()
        first_shared = 1 + len(schedule.inputs) + len(schedule.outputs)
        self.shared = {homes: k for k, homes in enumerate(shared, first_shared)}
        self.named = (*schedule.inputs, *schedule.outputs, *shared, *consts)
        self.bases = {x: k for k, x in enumerate(self.named, 1) if isinstance(x, Buffer)}
        self.places: dict[Buffer, tuple[int, int, int]] = {}

    def calls(self, step: Compiled) -> Sequence[NativeStep]:
        """The native steps of a step that was compiled."""
        raise NotImplementedError(step)

    def program(self, devices: int) -> Program:
        """The whole, for a number of devices in lockstep."""
        steps = tuple(self.steps(self.schedule.steps))
        return Program(self.base_sizes(), steps, devices)

    def base_sizes(self) -> tuple[int, ...]:
        """The bytes of each base."""
        arena = self.plan.arena
        return arena, *(x.nbytes if isinstance(x, Buffer) else arena for x in self.named)

    # -- places --

    def slots(self, refs: Sequence[Ref]) -> tuple[Slot, ...]:
        """The places of refs in a frame."""
        return tuple([self.slot(ref) for ref in refs])

    def slot(self, ref: Ref) -> Slot:
        """The place of a ref in a frame."""
        found = self.places.get(ref.buffer)
        if found is None:
            found = self.places[ref.buffer] = self.place(ref.buffer)
        base, offset, lane = found
        strides = (*ref.strides, (LANE, lane)) if lane else ref.strides
        return Slot(base, offset + ref.offset, strides)

    def place(self, buffer: Buffer) -> tuple[int, int, int]:
        """Of a buffer, the base in which it lies, where, and the distance between its lanes."""
        base = self.bases.get(buffer)
        if base is not None:
            return base, 0, 0
        output = self.plan.aliased_into.get(buffer)
        if output is not None:
            base = self.bases[output]
        else:
            base = 0 if buffer.homes is None else self.shared[buffer.homes]
        return base, self.plan.offsets[buffer], self.plan.lane_stride(buffer)

    # -- steps --

    def steps(self, steps: Sequence[Step]) -> list[NativeStep]:
        """The native steps of a block, in order."""
        return [native for step in steps for native in self.step(step)]

    def step(self, step: Step) -> Sequence[NativeStep]:
        """The native steps of a step; none if it has nothing to do."""
        if isinstance(step, Compiled):
            return self.calls(step)
        match step:
            case Parallel():
                return (self.parallel(step),)
            case Exchange() if not step.rows * step.count:
                return ()
            case Host():
                step = replace(step, name=f"{step.name} {step.source}")
        placed = with_places(with_blocks(step, self.steps), self.slot)
        is_moved = isinstance(placed, Copy) and placed.target == placed.source
        return () if is_moved else (placed,)

    def parallel(self, step: Parallel[Step]) -> NativeStep:
        """A parallel loop: across lanes if the plan has any for it, else sequential."""
        body: tuple[NativeStep, ...] = tuple(self.steps(step.body))
        if step.number in self.plan.lanes.chosen:
            return Parallel(step.trips, body, step.number, self.plan.lanes.count)
        for trips in reversed(step.trips):
            body = (Loop(trips, body),)
        return body[0]
