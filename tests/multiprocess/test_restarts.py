"""A training run that is killed goes on from its checkpoint and ends with the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "train_digits.py")
pytestmark = pytest.mark.mpi


def spmdrun(*words: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k != "SPMD_NUM_CPU_DEVICES"}
    command = [sys.executable, "-m", "launch", *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environ
    )


def train(out: Path, *options: str, saved: Path | None = None):
    words = ["--epochs", "1", "--every", "4", "--out", str(out)]
    words += ["--checkpoint", str(saved)] if saved else []
    done = spmdrun("-n", "2", *options, EXAMPLE, *words)
    assert done.returncode == 0, done.stderr
    return done, json.loads((out / "loss.json").read_text())


def test_a_killed_training_run_ends_as_if_nothing_had_happened(tmp_path: Path):
    pytest.importorskip("sklearn", reason='needs pip install ".[examples]"')
    _, wanted = train(tmp_path / "whole")
    done, found = train(
        tmp_path / "killed",
        *("--max-restarts", "1", "--inject", "kill:rank=1,op=10"),
        saved=tmp_path / "saved",
    )
    assert "spmdrun: rank 1 (" in done.stderr and "was killed by SIGKILL" in done.stderr
    assert "spmdrun: restart 1 of 1, on 2 ranks" in done.stderr
    # Every loss of every step, and the accuracy at the end, bit for bit.
    assert found == wanted and len(found["loss"]) == 22


PROGRAM = """
import os, sys
import numpy as np
from spmd import checkpoints
from spmd.transport import world as bootstrap
comm = bootstrap.world()
found = checkpoints.restore(sys.argv[1], like={"x": np.zeros(2)})
step, x = found if found else (0, {"x": np.zeros(2)})
x = np.array(x["x"])
print(f"start {os.environ['SPMD_RESTART']} at {step} of {comm.size}", flush=True)
for k in range(step, 6):
    one = np.ones(2)
    comm.all_reduce(one)
    x += one
    checkpoints.save(sys.argv[1], k + 1, {"x": x})
print("sum", x[0])
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(PROGRAM)
    return str(tmp_path / "train.py")


def test_elastic_goes_on_without_the_rank_that_died(program: str, tmp_path: Path):
    words = ("-n", "3", "--max-restarts", "1", "--elastic", "2", "--inject", "kill:rank=2,op=4")
    done = spmdrun(*words, "--collapse", program, str(tmp_path / "saved"))
    assert done.returncode == 0, done.stderr
    assert "spmdrun: restart 1 of 1, on 2 ranks" in done.stderr
    said = sorted(done.stdout.splitlines())
    assert "start 0 at 0 of 3" in next(line for line in said if "start 0" in line)
    again = [line for line in said if "start 1" in line]
    assert len(again) in (1, 2) and "of 2" in again[0]  # one line where both said it in time
    assert any("sum" in line for line in said)


def test_no_restart_below_the_least(program: str, tmp_path: Path):
    words = ("-n", "2", "--max-restarts", "3", "--elastic", "2", "--inject", "kill:rank=1,op=1")
    done = spmdrun(*words, program, str(tmp_path / "saved"))
    assert done.returncode == 137
    assert "not started again: fewer than --elastic 2 ranks would be left" in done.stderr


def test_a_signal_to_spmdrun_is_no_failure(program: str, tmp_path: Path):
    words = ["-n", "2", "--max-restarts", "3", "--inject", "delay:rank=0,op=0,s=60"]
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", *words, program, str(tmp_path / "saved")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "start 0" in process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "restart" not in said
