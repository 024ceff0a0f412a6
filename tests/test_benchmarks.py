"""The benchmarks measure what they say: equal work on each side, checked, and summed up rightly."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import worker
from benchmarks.case import Case
from benchmarks.cases import SUBJECTS, find_case
from benchmarks.compile_time import CACHED, PROGRAMS
from benchmarks.compile_time import CASES as COMPILED
from benchmarks.libraries import PROGRAMS as PROGRAMS_OF_LIBRARIES
from benchmarks.libraries import library_cases
from benchmarks.limits import Limit, capacities
from benchmarks.measure import (
    BYTES,
    Failure,
    Result,
    WorkerError,
    differences,
    environment,
    measure,
)
from benchmarks.memory import planned
from benchmarks.report import compare, record, show, slower, summary, table
from benchmarks.sides import load_side

ROOT = Path(__file__).resolve().parent.parent
CASES = [case for make in SUBJECTS.values() for case in make()]


def test_every_case_has_a_name_of_its_own_and_is_found_by_it():
    assert len({case.name for case in CASES}) == len(CASES)
    assert [find_case(case.name).name for case in CASES] == [case.name for case in CASES]


def test_what_is_compiled_are_cases_or_programs_of_its_own():
    for name in (*COMPILED, *CACHED):
        assert name in PROGRAMS or find_case(name).name == name


def test_sides_that_disagree_are_not_timed(tmp_path):
    case = Case("kernels/any", lambda side: lambda: None, sides=("spmd", "jax"))
    files = {side: str(tmp_path / f"{side}.npz") for side in case.sides}
    np.savez(files["spmd"], np.ones(3), np.zeros(2))
    np.savez(files["jax"], np.ones(3), np.zeros(2))
    assert differences(case, files) == {}
    np.savez(files["jax"], np.ones(3), np.array([0.0, 0.1]))
    wrong = differences(case, files)
    assert list(wrong) == ["spmd"] and "differs from jax" in wrong["spmd"]
    np.savez(files["jax"], np.ones(3))
    assert "2 results, not 1" in differences(case, files)["spmd"]


def test_pytorch_is_compared_by_its_loss(tmp_path):
    case = Case("programs/any", lambda side: lambda: None, sides=("jax", "torch"))
    files = {side: str(tmp_path / f"{side}.npz") for side in case.sides}
    np.savez(files["jax"], np.ones(3), np.array(0.5))
    np.savez(files["torch"], np.array(0.5))
    assert differences(case, files) == {}
    np.savez(files["torch"], np.array(0.6))
    assert list(differences(case, files)) == ["torch"]


class Answers:
    """A team whose members answer from a table."""

    def __init__(self, seconds, broken=()):
        self.seconds, self.broken = seconds, broken

    def __getitem__(self, side):
        return Answers(self.seconds[side], side in self.broken)

    def ask(self, **command):
        if self.broken:
            raise WorkerError("it broke")
        if "prepare" in command:
            np.savez(command["save"], np.ones(3))
            return self.seconds
        return [self.seconds] * command["samples"]


def test_a_side_that_breaks_is_named_and_the_others_are_timed():
    case = Case("kernels/any", lambda side: lambda: None, sides=("spmd", "jax", "numpy"))
    team: Any = Answers({"spmd": 1e-3, "jax": 2e-3, "numpy": 4e-3}, broken=("numpy",))
    found = measure(case, team, 2)
    assert [r for r in found if isinstance(r, Failure)] == [
        Failure("kernels/any", "numpy", "it broke")
    ]
    assert {r.side: r.median for r in found if isinstance(r, Result)} == {"spmd": 1e-3, "jax": 2e-3}
    assert {r.side for r in measure(case, team, 2, ["jax"])} == {"jax"}
    shown = show(record(found, 0.0))
    assert "kernels/any, numpy: it broke" in shown and "slower than jax" not in shown


def test_a_side_answers_when_its_threads_sleep(monkeypatch):
    # On a busy machine a thread that computes may get nothing for some hundredths of a second.
    monkeypatch.setattr(worker, "RESTS", 15)
    done = threading.Event()

    def spin():
        end = time.perf_counter() + 0.15
        while time.perf_counter() < end:
            sum(range(1000))
        done.set()

    threading.Thread(target=spin).start()
    worker.rest()
    assert done.is_set()


def test_each_side_gets_its_own_settings(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_mine")
    assert environment("jax")["XLA_FLAGS"] == "--xla_of_mine"
    assert environment("jax512")["XLA_FLAGS"].endswith("prefer_vector_width=512")
    assert environment("jax", devices=4)["XLA_FLAGS"].endswith("device_count=4")
    assert environment("spmd", devices=4)["SPMD_NUM_CPU_DEVICES"] == "4"
    assert environment("spmd", x64=True)["SPMD_ENABLE_X64"] == "1"


GROWTH = """
from benchmarks.cases import find_case
from benchmarks.memory import measured
from benchmarks.sides import load_side
for name in "softmax, 1000 x 1024", "gradient of layernorm, 1000 x 1024":
    print(measured(find_case(f"kernels/{name}"), load_side("spmd")).get("measured"))
