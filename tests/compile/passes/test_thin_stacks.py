"""Loops stack only what the loops that read it cannot make for less; results keep their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax, nn
from spmd.api.compiled import jit
from spmd.api.inspect import make_jaxpr
from spmd.api.reverse import grad, value_and_grad
from spmd.compile.passes.inline_calls import inline_calls
from spmd.compile.passes.simplify import simplify
from spmd.compile.passes.thin_stacks import thin_stacks
from spmd.core.ir import ClosedJaxpr
from spmd.core.rewrite import eval_closed

RNG = np.random.default_rng(0)
ROWS, WIDTH, LAYERS = 16, 32, 5
X = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
W = RNG.normal(size=(LAYERS, 2, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5


def before_and_after(f: Any, *args: Any) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    closed = simplify(inline_calls(make_jaxpr(f)(*args)))
    return closed, thin_stacks(closed)


def stacks(closed: ClosedJaxpr) -> list[int]:
    """How many results each loop stacks."""
    scans = [e for e in closed.eqns if e.prim.name == "scan"]
    return [len(e.outvars) - e.params["num_carry"] for e in scans]


def assert_same_bits(one: ClosedJaxpr, other: ClosedJaxpr, *args: Any) -> None:
    leaves = spmd.tree.leaves(args)
    pairs = [jit(lambda *x, c=c: eval_closed(c, *x))(*leaves) for c in (one, other)]
    for x, y in zip(*pairs, strict=True):
        np.testing.assert_array_equal(x, y)


def dense(h: Any, w: Any) -> Any:
    return h + snp.tanh(h @ w[0]) @ w[1]


def loss_of(layer: Any, **options: Any) -> Any:
    def loss(w: Any, x: Any) -> Any:
        return (lax.scan(lambda h, w: (layer(h, w), None), x, w, **options)[0] ** 2).mean()

    return loss


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 2])
def test_slices_of_weights_and_neighbours_of_a_tanh_are_not_stacked(reverse: bool, unroll: int):
    f = grad(loss_of(dense, reverse=reverse, unroll=unroll))
    closed, thin = before_and_after(f, W, X)
    # The two weights and `1 - tanh` leave; the carry and the tanh stay.
    assert (stacks(closed), stacks(thin)) == ([5, 1], [2, 1])
    assert_same_bits(closed, thin, W, X)


def test_what_is_expensive_or_has_other_readers_stays():
    def layer(h: Any, w: Any) -> Any:
        return snp.sin(snp.exp(h @ w[0]))

    closed, thin = before_and_after(grad(loss_of(layer)), W, X)
    assert stacks(thin)[0] == stacks(closed)[0] - 1, "the weights alone"

    def returned(w: Any, x: Any) -> Any:
        def body(h: Any, w: Any) -> Any:
            t = snp.tanh(h @ w[0])
            return t, (t, 1 - t)

        return lax.scan(body, x, w)

    closed, thin = before_and_after(returned, W, X)
    assert stacks(closed) == stacks(thin) == [2], "results of the program"


def test_a_stack_that_is_read_as_a_whole_stays():
    def f(w: Any, x: Any) -> Any:
        _, (a, b) = lax.scan(lambda h, w: (h, (h @ w[0], w[1] * 2)), x, w)
        return lax.scan(lambda c, a: (c + a.sum() + b.sum(), None), 0.0, a)[0], b[0]

    closed, thin = before_and_after(f, W, X)
    assert stacks(closed) == stacks(thin)
    assert_same_bits(closed, thin, W, X)


def test_a_large_stack_is_not_kept_alive_to_make_a_small_one():
    """`w * 1` is no argument: read by the second loop it would live as long as the slices."""

    def f(w: Any, x: Any) -> Any:
        made = snp.exp(w)
        _, rows = lax.scan(lambda h, w: (h + w[0].sum(), w[0, :16] + 1), 0.0, made)
        return lax.scan(lambda c, r: (c + r @ x.T, None), snp.zeros((16, ROWS)), rows)[0]

    closed, thin = before_and_after(f, W, X)
    assert stacks(closed) == stacks(thin)


def test_loops_in_loops():
    def f(w: Any, x: Any) -> Any:
        inner = loss_of(dense)
        return lax.scan(lambda c, k: (c + grad(inner)(w * k, x), None), w, snp.arange(3.0))[0]

    closed, thin = before_and_after(f, W, X)
    (outer,) = [e for e in thin.eqns if e.prim.name == "scan"]
    assert stacks(outer.params["jaxpr"])[0] == 4, "`w * k` lives no longer for its slices"
    assert_same_bits(closed, thin, W, X)


@pytest.mark.parametrize("name", ["gelu", "silu", "softmax", "sigmoid", "relu"])
def test_gradients_of_activations(name: str):
    act = getattr(nn, name)

    def layer(h: Any, w: Any) -> Any:
        h = h / snp.sqrt((h * h).mean(-1, keepdims=True) + 1e-5)
        return h + act(h @ w[0]) @ w[1]

    f = value_and_grad(loss_of(layer), (0, 1))
    closed, thin = before_and_after(f, W, X)
    assert stacks(thin)[0] < stacks(closed)[0]
    assert_same_bits(closed, thin, W, X)


def test_a_compiled_step_holds_less():
    """The forward loop's stacks are most of a step's memory: two of the stream, once three."""
    w, x = np.tile(W, (1, 1, 2, 2)), np.tile(X, (32, 2))
    size = jit(grad(loss_of(dense))).lower(w, x).compile().memory_analysis().temp_size_in_bytes
    assert size <= 2.8 * LAYERS * x.nbytes
