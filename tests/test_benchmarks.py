"""The benchmarks measure what they say: equal work on each side, checked, and summed up rightly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cases import SUBJECTS, Case, find_case
from benchmarks.measure import Result, check_equal
from benchmarks.report import compare, table

CASES = [case for make in SUBJECTS.values() for case in make()]


def test_every_case_has_a_name_of_its_own_and_is_found_by_it():
    assert len({case.name for case in CASES}) == len(CASES)
    assert [find_case(case.name).name for case in CASES] == [case.name for case in CASES]


def test_sides_that_disagree_are_not_timed(tmp_path):
    case = Case("kernels/any", lambda side: lambda: None, sides=("spmd", "jax"))
    files = {side: str(tmp_path / f"{side}.npz") for side in case.sides}
    np.savez(files["spmd"], np.ones(3), np.zeros(2))
    np.savez(files["jax"], np.ones(3), np.zeros(2))
    check_equal(case, files)
    np.savez(files["jax"], np.ones(3), np.array([0.0, 0.1]))
    with pytest.raises(AssertionError, match="spmd and jax differ"):
        check_equal(case, files)


def test_table_shows_medians_and_ratios():
    results = [
        Result.of("kernels/any", "spmd", [1e-6, 2e-6, 3e-6], 10),
        Result.of("kernels/any", "jax", [5e-6, 6e-6, 7e-6], 10),
    ]
    assert results[0].median == 2e-6 and results[0].calls == 30
    last = table(results).splitlines()[-1]
    assert "2 µs" in last and "6 µs" in last and last.endswith("| 3.00 |")


def test_compare_shows_what_changed():
    old = {"commit": "a", "results": [{"case": "c", "side": "spmd", "median": 4e-3}]}
    new = {"commit": "b", "results": [{"case": "c", "side": "spmd", "median": 2e-3}]}
    assert compare(old, new).splitlines()[-1] == "| c | spmd | 4 ms | 2 ms | 2.00 |"


def test_a_run_leaves_a_record(run_python, tmp_path):
    pytest.importorskip("jax", reason='needs pip install ".[bench]"')
    record = tmp_path / "out.json"
    arguments = ["dispatch", "--only", "size 1024", "--blocks", "1", "--json", str(record)]
    done = run_python(["-m", "benchmarks", *arguments], env={"SPMD_CHECK": "0"})
    assert done.returncode == 0, done.stderr
    saved = json.loads(Path(record).read_text())
    assert {r["side"] for r in saved["results"]} == {"spmd", "jax", "numpy"}
    assert all(0 < r["low"] <= r["median"] <= r["high"] < 0.1 for r in saved["results"])
    assert "jax/spmd" in done.stdout and saved["versions"]["jax"] in done.stdout
