"""How many cores a process counts on, from what its surroundings say."""

from __future__ import annotations

import os

import pytest

from spmd.compile.native.llvm import cores


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "_quota", lambda: None)
    cores._ranks_here.cache_clear()
    yield
    cores._ranks_here.cache_clear()


def surround(monkeypatch, ranks):
    for name, value in (("RANK", 0), ("SIZE", ranks), ("LOCAL_RANK", 0), ("LOCAL_SIZE", ranks)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))


def test_a_process_alone_has_all_its_cores(monkeypatch):
    assert cores.available_cores() == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert cores.available_cores() == 2


@pytest.mark.parametrize(("ranks", "expected"), [(1, 8), (2, 4), (3, 2), (20, 1)])
def test_ranks_share_a_machine(monkeypatch, ranks, expected):
    surround(monkeypatch, ranks)
    assert cores.available_cores() == expected


def test_bound_ranks_have_cores_of_their_own(monkeypatch):
    surround(monkeypatch, 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert cores.available_cores() == 2


def test_a_quota_bounds_them(monkeypatch):
    monkeypatch.setattr(cores, "_quota", lambda: 3)
    assert cores.available_cores() == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [("150000 100000", 2), ("max 100000", None), ("1000 100000", 1), ("nonsense", None)],
)
def test_quotas_of_version_2(tmp_path, monkeypatch, text, expected):
    monkeypatch.undo()
    (tmp_path / "cpu.max").write_text(text)
    assert cores._quota(tmp_path) == expected


@pytest.mark.parametrize(("most", "expected"), [("250000", 3), ("-1", None)])
def test_quotas_of_version_1(tmp_path, monkeypatch, most, expected):
    monkeypatch.undo()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(most)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cores._quota(tmp_path) == expected
    assert cores._quota(tmp_path / "none") is None
