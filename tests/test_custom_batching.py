"""custom_vmap and sequential_vmap: the rule is used where it should be, also in derivatives."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.custom_batching import custom_vmap, sequential_vmap
from spmd.errors import ArgumentError, PytreeError, ShapeError


def marked(calls):
    """sin(x) * y, whose rule records what is batched."""

    @custom_vmap
    def f(x, y):
        return snp.sin(x) * y

    @f.def_vmap
    def rule(axis_size, in_batched, x, y):
        calls.append((axis_size, in_batched))
        x, y = (
            v if b else snp.broadcast_to(v, (axis_size,))
            for v, b in zip((x, y), in_batched, strict=True)
        )
        return snp.sin(x) * y, True

    return f


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("wrap", [lambda f: f, spmd.jit])
def test_the_rule_is_used(axes, wrap):
    calls = []
    f = wrap(marked(calls))
    x = snp.arange(3.0) if axes[0] == 0 else snp.float32(2)
    y = snp.arange(3.0) + 1 if axes[1] == 0 else snp.float32(2)
    assert not calls
    out = spmd.vmap(f, axes)(x, y)
    np.testing.assert_allclose(np.asarray(out), np.sin(x) * np.asarray(y), rtol=1e-6)
    assert calls == [(3, [a == 0 for a in axes])]


def test_derivatives():
    calls = []
    f = marked(calls)
    x = snp.array([0.3, 0.5])
    assert spmd.grad(f)(0.3, 2.0) == pytest.approx(2 * np.cos(0.3), rel=1e-6)
    outs = spmd.vmap(lambda x: spmd.jvp(lambda x: f(x, 2.0), (x,), (1.0,)))(x)
    np.testing.assert_allclose(np.asarray(outs[1]), 2 * np.cos([0.3, 0.5]), rtol=1e-6)
    assert calls
    for g in (
        spmd.vmap(spmd.grad(f), (0, None)),
        spmd.grad(lambda x, y: snp.sum(spmd.vmap(f, (0, None))(x, y))),
        spmd.jit(spmd.vmap(spmd.grad(f), (0, None))),
    ):
        np.testing.assert_allclose(np.asarray(g(x, 2.0)), 2 * np.cos([0.3, 0.5]), rtol=1e-6)
    second = spmd.vmap(spmd.grad(spmd.grad(f)), (0, None))(x, 2.0)
    np.testing.assert_allclose(np.asarray(second), -2 * np.sin([0.3, 0.5]), rtol=1e-6)


def test_trees_and_unbatched_results():
    @custom_vmap
    def f(tree, z):
        return {"sum": tree["x"] + tree["y"], "z": z}

    @f.def_vmap
    def rule(axis_size, in_batched, tree, z):
        assert in_batched == [{"x": True, "y": False}, False]
        return {"sum": tree["x"] + tree["y"], "z": z}, {"sum": True, "z": False}

    axes = ({"x": 1, "y": None}, None)
    out = spmd.vmap(f, axes, {"sum": 0, "z": None})({"x": snp.ones((2, 3)), "y": snp.ones(2)}, 5.0)
    assert out["sum"].shape == (3, 2) and out["z"] == 5.0


def test_mistakes():
    @custom_vmap
    def f(x):
        return x

    with pytest.raises(ArgumentError, match="no rule"):
        f(1.0)
    f.def_vmap(lambda size, batched, x: x)
    with pytest.raises(ArgumentError, match="pair"):
        spmd.vmap(f)(snp.ones((3, 4)))
    f.def_vmap(lambda size, batched, x: (x, [True]))
    with pytest.raises(PytreeError, match="out_batched"):
        spmd.vmap(f)(snp.ones((3, 4)))
    f.def_vmap(lambda size, batched, x: (x, False))
    with pytest.raises(ShapeError, match="must have shape"):
        spmd.vmap(f)(snp.ones((3, 4)))


def test_sequential_vmap():
    sizes = []

    @sequential_vmap
    def f(x, y):
        return spmd.pure_callback(
            lambda x, y: (sizes.append(x.shape), x @ y)[1],
            spmd.ShapeDtypeStruct((2,), np.float32),
            x,
            y,
        )

    x = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    y = np.ones(2, np.float32)
    for g in (spmd.vmap(f, (0, None)), spmd.jit(spmd.vmap(f, (0, None)))):
        np.testing.assert_array_equal(np.asarray(g(x, y)), x @ y)
    assert sizes == [(2, 2)] * 6
    nested = spmd.vmap(spmd.vmap(f, (0, None)), (None, 0))(x, np.stack([y, 2 * y]))
    np.testing.assert_array_equal(np.asarray(nested), np.stack([x @ y, x @ y * 2]))


def test_sequential_vmap_is_differentiable():
    f = sequential_vmap(lambda x: lax.sin(x))
    x = snp.array([0.1, 0.2])
    got = spmd.grad(lambda x: snp.sum(spmd.vmap(f)(x)))(x)
    np.testing.assert_allclose(np.asarray(got), np.cos(np.asarray(x)), rtol=1e-6)
