"""Loops without a carry run on several threads, with the results of the loop in order."""

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.lower.lowering import lower
from spmd.compile.lower.steps import Loop, Parallel
from spmd.compile.passes.pipeline import run_passes
from spmd.compile.schedule.memory_plan import plan_memory
from spmd.compile.schedule.thread_plan import choose_lanes, rounded


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def rows(x, w):
    return lax.map(lambda r: snp.tanh(r @ w) @ w.T + r.sum(), x)


def nested(x, w):
    return lax.map(lambda q: lax.map(lambda r: snp.tanh(r @ w), q), x)


def nested_with_work_between(x, w):
    def outer(q):
        scaled = q * snp.cos(q).sum()
        return lax.map(lambda r: snp.tanh(r @ w) + scaled.max(), scaled), scaled.min()

    return lax.map(outer, x)


def around_a_carry(x, w):
    def step(total, r):
        total = total + snp.tanh(r @ w)
        return total, total.sum()

    return lax.map(lambda q: lax.scan(step, snp.zeros((q.shape[1], w.shape[1])), q), x)


def inside_a_carry(x, w):
    def step(total, q):
        return total + lax.map(lambda r: snp.tanh(r @ w), q).sum(0), total.max()

    return lax.scan(step, snp.zeros((x.shape[2], w.shape[1])), x)


PROGRAMS = [
    (rows, (40, 30, 20)),
    (nested, (7, 6, 30, 20)),
    (nested_with_work_between, (9, 6, 30, 20)),
    (around_a_carry, (12, 6, 30, 20)),
    (inside_a_carry, (5, 40, 30, 20)),
]
IDS = [program.__name__ for program, _ in PROGRAMS]


@pytest.fixture
def threads():
    before = spmd.config.num_threads
    yield lambda n: spmd.config.update("num_threads", n)
    spmd.config.update("num_threads", before)


@pytest.mark.parametrize(("program", "shape"), PROGRAMS, ids=IDS)
def test_rounds_at_the_same_time_give_what_rounds_in_order_give(program, shape, threads):
    x, w = normal(*shape), normal(20, 10)
    compiled = spmd.jit(program)
    with spmd.disable_jit():
        expected = program(x, w)
    for count in (1, 2, 4):
        threads(count)
        for _ in range(3):
            found = compiled(x, w)
            spmd.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected
            )
            if count == 1:
                alone = found
            spmd.tree.map(np.testing.assert_array_equal, found, alone)


def schedule_of(program, shape):
    closed = spmd.make_jaxpr(program)(normal(*shape), normal(20, 10))
    return lower(run_passes(closed)).steps


def loops(steps, kind):
    return [s for s in steps if isinstance(s, kind)]


def test_nests_without_work_between_are_one_loop():
    (loop,) = loops(schedule_of(nested, (7, 6, 30, 20)), Parallel)
    assert loop.trips == (7, 6)


def test_a_loop_with_a_carry_stays_in_order():
    steps = schedule_of(inside_a_carry, (5, 40, 30, 20))
    (outer,) = loops(steps, Loop)
    (inner,) = loops(outer.body, Parallel)
    assert choose_lanes(steps, 4).chosen == {inner.number}


def test_the_outermost_loop_with_enough_rounds_is_chosen():
    steps = schedule_of(nested_with_work_between, (9, 16, 30, 20))
    (outer,) = loops(steps, Parallel)
    (inner,) = loops(outer.body, Parallel)
    assert choose_lanes(steps, 4).chosen == {outer.number}
    assert choose_lanes(steps, 12).chosen == {inner.number}
    assert choose_lanes(steps, 1).chosen == choose_lanes(steps, 99).chosen == frozenset()


def test_each_lane_has_its_own_temporaries():
    steps = schedule_of(rows, (40, 30, 20))
    assert plan_memory(steps, 4).arena == 4 * rounded(plan_memory(steps, 1).arena)


def test_all_values_of_a_lane_lie_in_one_region():
    """Whatever each lane is just doing: all it has lies in a region of its own."""
    steps = schedule_of(nested_with_work_between, (9, 6, 30, 20))
    plan = plan_memory(steps, 4)
    kept = [b for b in plan.offsets if plan.lane_stride(b)]
    (stride,) = {plan.lane_stride(b) for b in kept}
    first = min(plan.offsets[b] for b in kept)
    assert len({b.nbytes for b in kept}) > 1
    assert all(plan.offsets[b] + b.nbytes <= first + stride for b in kept)
    assert first + 4 * stride <= plan.arena


def test_a_loop_that_calls_python_stays_in_order():
    def program(x, w):
        return lax.map(lambda r: lax.cumlogsumexp(r @ w, axis=0), x)

    steps = schedule_of(program, (4, 30, 20))
    assert loops(steps, Loop) and not loops(steps, Parallel)
