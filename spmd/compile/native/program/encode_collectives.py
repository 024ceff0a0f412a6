"""The words of the parts of collectives: rounds between processes, boxes between local devices.

See `native/runtime/ir/rank_collectives.py` and `local_collectives.py`.

A place becomes two words: the number of a memory in the table that the runtime keeps for a step
(inputs of all devices, their outputs, scratch, the constant, this rank's coming slot, the slots of
all ranks), and an offset.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from spmd.compile.native.program.byte_code import BOX_LOOPS
from spmd.compile.native.program.reduction_kernels import Reduction
from spmd.compile.native.program.steps import Box
from spmd.transport.shm import layout as shm_layout
from spmd.transport.shm import native_state
from spmd.transport.shm.plan import (
    Barrier,
    Clear,
    Copy,
    ExchangePlan,
    Memory,
    Place,
    Publish,
    Read,
    Reduce,
)
from spmd.transport.strided import Strided

# [kind, words, ...]
MEET, COPY, CLEAR, REDUCE, SHOW, READ = range(6)
# first / target, source, width, rows, strides / target, bytes / kernel, count, numbers of sources
# and of targets, then their places / count, places / target, rank and what it shows, offset, width,
# rows, strides
MEET_WORDS, COPY_WORDS, CLEAR_WORDS, REDUCE_WORDS, SHOW_WORDS, READ_WORDS = 3, 10, 5, 6, 3, 11

# Memories behind the inputs and outputs of the devices.
SCRATCH, CONSTANT, NEXT, FIRST_SLOT = range(4)


def reductions(rounds: ExchangePlan) -> Iterator[Reduction]:
    """The reductions that some rounds need kernels for."""
    for action in rounds.actions:
        if isinstance(action, Reduce):
            yield _reduction(action)


def _reduction(action: Reduce) -> Reduction:
    return action.op.value, action.dtype.name, action.result.name, False


def group_size(state: int) -> int:
    """The number of ranks of a group, by the address of its native state."""
    return ctypes.c_int64.from_address(state + 8 * native_state.SIZE).value


def most_operands(rounds: ExchangePlan) -> int:
    """The largest number of operands of one reduction."""
    found = [len(a.sources) + len(a.targets) for a in rounds.actions if isinstance(a, Reduce)]
    return max(found, default=1)


def words_of(data: bytes) -> list[int]:
    """Bytes as words, the last filled up with zeros."""
    return np.frombuffer(data + bytes(-len(data) % 8), np.int64).tolist()


def actions(
    rounds: ExchangePlan, devices: int, size: int, kernels: Mapping[Reduction, int]
) -> list[int]:
    """The words of all actions."""
    words: list[int] = []

    def place(where: Place) -> list[int]:
        first = 2 * devices
        number = {
            Memory.INPUT: where.index,
            Memory.OUTPUT: devices + where.index,
            Memory.SCRATCH: first + SCRATCH,
            Memory.CONSTANT: first + CONSTANT,
            Memory.NEXT: first + NEXT,
            Memory.SLOT: first + FIRST_SLOT + where.index,
        }[where.memory]
        devices_or_ranks = size if where.memory == Memory.SLOT else devices
        if not 0 <= where.index < devices_or_ranks or where.offset < 0:
            raise ValueError(f"{rounds.call}: no {where}")
        return [number, where.offset]

    for action in rounds.actions:
        match action:
            case Barrier(first=first):
                words += [MEET, MEET_WORDS, int(first)]
            case Copy():
                words += [COPY, COPY_WORDS, *place(action.target), *place(action.source)]
                words += [action.width, action.rows, action.target_stride, action.source_stride]
            case Clear():
                words += [CLEAR, CLEAR_WORDS, *place(action.target), action.nbytes]
            case Reduce(sources=sources, targets=targets):
                operands = [*sources, *targets]
                count = REDUCE_WORDS + 2 * len(operands)
                words += [REDUCE, count, kernels[_reduction(action)], action.count]
                words += [len(sources), len(targets)]
                words += [word for operand in operands for word in place(operand)]
            case Publish(places=places):
                words += [SHOW, SHOW_WORDS + 2 * len(places), len(places)]
                words += [word for shown in places for word in place(shown)]
            case Read():
                if not (0 <= action.rank < size and 0 <= action.shown < shm_layout.MOST_SHOWN):
                    raise ValueError(f"{rounds.call}: no {action}")
                words += [READ, READ_WORDS, *place(action.target), action.rank, action.shown]
                words += [action.offset, action.width, action.rows]
                words += [action.target_stride, action.source_stride]
    return words


def extents(rounds: ExchangePlan, devices: int) -> tuple[int, int]:
    """The number of bytes of an input and of an output that some rounds touch."""
    ends = {Memory.INPUT: 0, Memory.OUTPUT: 0}

    def touch(place: Place, nbytes: int) -> None:
        if place.memory in ends and place.index < devices:
            ends[place.memory] = max(ends[place.memory], place.offset + nbytes)

    for action in rounds.actions:
        match action:
            case Copy() | Read() if action.rows:
                touch(action.target, (action.rows - 1) * action.target_stride + action.width)
                if isinstance(action, Copy):
                    touch(action.source, (action.rows - 1) * action.source_stride + action.width)
            case Clear():
                touch(action.target, action.nbytes)
            case Reduce(count=count):
                for source in action.sources:
                    touch(source, count * action.dtype.itemsize)
                for target in action.targets:
                    touch(target, count * action.result.itemsize)
    return ends[Memory.INPUT], ends[Memory.OUTPUT]


# ---- boxes of an exchange between local devices --------------------------------------------------

# A piece of work: small enough to balance, large enough to be worth a look at the table.
PIECE_BYTES = 64 * 1024
MOST_PIECES = 256


def boxes(given: Sequence[Box], members: int, whole: int) -> tuple[list[int], int]:
    """The words of boxes, and into how many pieces each is cut; outputs have `whole` bytes."""
    words: list[int] = []
    largest = 1
    for box in given:
        end = _end(box.copy.place, box.copy, 2)
        if not (-1 <= box.source < members and 0 <= box.target < members and end <= whole):
            raise ValueError(f"no box of {members} devices with outputs of {whole} bytes: {box}")
        for copy in _in_rows(box.copy):
            largest = max(largest, copy.nbytes)
            words += [box.source, box.target, copy.start, copy.place, copy.width]
            for loop in ((1, 0, 0),) * (BOX_LOOPS - len(copy.loops)):
                words += loop
            for loop in copy.loops:
                words += loop
    return words, min(-(-largest // PIECE_BYTES), MOST_PIECES)


def _in_rows(copy: Strided) -> Iterator[Strided]:
    """A copy with few loops, whose rows are short enough to be shared out."""
    for one in copy.flattened(BOX_LOOPS):
        rows, rest = divmod(one.width, PIECE_BYTES)
        if len(one.loops) == BOX_LOOPS or rows < 2:
            yield one
            continue
        yield Strided(
            one.start, one.place, PIECE_BYTES, (*one.loops, (rows, PIECE_BYTES, PIECE_BYTES))
        )
        if rest:
            done = rows * PIECE_BYTES
            yield Strided(one.start + done, one.place + done, rest, one.loops)


def bytes_read(given: Sequence[Box]) -> int:
    """The number of bytes of an input that some boxes touch."""
    return max((_end(b.copy.start, b.copy, 1) for b in given if b.source >= 0), default=0)


def _end(first: int, copy: Strided, side: int) -> int:
    """The end of the bytes that a copy reads (side 1) or writes (side 2)."""
    return first + sum((loop[0] - 1) * loop[side] for loop in copy.loops) + copy.width
