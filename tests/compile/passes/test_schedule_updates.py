"""Early: updates run when their gradients can be made, not all at the end; results are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax, nn
from spmd.compile.lower.lowering import lower
from spmd.compile.passes.pipeline import PASSES, run_passes
from spmd.compile.passes.schedule_updates import schedule_updates
from spmd.compile.schedule.memory_plan import plan_memory
from spmd.core.call import impl_jaxpr
from spmd.core.ir import ClosedJaxpr, Literal

F = np.float32
RNG = np.random.default_rng(0)
WIDTH, BATCH, DEPTH = 32, 512, 6
WS = [RNG.normal(size=(WIDTH, WIDTH)).astype(F) / F(6) for _ in range(DEPTH)]
X = RNG.normal(size=(BATCH, WIDTH)).astype(F)


def loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = nn.relu(x @ w)
    return snp.mean(x**2)


def step(ws: Any, x: Any) -> Any:
    """The update as it is written: behind all gradients."""
    value, grads = spmd.value_and_grad(loss)(ws, x)
    return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value


def with_momentum(ws: Any, x: Any) -> Any:
    grads = spmd.grad(loss)(ws, x)
    speed = [0.9 * w + g for w, g in zip(ws, grads, strict=True)]
    return speed, [w - 0.1 * s for w, s in zip(ws, speed, strict=True)]


def in_rounds(ws: Any, x: Any) -> Any:
    """Each round stacks gradients, which are the results of its body."""
    return lax.map(lambda part: spmd.grad(loss)(ws, part), x.reshape(2, BATCH // 2, WIDTH))


def without_more_to_do(ws: Any, x: Any) -> Any:
    """Results that others read, and those whose operands live anyway, have no reason to move."""
    y = x @ ws[0]
    return y, snp.sin(y), x.T @ x


STEPS = (step, with_momentum, in_rounds)


def around(f: Any) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """A program before the pass, and after it."""
    before = PASSES[: PASSES.index(schedule_updates)]
    closed = run_passes(spmd.make_jaxpr(f)(WS, X), passes=before)
    return closed, schedule_updates(closed)


def names(closed: ClosedJaxpr) -> list[str]:
    return [eqn.prim.name for eqn in closed.eqns]


def arena(closed: ClosedJaxpr) -> int:
    return plan_memory(lower(closed).steps).arena


@pytest.mark.parametrize("f", STEPS)
def test_moved_updates_keep_all_equations_and_values(f: Any):
    late, soon = around(f)
    assert sorted(names(soon)) == sorted(names(late))
    args = spmd.tree.leaves((WS, X))
    for a, b in zip(impl_jaxpr(np, late, *args), impl_jaxpr(np, soon, *args), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("f", STEPS)
def test_programs_agree_with_single_operations(f: Any):
    with spmd.disable_jit():
        expected = spmd.tree.leaves(f(WS, X))
    for a, b in zip(spmd.tree.leaves(spmd.jit(f)(WS, X)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("f", (step, with_momentum))
def test_cotangents_do_not_wait_for_the_end(f: Any):
    """Of each layer its result waits for the backward pass; of the cotangents, one at a time."""
    activation = BATCH * WIDTH * F(0).nbytes
    late, soon = (arena(closed) for closed in around(f))
    assert late >= (2 * DEPTH - 2) * activation
    assert soon <= (DEPTH + 3) * activation


def test_nothing_moves_without_a_reason():
    late, soon = around(without_more_to_do)
    assert [id(e) for e in late.eqns] == [id(e) for e in soon.eqns]


def test_updates_still_take_the_place_of_donated_arguments():
    """An update waits for what else reads the old weights."""
    plan = spmd.jit(step, donate_argnums=0).lower(WS, X).compile().memory_analysis()
    assert plan.alias_size_in_bytes >= DEPTH * WS[0].nbytes


def test_an_update_is_behind_the_other_readers_of_its_weights():
    _, soon = around(step)
    weights = set(soon.jaxpr.invars[:DEPTH])
    done: set[Any] = set()
    for eqn in soon.eqns:
        read = {v for v in eqn.invars if not isinstance(v, Literal)} & weights
        assert not read & done
        if any(v in soon.jaxpr.outvars for v in eqn.outvars):
            done |= read
