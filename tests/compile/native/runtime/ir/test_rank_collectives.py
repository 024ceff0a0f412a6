"""Collectives between processes in native code, beside ranks that make the same calls in Python."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spmd.base.config import config
from spmd.base.errors import CollectiveError, PeerError
from spmd.compile.native.program.run_layout import PARTS
from spmd.compile.native.program.steps import Host, Program, RankExchange, Slot, While
from spmd.compile.native.runtime.load import load_parts
from spmd.compile.native.runtime.run import build_program
from spmd.transport.communicator import ReduceOp
from spmd.transport.shm import communicator as shm
from spmd.transport.shm import direct_plan, direct_read
from spmd.transport.shm import layout as shm_layout
from spmd.transport.shm.communicator import ShmCommunicator
from spmd.transport.shm.direct_plan import DirectPlanner
from spmd.transport.shm.plan import (
    ExchangePlan,
    Limits,
    Member,
    Memory,
    Operand,
    Place,
    Planner,
    Read,
    Sum,
    Take,
)
from tests.transport.cases import Case, all_cases, reduce_in_order
from tests.transport.shm.forked import FORK, Ranks, raised

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="forked ranks are only tested on Linux"
)

F32 = np.dtype(np.float32)


def run_native(
    comm: ShmCommunicator,
    rounds: ExchangePlan,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
) -> None:
    """Run rounds as a program of one step, over the buffers of this process's devices."""
    comm.announce(rounds.call)
    scratch = np.empty(max(rounds.scratch, 1), np.uint8)
    bases = (inputs[0].nbytes, outputs[0].nbytes, scratch.nbytes)
    step = RankExchange(rounds, comm.state.address, comm.state.take, Slot(0), Slot(1), Slot(2))
    native = build_program(Program(bases, (step,), len(inputs)))
    frames = native.new_frames()
    for device, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
        frames[3 * device : 3 * device + 3] = x.ctypes.data, out.ctypes.data, scratch.ctypes.data
    native.run(frames)


def rounds_of(comm: ShmCommunicator, case: Case) -> ExchangePlan:
    """The rounds of a case of the transports' table."""
    planner, operand = comm.planner(), Operand(np.dtype(case.give(0, 1).dtype), 1, case.count)
    order = range(comm.size)
    match case.kind:
        case "all_reduce":
            assert case.op is not None
            group = [Member(rank, 0) for rank in order]
            return planner.all_reduce(case.op, operand, [group], b"")
        case "all_gather":
            return planner.all_gather(operand, order)
        case "reduce_scatter":
            assert case.op is not None
            return planner.reduce_scatter(case.op, operand, order)
        case "all_to_all":
            return planner.all_to_all(operand, order)
    return planner.permute(operand, case.pairs(comm.size))


def is_native(case: Case) -> bool:
    # No program broadcasts from a rank, or sends blocks of any size. Complex numbers have no order,
    # and NumPy rounds their products as the processor's instructions do.
    return case.kind not in ("broadcast", "ragged") and (
        "complex" not in case.dtype or case.op in (None, ReduceOp.SUM)
    )


CASES = [case for case in all_cases() if is_native(case)]


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """The runtime is there before ranks are forked, so that none of them is late."""
    load_parts(PARTS)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that read all but the smallest blocks in each other's memory."""
    if not Ranks(2, lambda comm: comm.reads_directly).run()[0]:
        pytest.skip("this system does not let a process read another one's memory")
    for name in ("DIRECT_FROM_BYTES", "DIRECT_SUM_FROM_BYTES"):
        monkeypatch.setattr(shm, name, 16)
        monkeypatch.setattr(shm, f"{name}_SHARED", 16)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("size, whole", [(2, 1 << 20), (2, 0), (3, 0)])
def test_direct_ranks_meet_python_ranks(size: int, whole: int, monkeypatch: pytest.MonkeyPatch):
    """The same where blocks are read where they lie; a reduction as a whole, or in parts."""
    monkeypatch.setattr(direct_plan, "WHOLE_BYTES", whole)
    meet(size, [case for case in CASES if case.count > 1][size % 2 :: 8])


