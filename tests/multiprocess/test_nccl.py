"""GPUs of several ranks exchange by NCCL: the emulator, a stand-in for NCCL, and a real mpirun."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.flight.stats import collect
from launch.flight.timeline import load
from launch.supervise.find_mpi import find_mpi, has_ulfm
from tests.compile.cuda.nccl import standin
from tests.multiprocess.test_recovery import PROGRAM, spmdrun

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        standin.compiler() is None,
        reason="the stand-in for NCCL needs a C compiler: gcc, clang, or pip install ziglang",
    ),
]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the stand-in."""
    return str(standin.build(tmp_path_factory.mktemp("nccl")))


def emulated(devices: int, **more: str) -> dict[str, str]:
    """The environment of ranks with so many emulated GPUs each."""
    return {
        "SPMD_PLATFORM": "cuda",
        "SPMD_CUDA_DRIVER": "emulator",
        "SPMD_NUM_CUDA_DEVICES": str(devices),
        **more,
    }


def test_ranks_with_gpus_give_the_bits_of_one_process(
    mpirun: Run, run_python: Run, library: str, tmp_path: Path
):
    program = ["-m", "tests.multiprocess.programs.gpu_bits"]
    one = run_python(program, env=emulated(8, SPMD_PROCESS_COUNT="1"))
    four = mpirun(4, program, env=emulated(2, STANDIN_NCCL=library, SPMD_TRACE=str(tmp_path)))
    assert four.returncode == one.returncode == 0, four.stderr
    lines = four.stdout.splitlines()
    (asked,) = [line for line in lines if line.startswith("through ")]
    assert asked.endswith("nccl: allGather allReduce recv reduceScatter send")
    lines.remove(asked)
    assert len(lines) > 200
    assert sorted(lines) == sorted(one.stdout.splitlines())
    collectives = collect(load(tmp_path)).collectives
    assert sum(c.calls for c in collectives if c.name.startswith("psum ")) > 10
    assert not any(c.unfinished for c in collectives)


SIGNATURES = """
import sys
import cupy.cuda.nccl as nccl
from tests.compile.cuda.nccl import standin
for signature in standin.METHODS:
    said = getattr(nccl.NcclCommunicator, signature.split("(")[0]).__doc__.splitlines()[0]
    assert said == f"NcclCommunicator.{signature}", said
made = standin.module(standin.ctypes.CDLL(sys.argv[1]))
missing = [name for name in dir(made) if not hasattr(nccl, name)]
assert not missing, missing
"""


def test_the_stand_in_has_the_signatures_of_the_wheel(run_python: Run, library: str):
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("the wheel of CuPy is not installed: pip install spmd[cuda]")
    preload = f"import ctypes; ctypes.CDLL({library!r}, ctypes.RTLD_GLOBAL)"
    done = run_python(["-c", preload + SIGNATURES, library])
    assert done.returncode == 0, done.stderr


# ---- failures ----------------------------------------------------------------------------------

PREAMBLE = """
import os, time
import numpy as np
import spmd
from spmd import lax
from spmd.transport import nccl
from tests.compile.cuda.nccl import standin
standin.connect(os.environ["STANDIN_NCCL"])
rank = spmd.process_index()
x = np.ones((1, 3), np.float32)
total = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
def fail(text):
    os.environ["STANDIN_NCCL_FAIL"] = text
"""

LOOP = """
for step in range(3):
    x = total(x) / 2
print(np.asarray(x))
"""


@pytest.fixture
def job(mpirun: Run, library: str, tmp_path: Path) -> Run:
    """`job(text)` runs a program of two ranks after the preamble; it must end by itself."""

    def run(text: str, loop: str = LOOP, **env: str) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "train.py"
        program.write_text(PREAMBLE + textwrap.dedent(text) + loop)
        began = time.monotonic()
        env = emulated(1, STANDIN_NCCL=library, SPMD_COLLECTIVE_TIMEOUT="3") | env
        done = mpirun(2, [str(program)], env=env, timeout=60)
        # Ten seconds, and twice the start of a process on a machine that is busy.
        assert time.monotonic() - began < 40
        return done

    return run


