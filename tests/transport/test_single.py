"""A world of one rank: every collective is a copy."""

from __future__ import annotations

import numpy as np
import pytest

from spmd.base.errors import CollectiveError
from spmd.transport.communicator import Communicator, ReduceOp
from spmd.transport.single import SingleCommunicator
from tests.transport.cases import Case, all_cases, check_all


@pytest.mark.parametrize("kind", sorted({case.kind for case in all_cases()}))
def test_every_case_holds_in_a_group_of_one(kind: str):
    comm = SingleCommunicator()
    for case in all_cases():
        if case.kind == kind:
            case.check(comm)


def test_groups_and_objects_hold_in_a_group_of_one():
    assert check_all(SingleCommunicator()) == len(all_cases())


def test_a_single_communicator_is_a_communicator():
    assert isinstance(SingleCommunicator(), Communicator)


def test_the_table_notices_a_wrong_result():
    class Wrong(SingleCommunicator):
        def _all_reduce(self, call, buf, op):
            buf[-1] += 1

    with pytest.raises(AssertionError, match="all_reduce-sum-float32-7"):
        Case("all_reduce", "float32", 7, ReduceOp.SUM).check(Wrong())


# ---- arguments ---------------------------------------------------------------------------------


def refusals():
    x = np.zeros(6, np.float32)
    frozen = np.zeros(6, np.float32)
    frozen.flags.writeable = False
    yield "not contiguous", "all_reduce", (np.zeros((4, 4), np.float32)[:, 1],)
    yield "read-only", "all_reduce", (frozen,)
    yield "must be a NumPy array; got list", "all_reduce", ([1.0],)
    yield "float32", "all_reduce", (x, ReduceOp.XOR)
    yield "op must be one of ReduceOp.SUM", "all_reduce", (x, "sum")
    yield "cannot be sent as plain memory", "all_reduce", (np.array([None]),)
    yield "out needs 6", "all_gather", (x, np.zeros(5, np.float32))
    yield "buf is float32 and out is float64", "all_gather", (x, np.zeros(6))
    yield "root=1", "broadcast", (x, 1)
    yield "names rank 3", "permute", (x, x.copy(), [(0, 3)])
    yield "source more than once", "permute", (x, x.copy(), [(0, 0), (0, 0)])


@pytest.mark.parametrize(("text", "call", "args"), list(refusals()), ids=lambda v: str(v)[:20])
def test_malformed_calls_are_refused(text: str, call: str, args: tuple):
    with pytest.raises(CollectiveError, match=text):
        getattr(SingleCommunicator(), call)(*args)
