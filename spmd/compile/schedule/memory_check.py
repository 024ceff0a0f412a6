"""The law of a memory plan: what a step reads is what was written there for it.

The one idea: the steps are walked in order, the bodies of loops twice, and each byte of memory
knows whose value it has. A step that reads a buffer over which another was written is an error. The
plan is made from lives; this knows nothing of them. `SPMD_CHECK=1` checks each program that is
compiled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.base.errors import InternalError
from spmd.compile.lower.steps import Branch, Buffer, Schedule, Step, While, accesses, blocks
from spmd.compile.native.program.steps import levels
from spmd.compile.schedule.memory_plan import Plan, overwritable

# A memory: an arena with its homes, or the buffer of an argument, a result, a constant.
Space = Any


def check_memory(name: str, schedule: Schedule, plan: Plan, takes: Mapping[int, int]) -> None:
    """Raise an InternalError that names two steps, if one reads what the other wrote over.

    `takes` says which results are written over donated arguments.
    """
    _Walk(name, schedule, plan, takes).run(schedule.steps)


class _Space:
    """The values in one memory: ranges that do not overlap, in order, with their buffers."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, Buffer]] = []

    def copy(self) -> _Space:
        """The same values, which change apart from these."""
        made = _Space()
        made._starts, made._ranges = self._starts[:], self._ranges[:]
        return made

    def write(self, start: int, end: int, buffer: Buffer) -> list[Buffer]:
        """A buffer gets a range; gives those that it is written over."""
        first = bisect_right(self._starts, start)
        if first and self._ranges[first - 1][1] > start:
            first -= 1
        last = first
        while last < len(self._ranges) and self._ranges[last][0] < end:
            last += 1
        gone = [each for _, _, each in self._ranges[first:last] if each is not buffer]
        self._ranges[first:last] = [(start, end, buffer)]
        self._starts[first:last] = [start]
        return gone


class _Walk:
    """The walk over the steps of a program; `lost` are buffers that were written over, and how."""

    def __init__(self, name: str, schedule: Schedule, plan: Plan, takes: Mapping[int, int]):
        self._name, self._plan = name, plan
        self._spaces: dict[Space, _Space] = {}
        over = {schedule.outputs[k]: schedule.inputs[i] for k, i in takes.items()}
        self._over: dict[Buffer, Buffer] = over
        self._lost: dict[Buffer, tuple[Step, Buffer]] = {}
        for place in schedule.inputs:
            self._write(place)

    def run(self, steps: Sequence[Step]) -> None:
        """Walk a block."""
        for step in steps:
            match step:
                case While():
                    for block in (step.test, step.body) * 2:
                        self.run(block)
                    self.run(step.test)
                    self._accessed(step)
                case Branch():
                    self._accessed(step)
                    self._branches(step)
                case _:
                    self._accessed(step)
                    for block in blocks(step) * (2 if levels(step) else 1):
                        self.run(block)

    def _branches(self, step: Branch[Any, Step]) -> None:
        """Each branch begins as the others, and what is lost in one is lost behind all."""
        before, after = self._lost, dict[Buffer, tuple[Step, Buffer]]()
        spaces = self._spaces
        for branch in step.branches:
            self._lost = dict(before)
            self._spaces = {space: found.copy() for space, found in spaces.items()}
            self.run(branch)
            after |= self._lost
        self._lost = after

    def _accessed(self, step: Step) -> None:
        found = accesses(step)
        for ref, writes in found:
            if not writes and ref.buffer in self._lost:
                raise self._error(step, ref.buffer, *self._lost[ref.buffer])
        reads = {ref.buffer for ref, writes in found if not writes}
        for buffer in [ref.buffer for ref, writes in found if writes]:
            for other in self._write(buffer):
                self._lost[other] = step, buffer
                if other in reads and other not in overwritable(step, buffer):
                    raise self._error(step, other, step, buffer)

    def _error(self, step: Step, lost: Buffer, other: Step, by: Buffer) -> InternalError:
        return InternalError(
            f"{self._name}: {_described(step)} reads {lost} ({lost.nbytes} bytes), over which "
            f"{_described(other)} wrote {by}: the memory plan is wrong"
        )

    def _write(self, buffer: Buffer) -> list[Buffer]:
        """A buffer gets its memory; those that it is written over."""
        self._lost.pop(buffer, None)
        gone: list[Buffer] = []
        for space, start in self._places(buffer) if buffer.nbytes else ():
            found = self._spaces.setdefault(space, _Space())
            gone += found.write(start, start + buffer.nbytes, buffer)
        return gone

    def _places(self, buffer: Buffer) -> list[tuple[Space, int]]:
        """The memory of a buffer, and where in it; one place for each lane."""
        if buffer not in self._plan.offsets:
            return [(self._over.get(buffer, buffer), 0)]
        into = self._plan.aliased_into.get(buffer)
        space = ("arena", buffer.homes) if into is None else self._over.get(into, into)
        first, stride = self._plan.offsets[buffer], self._plan.lane_stride(buffer)
        lanes = self._plan.lanes.count if stride else 1
        return [(space, first + lane * stride) for lane in range(lanes)]


def _described(step: Step) -> str:
    """A step as errors name it."""
    found = getattr(step, "name", "") or type(step).__name__.lower()
    return f"{found} {getattr(step, 'source', '')}".rstrip()
