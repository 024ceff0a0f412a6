"""Stretches that repeat are functions: the same numbers as without, from a text that grows less."""

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.compile.cpu.codegen.kernel import render
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.ir import Kernel
from spmd.compile.native.llvm.compiler import compile_texts
from tests.compile.cpu.native import host_target, run_native
from tests.compile.kernel.interpret import interpret
from tests.compile.kernel.op_kernels import assert_close

COUNT = 203


def unrolled(turn, turns: int, also: int | None = None) -> Kernel:
    """A kernel of so many turns of x = turn(b, x, y, number); turn `also` is stored as well."""
    b = Builder((), (COUNT,))
    x_arg, y_arg = b.arg("f32", COUNT), b.arg("f32", COUNT)
    with b.row():
        x, y = b.load(x_arg, (1,)), b.load(y_arg, (1,))
        for number in range(turns):
            x = turn(b, x, y, number)
            if number == also:
                b.store(b.arg("f32", COUNT, "out"), (1,), x)
        b.store(b.arg("f32", COUNT, "out"), (1,), x)
    return b.build()


def wave(b, x, y, number):
    scaled = b.op("mul", x, b.const(1 + number / 64, "f32"))
    return b.op("add", b.op("sin", scaled), b.const(0.5, "f32"))


def two_values(b, x, y, number):
    return b.op("sub", b.op("mul", b.op("tanh", x), y), b.const(number / 8, "f32"))


def bounded(b, x, y, number):
    # Its constants differ, and are not numbers like any others.
    return b.op("max", b.op("exp", b.op("neg", x)), b.const(number / 64, "f32"))


def same_constant(b, x, y, number):
    return b.op("exp", b.op("min", b.op("neg", x), b.const(0.25, "f32")))


def compared(b, x, y, number):
    small = b.op("lt", x, y)
    return b.op("select", small, b.op("cos", x), b.op("sin", b.op("add", x, y)))


def check(kernel: Kernel, calls: bool) -> str:
    text = render(kernel, host_target()).text
    assert ("@helper0(" in text) == calls, text
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(arg.size).astype(np.float32) for arg in kernel.args]
    expected, got = [a.copy() for a in arrays], [a.copy() for a in arrays]
    interpret(kernel, expected)
    run_native(kernel, got, 1, None)
    assert_close(kernel, expected, got)
    return text


@pytest.mark.parametrize("turn", [wave, two_values, same_constant, compared])
@pytest.mark.parametrize("turns", [24, 31])
def test_a_repeated_stretch_becomes_a_function(turn, turns):
    text = check(unrolled(turn, turns), calls=True)
    assert text.count("@spmd_shared_") < turns


@pytest.mark.parametrize("turns", [3, 6])
def test_a_stretch_repeated_a_few_times_stays_in_place(turns):
    check(unrolled(wave, turns), calls=False)


def test_constants_that_choose_instructions_stay_in_place():
    check(unrolled(bounded, 24), calls=False)


@pytest.mark.parametrize("also", [11, 13, 23])
def test_results_on_the_way_are_read_where_a_stretch_ends(also):
    check(unrolled(wave, 24, also), calls=True)


def test_a_stretch_with_two_results_stays_in_place():
    b = Builder((), (COUNT,))
    arg = b.arg("f32", COUNT)
    with b.row():
        x = y = b.load(arg, (1,))
        for _ in range(16):
            x, y = b.op("sin", b.op("add", x, y)), b.op("cos", b.op("sub", x, y))
        b.store(b.arg("f32", COUNT, "out"), (1,), x)
        b.store(b.arg("f32", COUNT, "out"), (1,), y)
    check(b.build(), calls=False)


def test_functions_of_two_texts_in_one_module_have_different_names():
    texts = [render(unrolled(turn, 24), host_target()).text for turn in (wave, two_values)]
    assert all("@helper0(" in text for text in texts)
    assert not any("helper" in symbol for symbol in compile_texts(texts))


def test_the_text_grows_with_the_distinct_stretches_only():
    few, many = (len(render(unrolled(wave, n), host_target()).text) for n in (24, 96))
    assert many < 2 * few


def test_an_unrolled_loop_gives_what_its_turns_give():
    def turn(x, k):
        return snp.sin(x * (1 + 0.01 * k)) + 0.5

    def body(x):
        for k in range(40):
            x = turn(x, k)
        return x

    x = np.linspace(-3, 3, 1000, dtype=np.float32)
    expected = x
    for k in range(40):
        expected = np.asarray(spmd.jit(turn, static_argnums=1)(expected, k))
    np.testing.assert_array_equal(spmd.jit(body)(x), expected)
