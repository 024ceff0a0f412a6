"""Scatters with repeated indices: in row-major order, whatever the number of threads."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.compile.cpu.program import CopyStep, KernelStep, walk
from spmd.compile.executable import Executable
from spmd.compile.pipeline import compile_jaxpr

RNG = np.random.default_rng(3)


def _program(f, *args) -> Executable:
    return compile_jaxpr(spmd.make_jaxpr(f)(*args))


def _kernels(program: Executable) -> list[KernelStep]:
    return [s for s in walk(program.native.program.steps) if isinstance(s, KernelStep)]


def add_rows(rows, at):
    return snp.zeros((40, *rows.shape[1:]), rows.dtype).at[at].add(rows)


@pytest.mark.parametrize("shape", [(700, 256), (700, 64), (900, 48), (300, 2, 96), (40000,)])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_sums_are_made_in_row_major_order(shape, dtype):
    rows = RNG.standard_normal(shape).astype(np.float32)
    rows = (100 * rows).astype(dtype) if dtype == np.int32 else rows
    at = RNG.integers(-45, 45, shape[0]).astype(np.int32)
    expected = np.zeros((40, *shape[1:]), dtype)
    inside = (at >= -40) & (at < 40)
    np.add.at(expected, at[inside], rows[inside])
    (found,) = _program(add_rows, rows, at)([snp.asarray(rows), snp.asarray(at)])
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_wide_windows_are_shared_by_parts():
    rows, at = np.ones((700, 256), np.float32), np.zeros(700, np.int32)
    assert any(
        step.name.startswith("scatter") and step.units == 4
        for step in _kernels(_program(add_rows, rows, at))
    )
    narrow = _program(add_rows, np.ones((40000, 3), np.float32), np.zeros(40000, np.int32))
    assert all(step.units == 1 for step in _kernels(narrow) if step.name.startswith("scatter"))


def test_the_last_of_equal_places_wins():
    rows = RNG.standard_normal((500, 128)).astype(np.float32)
    at = RNG.integers(0, 30, 500).astype(np.int32)

    def f(rows, at):
        return snp.zeros((30, 128), np.float32).at[at].set(rows)

    expected = np.zeros((30, 128), np.float32)
    for row, k in zip(rows, at, strict=True):
        expected[k] = row
    np.testing.assert_array_equal(np.asarray(spmd.jit(f)(rows, at)), expected)


def test_the_operand_is_made_where_the_result_is_wanted():
    rows, at = np.ones((700, 64), np.float32), np.zeros(700, np.int32)
    program = _program(add_rows, rows, at)
    assert not any(isinstance(s, CopyStep) for s in walk(program.native.program.steps))


def test_an_operand_that_is_read_again_is_copied():
    def f(x, at):
        y = snp.sin(x)
        return y.at[at].add(1), y

    x, at = RNG.standard_normal(50).astype(np.float32), np.array([3, 3, 4], np.int32)
    changed, y = map(np.asarray, spmd.jit(f)(x, at))
    expected = y.copy()
    np.add.at(expected, at, np.float32(1))
    np.testing.assert_array_equal(changed, expected)
    np.testing.assert_allclose(y, np.sin(x), rtol=1e-6)
