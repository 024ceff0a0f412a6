"""Fault injection: what faults are read from, and what they do to the calls of a rank."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from spmd.base.errors import CollectiveError, LaunchError
from spmd.transport.checked import CheckedCommunicator
from spmd.transport.communicator import ReduceOp
from spmd.transport.fault_injection import (
    HELP,
    Fault,
    InjectedFault,
    InjectingCommunicator,
    Injector,
    parse,
    wrapped,
)
from spmd.transport.shm.communicator import ShmCommunicator
from spmd.transport.threads import LocalGroup


def test_each_fault_that_the_help_shows_can_be_read():
    lines = [line.split()[0] for line in HELP.splitlines() if line.startswith("  ")]
    faults = parse(";".join(line.replace("[", "").replace("]", "") for line in lines), ranks=3)
    assert [f.what for f in faults] == ["delay", "kill", "skip", "swap-op", "corrupt", "raise"]
    assert faults[0] == Fault("delay", 2, op=17, seconds=30.0)
    assert faults[1] == Fault("kill", 1, op=5, signal=9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil:rank=1,op=5", "'kil' is no fault; known: delay, kill, skip, swap-op, corrupt, raise"),
        ("kill:rank=1,opp=5", "'opp=5'; kill takes rank=, op=, step=, attempt=, signal="),
        ("skip:rank=1,op", "'op'; skip takes"),
        ("skip:rank=one,op=1", "'rank=one' needs a number"),
        ("skip:rank=-1,op=1", "'rank=-1' cannot be negative"),
        ("kill:op=5", "say rank=R, and op=N or step=N"),
        ("kill:rank=1", "say rank=R, and op=N or step=N"),
        ("kill:rank=1,op=1,step=1", "say rank=R, and op=N or step=N"),
        ("kill:rank=1,op=1,signal=777", "there is no signal 777"),
        ("delay:rank=1,op=5", "say for how long: s=30"),
        ("raise:rank=4,op=5", "rank=4; this job has ranks 0 to 3"),
    ],
)
def test_a_slip_is_named(text: str, message: str):
    with pytest.raises(ValueError) as caught:
        parse(f"skip:rank=0,op=0;{text}", ranks=4)
    assert str(caught.value).startswith(text + ":") and message in str(caught.value)


def job(ranks: int, fault: str, body):
    """Run `body(comm)` on ranks with a fault; gives what each returned."""

    def run(comm):
        mine = [f for f in parse(fault, ranks) if f.rank == comm.rank]
        return body(InjectingCommunicator(comm, Injector(mine, step=lambda: STEP[0])))

    return LocalGroup(ranks).run(run)


STEP = [-1]


def three_sums(comm) -> list[float]:
    seen = []
    for k in range(3):
        x = np.full(2, 1.0 + comm.rank + 10 * k)
        comm.all_reduce(x)
        seen.append(float(x[0]))
    return seen


def test_without_a_fault_nothing_changes():
    assert job(2, "delay:rank=1,op=9,s=0", three_sums) == [[3.0, 23.0, 43.0]] * 2


def test_a_delay_makes_its_rank_late():
    began = time.monotonic()
    assert job(2, "delay:rank=1,op=1,s=0.3", three_sums) == [[3.0, 23.0, 43.0]] * 2
    assert time.monotonic() - began >= 0.3


def test_corrupt_flips_one_bit_of_what_one_rank_receives():
    plain, hit = job(2, "corrupt:rank=1,op=1,bit=63", three_sums)
    assert plain == [3.0, 23.0, 43.0] and hit == [3.0, -23.0, 43.0]


def test_swap_op_is_found_by_the_ranks():
    with pytest.raises(CollectiveError, match=r"(?s)all_reduce\(sum\).*all_reduce\(max\)"):
        job(2, "swap-op:rank=1,op=1", three_sums)


def test_skip_makes_the_next_call_meet_the_wrong_one():
    def body(comm):
        comm.all_reduce(np.zeros(2))
        comm.barrier()

    with pytest.raises(CollectiveError, match=r"(?s)rank 0: all_reduce.*rank 1: barrier"):
        job(2, "skip:rank=1,op=0", body)


def test_raise_names_the_variable_that_asked_for_it():
    with pytest.raises(InjectedFault, match="asked for by SPMD_INJECT, at collective 2"):
        job(2, "raise:rank=0,op=2", three_sums)


def test_groups_count_together_and_objects_do_not_count():
    def body(comm):
        comm.all_gather_object("spmd's own")
        half = comm.split(comm.rank % 2)
        half.barrier()  # op 0
        x = np.ones(1)
        comm.all_reduce(x)  # op 1
        return x[0]

    assert job(2, "corrupt:rank=0,op=1,bit=63", body) == [-2.0, 2.0]


def test_a_fault_may_wait_for_the_users_step():
    def body(comm):
        seen = []
        for step in range(4):
            if comm.rank == 0:
                STEP[0] = step
            x = np.ones(1)
            comm.all_reduce(x)
            seen.append(float(x[0]))
        return seen

    assert job(1, "corrupt:rank=0,step=2,bit=63", body) == [[1.0, 1.0, -1.0, 1.0]]


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.all_gather(np.ones(1), np.ones(2)),
        lambda c: c.reduce_scatter(np.ones(2), np.ones(1), ReduceOp.MAX),
        lambda c: c.all_to_all(np.ones(2), np.ones(2)),
        lambda c: c.permute(np.ones(1), np.ones(1), [(0, 1), (1, 0)]),
        lambda c: c.broadcast(np.ones(1)),
        lambda c: c.barrier(),
    ],
    ids=["all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "barrier"],
)
def test_every_collective_can_be_swapped_and_raises(call):
    with pytest.raises(CollectiveError, match="differs between ranks"):
        job(2, "swap-op:rank=1,op=0", call)
    with pytest.raises(InjectedFault):
        job(2, "raise:rank=1,op=0", call)


def test_all_that_a_transport_implements_is_forwarded():
    own = [name for name in vars(ShmCommunicator) if name in dir(CheckedCommunicator)]
    public = {name for name in own if not name.startswith("_")}
    assert {"announce_held", "announce_failure", "trouble"} <= public
    assert public <= vars(InjectingCommunicator).keys()


def test_kill_sends_a_signal(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    job(1, "kill:rank=0,op=0,signal=11", three_sums)
    assert sent == [(os.getpid(), signal.SIGSEGV)]


def test_faults_belong_to_a_start_of_the_job(capsys):
    def body(comm):
        again = {"SPMD_INJECT": "raise:rank=0,op=0", "SPMD_RESTART": "1"}
        assert wrapped(comm, lambda: -1, {}) is comm
        assert not wrapped(comm, lambda: -1, again).injector.faults
        first = wrapped(comm, lambda: -1, again | {"SPMD_RESTART": "0"})
        first.injector.say_what_is_left()
        assert "raise at op=0 never struck; rank 0 made 0 collectives" in capsys.readouterr().err
        first.injector.faults.clear()
        with pytest.raises(LaunchError, match="SPMD_INJECT=x: x: 'x' is no fault"):
            wrapped(comm, lambda: -1, {"SPMD_INJECT": "x"})

    LocalGroup(1).run(body)