@pytest.mark.parametrize(
    "fault, line",
    [
        ("if rank == 0: fail('ncclGetUniqueId:2:0')", "NCCL could not make an id"),
        ("if rank == 1: fail('ncclCommInitRank:1:0')", "NCCL could not connect 2 GPUs"),
        ("if rank == 1: fail('ncclAllReduce:7:2')", "has not finished what it was asked to do"),
        ("if rank == 1: fail('ncclGroupEnd:3:3')", "an internal error"),
        ("if rank == 1: fail('ncclAllReduce:4:1')", "(code 4"),
        ("if rank == 1: fail('ncclAllReduce:5:1')", "(code 5"),
        ("if rank == 1: fail('ncclGroupEnd:99:2')", "a code that spmd does not know (code 99"),
    ],
    ids=["id", "init", "call", "group", "argument", "usage", "unknown"],
)
def test_a_rank_for_which_a_call_fails(job: Run, fault: str, line: str):
    done = job(fault)
    who = fault[11]
    assert done.returncode == 1
    assert f"spmd rank {who} | spmd.errors.CollectiveError: NCCL could not" in done.stderr
    other = f"spmd rank {1 - int(who)} | stopped at train.py:"
    (told,) = [text for text in done.stderr.splitlines() if text.startswith(other)]
    assert f": rank {who}: CollectiveError" in told and line in told


def test_a_failure_that_nccl_notices_later(job: Run):
    done = job("if rank == 1: fail('ncclCommGetAsyncError:6:0'); lasting = True")
    assert done.returncode == 1
    text = "NCCL could not go on: a rank or the network between ranks failed (code 6"
    assert f"spmd rank 1 | spmd.errors.CollectiveError: {text}" in done.stderr


ONE_IS_LATE = """
if rank == 1:
    total(x)
    time.sleep(60)
"""
ONE_FAILS_INSIDE = """
if rank == 1:
    def call(*args):
        raise ValueError("in between")
    nccl.NcclGroup.call = call
x = total(x)
"""
ONE_DIES_INSIDE = """
if rank == 1:
    nccl.NcclGroup.call = lambda *args: os._exit(7)
x = total(x)
"""


@pytest.mark.parametrize(
    "text, told",
    [
        (ONE_IS_LATE, "CollectiveError: rank 0 | psum f32[3] over 'i' at train.py:"),
        (ONE_FAILS_INSIDE, "stopped at train.py:22: rank 1: ValueError at train.py:"),
        (ONE_DIES_INSIDE, "1,1]"),  # mpirun may be the first to say so
    ],
    ids=["late", "fails", "dies"],
)
def test_a_rank_that_others_wait_for(job: Run, text: str, told: str):
    done = job(text)
    assert done.returncode
    assert told in done.stderr


CONNECTED = """
import os
from spmd.transport import nccl
from tests.compile.cuda.nccl import standin
standin.connect(os.environ["STANDIN_NCCL"])
"""
SAID = """
assert nccl.agreement.reason == "" and len(nccl.WATCH.groups) == 1
"""


def test_ranks_that_are_left_connect_their_gpus_anew(library: str, tmp_path: Path):
    mpi = find_mpi()
    if not has_ulfm(mpi):
        pytest.skip(f"{mpi.vendor} has no ULFM here: no rank goes on after the death of another")
    program = tmp_path / "sums.py"
    program.write_text(CONNECTED + PROGRAM + SAID)
    env = emulated(1, STANDIN_NCCL=library)
    done = spmdrun("-n", "3", "--elastic", "1", str(program), "1@3", **env)
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if "sums" in line)
    sums = "[3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0]"
    assert said == [f"r0 | sums 0 {sums}", f"r2 | sums 1 {sums}"]


# ---- an event taken away -----------------------------------------------------------------------

WITHOUT_EVENTS = """
from spmd.compile.cuda.driver import driver
from spmd.compile.cuda.emulator.streams import Streams
gpu, wait_for = driver(), Streams.wait_for
exchanges = gpu.exchange_stream(0) - gpu.stream(0)
def forgotten(self, number, mark):
    {condition} or wait_for(self, number, mark)
Streams.wait_for = forgotten
total = spmd.pmap(lambda x: lax.psum(x * 2, "i") + 1, axis_name="i")
"""


@pytest.mark.parametrize(
    "condition", ["number == exchanges", "mark.stream == exchanges"], ids=["before", "behind"]
)
def test_an_exchange_needs_its_events(job: Run, condition: str):
    done = job(WITHOUT_EVENTS.format(condition=condition))
    assert done.returncode
    told = r"CudaError: .*train.py:.*(NCCL|kernel \w+) (reads|writes) .*: an event is missing"
    assert re.search(told, done.stderr), done.stderr
