"""Memory planning: temporary values share one arena.

A value lives from its first to its last use. If it is also used outside of a loop it lives through
that whole loop, as every iteration uses it: one that is read there until the end, one that is
written there (a row an iteration, perhaps) from the start. Values whose lives do not meet share
bytes, and a kernel may write its result over an operand that dies there, if it reads each element
only where it writes it.

A value that several devices share lies in the arena of its home. Devices read it on threads of
their own, until they all meet: its life ends there.

The memory of a result is free until the result is first written: until then it is shared by large
temporaries. So a value that becomes a result in its last step (a gradient and its update) needs no
memory of its own.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Sequence

from spmd.base.record import field, record
from spmd.compile.kernel.ir import Kernel
from spmd.compile.lower.in_place import read_in_place
from spmd.compile.lower.steps import (
    TEMP,
    Buffer,
    Copy,
    Exchange,
    Homes,
    Host,
    Launch,
    Multiply,
    Once,
    RankExchange,
    Ref,
    Schedule,
    Step,
    accesses,
    blocks,
)
from spmd.compile.native.program.steps import levels
from spmd.compile.schedule.thread_plan import Lanes, choose_lanes, rounded

# Smaller results share blocks of coarser alignment, and smaller temporaries don't matter.
SHARED_BYTES = 8192
# The most results that are tried as memory for a temporary: more make planning slower, not plans
# better.
_MOST_ASKED = 8


@record(frozen=False)
class Life:
    """The positions of the walk between which a buffer is in use; the loops around all its uses."""

    first: int
    last: int
    depth: tuple[int, ...]


@record(frozen=False)
class Plan:
    """The place of each temporary, the size of the arena, and every buffer's life.

    A temporary lies in the arena, or in the output that it is `aliased_into`.
    """

    offsets: dict[Buffer, int] = field(default_factory=dict)
    arena: int = 0
    lives: dict[Buffer, Life] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    lanes: Lanes = field(default_factory=Lanes)
    lane_bytes: dict[int, int] = field(default_factory=dict)
    aliased_into: dict[Buffer, Buffer] = field(default_factory=dict)

    def shared_homes(self) -> list[Homes]:
        """The homes of temporaries in arenas that are not those of each device, in order."""
        found = {b.homes for b in self.offsets if b not in self.aliased_into}
        return sorted(homes for homes in found if homes is not None)

    def arenas(self, devices: int) -> tuple[int, ...]:
        """The size of each device's arena: where one is home to nothing, it may be smaller."""
        own = [(b, at + b.nbytes) for b, at in self.offsets.items() if b not in self.aliased_into]
        if not self.shared_homes():
            return (self.arena,) * devices
        return tuple(
            max((end for b, end in own if b.homes is None or b.homes[d] == d), default=0)
            for d in range(devices)
        )

    def lane_stride(self, buffer: Buffer) -> int:
        """The distance between a temporary's places in two lanes; 0 if it has just one."""
        root = self.lanes.roots.get(buffer.owner)
        return 0 if root is None else self.lane_bytes[root]


def plan_memory(steps: Sequence[Step], threads: int = 1) -> Plan:
    """Place all temporaries of some steps, whose parallel loops may use some threads."""
    return place_temporaries(plan_lives(steps, threads))


def plan_program(schedule: Schedule, donated: Sequence[bool], threads: int = 1) -> Plan:
    """Place all temporaries of a program; outputs that may take donated inputs share nothing."""
    plan = plan_lives(schedule.steps, threads)
    taken = takes(schedule, plan, donated)
    return place_temporaries(plan, [b for k, b in enumerate(schedule.outputs) if k not in taken])


