"""Operands of products that are packed once: where the steps stand, and that results stay."""

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.cpu.matmul import plan as matmul_plan
from spmd.compile.lower.lowering import lower
from spmd.compile.lower.steps import Branch, Loop, Multiply, Pack, Parallel, While, walk
from spmd.compile.passes.pipeline import run_passes
from spmd.compile.schedule.prepack_operands import prepack


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(len(shape)).normal(size=shape) * scale).astype(np.float32)


def steps_of(f, *args) -> list:
    """The steps of a program on the machine of the tests."""
    closed = run_passes(spmd.make_jaxpr(f)(*args))
    return prepack(lower(closed), matmul_plan.prefers_packed).steps


def same_as_interpreted(f, *args) -> None:
    found = spmd.jit(f)(*args)
    with spmd.disable_jit():
        expected = f(*args)
    for one, two in zip(spmd.tree.leaves(found), spmd.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


W, XS = normal(48, 48, scale=0.1), normal(6, 40, 48)


def recurrent(w, xs):
    """The weights are the same in each round, also those of the gradient."""

    def step(h, x):
        h = snp.tanh(h @ w.T + x)
        return h, h.sum()

    h, sums = lax.scan(step, xs[0], xs)
    return (h * h).sum() + sums.sum()


def nested(w, xs):
    def outer(h, x):
        return lax.fori_loop(0, 3, lambda _, h: snp.tanh(h @ w.T + x), h), None

    return lax.scan(outer, xs[0], xs)[0]


def powers(w, xs):
    """What is multiplied with changes in each round."""
    return lax.fori_loop(0, 4, lambda _, p: snp.tanh(p.T @ p), w)


def layers(w, xs):
    """The weights of a round are its own."""
    weights = snp.stack([w, 2 * w, 3 * w])
    return lax.scan(lambda h, w: (snp.tanh(h @ w.T), None), xs[0], weights)[0]


def until(w, xs):
    def going(state):
        return state[0] < 5

    def step(state):
        count, h = state
        return count + 1, snp.tanh(h @ w.T)

    return lax.while_loop(going, step, (0, xs[0]))[1]


def maps(w, xs):
    return lax.map(lambda x: snp.tanh(x @ w.T) @ w, xs)


def branches(w, xs):
    def step(h, x):
        return lax.cond(x[0, 0] > 0, lambda h: snp.tanh(h @ w.T), lambda h: h + x, h), None

    return lax.scan(step, xs[0], xs)[0]


@pytest.mark.parametrize(
    "f", [recurrent, nested, powers, layers, until, maps, branches], ids=lambda f: f.__name__
)
def test_results_are_those_without_packing(f):
    same_as_interpreted(f, W, XS)


def test_gradients_are_those_without_packing():
    same_as_interpreted(spmd.grad(recurrent), W, XS)
    same_as_interpreted(spmd.hessian(lambda w: recurrent(w, XS[:3, :8, :5])), W[:5, :5])


def test_weights_of_a_recurrence_are_packed_before_it():
    steps = steps_of(spmd.grad(recurrent), W, XS)
    outside = [s for s in steps if isinstance(s, Pack)]
    inside = [s for loop in steps if isinstance(loop, Loop) for s in walk((loop,))]
    assert len(outside) == 2, "one for the forward and one for the backward loop"
    assert not any(isinstance(s, Pack) for s in inside)
    reading = [s for s in inside if isinstance(s, Multiply) and s.product.b.panel]
    assert {s.refs[1] for s in reading} == {s.refs[1] for s in outside}


def test_loops_in_loops_pack_before_the_outermost():
    steps = steps_of(nested, W, XS)
    assert sum(isinstance(s, Pack) for s in steps) == 1
    assert sum(isinstance(s, Pack) for s in walk(steps)) == 1


@pytest.mark.parametrize("f", [powers, layers], ids=lambda f: f.__name__)
def test_operands_that_change_in_each_iteration_are_not_packed(f):
    assert not any(isinstance(s, Pack) for s in walk(steps_of(f, W, XS)))


def test_while_loops_and_parallel_loops_pack_before():
    for f, kind in ((until, While), (maps, Parallel)):
        steps = steps_of(f, W, XS)
        (at,) = (k for k, s in enumerate(steps) if isinstance(s, kind))
        assert any(isinstance(s, Pack) for s in steps[:at])
        assert not any(isinstance(s, Pack) for s in walk((steps[at],)))


def test_a_branch_that_may_not_run_packs_nothing_before():
    steps = steps_of(branches, W, XS)
    assert any(isinstance(s, Branch) for s in walk(steps))
    assert not any(isinstance(s, Pack) for s in walk(steps))


def test_large_products_share_what_is_packed(monkeypatch):
    """Two products with the same weights read the same panels."""
    monkeypatch.setattr(matmul_plan, "available_cores", lambda: 8)
    monkeypatch.setattr(matmul_plan, "PACKED_TIME_RATIO", 10.0)  # on any machine
    w, x = normal(2048, 128), normal(256, 2048)

    def f(w, x, y):
        return x @ w, y @ w

    packs = [s for s in steps_of(f, w, x, x + 1) if isinstance(s, Pack)]
    assert len(packs) == 1


def test_packed_operands_give_the_same_values_over_devices(monkeypatch):
    """Each device packs what it reads."""
    devices = spmd.local_devices()[:1]
    mesh = spmd.make_mesh((len(devices),), ("i",))
    spec = spmd.sharding.PartitionSpec("i")
    f = spmd.shard_map(
        lambda w, xs: recurrent(w, xs)[None],
        mesh=mesh,
        in_specs=(spmd.sharding.PartitionSpec(), spec),
        out_specs=spec,
    )
    np.testing.assert_allclose(spmd.jit(f)(W, XS)[0], recurrent(W, XS), rtol=1e-4)
