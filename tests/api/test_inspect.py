"""Looking at programs: `make_jaxpr`, `eval_shape`, `linear_transpose`; types of gradients."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.errors import AxisError, PytreeError, RefusedError

V = np.ones(3, np.float32)


def test_eval_shape_computes_nothing():
    calls = []

    def f(x, scale=1.0):
        calls.append(x)
        return {"product": x @ x.T, "scaled": (scale * x[0],)}

    given = spmd.ShapeDtypeStruct((4, 5), np.float32)
    out = spmd.eval_shape(f, given, scale=2.0)
    assert out["product"].shape == (4, 4) and out["scaled"][0].dtype == np.float32
    assert calls[0].shape == (4, 5)
    # A function of shapes can itself be traced.
    assert spmd.jit(lambda x: snp.zeros(spmd.eval_shape(f, x)["product"].shape))(
        np.ones((2, 5), np.float32)
    ).shape == (2, 2)


def test_make_jaxpr_takes_static_and_keyword_arguments():
    jaxpr = spmd.make_jaxpr(lambda x, n, k=2: x * n * k, static_argnums=1)(V, 3, k=4)
    assert [a.short() for a in jaxpr.in_avals] == ["f32[3]", "i32[]"]
    closed, shapes = spmd.make_jaxpr(lambda x: {"a": x, "b": x.sum()}, return_shape=True)(V)
    assert shapes["a"].shape == (3,) and len(closed.out_avals) == 2
    assert str(spmd.make_jaxpr(snp.sin)(spmd.ShapeDtypeStruct((2,), np.float32)).in_avals[0]) == (
        "float32[2]"
    )


def test_make_jaxpr_takes_an_axis_environment():
    f = lambda x: lax.psum(x, "i") / lax.axis_size("i")  # noqa: E731
    jaxpr = spmd.make_jaxpr(f, axis_env=[("i", 4)])(V)
    assert "psum" in str(jaxpr) and "4.0" in str(jaxpr)
    with pytest.raises(AxisError, match="unbound axis name 'i'"):
        spmd.make_jaxpr(f)(V)


def test_linear_transpose_gives_cotangents_in_the_trees_of_arguments():
    back = spmd.linear_transpose(lambda p: {"sum": p["a"].sum() + p["b"]}, {"a": V, "b": 1.0})
    (found,) = back({"sum": 2.0})
    np.testing.assert_array_equal(found["a"], 2 * V)
    with pytest.raises(PytreeError, match="must have the structure of the output"):
        back(2.0)
    with pytest.raises(RefusedError, match="sin"):
        spmd.linear_transpose(snp.sin, 1.0)(1.0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: x * 2,
        lambda x: (x * V).sum(),
        lambda x: lax.cond(x > 0, lambda: x * x, lambda: x),
        lambda x: lax.fori_loop(0, 3, lambda i, c: c * x, x),
        lambda x: spmd.vmap(lambda v: snp.sin(x * v))(V).sum(),
        lambda x: 1.0,
    ],
)
def test_gradients_have_the_types_of_their_arguments(loss):
    """Else the second step of a training loop would compile everything again."""
    for x in (1.5, np.float32(1.5), np.float16(1.5)):
        for how in (lambda f: f, spmd.jit):
            (gradient,) = spmd.vjp(how(loss), x)[1](spmd.typeof(loss(x)).dtype.type(1))
            assert spmd.typeof(gradient) is spmd.typeof(x)


def test_device_get_gives_numpy_arrays_of_a_tree():
    tree = {"a": snp.ones(3), "b": (snp.zeros(()), 2.0)}
    assert spmd.block_until_ready(tree) is tree
    host = spmd.device_get(tree)
    *arrays, number = spmd.tree.leaves(host)
    assert all(isinstance(x, np.ndarray) for x in arrays) and len(arrays) == 2
    assert type(number) is float  # as in JAX: a number is on no device
