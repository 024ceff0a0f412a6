"""Scatters with repeated indices: in row-major order, whatever the number of threads."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.config import config
from spmd.compile.executable.executable import Executable, compile_jaxpr
from spmd.compile.lower.lowering import lower
from spmd.compile.lower.steps import Launch
from spmd.compile.native.program.steps import Copy, KernelStep, walk
from spmd.compile.passes.pipeline import run_passes

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
    assert not any(isinstance(s, Copy) for s in walk(program.native.program.steps))


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


COUNTED = 2**16


def counts(at, weights, start):
    return start.at[at].add(weights)


def _launches(f, *args) -> list[str]:
    closed = run_passes(spmd.make_jaxpr(f)(*args))
    return [s.name for s in lower(closed).steps if isinstance(s, Launch)]


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8], ids=lambda d: d.__name__)
def test_many_updates_of_few_elements(dtype):
    at = RNG.integers(-120, 130, COUNTED).astype(np.int32)  # some are out of bounds
    weights = RNG.integers(0, 5, COUNTED).astype(dtype)
    start = np.arange(100).astype(dtype)
    expected = start.copy()
    inside = (at >= -100) & (at < 100)
    np.add.at(expected, at[inside], weights[inside])
    np.testing.assert_array_equal(spmd.jit(counts)(at, weights, start), expected)


def test_counts_in_two_dims_and_gradients():
    rows, columns = RNG.integers(0, 8, (2, 64, 1024)).astype(np.int32)
    weights = RNG.standard_normal((64, 1024)).astype(np.float32)

    def f(weights):
        return snp.zeros((8, 8)).at[rows, columns].add(weights)

    expected = np.zeros((8, 8))
    np.add.at(expected, (rows, columns), weights)
    np.testing.assert_allclose(spmd.jit(f)(weights), expected, rtol=1e-4, atol=1e-3)
    gradient = spmd.jit(spmd.grad(lambda w: snp.sum(f(w) * snp.arange(64.0).reshape(8, 8))))
    np.testing.assert_array_equal(gradient(weights), rows * 8.0 + columns)


def test_what_nothing_is_added_to_keeps_its_sign_of_zero():
    start = np.full(50, -0.0, np.float32)
    at = np.zeros(COUNTED, np.int32)
    found = np.asarray(spmd.jit(counts)(at, np.ones(COUNTED, np.float32), start))
    assert found[0] == COUNTED
    assert np.signbit(found[1:]).all()


def test_sums_do_not_depend_on_the_number_of_threads():
    at = RNG.integers(0, 30, COUNTED).astype(np.int32)
    weights = RNG.standard_normal(COUNTED).astype(np.float32)
    results = set()
    for threads in (1, 2, 3):
        with config.override("num_threads", threads):
            f = spmd.jit(lambda at, w: counts(at, w, snp.zeros(30)))
            results.add(np.asarray(f(at, weights)).tobytes())
    assert len(results) == 1


def test_what_is_counted_is_made_nowhere():
    at = RNG.integers(0, 100, COUNTED).astype(np.int32)
    assert "move" not in _launches(lambda at: snp.zeros(100).at[at].add(1.0), at)[1:]
    found = spmd.jit(lambda at: snp.zeros(100).at[at].add(1.0))(at)
    np.testing.assert_array_equal(found, np.bincount(at, minlength=100))


def test_one_number_for_several_readers_is_made():
    at = RNG.integers(0, 10, 50).astype(np.int32)

    def f(at):
        ones = snp.full(50, 3.0)
        return snp.zeros(10).at[at].add(ones), ones

    counts, ones = spmd.jit(f)(at)
    np.testing.assert_array_equal(counts, 3 * np.bincount(at, minlength=10))
    np.testing.assert_array_equal(ones, np.full(50, 3, np.float32))


def test_counts_in_a_loop():
    at = RNG.integers(0, 10, (6, 40)).astype(np.int32)

    def count(total, at):
        return total.at[at].add(1), None

    found, _ = spmd.jit(lambda at: spmd.lax.scan(count, snp.zeros(10, snp.int32), at))(at)
    np.testing.assert_array_equal(found, np.bincount(at.ravel(), minlength=10))


def test_one_number_added_where_there_is_no_kernel():
    at = RNG.integers(0, 10, 50).astype(np.int32)
    found = spmd.jit(lambda at: snp.zeros(10, snp.complex64).at[at].add(2j))(at)
    np.testing.assert_array_equal(found, 2j * np.bincount(at, minlength=10))


@pytest.mark.parametrize("name", ["scatter", "scatter_add", "scatter_mul", "scatter_max"])
def test_windows_that_no_index_moves_meet_at_one_place(name):
    """A gather's gradient makes such scatters: its indices may have no components."""
    x = RNG.standard_normal((5, 3)).astype(np.float32)
    updates = RNG.standard_normal((3, 4, 2)).astype(np.float32)
    numbers = spmd.lax.ScatterDimensionNumbers((0,), (0,), ())
    f = getattr(spmd.lax, name)

    def program(x, updates):
        return f(x, np.zeros((4, 2, 0), np.int32), updates, numbers)

    wanted = x.copy()
    for part in updates.reshape(3, 8).T:
        join = {"scatter_add": np.add, "scatter_mul": np.multiply, "scatter_max": np.maximum}
        wanted[0] = join[name](wanted[0], part) if name in join else part
    for found in (program(x, updates), spmd.jit(program)(x, updates)):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
