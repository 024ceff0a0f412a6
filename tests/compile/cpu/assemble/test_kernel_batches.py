"""Which kernels join a batch, that dependent ones never do, and that threads change no bit."""

from __future__ import annotations

import numpy as np
import pytest

from spmd import lax
from spmd.api.compiled import jit
from spmd.api.inspect import disable_jit
from spmd.compile.cpu.assemble.assemble import Builder
from spmd.compile.cpu.assemble.kernel_batches import MOST_MEMBERS, MemoryAccess
from spmd.compile.lower.lowering import lower
from spmd.compile.native.program.steps import BatchStep, KernelStep, walk
from spmd.compile.passes import pipeline
from spmd.compile.schedule.memory_plan import plan_memory

LEAVES = [np.random.default_rng(k).normal(size=(64, 65)).astype(np.float32) for k in range(20)]


class Interpreted(Builder):
    """Leaves small loops to the executor, too."""

    compiles_loops = False


def native_steps(function, *args):
    schedule = lower(pipeline.run_passes(jit(function).trace(*args).jaxpr))
    return Interpreted(schedule, plan_memory(schedule.steps), {}).program(1).steps


def sizes(steps):
    """Members of each batch; 1 for a kernel by itself."""
    return [len(s.steps) if isinstance(s, BatchStep) else 1 for s in steps]


def test_updates_of_many_leaves_are_one_step():
    steps = native_steps(lambda xs: [x * 2 + 1 for x in xs], LEAVES)
    assert sizes(steps) == [20]


def test_batch_splits_at_max_members():
    leaves = [x[:2, :2] for x in LEAVES] * 10
    assert sizes(native_steps(lambda xs: [x + 1 for x in xs], leaves)) == [MOST_MEMBERS, 72]


def test_a_reader_waits_for_what_it_reads():
    def chain(x):
        total = x.sum(0)
        return (x - total).sum(1)

    steps = native_steps(chain, LEAVES[0])
    assert len(sizes(steps)) == 2 and all(isinstance(s, KernelStep) for s in steps)


def test_two_chains_run_side_by_side():
    def chains(xs):
        totals = [x.sum(0) for x in xs]
        return [(x - t).sum(1) for x, t in zip(xs, totals, strict=True)]

    assert sizes(native_steps(chains, LEAVES[:3])) == [3, 3]


def test_kernels_in_loops_are_batched_too():
    def body(carry, _):
        return [x * 0.5 + 1 for x in carry], None

    steps = native_steps(lambda xs: lax.scan(body, xs, None, length=3)[0], LEAVES[:4])
    assert [len(s.steps) for s in walk(steps) if isinstance(s, BatchStep)] == [4]


READ = MemoryAccess(1, 0, 64, (), False)


@pytest.mark.parametrize(
    ("other", "conflicts_with"),
    [
        (MemoryAccess(1, 0, 64, (), False), False),
        (MemoryAccess(1, 32, 48, (), True), True),
        (MemoryAccess(1, 64, 96, (), True), False),
        (MemoryAccess(2, 0, 64, (), True), False),
        (MemoryAccess(1, 64, 96, ((0, 8),), True), True),
    ],
    ids=["two reads", "overlap", "behind", "another base", "moves otherwise"],
)
def test_accesses_conflict_where_their_ranges_overlap(other, conflicts_with):
    assert (
        READ.conflicts_with(other) is conflicts_with
        and other.conflicts_with(READ) is conflicts_with
    )


def test_an_output_over_a_donated_input_conflicts_as_that_input():
    def swap(x, y):
        return (y * 2).sum(0), x + 1

    schedule = lower(pipeline.run_passes(jit(swap).trace(*LEAVES[:2]).jaxpr))
    plan = plan_memory(schedule.steps)
    assert sizes(Builder(schedule, plan, {}).program(1).steps) == [2]
    # Where that is not known yet, nothing changes its place.
    assert sizes(Builder(schedule, plan).program(1).steps) == [1, 1]
    # Were output 1 written over input 1, the sum would have to be done with reading it.
    assert sizes(Builder(schedule, plan, {1: 1}).program(1).steps) == [1, 1]


def test_batches_on_threads_give_the_same_values():
    def adam(params, first, second):
        first = [0.9 * m + 0.1 * p for m, p in zip(first, params, strict=True)]
        second = [0.9 * v + 0.1 * p * p for v, p in zip(second, params, strict=True)]
        moved = [
            p - m / (lax.sqrt(v) + 1e-3) for p, m, v in zip(params, first, second, strict=True)
        ]
        return moved, first, second, [x.sum(0) for x in params]

    given = (LEAVES, [x + 1 for x in LEAVES], [x * x for x in LEAVES])
    compiled = jit(adam)
    results = compiled(*given)
    with disable_jit():
        expected = adam(*given)
    for got, want in zip(results, expected, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    again = compiled(*given)
    for got, want in zip(again, results, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