def plan_lives(steps: Sequence[Step], threads: int = 1) -> Plan:
    """The life of each buffer; nothing has a place yet."""
    plan = Plan(lanes=choose_lanes(steps, threads))
    uses: Uses = {}
    ends: dict[int, int] = {}
    shared: dict[Buffer, int] = {}
    _walk(steps, (), uses, ends, plan.steps, shared)
    plan.lives = {buffer: _life(buffer, places, ends) for buffer, places in uses.items()}
    if shared:
        meetings = [at for at, step in enumerate(plan.steps) if isinstance(step, _MEETINGS)]
        for buffer, last in shared.items():
            later = bisect_left(meetings, last)
            end = meetings[later] if later < len(meetings) else len(plan.steps) - 1
            plan.lives[buffer].last = max(plan.lives[buffer].last, end)
    return plan


def place_temporaries(plan: Plan, shared_outputs: Sequence[Buffer] = ()) -> Plan:
    """Give all temporaries of a plan their places; gives the plan.

    `shared_outputs` are outputs in whose memory no input is read.
    """
    temps = [b for b in plan.lives if b.kind == TEMP]
    roots = plan.lanes.roots
    kept: dict[int | None, list[Buffer]] = {None: []}
    for buffer in temps:
        kept.setdefault(roots.get(buffer.owner), []).append(buffer)
    shared = kept.pop(None)
    # All that a lane keeps is one region, laid out alike in each: the lanes are in step nowhere.
    regions = {root: _region(plan, own) for root, own in kept.items() if root is not None}
    plan.arena = _place(plan, [*shared, *regions.values()], _SharedOutputs(plan, shared_outputs))
    for root, region in regions.items():
        start = plan.offsets.pop(region)
        plan.lane_bytes[root] = region.nbytes // plan.lanes.count
        output = plan.aliased_into.pop(region, None)
        for buffer in kept[root]:
            plan.offsets[buffer] += start
            if output is not None:
                plan.aliased_into[buffer] = output
        del plan.lives[region]
    for buffer, output in plan.aliased_into.items():
        # From here on the output is in use when the temporary is.
        life = plan.lives[output]
        life.first = min(life.first, plan.lives[buffer].first)
    return plan


def _region(plan: Plan, buffers: Sequence[Buffer]) -> Buffer:
    """Place a parallel loop's temporaries; a buffer for all its lanes, in use with any of them."""
    region = Buffer(TEMP, plan.lanes.count * rounded(_place(plan, buffers)), -1)
    lives = [plan.lives[b] for b in buffers]
    plan.lives[region] = Life(min(x.first for x in lives), max(x.last for x in lives), ())
    return region


def _place(
    plan: Plan, buffers: Sequence[Buffer], shared_outputs: _SharedOutputs | None = None
) -> int:
    """Give buffers their offsets; the bytes that they take of the arena."""
    arena = Room()
    # The buffers that are placed now; and the end of each, also if its place went to an heir.
    placed: set[Buffer] = set()
    leaving: list[tuple[int, int, Buffer]] = []
    total = 0
    for number, buffer in enumerate(sorted(buffers, key=lambda b: plan.lives[b].first)):
        life = plan.lives[buffer]
        while leaving and leaving[0][0] < life.first:
            gone = heapq.heappop(leaving)[2]
            if gone in placed:
                placed.remove(gone)
                output = plan.aliased_into.get(gone)
                room = (
                    arena
                    if shared_outputs is None or output is None
                    else shared_outputs.rooms[output]
                )
                room.give(plan.offsets[gone], rounded(gone.nbytes))
        heir = _dying_operand(plan, buffer, placed)
        if heir is not None and heir in plan.aliased_into:
            assert shared_outputs is not None
            if not shared_outputs.can_share(plan.aliased_into[heir], buffer, plan.offsets[heir]):
                heir = None
        if heir is not None:
            placed.remove(heir)
            plan.offsets[buffer] = plan.offsets[heir]
            if heir in plan.aliased_into:
                plan.aliased_into[buffer] = plan.aliased_into[heir]
        elif shared_outputs is None or not shared_outputs.share_output(buffer):
            size = rounded(buffer.nbytes)
            plan.offsets[buffer] = arena.find(size)
            arena.take(plan.offsets[buffer], size)
        placed.add(buffer)
        heapq.heappush(leaving, (life.last, number, buffer))
        if buffer not in plan.aliased_into:
            total = max(total, plan.offsets[buffer] + buffer.nbytes)
    return total


