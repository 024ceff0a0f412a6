"""The corpus under test: its programs (a part of them; all with `--all-faults`) and its judge."""

from __future__ import annotations

import dataclasses

import pytest

from tests.faults.corpus import KINDS, Program, programs
from tests.faults.judge import Line, judge, ranks_in
from tests.faults.runner import run

ALL = programs()
FAULTS = [program for program in ALL if program.is_fault]
ALIKE = [program for program in ALL if not program.is_fault]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the programs marked for CI, or all."""
    if "program" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-faults")
        chosen = [program for program in ALL if everything or program.ci]
        metafunc.parametrize("program", chosen, ids=lambda program: program.name)


@pytest.mark.mpi
def test_is_named(program: Program):
    result = run(program)
    assert result.verdict.is_right, "\n".join([*result.verdict.wrong, result.out, result.err])


# ---- the corpus --------------------------------------------------------------------------------


def test_there_are_many_of_every_kind():
    assert len(FAULTS) >= 60 and len(ALIKE) >= 60
    assert {program.kind for program in ALL} == set(KINDS)
    assert {program.ranks for program in FAULTS} == {1, 2, 3, 4}


def test_every_fault_says_what_it_expects():
    for program in FAULTS:
        assert program.lines("fault") or program.lines("others") or program.words, program.name
        assert all(rank < program.ranks for rank in program.culprits), program.name


def test_programs_are_small():
    for program in ALL:
        code = program.body.__code__
        lines = {line for _, _, line in code.co_lines() if line}
        assert max(lines) - min(lines) < 30, program.name


# ---- the judge ---------------------------------------------------------------------------------


def example() -> tuple[Program, str]:
    """A program with one marked line, and where that is."""
    program = next(p for p in FAULTS if p.name == "raising.between_steps")
    return program, f"{program.file}:{program.lines('fault')[0]}"


def lines(*texts: str) -> list[Line]:
    return [Line(float(k), text) for k, text in enumerate(texts)]


def test_the_judge_wants_rank_line_class_and_code():
    program, place = example()
    said = f"spmdrun: rank 2 raised ZeroDivisionError at {place}: by zero"
    verdict = judge(program, 1, lines("r2 | Traceback", said))
    assert verdict.is_right and verdict.named_at == 1.0
    for wrong in (
        said.replace("rank 2", "rank 1"),
        said.replace(place, place + "0"),
        said.replace("ZeroDivisionError", "KeyError"),
    ):
        assert not judge(program, 1, lines(wrong)).is_right, wrong
    assert judge(program, 0, lines(said)).wrong == ("exit code 0, not 1",)


def test_the_judge_wants_the_line_of_the_others():
    program, place = example()
    other = dataclasses.replace(program, name="x", body=next(iter(FAULTS)).body, kind="mismatch")
    assert other.lines("others")
    verdict = judge(other, 1, lines(f"rank 2: ZeroDivisionError at {place}"))
    assert any("where the others were" in text for text in verdict.wrong)


def test_the_judge_hears_false_alarms():
    peace = ALIKE[0]
    assert judge(peace, 0, lines("r1 | spmd: running as a single process: why")).is_right
    assert judge(peace, 0, lines("r1 | ERROR: ValueError at train.py:3")).is_right
    assert not judge(peace, 0, lines("spmdrun: rank 1 has not entered")).is_right
    assert not judge(peace, 0, lines("r0 | spmd.errors.CollectiveError: no")).is_right
    assert not judge(peace, 1, lines()).is_right


@pytest.mark.parametrize(
    "text, ranks",
    [
        ("rank 1 raised", {1}),
        ("ranks 0, 2: stopped", {0, 2}),
        ("ranks 0,2,3 were waiting", {0, 2, 3}),
        ("ranks 0-2 and rank 4", {0, 1, 2, 4}),
        ("ranks 1 and 3 wait", {1, 3}),
        ("4 ranks on one host", set()),
    ],
)
def test_ranks_in_a_sentence(text: str, ranks: set[int]):
    assert ranks_in(text) == ranks
