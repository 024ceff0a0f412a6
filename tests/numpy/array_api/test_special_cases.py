"""Special cases of elementwise functions, op by op and compiled, in both widths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import numpy as snp
from tests.numpy.array_api.special_cases import COMPLEX, DEVIATIONS, REAL, Case, cases, number

REAL_CASES, COMPLEX_CASES = cases(REAL), cases(COMPLEX)


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.enable_x64(True):
        yield


def says(word: str, operands: Sequence[np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """The test of results that a word of the table stands for."""
    if word in ("True", "False"):
        return lambda out: out == (word == "True")
    if word in ("positive", "negative"):
        return lambda out: np.signbit(out) == (word == "negative")
    open_sign = word.startswith("~")
    word = word.lstrip("~")
    sign = -1.0 if word.startswith("-|") else 1.0
    named = {f"x{k + 1}": x for k, x in enumerate(operands)}
    magnitudes = {f"|{name}|": np.abs(x) for name, x in named.items()}
    if word.lstrip("-") in magnitudes:
        wanted = np.copysign(magnitudes[word.lstrip("-")], sign)
    else:
        wanted = named[word] if word in named else np.float64(number(word))

    def test(out: np.ndarray) -> np.ndarray:
        if open_sign:
            return np.isclose(np.abs(out), np.abs(wanted), rtol=1e-6, atol=0, equal_nan=True)
        # The sign of a NaN means nothing.
        same_sign = (np.signbit(out) == np.signbit(wanted)) | np.isnan(wanted)
        return np.isclose(out, wanted, rtol=1e-6, atol=0, equal_nan=True) & same_sign

    return test


def call(name: str, operands: Sequence[np.ndarray], compiled: bool) -> np.ndarray:
    function = getattr(snp, name)
    function = spmd.jit(function) if compiled else function
    return np.asarray(function(*map(snp.asarray, operands)))


def check(case: Case, holds: np.ndarray, examples: Sequence[Any], out: np.ndarray) -> None:
    wrong = [f"{x}: {y}" for x, y, good in zip(examples, out, holds, strict=True) if not good]
    if case.reason is None:
        assert not wrong, f"{case} is not so for {wrong}"
    else:
        assert wrong, f"{case} holds now: take it out of DEVIATIONS"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("name", REAL_CASES)
def test_real(name: str, dtype: Any, compiled: bool):
    examples = [case.examples() for case in REAL_CASES[name]]
    operands = np.array([x for some in examples for x in some], dtype).T
    out = call(name, operands, compiled)
    for case, some in zip(REAL_CASES[name], examples, strict=True):
        mine, operands = np.split(operands, [len(some)], axis=1)
        found, out = np.split(out, [len(some)])
        holds = says(case.result[0], mine)(found)
        check(case, holds, some, found)


def assert_parts(case: Case, out: np.ndarray, some: Sequence[Any]) -> None:
    parts = (out.real, out.imag) if len(case.result) == 2 else (out,)
    holds = [says(w, ())(part) for w, part in zip(case.result, parts, strict=True)]
    check(case, np.logical_and.reduce(holds), some, out)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128], ids=["c64", "c128"])
@pytest.mark.parametrize("name", COMPLEX_CASES)
def test_complex(name: str, dtype: Any, compiled: bool):
    examples = [case.examples() for case in COMPLEX_CASES[name]]
    numbers = np.array([complex(*x) for some in examples for x in some], dtype)
    out, mirrored = (call(name, [z], compiled) for z in (numbers, numbers.conj()))
    for case, some in zip(COMPLEX_CASES[name], examples, strict=True):
        found, out = np.split(out, [len(some)])
        other, mirrored = np.split(mirrored, [len(some)])
        assert_parts(case, found, some)
        if np.iscomplexobj(other) and name != "sign":  # whose zero has no sign in either half
            assert_parts(case, other.conj(), some)


def test_deviations_are_cases():
    known = {(c.function, " ".join(c.operands)) for cs in REAL_CASES.values() for c in cs}
    assert set(DEVIATIONS) <= known
