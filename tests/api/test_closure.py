"""closure_convert, custom_gradient and ravel_pytree."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.errors import DtypeError, GradError, PytreeError, ShapeError
from spmd.flatten_util import ravel_pytree
from spmd.testing import check_grads

# ---- closure_convert ---------------------------------------------------------------------------


def minimize(objective, x0):
    """A root of `objective`'s derivative, differentiated by the implicit function theorem."""
    converted, consts = spmd.closure_convert(objective, x0)
    return _minimize(converted, x0, *consts)


def _newton(objective, x, consts):
    for _ in range(20):
        g, h = spmd.grad(objective), spmd.grad(spmd.grad(objective))
        x = x - g(x, *consts) / h(x, *consts)
    return x


def _minimize(converted, x0, *consts):
    @spmd.custom_vjp
    def solve(x0, *consts):
        return _newton(converted, x0, consts)

    def fwd(x0, *consts):
        out = _newton(converted, x0, consts)
        return out, (out, consts)

    def bwd(saved, ct):
        x, consts = saved
        slope = spmd.grad(converted)
        curvature = spmd.grad(slope)(x, *consts)
        _, pull = spmd.vjp(lambda *c: slope(x, *c), *consts)
        return (snp.zeros_like(x), *pull(-ct / curvature))

    solve.defvjp(fwd, bwd)
    return solve(x0, *consts)


def test_closure_convert_serves_an_implicit_derivative():
    def best(a):
        return minimize(lambda x: (x - snp.sin(a)) ** 2 + 0 * a, snp.float32(0.0))

    assert best(0.7) == pytest.approx(np.sin(0.7), rel=1e-6)
    assert spmd.grad(best)(0.7) == pytest.approx(np.cos(0.7), rel=1e-5)
    assert spmd.jit(spmd.grad(best))(0.7) == pytest.approx(np.cos(0.7), rel=1e-5)


def test_closure_convert_moves_traced_floats_only():
    counts = []

    def outer(y, k, tree):
        fixed = np.ones(3, np.float32)
        g, consts = spmd.closure_convert(lambda t: t["x"] * y * k + fixed[0], tree)
        counts.append(len(consts))
        with pytest.raises(PytreeError, match="followed by the 1 values"):
            g(1.0, *consts)
        return g(tree, *consts)

    f = spmd.jit(outer)
    assert f(2.0, 3, {"x": 5.0}) == 31.0
    assert spmd.grad(f)(2.0, 3, {"x": 5.0}) == 15.0
    assert set(counts) == {1}


# ---- custom_gradient ---------------------------------------------------------------------------


def test_custom_gradient_is_the_gradient_at_every_order():
    @spmd.custom_gradient
    def f(x):
        return x**2, lambda ct: ct * x

    assert f(3.0) == 9.0
    assert spmd.grad(f)(3.0) == 3.0
    assert spmd.grad(spmd.grad(f))(3.0) == 1.0
    np.testing.assert_array_equal(np.asarray(spmd.vmap(spmd.grad(f))(snp.arange(3.0))), range(3))
    assert spmd.jit(spmd.grad(lambda x: f(snp.sin(x))))(1.0) == pytest.approx(
        np.sin(1) * np.cos(1), rel=1e-6
    )


def test_custom_gradient_takes_several_arguments():
    @spmd.custom_gradient
    def f(x, tree):
        y = snp.sin(x)

        def rule(ct):
            return ct["out"] * snp.cos(x) * tree["w"], {"w": ct["out"] * y}

        return {"out": y * tree["w"]}, rule

    check_grads(lambda x, w: f(x, {"w": w})["out"], (0.3, 0.7), 2, modes=("rev",))
    gx, gt = spmd.grad(lambda x, t: f(x, t)["out"], (0, 1))(0.3, {"w": 0.7})
    assert gx == pytest.approx(np.cos(0.3) * 0.7, rel=1e-6)
    assert gt["w"] == pytest.approx(np.sin(0.3), rel=1e-6)


def test_custom_gradient_must_return_a_pair():
    with pytest.raises(GradError, match="pair"):
        spmd.custom_gradient(lambda x: x)(1.0)


# ---- ravel_pytree ------------------------------------------------------------------------------


def test_ravel_pytree_and_its_inverse_are_inverse():
    tree = {"b": snp.arange(3.0), "a": (snp.ones((2, 2)), 7.0), "n": None}
    flat, unravel = ravel_pytree(tree)
    np.testing.assert_array_equal(np.asarray(flat), [1, 1, 1, 1, 7, 0, 1, 2])
    back = spmd.jit(unravel)(flat)
    assert back["n"] is None and back["a"][0].shape == (2, 2) and back["a"][1] == 7
    assert unravel == ravel_pytree(tree)[1]
    assert hash(unravel) == hash(ravel_pytree(tree)[1])
    assert unravel(flat.astype(snp.bfloat16))["b"].dtype == snp.bfloat16


def test_ravel_pytree_promotes():
    tree = [snp.arange(2), snp.ones(2), snp.array([True])]
    flat, unravel = ravel_pytree(tree)
    assert flat.dtype == np.float32
    assert [x.dtype for x in unravel(flat)] == [np.int32, np.float32, np.bool_]
    with pytest.raises(DtypeError, match="float32"):
        unravel(flat.astype(np.int32))
    with pytest.raises(ShapeError, match=r"\(5,\)"):
        unravel(flat[1:])


def test_ravel_pytree_of_no_leaves_is_empty():
    flat, unravel = ravel_pytree({})
    assert flat.shape == (0,) and unravel(flat) == {}


def test_ravel_pytree_is_differentiable():
    def f(tree):
        flat, unravel = ravel_pytree(tree)
        return snp.sum(unravel(flat**2)["w"] * 3.0)

    g = spmd.grad(f)({"w": snp.arange(3.0), "b": snp.ones(1)})
    np.testing.assert_array_equal(np.asarray(g["w"]), [0, 6, 12])
    np.testing.assert_array_equal(np.asarray(g["b"]), [0])
