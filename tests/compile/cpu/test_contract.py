"""Native contractions over windows against their interpreter, and the decisions about them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from spmd.compile.cpu import contract
from spmd.compile.cpu.loader import Host, compile_texts, host
from spmd.compile.cpu.program import Program, Slot
from spmd.compile.cpu.runner import build_program
from spmd.compile.kernel.check import KernelError
from spmd.compile.kernel.contraction import (
    Contraction,
    Dims,
    check_contraction,
    dims_of,
    interpret_contraction,
)


def run(given, a, b, size):
    """The result of the native kernel, in an array of `size` elements that held NaN."""
    plan = contract.plan_contraction(given)
    addresses = compile_texts(list(plan.texts), optimize=True)
    out = np.full(size, np.nan, a.dtype)
    step = contract.contract_step(plan, addresses, (Slot(1), Slot(2), Slot(3)))
    program = build_program(Program((0, a.nbytes, b.nbytes, out.nbytes), (step,), 1))
    frame = np.array([0, *(x.ctypes.data for x in (a, b, out))], np.int64)
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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 4, 1, 2, 1), (2, 6, 3, 3, 5), (1, 9, 4, 2, 16), (2, 7, 8, 3, 33), (1, 5, 300, 2, 70)],
    ids=str,
)
def test_native_is_interpreted(dtype, sizes):
    given, a, b = image_case(np.random.default_rng(0), dtype, *sizes)
    check_contraction(given)
    wanted = np.full(given.rows.count * given.columns, np.nan, dtype)
    interpret_contraction(given, a, b, wanted)
    found = run(given, a, b, wanted.size)
    tolerance = {"float32": 1e-4, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def test_long_tables_become_loops(monkeypatch):
    monkeypatch.setattr(contract, "_TABLE", 8)
    given, a, b = image_case(np.random.default_rng(0), "float32", 3, 6, 5, 3, 20)
    wanted = np.empty(given.rows.count * given.columns, np.float32)
    interpret_contraction(given, a, b, wanted)
    np.testing.assert_allclose(run(given, a, b, wanted.size), wanted, rtol=1e-4, atol=1e-4)


def test_batch():
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
        monkeypatch.setattr(contract, "_GROUP_TILES", tiles)
        found.append(run(given, a, b, given.rows.count * given.columns).tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("features", ["", "+avx2", "+avx512f,+avx512vl"])
def test_plans_for_other_processors(features):
    given, _, _ = image_case(np.random.default_rng(0), "float32", 1, 30, 8, 3, 32)
    plan = contract.plan_contraction(given, Host("generic", features, host().llvm_version))
    assert plan.units >= 1
    assert plan.symbol in plan.texts[0]


def test_law():
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
