"""Collectives inside scan, while and cond; and loops without them, whose lengths differ by device.

Where the loop holds a collective all devices must make the same trips; where it holds none, each
device makes its own, without hidden communication.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.errors import CollectiveError, CollectiveWarning
from spmd.sharding import PartitionSpec as P
from spmd.testing import check_grads
from tests.collectives.compare import assert_close

N = 4
RING = [(k, (k + 1) % N) for k in range(N)]
X = np.random.default_rng(5).normal(size=(N, 3)).astype(np.float32)


def scan_ring(x: Any) -> Any:
    """Pass values around the ring, keeping each sum seen on the way."""

    def step(carry: Any, k: Any) -> Any:
        carry = lax.ppermute(carry, "i", RING) * 0.9
        return carry, snp.sin(carry) + k

    last, seen = lax.scan(step, x, snp.arange(5, dtype=np.float32))
    return last + seen.sum(0)


def scan_carry_that_becomes_equal(x: Any) -> Any:
    """The carry starts different on each device, and is a psum afterwards."""
    return lax.scan(lambda c, _: (lax.psum(c, "i") * 0.3 + 0 * c, c), x, None, length=3)[1]


def scan_carry_that_becomes_different(x: Any) -> Any:
    """The carry starts as a constant, equal on all devices, and takes in `x`."""
    return lax.fori_loop(0, 3, lambda k, c: c * 0.5 + lax.pmax(x, "i") * x, 0 * x)


def while_sum_small(x: Any) -> Any:
    """A loop whose condition is a collective, so that all devices leave it together."""

    def again(c: Any) -> Any:
        return lax.pmax(abs(c).max(), "i") > 0.1

    return lax.while_loop(again, lambda c: (c + lax.pmean(c, "i")) * 0.3, x)


def cond_on_the_sum(x: Any) -> Any:
    """A branch chosen by a value that is equal on all devices, with collectives inside."""
    total = lax.psum(x.sum(), "i")
    return lax.cond(total > 0, lambda x: lax.psum(x, "i"), lambda x: lax.pmax(x, "i"), x)


def cond_in_scan(x: Any) -> Any:
    """Every other trip communicates."""

    def step(c: Any, k: Any) -> Any:
        c = lax.cond(k % 2 == 0, lambda c: lax.pmean(c, "i") + c, lambda c: c * 0.5, c)
        return c, c

    return lax.scan(step, x, snp.arange(4))[1]


def switch_without_collectives(x: Any) -> Any:
    """Each device takes another branch."""
    branches = [lambda x, k=k: snp.sin(x) * (k + 1) for k in range(3)]
    return lax.psum(lax.switch(lax.axis_index("i"), branches, x), "i")


def scan_of_checkpoint(x: Any) -> Any:
    """A rematerialised body with a collective."""

    @spmd.checkpoint
    def body(c: Any, _: Any) -> Any:
        return snp.sin(lax.psum(c, "i")) + c, None

    return lax.scan(body, x, None, length=3)[0]


BODIES = [
    scan_ring,
    scan_carry_that_becomes_equal,
    scan_carry_that_becomes_different,
    cond_on_the_sum,
    cond_in_scan,
    switch_without_collectives,
    scan_of_checkpoint,
]
EACH = pytest.mark.parametrize("body", [*BODIES, while_sum_small], ids=lambda f: f.__name__)
WITH_GRADIENT = pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)


def over_mesh(body: Any, typed: bool = True) -> Any:
    return spmd.shard_map(
        lambda x: body(x[0])[None],
        mesh=spmd.make_mesh((N,), ("i",)),
        in_specs=P("i"),
        out_specs=P("i"),
        check_vma=typed,
    )


@EACH
def test_pmap_means_vmap(body: Any):
    expected = spmd.vmap(body, axis_name="i")(X)
    mapped = spmd.pmap(body, axis_name="i")
    assert_close(mapped(X), expected, "pmap", 10)
    assert_close(spmd.jit(mapped)(X), expected, "jit of pmap", 10)
    assert_close(over_mesh(body)(X), expected, "typed", 10)
    assert_close(over_mesh(body, typed=False)(X), expected, "untyped", 10)
    with spmd.disable_jit():
        assert_close(mapped(X), expected, "op by op", 10)


@WITH_GRADIENT
def test_gradients_are_those_of_vmap(body: Any):
    def gradient(mapped: Any) -> Any:
        return spmd.grad(lambda x: snp.sum(snp.sin(mapped(x))))(X)

    expected = gradient(spmd.vmap(body, axis_name="i"))
    assert_close(gradient(spmd.pmap(body, axis_name="i")), expected, "pmap", 100)
    assert_close(gradient(over_mesh(body)), expected, "typed", 100)
    assert_close(gradient(over_mesh(body, typed=False)), expected, "untyped", 100)
    inside = spmd.grad(lambda x: snp.sum(snp.sin(body(x))))
    wanted = spmd.vmap(inside, axis_name="i")(X)
    assert_close(spmd.pmap(inside, axis_name="i")(X), wanted, "inside", 100)


@pytest.mark.parametrize("body", [scan_ring, cond_in_scan], ids=lambda f: f.__name__)
def test_second_derivatives_are_finite_differences(body: Any):
    check_grads(spmd.pmap(body, axis_name="i"), (X,), 2, atol=5e-2, rtol=5e-2)
    check_grads(over_mesh(body), (X,), 2, atol=5e-2, rtol=5e-2)


# ---- devices that differ -----------------------------------------------------------------------


def collatz(n: Any) -> Any:
    """The number of steps to 1, another on each device."""

    def step(c: Any) -> Any:
        n, count = c
        return snp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

    return lax.while_loop(lambda c: c[0] != 1, step, (n, 0))[1]


def test_devices_loop_for_different_numbers_of_iterations():
    starts = np.array([1, 6, 27, 97])
    wanted = np.array([0, 8, 111, 118])
    np.testing.assert_array_equal(spmd.pmap(collatz)(starts), wanted)
    totals = spmd.pmap(lambda n: lax.psum(collatz(n), "i"), axis_name="i")(starts)
    np.testing.assert_array_equal(totals, np.full(4, wanted.sum()))
    with spmd.disable_jit():
        np.testing.assert_array_equal(spmd.pmap(collatz)(starts), wanted)


def test_the_number_of_iterations_may_depend_on_the_device():
    def f(x, trips):
        return lax.fori_loop(0, trips, lambda k, c: c * 2, x)

    out = spmd.pmap(f)(np.ones(4, np.float32), np.array([0, 1, 5, 2]))
    np.testing.assert_array_equal(out, [1, 2, 32, 4])


def test_a_collective_that_not_all_devices_reach_is_an_error():
    def f(x):
        return lax.cond(x > 1, lambda x: lax.psum(x, "i"), lambda x: x, x)

    x = np.arange(4.0, dtype=np.float32)
    told = r"(?s)psum .*test_control_flow.py:\d+.*reach"
    with pytest.warns(CollectiveWarning), pytest.raises(CollectiveError, match=told):
        spmd.pmap(f, axis_name="i")(x)
    # The next call is not disturbed.
    np.testing.assert_array_equal(spmd.pmap(f, axis_name="i")(x * 0), x * 0)


def test_loops_of_different_length_around_a_collective_are_an_error():
    def f(trips):
        return lax.fori_loop(0, trips, lambda k, c: lax.psum(c, "i"), snp.float32(1))

    told = r"(?s)devices \[.*\] reached it"
    with pytest.warns(CollectiveWarning), pytest.raises(CollectiveError, match=told):
        spmd.pmap(f, axis_name="i")(np.array([1, 2, 2, 2]))


def test_a_branch_by_device_may_hold_a_collective_of_its_group():
    """Both groups of the index groups are complete in their branch."""
    groups = [[0, 1], [2, 3]]

    def f(x):
        half = lax.axis_index("i") < 2
        one = lambda x: lax.psum(x, "i", axis_index_groups=groups)  # noqa: E731
        return lax.cond(half, one, lambda x: x * 100, x)

    x = np.arange(1.0, 5.0, dtype=np.float32)
    np.testing.assert_array_equal(spmd.pmap(f, axis_name="i")(x), [3, 3, 300, 400])


def branch_by_device_of_a_shared_value(x: Any) -> Any:
    """Branches that differ by device read a value that is equal on all of them."""
    shared = lax.pmean(x, "i")
    first = lax.cond(
        lax.axis_index("i") % 2 == 0, lambda x: snp.sin(x * shared), lambda x: x * shared, x
    )
    return lax.cond(lax.axis_index("i") < 1, snp.sin, snp.cos, shared) + first


def test_gradient_of_a_shared_value_in_branches_by_device():
    body = branch_by_device_of_a_shared_value

    def gradient(mapped: Any) -> Any:
        return spmd.grad(lambda x: snp.sum(snp.sin(mapped(x))))(X)

    expected = gradient(spmd.vmap(body, axis_name="i"))
    assert_close(gradient(spmd.pmap(body, axis_name="i")), expected, "pmap", 100)
    assert_close(gradient(over_mesh(body)), expected, "typed", 100)
    check_grads(over_mesh(body), (X,), 2, atol=5e-2, rtol=5e-2)
