"""The flight recorder of real ranks: what can be read while they hang, and after they died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.flight import file as flight_file
from launch.flight.diagnosis import explain
from launch.flight.file import Flight
from launch.flight.stats import collect
from launch.flight.timeline import load
from tests.conftest import MPI_ENVIRONMENT, ROOT, find_mpirun

pytestmark = pytest.mark.mpi

PREAMBLE = """
import os, sys, time
import numpy as np
import spmd
from spmd import lax
rank = spmd.process_index()
x = np.ones((1, 4), np.float32)
total = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")  # the sum
"""
SUM_LINE = PREAMBLE[: PREAMBLE.index("# the sum")].count("\n") + 1

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(ranks, text, **env)` starts a job whose flight files lie in `tmp_path/flight`."""
    jobs: list[subprocess.Popen[str]] = []

    def run(ranks: int, text: str, **env: str) -> subprocess.Popen[str]:
        program = tmp_path / "train.py"
        program.write_text(PREAMBLE + textwrap.dedent(text))
        launcher = find_mpirun()
        assert launcher is not None
        job = subprocess.Popen(
            [launcher, "-n", str(ranks), sys.executable, str(program)],
            env={
                **os.environ,
                **MPI_ENVIRONMENT,
                "SPMD_FLIGHT_DIR": str(tmp_path / "flight"),
                **env,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        jobs.append(job)
        return job

    yield run
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
        job.communicate(timeout=60)


def flights_when(folder: Path, ready: Callable[[list[Flight]], bool]) -> list[Flight]:
    """The flight files of a job as soon as they show what is waited for."""
    deadline = time.monotonic() + 90
    while True:
        flights, _ = flight_file.read_all([folder])
        if ready(flights):
            return flights
        assert time.monotonic() < deadline, explain(flights).lines()
        time.sleep(0.1)


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch.spmd_command", "flight", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize("shared", ["1", "0"], ids=["memory", "messages"])
def test_a_job_that_hangs_is_explained_while_it_hangs(start: Start, tmp_path: Path, shared: str):
    job = start(
        3,
        """
        total(x), total(x)
        if rank == 1:
            time.sleep(300)
        total(x)
        """,
        SPMD_SHARED_MEMORY=shared,
    )

    def hangs(flights: list[Flight]) -> bool:
        # Before that call ranks may wait too, for one that still compiles.
        waits = explain(flights).waits if len(flights) == 3 else ()
        return len(waits) == 1 and waits[0].call == 4 and len(waits[0].ranks) == 2

    flights_when(tmp_path / "flight", hangs)
    said = ask("--job", str(job.pid)).stdout
    place = f"psum train.py:{SUM_LINE}"
    assert said.startswith(f"rank 1 never came to {place}, where ranks 0, 2 wait for ")
    assert "rank 1 is in host code for " in said
    assert f"after {place} (call 3)" in said
    found = json.loads(ask("--json", str(tmp_path / "flight")).stdout)
    assert found["kind"] == "waiting" and found["waits"][0]["operand"] == "float32[4] over i"
    assert found["culprits"] == [{"rank": 1, "kind": "host", "text": found["culprits"][0]["text"]}]


def test_a_rank_that_was_killed(start: Start, tmp_path: Path):
    """Nothing of the rank is left but its file; the others noticed by themselves."""
    job = start(
        3,
        """
        total(x)
        if rank == 2:
            os.kill(os.getpid(), 9)
        total(x)
        """,
    )
    job.communicate(timeout=60)
    assert job.returncode
    flights, problems = flight_file.read_all([tmp_path / "flight"])
    assert not problems and [f.alive for f in flights] == [False] * 3
    found = explain(flights)
    absent = [c for c in found.culprits if c.rank == 2]
    assert absent and absent[0].kind in ("gone", "host"), found.lines()
    assert f"rank 2 never came to psum train.py:{SUM_LINE}" in found.headline


def test_a_rank_that_raised(start: Start, tmp_path: Path):
    job = start(
        2,
        """
        total(x)
        spmd.debug.step(118)
        if rank == 1:
            {}["x"]  # the mistake
        total(x)
        """,
    )
    job.communicate(timeout=60)
    text = (tmp_path / "train.py").read_text()
    line = text[: text.index("# the mistake")].count("\n") + 1
    found = explain(flight_file.read_all([tmp_path / "flight"])[0])
    assert found.kind == "raised"
    assert found.headline.startswith(f"rank 1 raised KeyError at train.py:{line}: 'x' in step 118")
    assert found.headline.endswith(f"; rank 0 was waiting in psum train.py:{SUM_LINE}")


def test_records_of_groups_and_calls(start: Start, tmp_path: Path):
    job = start(
        4,
        """
        from spmd.transport import world as bootstrap
        world = bootstrap.world()
        part = world.split(rank // 2)
        part.all_reduce(np.ones(8))
        world.barrier()
        mesh = spmd.make_mesh((2, 2), ("r", "c"))
        P = spmd.P
        f = spmd.jit(
            spmd.shard_map(
                lambda x: lax.psum(x, "c"), mesh=mesh, in_specs=P("r", "c"), out_specs=P("r", None)
            )
        )
        f(np.ones((2, 2), np.float32))
        """,
    )
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 0, out
    flights, _ = flight_file.read_all([tmp_path / "flight"])
    assert explain(flights).kind == "finished"
    for flight in flights:
        assert all(0 < r.enqueued <= r.entered <= r.completed for r in flight.collectives())
        by_kind = {r.label["kind"]: r for r in flight.collectives()}
        pair = tuple(sorted({flight.rank, flight.rank ^ 1}))
        assert flight.groups[by_kind["all_reduce"].group].ranks == pair
        assert flight.groups[by_kind["psum"].group].ranks == pair
        assert by_kind["psum"].label["axes"] == ["c"]
        assert by_kind["all_reduce"].nbytes == 64
        assert {"trace", "compile"} <= {r.label["kind"] for r in flight.records}
    # Nobody is done before all have come.
    for one in flights:
        for record in one.collectives():
            if record.label["kind"] in ("psum", "barrier", "all_reduce"):
                others = [f.call(record.group, record.call) for f in flights]
                assert all(record.completed >= r.entered for r in others if r is not None)


def test_a_rank_that_is_late_on_purpose(start: Start, tmp_path: Path):
    """The timeline names it, the line where others waited, and what it did instead."""
    folder = tmp_path / "timeline"
    job = start(
        3,
        """
        total(x), total(x)
        for k in range(6):
            with spmd.profiler.StepTraceAnnotation("train", step_num=k):
                if rank == 2 and k % 2:
                    with spmd.debug.loading():
                        time.sleep(0.3)
                total(x)
        """,
        SPMD_TRACE=str(folder),
    )
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 0, out
    stats = collect(load(folder))
    late = next(entry for entry in stats.late if entry.rank == 2 and entry.cost > 1)
    assert late.name == f"psum train.py:{SUM_LINE}"
    assert 3 <= late.times and late.reasons["waiting for data"] >= 3
    assert late.worst >= 0.2 and stats.lost == 0
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in trace} == {0, 1, 2}
    waits = [e for e in trace if e["name"] == "wait for rank 2" and e["dur"] > 200_000]
    assert {e["pid"] for e in waits} == {0, 1} and len(waits) >= 6
    assert {"train 5", "trace <lambda>", "compile <lambda>"} <= {e["name"] for e in trace}


def test_spmdrun_merges_the_timeline_of_a_job_that_died(tmp_path: Path):
    program = tmp_path / "train.py"
    program.write_text(
        PREAMBLE
        + textwrap.dedent(
            """
            total(x), total(x)
            time.sleep(1)
            if rank == 1:
                os.kill(os.getpid(), 9)
            total(x)
            """
        )
    )
    folder = tmp_path / "timeline"
    done = subprocess.run(
        [sys.executable, "-m", "launch", "-n", "2", "--log-dir", str(tmp_path), str(program)],
        env={**os.environ, **MPI_ENVIRONMENT, "SPMD_TRACE": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    notes = [e["args"].get("note") for e in trace if e["ph"] == "X" and e["pid"] == 0]
    assert "1 ranks never came" in notes
    assert {e["pid"] for e in trace if e["name"] == f"psum train.py:{SUM_LINE}"} == {0, 1}
    # The flight files of the job lie beside its logs.
    said = ask(str(tmp_path)).stdout
    assert f"rank 1 never came to psum train.py:{SUM_LINE}" in said
