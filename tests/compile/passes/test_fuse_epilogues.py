"""Attach: which groups become epilogues of products, and that programs keep their values."""

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax, nn
from spmd.base.config import config
from spmd.compile.lower.lowering import lower
from spmd.compile.lower.steps import Launch
from spmd.compile.passes.fuse_epilogues import fuse_epilogues
from spmd.compile.passes.fusion.fuse import fuse
from spmd.compile.passes.pipeline import run_passes
from spmd.compile.passes.simplify import simplify
from spmd.compile.schedule.memory_plan import overwritable
from spmd.testing import check_grads


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


def test_gradients_through_joined_products_agree_with_single_operations():
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
    joined = fuse_epilogues(closed)
    assert [eqn.prim.name for eqn in joined.eqns] == ["product"]
    (eqn,) = joined.eqns
    by_input = dict(zip(joined.jaxpr.invars, args, strict=True))
    (found,) = eqn.prim.rule("impl")(np, *(by_input[v] for v in eqn.invars), **eqn.params)
    np.testing.assert_allclose(found, residual(*args), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "complex64", "int64"])
def test_products_of_integers_and_complex_numbers_are_kernels(dtype):
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


# ---- convolutions --------------------------------------------------------------------------------


def convolve(x, w, stride=1, padding="SAME", layout="NHWC"):
    numbers = (layout, "HWIO", layout)
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=numbers)


def conv_bias_relu(x, w, b):
    return nn.relu(convolve(x, w) + b)


def conv_strided(x, w, b):
    return lax.exp(convolve(x, w, 2, "VALID") * b)


def conv_residual(x, w, b):
    """The result has another dtype than the sum, and reads what the convolution reads."""
    return (convolve(x, w) + x[..., :1] > b) * 2


IMAGE = ((2, 9, 8, 5), (3, 3, 5, 7), (7,))


@pytest.mark.parametrize("f", [conv_bias_relu, conv_strided, conv_residual])
def test_elementwise_work_joins_its_convolution(f):
    args = arrays(*IMAGE)
    found = names(f, *args)
    assert "product" in found and not {"fused", "conv_general_dilated"} & set(found), found
    assert_same(f, *args)


def test_windows_of_one_element_are_a_product_with_an_epilogue():
    x, w, b = arrays((2, 9, 8, 5), (1, 1, 5, 7), (7,))
    assert names(conv_bias_relu, x, w, b) == ["product"]
    assert_same(conv_bias_relu, x, w, b)
    assert_same(lambda x, w, b: (convolve(x, w), conv_bias_relu(x, w, b)), x, w, b)


def test_a_convolution_that_others_read_is_kept():
    def f(x, w, b):
        y = convolve(x, w)
        return nn.relu(y + b), y.sum(axis=(1, 2)), y

    args = arrays(*IMAGE)
    assert "conv_general_dilated" not in names(f, *args)
    assert_same(f, *args)


def test_the_sum_lies_where_the_result_will():
    """No memory of its own: the epilogue's result takes the place of what it reads."""
    args = arrays(*IMAGE)
    padded = 4 * 2 * 11 * 10 * 5
    plan = spmd.jit(conv_bias_relu).lower(*args).compile().memory_analysis()
    assert plan.temp_size_in_bytes < padded + 4 * 2 * 9 * 8 * 7


APART = {
    "channels first": (lambda x, w, b: nn.relu(convolve(x, w, layout="NCHW") + b), (2, 5, 9, 8), 8),
    "dilated": (lambda x, w, b: lax.conv_transpose(x, w, (2, 2), "SAME") + b, IMAGE[0], 7),
    "transposed": (lambda x, w, b: convolve(x, w).transpose(0, 2, 1, 3) + b, IMAGE[0], 7),
    "a slice": (lambda x, w, b: convolve(x, w)[..., 2:4] + b, IMAGE[0], 2),
    "one feature": (lambda x, w, b: nn.relu(convolve(x, w[..., :1]) + b), IMAGE[0], 1),
}


@pytest.mark.parametrize("case", APART)
def test_convolutions_of_other_layouts_or_readers_stay_apart(case):
    f, image, count = APART[case]
    args = arrays(image, IMAGE[1], (count,))
    assert "product" not in names(f, *args)
    assert_same(f, *args)


def test_narrow_convolutions_stay_apart():
    x, w, b = (a.astype(snp.bfloat16) for a in arrays(*IMAGE))
    found = spmd.jit(conv_bias_relu)(x, w, b).astype(snp.float32)
    expected = conv_bias_relu(*(a.astype(np.float32) for a in (x, w, b)))
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.1)


def test_gradients_through_joined_convolutions_agree_with_differences():
    args = [a.astype(np.float64) for a in arrays((1, 5, 4, 2), (3, 3, 2, 3), (3,))]
    f = spmd.jit(lambda *args: snp.sum(snp.tanh(convolve(*args[:2]) + args[2])))
    with spmd.enable_x64(True):
        check_grads(f, args, order=2)


def test_joined_convolutions_in_loops_agree_with_single_operations():
    def f(x, w, b):
        def body(x, _):
            y = x + nn.relu(convolve(x, w) + b)
            return y, y.mean()

        return lax.scan(body, x, None, length=3)

    x, w, b = arrays((2, 6, 5, 4), (3, 3, 4, 4), (4,))
    assert_same(f, x, w * 0.1, b)
    assert_same(lambda x: spmd.vmap(lambda x: conv_bias_relu(x[None], w, b))(x), x)
