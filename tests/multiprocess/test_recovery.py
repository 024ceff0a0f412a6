"""Ranks that are left go on after the death of another, where MPI has ULFM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.supervise.find_mpi import find_mpi, has_ulfm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "train_digits.py")
pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module", autouse=True)
def ulfm() -> None:
    mpi = find_mpi()
    if not has_ulfm(mpi):
        pytest.skip(f"{mpi.vendor} has no ULFM here: no rank goes on after the death of another")


def spmdrun(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "SPMD_NUM_CPU_DEVICES"}
    command = [sys.executable, "-m", "launch", *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=kept | environ
    )


# Sums ones over all ranks, step by step; `die` says which rank, as it was at first, dies when.
PROGRAM = """
import os, sys
import numpy as np
import spmd
from spmd import lax
from spmd.transport import world as bootstrap
from spmd.errors import PeerError

first = spmd.process_index()
die = {int(k): int(v) for k, v in (word.split("@") for word in sys.argv[1].split(","))}
step, sums = 0, []
while step < 8:
    try:
        add = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
        while step < 8:
            if die.get(first) == step:
                os.kill(os.getpid(), 9)
            value = float(add(np.ones((1, 3000), np.float32))[0, 0])
            assert value == spmd.process_count() == len(spmd.devices())
            sums.append(value)
            step += 1
    except PeerError:
        if not spmd.distributed.recover():
            raise
        # Ranks may have lost touch at different steps.
        step = min(bootstrap.world().all_gather_object(step))
        del sums[step:]
assert spmd.process_index() < spmd.process_count()
print("sums", spmd.process_index(), sums, flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "sums.py").write_text(PROGRAM)
    return str(tmp_path / "sums.py")


@pytest.mark.parametrize("shared", ["1", "0"], ids=["memory", "messages"])
def test_survivors_go_on_without_a_restart(program: str, shared: str):
    words = "-n", "4", "--elastic", "1", program, "1@2,2@5,3@5"
    done = spmdrun(*words, SPMD_SHARED_MEMORY=shared)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "sums" in line]
    assert said == ["r0 | sums 0 [4.0, 4.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0]"]
    assert "r3 | spmd: goes on as rank 2 of 3, without rank 1" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("spmdrun: rank 1 (") and "was killed by SIGKILL" in last
    assert last.endswith("; rank 0 went on without and finished")


def test_too_few_are_left(program: str):
    done = spmdrun("-n", "3", "--elastic", "2", program, "1@2,2@4")
    assert done.returncode == 137
    assert "spmdrun: fewer than --elastic 2 ranks are left" in done.stderr
    assert "sums" not in done.stdout


def test_a_rank_that_raises_is_no_death(tmp_path: Path):
    path = tmp_path / "raises.py"
    path.write_text(
        "import spmd\n"
        "from spmd.transport import world as bootstrap\n"
        "world = bootstrap.world()\n"
        "try:\n"
        "    1 / (world.rank - 1)\n"
        "    world.barrier()\n"
        "except spmd.errors.PeerError:\n"
        "    print('recover:', spmd.distributed.recover(), flush=True)\n"
        "    raise\n"
    )
    done = spmdrun("-n", "3", "--elastic", "2", "--grace", "10", str(path))
    assert done.returncode == 1 and "recover: True" not in done.stdout
    assert "raised ZeroDivisionError at raises.py:5" in done.stderr.splitlines()[-1]


def test_a_program_that_does_not_recover_starts_again(tmp_path: Path):
    path = tmp_path / "meets.py"
    path.write_text(
        "import os\n"
        "from spmd.transport import world as bootstrap\n"
        "world = bootstrap.world()\n"
        "if world.rank == 1 and os.environ['SPMD_RESTART'] == '0':\n"
        "    os.kill(os.getpid(), 9)\n"
        "world.barrier()\n"
        "print('met', world.size, flush=True)\n"
    )
    done = spmdrun("-n", "3", "--elastic", "2", "--max-restarts", "1", str(path))
    assert done.returncode == 0, done.stderr
    assert "spmdrun: restart 1 of 1, on 2 ranks" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["r0 | met 2", "r1 | met 2"]


def test_a_death_after_the_last_meeting_is_a_failure(tmp_path: Path):
    """Nobody went on without it on purpose: what it was to write may be missing."""
    path = tmp_path / "late.py"
    path.write_text(
        "import os, time\n"
        "from spmd.transport import world as bootstrap\n"
        "world = bootstrap.world()\n"
        "world.barrier()\n"
        "if world.rank == 1:\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = spmdrun("-n", "2", "--elastic", "1", str(path))
    assert done.returncode == 137 and "was killed by SIGKILL" in done.stderr


def test_training_goes_on_from_its_checkpoint_on_fewer_ranks(tmp_path: Path):
    pytest.importorskip("sklearn", reason='needs pip install ".[examples]"')
    words = ("-n", "3", "--elastic", "2", "--inject", "kill:rank=2,op=9", EXAMPLE)
    folders = "--out", str(tmp_path), "--checkpoint", str(tmp_path / "saved")
    done = spmdrun(*words, "--epochs", "2", "--every", "2", *folders)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "loss.json").read_text())
    assert (found["processes"], found["devices"]) == (2, 2)
    assert found["loss"][-1] < found["loss"][0] / 2 and found["test_accuracy"] > 0.8
