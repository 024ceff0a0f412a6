"""A job that stands still is reported and ended by spmdrun, and one that is only slow is not."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.mpi

PREAMBLE = """
import os, signal, sys, time
import numpy as np
{before}
from spmd.transport import world as bootstrap
comm = bootstrap.world()
rank, size = comm.rank, comm.size
x = np.ones(3)
comm.all_reduce(x)
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def job(tmp_path: Path) -> Run:
    """`job(ranks, options, text)` runs a program under spmdrun."""

    def run(ranks: int, options: list[str], text: str, before: str = ""):
        program = tmp_path / "train.py"
        program.write_text(PREAMBLE.format(before=before) + textwrap.dedent(text))
        line = [sys.executable, "-m", "launch", "-n", str(ranks), *options, str(program)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert not list(Path("/dev/shm").glob(f"spmdrun-flight-*{tmp_path.name}*"))
        return done

    return run


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.splitlines()[-1]


def line_of(text: str) -> int:
    """The number of the line of a program that ends with `# here`."""
    whole = PREAMBLE.format(before="") + textwrap.dedent(text)
    return next(n for n, line in enumerate(whole.splitlines(), 1) if line.endswith("# here"))


def test_a_rank_that_never_comes(job: Run):
    text = """
        def fetch():
            time.sleep(120)  # here

        if rank == 1:
            fetch()
        comm.all_reduce(x)
        """
    done = job(3, ["--stall-timeout", "6"], text)
    assert done.returncode == 124
    stalled = r"spmdrun: stalled for \d+ s: ranks 0, 2 wait in all_reduce train.py:16"
    assert re.search(stalled, done.stderr)
    assert f"/train.py:{line_of(text)} in fetch\n" in done.stderr
    assert re.search(r"spmdrun: if nothing moves, it ends in \d+ s", done.stderr)
    assert last_line(done).startswith("spmdrun: rank 1 (")
    assert f"it is at train.py:{line_of(text)} in fetch, asleep" in last_line(done)
    assert last_line(done).endswith("ranks 0, 2 were waiting in all_reduce train.py:16")


def test_a_rank_in_native_code_that_holds_the_lock(job: Run):
    """Its interpreter cannot run; the stack is had all the same."""
    text = """
        import ctypes
        if rank == 0:
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # here
        comm.all_reduce(x)
        """
    done = job(2, ["--stall-timeout", "4"], text)
    assert done.returncode == 124
    assert f"it is at train.py:{line_of(text)}, asleep" in last_line(done)


def test_a_rank_that_is_stopped(job: Run):
    text = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.all_reduce(x)
        """
    done = job(2, ["--stall-timeout", "4"], text)
    assert done.returncode == 124
    assert "is stopped by a signal; kill -CONT" in last_line(done)


def test_a_rank_that_does_not_join(job: Run):
    before = (
        "rank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ.get('PMI_RANK')\n"
        "time.sleep(120 if rank == '1' else 0)"
    )
    done = job(2, ["--stall-timeout", "4"], "", before=before)
    assert done.returncode == 124
    assert "has not joined the job" in last_line(done)
    assert "rank 0 was waiting in start-up" in last_line(done)


def test_a_rank_that_comes_late_is_no_reason_to_end_the_job(job: Run):
    done = job(
        2,
        ["--stall-timeout", "20", "--inject", "delay:rank=1,op=3,s=15"],
        """
        import time
        for step in range(4):
            comm.all_reduce(x)
        print("sum", x[0])
        time.sleep(4)  # time for spmdrun to see that it went on
        """,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["r0 | sum 32.0", "r1 | sum 32.0"]
    stalled = r"spmdrun: stalled for \d+ s: rank 0 waits in all_reduce train.py:13"
    assert re.search(stalled, done.stderr)
    assert done.stderr.endswith("spmdrun: the job goes on\n")
