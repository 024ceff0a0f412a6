"""Random programs give what JAX gives: evaluated, compiled, and op by op.

pytest -m nightly tests/jax/test_random_programs.py      # 20,000 more programs, hours
python -m tests.jax 17                                   # the program of seed 17
"""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from tests.jax import random_programs
from tests.jax.random_programs import NO_ORACLE, Program, draw, fault, jax, report, shrunk

IN_CI, TOGETHER = 100, 20
NIGHTLY = range(42_000, 62_000, 10 * TOGETHER)
DEEPER_IN_CI, DEEPER_TOGETHER = 40, 10
DEEPER_NIGHTLY = range(1000, 5000, 10 * DEEPER_TOGETHER)


def assert_no_fault(seeds: range, deeper: bool = False) -> None:
    """Stops at the first program that fails; `python -m tests.jax` goes on behind it."""
    for seed in seeds:
        if seed in NO_ORACLE and not deeper:
            continue
        program = draw(seed, deeper)
        if fault(program):
            pytest.fail(report(f"{'deeper ' * deeper}{seed}", program))
    jax.clear_caches()


@pytest.mark.parametrize("first", range(0, IN_CI, TOGETHER))
def test_programs_are_jax_s(first):
    assert_no_fault(range(first, first + TOGETHER))


@pytest.mark.nightly
@pytest.mark.parametrize("first", NIGHTLY)
def test_many_programs_are_jax_s(first):
    assert_no_fault(range(first, first + NIGHTLY.step))


@pytest.mark.parametrize("first", range(0, DEEPER_IN_CI, DEEPER_TOGETHER))
def test_nested_transformations_are_jax_s(first):
    assert_no_fault(range(first, first + DEEPER_TOGETHER), deeper=True)


@pytest.mark.nightly
@pytest.mark.parametrize("first", DEEPER_NIGHTLY)
def test_many_nested_transformations_are_jax_s(first):
    assert_no_fault(range(first, first + DEEPER_NIGHTLY.step), deeper=True)


# ---- the tests of the test ---------------------------------------------------------------------

PAIR = ("x0", "np.array([1.0, 2.0], 'float32')")


def test_seed_says_the_program():
    assert draw(11) == draw(11)
    assert len({str(draw(seed)) for seed in range(10)}) == 10


def test_second_family_nests_what_it_is_for():
    programs = [draw(seed, deeper=True) for seed in range(DEEPER_IN_CI)]
    texts = [program.source() for program in programs]
    words = "lax.scan lax.cond lax.fori_loop lax.while_loop j.checkpoint with_jvp with_vjp written"
    for word in words.split():
        assert any(word in text for text in texts), word
    assert {program.order for program in programs} == {0, 1, 2, 3}
    arguments = str([program.arguments for program in programs])
    assert all(dtype in arguments for dtype in ("bfloat16", "float16", "int8", "bool", "float64"))


def test_printed_program_runs(capsys):
    program = Program((PAIR,), (("v0", "x0 * x0"),), ("v0",), order=1, called_with=("x0",))
    exec(str(program), {})
    evaluated, compiled = capsys.readouterr().out.splitlines()
    gradient = spmd.numpy.asarray(np.float32([2, 4]) * np.cos(np.arange(2, dtype=np.float32)))
    assert evaluated == compiled == f"({gradient!r},)"


class WrongSine:
    """Our `numpy`, but for one function."""

    sin = staticmethod(spmd.numpy.cos)

    def __getattr__(self, name):
        return getattr(spmd.numpy, name)


def test_fault_is_seen_and_shrunk(monkeypatch):
    statements = ("x0 + 1", "np.sin(v0)", "np.exp(v1)", "v2[::-1]")
    program = Program(
        arguments=(PAIR,),
        statements=tuple((f"v{k}", expression) for k, expression in enumerate(statements)),
        returned=("v3", "v0"),
        called_with=("x0",),
    )
    assert fault(program) is None
    monkeypatch.setitem(random_programs.OURS, "np", WrongSine())
    mode, said = fault(program)
    assert mode == "eager" and said.startswith("values")
    assert shrunk(program).statements == (("v1", "np.sin(x0)"),)
