"""A collective over shared memory as a fixed list of copies, reductions and barriers.

The one idea: shapes are known before a program runs, so which bytes go to which slot in which step
is data, made once: `ExchangePlan`. Native code walks the list without knowing any collective
(`compile/native/runtime/ir/rank_collectives.py`), and `ShmCommunicator.run_rounds` walks it with
NumPy, as its slow twin. For flat buffers the bytes in the slots are those of `ShmCommunicator`'s
methods, in the same steps: a rank may run either.

A process with several devices gives and gets several buffers. They meet in the order of the
devices: a reduction combines a process's own first, then the processes'.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import numpy as np

from spmd.base.record import field, record
from spmd.transport.call_signature import Call, Kind, dtype_name, make_call, pairs_detail
from spmd.transport.communicator import ReduceOp
from spmd.transport.origin import NOWHERE, Origin
from spmd.transport.reduction import accumulator


class Memory(enum.IntEnum):
    """The kinds of memory that a place can be in."""

    INPUT = 0  # of a device of this process, by its number
    OUTPUT = 1
    SCRATCH = 2
    SLOT = 3  # of a rank, in the step that was met last
    NEXT = 4  # this rank's slot of the coming step
    CONSTANT = 5  # the pattern of the rounds


@record
class Place:
    """So many bytes into one of the memories."""

    memory: Memory
    index: int = 0
    offset: int = 0

    def __add__(self, nbytes: int) -> Place:
        return Place(self.memory, self.index, self.offset + nbytes)


@record
class Copy:
    """Copy `rows` runs of `width` bytes, so many bytes apart on either side."""

    target: Place
    source: Place
    width: int
    rows: int = 1
    target_stride: int = 0
    source_stride: int = 0


@record
class Clear:
    """Write zeros."""

    target: Place
    nbytes: int


@record
class Reduce:
    """Combine `count` elements of the sources in order, and write the result to all targets.

    Elements are read as `dtype` and written as `result`; narrow floats are combined in float32.
    """

    op: ReduceOp
    dtype: np.dtype
    result: np.dtype
    sources: tuple[Place, ...]
    targets: tuple[Place, ...]
    count: int


@record
class Barrier:
    """Say that the slot is filled and wait for all ranks; in the `first` step, compare calls."""

    first: bool


@record
class Publish:
    """Let the others read from these places, from the next meeting on to the one after it."""

    places: tuple[Place, ...]


@record
class Read:
    """Copy rows from the memory of a rank's process: from the buffer shown under a number."""

    target: Place
    rank: int
    shown: int
    offset: int
    width: int
    rows: int = 1
    target_stride: int = 0
    source_stride: int = 0


Action = Copy | Clear | Reduce | Barrier | Publish | Read


@record
class ExchangePlan:
    """The steps of one rank in one collective."""

    call: Call
    actions: tuple[Action, ...]
    scratch: int = 0  # bytes
    constant: bytes = b""
    nbytes: int = field(default=0)  # the bytes that this process gives

    @property
    def is_direct(self) -> bool:
        """Whether ranks read from each other's buffers: outputs must then not overlap inputs."""
        return any(isinstance(action, Publish) for action in self.actions)


@record
class Operand:
    """A device's buffer: `rows` rows of a block of `count` elements (for each member, or one)."""

    dtype: np.dtype
    rows: int
    count: int

    @property
    def block(self) -> int:
        """Bytes of one block of one row."""
        return self.count * self.dtype.itemsize

    @property
    def whole(self) -> int:
        """Bytes of one block of all rows."""
        return self.rows * self.block


@record
class Member:
    """A device that takes part: the rank of its process, and its number there."""

    rank: int
    device: int


Groups = Sequence[Sequence[Member]]


@record
class Take:
    """Take one block of each row of a device's input, and lay the rows so many bytes apart."""

    source: Member
    part: int
    target: Place
    stride: int


@record
class Sum:
    """Reduce blocks in scratch memory into the output of a device."""

    op: ReduceOp
    device: int
    sources: tuple[Place, ...]


