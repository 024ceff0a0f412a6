"""The world of size one: every collective is a copy.

Programs are never written `if comm.size > 1`; this class makes the question unnecessary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from spmd.transport.call_signature import Call
from spmd.transport.checked import CheckedCommunicator, zero
from spmd.transport.communicator import Counts, ReduceOp


class SingleCommunicator(CheckedCommunicator):
    """One rank, alone."""

    def __init__(self, name: str = "world"):
        super().__init__(rank=0, size=1, name=name)

    def _all_reduce(self, call: Call, buf: np.ndarray, op: ReduceOp) -> None:
        pass  # the reduction of one part is that part

    def _all_gather(self, call: Call, buf: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, buf)

    def _reduce_scatter(self, call: Call, buf: np.ndarray, out: np.ndarray, op: ReduceOp) -> None:
        np.copyto(out, buf)

    def _all_to_all(self, call: Call, buf: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, buf)

    def _all_to_all_of(self, call: Call, buf: np.ndarray, out: np.ndarray, counts: Counts) -> None:
        np.copyto(out, buf)

    def _permute(
        self, call: Call, buf: np.ndarray, out: np.ndarray, pairs: Sequence[tuple[int, int]]
    ) -> None:
        if pairs:
            np.copyto(out, buf)
        else:
            zero(out)

    def _broadcast(self, call: Call, buf: np.ndarray, root: int) -> None:
        pass

    def _barrier(self, call: Call) -> None:
        pass

    def _subgroup(self, groups: list[list[int]]) -> SingleCommunicator | None:
        return SingleCommunicator(f"{self.name}/0") if groups else None

    def _end_job(self) -> None:
        sys.exit(1)
