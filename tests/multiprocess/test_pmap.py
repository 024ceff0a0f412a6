"""pmap and shard_map over processes, under a real mpirun: results, and every way to fail."""

from __future__ import annotations

import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]

SOME_DTYPES = ["float32", "bool", "bfloat16", "complex64"]


@pytest.mark.parametrize(
    "ranks, devices, dtypes",
    [
        pytest.param(2, 1, [], id="2"),
        pytest.param(3, 1, SOME_DTYPES, id="3"),
        pytest.param(4, 1, SOME_DTYPES, id="4", marks=pytest.mark.nightly(reason="2 and 3 run")),
        pytest.param(2, 2, SOME_DTYPES, id="2x2"),
    ],
)
def test_collectives(mpirun: Run, ranks: int, devices: int, dtypes: list[str]):
    program = ["-m", "tests.multiprocess.programs.collectives", *dtypes]
    done = mpirun(ranks, program, env={"SPMD_NUM_CPU_DEVICES": str(devices)}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"cases on {ranks} ranks x {devices} devices: all right" in done.stdout


# ---- failures ----------------------------------------------------------------------------------

PREAMBLE = """
import sys, time
import numpy as np
import spmd
from spmd import lax
rank, here = spmd.process_index(), spmd.local_device_count()
x = np.ones((here, 3), np.float32)
total = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
"""


@pytest.fixture
def job(mpirun: Run, tmp_path: Path) -> Run:
    """`job(ranks, text)` runs a program after the preamble; it must end within seconds."""

    def run(ranks: int, text: str, **env: str) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "train.py"
        program.write_text(PREAMBLE + textwrap.dedent(text))
        began = time.monotonic()
        done = mpirun(ranks, [str(program)], env=env, timeout=60)
        assert time.monotonic() - began < 20
        return done

    return run


def test_a_rank_that_raises_in_a_loop_of_pmapped_calls(job: Run):
    done = job(
        3,
        """
        for step in range(10):
            x = np.asarray(total(x)) / 3
            if rank == 1 and step == 4:
                raise ValueError("bad batch")
        """,
    )
    assert done.returncode == 1
    assert "spmd rank 1 | ValueError: bad batch" in done.stderr
    assert "rank 1: ValueError" in done.stderr.replace("spmd rank 1 | ", "")


def test_a_rank_that_calls_another_collective(job: Run):
    done = job(
        2,
        """
        f = total
        if rank == 1:
            f = spmd.pmap(lambda x: lax.all_gather(x, "i"), axis_name="i")
        f(x)
        """,
    )
    assert done.returncode == 1
    assert "CollectiveError" in done.stderr
    assert "ranks disagree about <lambda> (called at train.py:13)" in done.stderr
    assert "rank 0: psum f32[3] over 'i' of x at train.py:8" in done.stderr
    assert "rank 1: all_gather f32[3] over 'i' with dim=0" in done.stderr


def test_a_rank_that_leaves_early(job: Run):
    done = job(
        2,
        """
        total(x)
        if rank == 1:
            sys.exit(0)
        total(x)
        """,
    )
    assert done.returncode == 1
    assert "rank 1 left the program (exit code 0)" in done.stderr


def test_shapes_that_differ_between_ranks(job: Run):
    done = job(
        2,
        """
        total(x if rank == 0 else x[:, :2])
        """,
    )
    assert done.returncode == 1
    assert "CollectiveError" in done.stderr
    for rank, shape in ((0, "[1,3]"), (1, "[1,2]")):
        assert f"rank {rank}: f32{shape}" in done.stderr


def test_a_wrong_number_of_rows_says_how_many(job: Run):
    done = job(
        2,
        """
        total(np.ones((4, 3), np.float32))
        """,
    )
    assert done.returncode == 1
    assert "over 4 rows on this process needs 4 devices, but there are 1" in done.stderr
    assert "spmdrun" in done.stderr or "SPMD_NUM_CPU_DEVICES=4" in done.stderr


def test_a_map_over_all_processes_has_the_gradient_of_all_results(job: Run):
    done = job(
        2,
        """
        gradient = spmd.grad(lambda x: total(x).sum())(x)
        np.testing.assert_array_equal(gradient, np.full((here, 3), 2.0))
        """,
    )
    assert done.returncode == 0, done.stderr