class Room:
    """Memory in which places are taken and given back: the holes between those that are taken.

    >>> room = Room()
    >>> for offset in (0, 64, 128, 192): room.take(offset, 64)
    >>> room.give(64, 64)
    >>> room.give(128, 64)
    >>> room.find(64), room.find(192)
    (64, 256)
    """

    def __init__(self) -> None:
        self._end = 0  # behind it nothing is taken
        self._holes: list[tuple[int, int]] = []  # (size, start), in order
        self._starting: dict[int, int] = {}  # where the hole ends that starts here
        self._ending: dict[int, int] = {}

    def find(self, nbytes: int) -> int:
        """The start of the smallest hole that is large enough; else the end."""
        at = bisect_left(self._holes, (nbytes, 0))
        return self._holes[at][1] if at < len(self._holes) else self._end

    def take(self, start: int, nbytes: int) -> None:
        """Take the first bytes of a hole, or those at the end."""
        if start == self._end:
            self._end += nbytes
            return
        end = self._forget(start)
        if start + nbytes < end:
            self._note(start + nbytes, end)

    def give(self, start: int, nbytes: int) -> None:
        """Give back a range; it joins the holes beside it."""
        end = start + nbytes
        if end in self._starting:
            end = self._forget(end)
        if start in self._ending:
            start = self._ending[start]
            self._forget(start)
        if end == self._end:
            self._end = start
        else:
            self._note(start, end)

    def _note(self, start: int, end: int) -> None:
        self._starting[start], self._ending[end] = end, start
        insort(self._holes, (end - start, start))

    def _forget(self, start: int) -> int:
        end = self._starting.pop(start)
        del self._ending[end]
        del self._holes[bisect_left(self._holes, (end - start, start))]
        return end


class _SharedOutputs:
    """Outputs whose memory temporaries share until it is written."""

    def __init__(self, plan: Plan, outputs: Sequence[Buffer]):
        self._plan = plan
        large = [b for b in outputs if b in plan.lives and b.nbytes >= SHARED_BYTES]
        self._outputs = sorted(large, key=lambda b: b.nbytes)
        self._sizes = [b.nbytes for b in self._outputs]
        self.rooms = {output: Room() for output in self._outputs}

    def share_output(self, buffer: Buffer) -> bool:
        """Place a temporary in an output, if one has room while it lives."""
        if buffer.nbytes < SHARED_BYTES or not self._outputs:
            return False
        start = bisect_left(self._sizes, buffer.nbytes)
        fitting = self._outputs[start : start + _MOST_ASKED]
        # The output that is written when the temporary is read for the last time comes first.
        for output in (*self._written_last(buffer), *fitting):
            room = self.rooms[output]
            offset = room.find(rounded(buffer.nbytes))
            if offset + buffer.nbytes <= output.nbytes and self.can_share(output, buffer, offset):
                room.take(offset, rounded(buffer.nbytes))
                self._plan.aliased_into[buffer] = output
                self._plan.offsets[buffer] = offset
                return True
        return False

    def can_share(self, output: Buffer, buffer: Buffer, offset: int) -> bool:
        """Whether a temporary has left when the output is written, or is then written over."""
        last, first = self._plan.lives[buffer].last, self._plan.lives[output].first
        if buffer.homes != output.homes:
            return False
        if last != first:
            return last < first
        whole = offset == 0 and output.nbytes == buffer.nbytes
        return whole and buffer in overwritable(self._plan.steps[first], output)

    def _written_last(self, buffer: Buffer) -> Iterator[Buffer]:
        step = self._plan.steps[self._plan.lives[buffer].last]
        for ref, written in accesses(step):
            if written and ref.buffer in self.rooms:
                yield ref.buffer


# ---- lives -------------------------------------------------------------------------------------


# Of each buffer, the positions of the steps that use it, with the loops around each.
Uses = dict[Buffer, list[tuple[int, tuple[int, ...]]]]

# Steps that no device passes before all that are there have come.
_MEETINGS = (Exchange, Host, RankExchange, Once)


