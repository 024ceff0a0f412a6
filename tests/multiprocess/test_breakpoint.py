"""`debug.breakpoint(rank=1)` over ranks: one stops, the others say that they wait, `q` ends all."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import MPI_ENVIRONMENT, ROOT, leftover_segments

pytestmark = pytest.mark.mpi

PROGRAM = """
import numpy as np
import spmd
from spmd import lax

x = np.full((1, 2), spmd.process_index() + 1.0, np.float32)
total = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")


def step(x):
    y = x * 10
    spmd.debug.breakpoint(rank=1)
    return lax.psum(y, "i")


total(x)
spmd.config.update("collective_timeout", 4.0)  # less than the stop will take
spmd.debug.breakpoint(rank=1)
total(x)
spmd.config.update("collective_timeout", 600.0)
print("sum", spmd.pmap(step, axis_name="i")(x)[0, 0], flush=True)
"""


def start(tmp_path: Path, shared: str) -> subprocess.Popen[str]:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, "-m", "launch", "-n", "3", "--stdin", "1", str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **MPI_ENVIRONMENT, "SPMD_SHARED_MEMORY": shared},
    )


def read_until(job: subprocess.Popen[str], text: str, limit: float = 90) -> str:
    """What the job prints up to `text`, on standard output."""
    assert job.stdout is not None
    read, deadline = "", time.monotonic() + limit
    while text not in read:
        assert time.monotonic() < deadline, f"{text!r} did not come; printed: {read}"
        if select.select([job.stdout], [], [], 1)[0]:
            data = os.read(job.stdout.fileno(), 1 << 16)
            assert data, f"the job ended without {text!r}: {read}{job.communicate()[1]}"
            read += data.decode()
    return read


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared_memory", "messages"])
def test_one_rank_stops_and_the_others_wait(tmp_path: Path, shared: str):
    job = start(tmp_path, shared)
    assert job.stdin is not None
    read_until(job, "spmd breakpoint on rank 1")
    time.sleep(6)
    job.stdin.write("c\n")
    job.stdin.flush()
    told = read_until(job, "spmd breakpoint on rank 1, on cpu:1 (i=1)")
    out, err = job.communicate("p y\nc\n", timeout=60)
    assert job.returncode == 0, err
    told += out
    assert "Array([20., 20.]" in told
    assert told.count("sum 60.0") == 3
    for rank in (0, 2):
        waits = f"r{rank} | spmd: waiting in psum f32[2] over 'i' at train.py:"
        assert waits in err and "for rank 1, stopped at a breakpoint" in err
    assert "r1 | spmd: waiting" not in err


def test_quitting_ends_the_job(tmp_path: Path):
    job = start(tmp_path, "1")
    read_until(job, "spmd breakpoint on rank 1")
    _, err = job.communicate("q\n", timeout=60)
    assert job.returncode != 0
    assert "BreakpointQuit" in err and "the program was ended at a breakpoint" in err
    assert not leftover_segments()
