"""Products of all rounds of a loop as one: what leaves, what stays, and equal results."""

from __future__ import annotations

import numpy as np
import pytest

import spmd.numpy as snp
from spmd import checkpoint, lax, nn
from spmd.api.compiled import jit
from spmd.api.inspect import disable_jit, make_jaxpr
from spmd.api.reverse import grad
from spmd.api.vectorize import vmap
from spmd.compile.passes.dead_code import prune
from spmd.compile.passes.hoist_invariants import hoist_invariants
from spmd.compile.passes.hoist_matmuls import MOST_STACKED, hoist_matmuls
from spmd.compile.passes.inline_calls import inline_calls
from spmd.core.check import check_jaxpr
from spmd.tree_util import tree_leaves


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) / 4).astype(np.float32)


XS, W, V = normal(7, 5, 12), normal(12, 16, seed=1), normal(16, 16, seed=2)
START = normal(5, 16, seed=3)


def rewritten(f, *args):
    closed = prune(hoist_matmuls(hoist_invariants(inline_calls(make_jaxpr(f)(*args)))))
    check_jaxpr(closed)
    return closed


def dots(eqns) -> int:
    return sum(eqn.prim.name == "dot_general" for eqn in eqns)


def inside(closed) -> int:
    """The products in all loops."""
    bodies = [e.params["jaxpr"] for e in closed.eqns if e.prim.name == "scan"]
    return sum(dots(body.eqns) + inside(body) for body in bodies)


def assert_same(f, *args) -> None:
    found = jit(f)(*args)
    with disable_jit():
        expected = f(*args)
    for one, two in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=2e-5)


def network(xs, w, v, reverse=False):
    def step(h, x):
        h = snp.tanh(x @ w + h @ v)
        return h, h

    return lax.scan(step, START, xs, reverse=reverse)[1]


def gru(xs, w, v):
    def step(h, x):
        given, kept = x @ w, h @ v
        update = nn.sigmoid(given[:, :8] + kept[:, :8])
        h = snp.concatenate([(1 - update) * h[:, :8] + update * snp.tanh(kept[:, 8:]), h[:, 8:]], 1)
        return h, h.sum()

    return lax.scan(step, START, xs)


def weights_first(xs, w, v):
    """Each example by itself: the weights stand on the left."""

    def one(x, start):
        def step(h, x):
            h = snp.tanh(w.T @ x + v @ h)
            return h, h

        return lax.scan(step, start, x)[1]

    return vmap(one, (1, 0))(xs, START)


def in_a_loop(xs, w, v):
    return lax.scan(
        lambda c, x: (c + network(x, w, v).sum(0), None), START, snp.stack([xs, 2 * xs])
    )


PROGRAMS = [network, gru, weights_first, in_a_loop]


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_results_and_gradients_are_those_of_the_loop(f):
    def loss(xs, w, v):
        return sum(snp.sum(leaf * snp.cos(leaf)) for leaf in tree_leaves(f(xs, w, v)))

    assert_same(f, XS, W, V)
    assert_same(grad(loss, (0, 1, 2)), XS, W, V)


def test_gradients_of_a_reversed_loop_agree_with_single_operations():
    def loss(xs, w, v):
        return snp.sum(network(xs, w, v, reverse=True) ** 2)

    assert_same(grad(loss, (0, 1, 2)), XS, W, V)
    assert_same(grad(lambda w: snp.sum(grad(loss, 1)(XS, w, V) ** 2)), W)


def test_the_inputs_of_all_rounds_are_multiplied_before():
    closed = rewritten(network, XS, W, V)
    assert dots(closed.eqns) == 1
    assert inside(closed) == 1


def test_products_with_weights_on_the_left_leave_the_loop():
    closed = rewritten(weights_first, XS, W, V)
    assert dots(closed.eqns) == 1
    assert inside(closed) == 1


