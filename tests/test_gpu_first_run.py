"""The script for a machine's first GPU, on the emulator: parts, failures, goals, the record."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu_first_run
from benchmarks.gpu_first_run import PARTS, Line, Run, main, table
from benchmarks.gpu_parts import SIZES, Figure, seconds_of

EMULATED = Run("emulator", "small")
OVER_RANKS = "ranks", "killed"
FIGURES = {
    "tests": ["tests that passed"],
    "examples": ["ring_all_reduce.py"],
    "bandwidth": ["copy", *(f"{k} of 16 KiB" for k in ("elementwise", "softmax", "layernorm"))],
    "product": [f"product of {SIZES['small'].product}, {kind}" for kind in ("TF32", "bf16")],
    "launches": [
        f"{what}{how}"
        for how in ("", ", without graphs")
        for what in (
            "a call with one product, the host's time",
            "one product more, the host's time",
            "one product more, until it is done",
        )
    ],
    "ranks": ["two ranks on one GPU"],
    "killed": ["a rank is killed, the other ends"],
}


def measured(part: str) -> dict[str, Line]:
    lines = {line.what: line for line in PARTS[part](EMULATED)}
    assert {line.part for line in lines.values()} == {part}
    return lines


@pytest.mark.parametrize("part", [p for p in FIGURES if p not in OVER_RANKS])
def test_a_part_has_its_figures(part):
    lines = measured(part)
    assert list(lines) == FIGURES[part]
    assert {line.verdict for line in lines.values()} == {"ok"}


@pytest.mark.mpi
@pytest.mark.parametrize("part", OVER_RANKS)
def test_a_part_over_ranks_has_its_figures(part):
    assert list(measured(part)) == FIGURES[part]


def test_steps_are_compared_with_jax(monkeypatch):
    monkeypatch.setattr(gpu_first_run, "STEPS", ("mlp",))
    lines = measured("steps")
    assert list(lines) == ["mlp, spmd", "mlp, jax", "mlp, jax / spmd", "mlp, torch"]
    assert lines["mlp, torch"].verdict == "not there"
    assert lines["mlp, jax / spmd"].goal == 1.0


def test_a_transformer_takes_steps():
    step, loss = EMULATED.figures("transformer", "spmd")
    assert step.value > 0 and 1 < loss.value < 5  # at first the log of the 16 words


def test_steps_that_compute_something_else_fail(monkeypatch):
    def figures(run, name, side):
        return [
            Figure(f"{name}, {side}", 1.0, "ms"),
            Figure("loss", 2.0 if side == "spmd" else 2.5, ""),
        ]

    monkeypatch.setattr(Run, "figures", figures)
    lines = list(PARTS["steps"](EMULATED))
    wanted = [("mlp, spmd", "ok"), ("mlp", "failed"), ("transformer, spmd", "ok")]
    assert [(x.what, x.verdict) for x in lines] == [*wanted, ("transformer", "failed")]
    assert lines[1].reason == "PartError: the third loss is 2, that of jax 2.5"


def test_a_failed_part_is_a_line_and_the_rest_goes_on(monkeypatch, tmp_path, capsys):
    def broken(run):
        yield Line("bandwidth", "copy", "ok", 1.0, "GB/s")
        raise ZeroDivisionError("no time passed")

    monkeypatch.setenv("SPMD_CUDA_DRIVER", "emulator")
    monkeypatch.setitem(PARTS, "bandwidth", broken)
    path = tmp_path / "out.json"
    assert main(["product", "bandwidth", "--small", "--json", str(path)]) == 1
    record = json.loads(path.read_text())
    verdicts = [(line["part"], line["verdict"]) for line in record["lines"]]
    products = [("product", "ok")] * 2
    assert verdicts == [("bandwidth", "ok"), ("bandwidth", "failed"), *products]
    assert record["lines"][1]["reason"] == "ZeroDivisionError: no time passed"
    assert record["device"]["device"] == "emulated GPU 0" and record["commit"]
    said = capsys.readouterr().out
    assert said == table(record) + "\n"
    assert "driver emulator" in said and "Not on a GPU: no goal counts." in said


def test_a_part_that_takes_too_long_is_ended(monkeypatch, capsys):
    monkeypatch.setenv("SPMD_CUDA_DRIVER", "emulator")
    assert main(["product", "--small", "--limit", "0.01"]) == 1
    assert capsys.readouterr().out.count("took longer than 0.01 s") == 2


def test_without_a_gpu_the_reason_is_told(monkeypatch, capsys):
    monkeypatch.setenv("SPMD_CUDA_DRIVER", "cupy")
    monkeypatch.setattr(gpu_first_run, "PARTS", {})
    assert main([]) == 1
    said = capsys.readouterr().out
    assert said.startswith("no device; commit ")
    assert "| device | what the machine has |  |  | failed: exit status 1: " in said
    assert "platform 'cuda' is not available here" in said


def test_goals_count_on_a_gpu():
    figure = Figure("softmax", 0.8, "of copy", 0.85)
    assert Run("cupy", "full").line("bandwidth", figure).verdict == "missed"
    assert EMULATED.line("bandwidth", figure).verdict == "ok"
    assert Run("cupy", "full").line("bandwidth", Figure("copy", 1.0, "GB/s")).verdict == "ok"


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["graph"])
    assert "unknown parts ['graph']; there are tests, examples, " in capsys.readouterr().err


def test_seconds_are_of_one_call():
    made, waited = [], []
    assert 0 < seconds_of(lambda: made.append(0), waited.append, 1e-4) < 1e-2
    assert len(made) > 3 and len(waited) > 2
