"""Ranks whose programs differ, under a real mpirun: all are told the same, and none hangs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]

# What every rank is told, besides what the golden texts of the unit tests say.
TOLD = {
    "another_kind": (
        "differs in kind",
        "rank 1: pmin f32[3] over 'i' of x at collective_orders.py:",
    ),
    "another_program": ("rank 0: psum", "all_gather f32[3]"),
    "another_known_program": (
        "differs between ranks",
        "rank 1: psum f32[3] over 'i' at collective_orders.py:29 in <lambda> "
        "(called at collective_orders.py:",
    ),
    "another_shape": ("argument batch['x'] differs:", "rank 1: f32[1,2]"),
    "only_one_compiles": ("Only rank 1 compiled a new program here", "rank 1: a new program"),
    "another_length": ("in a loop of 3 rounds at", "in a loop of 4 rounds at"),
    "one_runs_out": ("collective 2 of 2 is missing on rank 1", "pmax f32[3]"),
    "op_by_op": ("rank 1: pmin f32[3] over 'i' at collective_orders.py:", "pmax f32[3]"),
    "looked_at_on_one_rank": ("fine",),
    "not_communicating": ("fine",),
    "end": ("fine",),
}


@pytest.mark.parametrize(
    "ranks, shared", [(2, "1"), (3, "1"), (3, "0")], ids=["2", "3", "3 by messages"]
)
def test_all_ranks_are_told(mpirun: Run, ranks: int, shared: str):
    names = [name for name in TOLD if name != "end"]
    program = ["-m", "tests.multiprocess.programs.collective_orders", *names]
    done = mpirun(ranks, program, env={"SPMD_SHARED_MEMORY": shared}, timeout=120)
    assert done.returncode == 0, done.stderr
    said: dict[str, set[str]] = {}
    count = 0
    for line in done.stdout.splitlines():
        while line.startswith("["):  # MPICH may join the lines of two ranks
            (_, name, text), end = json.JSONDecoder().raw_decode(line)
            said.setdefault(name, set()).add(text)
            count, line = count + 1, line[end:].lstrip()
    assert count == ranks * len(TOLD)
    for name, parts in TOLD.items():
        (text,) = said[name]  # the same on all ranks
        for part in parts:
            assert part in text, f"{name}: {text}"
