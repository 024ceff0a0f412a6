"""Ranks as forked processes that share memory: no MPI is needed to test this transport."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from spmd.base.config import config
from spmd.base.errors import CollectiveError, LaunchError, PeerError
from spmd.transport.origin import Origin
from spmd.transport.shm import layout as shm_layout
from spmd.transport.shm import segment as shm_segment
from spmd.transport.shm import wait as shm_wait
from tests.transport.cases import all_cases, check_all
from tests.transport.shm.forked import Ranks, raised

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="forked ranks are only tested on Linux"
)


@pytest.mark.parametrize("size", [2, 3])  # four run under mpirun
def test_cases(size: int):
    assert raised(Ranks(size, check_all).run(timeout=60)) == [len(all_cases())] * size


def test_no_name_is_left_behind():
    def body(comm):
        comm.barrier()
        names = sorted(Path("/dev/shm").glob(f"{shm_segment.PREFIX}*-{os.getppid()}-*"))
        return names, os.getpid()

    found = raised(Ranks(2, body).run(timeout=60))
    assert [type(each) for each in found] == [tuple, tuple], found
    assert [names for names, _ in found] == [[], []]
    # Names hold the process that made them: jobs of other tests may have theirs at this moment.
    ours = {os.getpid(), *(pid for _, pid in found)}
    left = Path("/dev/shm").glob(f"{shm_segment.PREFIX}*")
    assert [path for path in left if int(path.name.split("-")[2]) in ours] == []


def test_large_arrays_pass_in_chunks(size=2):
    def body(comm):
        count = 3 * shm_layout.slot_bytes(comm.size) // 4 + 5
        x = np.full(count, comm.rank + 1.0, np.float32)
        gathered = np.empty(2 * count, np.float32)
        comm.all_gather(x, gathered)
        comm.all_reduce(x)
        return bool(np.all(x == 3)), float(gathered[0]), float(gathered[-1])

    assert raised(Ranks(size, body).run()) == [(True, 1.0, 2.0)] * 2


# ---- failures ----------------------------------------------------------------------------------


def test_a_killed_rank_is_named():
    def body(comm):
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(np.zeros(3))

    began = time.monotonic()
    results = Ranks(3, body).run(timeout=10)
    assert time.monotonic() - began < 5
    for rank in (0, 2):
        assert isinstance(results[rank], PeerError), results
        assert "rank 1 (process" in str(results[rank])
        assert "ended without a word" in str(results[rank])
        assert "its last was barrier (#0)" in str(results[rank])


def test_a_rank_that_ended_because_of_another_does_not_hide_it():
    def body(comm):
        processes = np.empty(3, np.int32)
        comm.all_gather(np.array([os.getpid()], np.int32), processes)
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for rank in (1, 0):
            while shm_layout.is_alive(int(processes[rank])):
                time.sleep(0.01)
            if comm.rank == 0:
                os._exit(3)  # without a word
        comm.barrier()

    error = str(Ranks(3, body).run(timeout=10)[2])
    assert "rank 0 (process" in error.splitlines()[0]
    assert "rank 1 (process" in error.splitlines()[1]
    assert "is gone, too; its last was barrier (#1)" in error.splitlines()[1]


def test_a_rank_that_announces_its_failure_is_quoted():
    def body(comm):
        if comm.rank == 2:
            comm.announce_failure("rank 2: ZeroDivisionError at train.py:41")
            time.sleep(1)
        else:
            comm.barrier()

    results = Ranks(3, body).run(timeout=10)
    wanted = "PeerError: rank 2: ZeroDivisionError at train.py:41"
    assert raised(results) == [wanted, wanted, None]


def test_a_rank_that_leaves_is_named():
    def body(comm):
        if comm.rank == 0:
            comm.barrier()
        time.sleep(0.2)

    results = Ranks(2, body).run(timeout=10)
    assert "rank 1 left the program (exit code 0) while rank 0 waited for it in barrier" in str(
        results[0]
    )


def test_different_collectives_are_reported_on_every_rank_and_leave_the_group_usable():
    def body(comm):
        x = np.zeros(4, np.float32)
        try:
            if comm.rank == 1:
                comm.broadcast(x, 0)
            else:
                comm.all_reduce(x)
        except CollectiveError as error:
            comm.barrier()
            return str(error)

    texts = Ranks(3, body).run(timeout=10)
    assert len(set(texts)) == 1
    assert "collective #0 differs between ranks" in texts[0]
    assert "ranks 0, 2: all_reduce(sum) of float32[4]" in texts[0]
    assert "rank 1: broadcast of float32[4] with root=0" in texts[0]


def test_a_call_of_equal_law_is_told_from_the_line_it_has_now():
    """The comparison of a second new program: nothing that the ranks compare before it differs."""

    def body(comm):
        assert comm.compare(7, Origin(program="first"))
        comm.barrier()
        try:
            if comm.rank == 1:
                comm.compare(8, Origin(program="second"))
            else:
                comm.barrier()
        except CollectiveError as error:
            return str(error)

    texts = Ranks(2, body).run(timeout=10)
    assert "rank 1: a new program, second" in texts[0] and "first" not in texts[0]


def test_a_late_rank_is_named_with_its_last_call():
    def body(comm):
        comm.all_gather_object("once")
        if comm.rank == 1:
            time.sleep(1.0)
            return None
        with config.override("collective_timeout", 0.2):
            comm.all_reduce(np.zeros(3))

    error = Ranks(2, body).run(timeout=10)[0]
    assert isinstance(error, CollectiveError)
    assert "all_reduce(sum) of float64[3] (#2 of world) waited 0." in str(error)
    assert "for rank 1:\n  rank 1: its last was all_gather_object of uint8[" in str(error)
    assert "SPMD_COLLECTIVE_TIMEOUT" in str(error)


# ---- pieces ------------------------------------------------------------------------------------


def test_a_wake_ends_a_park():
    segment = shm_segment.create(shm_layout.segment_bytes(2))
    segment.unlink()
    waiter = shm_layout.ControlBlocks(segment.memory, 0, 2)
    pid = os.fork()
    if pid == 0:
        poster = shm_layout.ControlBlocks(segment.memory, 1, 2)
        time.sleep(0.2)
        poster.post(1)
        os._exit(0)
    waiter.words[waiter.word(1, shm_layout.WAITED_FOR)] = 1
    began = time.monotonic()
    while waiter.missing(1) == [0, 1]:
        shm_wait.park(waiter.address_of(1), 0, 60.0)
    assert 0.1 < time.monotonic() - began < 20.0  # the wake ended it, not its time
    assert os.waitpid(pid, 0)[1] == 0


def test_sweep_removes_only_what_crashed_jobs_left():
    mine = shm_segment.create(4096)
    dead = Path(f"/dev/shm/{shm_segment.PREFIX}{os.getuid()}-999999999-abc")
    dead.write_bytes(b"")
    later = time.time() + 2 * shm_segment.STALE_SECONDS
    try:
        assert str(dead) not in shm_segment.sweep()  # too young to judge
        removed = shm_segment.sweep(later)
        assert str(dead) in removed
        assert mine.path not in removed  # its creator lives
    finally:
        mine.unlink()
        dead.unlink(missing_ok=True)


def test_no_room_is_an_error_that_says_what_to_do(monkeypatch, tmp_path):
    def full(fd, offset, nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LaunchError, match=r"(?s)no folder has room for 1 MiB.*--shm-size"):
        shm_segment.create(1 << 20)


def test_slots_fit_their_budget():
    for size in (2, 3, 4, 8, 24, 100):
        assert shm_layout.slot_bytes(size) % shm_layout.PAGE == 0
        assert shm_layout.LEAST_SLOT_BYTES <= shm_layout.slot_bytes(size) <= shm_layout.SLOT_BYTES
    assert 2 * 24 * shm_layout.slot_bytes(24) <= shm_layout.BUDGET_BYTES
