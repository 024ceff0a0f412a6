"""Rolls along split dims: the rows that leave a device are sent, once; nothing is added up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug, lax
from spmd.sharding import AxisType
from tests.partition.programs import auto_mesh

A = np.random.default_rng(0).integers(-9, 9, (24, 16)).astype(np.float32)
A[3, 5], A[20, 2], A[0, 0], A[7] = np.nan, -0.0, np.inf, 0.0
ROW = A[0].nbytes


def put(x: np.ndarray, count: int, *spec: Any) -> spmd.Array:
    devices = spmd.devices()[:count]
    mesh = spmd.make_mesh((count,), ("x",), AxisType.Auto, devices=devices)
    return spmd.device_put(x, NamedSharding(mesh, P(*spec)))


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.int32)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_rows_are_those_of_one_device_bit_by_bit(count: int):
    placed = put(A, count, "x")
    for shift in range(-25, 26):
        f = spmd.jit(lambda a, shift=shift: snp.roll(a, shift, 0))
        np.testing.assert_array_equal(bits(f(placed)), bits(np.roll(A, shift, 0)), str(shift))
        assert f(placed).sharding.spec == P("x")


def test_devices_receive_the_rows_that_leave_others():
    placed = put(A, 4, "x")
    for shift in range(24):
        found = debug.collectives(lambda a, shift=shift: snp.roll(a, shift, 0))(placed)
        assert all(c.kind == "permute" for c in found)
        # A device keeps the rows that stay on it.
        assert sum(c.received for c in found) == min(shift, 6, 24 - shift) * ROW


def test_the_derivative_of_a_roll_is_a_roll():
    weights = np.arange(A.size, dtype=np.float32).reshape(A.shape)
    for shift in (1, -2, 7, 12):
        slope = spmd.grad(lambda a, shift=shift: (snp.roll(a, shift, 0) ** 3 * weights).sum())
        found = debug.collectives(slope)(
            put(A, 4, "x"),
        )
        assert {c.kind for c in found} == {"permute"}
        np.testing.assert_array_equal(spmd.jit(slope)(put(A, 4, "x")), spmd.jit(slope)(A))


def test_rolls_of_both_dims_of_a_grid():
    mesh = auto_mesh((2, 2), ("x", "y"))
    f = lambda a: snp.roll(a, (3, -5), (0, 1)) + a[::-1]  # noqa: E731
    for spec in (P("x", "y"), P("y"), P(None, ("x", "y")), P(("y", "x"))):
        placed = spmd.device_put(A, NamedSharding(mesh, spec))
        np.testing.assert_array_equal(spmd.jit(f)(placed), spmd.jit(f)(A))


def test_what_is_no_roll_is_left_alone():
    """Slices of two values, in the first order, with a gap, or that somebody else reads, too."""
    placed = put(A, 4, "x")
    for f in (
        lambda a: snp.concatenate([a[20:], (a + 1)[:20]]),
        lambda a: snp.concatenate([a[:20], a[20:]]),
        lambda a: snp.concatenate([a[20:], a[:19]]),
        lambda a: snp.concatenate([a[20:], a[:21]]),
        lambda a: snp.concatenate([a[20:, :8], a[:20, :8]]),
        lambda a: snp.concatenate([a[:, 3:], a[:, :3]], 1),
        lambda a: (snp.concatenate([a[20:], a[:20]]), a[20:] * 2),
        lambda a: snp.concatenate([a[20:], a[:20]]) + snp.pad(a[:20], ((4, 0), (0, 0))),
        lambda a: snp.pad(a[:20], ((4, 0), (0, 0))) + snp.pad(a[20:], ((20, 0), (0, 0))),
        lambda a: snp.pad(a[:8], ((16, 0), (0, 0))) + snp.pad(a[8:], ((0, 8), (0, 0))),
        lambda a: snp.concatenate([a[1::2], a[::2]]),
    ):
        for found, expected in zip(
            spmd.tree.leaves(spmd.jit(f)(placed)), spmd.tree.leaves(spmd.jit(f)(A)), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_rolls_in_loops_and_of_rows_that_do_not_divide():
    step = lambda c, _: (snp.roll(c, 1, 0) * 0.5 + c, None)  # noqa: E731
    f = lambda a: lax.scan(step, a, None, length=4)[0]  # noqa: E731
    found = debug.collectives(f)(put(A, 4, "x"))
    assert [(c.kind, c.times, c.received) for c in found] == [("permute", 4, ROW)]
    np.testing.assert_allclose(spmd.jit(f)(put(A, 4, "x")), spmd.jit(f)(A))
    g = lambda a: snp.roll(a[1:], 5, 0).sum(0)  # noqa: E731
    np.testing.assert_allclose(spmd.jit(g)(put(A, 4, "x")), spmd.jit(g)(A))


# ---- shifts --------------------------------------------------------------------------------------


def shifted(a: Any, new: Any, backward: bool, dim: int = 0) -> Any:
    """The rows of `a` without those that make place for new ones."""
    count, size = new.shape[dim], a.shape[dim]
    if backward:
        return snp.concatenate([lax.slice_in_dim(a, count, size, axis=dim), new], dim)
    return snp.concatenate([new, lax.slice_in_dim(a, 0, size - count, axis=dim)], dim)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("rows", [4, 24])
def test_shifts_send_the_rows_that_leave_a_device(rows: int, backward: bool):
    """A row a device, and six of them; the new rows are on all devices already."""
    for count in range(1, rows // 4 + 1):
        f = lambda a, new: shifted(a, new, backward) * 2  # noqa: E731
        a, new = A[:rows], A[:count] + 1
        found = debug.collectives(f)(put(a, 4, "x"), new)
        assert [(c.kind, c.received) for c in found] == [("permute", count * ROW)]
        out = spmd.jit(f)(put(a, 4, "x"), new)
        assert out.sharding.spec == P("x")
        np.testing.assert_array_equal(bits(out), bits(spmd.jit(f)(a, new)))


def test_a_pipeline_that_shifts_its_states_sends_one_row_a_tick():
    def outputs(states: Any, xs: Any) -> Any:
        def tick(states: Any, x: Any) -> Any:
            states = snp.tanh(snp.concatenate([x[None], states[:-1]]) * 1.5)
            return states, states[-1]

        return lax.scan(tick, states, xs)[1]

    def loss(states: Any, xs: Any) -> Any:
        return (outputs(states, xs) ** 2).sum()

    states, xs = snp.sin(snp.arange(64.0)).reshape(4, 16), snp.cos(snp.arange(96.0)).reshape(6, 16)
    placed = put(np.asarray(states), 4, "x")
    found = debug.collectives(loss)(placed, np.asarray(xs))
    assert sum(c.received * c.times for c in found if c.kind == "permute") == 6 * ROW
    assert sum(c.received * c.times for c in found if c.kind != "permute") <= 8
    slope = spmd.jit(spmd.grad(loss))
    both = debug.collectives(slope)(placed, np.asarray(xs))
    assert sum(c.received * c.times for c in both if c.kind == "permute") == 12 * ROW
    assert sum(c.received * c.times for c in both if c.kind != "permute") <= 8
    np.testing.assert_allclose(slope(placed, np.asarray(xs)), slope(states, xs), rtol=2e-5)


def test_new_rows_that_one_device_has_go_to_the_device_at_the_end():
    f = lambda a: snp.concatenate([a[-2:-1] * 2, a[:-1]]) + 1  # noqa: E731
    found = debug.collectives(f)(put(A, 4, "x"))
    assert [(c.kind, c.received) for c in found] == [("permute", ROW)] * 2
    np.testing.assert_array_equal(spmd.jit(f)(put(A, 4, "x")), f(A))
    g = lambda a: snp.concatenate([a[:1], a[:-1]]) + 1  # noqa: E731
    found = debug.collectives(g)(put(A, 4, "x"))
    assert [(c.kind, c.received) for c in found] == [("permute", ROW)]
    np.testing.assert_array_equal(spmd.jit(g)(put(A, 4, "x")), g(A))


@st.composite
def shifts(draw: Any) -> Any:
    """A program of one to three shifts, an array and new rows, a mesh and their specs."""
    sizes = draw(st.sampled_from([{"x": 2}, {"x": 4}, {"x": 2, "y": 2}, {"x": 3}]))
    shape = draw(st.sampled_from([(24, 12), (12, 4), (12, 12)]))
    steps = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6), st.booleans(),
                                    st.sampled_from(["given", "zeros", "own"])),
                          min_size=1, max_size=3))  # fmt: skip
    axes: list[list[str]] = [[], []]
    for axis in draw(st.permutations(list(sizes))):
        if (d := draw(st.integers(0, 2))) < 2:
            axes[d].append(axis)

    def program(a: Any, new: Any) -> Any:
        for dim, count, backward, kind in steps:
            count = min(count, a.shape[dim] // 2)
            edge = lax.slice_in_dim(a, 1, 1 + count, axis=dim)
            rows = edge if kind == "own" else lax.slice_in_dim(new, 0, count, axis=dim)
            if kind == "zeros":
                rest = a.shape[dim] - count
                kept = lax.slice_in_dim(
                    a, *((count, count + rest) if backward else (0, rest)), axis=dim
                )
                around = [(0, 0), (0, 0)]
                around[dim] = (0, count) if backward else (count, 0)
                a = snp.pad(kept, around)
            else:
                a = shifted(a, rows, backward, dim)
            a = a + 1
        return a

    mesh = auto_mesh(tuple(sizes.values()), tuple(sizes))
    return program, shape, mesh, [P(*map(tuple, axes)), draw(st.sampled_from([P(), P("x")]))]


@settings(deadline=None, max_examples=10)
@given(shifts())
def test_shifts_and_their_derivatives_are_those_of_whole_arrays(drawn: Any):
    program, shape, mesh, specs = drawn
    rng = np.random.default_rng(0)
    a, new = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    for spec in specs:
        fits = all(n % np.prod([mesh.shape[x] for x in spec.axes_of(d)], initial=1) == 0
                   for d, n in enumerate(shape))  # fmt: skip
        if not fits:
            return
    placed = [
        spmd.device_put(x, NamedSharding(mesh, s)) for x, s in zip((a, new), specs, strict=True)
    ]
    np.testing.assert_array_equal(spmd.jit(program)(*placed), program(a, new))

    def loss(a: Any, new: Any) -> Any:
        return snp.sin(program(a, new) * 0.3).sum()

    slope = spmd.grad(loss, (0, 1))
    for one, other in zip(spmd.jit(slope)(*placed), slope(a, new), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