"""


def test_a_call_grows_the_process_by_its_result_and_what_it_needs(run_python):
    # In a process of its own: what others left in the heap would be used again.
    done = run_python(["-c", GROWTH])
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    if "None" in found:
        pytest.skip("this system does not say how large a process was")
    for grown, values in zip(map(int, found), (1, 3), strict=True):
        # Pages of 2 MiB, and threads that count by themselves.
        assert abs(grown - values * 1000 * 1024 * 4) < values * 2**21


def test_memory_is_what_the_compiler_planned():
    side = load_side("spmd")
    found = planned(find_case("kernels/softmax, 10 x 1024"), side)
    assert found["all"] == 2 * 10 * 1024 * 4 + found["temporaries"]
    with pytest.raises(ValueError, match="does not call a jitted function"):
        planned(Case("kernels/any", lambda side: lambda: None), side)
    shown = table([Result(f"memory/{s}", s, 4e6, 4e6, 4e6, 1, 1, BYTES) for s in ("spmd", "jax")])
    assert "4 MB" in shown and "±" not in shown


def test_the_limit_of_the_machine_grows_with_the_work():
    limit = Limit()
    case = Case("kernels/any", lambda side: lambda: None)
    for small, large in (
        (case.replace(nbytes=2**16), case.replace(nbytes=2**24)),
        (case.replace(flops=10**6), case.replace(flops=10**8)),
    ):
        assert 0 < limit.prepare(small) < limit.prepare(large)


def test_a_record_says_what_the_machine_does():
    able = capacities()
    cores = {"1", str(Limit().threads)}
    assert {a["unit"] for a in able} == {"GFLOP/s", "GB/s"}
    assert all(set(a["cores"]) == cores for a in able)
    assert all(0 < c["median"] <= c["best"] for a in able for c in a["cores"].values())
    shown = show(record([], 0.0, able))
    assert "multiply-adds, GFLOP/s by cores at once: " in shown


def test_summary_gives_geometric_means_and_what_is_slower():
    def both(case, spmd, jax):
        return [Result.of(case, "spmd", [spmd], 1), Result.of(case, "jax", [jax], 1)]

    results = both("kernels/a", 1e-6, 8e-6) + both("kernels/b", 2e-6, 1e-6)
    last = summary(results).splitlines()[-1]
    assert last == "| kernels | 2 | 2.00 | 3 | 1 |"
    assert slower(results, "jax") == ["0.50  kernels/b"]


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


def test_programs_of_libraries_agree_in_their_smallest_form():
    if not library_cases():
        pytest.skip('no library is installed: pip install -e ".[libraries]"')
    found = {}
    for side in ("spmd", "jax"):
        command = [sys.executable, "-m", "benchmarks.libraries", side]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
        assert done.returncode == 0, done.stderr
        found[side] = json.loads(done.stdout)
    assert {f"libraries/{name}" for name in found["spmd"]} == {c.name for c in library_cases()}
    for name, values in found["jax"].items():
        close = PROGRAMS_OF_LIBRARIES[name][-1]
        np.testing.assert_allclose(found["spmd"][name], values, rtol=close, atol=close)


FUNCTIONS = [
    "linalg: qr, 8 x 8",
    "linalg: cross, 1e+05",
    "fft: rfft, 1009 (a prime)",
    "order: median, 1e+05",
    "places: take, 1e+05",
    "running: convolve, 1e+05 by 65",
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_give_on_spmd_what_numpy_gives(name: str):
    case = find_case(f"functions/{name}")
    found, expected = (np.asarray(case.make(load_side(side))()) for side in ("spmd", "numpy"))
    scale = case.tolerance * float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, case.tolerance, scale)
