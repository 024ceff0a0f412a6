"""Rendered CUDA kernels, run on the CPU thread by thread, against the kernel interpreter."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from spmd.compile.cuda.emulator.layout import Mode
from spmd.compile.cuda.kernel import render, render_product
from spmd.compile.kernel.matmul import Operand, Product, store_epilogue
from tests.compile.cuda.corpus import (
    operation_cases,
    program_kernels,
    with_inputs,
    written_cases,
)
from tests.compile.cuda.emulated import Emulator
from tests.compile.cuda.large_kernels import LARGE, elementwise, large_inputs
from tests.compile.kernel.interpret import interpret
from tests.compile.kernel.op_kernels import assert_close, renumbered, row_sum
from tests.compile.kernel.random_kernels import Case

each_mode = pytest.mark.parametrize("mode", ["plain", "checked"])


def assert_emulates(cases: Iterable[Case], mode: Mode) -> None:
    """Compile all kernels as one module, run each, and compare it with the interpreter."""
    rendered = [(case, render(case.kernel)) for case in cases]
    functions = [function for _, each in rendered for function in each.functions]
    emulator = Emulator(functions, mode=mode)
    for case, each in rendered:
        expected, got = [a.copy() for a in case.arrays], [a.copy() for a in case.arrays]
        interpret(case.kernel, expected)
        emulator.run(each, got)
        with np.errstate(all="ignore"):
            assert_close(case.kernel, expected, got)


@each_mode
def test_each_feature_of_the_ir_gives_the_values_of_the_interpreter(mode):
    assert_emulates(written_cases(), mode)


@each_mode
def test_each_operation_gives_the_values_of_the_interpreter_on_each_dtype(mode):
    assert_emulates(operation_cases(), mode)


@each_mode
def test_kernels_of_programs_give_the_values_of_the_interpreter(mode):
    kernels = program_kernels()
    assert len(kernels) > 200, "the corpus has shrunk: is the lowering still asked?"
    assert_emulates([with_inputs(kernel, seed) for seed, kernel in enumerate(kernels)], mode)


@pytest.fixture(scope="module")
def large():
    """The large kernels, rendered and compiled as one module."""
    made = {name: (kernel := make(), render(kernel)) for name, (make, _) in LARGE.items()}
    functions = [function for _, each in made.values() for function in each.functions]
    return made, Emulator(functions)


@pytest.mark.parametrize("name", LARGE)
def test_large_kernels_give_the_values_of_the_interpreter_in_each_form(name, large):
    made, emulator = large
    kernel, rendered = made[name]
    assert any(LARGE[name][1] in function.text for function in rendered.functions)
    arrays = large_inputs(kernel)
    expected, got = [a.copy() for a in arrays], [a.copy() for a in arrays]
    interpret(kernel, expected)
    emulator.run(rendered, got)
    assert_close(kernel, expected, got)


def test_every_run_gives_the_same_bits(large):
    made, emulator = large
    for name in ("a split sum", "positions", "scan in teams"):
        kernel, rendered = made[name]
        runs = [large_inputs(kernel) for _ in range(2)]
        for arrays in runs:
            emulator.run(rendered, arrays)
        assert all(x.tobytes() == y.tobytes() for x, y in zip(*runs, strict=True))


# ---- the text -----------------------------------------------------------------------------------


def test_equal_kernels_have_equal_text_whatever_their_value_numbers():
    for case in written_cases():
        # The comment above a function shows the kernel as it is; its symbol is that of the code.
        first, second = render(case.kernel), render(renumbered(case.kernel, 3))
        assert [f.symbol for f in first.functions] == [f.symbol for f in second.functions]
    assert render(row_sum(3, 4)).functions[0].symbol != render(row_sum(3, 5)).functions[0].symbol


def test_a_row_kernel_has_the_golden_text(golden):
    (function,) = render(LARGE["registers"][0]()).functions
    golden("cuda/softmax.cu", function.text)


def test_a_tiled_product_has_the_golden_text(golden):
    epilogue = store_epilogue((), 100, 60, "f32", "bf16", (60, 1))
    product = Product(100, 60, 70, Operand("f32", 70, 1), Operand("f32", 1, 70), "f32", epilogue)
    (function,) = render_product(product).functions
    golden("cuda/product.cu", function.text)


def test_large_arrays_have_wide_indices():
    (function,) = render(elementwise(1 << 20)).functions
    assert "const int point" in function.text
    (function,) = render(elementwise(1 << 32)).functions
    assert "const i64 point = (i64)blockIdx.x * 1024 + threadIdx.x + item * 256;" in function.text


def test_a_kernel_without_points_has_no_functions():
    assert render(row_sum(0, 5)).functions == ()
    assert render(elementwise(0)).functions == ()
    (function,) = render(row_sum(5, 0)).functions  # sums of nothing are stored
    assert "a1[point] = total0;" in function.text
