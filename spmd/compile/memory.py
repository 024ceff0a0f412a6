"""Memory planning: temporary values share one arena.

A value lives from its first to its last use. If it is also used outside of a loop it lives through
that whole loop, as every round uses it: one that is read there until the end, one that is written
there (a row a round, perhaps) from the start. Values whose lives do not meet share bytes, and a
kernel may write its result over an operand that dies there, if it reads each element only where it
writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from spmd.compile.lanes import Lanes, choose_lanes, rounded
from spmd.compile.lower.inplace import read_in_place
from spmd.compile.lower.schedule import (
    TEMP,
    Buffer,
    Copy,
    Launch,
    Loop,
    Parallel,
    Ref,
    Step,
    While,
    accesses,
    blocks,
)


@dataclass(slots=True)
class Life:
    """When a buffer is in use, in positions of the walk; and the loops around all its uses."""

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
    lanes: Lanes = field(default_factory=Lanes)
    lane_bytes: dict[int, int] = field(default_factory=dict)

    def lane_stride(self, buffer: Buffer) -> int:
        """The distance between a temporary's places in two lanes; 0 if it has just one."""
        root = self.lanes.roots.get(buffer.owner)
        return 0 if root is None else self.lane_bytes[root]


def plan_memory(steps: Sequence[Step], threads: int = 1) -> Plan:
    """Place all temporaries of a program whose parallel loops may use some threads."""
    plan = Plan(lanes=choose_lanes(steps, threads))
    uses: Uses = {}
    ends: dict[int, int] = {}
    _walk(steps, (), uses, ends, plan.steps)
    plan.lives = {buffer: _life(buffer, places, ends) for buffer, places in uses.items()}
    temps = [b for b in plan.lives if b.kind == TEMP]
    roots = plan.lanes.roots
    kept: dict[int | None, list[Buffer]] = {None: []}
    for buffer in temps:
        kept.setdefault(roots.get(buffer.owner), []).append(buffer)
    shared = kept.pop(None)
    # All that a lane keeps is one region, laid out alike in each: the lanes are in step nowhere.
    regions = {root: _region(plan, own) for root, own in kept.items() if root is not None}
    plan.arena = _place(plan, [*shared, *regions.values()])
    for root, region in regions.items():
        start = plan.offsets.pop(region)
        plan.lane_bytes[root] = region.nbytes // plan.lanes.count
        for buffer in kept[root]:
            plan.offsets[buffer] += start
        del plan.lives[region]
    return plan


def _region(plan: Plan, buffers: Sequence[Buffer]) -> Buffer:
    """Place what a parallel loop keeps; a buffer for all lanes of it, in use with any of them."""
    region = Buffer(TEMP, plan.lanes.count * _place(plan, buffers), -1)
    lives = [plan.lives[b] for b in buffers]
    plan.lives[region] = Life(min(x.first for x in lives), max(x.last for x in lives), ())
    return region


def _place(plan: Plan, buffers: Sequence[Buffer]) -> int:
    """Give buffers their offsets; the bytes that they take in all."""
    placed: list[Buffer] = []
    total = 0
    for buffer in sorted(buffers, key=lambda b: plan.lives[b].first):
        life = plan.lives[buffer]
        placed = [b for b in placed if plan.lives[b].last >= life.first]
        heir = _dying_operand(plan, buffer, placed)
        if heir is not None:
            placed.remove(heir)
            plan.offsets[buffer] = plan.offsets[heir]
        else:
            plan.offsets[buffer] = _gap(plan, placed, rounded(buffer.nbytes))
        placed.append(buffer)
        total = max(total, plan.offsets[buffer] + rounded(buffer.nbytes))
    return total


def _gap(plan: Plan, placed: Sequence[Buffer], nbytes: int) -> int:
    """The smallest hole between placed buffers that is large enough; else the end."""
    spans = sorted((plan.offsets[b], plan.offsets[b] + rounded(b.nbytes)) for b in placed)
    best: tuple[int, int] | None = None
    free = 0
    for start, end in spans:
        if start - free >= nbytes and (best is None or start - free < best[0]):
            best = (start - free, free)
        free = max(free, end)
    return best[1] if best is not None else free


# ---- lives -------------------------------------------------------------------------------------


# Of each buffer, the positions of the steps that use it, with the loops around each.
Uses = dict[Buffer, list[tuple[int, tuple[int, ...]]]]


def _walk(
    steps: Sequence[Step],
    loops: tuple[int, ...],
    uses: Uses,
    ends: dict[int, int],
    seen: list[Step],
) -> None:
    """Note all uses in order; `ends[loop]` becomes the position where the loop ends."""
    for step in steps:
        position = len(seen)
        seen.append(step)
        is_loop = isinstance(step, Loop | Parallel | While)
        inside = (*loops, position) if is_loop else loops
        # What a loop itself reads, it reads in every round.
        for ref, _ in accesses(step):
            uses.setdefault(ref.buffer, []).append((position, inside))
        for block in blocks(step):
            _walk(block, inside, uses, ends, seen)
        if is_loop:
            ends[position] = len(seen)
            seen.append(step)


def _life(
    buffer: Buffer, places: Sequence[tuple[int, tuple[int, ...]]], ends: dict[int, int]
) -> Life:
    # Inputs, outputs and constants are there before and after every loop.
    home = _common([loops for _, loops in places]) if buffer.kind == TEMP else ()
    outer = [loops[len(home)] if len(loops) > len(home) else None for _, loops in places]
    spans = [
        (at, at) if loop is None else (loop, ends[loop])
        for (at, _), loop in zip(places, outer, strict=True)
    ]
    return Life(min(a for a, _ in spans), max(b for _, b in spans), home)


def _common(paths: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The loops that all paths start with."""
    shortest, longest = min(paths), max(paths)
    same = 0
    while same < min(len(shortest), len(longest)) and shortest[same] == longest[same]:
        same += 1
    return shortest[:same]


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
