"""Three pretend hosts: shared memory within each, MPI between them, faults named across them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.supervise.find_mpi import find_mpi, has_ulfm
from tests.faults.corpus import Program, programs
from tests.faults.runner import run
from tests.multiprocess.pretend_hosts import Hosts, why_not

ROOT = Path(__file__).resolve().parents[2]
ACROSS = [program for program in programs() if program.hosts]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts, for as long as the tests of this file run."""
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(3) as three:
        yield three


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run one faulty program and one look-alike across hosts, or with `--all-faults` all."""
    if "program" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-faults")
        few = ("mismatched.operator", "raising.by_the_kernel", "alike_host.stopping_together")
        chosen = [program for program in ACROSS if everything or program.name in few]
        metafunc.parametrize("program", chosen, ids=lambda program: program.name)


def spmdrun(hosts: Hosts, ranks: int, slots: int, *words: str) -> str:
    """Start a program from the first host; it must end well."""
    options = ["-n", str(ranks), "--hostfile", hosts.hostfile(slots)]
    own = {"PYTHONPATH": str(ROOT), "SPMD_NUM_CPU_DEVICES": "1"}
    done = hosts.run([sys.executable, "-m", "launch", *options, *words], own)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize(
    "ranks, slots",
    [
        pytest.param(3, 1, id="one_each"),
        pytest.param(4, 2, id="two_each", marks=pytest.mark.nightly),
    ],
)
def test_all_collectives(hosts: Hosts, ranks: int, slots: int):
    said = spmdrun(hosts, ranks, slots, "-m", "tests.multiprocess.transport_cases")
    assert f"cases on {ranks} ranks through MpiCommunicator: all right" in said


@pytest.mark.mpi
def test_ranks_of_one_host_use_its_shared_memory(hosts: Hosts):
    said = spmdrun(hosts, 2, 2, "-m", "tests.multiprocess.transport_cases")
    assert "on 2 ranks through ShmCommunicator: all right" in said


@pytest.mark.mpi
def test_ranks_go_on_without_one_that_died_on_another_host(hosts: Hosts, tmp_path: Path):
    mpi = find_mpi()
    if not has_ulfm(mpi):
        pytest.skip(f"{mpi.vendor} has no ULFM here: no rank goes on after the death of another")
    words = ["--elastic", "2", "--inject", "kill:rank=1,op=9", "examples/train_digits.py"]
    folders = ["--out", str(tmp_path), "--checkpoint", str(tmp_path / "saved")]
    spmdrun(hosts, 3, 1, *words, "--epochs", "1", "--every", "2", *folders)
    assert json.loads((tmp_path / "loss.json").read_text())["processes"] == 2


MEETS = """
import time
import numpy as np
import spmd
from spmd import lax

add = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
print("sum", float(add(np.ones((1, 3), np.float32))[0, 0]), flush=True)
if spmd.process_index() == 0:
    time.sleep(2.5)  # longer than the failure detector's patience
"""
ONLY_MPI = "print('sum', float(MPI.COMM_WORLD.allreduce(1)), flush=True)\n"


@pytest.mark.mpi
@pytest.mark.parametrize(
    "text",
    [MEETS, "from mpi4py import MPI\n" + MEETS, "from mpi4py import MPI\n" + ONLY_MPI],
    ids=["spmd", "mpi4py_first", "mpi4py_alone"],
)
def test_a_job_that_could_lose_ranks_ends_when_it_lost_none(
    hosts: Hosts, tmp_path: Path, text: str
):
    if not has_ulfm(find_mpi()):
        pytest.skip("needs an MPI with ULFM")
    (tmp_path / "meets.py").write_text(text)
    words = ["--elastic", "1", "--timeout", "60", str(tmp_path / "meets.py")]
    said = spmdrun(hosts, 3, 1, *words)
    assert said.count("sum 3.0") == 3


@pytest.mark.mpi
@pytest.mark.parametrize(
    "slow",
    [
        pytest.param(False, id="fast_link"),
        pytest.param(
            True, id="slow_link", marks=pytest.mark.nightly(reason="the benchmark has a slow link")
        ),
    ],
)
def test_training_gives_the_same_as_on_one_host(hosts: Hosts, tmp_path: Path, slow: bool):
    words = ["examples/train_digits.py", "--epochs", "1", "--out", str(tmp_path / "hosts")]
    if slow:
        with hosts.slow_link(megabits=20):
            spmdrun(hosts, 3, 1, *words)
    else:
        spmdrun(hosts, 3, 1, *words)
    words[-1] = str(tmp_path / "one")
    spmdrun(hosts, 3, 3, *words)
    one, several = (json.loads((tmp_path / k / "loss.json").read_text()) for k in ("one", "hosts"))
    assert one["loss"] == several["loss"]  # the same bits


@pytest.mark.mpi
def test_exchanges_are_hidden_behind_the_program_on_a_slow_link(hosts: Hosts):
    """The benchmark, which compares the bits of all ways with those without overlap."""
    # Enough work for the backward pass to last a good part of the exchange.
    sizes = ["--layers", "5", "--width", "256", "--batch", "4096", "--steps", "3"]
    with hosts.slow_link(megabits=100):
        said = spmdrun(hosts, 2, 1, "-m", "benchmarks.overlap", *sizes)
    rows = [line.split() for line in said.splitlines() if "always" in line]
    assert len(rows) == 3, said
    # In buckets of 256 KiB all but the last layers' can fly while the backward pass goes on.
    assert 0 < int(rows[0][-1].rstrip("%")) <= 100, said


@pytest.mark.mpi
def test_faults_are_named_across_hosts(hosts: Hosts, program: Program):
    options = ["--hostfile", hosts.hostfile(-(-program.ranks // 3))]
    result = run(program, options, hosts.environment(), hosts.command)
    assert result.verdict.is_right, "\n".join([*result.verdict.wrong, result.out, result.err])
