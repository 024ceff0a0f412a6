"""The transports under a real mpirun: the case table, and every way in which a job can go wrong.

A program that fails must end its whole job within seconds, say which rank was the cause, and leave
nothing behind in /dev/shm.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import leftover_segments
from tests.transport.cases import all_cases

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]

PREAMBLE = """
import os, signal, sys, threading, time
import numpy as np
from spmd.transport import world as bootstrap
from spmd.base.errors import CollectiveError, PeerError
comm = bootstrap.world()
rank, size = comm.rank, comm.size
x = np.ones(4, np.float32)
"""


@pytest.fixture
def job(mpirun: Run, tmp_path: Path) -> Run:
    """`job(ranks, text, **env)` runs a program after the preamble; it must end by itself.

    A rank that hangs would wait for ten minutes; a minute is for machines that are busy.
    """

    def run(ranks: int, text: str, **env: str) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "train.py"
        program.write_text(PREAMBLE + textwrap.dedent(text))
        began = time.monotonic()
        done = mpirun(ranks, [str(program)], env=env, timeout=120)
        done.seconds = time.monotonic() - began
        assert done.seconds < 60, f"took {done.seconds:.1f} s"
        assert not leftover_segments()
        return done

    return run


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_cases_through_shared_memory(mpirun: Run, ranks: int):
    done = mpirun(ranks, ["-m", "tests.multiprocess.transport_cases"], timeout=240)
    assert done.returncode == 0, done.stderr
    wanted = f"{len(all_cases())} cases on {ranks} ranks through ShmCommunicator: all right\n"
    assert wanted in done.stdout


@pytest.mark.parametrize("ranks", [3])
def test_cases_through_messages(mpirun: Run, ranks: int):
    done = mpirun(
        ranks,
        ["-m", "tests.multiprocess.transport_cases"],
        env={"SPMD_SHARED_MEMORY": "0"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert f"on {ranks} ranks through MpiCommunicator: all right" in done.stdout


def test_places(job: Run):
    done = job(
        2,
        """
        assert bootstrap.process_count() == bootstrap.local_size() == 2
        assert bootstrap.process_index() == bootstrap.local_rank() == rank
        assert bootstrap.initialize(rank, 2).world is comm
        print("source", bootstrap.job().environment.source, flush=True)
        """,
    )
    assert done.returncode == 0
    assert "source OMPI_COMM_WORLD_*" in done.stdout or "source PMI_*" in done.stdout


# ---- failures ----------------------------------------------------------------------------------

TRANSPORTS = pytest.mark.parametrize("shared", ["1", "0"], ids=["shared_memory", "messages"])


@TRANSPORTS
def test_a_rank_that_raises_ends_the_job(job: Run, shared: str):
    done = job(
        3,
        """
        for step in range(10):
            comm.all_reduce(x)
            if rank == 1 and step == 3:
                step // 0
        """,
        SPMD_SHARED_MEMORY=shared,
    )
    assert done.returncode == 1
    assert "spmd rank 1 | Traceback (most recent call last):" in done.stderr
    assert "spmd rank 1 | ZeroDivisionError: integer division or modulo by zero" in done.stderr
    for peer in (0, 2):
        assert (
            f"spmd rank {peer} | stopped at train.py:11: rank 1: ZeroDivisionError at train.py:13"
            in done.stderr
        )


@TRANSPORTS
@pytest.mark.parametrize("meets", ["comm.all_reduce(x)", "add(x[None])"], ids=["call", "program"])
def test_peers_learn_within_two_seconds(job: Run, shared: str, meets: str):
    done = job(
        3,
        f"""
        import spmd
        from spmd import lax
        add = spmd.pmap(lambda v: lax.fori_loop(0, 3, lambda _, w: lax.psum(w, "i"), v), "i")
        add(x[None])
        try:
            if rank == 1:
                time.sleep(0.3)  # the others are in the middle of it
                print("raised at", time.monotonic(), flush=True)
                raise KeyError("label")
            {meets}
        except PeerError:
            print("learnt at", time.monotonic(), flush=True)
            raise
        """,
        SPMD_SHARED_MEMORY=shared,
    )
    said = [line.rsplit(None, 1) for line in done.stdout.splitlines() if " at " in line]
    raised = [float(at) for what, at in said if "raised" in what]
    learnt = [float(at) for what, at in said if "learnt" in what]
    assert len(raised) == 1 and len(learnt) == 2, done.stdout + done.stderr
    assert max(learnt) - raised[0] < 2.0
    assert done.stderr.count("rank 1: KeyError at train.py:") == 2


def test_a_thread_that_raises_ends_the_job(job: Run):
    done = job(
        2,
        """
        def load():
            raise OSError("no such shard")
        if rank == 0:
            threading.Thread(target=load).start()
        comm.all_reduce(x) if rank else time.sleep(60)
        """,
    )
    assert done.returncode == 1
    assert "spmd rank 0 | OSError: no such shard" in done.stderr
    assert "stopped at train.py:14: rank 0: OSError at train.py:11: no such shard" in done.stderr


def test_peers_may_clean_up(job: Run):
    done = job(
        2,
        """
        try:
            if rank == 0:
                raise ValueError("bad data")
            comm.barrier()
        except PeerError as error:
            print(f"saved by rank {rank} because of {error}", flush=True)
            raise
        """,
    )
    assert "saved by rank 1 because of rank 0: ValueError at train.py:12: bad data" in done.stdout
    assert done.returncode == 1


def test_a_killed_rank_ends_the_job(job: Run):
    done = job(
        3,
        """
        comm.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(x)
        """,
    )
    assert done.returncode != 0


@TRANSPORTS
def test_a_rank_that_exits_early_ends_the_job(job: Run, shared: str):
    done = job(
        2,
        """
        comm.barrier()
        if rank == 1:
            sys.exit(0)
        comm.all_reduce(x)
        """,
        SPMD_SHARED_MEMORY=shared,
    )
    assert done.returncode == 1
    assert "spmd rank 0 | stopped at train.py:13: rank 1 left the program (exit code 0)" in (
        done.stderr
    )


def test_an_exit_code_ends_the_job(job: Run):
    done = job(
        2,
        """
        comm.barrier()
        def main():
            with open(os.devnull):
                if rank == 1:
                    sys.exit(7)
            comm.all_reduce(x)
        try:
            main()
        finally:
            del x
        """,
    )
    assert done.returncode == 7


def test_an_exit_code_that_was_caught_does_not(job: Run):
    done = job(
        2,
        """
        try:
            sys.exit(7)
        except SystemExit:
            pass
        comm.barrier()
        """,
    )
    assert done.returncode == 0, done.stderr


@TRANSPORTS
def test_different_collectives_are_an_error_on_every_rank(job: Run, shared: str):
    done = job(
        3,
        """
        try:
            if rank == 1:
                comm.all_gather(x, np.empty(12, np.float32))
            else:
                comm.all_reduce(x)
        except CollectiveError as error:
            text = str(error)
        assert comm.all_gather_object(text) == [text] * 3
        if rank == 0:
            print(text)
        """,
        SPMD_SHARED_MEMORY=shared,
    )
    assert done.returncode == 0, done.stderr
    assert "ranks 0, 2: all_reduce(sum) of float32[4]" in done.stdout
    assert "rank 1: all_gather of float32[4]" in done.stdout


@TRANSPORTS
def test_a_rank_that_never_comes_is_named(job: Run, shared: str):
    done = job(
        3,
        """
        comm.barrier()
        if rank == 1:
            time.sleep(60)
        comm.all_reduce(x)
        """,
        SPMD_SHARED_MEMORY=shared,
        SPMD_COLLECTIVE_TIMEOUT="0.5",
    )
    assert done.returncode == 1
    assert "CollectiveError" in done.stderr
    # It says how long it waited: longer than asked for, where the machine has others to serve.
    waited = re.search(r"of world\) waited (\d+\.\d) s for rank 1", done.stderr)
    assert waited and float(waited[1]) >= 0.5


def test_a_forked_child_that_raises_does_not(job: Run):
    done = job(
        2,
        """
        child = os.fork() if rank == 0 else None
        if child == 0:
            try:
                sys.excepthook(ValueError, ValueError("only the child"), None)
            finally:
                os._exit(3)
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        comm.barrier()
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "ValueError: only the child" in done.stderr


def test_a_subprocess_of_a_rank_runs_alone(job: Run):
    done = job(
        2,
        """
        import subprocess
        code = "from spmd.transport import world as bootstrap; print(bootstrap.world().size)"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert out.stdout == "1\\n", out
        assert "a rank, started this process; it runs by itself" in out.stderr
        """,
    )
    assert done.returncode == 0, done.stderr


def test_two_mpis_are_an_error(run_python):
    """What a rank sees when MPICH's mpirun starts a program whose mpi4py uses Open MPI."""
    code = "from spmd.transport import world as bootstrap; bootstrap.world()"
    env = {"PMI_RANK": "1", "PMI_SIZE": "4", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    done = run_python(["-c", code], env=env, timeout=30)
    assert done.returncode == 1
    assert "the environment says rank 1 of 4 (PMI_*), and MPI says that this process is alone" in (
        done.stderr
    )
    assert "different MPIs" in done.stderr