def test_gradients_of_weights_are_one_product_after():
    closed = rewritten(grad(lambda xs, w, v: snp.sum(network(xs, w, v)), (1, 2)), XS, W, V)
    forward, backward = [e for e in closed.eqns if e.prim.name == "scan"]
    assert dots(forward.params["jaxpr"].eqns) == 1, "that with the state"
    assert dots(backward.params["jaxpr"].eqns) == 1, "its transpose"
    assert backward.params["num_carry"] == 1, "only the cotangent of the state goes round"
    assert dots(closed.eqns) == 3


def test_gradients_of_biases_leave_the_loop_with_those_of_weights():
    def loss(w, v, bias):
        def step(h, x):
            h = snp.tanh(x @ w + h @ v + bias)
            return h, h

        return snp.sum(lax.scan(step, START, XS)[1] ** 2)

    bias = normal(16, seed=5)
    closed = rewritten(grad(loss, (0, 1, 2)), W, V, bias)
    _, backward = [e for e in closed.eqns if e.prim.name == "scan"]
    assert backward.params["num_carry"] == 1
    assert_same(grad(loss, (0, 1, 2)), W, V, bias)


def test_inner_loops_leave_their_products_to_the_outer_one():
    closed = rewritten(in_a_loop, XS, W, V)
    (outer,) = [e for e in closed.eqns if e.prim.name == "scan"]
    assert dots(outer.params["jaxpr"].eqns) + dots(closed.eqns) >= 1
    (body,) = [e for e in outer.params["jaxpr"].eqns if e.prim.name == "scan"]
    assert dots(body.params["jaxpr"].eqns) == 1


def stays(f, *args) -> bool:
    return dots(rewritten(f, *args).eqns) == 0


def test_many_rows_and_large_stacks_stay():
    def step(w):
        return lambda h, x: (h + snp.sum(x @ w), None)

    def f(xs, w):
        return lax.scan(step(w), snp.float32(0), xs)

    assert not stays(f, normal(4, 8, 32), normal(32, 32))
    assert stays(f, normal(4, 32, 32), normal(32, 32)), "many rows in a round"
    rounds = MOST_STACKED // (4 * 8 * 64) + 1
    shapes = np.broadcast_to(np.float32(1), (rounds, 8, 32)), normal(32, 64)
    assert stays(f, *shapes), "a stack of many bytes"
    assert stays(f, normal(4, 8, 2), normal(2, 8)), "few summands"


def test_sums_that_are_also_read_stay():
    def f(xs, ys):
        def step(total, xy):
            total = total + xy[0].T @ xy[1]
            return total, total[0, 0]

        return lax.scan(step, snp.zeros((12, 16)), (xs, ys))

    assert stays(f, XS, normal(7, 5, 16))
    assert_same(f, XS, normal(7, 5, 16))


def test_sums_of_products_with_several_contracted_dims_leave_the_loop():
    def f(xs, ys):
        def step(total, xy):
            x, y = xy
            return total + snp.einsum("abi,abj->ji", x, snp.sin(y)), None

        return lax.scan(step, snp.ones((6, 5)), (xs, ys))[0]

    xs, ys = normal(9, 2, 3, 5), normal(9, 2, 3, 6)
    assert not stays(f, xs, ys)
    assert inside(rewritten(f, xs, ys)) == 0
    assert_same(f, xs, ys)


def test_gradients_of_checkpointed_steps_agree_with_single_operations():
    def loss(w, v):
        def step(h, x):
            h = snp.tanh(x @ w + h @ v)
            return h, h.sum()

        return lax.scan(checkpoint(step), START, XS)[1].sum()

    assert_same(grad(loss, (0, 1)), W, V)


@pytest.mark.parametrize("rows, left", [(8, 2), (16, 3), (17, 5)])
def test_sums_leave_from_more_rows_than_products(rows, left):
    """Of x @ w, h @ v, their transposes and two sums, what depends on the round before stays."""
    xs, start = normal(6, rows, 12, seed=4), normal(rows, 16, seed=5)

    def loss(w, v):
        def step(h, x):
            return snp.tanh(x @ w + h @ v), None

        return snp.sum(lax.scan(step, start, xs)[0] ** 2)

    gradient = grad(loss, (0, 1))
    assert inside(rewritten(gradient, W, V)) == left
    assert_same(gradient, W, V)
