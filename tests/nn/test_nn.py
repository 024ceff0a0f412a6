"""Neural-network functions against JAX: values, types, gradients at kinks, initial weights."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import nn, random
from spmd.base.errors import DimensionError, SpmdError
from spmd.testing import check_grads
from tests.numpy.oracle import Case, assert_agrees, jax, values

jnn = pytest.importorskip("jax.nn")

X = values(3, 4)
# The kinks of relu, relu6 and hard_tanh among ordinary numbers.
KINKS = np.array([-4, -3, -1, -0.5, 0, 0.5, 1, 3, 6, 7], np.float32)
LARGE = np.array([-1e4, -80, 0, 80, 1e4], np.float32)
MASK = X > -1
ELEMENTWISE = """relu relu6 leaky_relu hard_tanh hard_sigmoid hard_silu sparse_plus sparse_sigmoid
sigmoid softplus log_sigmoid silu mish soft_sign squareplus elu celu selu gelu identity""".split()


def case(name, f, *args, **options):
    """A case whose function is called with `spmd.nn` or `jax.nn`."""

    def by_numpy_module(xp, *xs):
        return f(nn if xp is snp else jnn, *xs)

    return Case(name, by_numpy_module, args, **{"rtol": 1e-5, "atol": 1e-6, **options})


ACTIVATIONS = [
    *[case(n, lambda m, x, n=n: getattr(m, n)(x), KINKS) for n in ELEMENTWISE],
    *[case(f"{n}-large", lambda m, x, n=n: getattr(m, n)(x), LARGE) for n in ELEMENTWISE],
    *[case(f"{n}-f16", lambda m, x, n=n: getattr(m, n)(x), KINKS.astype(np.float16), rtol=1e-2,
           atol=1e-3) for n in ELEMENTWISE],
    case("gelu-exact", lambda m, x: m.gelu(x, approximate=False), KINKS),
    case("elu-alpha", lambda m, x: m.elu(x, 2.0), KINKS),
    case("leaky-slope", lambda m, x: m.leaky_relu(x, 0.3), KINKS),
    case("glu", lambda m, x: [m.glu(x), m.glu(x[:2], 0)], X),
    case("log1mexp", lambda m, x: m.log1mexp(x), np.array([0.01, 0.5, 3.0], np.float32)),
]  # fmt: skip

FUNCTIONS = [
    case("softmax", lambda m, x: [m.softmax(x), m.softmax(x, 0), m.softmax(x, (0, 1))], X),
    case("softmax-large", lambda m, x: m.softmax(x), LARGE),
    case("softmax-where", lambda m, x, w: m.softmax(x, where=w), X, MASK),
    case("log_softmax", lambda m, x: [m.log_softmax(x), m.log_softmax(x, 0)], X),
    case("log_softmax-large", lambda m, x: m.log_softmax(x), LARGE),
    case("log_softmax-where", lambda m, x, w: m.log_softmax(x, where=w), X, MASK),
    case("logsumexp", lambda m, x: [m.logsumexp(x), m.logsumexp(x, 0, keepdims=True)], X),
    case("logsumexp-inf", lambda m, x: m.logsumexp(x), np.full(3, -np.inf, np.float32)),
    case("logsumexp-b", lambda m, x, b: m.logsumexp(x, 1, b=b, return_sign=True), X,
         values(3, 4)[::-1].copy()),
    case("logsumexp-where", lambda m, x, w: m.logsumexp(x, 1, where=w), X, MASK),
    case("logmeanexp", lambda m, x: m.logmeanexp(x, 1), X),
    case("one_hot", lambda m, i: [m.one_hot(i, 4), m.one_hot(i, 3, axis=0, dtype=np.int32)],
         np.array([[0, 2], [9, -1]])),
    case("standardize", lambda m, x: [m.standardize(x), m.standardize(x, 0, epsilon=0.1)], X,
         rtol=1e-4, atol=1e-5),
    case("standardize-where", lambda m, x, w: m.standardize(x, where=w), X, MASK, rtol=1e-4,
         atol=1e-5),
    case("standardize-stable", lambda m, x: m.standardize(x, algorithm="stable"), X, rtol=1e-4),
]  # fmt: skip

Q, K = values(2, 5, 4, 8), values(2, 6, 2, 8)
ATTENTION = [
    case("attention", lambda m, q, k: m.dot_product_attention(q, k, k * 2), Q, K),
    case("attention-causal", lambda m, q, k: m.dot_product_attention(q, k, k, is_causal=True),
         Q, K),
    case("attention-window",
         lambda m, q, k: m.dot_product_attention(q, k, k, local_window_size=(2, 1)), Q, K),
    case("attention-lengths", lambda m, q, k: m.dot_product_attention(
        q, k, k, query_seq_lengths=np.array([3, 5], np.int32),
        key_value_seq_lengths=np.array([6, 2], np.int32)), Q, K),
    case("attention-bias-mask", lambda m, q, k, b: m.dot_product_attention(
        q, k, k, bias=b, mask=b > -1, scale=0.3), Q, K, values(2, 4, 5, 6)),
    case("attention-one", lambda m, q, k: m.dot_product_attention(q, k, k), Q[0], Q[0]),
]  # fmt: skip


@pytest.mark.parametrize(
    "cases", [ACTIVATIONS, FUNCTIONS, ATTENTION], ids=["activations", "functions", "attention"]
)
def test_like_jax(cases):
    assert_agrees(*cases)


def test_gradients_at_kinks_are_jax_s():
    def slopes(transform, m):
        return {n: transform(getattr(m, n)) for n in ELEMENTWISE}

    ours = slopes(lambda f: spmd.vmap(spmd.grad(f))(KINKS), nn)
    theirs = jax.jit(lambda x: slopes(lambda f: jax.vmap(jax.grad(f))(x), jnn))(KINKS)
    for name, slope in ours.items():
        # The slope of gelu at -4 is a difference of numbers near 1: ten roundings of float32.
        np.testing.assert_allclose(slope, theirs[name], rtol=1e-5, atol=1.2e-6, err_msg=name)


@pytest.mark.parametrize("f", [
    lambda x: snp.sum(nn.softmax(x) * X),
    lambda x: snp.sum(nn.softmax(x, where=MASK) * X),
    lambda x: snp.sum(nn.log_softmax(x) * X),
    lambda x: nn.logsumexp(x),
    lambda x: snp.sum(nn.standardize(x) * X),
    lambda x: snp.sum(nn.gelu(x) + nn.silu(x) + nn.softplus(x)),
    lambda x: snp.sum(nn.glu(x)),
], ids=range(7))  # fmt: skip
def test_gradients(f):
    check_grads(f, (X,), order=2, atol=3e-2, rtol=3e-2, eps=1e-2)


def test_attention_is_its_formula():
    q, k, v = values(5, 1, 3), values(4, 1, 3), values(4, 1, 3)[::-1]
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(3)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    wanted = np.einsum("nts,snh->tnh", weights, v)
    np.testing.assert_allclose(nn.dot_product_attention(q, k, v), wanted, rtol=1e-5)


# ---- initializers ------------------------------------------------------------------------------

FAMILIES = """glorot_uniform glorot_normal lecun_uniform lecun_normal he_uniform he_normal
xavier_uniform xavier_normal kaiming_uniform kaiming_normal""".split()
INITIALIZERS = {
    **{n: lambda m, n=n: getattr(m, n)() for n in FAMILIES},
    "zeros": lambda m: m.zeros,
    "ones": lambda m: m.ones,
    "constant": lambda m: m.constant(2.5),
    "uniform": lambda m: m.uniform(0.3),
    "normal": lambda m: m.normal(0.3),
    "truncated_normal": lambda m: m.truncated_normal(0.3),
    "fan_out": lambda m: m.variance_scaling(2.0, "fan_out", "normal"),
    "fan_geo_avg": lambda m: m.variance_scaling(2.0, "fan_geo_avg", "uniform", batch_axis=0),
}


def test_initial_weights_are_jax_s():
    shape = (3, 4, 5)
    theirs = jax.jit(
        lambda key: {n: make(jnn.initializers)(key, shape) for n, make in INITIALIZERS.items()}
    )(jax.random.key(3))
    for name, make in INITIALIZERS.items():
        ours = make(nn.initializers)(random.key(3), shape)
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs[name], rtol=2e-6, atol=1e-6, err_msg=name)


def test_orthogonal_weights():
    cases = [
        (lambda m: m.orthogonal(2.0), (3, 4, 5)),
        (lambda m: m.orthogonal(column_axis=0), (5, 4)),
        (lambda m: m.orthogonal(), (0, 4)),
        (lambda m: m.delta_orthogonal(), (4, 2, 3)),
        (lambda m: m.delta_orthogonal(0.5), (3, 2, 2, 3)),
        (lambda m: m.delta_orthogonal(), (3, 2, 1, 2, 3)),
    ]
    theirs = jax.jit(lambda key: [make(jnn.initializers)(key, s) for make, s in cases])
    for (make, shape), expected in zip(cases, theirs(jax.random.key(3)), strict=True):
        ours = make(nn.initializers)(random.key(3), shape)
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6)
    for make, text in (
        (nn.initializers.orthogonal, "at least 2 dims, got shape (3,)"),
        (nn.initializers.delta_orthogonal, "kernels have 3, 4 or 5 dims, got shape (3,)"),
    ):
        with pytest.raises(SpmdError) as caught:
            make()(random.key(0), (3,))
        assert text in str(caught.value)
    with pytest.raises(SpmdError, match=r"4 inputs .dim -2. are more than the 3 outputs"):
        nn.initializers.delta_orthogonal()(random.key(0), (3, 4, 3))


def test_complex_initial_weights():
    for name in ("glorot_uniform", "glorot_normal", "lecun_normal"):
        ours = getattr(nn.initializers, name)()(random.key(3), (6, 5), np.complex64)
        theirs = getattr(jnn.initializers, name)()(jax.random.key(3), (6, 5), np.complex64)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: nn.relu([1.0]), "list"),
        (lambda: nn.glu(np.ones(3)), "must have an even size"),
        (lambda: nn.standardize(X, algorithm="slow"), "'fast' or 'stable'"),
        (lambda: nn.initializers.he_normal()(random.key(0), (3,)), "give in_axis"),
        (lambda: nn.initializers.variance_scaling(1.0, "fan", "normal"), "unknown mode='fan'"),
        (lambda: nn.dot_product_attention(Q, K, Q), "B and H must agree"),
    ],
)
def test_errors_name_what_is_wrong(call, text):
    with pytest.raises(SpmdError) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8, np.bool_])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_integers(name, dtype):
    x = np.array([[3, 0, 1], [100, 100, 2]]).astype(dtype)
    mask = np.array([True, False, True])
    for options in ({}, {"axis": 0}, {"where": mask}):
        found = getattr(spmd.nn, name)(x, **options)
        wanted = getattr(jax.nn, name)(x.astype(np.float32), **options)
        assert found.dtype == np.float32
        # JAX flushes subnormal numbers to zero.
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("function", [nn.softmax, nn.log_softmax, nn.logsumexp, nn.standardize])
@pytest.mark.parametrize("axis", [2, (0, -3)])
def test_a_dim_out_of_range_names_the_function_that_was_called(function, axis):
    with pytest.raises(DimensionError, match=rf"{function.__name__}: axis (2|-3) is out of bounds"):
        function(np.ones((2, 3), np.float32), axis=axis)
