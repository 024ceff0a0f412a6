"""Rolls along split dims: the rows that leave a device are sent, once; nothing is added up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
    given = put(A, count, "x")
    for shift in range(-25, 26):
        f = spmd.jit(lambda a, shift=shift: snp.roll(a, shift, 0))
        np.testing.assert_array_equal(bits(f(given)), bits(np.roll(A, shift, 0)), str(shift))
        assert f(given).sharding.spec == P("x")


def test_devices_receive_the_rows_that_leave_others():
    given = put(A, 4, "x")
    for shift in range(24):
        found = debug.collectives(lambda a, shift=shift: snp.roll(a, shift, 0))(given)
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
        given = spmd.device_put(A, NamedSharding(mesh, spec))
        np.testing.assert_array_equal(spmd.jit(f)(given), spmd.jit(f)(A))


def test_what_is_no_roll_is_left_alone():
    """Slices of two values, in the first order, with a gap, or that somebody else reads, too."""
    given = put(A, 4, "x")
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
            spmd.tree.leaves(spmd.jit(f)(given)), spmd.tree.leaves(spmd.jit(f)(A)), strict=True
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
