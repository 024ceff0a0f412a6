"""Ranks as threads of one process, and what they do when one of them fails."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from spmd.base.config import config
from spmd.base.errors import CollectiveError, PeerError
from spmd.transport.communicator import ReduceOp
from spmd.transport.threads import LocalGroup
from tests.transport.cases import all_cases, check_all


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_case_holds_in_groups_of_any_size(size: int):
    assert LocalGroup(size).run(check_all) == [len(all_cases())] * size


def catch(comm, body):
    try:
        body(comm)
    except Exception as error:
        return error
    return None


def test_a_rank_that_raises_stops_the_others():
    seen = {}

    def body(comm):
        try:
            if comm.rank == 1:
                return 1 // 0
            comm.barrier()
        except PeerError as error:
            seen[comm.rank] = str(error)
            raise

    with pytest.raises(ZeroDivisionError):
        LocalGroup(3).run(body)
    assert sorted(seen) == [0, 2]
    assert seen[0].startswith("rank 1: ZeroDivisionError at test_threads.py:")


def test_a_rank_that_returns_early_stops_the_others():
    def body(comm):
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(PeerError, match=r"rank 1 left the program while rank \d waited .* barrier"):
        LocalGroup(3).run(body)


def test_different_collectives_are_reported_on_every_rank():
    def body(comm):
        x = np.zeros(4, np.float32)
        if comm.rank == 2:
            return catch(comm, lambda c: c.all_gather(x, np.zeros(16, np.float32)))
        return catch(comm, lambda c: c.all_reduce(x))

    errors = LocalGroup(4).run(body)
    assert {type(error) for error in errors} == {CollectiveError}
    assert len({str(error) for error in errors}) == 1
    assert "ranks 0, 1, 3: all_reduce(sum) of float32[4]" in str(errors[0])
    assert "rank 2: all_gather of float32[4]" in str(errors[0])


@pytest.mark.parametrize(
    "other",
    [
        lambda c: c.all_reduce(np.zeros(4, np.float32), ReduceOp.MAX),
        lambda c: c.all_reduce(np.zeros(4, np.float64)),
        lambda c: c.all_reduce(np.zeros(5, np.float32)),
        lambda c: c.permute(np.zeros(4, np.float32), np.zeros(4, np.float32), [(0, 1)]),
    ],
    ids=["op", "dtype", "count", "kind"],
)
def test_calls_that_differ_in_any_way_are_refused(other):
    def body(comm):
        mine = other if comm.rank else (lambda c: c.all_reduce(np.zeros(4, np.float32)))
        return catch(comm, mine)

    assert all(isinstance(error, CollectiveError) for error in LocalGroup(2).run(body))


def test_a_rank_that_is_late_is_named():
    def body(comm):
        if comm.rank == 1:
            time.sleep(0.6)
        return catch(comm, lambda c: c.barrier())

    with config.override("collective_timeout", 0.1):
        errors = LocalGroup(2).run(body)
    waited = re.search(r"rank 0 \| barrier waited (\d+\.\d) s for rank 1", str(errors[0]))
    assert waited and float(waited[1]) >= 0.1


def test_abort_ends_every_rank():
    def body(comm):
        if comm.rank == 0:
            comm.abort("the disk is full")
        comm.barrier()

    with pytest.raises(PeerError, match="rank 0: the disk is full"):
        LocalGroup(2).run(body)
