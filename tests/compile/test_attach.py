"""Attach: which groups become epilogues of products, and that programs keep their values."""

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax, nn
from spmd.compile.lower.lowering import lower
from spmd.compile.lower.schedule import Launch
from spmd.compile.memory import overwritable
from spmd.compile.passes.attach import attach_epilogues
from spmd.compile.passes.fuse import fuse
from spmd.compile.passes.simplify import simplify
from spmd.compile.pipeline import run_passes
from spmd.core.config import config


def arrays(*shapes):
    rng = np.random.default_rng(len(shapes))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def names(f, *args):
    """The primitives that a program consists of after all passes."""
    closed = run_passes(spmd.make_jaxpr(f)(*args))
    return [eqn.prim.name for eqn in closed.eqns]


def assert_same(f, *args):
    found = spmd.jit(f)(*args)
    with spmd.disable_jit():
        expected = f(*args)
    for a, b in zip(spmd.tree.leaves(found), spmd.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def bias_relu(x, w, b):
    return snp.maximum(x @ w + b, 0)


def residual(x, w, b):
    return x + snp.tanh(x @ w + b) * 0.5


def transposed(x, w, b):
    return (x @ w).T * 2


def reshaped(x, w, b):
    return snp.reshape(x @ w, (4, 5, 20)) + b


def stacked(x, w, b):
    """The result of the product has the dims (4, 5, 20)."""
    return lax.exp(snp.reshape(x, (4, 5, 20)) @ w - b)


SQUARE = ((20, 20), (20, 20), (20,))


@pytest.mark.parametrize("f", [bias_relu, residual, transposed, reshaped, stacked])
def test_elementwise_work_joins_its_product(f):
    args = arrays(*SQUARE)
    found = names(f, *args)
    assert "product" in found and not {"fused", "dot_general"} & set(found), found
    assert_same(f, *args)


def test_a_result_that_others_read_is_kept():
    def f(x, w, b):
        h = x @ w
        return snp.maximum(h + b, 0), h @ w, h

    args = arrays(*SQUARE)
    assert names(f, *args) == ["product", "dot_general"]
    assert_same(f, *args)


def test_an_earlier_reader_keeps_the_product_apart():
    def f(x, w, b):
        h = x @ w
        return (h @ w) * (h + b)

    args = arrays(*SQUARE)
    assert names(f, *args) == ["dot_general", "product"]
    assert_same(f, *args)


def test_of_two_products_in_one_group_one_is_joined():
    def f(x, w, b):
        return snp.tanh(x @ w + b @ w + x)

    args = arrays((20, 20), (20, 20), (20, 20))
    assert names(f, *args) == ["dot_general", "product"]
    assert_same(f, *args)


def test_reductions_stay_kernels_of_their_own():
    def f(x, w, b):
        return (x @ w + b).sum(axis=1)

    args = arrays(*SQUARE)
    assert names(f, *args) == ["dot_general", "fused"]
    assert_same(f, *args)


def test_bodies_of_loops_are_joined_too():
    def f(x, w, b):
        def body(h, _):
            h = snp.tanh(h @ w + b)
            return h, None

        return lax.scan(body, x, None, length=3)

    args = arrays(*SQUARE)
    closed = run_passes(spmd.make_jaxpr(f)(*args))
    body = closed.eqns[0].params["jaxpr"]
    assert "product" in [eqn.prim.name for eqn in body.eqns]
    assert_same(f, *args)


def test_gradients_through_joined_products():
    def loss(w, b, x):
        return (snp.tanh(x @ w + b) ** 2).sum()

    x, w, b = arrays(*SQUARE)
    assert_same(spmd.grad(loss, (0, 1, 2)), w, b, x)


def test_narrow_products_are_rounded_once_and_then_used():
    x, w, b = (a.astype(spmd.numpy.bfloat16) for a in arrays((40, 50), (50, 33), (33,)))
    found = spmd.jit(bias_relu)(x, w, b)
    exact = np.maximum(x.astype("f8") @ w.astype("f8") + b.astype("f8"), 0)
    np.testing.assert_allclose(np.asarray(found).astype("f8"), exact, rtol=0.02, atol=0.1)


def test_the_pass_keeps_the_meaning():
    """The joined equation has an `impl` too: the jaxpr says what it means."""
    args = arrays(*SQUARE)
    closed = fuse(simplify(spmd.make_jaxpr(residual)(*args)))
    joined = attach_epilogues(closed)
    assert [eqn.prim.name for eqn in joined.eqns] == ["product"]
    (eqn,) = joined.eqns
    by_input = dict(zip(joined.jaxpr.invars, args, strict=True))
    (found,) = eqn.prim.rule("impl")(np, *(by_input[v] for v in eqn.invars), **eqn.params)
    np.testing.assert_allclose(found, residual(*args), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "complex64", "int64"])
