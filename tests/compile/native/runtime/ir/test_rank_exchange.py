"""Exchanges of rectangles between processes in native code, beside ranks that do it in Python."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from spmd.collectives.exchange import exchange_p
from spmd.collectives.exchange_across import Parcels, copies_of_groups, with_gaps
from spmd.collectives.rectangles import Copies, copies_between, held, part_sizes
from spmd.compile.native.program.run_layout import PARTS
from spmd.compile.native.runtime.load import load_parts
from spmd.transport.origin import NOWHERE
from spmd.transport.shm import redistribution as rounds_of_exchange
from spmd.transport.shm.communicator import ShmCommunicator
from spmd.transport.shm.direct_plan import DirectPlanner
from spmd.transport.shm.plan import Clear, Limits, Member, Memory, Place, Planner, Read
from spmd.transport.shm.plan import Copy as ActionCopy
from spmd.transport.shm.redistribution import Move, redistribution
from spmd.transport.strided import strided
from tests.compile.native.runtime.ir.test_rank_collectives import run_native
from tests.transport.shm.forked import Ranks, raised

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="forked ranks are only tested on Linux"
)
AXES = "xyz"


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """The runtime is there before ranks are forked, so that none of them is late."""
    load_parts(PARTS)


class Drawn:
    """A random change of layout of random groups: the same on all ranks."""

    def __init__(self, seed: int, total: int):
        rng = np.random.default_rng(seed)
        width = int(rng.choice([n for n in range(1, total + 1) if total % n == 0]))
        self.groups = tuple(map(tuple, rng.permutation(total).reshape(-1, width).tolist()))
        sizes = {"x": width}
        if width % 2 == 0 and rng.integers(2):
            sizes = {"x": width // 2, "y": 2}
        ndim = int(rng.integers(1, 5))
        shape = tuple(rng.integers(0 if rng.integers(9) == 0 else 1, 9, ndim).tolist())
        splits: list[list[tuple[str, ...]]] = []
        for _ in range(2):
            split: list[tuple[str, ...]] = [()] * ndim
            for axis in sizes:
                d = int(rng.integers(-1, ndim))
                if d >= 0:
                    split[d] = (*split[d], axis)
            splits.append(split)
        have, want = (held(shape, split, sizes) for split in splits)
        self.copies = copies_between(have, want)
        if rng.integers(4) == 0:  # some of them
            keep = rng.integers(0, 2, len(self.copies.items)).astype(bool)
            pairs = zip(self.copies.items, keep, strict=True)
            self.copies = Copies(tuple(copy for copy, kept in pairs if kept))
        given, self.shape = (tuple(part_sizes(shape, split, sizes)) for split in splits)
        self.dtype = np.dtype(rng.choice(["float32", "int16", "complex128", "bool"]))
        self.inputs = [rng.integers(0, 2, given).astype(self.dtype) for _ in range(total)]
        self.wanted = [np.zeros(self.shape, self.dtype)] * total
        assert exchange_p.members is not None
        for group in self.groups:
            given = [self.inputs[k] for k in group]
            found = exchange_p.members(given, copies=self.copies, shape=self.shape)
            for k, x in zip(group, found, strict=True):
                self.wanted[k] = x
        slot = int(rng.choice([64, 200, 1 << 16]))
        self.limits = Limits(slot, 64, 9999, direct_from=int(rng.choice([0, 1, 16])))

    def rounds(self, rank: int, size: int, devices: int, reads_directly: bool):
        direct = reads_directly and self.limits.direct_from > 0
        limits = self.limits if direct else Limits(self.limits.slot, 64, 9999)
        planner = (DirectPlanner if direct else Planner)(rank, size, limits)
        moves = [
            Move(
                Member(c.source // devices, c.source % devices),
                Member(c.target // devices, c.target % devices),
                strided(
                    self.inputs[0].shape, c.start, self.shape, c.place, c.sizes, self.dtype.itemsize
                ),
            )
            for c in copies_of_groups(self.copies, self.groups)
        ]
        clears = [
            Clear(Place(Memory.OUTPUT, k % devices), self.wanted[k].nbytes)
            for k in sorted(with_gaps(self.copies, self.groups, self.shape))
            if k // devices == rank
        ]
        return redistribution(planner, self.dtype, devices, moves, clears, 0)


@pytest.mark.parametrize("size, devices", [(2, 1), (2, 3), (3, 2), (4, 1)])
def test_random_exchanges(size: int, devices: int):
    """Native rounds, rounds in NumPy and parcels through messages give what NumPy alone gives."""

    def body(comm: ShmCommunicator) -> bool:
        mine = slice(comm.rank * devices, (comm.rank + 1) * devices)
        read = 0
        for seed in range(60):
            drawn = Drawn(seed, size * devices)
            inputs, wanted = drawn.inputs[mine], drawn.wanted[mine]
            outputs = [np.full(w.shape, 1, w.dtype) for w in wanted]
            rounds = drawn.rounds(comm.rank, size, devices, comm.reads_directly)
            assert rounds is not None
            read += sum(isinstance(action, Read) for action in rounds.actions)
            if seed % 3 == 2:
                ranks = {k: k // devices for k in range(size * devices)}
                local = {k: k % devices for k, rank in ranks.items() if rank == comm.rank}
                ways = drawn.copies, drawn.shape, drawn.groups, ranks, local
                parcels = Parcels(*ways, comm, NOWHERE)
                parcels.run(None, [[x] for x in inputs], [[x] for x in outputs])
            elif (seed + comm.rank) % 2:
                comm.run_rounds(rounds, inputs, outputs)
            else:
                run_native(comm, rounds, inputs, outputs)
            for out, w in zip(outputs, wanted, strict=True):
                assert out.tobytes() == w.tobytes(), (seed, rounds.call, comm.rank)
        return read > 0 or not comm.reads_directly

    assert raised(Ranks(size, body).run(timeout=60)) == [True] * size


def test_the_rounds_carry_what_lacks_once():
    """Four devices of two ranks gather a whole: each half goes to the other rank once."""
    gathered = copies_between(held((64,), [("x",)], {"x": 4}), held((64,), [()], {"x": 4}))
    moves = [
        Move(
            Member(c.source // 2, c.source % 2),
            Member(c.target // 2, c.target % 2),
            strided((16,), c.start, (64,), c.place, c.sizes, 4),
        )
        for c in gathered.items
    ]
    planner = Planner(0, 2, Limits(1 << 16, 64, 9999))
    rounds = redistribution(planner, np.dtype(np.float32), 2, moves, [], 0)
    assert rounds is not None
    copies = [a for a in rounds.actions if isinstance(a, ActionCopy)]
    shown = [a.width * a.rows for a in copies if a.target.memory == Memory.NEXT]
    assert sum(shown) == 2 * 16 * 4


def test_too_many_rows_go_through_messages(monkeypatch: pytest.MonkeyPatch):
    moves = [
        Move(
            Member(0, 0), Member(1, 0), strided((9,) * 4, (0,) * 4, (8,) * 4, (0,) * 4, (8,) * 4, 4)
        )
    ]
    planner = Planner(0, 2, Limits(1 << 16, 64, 9999))
    assert redistribution(planner, np.dtype(np.float32), 1, moves, [], 0) is not None
    monkeypatch.setattr(rounds_of_exchange, "MOST_ACTIONS", 63)
    assert redistribution(planner, np.dtype(np.float32), 1, moves, [], 0) is None
