"""The benchmark of collectives: what it computes, its jobs of several processes, its tables."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import spmd
from benchmarks import collectives
from benchmarks.collectives import (
    SETTINGS,
    SIZES,
    Setting,
    case_name,
    digest,
    osu_table,
)
from benchmarks.measure import Failure, Result
from benchmarks.ranks import KINDS, expected, given, mapped
from benchmarks.sides import load_side


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_expected_is_what_vmap_gives(kind: str):
    side, x = load_side("spmd"), given(kind, 48, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side.top, "pmap", spmd.vmap)
        found = mapped(side, kind, 4)(x)
    np.testing.assert_array_equal(np.asarray(found).reshape(4, -1), expected(kind, x))


def test_every_case_has_a_name_of_its_own():
    names = [case_name(k, s, n) for k in KINDS for s in SETTINGS for n in SIZES]
    assert len(set(names)) == len(names)


@pytest.mark.mpi
def test_a_run_over_ranks(mpirun: object, monkeypatch: pytest.MonkeyPatch):
    """spmd and MPI take turns; a side that fails is named and does not stop the other."""
    monkeypatch.setattr(collectives, "QUICK_SIZES", (4,))
    monkeypatch.setattr(collectives, "BLOCK_SECONDS", 1e-4)
    only, said = case_name("psum", Setting(2, 1), 4), []
    results = collectives.measure_collectives(only, True, ("spmd", "mpi"), said.append)
    assert said == [only]
    assert {r.side for r in results if isinstance(r, Result)} == {"spmd", "mpi"}, results
    table = osu_table([r for r in results if isinstance(r, Result)])
    assert table.startswith("# psum over 2 ranks, float32") and "mpi/spmd" in table


@pytest.mark.mpi
def test_programs_over_ranks_agree_with_jax(mpirun: object, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("jax", reason="compares with jax, which is not installed")
    monkeypatch.setattr(collectives, "BLOCK_SECONDS", 1e-4)
    only = "sharding/call of x + 1, 8 x 8, 2 ranks"
    results = collectives.measure_over_ranks(only, True, (), lambda _: None)
    assert [r.side for r in results if isinstance(r, Result)] == ["spmd", "jax"], results


def test_other_results_than_those_of_the_first_side_are_an_error():
    with pytest.raises(collectives.JobError, match="other results"):
        collectives.agreed_seconds({"seconds": 1.0, "sizes": [1.0, 2.0]}, [1.0, 2.1], 1e-3)


def test_a_side_that_ends_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collectives, "QUICK_SIZES", (4,))
    monkeypatch.setattr(sys, "executable", "false")
    only = case_name("psum", Setting(1, 2), 4)
    found = collectives.measure_collectives(only, True, ("spmd",), lambda _: None)
    assert found == [Failure(only, "spmd", "a process ended: without a word")]


def test_the_table_has_a_line_a_size():
    def result(side: str, nbytes: int, seconds: float) -> Result:
        return Result.of(case_name("psum", Setting(2, 1), nbytes), side, [seconds] * 3, 1)

    results = [result("spmd", 4, 2e-6), result("mpi", 4, 1e-6), result("spmd", 1 << 20, 1e-4)]
    lines = osu_table(results).splitlines()
    assert lines[1].split() == ["#", "Size", "spmd", "mpi", "mpi/spmd", "spmd", "MB/s"]
    assert lines[2].split() == ["4", "2.00", "1.00", "0.50", "2.0"]
    assert lines[3].split() == ["1048576", "100.00", "-", "-", "10485.8"]


def test_the_digest_has_a_cell_a_setting():
    def result(side: str, setting: Setting, seconds: float) -> Result:
        return Result.of(case_name("psum", setting, 4), side, [seconds] * 3, 1)

    ranks, devices = Setting(2, 1), Setting(1, 8)
    results = [result("spmd", ranks, 2e-6), result("mpi", ranks, 1e-6), result("jax", ranks, 2e-4)]
    results += [result("spmd", devices, 3e-3), result("jax", devices, 6e-3)]
    rows = [line for line in digest(results).splitlines() if line.startswith("| psum, 4 B")]
    assert rows == ["| psum, 4 B | 2 µs: 0.5, 100, - |", "| psum, 4 B | 3 ms: 2.0 |"]
