"""The rounds of a collective between processes as native words; see
`native/runtime/ir/rank_collectives.py`.

A place becomes two words: the number of a memory in the table that the runtime keeps for a step
(inputs of all devices, their outputs, scratch, the constant, this rank's coming slot, the slots of
all ranks), and an offset.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping

import numpy as np

from spmd.compile.native.program.reduction_kernels import Reduction
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
    """How many bytes of an input and of an output some rounds touch."""
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
