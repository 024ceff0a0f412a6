"""Memory planning: temporary values share one arena.

A value lives from its first write to its last use; a value used inside a loop that it was made
outside of lives until the loop ends. Values whose lives do not meet share bytes, and a kernel may
write its result over an operand that dies there, if it reads each element only where it writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from spmd.compile.lower.inplace import read_in_place
from spmd.compile.lower.schedule import (
    TEMP,
    Buffer,
    Copy,
    Launch,
    Loop,
    Ref,
    Step,
    While,
    accesses,
    blocks,
)

ALIGNMENT = 64


@dataclass(slots=True)
class Life:
    """When a buffer is in use, in positions of the walk over all steps."""

    first: int
    last: int
    depth: tuple[int, ...]


@dataclass(slots=True)
class Plan:
    """Where each temporary lies, how large the arena is, and every buffer's life."""

    offsets: dict[Buffer, int] = field(default_factory=dict)
    arena: int = 0
    lives: dict[Buffer, Life] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


def plan_memory(steps: Sequence[Step]) -> Plan:
    """Place all temporaries of a program."""
    plan = Plan()
    _measure(steps, (), {}, plan)
    temps = [b for b in plan.lives if b.kind == TEMP]
    placed: list[Buffer] = []
    for buffer in sorted(temps, key=lambda b: plan.lives[b].first):
        life = plan.lives[buffer]
        placed = [b for b in placed if plan.lives[b].last >= life.first]
        heir = _dying_operand(plan, buffer, placed)
        if heir is not None:
            placed.remove(heir)
            plan.offsets[buffer] = plan.offsets[heir]
        else:
            plan.offsets[buffer] = _gap(plan, placed, _rounded(buffer.nbytes))
        placed.append(buffer)
        plan.arena = max(plan.arena, plan.offsets[buffer] + _rounded(buffer.nbytes))
    return plan


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def _gap(plan: Plan, placed: Sequence[Buffer], nbytes: int) -> int:
    """The smallest hole between placed buffers that is large enough; else the end."""
    spans = sorted((plan.offsets[b], plan.offsets[b] + _rounded(b.nbytes)) for b in placed)
    best: tuple[int, int] | None = None
    free = 0
    for start, end in spans:
        if start - free >= nbytes and (best is None or start - free < best[0]):
            best = (start - free, free)
        free = max(free, end)
    return best[1] if best is not None else free


# ---- lives -------------------------------------------------------------------------------------


def _measure(
    steps: Sequence[Step], loops: tuple[int, ...], ends: dict[int, list[Life]], plan: Plan
) -> None:
    """Walk the steps in order; `ends[loop]` collects lives that reach to the loop's end."""
    for step in steps:
        position = len(plan.steps)
        plan.steps.append(step)
        is_loop = isinstance(step, Loop | While)
        inside = (*loops, position) if is_loop else loops
        if is_loop:
            ends[position] = []
        # What a loop itself reads, it reads in every round.
        for ref, _ in accesses(step):
            _use(ref.buffer, position, inside, ends, plan)
        for block in blocks(step):
            _measure(block, inside, ends, plan)
        if is_loop:
            for life in ends.pop(position):
                life.last = max(life.last, len(plan.steps))
            plan.steps.append(step)


def _use(
    buffer: Buffer, position: int, loops: tuple[int, ...], ends: dict[int, list[Life]], plan: Plan
) -> None:
    life = plan.lives.get(buffer)
    if life is None:
        plan.lives[buffer] = Life(position, position, loops)
        return
    life.last = max(life.last, position)
    if len(loops) > len(life.depth) and loops[: len(life.depth)] == life.depth:
        ends[loops[len(life.depth)]].append(life)


# ---- writing over an operand -------------------------------------------------------------------


def _dying_operand(plan: Plan, buffer: Buffer, placed: Sequence[Buffer]) -> Buffer | None:
    """An operand of the step that makes `buffer`, whose place `buffer` may take."""
    life = plan.lives[buffer]
    step = plan.steps[life.first]
    for operand in overwritable(step, buffer):
        fits = operand.kind == TEMP and operand in placed and operand.nbytes == buffer.nbytes
        dying = plan.lives[operand].last == life.first
        if fits and dying and plan.lives[operand].depth == life.depth:
            return operand
    return None


def overwritable(step: Step, buffer: Buffer) -> Iterator[Buffer]:
    """The operands of a step over which it may write its result `buffer`."""
    match step:
        case Copy(target=target, source=source):
            if target.buffer is buffer and target.offset == source.offset == 0:
                yield source.buffer
        case Launch(kernel=kernel, refs=refs):
            for k, ref in enumerate(refs):
                if ref.buffer is not buffer or kernel.args[k].role != "out" or ref.offset:
                    continue
                safe = set(read_in_place(kernel, k))
                for other in sorted(safe):
                    source = refs[other]
                    everywhere = {n for n, r in enumerate(refs) if r.buffer is source.buffer}
                    if source == Ref(source.buffer) and everywhere <= safe:
                        yield source.buffer
