"""Debugging over ranks, under a real mpirun: what one rank finds, all ranks raise."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]

TOLD = {
    "nan_on_one_rank": "FloatingPointError: pmap(step): log made a NaN on rank 1, cpu:1 (i=1) at",
    "copies_of_ranks": "['b'] float32[2]: rank {last} differs from rank 0 by up to 0.5 at [0]: 1.0",
    "copies_on_devices": "fine",
    "copies_while_running": "['x'] differs from that at i=0 at i=1 by up to 0.25",
    "op_by_op": "fine",
}


@pytest.mark.parametrize("ranks, shared", [(2, "1"), (3, "0")], ids=["2", "3 by messages"])
def test_all_ranks_reach_the_same_verdict(mpirun: Run, ranks: int, shared: str):
    program = ["-m", "tests.multiprocess.programs.debugging"]
    done = mpirun(ranks, program, env={"SPMD_SHARED_MEMORY": shared}, timeout=150)
    assert done.returncode == 0, done.stderr
    said: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        _, name, text = json.loads(line)
        said.setdefault(name, []).append(text)
    for name, told in TOLD.items():
        assert len(said[name]) == ranks and len(set(said[name])) == 1, said[name]
        assert told.format(last=ranks - 1) in said[name][0], said[name][0]
