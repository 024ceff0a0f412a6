"""`checkpoint`: the same numbers, recomputed instead of kept; policies say what is kept."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.ad_checkpoint import checkpoint_name
from spmd.core.ir import all_eqns
from tests.jax.compare import assert_same, cases

A = np.arange(6.0, dtype=np.float32).reshape(2, 3)
V = np.array([0.5, -1.0, 2.0], np.float32)
W = 0.3 * np.eye(3, dtype=np.float32)


def net(j):
    return lambda x: j.np.sin(j.np.sin(j.np.sin(x)) * x).sum()


def layer(j):
    return lambda w: j.np.sin(j.np.sin(w @ w) @ w).sum()


@cases(
    value=lambda j: j.checkpoint(net(j))(V),
    grad=lambda j: j.grad(j.checkpoint(net(j)))(V),
    jit_grad=lambda j: j.jit(j.grad(j.checkpoint(net(j))))(V),
    grad_jit=lambda j: j.grad(j.jit(j.checkpoint(j.jit(net(j)))))(V),
    jvp=lambda j: j.jvp(j.checkpoint(net(j)), (V,), (V,)),
    hessian=lambda j: j.hessian(j.checkpoint(net(j)))(V),
    third=lambda j: j.grad(
        lambda x: j.grad(lambda y: j.grad(j.checkpoint(net(j)))(y).sum())(x).sum()
    )(V),
    vmap_grad=lambda j: j.vmap(j.grad(j.checkpoint(net(j))))(A),
    grad_vmap=lambda j: j.grad(lambda x: j.vmap(j.checkpoint(net(j)))(x).sum())(A),
    scan=lambda j: j.grad(
        lambda w: j.lax.scan(
            j.checkpoint(lambda c, x: (j.np.tanh(w * c + x), c), prevent_cse=False), 0.0, V
        )[0]
    )(1.5),
    around_scan=lambda j: j.grad(
        j.checkpoint(lambda w: j.lax.scan(lambda c, x: (j.np.tanh(w * c + x), c), 0.0, V)[0])
    )(1.5),
    nested=lambda j: j.grad(j.checkpoint(lambda x: j.checkpoint(net(j))(j.np.sin(x))))(V),
    static=lambda j: j.grad(j.checkpoint(lambda x, k: j.np.sin(x) ** k, static_argnums=(1,)))(
        1.0, 3
    ),
    keyword=lambda j: j.grad(lambda x: j.checkpoint(lambda a, b: a * j.np.sin(b))(x, b=x))(2.0),
    tree=lambda j: j.grad(j.checkpoint(lambda p: (p["a"] * j.np.sin(p["b"])).sum()))(
        {"a": V, "b": V}
    ),
    closure=lambda j: j.grad(lambda w: j.checkpoint(lambda x: j.np.sin(w * x).sum())(V))(2.0),
    dots=lambda j: j.grad(j.checkpoint(layer(j), policy=j.checkpoint_policies.dots_saveable))(W),
    everything=lambda j: j.hessian(
        j.checkpoint(net(j), policy=j.checkpoint_policies.everything_saveable)
    )(V),
    barrier=lambda j: j.lax.optimization_barrier((V, {"a": A})),
    grad_of_barrier=lambda j: j.grad(lambda x: j.lax.optimization_barrier(x) * 2)(1.0),
    vmap_of_barrier=lambda j: j.vmap(lambda x: j.lax.optimization_barrier((x, 1.0))[0])(V),
)
def test_checkpoint_and_barrier_give_the_values_of_jax(case):
    assert_same(case)


def count(f, name, *args):
    """How often a primitive occurs in the gradient's program."""
    jaxpr = spmd.make_jaxpr(spmd.grad(f))(*args)
    inlined = ("jit", "checkpoint")
    return sum(e.prim.name == name for e in all_eqns(jaxpr) if e.prim.name not in inlined)


def two_products(w):
    return snp.sum(snp.sin(checkpoint_name(snp.sin(w @ w), "hidden") @ w))


POLICIES = spmd.checkpoint_policies


