"""Each barrier of the corpus removed, each bound of an index shifted: the emulator tells.

A sample in every run, all with `-m nightly`. A mistake that stays inside of its arrays shows in
wrong values; a mutant that may be equal must have a reason in `mutants.py`.
"""

from __future__ import annotations

import pytest

from spmd.compile.cuda.emulator.gpu import Gpu
from tests.compile.cuda.emulated import CAPACITY
from tests.compile.cuda.mutants import (
    barriers,
    bounds,
    emulator_of,
    equivalent_barrier,
    equivalent_bound,
    heads,
    outcomes,
    outcomes_of_head,
)

SEEDS = 20


def is_report(outcome: str) -> bool:
    """Whether an outcome names a line of CUDA C++."""
    return "kernels.cu:" in outcome or ".cuh:" in outcome


def assert_barriers_are_told(mutants, found, least: float) -> None:
    told = 0
    for mutant, outcome in zip(mutants, found, strict=True):
        if outcome == "equal":
            assert equivalent_barrier(mutant), mutant.broken.text
        elif outcome == "wrong":  # what threads hand to each other through global memory
            assert "if (live && member == 0) a" in mutant.broken.text, mutant.broken.text
        else:
            assert is_report(outcome), outcome
            # An index that nobody has written yet may lead outside of an array first.
            assert "with no barrier between" in outcome or "_at[" in outcome, outcome
            told += 1
    assert told >= least * len(found)


def assert_bounds_are_told(mutants, found, least: float) -> None:
    told = 0
    for mutant, outcome in zip(mutants, found, strict=True):
        if outcome == "equal":
            assert equivalent_bound(mutant), f"{mutant.line}\n{mutant.broken.text}"
        elif outcome != "wrong":
            assert is_report(outcome), outcome
            told += 1
    assert told >= least * len(found)


def test_removed_barriers_are_told():
    mutants = list(barriers())
    assert len(mutants) > 60
    sample = mutants[::5]
    assert_barriers_are_told(sample, with_seeds(sample), 0.3)


def test_shifted_bounds_are_told():
    mutants = list(bounds())
    assert len(mutants) > 600
    sample = mutants[::15]
    assert_bounds_are_told(sample, with_seeds(sample), 0.7)


def with_seeds(mutants) -> list[str]:
    """The outcome of each mutant, each with the next of 20 seeds."""
    emulator, found = emulator_of(mutants), []
    for number, mutant in enumerate(mutants):
        emulator.gpu = Gpu(1, CAPACITY, number % SEEDS)
        found += outcomes([mutant], emulator)
    return found


def test_a_barrier_removed_from_the_head_is_told():
    """The barrier of `reduce_columns` between two halvings; every one of its callers needs it."""
    name, head, calling = [each for each in heads() if each[0].startswith("reduce_columns")][1]
    calling = calling[::4]
    found = outcomes_of_head(head, calling)
    assert all(is_report(outcome) and "slots[" in outcome for outcome in found), name


@pytest.mark.parametrize("function", ["sort_tiles", "merge_runs"])
def test_each_barrier_of_sorts_is_told(function):
    removed = [each for each in heads() if each[0].startswith(function)]
    assert len(removed) == {"sort_tiles": 2, "merge_runs": 3}[function]
    for name, head, calling in removed:
        # Short rows, and those of more than a tile. A thread is alone with rows of one key.
        found = outcomes_of_head(head, [*calling[2:6], calling[-1]])
        assert "wrong" not in found, name
        assert sum(map(is_report, found)) >= len(found) - 1, name


@pytest.mark.nightly
def test_each_removed_barrier_is_told_with_each_seed():
    mutants = list(barriers())
    emulator, reports = emulator_of(mutants), []
    for seed in range(SEEDS):
        emulator.gpu = Gpu(1, CAPACITY, seed)
        found = outcomes(mutants, emulator)
        assert_barriers_are_told(mutants, found, 0.45)
        reports.append([is_report(outcome) for outcome in found])
    assert all(each == reports[0] for each in reports)


@pytest.mark.nightly
def test_each_shifted_bound_is_told_with_each_seed():
    mutants = list(bounds())
    emulator, reports = emulator_of(mutants), []
    for seed in range(SEEDS):
        emulator.gpu = Gpu(1, CAPACITY, seed)
        found = outcomes(mutants, emulator)
        assert_bounds_are_told(mutants, found, 0.8)
        reports.append([outcome == "equal" for outcome in found])
    assert all(each == reports[0] for each in reports)


@pytest.mark.nightly
def test_each_barrier_of_the_head_is_told_by_a_kernel_that_needs_it():
    for name, head, calling in heads():
        found = outcomes_of_head(head, calling)
        assert "wrong" not in found, name
        assert any(is_report(outcome) for outcome in found), name
