"""A Program as native words: the table that the executor walks.

The one idea: a step is a run of 64-bit words, [opcode, words, id, ...], and nested blocks follow
their step in line, so the executor needs nothing but a pointer that moves forward. This file is
the only place that knows the layout together with `native/runtime/ir/execute.py`, which reads the
same constants. Everything that can be checked before running is checked here: this is the last stop
before unsafe code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.compile.native.llvm.compiler import Address
from spmd.compile.native.program import encode_collectives
from spmd.compile.native.program.byte_code import (
    BATCH,
    BATCH_FIELDS,
    BOX_FIELDS,
    CALLBACK,
    COLLECTIVE,
    COLLECTIVE_FIELDS,
    COND,
    COPY,
    FOR,
    HEAD,
    KERNEL,
    KERNEL_FIELDS,
    KINDS,
    ONCE,
    PARALLEL,
    RANKS,
    RANKS_FIELDS,
    SEGMENT,
    SEGMENT_FIELDS,
    WHILE,
)
from spmd.compile.native.program.encoded import Encoded
from spmd.compile.native.program.reduction_kernels import Reduction, reduce_kernels
from spmd.compile.native.program.run_layout import PARALLEL_PS, POOL
from spmd.compile.native.program.steps import (
    ASSUMED_TRIPS,
    LANE,
    BatchStep,
    Branch,
    Copy,
    Exchange,
    Host,
    KernelStep,
    Loop,
    Once,
    Parallel,
    Program,
    RankExchange,
    Slot,
    Step,
    While,
    walk,
)

# Memory traffic per byte of a collective, in picoseconds: one core streams about 20 GB/s.
_TRAFFIC_PS = 50
# Collectives that read and write more than this write past the caches, which saves them a third of
# their traffic and takes half the time. Smaller data may still be in a cache for the next step.
STREAM_FROM_BYTES = 8 << 20
# The cost of a step apart from its work, and the cost of a call into Python.
STEP_PS = 20_000
# Costs are cut off here, so that a word holds them: those of nested loops may be any number.
MOST_PS = 1 << 60
CALLBACK_PS = 5_000_000
# A thread takes so many trips of a parallel loop at a time that they last about this long.
_GRAIN_PS = 5_000_000
# A piece of a batch's step lasts about this long, if its units are not longer.
_PIECE_PS = 5_000_000
# No system maps memory below this.
_LEAST_ADDRESS = 1 << 16
# A run of steps shorter than this is not worth a marker of its own.
_SEGMENT_STEPS = 2

# The parts of the runtime that run steps; the core runs kernels and copies.
_OF_STEPS = {
    CALLBACK: "callback",
    FOR: "for",
    WHILE: "while",
    COND: "cond",
    SEGMENT: "segment",
    PARALLEL: "parallel",
    COLLECTIVE: "collective",
    BATCH: "batch",
    RANKS: "ranks",
    ONCE: "once",
}
# Steps whose work threads may share, not only that of steps inside.
_SHARED = (KERNEL, COPY, COLLECTIVE, SEGMENT, PARALLEL, BATCH)
# Steps in which devices meet each other, or Python.
_MEETINGS = (Exchange, Host, RankExchange, Once)

_INTEGER_BYTES = {"bool": 1, "uint8": 1, "int32": 4, "int64": 8, "uint32": 4}


class Encoder:
    """Turns the steps of one program into words, checking them on the way."""

    def __init__(self, program: Program, reduce_kernels: dict[Reduction, int]):
        """`reduce_kernels` gives the addresses of `needed_reductions`."""
        self._program = program
        self._reduce_kernels = reduce_kernels
        self._steps: list[Step] = []
        self._opcodes: set[int] = set()
        self._shared_ps = 0
        # Trip counts of the loops around the present step; None where only run time knows.
        self._trips: list[int | None] = []
        self._levels = 0
        # Lanes of the parallel loop around, 0 outside of one.
        self._lanes = 0
        # How many devices may run the present step.
        self._devices = program.devices
        self._max_args = 1

    def encode(self) -> Encoded:
        """All words of the program."""
        for nbytes in self._program.bases:
            if nbytes is not None and nbytes < 0:
                raise ValueError(f"a base of {nbytes} bytes")
        words, cost = self._block(self._program.steps)
        array = np.array(words, dtype=np.int64)
        return Encoded(
            words=array,
            steps=tuple(self._steps),
            levels=self._levels,
            max_args=self._max_args,
            cost_ps=cost,
            bases=len(self._program.bases),
            devices=self._program.devices,
            calls_python=CALLBACK in self._opcodes,
            is_open=any(map(_is_open, self._steps)),
            parts=self._parts(),
            places=_places(words, array),
        )

    # ---- blocks ------------------------------------------------------------------------------

    def _block(self, steps: Sequence[Step]) -> tuple[list[int], int]:
        """Words and cost (one device, in ps) of a step list."""
        words: list[int] = []
        total = 0
        for run, together in _segments(steps, self._devices):
            inner: list[int] = []
            cost = 0
            for step in run:
                step_words, step_cost = self._step(step)
                inner += step_words
                cost = min(cost + step_cost, MOST_PS)
            if together:
                length = HEAD + SEGMENT_FIELDS + len(inner)
                words += [SEGMENT, length, 0, cost]
                self._note(SEGMENT, cost)
            words += inner
            total = min(total + cost, MOST_PS)
        return words, total

    def _step(self, step: Step) -> tuple[list[int], int]:
        number = len(self._steps)
        self._steps.append(step)
        opcode, write = _WRITERS[type(step)]
        words, cost = write(self, step)
        is_whole = isinstance(step, KernelStep) and step.units * self._devices == 1
        self._note(opcode, 0 if is_whole else cost)
        return [opcode, HEAD + len(words), number, *words], min(cost + STEP_PS, MOST_PS)

    def _parts(self) -> tuple[str, ...]:
        found = [_OF_STEPS[code] for code in sorted(self._opcodes) if code in _OF_STEPS]
        # As much is shared natively, so the pool is there if it is ever asked for.
        is_shared = self._shared_ps * self._program.devices >= PARALLEL_PS
        return tuple(dict.fromkeys([*found, POOL] if is_shared else found))

    def _note(self, opcode: int, cost: int) -> None:
        """Note that there is such a step, and its part that could be shared."""
        self._opcodes.add(opcode)
        if opcode in _SHARED:
            self._shared_ps = max(self._shared_ps, cost)

    # ---- steps -------------------------------------------------------------------------------

    def _kernel(self, step: KernelStep) -> tuple[list[int], int]:
        if not step.address:
            raise ValueError(f"{step.name}: the address is null")
        if step.units < 0 or step.scratch < 0 or step.cost_ns < 0:
            raise ValueError(f"{step.name}: units, cost and scratch must not be negative: {step}")
        extents = step.extents or (0,) * len(step.slots)
        if len(extents) != len(step.slots):
            raise ValueError(
                f"{step.name}: {len(step.slots)} slots, but extents for {len(extents)}"
            )
        # After the slots come the scratch pointer and the context.
        self._max_args = max(self._max_args, len(step.slots) + 2)
        slots: list[int] = []
        for slot, extent in zip(step.slots, extents, strict=True):
            slots += self._slot(slot, extent, step.name)
        cost_ps = max(1, min(round(step.cost_ns * 1000), MOST_PS))
        sizes_at = HEAD + KERNEL_FIELDS + len(slots)
        fields = [step.address, step.units, cost_ps, len(step.slots), step.scratch, sizes_at]
        return [*fields, *slots, *step.sizes], cost_ps * step.units

    def _copy(self, step: Copy[Slot]) -> tuple[list[int], int]:
        if step.nbytes < 0:
            raise ValueError(f"copy of {step.nbytes} bytes")
        target = self._slot(step.target, step.nbytes, "copy target")
        source = self._slot(step.source, step.nbytes, "copy source")
        return [step.nbytes, *target, *source], step.nbytes * _TRAFFIC_PS

    def _callback(self, step: Host[Slot]) -> tuple[list[int], int]:
        views = (*step.inputs, *step.outputs)
        self._max_args = max(self._max_args, len(views))
        slots: list[int] = []
        for view in views:
            slots += self._slot(view.place, view.nbytes, step.name)
        return [len(views), int(step.together), *slots], CALLBACK_PS

    def _for(self, step: Loop[int | Slot, Step]) -> tuple[list[int], int]:
        slot: list[int] = []
        if isinstance(step.trips, Slot):
            width = _integer_bytes(step.trips_dtype)
            slot = self._slot(step.trips, width, "trip count")
            trips, most, assumed = -1, step.max_trips, ASSUMED_TRIPS
        else:
            trips = most = assumed = step.trips
            width = 0
        if most is not None and most < 0:
            raise ValueError(f"a loop of {most} trips")
        level = len(self._trips)
        body, cost = self._nested(step.body, most)
        bound = -1 if most is None else most
        fields = [level, trips, width, bound, int(step.reverse), len(body)]
        return [*fields, *slot, *body], cost * assumed

    def _parallel(self, step: Parallel[Step]) -> tuple[list[int], int]:
        if self._lanes or step.lanes < 1 or not step.trips or min(step.trips) < 0:
            raise ValueError(
                f"a parallel loop of {step.trips} trips on {step.lanes} lanes"
                + (" inside of another" if self._lanes else "")
            )
        if any(map(_meets, walk(step.body))):
            raise ValueError("a parallel loop cannot call Python or meet other devices")
        level, total = len(self._trips), math.prod(step.trips)
        self._lanes = step.lanes
        body, cost = self._nested(step.body, *step.trips)
        self._lanes = 0
        grain = max(1, min(_GRAIN_PS // max(cost, 1), total // (4 * step.lanes)))
        fields = [level, len(step.trips), total, step.lanes, grain, cost, len(body)]
        return [*fields, *step.trips, *body], cost * total

    def _batch(self, step: BatchStep) -> tuple[list[int], int]:
        encoded = [self._step(one) for one in step.steps]
        pieces: list[tuple[int, int, int]] = []
        position = 0
        for one, (words, _) in zip(step.steps, encoded, strict=True):
            grain = max(1, _PIECE_PS // max(1, round(one.cost_ns * 1000)))
            for first in range(0, one.units, grain):
                pieces.append((position, first, min(first + grain, one.units)))
            position += len(words)
        total = sum(cost for _, cost in encoded)
        steps_at = HEAD + BATCH_FIELDS + 3 * len(pieces)
        table = [word for at, *units in pieces for word in (steps_at + at, *units)]
        fields = [len(pieces), max(1, total // max(1, len(pieces)))]
        return [*fields, *table, *(w for words, _ in encoded for w in words)], total

    def _while(self, step: While[Slot, Step]) -> tuple[list[int], int]:
        level = len(self._trips)
        test, test_cost = self._nested(step.test, None)
        body, body_cost = self._nested(step.body, None)
        self._trips.append(None)
        predicate = self._slot(step.predicate, 1, "loop predicate")
        self._trips.pop()
        fields = [level, len(test), len(body)]
        return [*fields, *predicate, *test, *body], (test_cost + body_cost) * ASSUMED_TRIPS

    def _nested(self, steps: Sequence[Step], *trips: int | None) -> tuple[list[int], int]:
        level = len(self._trips)
        self._trips.extend(trips)
        self._levels = max(self._levels, len(self._trips))
        made = self._block(steps)
        del self._trips[level:]
        return made

    def _cond(self, step: Branch[Slot, Step]) -> tuple[list[int], int]:
        if not step.branches:
            raise ValueError("a conditional without branches")
        width = _integer_bytes(step.dtype)
        slot = self._slot(step.index, width, "branch index")
        blocks = [self._block(branch) for branch in step.branches]
        lengths = [len(words) for words, _ in blocks]
        body = [word for words, _ in blocks for word in words]
        fields = [width, len(blocks)]
        return [*fields, *slot, *lengths, *body], max(cost for _, cost in blocks)

    def _once(self, step: Once[Step]) -> tuple[list[int], int]:
        everyone = range(self._program.devices)
        if not step.devices or not set(step.devices) <= set(everyone):
            raise ValueError(f"steps for the devices {step.devices} of {len(everyone)}")
        before, self._devices = self._devices, len(step.devices)
        body, cost = self._block(step.body)
        self._devices = before
        chosen = [int(device in step.devices) for device in everyone]
        # The cost of a step is that of one device.
        return [len(body), *chosen, *body], cost * len(step.devices) // len(everyone)

    def _collective(self, step: Exchange[Slot]) -> tuple[list[int], int]:
        size = _check_collective(step, self._program.devices)
        if step.kind == "exchange":
            return self._exchange(step, size)
        given, made = _blocks_of(step)
        block = step.count * step.dtype.itemsize
        whole = block * step.rows
        source = self._slot(step.input, whole * given, step.name)
        target = self._slot(step.output, whole * made, step.name)
        reduces = step.kind in ("all_reduce", "reduce_scatter")
        kernel = self._reduce_kernels[_reduction(step)] if reduces else 0
        members = [device for group in step.groups for device in group]
        sources = [-1] * size
        for origin, goal in step.pairs:
            sources[goal] = origin
        members_at = HEAD + COLLECTIVE_FIELDS + len(source) + len(target)
        sources_at = members_at + len(members)
        passes = 2 if step.kind in ("permute", "broadcast") else size + 1
        cost = whole * passes * _TRAFFIC_PS // (size if step.is_one else 1)
        fields = [KINDS.index(step.kind), block, step.rows, size, len(step.groups), kernel]
        fields += [step.count, step.root, cost, members_at, sources_at, int(_streams(step))]
        fields.append(1 if step.is_one else size)
        share = cost * len(members) // self._program.devices
        return [*fields, *source, *target, *members, *sources], share

    def _exchange(self, step: Exchange[Slot], size: int) -> tuple[list[int], int]:
        whole = step.rows * step.count * step.dtype.itemsize
        boxes, pieces = encode_collectives.boxes(step.boxes, size, whole)
        read = encode_collectives.bytes_read(step.boxes)
        source = self._slot(step.input, read, step.name)
        target = self._slot(step.output, whole, step.name)
        members = [device for group in step.groups for device in group]
        members_at = HEAD + COLLECTIVE_FIELDS + len(source) + len(target)
        boxes_at = members_at + len(members)
        cost = whole * 2 * _TRAFFIC_PS
        streams = whole * sum(map(len, step.groups)) * 2 >= STREAM_FROM_BYTES
        count = len(boxes) // BOX_FIELDS
        fields = [KINDS.index(step.kind), whole, step.rows, size, len(step.groups), 0]
        fields += [pieces, count, cost, members_at, boxes_at, int(streams), size]
        share = cost * len(members) // self._program.devices
        return [*fields, *source, *target, *members, *boxes], share

    def _ranks(self, step: RankExchange[Slot]) -> tuple[list[int], int]:
        rounds, devices = step.rounds, self._program.devices
        if rounds.is_direct and step.input == step.output:
            raise ValueError(f"{step.name}: the others read the input while the output is written")
        given, got = encode_collectives.extents(rounds, devices)
        slots = self._slot(step.input, given, step.name)
        slots += self._slot(step.output, got, step.name)
        scratch = step.input if step.scratch is None else step.scratch
        slots += self._slot(scratch, rounds.scratch, step.name)
        call = encode_collectives.words_of(rounds.call.packed)
        constant = encode_collectives.words_of(rounds.constant)
        size = encode_collectives.group_size(step.state)
        actions = encode_collectives.actions(rounds, devices, size, self._reduce_kernels)
        call_at = HEAD + RANKS_FIELDS + len(slots)
        constant_at = call_at + len(call)
        actions_at = constant_at + len(constant)
        self._max_args = max(self._max_args, encode_collectives.most_operands(rounds))
        fields = [step.state, rounds.call.digest, call_at, actions_at, len(rounds.actions)]
        fields += [constant_at, step.label, rounds.nbytes]
        words = [*fields, *slots, *call, *constant, *actions]
        return words, rounds.nbytes * 4 * _TRAFFIC_PS

    # ---- slots -------------------------------------------------------------------------------

    def _slot(self, slot: Slot, extent: int, owner: str) -> list[int]:
        if not 0 <= slot.base < len(self._program.bases):
            raise ValueError(
                f"{owner}: base {slot.base} of a frame with {len(self._program.bases)} bases"
            )
        size = self._program.bases[slot.base]
        low, high, certain = slot.offset, slot.offset + extent, True
        if not slot.strides and low >= 0 and (size is None or high <= size):
            return [slot.base, low, 0]  # as outside of loops
        strides: list[int] = []
        for level, stride in slot.strides:
            if not (0 <= level < len(self._trips) or (level == LANE and self._lanes)):
                raise ValueError(
                    f"{owner}: strides over loop level {level} inside {len(self._trips)} loops"
                )
            strides += [level, stride]
            trips = self._lanes if level == LANE else self._trips[level]
            if trips is None:
                certain = False
            else:
                # A loop of no trips never reads the slot; its span is that of one trip.
                span = max(trips - 1, 0) * stride
                low += min(span, 0)
                high += max(span, 0)
        if low < 0 or (certain and size is not None and high > size):
            raise ValueError(
                f"{owner}: bytes [{low}, {high}) of base {slot.base}, which holds {size}"
            )
        return [slot.base, slot.offset, len(slot.strides), *strides]


# The opcode of each kind of step, and the functions that write its fields and its blocks.
_WRITERS: dict[type, tuple[int, Callable[[Encoder, Any], tuple[list[int], int]]]] = {
    KernelStep: (KERNEL, Encoder._kernel),
    Copy: (COPY, Encoder._copy),
    Host: (CALLBACK, Encoder._callback),
    Loop: (FOR, Encoder._for),
    Parallel: (PARALLEL, Encoder._parallel),
    BatchStep: (BATCH, Encoder._batch),
    While: (WHILE, Encoder._while),
    Branch: (COND, Encoder._cond),
    Once: (ONCE, Encoder._once),
    Exchange: (COLLECTIVE, Encoder._collective),
    RankExchange: (RANKS, Encoder._ranks),
}


# ---- helpers ---------------------------------------------------------------------------------


def _places(words: Sequence[int], array: np.ndarray) -> tuple[tuple[int, Address], ...]:
    """The words that are addresses of compiled code: few are large enough to be looked at."""
    large = np.flatnonzero(array >= _LEAST_ADDRESS).tolist()
    return tuple([(k, w) for k in large if type(w := words[k]) is Address])


def _segments(steps: Sequence[Step], devices: int) -> Sequence[tuple[Sequence[Step], bool]]:
    """Cut a step list into runs that every device can do on its own, and the steps between.

    The bool says whether the run may be done by each device as a whole, on a thread of its own.
    """
    if devices == 1:
        return [(steps, False)]
    runs: list[tuple[list[Step], bool]] = []
    for step in steps:
        alone = not any(map(_meets, walk([step])))
        if runs and runs[-1][1] == alone:
            runs[-1][0].append(step)
        else:
            runs.append(([step], alone))
    return [(run, alone and len(list(walk(run))) >= _SEGMENT_STEPS) for run, alone in runs]


def _meets(step: Step) -> bool:
    """Whether devices meet in a step."""
    return isinstance(step, _MEETINGS) or (isinstance(step, KernelStep) and step.meets)


def _integer_bytes(dtype: np.dtype) -> int:
    try:
        return _INTEGER_BYTES[np.dtype(dtype).name]
    except KeyError:
        known = ", ".join(_INTEGER_BYTES)
        raise ValueError(f"a count or an index is one of {known}, not {dtype}") from None


def _check_collective(step: Exchange[Slot], devices: int) -> int:
    """Check groups and parameters; give the group size."""
    sizes = {len(group) for group in step.groups}
    members = [device for group in step.groups for device in group]
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"{step.name}: groups must be equally large, not {step.groups}")
    if len(set(members)) != len(members) or not set(members) <= set(range(devices)):
        raise ValueError(
            f"{step.name}: groups must be disjoint sets of the {devices} devices: {step.groups}"
        )
    size = sizes.pop()
    if step.kind not in KINDS:
        raise ValueError(f"{step.name}: unknown kind {step.kind!r}; one of {', '.join(KINDS)}")
    if step.count < 0 or step.rows < 0 or not 0 <= step.root < size:
        raise ValueError(f"{step.name}: count, rows or root out of range: {step}")
    goals = [goal for _, goal in step.pairs]
    inside = all(0 <= end < size for pair in step.pairs for end in pair)
    if len(set(goals)) != len(goals) or not inside:
        raise ValueError(f"{step.name}: pairs must name each goal in [0, {size}) at most once")
    if step.is_one and step.kind not in ("all_reduce", "all_gather", "broadcast"):
        raise ValueError(f"{step.name}: a {step.kind} gives each member another result")
    if step.kind != "all_reduce" and step.input == step.output:
        raise ValueError(f"{step.name}: a {step.kind} cannot work in place")
    return size


def encoded(program: Program) -> Encoded:
    """A program in words; the kernels of its reductions are compiled."""
    needed = needed_reductions(program)
    return Encoder(program, reduce_kernels(needed) if needed else {}).encode()


def needed_reductions(program: Program) -> list[Reduction]:
    """The reductions for which the program needs kernels."""
    found: dict[Reduction, None] = {}
    for step in walk(program.steps):
        if isinstance(step, Exchange) and step.kind in ("all_reduce", "reduce_scatter"):
            found[_reduction(step)] = None
        if isinstance(step, RankExchange):
            found |= dict.fromkeys(encode_collectives.reductions(step.rounds))
    return list(found)


def _reduction(step: Exchange[Slot]) -> Reduction:
    return step.op or "", step.dtype.name, step.dtype.name, _streams(step)


def _blocks_of(step: Exchange[Slot]) -> tuple[int, int]:
    """The number of blocks a row of the input has, and one of the output."""
    size = len(step.groups[0])
    scatters, gathers = ("reduce_scatter", "all_to_all"), ("all_gather", "all_to_all")
    return size if step.kind in scatters else 1, size if step.kind in gathers else 1


def _streams(step: Exchange[Slot]) -> bool:
    """Whether a collective moves more than stays in the caches."""
    nbytes = step.rows * step.count * step.dtype.itemsize * sum(map(len, step.groups))
    return nbytes * sum(_blocks_of(step)) >= STREAM_FROM_BYTES


def _is_open(step: Step) -> bool:
    """Whether a step may take any time: it waits for others, or loops until a condition."""
    if isinstance(step, Loop):
        return isinstance(step.trips, Slot)
    return isinstance(step, While | RankExchange) or (isinstance(step, KernelStep) and step.is_open)
