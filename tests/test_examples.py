"""The examples run as their docstrings say, at toy size, and the main job's curves agree.

The same program on 4 devices in all: one process, 4 ranks, 2 ranks × 2. Its loss curve must not
depend on how the devices are spread, up to the rounding of sums in another order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# Sizes that keep each run within seconds.
TOY = {
    "train_digits": ["--epochs", "2"],
    "random_matrices": ["--size", "40", "--steps", "30"],
    "ring_all_reduce": ["--length", "50"],
    "batched_predict": ["--batch", "2"],
}
# What each prints when it did its work; a number that must be small is captured.
SAYS = {
    "train_digits": r"4 devices: loss \d+\.\d+ -> \d+\.\d+, test accuracy \d+\.\d+%",
    "random_matrices": r"4 devices: mean radius [01]\.\d+, spread \d",
    "ring_all_reduce": r"ring and psum differ by at most (\S+), their gradients by (\S+)",
    "batched_predict": r"differ from single ones by (\S+)",
}

pytest.importorskip("sklearn", reason='needs pip install ".[examples]"')


def example_arguments(name: str, folder: Path) -> list[str]:
    out = ["--out", str(folder)] if name == "train_digits" else []
    return [str(ROOT / "examples" / f"{name}.py"), *TOY[name], *out]


def check_example(name: str, printed: str) -> None:
    found = re.search(SAYS[name], printed)
    assert found, printed
    for number in found.groups():
        assert float(number) < 1e-4, printed


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_in_one_process(path, run_python, tmp_path):
    done = run_python([*example_arguments(path.stem, tmp_path), "--devices", "4"])
    assert done.returncode == 0, done.stderr
    check_example(path.stem, done.stdout)


@pytest.mark.mpi
@pytest.mark.parametrize("name", sorted(set(TOY) - {"train_digits"}))
def test_example_over_ranks(name, mpirun, tmp_path):
    done = mpirun(2, [*example_arguments(name, tmp_path), "--devices", "2"])
    assert done.returncode == 0, done.stderr
    check_example(name, done.stdout)


@pytest.mark.mpi
def test_loss_curve_does_not_depend_on_how_devices_are_spread(run_python, mpirun, tmp_path):
    curves = {}
    for ranks, devices in ((1, 4), (4, 1), (2, 2)):
        folder = tmp_path / f"{ranks}x{devices}"
        arguments = [*example_arguments("train_digits", folder), "--devices", str(devices)]
        done = run_python(arguments) if ranks == 1 else mpirun(ranks, arguments)
        assert done.returncode == 0, done.stderr
        result = json.loads((folder / "loss.json").read_text())
        assert (result["processes"], result["devices"]) == (ranks, 4)
        assert (folder / "loss.png").stat().st_size > 5000
        curves[ranks] = np.array(result["loss"])
    assert curves[1].shape == (22,) and curves[1][-1] < 0.6 * curves[1][0]
    np.testing.assert_allclose(curves[4], curves[1], rtol=1e-5)
    np.testing.assert_allclose(curves[2], curves[1], rtol=1e-5)


@pytest.mark.slow
def test_the_main_job_reaches_its_accuracy(run_python, tmp_path):
    script = str(ROOT / "examples" / "train_digits.py")
    done = run_python([script, "--devices", "4", "--out", str(tmp_path)], timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "loss.json").read_text())["test_accuracy"] > 0.97


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_shows_how_it_is_launched(path):
    source = path.read_text(encoding="utf-8")
    assert f"python examples/{path.name}" in source and "spmdrun -n" in source
    assert path.stem in TOY, "give the example a toy size, so that it is run here"
    # The main job carries its plot, progress, checkpoints and command line; the others are shorter.
    assert len(source.splitlines()) <= (250 if path.stem == "train_digits" else 150)


# ---- the language model ------------------------------------------------------------------------

LM = [str(ROOT / "examples" / "lm" / "train.py"), "--steps", "3", "--batch", "4", "--width", "32"]


def _losses(folder: Path) -> list[float]:
    return json.loads((folder / "loss.json").read_text())["losses"]


def test_every_plan_trains_alike(run_python, tmp_path):
    curves = {}
    for plan in ("dp", "fsdp", "tp", "dp+tp"):
        options = ["--plan", plan, "--devices", "4", "--sample", "2", "--out", str(tmp_path)]
        done = run_python([*LM, *options])
        assert done.returncode == 0, done.stderr
        assert f"{plan} over 4 devices: loss" in done.stdout and "all_reduce" in done.stdout
        curves[plan] = _losses(tmp_path)
    for curve in curves.values():
        np.testing.assert_allclose(curve, curves["dp"], atol=1e-5)


@pytest.mark.mpi
def test_a_plan_trains_alike_over_ranks(run_python, mpirun, tmp_path):
    options = ["--plan", "dp+tp", "--devices", "2", "--sample", "2", "--out", str(tmp_path / "two")]
    done = mpirun(2, [*LM, *options])
    assert done.returncode == 0, done.stderr
    one = ["--plan", "dp+tp", "--devices", "4", "--sample", "0", "--out", str(tmp_path / "one")]
    assert run_python([*LM, *one]).returncode == 0
    np.testing.assert_allclose(_losses(tmp_path / "two"), _losses(tmp_path / "one"), atol=1e-5)
