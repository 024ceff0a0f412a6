"""How many cores a process counts on, from what its surroundings say."""

from __future__ import annotations

import importlib.util
import os

import pytest

from spmd.compile.native.llvm import cores as cores_of_this_process

CGROUP = "/sys/fs/cgroup"


@pytest.fixture
def cores(monkeypatch, tmp_path):
    """The module as a new process imports it, with 8 cores and `tmp_path` as its control group."""

    def found(path):
        return str(path).replace(CGROUP, str(tmp_path))

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: exists(found(path)))
    spec = importlib.util.spec_from_file_location("new_cores", cores_of_this_process.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(
        module, "open", lambda path, **more: open(found(path), **more), raising=False
    )
    return module


def surround(monkeypatch, ranks):
    for name, value in (("RANK", 0), ("SIZE", ranks), ("LOCAL_RANK", 0), ("LOCAL_SIZE", ranks)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))


def test_a_process_alone_has_all_its_cores(cores, monkeypatch):
    assert cores.available_cores() == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert cores.available_cores() == 2


@pytest.mark.parametrize(("ranks", "expected"), [(1, 8), (2, 4), (3, 2), (20, 1)])
def test_ranks_share_a_machine(cores, monkeypatch, ranks, expected):
    surround(monkeypatch, ranks)
    assert cores.available_cores() == expected


def test_bound_ranks_use_their_own_cores(cores, monkeypatch):
    surround(monkeypatch, 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert cores.available_cores() == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("150000 100000", 2), ("max 100000", 8), ("1000 100000", 1), ("nonsense", 8)],
)
def test_a_quota_of_version_2_bounds_the_cores(cores, tmp_path, text, expected):
    (tmp_path / "cpu.max").write_text(text)
    assert cores.available_cores() == expected


@pytest.mark.parametrize(("most", "expected"), [("250000", 3), ("-1", 8), ("900000", 8)])
def test_a_quota_of_version_1_bounds_the_cores(cores, tmp_path, most, expected):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(most)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cores.available_cores() == expected