@record
class Limits:
    """Bytes of a slot, of a chunk of a reduction, and from which a reduction is split over ranks.

    Blocks from `direct_from` on are read where they lie (0: none is), and buffers that are reduced
    from `direct_sum_from` on, in pieces.
    """

    slot: int
    reduction: int
    parts_from: int
    direct_from: int = 0
    direct_sum_from: int = 0
    direct_piece: int = 256 << 10


class Planner:
    """Makes the rounds of one rank of a group, for collectives from one place of a program."""

    def __init__(self, rank: int, size: int, limits: Limits, origin: Origin = NOWHERE):
        self.rank = rank
        self.size = size
        self.limits = limits
        self.origin = origin

    def call(
        self, kind: Kind, op: ReduceOp | None, dtype: np.dtype, count: int, detail: str = ""
    ) -> Call:
        """This rank's description of its call."""
        return make_call(kind, op, dtype_name(dtype), count, detail, self.origin)

    # ---- reductions ----------------------------------------------------------------------------

    def all_reduce(self, op: ReduceOp, x: Operand, groups: Groups, identity: bytes) -> ExchangePlan:
        """Reduce over each group; a process without members adds `identity`."""
        return AllReduce(self, op, x, groups, identity).rounds()

    # ---- any number of devices a process: each shows all its blocks, and takes others' ---

    def exchange(
        self, x: Operand, parts: int, devices: int, takes: Sequence[Take], sums: Sequence[Sum] = ()
    ) -> ExchangePlan:
        """Show the inputs of all devices, `parts` blocks a row, and take what each device needs.

        Blocks in scratch memory are then reduced. A device that takes nothing gets zeros.
        """
        given = x.whole * parts
        whole = given * devices
        nothing = idle(devices, takes, sums)
        actions: list[Action] = [Clear(Place(Memory.OUTPUT, d), x.whole) for d in nothing]
        for low, high in chunks(whole, x.dtype.itemsize, self.limits.slot):
            for device in range(devices):
                start = device * given
                for run in clip(1, given, given, start, low, high):
                    target = Place(Memory.NEXT, 0, start + run.begin - low)
                    actions.append(Copy(target, Place(Memory.INPUT, device, run.begin), run.width))
            actions.append(Barrier(low == 0))
            for take in takes:
                actions += self._taken(take, x, parts, low, high)
        for one in sums:
            goal = (Place(Memory.OUTPUT, one.device),)
            actions.append(Reduce(one.op, x.dtype, x.dtype, one.sources, goal, x.rows * x.count))
        count = whole // x.dtype.itemsize
        call = self.call(Kind.ALL_GATHER, None, x.dtype, count)
        scratch = sum(len(one.sources) for one in sums) * x.whole
        return ExchangePlan(call, tuple(actions), scratch, nbytes=whole)

    def _taken(self, take: Take, x: Operand, parts: int, low: int, high: int) -> Iterator[Action]:
        """The part of a take that is in the slots when bytes [low, high) of all inputs are."""
        shown = x.whole * parts * take.source.device
        stride = x.block * parts
        start = shown + take.part * x.block
        for run in clip(x.rows, x.block, stride, start, low, high):
            at = run.row * stride + run.begin
            if take.source.rank == self.rank:
                source = Place(Memory.INPUT, take.source.device, take.part * x.block + at)
            else:
                source = Place(Memory.SLOT, take.source.rank, start + at - low)
            target = take.target + run.row * take.stride + run.begin
            yield Copy(target, source, run.width, run.rows, take.stride, stride)

    # ---- one device a process ------------------------------------------------------------------

    def all_gather(self, x: Operand, order: Sequence[int]) -> ExchangePlan:
        """Block `j` of each row of the output is the row of rank `order[j]`."""
        place = {rank: j for j, rank in enumerate(order)}
        source, target = Place(Memory.INPUT), Place(Memory.OUTPUT)
        actions: list[Action] = []
        for low, high in chunks(x.whole, x.dtype.itemsize, self.limits.slot):
            actions.append(Copy(Place(Memory.NEXT), source + low, high - low))
            actions.append(Barrier(low == 0))
            for rank in range(self.size):
                start = source + low if rank == self.rank else Place(Memory.SLOT, rank)
                goal = target + place[rank] * x.block
                for run in clip(x.rows, x.block, x.block, 0, low, high):
                    at = run.row * x.block * self.size + run.begin
                    strides = (x.block * self.size, x.block)
                    packed = run.row * x.block + run.begin - low
                    actions.append(Copy(goal + at, start + packed, run.width, run.rows, *strides))
        call = self.call(Kind.ALL_GATHER, None, x.dtype, x.rows * x.count)
        return ExchangePlan(call, tuple(actions), nbytes=x.whole)

    def all_to_all(self, x: Operand, order: Sequence[int]) -> ExchangePlan:
        """Block `j` of each row goes to rank `order[j]`, and comes from there."""
        actions: list[Action] = []
        for low, high in self._send_blocks(x, order, actions):
            for j, rank in enumerate(order):
                start = self._block_at(x, order, rank, low, high)
                for run in clip(x.rows, x.block, x.block, 0, low, high):
                    goal = Place(Memory.OUTPUT, 0, (run.row * self.size + j) * x.block + run.begin)
                    strides = (x.block * self.size, x.block)
                    packed = run.row * x.block + run.begin - low
                    actions.append(Copy(goal, start + packed, run.width, run.rows, *strides))
        count = x.rows * x.count * self.size
        call = self.call(Kind.ALL_TO_ALL, None, x.dtype, count)
        return ExchangePlan(call, tuple(actions), nbytes=x.whole * self.size)

    def reduce_scatter(self, op: ReduceOp, x: Operand, order: Sequence[int]) -> ExchangePlan:
        """Reduce block `j` of each row over all ranks, in the order of ranks, for `order[j]`."""
        actions: list[Action] = []
        for low, high in self._send_blocks(x, order, actions):
            slots = [self._block_at(x, order, rank, low, high) for rank in range(self.size)]
            count = (high - low) // x.dtype.itemsize
            goal = Place(Memory.OUTPUT, 0, low)
            actions.append(Reduce(op, x.dtype, x.dtype, tuple(slots), (goal,), count))
        count = x.rows * x.count * self.size
        call = self.call(Kind.REDUCE_SCATTER, op, x.dtype, count)
        return ExchangePlan(call, tuple(actions), nbytes=x.whole * self.size)

    def _send_blocks(
        self, x: Operand, order: Sequence[int], actions: list[Action]
    ) -> Iterator[tuple[int, int]]:
        """Post a chunk of every block, rank by rank, and meet; gives the chunks' bounds."""
        for low, high in chunks(x.whole, x.dtype.itemsize, self.limits.slot, self.size):
            for j, rank in enumerate(order):
                if rank == self.rank and x.rows == 1:
                    continue  # blocks that stay here are read in place
                for run in clip(x.rows, x.block, x.block, 0, low, high):
                    source = (run.row * self.size + j) * x.block + run.begin
                    packed = rank * (high - low) + run.row * x.block + run.begin - low
                    strides = (x.block, x.block * self.size)
                    target = Place(Memory.NEXT, 0, packed)
                    start = Place(Memory.INPUT, 0, source)
                    actions.append(Copy(target, start, run.width, run.rows, *strides))
            actions.append(Barrier(low == 0))
            yield low, high

    def _block_at(self, x: Operand, order: Sequence[int], rank: int, low: int, high: int) -> Place:
        """The place of the chunk of the block that a rank has for this one."""
        if rank == self.rank and x.rows == 1:
            return Place(Memory.INPUT, 0, order.index(rank) * x.block + low)
        return Place(Memory.SLOT, rank, self.rank * (high - low))

    def permute(self, x: Operand, pairs: Sequence[tuple[int, int]]) -> ExchangePlan:
        """Send along pairs of ranks; zeros arrive where no rank sends."""
        source = {target: source for source, target in pairs}.get(self.rank)
        sends = any(source == self.rank for source, _ in pairs)
        actions: list[Action] = []
        if source is None:
            actions.append(Clear(Place(Memory.OUTPUT), x.whole))
        for low, high in chunks(x.whole, x.dtype.itemsize, self.limits.slot):
            if sends:
                start = Place(Memory.INPUT, 0, low)
                actions.append(Copy(Place(Memory.NEXT), start, high - low))
            actions.append(Barrier(low == 0))
            if source is not None:
                goal = Place(Memory.OUTPUT, 0, low)
                actions.append(Copy(goal, Place(Memory.SLOT, source), high - low))
        detail = pairs_detail(pairs, self.size)
        call = self.call(Kind.PERMUTE, None, x.dtype, x.rows * x.count, detail)
        return ExchangePlan(call, tuple(actions), nbytes=x.whole)


