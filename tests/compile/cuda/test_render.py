"""Rendered CUDA kernels, run on the CPU thread by thread, against the kernel interpreter."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spmd.compile.cuda.render import render
from spmd.compile.kernel.interpret import interpret
from tests.compile.cuda.corpus import (
    operation_cases,
    program_kernels,
    with_inputs,
    written_cases,
)
from tests.compile.cuda.emulator import Emulator
from tests.compile.kernel.op_kernels import assert_close
from tests.compile.kernel.random_kernels import Case


def assert_emulates(cases: Iterable[Case]) -> None:
    """Compile all kernels as one module, run each, and compare it with the interpreter."""
    rendered = [(case, render(case.kernel)) for case in cases]
    emulator = Emulator(function for _, each in rendered for function in each.functions)
    for case, each in rendered:
        expected, got = [a.copy() for a in case.arrays], [a.copy() for a in case.arrays]
        interpret(case.kernel, expected)
        emulator.run(each, got)
        with np.errstate(all="ignore"):
            assert_close(case.kernel, expected, got)


def test_every_feature_of_the_ir():
    assert_emulates(written_cases())


def test_each_operation_on_each_dtype():
    assert_emulates(operation_cases())


def test_the_kernels_of_programs():
    kernels = program_kernels()
    assert len(kernels) > 200, "the corpus has shrunk: is the lowering still asked?"
    assert_emulates(with_inputs(kernel, seed) for seed, kernel in enumerate(kernels))
