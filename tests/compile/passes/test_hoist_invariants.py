"""What leaves a loop, what stays, and that the results are those of the loop as it was."""

from __future__ import annotations

import numpy as np
import pytest

import spmd.numpy as snp
from spmd import lax
from spmd.api.compiled import jit
from spmd.api.inspect import disable_jit, make_jaxpr
from spmd.api.reverse import grad
from spmd.compile.passes.dead_code import prune
from spmd.compile.passes.hoist_invariants import hoist_invariants
from spmd.compile.passes.inline_calls import inline_calls

X = np.linspace(-1, 1, 6, dtype=np.float32)
W = np.linspace(0.1, 1, 36, dtype=np.float32).reshape(6, 6)


def hoisted(f, *args):
    return hoist_invariants(inline_calls(make_jaxpr(f)(*args)))


def names(jaxpr):
    return [eqn.prim.name for eqn in jaxpr.eqns]


def loop_of(closed, kind="scan"):
    return next(eqn for eqn in closed.eqns if eqn.prim.name == kind)


def repeat(body, x, *consts, length=4):
    return lax.scan(lambda c, _: (body(c, *consts), None), x, None, length=length)[0]


def test_work_on_constants_leaves_with_what_is_behind_it():
    closed = hoisted(lambda x, w: repeat(lambda c, w: c + snp.exp(2 * w).sum(), x, w), X, W)
    assert {"mul", "exp", "reduce_sum"} <= set(names(closed))
    assert not {"exp", "reduce_sum"} & set(names(loop_of(closed).params["jaxpr"]))


def test_cheap_work_stays_and_reads_what_it_read():
    closed = hoisted(lambda x, w: repeat(lambda c, w: c + 2 * w, x, w), W, W + 1)
    assert "mul" in names(loop_of(closed).params["jaxpr"]) and "mul" not in names(closed)


@pytest.mark.parametrize(
    "product",
    [lambda w, c: (2 * w) @ c, lambda w, c: c @ (2 * w).T, lambda w, c: (w + 1).reshape(6, 6) @ c],
)
def test_cheap_work_leaves_if_a_product_reads_it(product):
    """The product's operand is in memory anyway: `(2 * w) @ c` wrote 2 * w in each iteration."""
    closed = hoisted(lambda x, w: repeat(lambda c, w: snp.tanh(product(w, c)), x, w), X, W)
    inside = names(loop_of(closed).params["jaxpr"])
    assert "dot_general" in inside and not {"mul", "add"} & set(inside)


def test_work_that_grows_before_a_product_stays():
    def body(c, w):
        return snp.tanh(w.astype(np.float32) @ c)

    closed = hoisted(lambda x, w: repeat(body, x, w), X, W.astype(np.float16))
    assert "convert_element_type" in names(loop_of(closed).params["jaxpr"])


def test_a_broadcast_of_something_hoisted_stays_inside():
    def body(c, x):
        return c * lax.broadcast_in_dim(snp.exp(x), (6, 6), (1,))

    closed = hoisted(lambda w, x: repeat(body, w, x), W, X)
    assert "exp" in names(closed) and "broadcast_in_dim" not in names(closed)
    assert "broadcast_in_dim" in names(loop_of(closed).params["jaxpr"])


def test_a_carried_value_that_is_handed_on_counts_as_constant():
    def body(carry, _):
        c, w = carry
        return (c + snp.tanh(w).sum(), w), None

    closed = hoisted(lambda x, w: lax.scan(body, (x, w), None, length=3)[0][0], X, W)
    assert "tanh" in names(closed)


def test_work_that_depends_on_the_iteration_stays():
    def body(carry, row):
        return carry + snp.exp(carry).sum() + snp.tanh(row), snp.sin(carry)

    closed = hoisted(lambda x, w: lax.scan(body, x, w), X, W)
    assert not {"exp", "tanh", "sin"} & set(names(closed))


def test_work_on_constants_leaves_inner_and_outer_loops():
    def inner(c, w):
        return repeat(lambda d, w: d * snp.exp(w).mean(), c, w, length=2)

    closed = hoisted(lambda x, w: repeat(inner, x, w), X, W)
    assert "exp" in names(closed)


def test_a_barrier_stays_with_what_follows_it():
    def body(c, w):
        return c + snp.exp(lax.optimization_barrier(w)).sum()

    closed = hoisted(lambda x, w: repeat(body, x, w), X, W)
    assert "exp" not in names(closed)


def test_a_loop_of_one_round_is_left_alone():
    closed = hoisted(lambda x, w: repeat(lambda c, w: c + snp.exp(w).sum(), x, w, length=1), X, W)
    assert "exp" not in names(closed)


def test_while_gives_up_work_of_its_test_and_its_body():
    def run(x, w):
        def test(c):
            return c.sum() < snp.sin(w).sum()

        return lax.while_loop(test, lambda c: c + snp.exp(w).sum(0), x)

    closed = hoisted(run, X, W)
    assert {"sin", "exp"} <= set(names(closed))
    loop = loop_of(closed, "while").params
    assert "sin" not in names(loop["cond_jaxpr"]) and "exp" not in names(loop["body_jaxpr"])


def _while_without_rounds(x, w):
    return lax.while_loop(lambda c: c.sum() > 1e9, lambda c: c / snp.log(w).sum(), x)


def _stacked(x, w):
    return lax.scan(lambda c, r: (c * snp.exp(w).sum(0) * 0.1, r + snp.exp(w)[0]), x, w)


def _bounded(x, w):
    return lax.fori_loop(0, 5, lambda k, c: c + k * snp.tanh(w @ w).sum(0), x)


def _two_loops(x, w):
    one = repeat(lambda c, w: c + snp.exp(w).sum(0), x, w)
    return repeat(lambda c, w: c - snp.exp(w).sum(1), one, w)


@pytest.mark.parametrize("f", [_while_without_rounds, _stacked, _bounded, _two_loops])
def test_results_agree_with_single_operations(f):
    with disable_jit():
        expected = f(X, W)
    for got, want in zip(_flat(jit(f)(X, W)), _flat(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5)


def _flat(out):
    return list(out) if isinstance(out, tuple) else [out]


def test_gradients_agree_with_single_operations_and_differences():
    def loss(w, x):
        return (_bounded(x, w) ** 2).sum() + _stacked(x, w)[1].sum()

    with disable_jit():
        expected = grad(loss)(W, X)
    np.testing.assert_allclose(jit(grad(loss))(W, X), expected, rtol=2e-4)
    step = 1e-2
    bump = np.zeros_like(W)
    bump[1, 2] = step
    change = (float(loss(W + bump, X)) - float(loss(W - bump, X))) / (2 * step)
    np.testing.assert_allclose(jit(grad(loss))(W, X)[1, 2], change, rtol=2e-2)


def test_a_stack_that_rounds_hand_on_is_not_made_again():
    def f(x):
        def step(c, row):
            c = snp.sin(c + row)
            return c, (row, c, c)

        last, (rows, one, two) = lax.scan(step, x[0], x)
        return last, rows, one, two

    closed = prune(hoisted(f, W))
    assert len(loop_of(closed).params["jaxpr"].jaxpr.outvars) == 2
    assert closed.jaxpr.outvars[1] is closed.jaxpr.invars[0]
    assert closed.jaxpr.outvars[2] is closed.jaxpr.outvars[3]
    with disable_jit():
        expected = f(W)
    for found, wanted in zip(jit(f)(W), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