def _walk(
    steps: Sequence[Step],
    loops: tuple[int, ...],
    uses: Uses,
    ends: dict[int, int],
    seen: list[Step],
    shared: dict[Buffer, int],
    devices: tuple[int, ...] = (),
) -> None:
    """Note all uses in order; `ends[loop]` becomes the position where the loop ends.

    `shared` gets the last use of each buffer that several devices read on their own; steps inside
    of a `Once` are run by its `devices`.
    """
    for step in steps:
        position = len(seen)
        seen.append(step)
        is_loop = levels(step) > 0
        inside = (*loops, position) if is_loop else loops
        # The operands of a loop itself are read in every iteration.
        for ref, _ in accesses(step):
            uses.setdefault(ref.buffer, []).append((position, inside))
            homes = ref.buffer.homes
            if homes is not None and tuple(sorted(set(homes))) != devices:
                shared[ref.buffer] = position
        own = step.devices if isinstance(step, Once) else devices
        for block in blocks(step):
            _walk(block, inside, uses, ends, seen, shared, own)
        if is_loop:
            ends[position] = len(seen)
            seen.append(step)


def _life(
    buffer: Buffer, places: Sequence[tuple[int, tuple[int, ...]]], ends: dict[int, int]
) -> Life:
    if not any([loops for _, loops in places]):
        return Life(places[0][0], places[-1][0], ())  # places are in order
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


def _dying_operand(plan: Plan, buffer: Buffer, placed: Container[Buffer]) -> Buffer | None:
    """An operand of the step that makes `buffer`, whose place `buffer` may take."""
    life = plan.lives[buffer]
    step = plan.steps[life.first]
    for operand in overwritable(step, buffer):
        fits = operand.kind == TEMP and operand in placed and operand.nbytes == buffer.nbytes
        fits = fits and operand.homes == buffer.homes
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
            yield from _overwritable_refs(kernel, refs, buffer)
        case Multiply(product=product, refs=(a, b, *rest)):
            # The epilogue's first argument is the product itself, which is in no buffer.
            for operand in _overwritable_refs(product.epilogue, (None, *rest), buffer):
                if operand is not a.buffer and operand is not b.buffer:
                    yield operand


def _overwritable_refs(
    kernel: Kernel, refs: Sequence[Ref | None], buffer: Buffer
) -> Iterator[Buffer]:
    """The operands of a kernel over which it may write its result `buffer`."""
    places: dict[Buffer, set[int]] = {}
    for k, ref in enumerate(refs):
        if ref is not None:
            places.setdefault(ref.buffer, set()).add(k)
    for k in sorted(places.get(buffer, ())):
        ref = refs[k]
        if ref is None or kernel.args[k].role != "out" or ref.offset:
            continue
        safe = read_in_place(kernel, k)
        for other in sorted(safe):
            source = refs[other]
            if source is None:
                continue
            if source == Ref(source.buffer) and places[source.buffer] <= safe:
                yield source.buffer


# ---- donated inputs ----------------------------------------------------------------------------


def takes(schedule: Schedule, plan: Plan, donated: Sequence[bool]) -> dict[int, int]:
    """For outputs that may be written over a donated input: which one."""
    free = [k for k, given in enumerate(donated) if given]
    forwarded = {r for r in schedule.results if isinstance(r, int)}
    found: dict[int, int] = {}
    for k, out in enumerate(schedule.outputs):
        for candidate in free:
            place = schedule.inputs[candidate]
            if candidate in forwarded or place.nbytes != out.nbytes or not out.nbytes:
                continue
            if _read_before(place, out, plan):
                found[k] = candidate
                free.remove(candidate)
                break
    return found


def _read_before(place: Buffer, out: Buffer, plan: Plan) -> bool:
    """Whether an input is read for the last time before (or while) an output is first written."""
    reading, writing = plan.lives.get(place), plan.lives.get(out)
    if writing is None:
        return False
    if reading is None or reading.last < writing.first:
        return True
    return reading.last == writing.first and place in overwritable(plan.steps[writing.first], out)
