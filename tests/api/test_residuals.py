"""`print_saved_residuals`: what a backward pass keeps, and what checkpoint policies make of it."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.ad_checkpoint import checkpoint_name, print_saved_residuals

P = {"w": np.ones((3, 2), np.float32)}
X = np.ones((4, 3), np.float32)


def loss(p, x):
    h = checkpoint_name(snp.tanh(x @ p["w"]), "hidden")
    return snp.sum(snp.sin(h) * spmd.jit(snp.exp)(x[0, 0]))


def lines(capsys, f, *args):
    print_saved_residuals(f, *args)
    return sorted(line.partition(" from /")[0] for line in capsys.readouterr().out.splitlines())


def test_residuals_are_listed_with_their_origins(capsys):
    found = lines(capsys, lambda x: snp.sin(x) * 2.0 * snp.cos(X[0]), X[0])
    assert found == ["f32[3] output of cos", "f32[3] output of cos"]
    found = lines(capsys, loss, P, X)
    assert "f32[3,2] from the argument p['w']" in found and "f32[4,3] from the argument x" in found
    assert "f32[] output of jitted function 'exp'" in found


def test_policies_change_the_residuals(capsys):
    policies = spmd.checkpoint_policies
    kept = lines(capsys, spmd.checkpoint(loss), P, X)
    assert kept == ["f32[3,2] from the argument p['w']", "f32[4,3] from the argument x"]
    named = spmd.checkpoint(loss, policy=policies.save_only_these_names("hidden"))
    assert "f32[4,2] named 'hidden'" in lines(capsys, named, P, X)


@pytest.mark.parametrize("wrap", [spmd.checkpoint, lambda f: f])
def test_the_shapes_are_those_of_jax(wrap, capsys):
    jax = pytest.importorskip("jax")
    from jax import ad_checkpoint

    remat = jax.checkpoint if wrap is spmd.checkpoint else wrap
    ad_checkpoint.print_saved_residuals(remat(lambda p, x: jax.numpy.sin(x @ p["w"]).sum()), P, X)
    want = sorted(line.partition(" ")[0] for line in capsys.readouterr().out.splitlines())
    found = lines(capsys, wrap(lambda p, x: snp.sin(x @ p["w"]).sum()), P, X)
    assert [line.partition(" ")[0] for line in found] == want


# ---- functions that hold residuals ---------------------------------------------------------------


def test_jitted_functions_return_and_take_what_linearize_returns():
    x = np.linspace(0.0, 2.0, 3, dtype=np.float32)

    def f(x):
        return snp.sin(x) * x

    push = spmd.jit(lambda x: spmd.linearize(f, x)[1])(x)
    want = np.cos(x) * x + np.sin(x)
    np.testing.assert_allclose(push(np.ones_like(x)), want, rtol=1e-6)
    np.testing.assert_allclose(spmd.jit(lambda p, t: p(t))(push, np.ones_like(x)), want, rtol=1e-6)
    np.testing.assert_allclose(spmd.vmap(push)(np.eye(3, dtype=np.float32)), np.diag(want), 1e-6)
    zeroed = spmd.tree.map(lambda leaf: 0 * leaf, push)
    np.testing.assert_array_equal(zeroed(np.ones_like(x)), np.zeros_like(x))


def test_jitted_functions_return_and_take_a_transpose():
    a = np.arange(3, dtype=np.float32)
    transpose = spmd.jit(lambda a: spmd.linear_transpose(lambda x: a * x, a))(a)
    (found,) = transpose(np.ones_like(a))
    np.testing.assert_array_equal(found, a)
    (leaf,) = spmd.tree.leaves(transpose)
    np.testing.assert_array_equal(leaf, a)
