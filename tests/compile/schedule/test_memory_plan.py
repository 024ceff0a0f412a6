"""What shares memory in programs with loops: values must survive the rounds that need them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.schedule.memory_plan import Room

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) / 3


def rows_written_late(x: Any) -> Any:
    """Each round's row is written when another value of the round has died."""

    def step(c: Any, k: Any) -> Any:
        square = c @ c
        return c * 0.9, (square @ square).sum() * k

    rows = lax.scan(step, x, snp.arange(64, dtype=np.float32))[1]
    return snp.sort(rows)


def rows_read_by_the_next_loop(x: Any) -> Any:
    """Rows of the first loop are read one by one in the second, which has values of its own."""

    def first(c: Any, k: Any) -> Any:
        return c * 0.9, k % 2 == 0

    def second(c: Any, flag: Any) -> Any:
        z = c @ x
        return lax.cond(flag, lambda z: snp.sort(z * 2) + z, lambda z: z - 1, z), None

    _, flags = lax.scan(first, x, snp.arange(6))
    return lax.scan(second, x, flags)[0]


def loop_in_loop(x: Any) -> Any:
    """A value of the outer round, read in every round of the inner loop."""

    def outer(c: Any, _: Any) -> Any:
        kept = snp.sort(c)

        def inner(k: Any, s: Any) -> Any:
            t = snp.sort(s, 0) * 0.5
            return t @ kept + snp.cumsum(t, 0)

        return lax.fori_loop(0, 3, inner, c) * 0.1, kept[0]

    return lax.scan(outer, x, None, length=3)


def read_by_the_condition(x: Any) -> Any:
    """A value made before the loop, read by its condition only."""
    limit = snp.sort(abs(x).sum(0))[3]

    def body(c: Any) -> Any:
        return snp.sort(c, 0)[::-1] * 1.5

    return lax.while_loop(lambda c: abs(c).sum() < 20 * limit, body, x)


PROGRAMS = [rows_written_late, rows_read_by_the_next_loop, loop_in_loop, read_by_the_condition]


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_loops_keep_what_later_rounds_read(f: Any):
    with spmd.disable_jit():
        wanted = spmd.tree.leaves(f(X))
    for a, b in zip(spmd.tree.leaves(spmd.jit(f)(X)), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_donated_argument_is_not_overwritten_while_the_loop_reads_it():
    def f(x: Any) -> Any:
        return lax.fori_loop(0, 5, lambda k, c: snp.sort(c, 0) + x, x * 0)

    wanted = np.asarray(spmd.jit(f)(X))
    given = spmd.device_put(X)
    np.testing.assert_array_equal(spmd.jit(f, donate_argnums=0)(given), wanted)


# ---- temporaries in the memory of results ------------------------------------------------------


def planned(f: Any, *args: Any, **options: Any) -> Any:
    return spmd.jit(f, **options).trace(*args).lower().compile()


def normalised_step(w: Any, x: Any) -> Any:
    """The gradient is needed as a whole before the first element of the result is known."""
    g = x.T @ (x @ w)
    return w - g / snp.sqrt(snp.sum(g * g))


W64, X128 = np.ones((64, 64), np.float32), np.ones((128, 64), np.float32)
STEPPED = W64 - X128.T @ (X128 @ W64) / np.sqrt(np.sum((X128.T @ (X128 @ W64)) ** 2))


def test_values_that_become_results_need_no_memory_of_their_own():
    compiled = planned(normalised_step, W64, X128)
    assert {out.nbytes for out in compiled.executable.plan.aliased_into.values()} == {W64.nbytes}
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * X128.nbytes
    np.testing.assert_allclose(compiled(W64, X128), STEPPED, rtol=1e-5)


def test_result_over_a_donated_argument_shares_nothing():
    donating = planned(normalised_step, W64, X128, donate_argnums=0)
    assert donating.executable.takes == {0: 0} and not donating.executable.plan.aliased_into
    np.testing.assert_allclose(donating(snp.array(W64), X128), STEPPED, rtol=1e-5)


def test_result_that_a_loop_writes_shares_nothing_in_the_loop():
    def f(x: Any) -> Any:
        def turn(c: Any, k: Any) -> Any:
            square = c @ c
            return snp.tanh(square @ c), square[:4] * k

        return lax.scan(turn, x, snp.arange(6, dtype=np.float32))

    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) / 20
    with spmd.disable_jit():
        wanted = f(x)
    for found, expected in zip(spmd.jit(f)(x), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_results_lend_their_memory_to_temporaries_that_fit():
    def f(x: Any) -> Any:
        a = snp.sort(x @ x, axis=0)
        b = snp.sort(a @ x, axis=1)
        c = snp.sort(b @ a, axis=0)
        return c @ b, c[:32] * 2, snp.sin(b) @ a[:, :48]

    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) / 8
    compiled = planned(f, x)
    plan = compiled.executable.plan
    for temporary, output in plan.aliased_into.items():
        assert plan.offsets[temporary] + temporary.nbytes <= output.nbytes
    with spmd.disable_jit():
        wanted = f(x)
    for found, expected in zip(compiled(x), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def _hole(taken: dict[int, int], nbytes: int) -> int:
    """The smallest hole between taken places, found by looking at all; else the end."""
    best, free = None, 0
    for start in sorted(taken):
        if start - free >= nbytes and (best is None or start - free < best[0]):
            best = (start - free, free)
        free = max(free, start + taken[start])
    return best[1] if best is not None else free


@pytest.mark.parametrize("seed", range(5))
def test_room_finds_the_smallest_hole(seed):
    rng = np.random.default_rng(seed)
    room, taken = Room(), {}
    for _ in range(400):
        if taken and rng.random() < 0.45:
            start = int(rng.choice(list(taken)))
            room.give(start, taken.pop(start))
        else:
            nbytes = 64 * int(rng.integers(1, 9))
            start = room.find(nbytes)
            assert start == _hole(taken, nbytes)
            room.take(start, nbytes)
            taken[start] = nbytes
