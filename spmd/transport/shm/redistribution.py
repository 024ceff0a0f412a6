"""The rounds of an exchange of rectangles between the devices of ranks that share memory.

Every rank knows all moves. It packs the rectangles that others need of its devices, each once even
if several devices need it, and copies those that its own devices lack. If all rows are large, ranks
read them where they lie, in the memory of the other processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spmd.base.digest import blake2b
from spmd.base.record import record
from spmd.transport.call_signature import Kind
from spmd.transport.shm import layout as shm_layout
from spmd.transport.shm.direct_plan import reads
from spmd.transport.shm.plan import (
    Action,
    Barrier,
    Clear,
    Copy,
    ExchangePlan,
    Member,
    Memory,
    Place,
    Planner,
    Publish,
    Read,
    chunks,
    clip,
)
from spmd.transport.strided import Strided

# An exchange of more rows than this on one rank goes through messages: its plan would be long.
MOST_ACTIONS = 4096


@record
class Move:
    """Bytes of a device's input, and their way to the output of a device."""

    source: Member
    target: Member
    copy: Strided


@record
class Message:
    """Bytes that a rank shows, `begin` bytes behind the first, and where they go, by rank."""

    source: Member
    copy: Strided
    begin: int
    goals: dict[int, list[tuple[int, Strided]]]


def redistribution(
    planner: Planner,
    dtype: np.dtype,
    devices: int,
    moves: Sequence[Move],
    clears: Sequence[Clear],
    nbytes: int,
) -> ExchangePlan | None:
    """The rounds that give this rank's devices what the moves of all ranks say.

    `clears` come before, and `nbytes` are for the flight record. None if there are too many rows.
    """
    if _most_rows(moves) > MOST_ACTIONS:
        return None
    total = sum(move.copy.nbytes for move in moves) // dtype.itemsize
    digest = blake2b(repr(moves).encode(), digest_size=16).hexdigest()
    call = planner.call(Kind.ALL_TO_ALL, None, dtype, total, f"moves={digest}")
    across = [move for move in moves if move.source.rank != move.target.rank]
    least = min((move.copy.width for move in across), default=0)
    direct = 0 < planner.limits.direct_from <= least and devices <= shm_layout.MOST_SHOWN
    actions: list[Action] = list(clears)
    if direct:
        actions.append(Publish(tuple(Place(Memory.INPUT, d) for d in range(devices))))
    for move in moves:
        if move.source.rank == move.target.rank == planner.rank:
            goal = Place(Memory.OUTPUT, move.target.device)
            actions += _copies(goal, Place(Memory.INPUT, move.source.device), move.copy)
    actions += _read(planner, across) if direct else _sent(planner, across, dtype)
    return ExchangePlan(call, tuple(actions), nbytes=nbytes)


def _most_rows(moves: Sequence[Move]) -> int:
    """The largest number of actions of a rank."""
    rows: dict[int, int] = {}
    for move in moves:
        outer = 1
        for trips, _, _ in move.copy.loops[:-1]:
            outer *= trips
        for rank in {move.source.rank, move.target.rank}:
            rows[rank] = rows.get(rank, 0) + outer
    return max(rows.values(), default=0)


def _read(planner: Planner, across: Sequence[Move]) -> Iterator[Action]:
    """The parts that this rank lacks, read from other ranks' inputs, not all from one at once."""
    yield Barrier(True)
    mine = [move for move in across if move.target.rank == planner.rank]
    for move in sorted(mine, key=lambda move: (move.source.rank - planner.rank) % planner.size):
        goal, source = Place(Memory.OUTPUT, move.target.device), move.source
        for one in move.copy.flattened(1):
            ((rows, near, far),) = one.loops or ((1, 0, 0),)
            target = goal + one.place
            yield from reads(
                Read(target, source.rank, source.device, one.start, one.width, rows, far, near)
            )
    yield Barrier(False)


def _sent(planner: Planner, across: Sequence[Move], dtype: np.dtype) -> Iterator[Action]:
    """Chunk by chunk, what this rank shows, and what it takes of what others show."""
    messages = _messages(across, planner.size)
    longest = max((m.begin + m.copy.nbytes for m in messages), default=0)
    for low, high in chunks(longest, dtype.itemsize, planner.limits.slot):
        for message in messages:
            if message.source.rank == planner.rank:
                packed = message.copy.packed(message.begin)
                start = Place(Memory.INPUT, message.source.device)
                yield from _copies(Place(Memory.NEXT), start, packed, 2, low, high)
        yield Barrier(low == 0)
        for message in messages:
            for device, copy in message.goals.get(planner.rank, ()):
                unpacked = copy.unpacked(message.begin)
                slot = Place(Memory.SLOT, message.source.rank)
                yield from _copies(Place(Memory.OUTPUT, device), slot, unpacked, 1, low, high)


def _messages(across: Sequence[Move], size: int) -> list[Message]:
    """The memory that each rank shows to others, one behind the other."""
    found: dict[Any, Message] = {}
    ends = [0] * size
    for move in across:
        source, copy = move.source, move.copy
        shape = tuple([(trips, near) for trips, near, _ in copy.loops])
        shown = source, copy.start, copy.width, shape
        message = found.get(shown)
        if message is None:
            message = found[shown] = Message(source, copy, ends[source.rank], {})
            ends[source.rank] += copy.nbytes
        message.goals.setdefault(move.target.rank, []).append((move.target.device, copy))
    return list(found.values())


def _copies(
    target: Place, source: Place, copy: Strided, dense: int = 0, low: int = 0, high: int = 0
) -> Iterator[Copy]:
    """The actions of a strided copy: if one side is dense, those of its bytes [low, high).

    The dense side is 1, the source, or 2, the target; its place has byte `low`.
    """
    for one in copy.flattened(1):
        ((rows, near, far),) = one.loops or ((1, one.width, one.width),)
        if not dense:
            yield Copy(target + one.place, source + one.start, one.width, rows, far, near)
            continue
        first, stride = ((one.start, near), (one.place, far))[dense - 1]
        for run in clip(rows, one.width, stride, first, low, high):
            start = one.start + run.row * near + run.begin - (low if dense == 1 else 0)
            place = one.place + run.row * far + run.begin - (low if dense == 2 else 0)
            yield Copy(target + place, source + start, run.width, run.rows, far, near)
