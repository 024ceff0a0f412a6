"""Kernel batches: neighbouring kernels that do not depend on each other become one step.

A kernel that takes a microsecond is too short to share out over threads, and sixty of them in a row
leave all but one thread idle. Together they are one job. Whether two kernels depend on each other
is read from the addresses that the memory plan gave them: their memory overlaps, and one writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from spmd.base.record import record
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.kernel.ir import Kernel
from spmd.compile.lower.steps import Launch, Step
from spmd.compile.native.program.steps import BatchStep, KernelStep, Slot
from spmd.compile.native.program.steps import Step as NativeStep

# A batch's members are compared pairwise.
MOST_MEMBERS = 128


@record
class MemoryAccess:
    """Bytes of a base that a kernel reads or writes; they move with loops by `strides`."""

    base: int
    first: int
    end: int
    strides: tuple[tuple[int, int], ...]
    writes: bool

    def conflicts_with(self, other: MemoryAccess) -> bool:
        """Whether the order of the two touches could matter."""
        if self.base != other.base or not (self.writes or other.writes):
            return False
        if self.strides != other.strides:
            return True
        return self.first < other.end and other.first < self.end


def accesses_of(
    step: Launch, slots: Sequence[Slot], aliases: Mapping[int, int]
) -> list[MemoryAccess]:
    """A kernel's memory accesses. `aliases` maps bases to others that may be the same memory."""
    find = aliases.get
    return [
        MemoryAccess(
            find(slot.base, slot.base), slot.offset, slot.offset + nbytes, slot.strides, writes
        )
        for (nbytes, writes), slot in zip(_extents(step.kernel), slots, strict=True)
    ]


@lru_cache(maxsize=1024)
def _extents(kernel: Kernel) -> tuple[tuple[int, bool], ...]:
    """The bytes of each argument, and whether the kernel writes it; layers share their kernels."""
    return tuple([(arg.size * itemsize(arg.dtype), arg.role != "in") for arg in kernel.args])


def join(
    steps: Sequence[tuple[Step, Sequence[NativeStep]]], aliases: Mapping[int, int]
) -> list[NativeStep]:
    """Native steps in their order, with runs of independent kernels as batches."""
    made: list[NativeStep] = []
    members: list[KernelStep] = []
    touched: dict[int, list[MemoryAccess]] = {}  # by base: touches of different bases never meet

    def close() -> None:
        made.extend(members if len(members) == 1 else [BatchStep(tuple(members))] * bool(members))
        members.clear()
        touched.clear()

    for step, native in steps:
        if not isinstance(step, Launch):
            close()
            made.extend(native)
            continue
        (kernel,) = native
        assert isinstance(kernel, KernelStep)
        mine = accesses_of(step, kernel.slots, aliases)
        if len(members) == MOST_MEMBERS or any(
            a.conflicts_with(b) for a in mine for b in touched.get(a.base, ())
        ):
            close()
        members.append(kernel)
        for touch in mine:
            touched.setdefault(touch.base, []).append(touch)
    close()
    return made
