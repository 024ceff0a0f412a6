"""Rows that go far along split dims: joined, sliced and padded arrays against unsplit ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax
from spmd.base.config import config
from spmd.collectives.rectangles import interval
from spmd.partition.halos import Window
from spmd.partition.shifts import rows_lacking
from tests.partition.programs import auto_mesh


@pytest.fixture(scope="module", autouse=True)
def eight_devices() -> Iterator[None]:
    """Meshes of this file have up to eight devices."""
    with config.override("num_cpu_devices", 8):
        yield


@st.composite
def programs(draw: st.DrawFn) -> tuple[Any, list[np.ndarray], Any, list[Any]]:
    """A program of joins, slices and paddings of up to three arrays, and how these are laid out."""
    sizes = draw(st.sampled_from([{"x": 8}, {"x": 4, "y": 2}, {"x": 3, "y": 2}]))
    d = draw(st.integers(0, 1))
    counts = draw(st.lists(st.sampled_from([1, 5, 8, 12, 24, 48]), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    arrays = []
    for count in counts:
        shape = [12, 12]
        shape[d] = count
        arrays.append(rng.standard_normal(shape).astype(np.float32))
    low, high = draw(st.integers(0, 30)), draw(st.integers(0, 30))
    start, rows = draw(st.integers(0, 20)), draw(st.integers(1, 60))
    fill = draw(st.sampled_from([0.0, -1.5]))

    def program(*xs: Any) -> Any:
        x = snp.concatenate([x * 2 for x in xs], d)
        first = min(start, x.shape[d] - 1)
        y = lax.slice_in_dim(x, first, min(first + rows, x.shape[d]), 1, d)
        z = lax.pad(y, np.float32(fill), [(low, high, 0) if k == d else (0, 0, 0) for k in (0, 1)])
        return x, snp.tanh(y), z + 1

    mesh = auto_mesh(tuple(sizes.values()), tuple(sizes))
    specs = []
    for x in arrays:
        entries: list[Any] = [None, None]
        for axis in draw(st.permutations(list(sizes))):
            k = draw(st.integers(-1, 1))
            if k >= 0 and entries[k] is None and x.shape[k] % sizes[axis] == 0:
                entries[k] = axis
        specs.append(P(*entries))
    return program, arrays, mesh, specs


@settings(deadline=None, max_examples=25)
@given(programs())
def test_joins_slices_and_paddings_are_those_of_whole_arrays(drawn: Any):
    program, arrays, mesh, specs = drawn
    pairs = zip(arrays, specs, strict=True)
    placed = [spmd.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
    outs: Any = spmd.jit(program)(*placed)
    for found, expected in zip(outs, program(*arrays), strict=True):
        np.testing.assert_array_equal(found, expected)

    def loss(*xs: Any) -> Any:
        return sum((snp.sin(x) * np.float32(0.5 + k)).sum() for k, x in enumerate(program(*xs)))

    numbers = tuple(range(len(arrays)))
    found = spmd.jit(spmd.grad(loss, numbers))(*placed)
    for one, other in zip(found, spmd.grad(loss, numbers)(*arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 60))
def test_the_cost_counts_the_rows_that_lack(counts: list[int], devices: int, cut: int):
    """Against sets of rows, by operand."""
    rows, places, shifts = sum(counts) - min(cut, sum(counts) - 1), 0, []
    for count in counts:
        shifts.append(Window(0, count, rows, -places))
        places += count
    owners = [(k, row) for k, count in enumerate(counts) for row in range(count)]
    most = 0
    for part in range(devices):
        own = {(k, row) for k, n in enumerate(counts) for row in range(*interval(n, devices, part))}
        most = max(most, len(set(owners[slice(*interval(rows, devices, part))]) - own))
    assert rows_lacking(shifts, devices) == most


def test_bytes_of_a_join_are_those_that_lack():
    mesh = auto_mesh((4,), ("x",))
    x = spmd.device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, P("x")))
    with spmd.debug.expect_collectives(exchange=1) as moved:
        out = spmd.jit(lambda a: snp.concatenate([a, 2 * a]))(x)
    assert out.sharding == NamedSharding(mesh, P("x")) and moved.received == 32 * 64 * 4
    gradient = spmd.jit(spmd.grad(lambda a: (snp.concatenate([a, 2 * a]) ** 2).sum()))
    with spmd.debug.expect_collectives(at_most=3 * 16 * 64 * 4 + 32 * 64 * 4):
        np.testing.assert_array_equal(gradient(x), 10 * np.ones((64, 64)))


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[Any, tuple[int, ...], tuple[int, ...], Any]:
    """A mesh, a shape, another of as many elements, and a spec of the first."""
    sizes = draw(st.sampled_from([{"x": 8}, {"x": 4, "y": 2}, {"x": 3, "y": 2}]))
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 12]), min_size=1, max_size=5))

    def grouped() -> tuple[int, ...]:
        shape = [1]
        for factor in factors:
            if draw(st.booleans()):
                shape.append(factor)
            else:
                shape[-1] *= factor
        return tuple(shape)

    old, new = grouped(), grouped()
    entries: list[Any] = [None] * len(old)
    for axis in draw(st.permutations(list(sizes))):
        k = draw(st.integers(0, len(old) - 1))
        if entries[k] is None and old[k] % sizes[axis] == 0:
            entries[k] = axis
    return auto_mesh(tuple(sizes.values()), tuple(sizes)), old, new, P(*entries)


@settings(deadline=None, max_examples=60)
@given(reshapes(), st.integers(0, 2))
def test_reshapes_are_those_of_whole_arrays(drawn: Any, cut: int):
    """Also of values whose parts have different sizes, and of their gradients."""
    mesh, old, new, spec = drawn
    value = np.arange(np.prod(old), dtype=np.float32).reshape(old) / 7
    x = spmd.device_put(value, NamedSharding(mesh, spec))

    def program(x: Any) -> Any:
        y = snp.sin(x).reshape(new)
        rows = y[min(cut, y.shape[0] - 1) :]
        return y * 2, rows.reshape(-1) * 3, snp.sum(rows.reshape(rows.shape[0], -1), 1)

    outs: Any = spmd.jit(program)(x)
    for found, expected in zip(outs, program(value), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    gradient: Any = spmd.grad(lambda x: sum((snp.cos(y) * y).sum() for y in program(x)))
    found: Any = spmd.jit(gradient)(x)
    np.testing.assert_allclose(found, gradient(value), rtol=1e-3, atol=1e-4)


def test_a_reshape_whose_parts_do_not_line_up_is_one_small_exchange():
    mesh = auto_mesh((4,), ("x",))
    x = spmd.device_put(np.ones((1024, 6), np.float32), NamedSharding(mesh, P("x")))
    with spmd.debug.expect_collectives(exchange=1, permute=1, all_reduce=1) as moved:
        total = spmd.jit(lambda a: (a[1:].reshape(341, 18) ** 2).sum())(x)
    assert float(total) == 1023 * 6 and moved.received < 200


def test_halos_that_are_part_of_one_another_are_exchanged_once():
    """The rows of neighbours are read by slices of several reaches, in a loop and outside."""

    def smoothed(a: Any) -> Any:
        return snp.pad(a[2:-2] + a[1:-3] - a[3:-1] * 2 + a[:-4] + a[4:] / 3, ((2, 2), (0, 0)))

    def rolled(a: Any) -> Any:
        return snp.roll(a, 1, 0) - snp.roll(a, 2, 0) * 2 + snp.roll(a, -1, 0)

    mesh = auto_mesh((8,), ("x",))
    values = np.random.default_rng(0).standard_normal((96, 4)).astype(np.float32)
    x = spmd.device_put(values, NamedSharding(mesh, P("x")))
    for f, rows in ((smoothed, [2, 4]), (rolled, [1, 2])):
        for g in (f, lambda a, f=f: lax.fori_loop(0, 3, lambda _, a: f(a), a)):
            found = spmd.debug.collectives(spmd.jit(g))(x)
            assert sorted(c.received // (4 * 4) for c in found) == rows, found
            np.testing.assert_allclose(spmd.jit(g)(x), g(values), 1e-4, 1e-4)