@pytest.mark.parametrize("size", [2, 3])
def test_native_ranks_meet_python_ranks(size: int):
    """The whole table: native on some ranks, Python on the others, the other way round next."""
    meet(size, CASES if size == 2 else CASES[::3])


def meet(size: int, cases: Sequence[Case]) -> None:
    """Compare what ranks get with what the cases say."""

    def body(comm: ShmCommunicator) -> int:
        for number, case in enumerate(cases):
            if (number + comm.rank) % 2:
                case.check(comm)
                continue
            given = case.give(comm.rank, size)
            wanted = case.expect(comm.rank, size)
            out = np.full(wanted.size, given[0] if given.size else 0, wanted.dtype)
            run_native(comm, rounds_of(comm, case), [given], [out])
            assert out.tobytes() == wanted.tobytes(), f"rank {comm.rank}: {case}"
        return len(cases)

    assert raised(Ranks(size, body).run(timeout=120)) == [len(cases)] * size


@dataclass
class Exchanged:
    """A random collective of several devices a process: its rounds, and what it must give."""

    rounds: ExchangePlan
    inputs: list[np.ndarray]  # of all devices
    wanted: list[np.ndarray]


def random_exchange(
    rng: np.random.Generator, rank: int, size: int, devices: int, reads_directly: bool
) -> Exchanged:
    """Random groups, rows and blocks; slots so small that everything goes in pieces."""
    sizes = int(rng.choice([64, 200, 4096])), 64, int(rng.choice([8, 9999]))
    if reads_directly and rng.integers(2):
        limits = Limits(*sizes, direct_from=int(rng.choice([1, 40])), direct_piece=72)
        planner = DirectPlanner(rank, size, limits)
    else:
        planner = Planner(rank, size, Limits(*sizes))
    total = size * devices
    width = int(rng.choice([n for n in range(1, total + 1) if total % n == 0]))
    groups = rng.permutation(total).reshape(-1, width)
    dtype = np.dtype(rng.choice(["float32", "int16", "float16", "int64"]))
    operand = Operand(dtype, int(rng.integers(1, 4)), int(rng.integers(0, 12)))
    kind = str(rng.choice(["all_reduce", "all_gather", "all_to_all", "reduce_scatter"]))
    parts = width if kind in ("all_to_all", "reduce_scatter") else 1
    shape = (operand.rows, parts, operand.count)
    inputs = [rng.integers(-9, 9, shape).astype(dtype) for _ in range(total)]
    members = [[Member(k // devices, k % devices) for k in group] for group in groups]
    wanted: list[Any] = [None] * total
    for group in groups:
        given = [inputs[k] for k in group]
        for j, k in enumerate(group):
            if kind == "all_reduce":
                # Numbers so small that sums are exact in any order.
                wanted[k] = reduce_in_order(ReduceOp.SUM, [x.reshape(-1) for x in given])
            elif kind == "all_gather":
                wanted[k] = np.concatenate(given, 1)
            elif kind == "all_to_all":
                wanted[k] = np.concatenate([x[:, j : j + 1] for x in given], 1)
            else:
                columns = [np.ascontiguousarray(x[:, j]).reshape(-1) for x in given]
                wanted[k] = reduce_in_order(ReduceOp.SUM, columns)
    if kind == "all_reduce":
        zero = bytes(max(dtype.itemsize, 4))
        return Exchanged(planner.all_reduce(ReduceOp.SUM, operand, members, zero), inputs, wanted)
    takes, sums, scratch = [], [], 0
    for group in members:
        for number, mine in enumerate(group):
            if mine.rank != rank:
                continue
            part = 0 if kind == "all_gather" else number
            if kind == "reduce_scatter":
                block = operand.whole
                at = [Place(Memory.SCRATCH, 0, scratch + j * block) for j in range(width)]
                takes += [Take(m, part, p, operand.block) for m, p in zip(group, at, strict=True)]
                sums.append(Sum(ReduceOp.SUM, mine.device, tuple(at)))
                scratch += width * block
                continue
            for j, member in enumerate(group):
                goal = Place(Memory.OUTPUT, mine.device, j * operand.block)
                takes.append(Take(member, part, goal, width * operand.block))
    return Exchanged(planner.exchange(operand, parts, devices, takes, sums), inputs, wanted)


@pytest.mark.parametrize("size, devices", [(2, 1), (2, 3), (3, 2)])
def test_random_exchanges(size: int, devices: int):
    """Native ranks and ranks that interpret the rounds with NumPy give what NumPy alone gives."""

    def body(comm: ShmCommunicator) -> None:
        mine = slice(comm.rank * devices, (comm.rank + 1) * devices)
        for seed in range(60):
            rng = np.random.default_rng(seed)
            made = random_exchange(rng, comm.rank, size, devices, comm.reads_directly)
            inputs, wanted = made.inputs[mine], made.wanted[mine]
            outputs = [np.full(w.shape, -1, w.dtype) for w in wanted]
            if (seed + comm.rank) % 2:
                comm.run_rounds(made.rounds, inputs, outputs)
            else:
                run_native(comm, made.rounds, inputs, outputs)
            for out, w in zip(outputs, wanted, strict=True):
                assert out.tobytes() == w.tobytes(), (seed, made.rounds.call, comm.rank)

    assert raised(Ranks(size, body).run(timeout=60)) == [None] * size


def test_in_place():
    def body(comm: ShmCommunicator) -> list[float]:
        found = []
        for count in (3, 3000):
            x = np.full(count, comm.rank + 1, np.float32)
            case = Case("all_reduce", "float32", count, ReduceOp.SUM)
            run_native(comm, rounds_of(comm, case), [x], [x])
            found.append(float(x.min()))
        return found

    assert raised(Ranks(3, body).run()) == [[6.0, 6.0]] * 3


@pytest.mark.usefixtures("direct")
def test_what_the_others_read_is_not_written_over():
    def body(comm: ShmCommunicator) -> str:
        rounds = rounds_of(comm, Case("all_reduce", "float32", 100, ReduceOp.SUM))
        step = RankExchange(rounds, comm.state.address, comm.state.take, Slot(0), Slot(0), Slot(1))
        with pytest.raises(ValueError) as caught:
            build_program(Program((400, rounds.scratch), (step,)))
        return str(caught.value)

    assert "the others read the input while" in Ranks(2, body).run()[0]


@pytest.mark.usefixtures("direct")
def test_an_all_reduce_in_python_may_be_in_place():
    def body(comm: ShmCommunicator) -> list[float]:
        x = np.arange(1000.0)
        comm.all_reduce(x)
        return x.tolist()

    assert Ranks(3, body).run() == [(3 * np.arange(1000.0)).tolist()] * 3


def test_a_loop_meets_in_every_round():
    def body(comm: ShmCommunicator) -> float:
        case = Case("all_reduce", "float32", 1, ReduceOp.SUM)
        rounds = rounds_of(comm, case)
        comm.announce(rounds.call)
        step = RankExchange(rounds, comm.state.address, comm.state.take, Slot(0), Slot(0))
        x, go = np.ones(1, np.float32), np.zeros(1, np.bool_)
        trips = itertools.count()

        def again(device: int, inputs: list, outputs: list) -> None:
            go[0] = next(trips) < 10

        test = (Host(again, (), ()),)
        native = build_program(Program((4, 1), (While(test, Slot(1), (step,)),)))
        frames = native.new_frames()
        frames[:2] = x.ctypes.data, go.ctypes.data
        native.run(frames)
        return float(x[0])

    assert raised(Ranks(2, body).run()) == [1024.0, 1024.0]


# ---- trouble -------------------------------------------------------------------------------------


def native_sum(comm: ShmCommunicator, count: int = 3) -> None:
    """An all_reduce of float32 in native code."""
    x, out = np.ones(count, np.float32), np.empty(count, np.float32)
    case = Case("all_reduce", "float32", count, ReduceOp.SUM)
    run_native(comm, rounds_of(comm, case), [x], [out])
    assert np.all(out == comm.size)


def test_a_killed_rank_is_named():
    def body(comm: ShmCommunicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        native_sum(comm)

    results = Ranks(3, body).run(timeout=30)
    for rank in (0, 2):
        assert isinstance(results[rank], PeerError), results
        assert "rank 1 (process" in str(results[rank])
        assert "ended without a word" in str(results[rank])
        assert f"while rank {rank} waited for it in all_reduce(sum) of float32[3]" in str(
            results[rank]
        )
        assert "its last was barrier (#0)" in str(results[rank])


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("last_word", "expected"),
    [
        (
            None,
            r"rank 1 \(process \d+\) ended without a word \(killed, or out of memory\) "
            r"while rank 0 read from it; its last was all_reduce\(sum\) of float32\[1000\]",
        ),
        ("raised", r"\Arank 1: ZeroDivisionError\Z"),
        ("left", r"rank 1 left the program \(exit code 4\) while rank 0 (read from|waited for) it"),
    ],
)
def test_a_rank_that_ends_while_it_is_read_from_is_named(
    native: bool, last_word: str | None, expected: str
):
    def body(comm: ShmCommunicator) -> None:
        pages = comm._pages
        if comm.rank == 1:  # it is there at the meeting, and gone afterwards
            gone = FORK.Process(target=int)
            gone.start()
            gone.join()
            pages.words[pages.word(1, shm_layout.PROCESS)] = gone.pid or 0
        if comm.rank == 0:
            comm._sees_processes = False  # it would find that out while it waits, too
        comm.barrier()
        if comm.rank == 1 and last_word == "raised":
            comm.announce_failure("rank 1: ZeroDivisionError")
        elif comm.rank == 1 and last_word == "left":
            comm.announce_exit(4)
        if native or comm.rank == 1:
            native_sum(comm, 1000)
        else:
            comm.all_reduce(np.ones(1000, np.float32))

    error = Ranks(2, body).run(timeout=60)[0]
    assert isinstance(error, PeerError)
    assert re.search(expected, str(error))


@pytest.mark.usefixtures("direct")
def test_a_rank_killed_in_the_middle_ends_the_others():
    def body(comm: ShmCommunicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            setattr(comm, "_read", lambda *_: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010
            comm.all_reduce(np.ones(300_000, np.float32))
        native_sum(comm, 300_000)

    for error in Ranks(3, body).run(timeout=60)[::2]:
        assert isinstance(error, PeerError) and "rank 1 (process" in str(error), error


@pytest.mark.usefixtures("direct")
def test_memory_that_cannot_be_read_is_reported(monkeypatch: pytest.MonkeyPatch):
    def body(comm: ShmCommunicator) -> None:
        if comm.rank == 0:
            pages, real = comm._pages, comm._pages.show
            pages.show = lambda addresses: real([8] * len(addresses))  # nothing is there
            comm.all_reduce(np.ones(1000, np.float32))
        else:
            native_sum(comm, 1000)

    monkeypatch.setattr(shm, "DEATH_SECONDS", 0.2)
    error = Ranks(2, body).run(timeout=60)[1]
    assert isinstance(error, CollectiveError)
    assert "rank 1 | could no longer read the memory of rank 0 (process" in str(error)
    assert "SPMD_DIRECT_READS=0" in str(error)


def test_ranks_that_may_not_read_send_large_arrays_through_slots(
    monkeypatch: pytest.MonkeyPatch,
):
    def body(comm: ShmCommunicator) -> tuple[bool, type]:
        native_sum(comm, 300_000)
        return comm.reads_directly, type(comm.planner())

    # One rank that cannot is enough.
    monkeypatch.setattr(direct_read, "can_read", lambda offer: offer[0] == os.getpid())
    assert raised(Ranks(2, body).run()) == [(False, Planner)] * 2


def test_long_reads_are_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(direct_plan, "MOST_BYTES", 100)
    place = Place(Memory.OUTPUT)
    rows = list(direct_plan.reads(Read(place, 1, 0, 7, 60, 2, 80, 90)))
    assert rows == [Read(place, 1, 0, 7, 60), Read(place + 80, 1, 0, 97, 60)]
    pieces = list(direct_plan.reads(Read(place, 1, 0, 7, 250)))
    assert [(p.target.offset, p.offset, p.width) for p in pieces] == [
        (0, 7, 100),
        (100, 107, 100),
        (200, 207, 50),
    ]
    together = Read(place, 1, 0, 0, 10, 5, 20, 30)
    assert list(direct_plan.reads(together)) == [together]


def test_a_rank_that_announces_its_failure_is_quoted():
    def body(comm: ShmCommunicator) -> None:
        if comm.rank == 2:
            time.sleep(0.1)
            comm.announce_failure("rank 2: ZeroDivisionError at train.py:41")
            time.sleep(1)
        else:
            native_sum(comm)

    wanted = "PeerError: rank 2: ZeroDivisionError at train.py:41"
    assert raised(Ranks(3, body).run(timeout=30)) == [wanted, wanted, None]


def test_a_rank_that_leaves_is_named():
    def body(comm: ShmCommunicator) -> None:
        if comm.rank == 0:
            native_sum(comm)

    error = Ranks(2, body).run(timeout=30)[0]
    assert isinstance(error, PeerError)
    assert "rank 1 left the program (exit code 0) while rank 0 waited for it in all_red" in str(
        error
    )


def test_different_collectives_are_reported_on_every_rank_and_leave_the_group_usable():
    def body(comm: ShmCommunicator) -> str:
        with pytest.raises(CollectiveError) as caught:
            if comm.rank == 1:
                comm.broadcast(np.zeros(3, np.float32), 0)
            else:
                native_sum(comm)
        native_sum(comm)
        comm.barrier()
        return str(caught.value)

    texts = Ranks(3, body).run(timeout=30)
    assert len(set(texts)) == 1
    assert "collective #0 differs between ranks" in texts[0]
    assert "ranks 0, 2: all_reduce(sum) of float32[3]" in texts[0]
    assert "rank 1: broadcast of float32[3] with root=0" in texts[0]


def test_a_late_rank_is_named_with_its_last_call():
    def body(comm: ShmCommunicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            time.sleep(3.0)
            return
        with config.override("collective_timeout", 0.2):
            native_sum(comm)

    error = Ranks(2, body).run(timeout=30)[0]
    assert isinstance(error, CollectiveError)
    assert "all_reduce(sum) of float32[3] (#1 of world) waited " in str(error)
    assert "for rank 1:\n  rank 1: its last was barrier (#0)" in str(error)
    assert "SPMD_COLLECTIVE_TIMEOUT" in str(error)


def test_a_rank_that_waits_can_be_interrupted():
    def body(comm: ShmCommunicator) -> Any:
        if comm.rank == 1:
            time.sleep(1.5)
            return None
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            native_sum(comm)
        except KeyboardInterrupt:
            return "interrupted"

    assert Ranks(2, body).run(timeout=30)[0] == "interrupted"


def test_other_threads_of_python_run_while_a_rank_waits():
    def body(comm: ShmCommunicator) -> int:
        if comm.rank == 1:
            time.sleep(0.5)
        counted = [0]
        done = threading.Event()

        def count() -> None:
            while not done.is_set():
                counted[0] += 1
                time.sleep(0.01)

        thread = threading.Thread(target=count)
        thread.start()
        native_sum(comm)
        done.set()
        thread.join()
        return counted[0]

    assert Ranks(2, body).run(timeout=30)[0] > 5


def test_large_arrays_pass_in_chunks():
    def body(comm: ShmCommunicator) -> tuple[float, float]:
        count = 3 * shm_layout.slot_bytes(comm.size) // 4 + 5
        native_sum(comm, count)
        x, out = np.full(count, comm.rank + 1, np.float32), np.empty(2 * count, np.float32)
        rounds = comm.planner().all_gather(Operand(F32, 1, count), [1, 0])
        run_native(comm, rounds, [x], [out])
        return float(out[0]), float(out[-1])

    assert raised(Ranks(2, body).run()) == [(2.0, 1.0)] * 2


def test_places_outside_are_refused():
    rounds = Planner(0, 2, Limits(4096, 4096, 99)).all_gather(Operand(F32, 1, 8), [0, 1])

    def body(comm: ShmCommunicator) -> str:
        step = RankExchange(rounds, comm.state.address, comm.state.take, Slot(0), Slot(1))
        with pytest.raises(ValueError) as caught:
            build_program(Program((32, 32), (step,)))
        return str(caught.value)

    assert "bytes [0, 64) of base 1, which holds 32" in Ranks(2, body).run()[0]