class AllReduce:
    """The rounds of an all_reduce over a buffer with a row for each group.

    Where a process has one device and there is one group, that buffer is the input. Else a chunk
    of it is made in scratch memory from the inputs, in the dtype of the arithmetic.
    """

    def __init__(self, planner: Planner, op: ReduceOp, x: Operand, groups: Groups, identity: bytes):
        self.planner = planner
        self.op = op
        self.dtype = x.dtype
        self.count = x.rows * x.count
        rank = planner.rank
        self.members = [[m.device for m in group if m.rank == rank] for group in groups]
        self.is_plain = self.members == [[0]]
        self.wide = x.dtype if self.is_plain else accumulator(ReduceOp.SUM, x.dtype)
        self.identity = identity
        self.actions: list[Action] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.count * len(self.members) * self.wide.itemsize

    def rounds(self) -> ExchangePlan:
        """Chunk by chunk, each in whole or in parts."""
        total, size = self.count * len(self.members), self.wide.itemsize
        planner = self.planner
        in_parts = total * size >= planner.limits.parts_from
        limit = planner.limits.reduction if in_parts else planner.limits.slot
        for low, high in chunks(total * size, size, limit):
            (self._parts if in_parts else self._whole)(low // size, high // size)
        call = planner.call(Kind.ALL_REDUCE, self.op, self.wide, total)
        scratch = 0 if self.is_plain or not in_parts else min(total * size, limit)
        return ExchangePlan(call, tuple(self.actions), scratch, self.identity, nbytes=total * size)

    def _whole(self, low: int, high: int) -> None:
        """Each rank reduces all of a chunk."""
        planner = self.planner
        self._show(low, high, low, Place(Memory.NEXT))
        self.actions.append(Barrier(low == 0))
        slots = [Place(Memory.SLOT, r) for r in range(planner.size)]
        if self.is_plain:
            slots[planner.rank] = Place(Memory.INPUT, 0, low * self.wide.itemsize)
        self._finish(slots, low, high)

    def _parts(self, low: int, high: int) -> None:
        """Each rank reduces one part of a chunk, and collects the others'."""
        planner, size, actions = self.planner, self.wide.itemsize, self.actions
        count = high - low
        bounds = [count * r // planner.size for r in range(planner.size + 1)]
        begin, end = bounds[planner.rank], bounds[planner.rank + 1]
        own, following = Place(Memory.SCRATCH), Place(Memory.NEXT)
        if self.is_plain:
            own = Place(Memory.INPUT, 0, low * size)
        else:
            self._show(low, high, low, own)
        actions.append(Copy(following, own, begin * size))
        actions.append(Copy(following + end * size, own + end * size, (count - end) * size))
        actions.append(Barrier(low == 0))
        sources = [Place(Memory.SLOT, r) + begin * size for r in range(planner.size)]
        sources[planner.rank] = own + begin * size
        targets = [following + begin * size]
        if self.is_plain:
            targets.append(Place(Memory.OUTPUT, 0, (low + begin) * size))
        reduced = Reduce(self.op, self.wide, self.wide, tuple(sources), tuple(targets), end - begin)
        actions.append(reduced)
        actions.append(Barrier(False))
        for r in range(planner.size):
            first, last = low + bounds[r], low + bounds[r + 1]
            slot = Place(Memory.SLOT, r) + bounds[r] * size
            if not self.is_plain:
                self._finish([slot], first, last)
            elif r != planner.rank:
                goal = Place(Memory.OUTPUT, 0, first * size)
                actions.append(Copy(goal, slot, (last - first) * size))

    def _show(self, low: int, high: int, start: int, target: Place) -> None:
        """Write elements [low, high) of this process's buffer; `target` has element `start`."""
        size = self.wide.itemsize
        if self.is_plain:
            self.actions.append(
                Copy(target, Place(Memory.INPUT, 0, low * size), (high - low) * size)
            )
            return
        for group, first, last in self._by_group(low, high):
            goal = target + (group * self.count + first - start) * size
            if self.members[group]:
                at = first * self.dtype.itemsize
                sources = tuple([Place(Memory.INPUT, d, at) for d in self.members[group]])
                self.actions.append(
                    Reduce(self.op, self.dtype, self.wide, sources, (goal,), last - first)
                )
            else:
                pattern = Place(Memory.CONSTANT)
                self.actions.append(Copy(goal, pattern, size, last - first, size))

    def _finish(self, sources: Sequence[Place], low: int, high: int) -> None:
        """Reduce sources, which have elements [low, high), into the outputs of the groups."""
        for group, first, last in self._by_group(low, high):
            if not self.members[group]:
                continue
            skipped = (group * self.count + first - low) * self.wide.itemsize
            at = first * self.dtype.itemsize
            given = tuple([source + skipped for source in sources])
            targets = tuple([Place(Memory.OUTPUT, d, at) for d in self.members[group]])
            self.actions.append(
                Reduce(self.op, self.wide, self.dtype, given, targets, last - first)
            )

    def _by_group(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """The groups that elements [low, high) belong to, and which elements of theirs."""
        for group in range(len(self.members)):
            start = group * self.count
            first, last = max(low - start, 0), min(high - start, self.count)
            if first < last:
                yield group, first, last


def idle(devices: int, takes: Sequence[Take], sums: Sequence[Sum]) -> list[int]:
    """The devices that get nothing."""
    busy = {take.target.index for take in takes if take.target.memory == Memory.OUTPUT}
    busy |= {one.device for one in sums}
    return [device for device in range(devices) if device not in busy]


# ---- cutting -----------------------------------------------------------------------------------


@record
class Run:
    """`rows` rows from `row` on, and of each the bytes [begin, begin + width)."""

    row: int
    rows: int
    begin: int
    width: int


def chunks(nbytes: int, itemsize: int, limit: int, blocks: int = 1) -> Iterator[tuple[int, int]]:
    """Cut bytes so that `blocks` such pieces fit in `limit`; one empty piece for nothing.

    >>> list(chunks(20, 4, 8)), list(chunks(0, 4, 8)), list(chunks(20, 4, 25, blocks=2))
    ([(0, 8), (8, 16), (16, 20)], [(0, 0)], [(0, 12), (12, 20)])
    """
    most = max(1, limit // (itemsize * blocks)) * itemsize
    for low in range(0, max(nbytes, 1), most):
        yield low, min(low + most, nbytes)


def clip(rows: int, width: int, stride: int, start: int, low: int, high: int) -> Iterator[Run]:
    """The parts of rows, at `start + row * stride`, that lie in bytes [low, high).

    >>> list(clip(rows=4, width=10, stride=10, start=0, low=5, high=35))
    [Run(row=0, rows=1, begin=5, width=5), Run(row=1, rows=2, begin=0, width=10),
     Run(row=3, rows=1, begin=0, width=5)]
    """
    if not rows * width:
        return
    row = max(0, (low - start - width) // stride + 1)
    while row < rows and start + row * stride < high:
        at = start + row * stride
        begin, end = max(low - at, 0), min(high - at, width)
        if begin > 0 or end < width:
            yield Run(row, 1, begin, end - begin)
            row += 1
            continue
        whole = min(rows - row, (high - at - width) // stride + 1)
        yield Run(row, whole, 0, width)
        row += whole
