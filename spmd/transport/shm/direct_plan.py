"""Rounds in which ranks read large blocks where they lie, in the memory of the other processes.

The one idea: between two meetings no rank writes to the buffers that it showed. So each rank
shows its buffers, meets, reads what it needs straight to where it goes, and meets again. A slot
would cost a second copy, and its cache lines would change their owner twice.

A reduction reads pieces that stay in the caches. With few ranks each reduces everything for itself;
with more it reduces one part, and reads the others' results from their outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spmd.transport.call_signature import Kind, pairs_detail
from spmd.transport.communicator import ReduceOp
from spmd.transport.shm import layout as shm_layout
from spmd.transport.shm.direct_read import MOST_BYTES, MOST_ROWS
from spmd.transport.shm.plan import (
    Action,
    AllReduce,
    Barrier,
    Clear,
    Copy,
    ExchangePlan,
    Groups,
    Memory,
    Operand,
    Place,
    Planner,
    Publish,
    Read,
    Reduce,
    Sum,
    Take,
    chunks,
    idle,
)

# While each reads at most so much from all others together, it reduces everything for itself: that
# is one meeting less, and nothing changes hands twice.
WHOLE_BYTES = 1 << 20
# Values of several devices of a process are combined first, in such chunks.
COMBINED_BYTES = 4 << 20


class DirectPlanner(Planner):
    """Makes direct rounds for large blocks, and leaves the small ones to `Planner`."""

    def _is_direct(self, nbytes: int) -> bool:
        return nbytes >= self.limits.direct_from

    @property
    def others(self) -> list[int]:
        """The other ranks, the next one first: not all read from the same one at once."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def all_reduce(self, op: ReduceOp, x: Operand, groups: Groups, identity: bytes) -> ExchangePlan:
        """See `Planner`."""
        made = _DirectAllReduce(self, op, x, groups, identity)
        if made.nbytes >= self.limits.direct_sum_from:
            return made.rounds()
        return super().all_reduce(op, x, groups, identity)

    def all_gather(self, x: Operand, order: Sequence[int]) -> ExchangePlan:
        """See `Planner`."""
        if not self._is_direct(x.block):
            return super().all_gather(x, order)
        source, stride = Place(Memory.INPUT), x.block * self.size
        actions: list[Action] = [Publish((source,))]
        goals = {rank: Place(Memory.OUTPUT, 0, j * x.block) for j, rank in enumerate(order)}
        actions.append(Copy(goals[self.rank], source, x.block, x.rows, stride, x.block))
        actions.append(Barrier(True))
        for rank in self.others:
            actions += reads(Read(goals[rank], rank, 0, 0, x.block, x.rows, stride, x.block))
        actions.append(Barrier(False))
        call = self.call(Kind.ALL_GATHER, None, x.dtype, x.rows * x.count)
        return ExchangePlan(call, tuple(actions), nbytes=x.whole)

    def all_to_all(self, x: Operand, order: Sequence[int]) -> ExchangePlan:
        """See `Planner`."""
        if not self._is_direct(x.block):
            return super().all_to_all(x, order)
        place = {rank: j for j, rank in enumerate(order)}
        source, stride = Place(Memory.INPUT), x.block * self.size
        mine = place[self.rank] * x.block
        own = Place(Memory.OUTPUT, 0, mine)
        actions: list[Action] = [Publish((source,))]
        actions.append(Copy(own, source + mine, x.block, x.rows, stride, stride))
        actions.append(Barrier(True))
        for rank in self.others:
            goal = Place(Memory.OUTPUT, 0, place[rank] * x.block)
            actions += reads(Read(goal, rank, 0, mine, x.block, x.rows, stride, stride))
        actions.append(Barrier(False))
        call = self.call(Kind.ALL_TO_ALL, None, x.dtype, x.rows * x.count * self.size)
        return ExchangePlan(call, tuple(actions), nbytes=x.whole * self.size)

    def reduce_scatter(self, op: ReduceOp, x: Operand, order: Sequence[int]) -> ExchangePlan:
        """See `Planner`."""
        if not self._is_direct(x.block):
            return super().reduce_scatter(op, x, order)
        mine = list(order).index(self.rank) * x.block
        piece = self.limits.direct_piece
        actions: list[Action] = [Publish((Place(Memory.INPUT),)), Barrier(True)]
        for row in range(x.rows):
            start = row * x.block * self.size + mine
            for low, high in chunks(x.block, x.dtype.itemsize, piece):
                own = Place(Memory.INPUT, 0, start + low)
                sources = self.gathered(own, start + low, high - low, Place(Memory.SCRATCH))
                actions += sources.reads
                goal = (Place(Memory.OUTPUT, 0, row * x.block + low),)
                count = (high - low) // x.dtype.itemsize
                actions.append(Reduce(op, x.dtype, x.dtype, sources.places, goal, count))
        actions.append(Barrier(False))
        call = self.call(Kind.REDUCE_SCATTER, op, x.dtype, x.rows * x.count * self.size)
        scratch = (self.size - 1) * min(piece, x.block)
        return ExchangePlan(call, tuple(actions), scratch, nbytes=x.whole * self.size)

    def permute(self, x: Operand, pairs: Sequence[tuple[int, int]]) -> ExchangePlan:
        """See `Planner`."""
        if not self._is_direct(x.whole):
            return super().permute(x, pairs)
        source = {target: source for source, target in pairs}.get(self.rank)
        given, goal = Place(Memory.INPUT), Place(Memory.OUTPUT)
        actions: list[Action] = [Publish((given,))]
        if source is None:
            actions.append(Clear(goal, x.whole))
        elif source == self.rank:
            actions.append(Copy(goal, given, x.whole))
        actions.append(Barrier(True))
        if source is not None and source != self.rank:
            actions += reads(Read(goal, source, 0, 0, x.whole))
        actions.append(Barrier(False))
        detail = pairs_detail(pairs, self.size)
        call = self.call(Kind.PERMUTE, None, x.dtype, x.rows * x.count, detail)
        return ExchangePlan(call, tuple(actions), nbytes=x.whole)

    def exchange(
        self, x: Operand, parts: int, devices: int, takes: Sequence[Take], sums: Sequence[Sum] = ()
    ) -> ExchangePlan:
        """See `Planner`."""
        if not self._is_direct(x.block) or devices > shm_layout.MOST_SHOWN:
            return super().exchange(x, parts, devices, takes, sums)
        stride, whole = x.block * parts, x.whole * parts * devices
        before: list[Action] = [Publish(tuple(Place(Memory.INPUT, d) for d in range(devices)))]
        before += [Clear(Place(Memory.OUTPUT, d), x.whole) for d in idle(devices, takes, sums)]
        after: list[Action] = []
        for take in takes:
            device, start = take.source.device, take.part * x.block
            strides = (take.stride, stride)
            if take.source.rank == self.rank:
                source = Place(Memory.INPUT, device, start)
                before.append(Copy(take.target, source, x.block, x.rows, *strides))
            else:
                one = Read(take.target, take.source.rank, device, start, x.block, x.rows, *strides)
                after += reads(one)
        # Sums only read taken data: the others need not wait for them.
        actions = [*before, Barrier(True), *after, Barrier(False)]
        for one in sums:
            goal = (Place(Memory.OUTPUT, one.device),)
            actions.append(Reduce(one.op, x.dtype, x.dtype, one.sources, goal, x.rows * x.count))
        call = self.call(Kind.ALL_GATHER, None, x.dtype, whole // x.dtype.itemsize)
        scratch = sum(len(one.sources) for one in sums) * x.whole
        return ExchangePlan(call, tuple(actions), scratch, nbytes=whole)

    def gathered(self, own: Place, offset: int, nbytes: int, room: Place) -> Gathered:
        """Read the same bytes of what every other rank showed first, into `room`, side by side."""
        found, places = list[Action](), [own] * self.size
        for k, rank in enumerate(self.others):
            places[rank] = room + k * nbytes
            found += reads(Read(places[rank], rank, 0, offset, nbytes))
        return Gathered(tuple(found), tuple(places))


class Gathered:
    """Reads of a piece from all other ranks, and where it then lies for every rank, in order."""

    __slots__ = ("places", "reads")

    def __init__(self, reads: tuple[Action, ...], places: tuple[Place, ...]):
        self.reads = reads
        self.places = places


class _DirectAllReduce(AllReduce):
    """The direct rounds of an all_reduce; see `AllReduce` for the buffer."""

    planner: DirectPlanner

    def rounds(self) -> ExchangePlan:
        """The same result as that of `AllReduce`, bit by bit."""
        planner, size = self.planner, self.wide.itemsize
        piece = planner.limits.direct_piece
        scratch = (planner.size - 1) * min(piece, self.nbytes)
        if self.is_plain:
            if self.nbytes * (planner.size - 1) <= WHOLE_BYTES:
                self._all(0, self.count, Place(Memory.SCRATCH))
            else:
                self._part()
        else:
            room = min(COMBINED_BYTES, self.nbytes)
            for low, high in chunks(self.nbytes, size, COMBINED_BYTES):
                self._show(low // size, high // size, low // size, Place(Memory.SCRATCH))
                self._all(low // size, high // size, Place(Memory.SCRATCH, 0, room))
            scratch += room
        call = planner.call(Kind.ALL_REDUCE, self.op, self.wide, self.nbytes // size)
        return ExchangePlan(call, tuple(self.actions), scratch, self.identity, nbytes=self.nbytes)

    def _all(self, low: int, high: int, room: Place) -> None:
        """Reduce elements [low, high) of all ranks' buffers, which begin where they are shown."""
        size, actions = self.wide.itemsize, self.actions
        own = Place(Memory.INPUT) if self.is_plain else Place(Memory.SCRATCH)
        actions += [Publish((own,)), Barrier(low == 0)]
        for begin, end in chunks((high - low) * size, size, self.planner.limits.direct_piece):
            found = self.planner.gathered(own + begin, begin, end - begin, room)
            actions += found.reads
            self._finish(found.places, low + begin // size, low + end // size)
        actions.append(Barrier(False))

    def _part(self) -> None:
        """Reduce one part into the output, and read the other parts from the others' outputs."""
        planner, size, actions = self.planner, self.wide.itemsize, self.actions
        given, made = Place(Memory.INPUT), Place(Memory.OUTPUT)
        bounds = [self.count * r // planner.size * size for r in range(planner.size + 1)]
        start = bounds[planner.rank]
        actions += [Publish((given, made)), Barrier(True)]
        whole = bounds[planner.rank + 1] - start
        for low, high in chunks(whole, size, planner.limits.direct_piece):
            at = start + low
            found = planner.gathered(given + at, at, high - low, Place(Memory.SCRATCH))
            actions += found.reads
            self._finish(found.places, at // size, (start + high) // size)
        actions.append(Barrier(False))
        for rank in planner.others:
            width = bounds[rank + 1] - bounds[rank]
            actions += reads(Read(made + bounds[rank], rank, 1, bounds[rank], width))
        actions.append(Barrier(False))


def reads(whole: Read) -> Iterator[Read]:
    """A read, in as many as the system wants."""
    if whole.rows == 1 or whole.width * min(whole.rows, MOST_ROWS) > MOST_BYTES:
        for row in range(whole.rows):
            target = whole.target + row * whole.target_stride
            offset = whole.offset + row * whole.source_stride
            for low, high in chunks(whole.width, 1, MOST_BYTES):
                yield Read(target + low, whole.rank, whole.shown, offset + low, high - low)
    else:
        yield whole
