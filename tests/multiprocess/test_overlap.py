"""Exchanges in flight under a real mpirun: the same bits, what is hidden, and every way to fail."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.flight.stats import collect
from launch.flight.timeline import load

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]
MESSAGES = {"SPMD_SHARED_MEMORY": "0"}


@pytest.mark.parametrize(
    "ranks, devices, env",
    [
        pytest.param(2, 1, {}, id="2-shm", marks=pytest.mark.nightly),
        pytest.param(3, 1, MESSAGES, id="3-messages"),
        pytest.param(2, 2, MESSAGES, id="2x2-messages", marks=pytest.mark.nightly),
    ],
)
def test_the_same_bits(mpirun: Run, ranks: int, devices: int, env: dict[str, str]):
    program = ["-m", "tests.multiprocess.programs.overlap"]
    own = {"SPMD_NUM_CPU_DEVICES": str(devices), **env}
    done = mpirun(ranks, program, env=own, timeout=180)
    assert done.returncode == 0, done.stderr
    assert f"flew on {ranks} ranks x {devices} devices: all right" in done.stdout


STEP = """
import sys
import numpy as np
import spmd, spmd.numpy as snp
from spmd import lax

WIDTH, LAYERS = 512, 6
rank = spmd.process_index()
weights = [np.eye(WIDTH, dtype=np.float32) / 2 for _ in range(LAYERS)]
x = np.ones((1, 256, WIDTH), np.float32) + rank

def loss(weights, x):
    for w in weights:
        x = snp.tanh(x @ w)
    return snp.mean(x * x)

def step(weights, x):
    gradients = lax.pmean(spmd.grad(loss)(weights, x), "i")  # in flight
    return spmd.tree.map(lambda w, g: w - g, weights, gradients)

train = spmd.pmap(step, axis_name="i", in_axes=(None, 0), out_axes=None)
"""
LINE = next(k for k, text in enumerate(STEP.splitlines(), 1) if "in flight" in text)


@pytest.fixture
def spmdrun(run_python, tmp_path: Path) -> Run:
    """`spmdrun(text, *options, **env)` runs a program after `STEP` on two ranks."""

    def run(text: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "train.py"
        program.write_text(STEP + textwrap.dedent(text))
        words = ["-m", "launch", "-n", "2", *options, str(program)]
        own = {"SPMD_NUM_CPU_DEVICES": "1", "SPMD_OVERLAP": "always", **env}
        return run_python(words, env=own, timeout=240)

    return run


@pytest.mark.parametrize(
    "fault, shared",
    [
        ("raise:rank=1,op=4", "0"),
        ("kill:rank=1,op=4", "1"),
        pytest.param("raise:rank=1,op=4", "1", marks=pytest.mark.nightly),
        pytest.param("kill:rank=1,op=4", "0", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_fails_in_flight_stops_the_other(spmdrun: Run, fault: str, shared: str):
    text = """
    try:
        for _ in range(20):
            weights = train(weights, x)
    except spmd.errors.PeerError as error:
        print("rank", rank, "heard:", error, flush=True)
        raise
    """
    done = spmdrun(text, "--inject", fault, SPMD_SHARED_MEMORY=shared)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    if fault.startswith("raise"):
        assert "rank 0 heard: rank 1: InjectedFault" in done.stdout
        assert "rank 1 (" in last and "raised InjectedFault" in last
    else:
        # Messages of a rank that was killed do not come; then MPI or spmdrun ends the other one.
        heard = "rank 0 heard: rank 1 (process" in done.stdout
        assert heard or shared == "0"
        assert "rank 1 (" in last and f"was killed by SIGKILL after psum train.py:{LINE}" in last
        assert "rank 0 was waiting" in last


def test_a_program_that_fails_while_exchanges_fly_can_go_on(spmdrun: Run):
    text = """
    def refuse(w):
        if np.isnan(w).any():
            raise ValueError("not a number")
        return w

    def checked(weights, x):
        gradients = lax.psum(spmd.grad(loss)(weights, x), "i")
        shape = spmd.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)
        first = spmd.pure_callback(refuse, shape, weights[0])  # between start and wait
        return [first + gradients[0], *gradients[1:]]

    checked = spmd.pmap(checked, axis_name="i", in_axes=(None, 0), out_axes=None)
    wrong = [np.full_like(w, np.nan) for w in weights]
    for given in (weights, wrong, weights):
        try:
            last = np.asarray(checked(given, x)[0])
        except Exception as error:
            print("rank", rank, "caught", type(error).__name__, flush=True)
    weights = train(weights, x)
    print("rank", rank, "has", float(np.asarray(weights[0]).sum()), last.shape, flush=True)
    """
    done = spmdrun(text, SPMD_SHARED_MEMORY="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" caught ") == 2 and done.stdout.count(" has ") == 2
    first, second = (x.split(" has ")[1] for x in done.stdout.splitlines() if " has " in x)
    assert first == second


def test_ranks_that_disagree_about_overlap_are_told(spmdrun: Run):
    text = """
    spmd.config.update("overlap", "always" if rank else "never")
    train(weights, x)
    """
    done = spmdrun(text)
    assert done.returncode != 0
    assert "rank 1: axes 'i': 2 over devices of ranks 0, 1, with exchanges in flight" in done.stderr


def test_checked_collectives_fly_too(spmdrun: Run):
    text = "print('rank', rank, float(np.asarray(train(weights, x)[0]).sum()))"
    watched = spmdrun(text, SPMD_DEBUG="collectives")
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout.count("rank ") == 2
    corrupt = spmdrun(text, "--inject", "corrupt:rank=1,op=0,bit=30", SPMD_DEBUG="collectives")
    assert corrupt.returncode != 0
    assert "data was changed on the way between ranks" in corrupt.stderr
    assert f"train.py:{LINE}" in corrupt.stderr


def test_what_is_hidden_is_told(spmdrun: Run, run_python, tmp_path: Path):
    text = """
    for k in range(6):
        weights = train(weights, x)
        spmd.block_until_ready(weights)
    """
    # The link is slow once, in the first exchange of a later step, while the program computes.
    slow = ("--inject", "delay:rank=1,op=9,s=0.05")
    done = spmdrun(text, *slow, SPMD_TRACE=str(tmp_path / "t"), SPMD_LOG_COMPILES="1")
    assert done.returncode == 0, done.stderr
    assert "step: psum: 6 tensors in 6 exchanges, 6 of them while" in done.stderr
    stats = collect(load(tmp_path / "t"))
    flew = [entry for entry in stats.collectives if entry.flown]
    assert sum(entry.calls for entry in flew) == 36
    hidden = 1 - sum(e.stood for e in flew) / sum(e.flown for e in flew)
    assert 0 < hidden <= 1, [(e.name, e.flown, e.stood) for e in flew]
    assert sum(e.flown for e in flew) > 0.05
    said = run_python(["-m", "launch.spmd_command", "stats", str(tmp_path / "t")]).stdout
    assert "psum: 36 exchanges while programs computed, " in said
    trace = (tmp_path / "t" / "trace.json").read_text()
    assert "collectives in flight" in trace and "wait for psum" in trace
