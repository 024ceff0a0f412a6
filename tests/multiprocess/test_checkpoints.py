"""Checkpoints of arrays over ranks: each writes its shards, and other ranks read them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]


def run(mpirun: Run, ranks: int, devices: int, what: str, folder: Path) -> None:
    program = ["-m", "tests.multiprocess.programs.checkpoints", what, str(folder)]
    done = mpirun(ranks, program, env={"SPMD_NUM_CPU_DEVICES": str(devices)}, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{what} on {ranks} ranks: all right") == ranks


def test_other_ranks_and_meshes_restore_what_two_ranks_saved(mpirun: Run, tmp_path: Path):
    run(mpirun, 2, 2, "save", tmp_path)
    files = sorted(p.name for p in (tmp_path / "step-00000002").iterdir())
    assert files == ["manifest.json", "process-00000.safetensors", "process-00001.safetensors"]
    for ranks, devices in (1, 4), (3, 1), (4, 1), (1, 1):
        run(mpirun, ranks, devices, "restore", tmp_path)
        # What `restore` wrote goes, so that the next one reads what two ranks wrote.
        for file in (tmp_path / "step-00000003").iterdir():
            file.unlink()
        (tmp_path / "step-00000003").rmdir()


def test_a_rank_that_is_killed_while_it_writes_leaves_the_step_before(mpirun: Run, tmp_path: Path):
    run(mpirun, 2, 2, "save", tmp_path)
    program = ["-m", "tests.multiprocess.programs.checkpoints", "killed", str(tmp_path)]
    done = mpirun(2, program, env={"SPMD_NUM_CPU_DEVICES": "2"}, timeout=240)
    assert done.returncode != 0
    assert (tmp_path / ".step-00000003.tmp").is_dir()
    assert not (tmp_path / "step-00000003").exists()
    run(mpirun, 3, 1, "restore", tmp_path)
    assert not (tmp_path / ".step-00000003.tmp").exists()  # a later save has swept it


def test_ranks_that_save_different_checkpoints_are_told(mpirun: Run, tmp_path: Path):
    run(mpirun, 2, 1, "differ", tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["alone", "apart"])
def test_folders_that_the_ranks_do_not_share(mpirun: Run, tmp_path: Path, what: str):
    run(mpirun, 2, 2, what, tmp_path)