@pytest.mark.parametrize(
    ("policy", "sins"),
    [
        # Forward: 2. Kept: the values that the policy names, and what the backward pass needs of
        # the rest is computed once more.
        (None, 3),
        (POLICIES.nothing_saveable, 3),
        (POLICIES.everything_saveable, 2),
        (POLICIES.dots_saveable, 3),
        (POLICIES.save_only_these_names("hidden"), 2),
        (POLICIES.save_only_these_names("other"), 3),
        (POLICIES.save_any_names_but_these("hidden"), 3),
        (
            POLICIES.save_from_both_policies(
                POLICIES.dots_saveable, POLICIES.save_only_these_names("hidden")
            ),
            2,
        ),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, spmd.jit], ids=["plain", "through a call"])
def test_policy_says_what_is_computed_again(policy, sins, wrap):
    f = spmd.checkpoint(wrap(two_products), policy=policy)
    assert count(f, "sin", W) == sins
    np.testing.assert_allclose(spmd.grad(f)(W), spmd.grad(two_products)(W), rtol=1e-6)


def test_products_are_kept_by_policy():
    plain = count(two_products, "dot_general", W)
    kept = count(spmd.checkpoint(two_products, policy=POLICIES.dots_saveable), "dot_general", W)
    again = count(spmd.checkpoint(two_products), "dot_general", W)
    assert kept == plain and again > plain


def test_nothing_is_stacked_but_the_carry():
    """Under checkpoint, a scan keeps one value per round; without, all that sin's chain needs."""

    def loss(body):
        return lambda x: lax.scan(body, x, None, length=5)[0]

    def body(c, _):
        return snp.sin(snp.sin(snp.sin(c))), None

    def stacked(body):
        jaxpr = spmd.make_jaxpr(spmd.grad(loss(body)))(1.0)
        forward = next(e for e in jaxpr.eqns if e.prim.name == "scan")
        return sum(v.aval.shape == (5,) for v in forward.outvars)

    assert stacked(spmd.checkpoint(body)) == 1
    assert stacked(body) == 3


@pytest.mark.parametrize("prevent", [True, False])
def test_a_barrier_is_there_only_where_asked_for(prevent):
    f = spmd.checkpoint(lambda x: snp.sin(snp.sin(x)), prevent_cse=prevent)
    assert (count(f, "optimization_barrier", 1.0) > 0) == prevent


def test_the_compiled_program_recomputes():
    """The barrier survives the compiler: sin of the forward pass is computed twice."""
    calls = []
    f = spmd.checkpoint(lambda x: calls.append(1) or snp.sum(snp.sin(snp.sin(x))))
    np.testing.assert_allclose(spmd.jit(spmd.grad(f))(V), np.cos(np.sin(V)) * np.cos(V), rtol=1e-5)
    assert calls == [1]


def test_names_are_the_identity():
    assert_same(lambda j: j.vmap(j.grad(lambda x: x * 2))(V))
    f = lambda x: checkpoint_name(x, "x") * x  # noqa: E731
    np.testing.assert_allclose(spmd.jit(spmd.vmap(spmd.grad(f)))(V), 2 * V)


def test_static_arguments_may_be_given_by_name():
    seen = []

    @functools.partial(spmd.checkpoint, static_argnames=("mode", "times"))
    def f(x, mode, *, times=1):
        seen.append((mode, times))
        return (snp.sin(x) if mode == "sin" else x) * times

    slope = spmd.grad(lambda x: f(x, "sin", times=3) + f(x, mode="plain"))(0.5)
    np.testing.assert_allclose(slope, 3 * np.cos(0.5) + 1, rtol=1e-6)
    assert set(seen) == {("sin", 3), ("plain", 1)}


def test_a_number_becomes_an_array_as_when_it_is_traced():
    seen = []
    found = spmd.checkpoint(lambda x, *, y: (seen.append((x, y)), x, 2.5))(0.5, y=2)
    assert all(isinstance(x, spmd.Array) for x in (*seen[0], *spmd.tree.leaves(found)))
    assert found[1].weak_type


def test_checkpoint_name_takes_trees():
    tree = {"a": np.float32(1), "b": (np.arange(2), None)}
    found = checkpoint_name(tree, "n")
    assert list(found) == ["a", "b"] and found["b"][1] is None and float(found["a"]) == 1
    jaxpr = str(spmd.make_jaxpr(lambda x: checkpoint_name((x, [x]), "n"))(1.0))
    assert jaxpr.count("name[name=n]") == 2
