"""Leftovers in /dev/shm: only this job's, only what nobody uses."""

from __future__ import annotations

import mmap
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.supervise import cleanup as sweeping


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(sweeping, "FOLDER", tmp_path)
    return tmp_path


def test_sweep(folder: Path):
    began = time.time() - 1
    for name in ("mpich_shm_1", "sm_segment.host.0.1", "spmd-0-1-a", "somebody_elses"):
        (folder / name).write_bytes(b"x" * 4096)
    assert len(sweeping.sweep(began)) == 3
    assert [path.name for path in folder.iterdir()] == ["somebody_elses"]


def test_what_is_open_or_mapped_stays(folder: Path):
    (folder / "mpich_shm_1").write_bytes(b"x" * 4096)
    (folder / "mpich_shm_2").write_bytes(b"x" * 4096)
    with open(folder / "mpich_shm_1", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    with open(folder / "mpich_shm_2", "rb"):
        assert sweeping.sweep(0) == []
    mapped.close()
    assert len(sweeping.sweep(0)) == 2


def test_what_is_older_than_the_job_stays(folder: Path):
    (folder / "mpich_shm_1").write_bytes(b"")
    assert sweeping.sweep(time.time() + 10) == []


def test_folders_of_flight_files(folder: Path, monkeypatch):
    """Of a job that is over and was killed; not of one that runs, and not of a young one."""
    old, used, young = (folder / f"spmdrun-flight-{k}-x" for k in (1, 2, 3))
    for path in (old, used):
        path.mkdir()
        (path / "rank-0.flight").write_bytes(bytes(64))
    while not young.exists() or young.stat().st_ctime <= used.stat().st_ctime:
        shutil.rmtree(young, ignore_errors=True)  # the clock of a file system has coarse steps
        young.mkdir()
        (young / "rank-0.flight").write_bytes(bytes(64))
    assert sweeping.sweep_flights() == []  # all of them are young
    now = young.stat().st_ctime + sweeping.YOUNG_SECONDS
    monkeypatch.setattr(sweeping, "time", SimpleNamespace(time=lambda: now))
    with open(used / "rank-0.flight", "rb"):
        assert sweeping.sweep_flights() == [str(old)]
    assert not old.exists() and used.exists() and young.exists()
    assert sweeping.sweep_flights() == [str(used)]
