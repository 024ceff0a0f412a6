"""Native contractions over windows against their interpreter, and the decisions about them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from spmd.compile.cpu.matmul import window_plan
from spmd.compile.cpu.matmul.window_ir import heights, panel_width
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.check import KernelError
from spmd.compile.kernel.window_contraction import (
    Contraction,
    Dims,
    check_contraction,
    dims_of,
)
from spmd.compile.native.llvm.compiler import Host, compile_texts, host
from spmd.compile.native.llvm.vectors import vectors
from spmd.compile.native.program.steps import Program, Slot
from spmd.compile.native.runtime.run import build_program
from tests.compile.kernel.interpret_products import interpret_contraction


def run(given, a, b, size, *rest):
    """The result of the native kernel, in an array of `size` elements that held NaN.

    `rest` are the epilogue's arguments behind it, of which the kernel may write some.
    """
    plan = window_plan.plan_contraction(given)
    addresses = dict(compile_texts(list(plan.texts), optimize=True))
    addresses |= compile_texts([rendered.text for rendered in plan.epilogues])
    out = np.full(size, np.nan, a.dtype)
    arrays = (a, b, out, *rest)
    slots = [Slot(k) for k in range(1, len(arrays) + 1)]
    step = window_plan.contract_step(plan, addresses, slots)
    program = build_program(Program((0, *(x.nbytes for x in arrays)), (step,), 1))
    frame = np.array([0, *(x.ctypes.data for x in arrays)], np.int64)
    program.run_address(frame.ctypes.data)
    return out


def image_case(rng, dtype, batch, size, features, window, columns):
    """The contraction of a convolution without padding, and its operands."""
    count = size - window + 1
    a = rng.normal(size=(batch, size, size, features)).astype(dtype)
    b = rng.normal(size=(window, window, features, columns)).astype(dtype)
    row, pixel = size * features, features
    out_row = count * columns
    rows = dims_of(
        [(batch, size * row, count * out_row), (count, row, out_row), (count, pixel, columns)]
    )
    depth = dims_of(
        [
            (window, row, window * features * columns),
            (window, pixel, features * columns),
            (features, 1, columns),
        ]
    )
    name = {"float32": "f32", "float64": "f64"}[np.dtype(dtype).name]
    return Contraction(name, rows, depth, columns), a.reshape(-1), b.reshape(-1)


# The columns are, in f32 with wide vectors: one, some, a vector, more than a panel of two, two
# panels of four with a rest; a panel of four as it lies, and one with a rest of three vectors.
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 4, 1, 2, 1),
        (2, 6, 3, 3, 5),
        (1, 9, 4, 2, 16),
        (2, 7, 8, 3, 33),
        (1, 5, 300, 2, 166),
        (1, 8, 3, 3, 64),
        (1, 5, 9, 2, 108),
    ],
    ids=str,
)
def test_native_contractions_give_the_values_of_the_interpreter(dtype, sizes):
    given, a, b = image_case(np.random.default_rng(0), dtype, *sizes)
    check_contraction(given)
    wanted = np.full(given.rows.count * given.columns, np.nan, dtype)
    interpret_contraction(given, a, b, wanted)
    found = run(given, a, b, wanted.size)
    tolerance = {"float32": 1e-4, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def test_panels_are_wide_where_columns_fill_them():
    wide, narrow = vectors("f32", 64), vectors("f32", 32)
    assert [panel_width(wide, n) for n in (1, 32, 64, 70, 96, 100, 112, 128)] == [
        *(2, 2, 4, 2, 2, 4, 4, 4)
    ]
    assert panel_width(vectors("f64", 64), 32) == 4 and panel_width(narrow, 64) == 2
    for v in (wide, narrow):
        for width in {panel_width(v, 64), 2}:
            # The sums, a row of B and an element of A have a register each.
            most = max(heights(v, width)) * width + width + 1
            assert most <= (32 if v.nbytes_of_vector == 64 else 16)


def test_long_tables_become_loops(monkeypatch):
    monkeypatch.setattr(window_plan, "LONGEST_TABLE", 8)
    given, a, b = image_case(np.random.default_rng(0), "float32", 3, 6, 5, 3, 20)
    wanted = np.empty(given.rows.count * given.columns, np.float32)
    interpret_contraction(given, a, b, wanted)
    np.testing.assert_allclose(run(given, a, b, wanted.size), wanted, rtol=1e-4, atol=1e-4)


def test_a_batch_of_contractions_gives_the_values_of_the_interpreter():
    rng = np.random.default_rng(0)
    given, a, b = image_case(rng, "float32", 1, 5, 2, 2, 3)
    members = [(rng.permutation(a), rng.permutation(b)) for _ in range(3)]
    size = given.rows.count * 3
    batched = dataclasses.replace(given, batch=(3, a.size, b.size, size))
    left, right = (np.concatenate(x) for x in zip(*members, strict=True))
    found = run(batched, left, right, 3 * size).reshape(3, -1)
    wanted = np.empty((3, size), np.float32)
    for (x, y), out in zip(members, wanted, strict=True):
        interpret_contraction(given, x, y, out)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_sum_over_nothing_is_zero():
    given = Contraction("f32", Dims((5,), (1,), (3,)), Dims((0,), (1,), (1,)), 3)
    found = run(given, np.ones(8, np.float32), np.ones(8, np.float32), 15)
    assert found.tolist() == [0] * 15


def test_result_does_not_depend_on_the_units(monkeypatch):
    given, a, b = image_case(np.random.default_rng(0), "float32", 2, 20, 16, 3, 40)
    found = []
    for tiles in (1, 3, 100):
        monkeypatch.setattr(window_plan, "UNIT_TILES", tiles)
        found.append(run(given, a, b, given.rows.count * given.columns).tobytes())
    assert len(set(found)) == 1


# ---- epilogues ---------------------------------------------------------------------------------


def with_epilogue(given):
    """max(out + bias, 0) + residual, and where the sum was negative."""
    rows, columns = given.rows.count, given.columns
    builder = Builder((rows,), (columns,))
    source = builder.arg(given.dtype, rows * columns)
    bias = builder.arg(given.dtype, columns)
    residual = builder.arg(given.dtype, rows * columns)
    target = builder.arg(given.dtype, rows * columns, "out")
    negative = builder.arg("bool", rows * columns, "out")
    with builder.row():
        zero = builder.const(0, given.dtype)
        total = builder.op("add", builder.load(source, (columns, 1)), builder.load(bias, (0, 1)))
        kept = builder.op("max", total, zero)
        found = builder.op("add", kept, builder.load(residual, (columns, 1)))
        builder.store(target, (columns, 1), found)
        builder.store(negative, (columns, 1), builder.op("lt", total, zero))
    return dataclasses.replace(given, epilogue=builder.build())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("table", [8, 4096])
@pytest.mark.parametrize("sizes", [(1, 4, 1, 2, 1), (2, 9, 8, 3, 33), (3, 6, 300, 2, 70)], ids=str)
def test_an_epilogue_gives_the_values_of_the_interpreter(monkeypatch, dtype, table, sizes):
    """Rows of any number of units, of tables that are loops, of a depth in several blocks."""
    monkeypatch.setattr(window_plan, "LONGEST_TABLE", table)
    rng = np.random.default_rng(1)
    given, a, b = image_case(rng, dtype, *sizes)
    given = with_epilogue(given)
    check_contraction(given)
    count = given.rows.count * given.columns
    bias, residual = (rng.normal(size=n).astype(dtype) for n in (given.columns, count))
    found, wanted = ((np.empty(count, dtype), np.empty(count, bool)) for _ in range(2))
    interpret_contraction(given, a, b, np.empty(count, dtype), bias, residual, *wanted)
    run(given, a, b, count, bias, residual, *found)
    tolerance = {"float32": 2e-4, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    assert (found[1] == wanted[1]).mean() > 0.999  # a sum next to zero may fall on either side


def test_epilogues_that_break_the_law_are_refused():
    given, _, _ = image_case(np.random.default_rng(0), "float32", 2, 5, 2, 2, 3)
    good = with_epilogue(given)
    check_contraction(good)
    apart = Dims(good.rows.sizes, good.rows.first, tuple(2 * s for s in good.rows.second))
    for change, text in (
        ({"rows": apart}, "do not lie in order"),
        ({"batch": (2, 0, 0, 1000)}, "do not lie in order"),
        ({"dtype": "f64"}, "C is f64"),
        ({"columns": 2, "rows": Dims((3,), (1,), (2,))}, "its space is not that of C"),
    ):
        with pytest.raises(KernelError, match=text):
            check_contraction(dataclasses.replace(good, **change))


# ---- decisions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("features", ["", "+avx2", "+avx512f,+avx512vl"])
def test_plans_for_other_processors_fit_their_registers(features):
    given, _, _ = image_case(np.random.default_rng(0), "float32", 1, 30, 8, 3, 32)
    plan = window_plan.plan_contraction(given, Host("generic", features, host().llvm_version))
    assert plan.units >= 1
    assert plan.symbol in plan.texts[0]


def test_contractions_that_break_the_law_are_refused():
    good = Contraction("f32", Dims((2,), (1,), (3,)), Dims((2,), (1,), (3,)), 3)
    check_contraction(good)
    for change, text in (
        ({"dtype": "i32"}, "contraction of i32"),
        ({"columns": 0}, "without results"),
        ({"columns": 4}, "written twice"),
        ({"rows": Dims((2,), (1,), ())}, "differ in number"),
        ({"batch": (2, 0, 0, 3)}, "written twice"),
    ):
        with pytest.raises(KernelError, match=text):
            check_contraction(dataclasses.replace(good, **change))