def test_integers_and_complex_numbers_are_kernels(dtype):
    def f(x, y):
        return lax.dot_general(x, y, (((1,), (1,)), ((0,), (2,))))

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, (3, 7, 5)), rng.integers(0, 9, (4, 7, 3))
    with config.override("enable_x64", dtype == "int64"):
        x, y = x.astype(dtype), y.astype(dtype)
        if dtype == "complex64":
            x, y = x * np.complex64(1 + 2j), y * np.complex64(2 - 1j)
        schedule = lower(run_passes(spmd.make_jaxpr(f)(x, y)))
        assert all(isinstance(step, Launch) for step in schedule.steps)
        found = np.asarray(spmd.jit(f)(x, y))
        np.testing.assert_array_equal(found, np.einsum("bki,jkb->bij", x, y))
        assert found.dtype == dtype


def test_an_update_may_be_written_over_what_it_updates():
    """But not over an operand of the product, of which later blocks still need all."""

    def update(w, x, g):
        return w - 0.1 * (x.T @ g)

    def square(w, x, g):
        return w - 0.1 * (w @ w)

    w, x, g = arrays((20, 20), (30, 20), (30, 20))
    for f, safe in ((update, True), (square, False)):
        schedule = lower(run_passes(spmd.make_jaxpr(f)(w, x, g)))
        (step,) = schedule.steps
        found = list(overwritable(step, schedule.outputs[0]))
        assert (schedule.inputs[0] in found) == safe
        assert_same(f, w, x, g)
        given = spmd.device_put(w)
        found = spmd.jit(f, donate_argnums=0)(given, x, g)
        np.testing.assert_allclose(found, f(w, x, g), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("left", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("right", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(30, 20, 40), (1, 64, 33), (65, 130, 1), (3, 0, 2)])
def test_operands_are_widened_as_a_product_reads_them(left, right, shape):
    def f(x, y):
        return nn.relu(x.astype("float32") @ y.astype("float32")) + 1

    def turned(x, y):
        return x.T.astype("float32").T @ y.astype("float32")

    m, k, n = shape
    x, y = arrays((m, k), (k, n))
    x, y = x.astype(getattr(snp, left)), y.astype(getattr(snp, right))
    for g in (f, turned):
        assert "convert_element_type" not in names(g, x, y)
        with spmd.disable_jit():
            wanted = np.asarray(g(snp.asarray(x), snp.asarray(y)))
        np.testing.assert_allclose(spmd.jit(g)(x, y), wanted, rtol=2e-5, atol=2e-5)


def test_a_cast_that_rounds_stays():
    def f(x, y):
        return x.astype("bfloat16") @ y.astype("bfloat16")

    assert "fused" in names(f, *arrays((30, 20), (20, 40)))


def test_permuted_operands_are_read_where_they_lie():
    def f(x, y):
        return x.T @ y, snp.einsum("ij,kj->ik", x, y), y.T @ x.T.T

    x, y = arrays((30, 20), (30, 20))
    assert names(f, x, y) == ["dot_general"] * 3
    assert_same(f, x, y)

    def heads(q, k):
        return snp.einsum("bhsd,bhtd->bhst", q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3))

    q, k = arrays((2, 9, 3, 8), (2, 11, 3, 8))
    assert names(heads, q, k) == ["dot_general"]
    assert_same(heads, q, k)
