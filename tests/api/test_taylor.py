"""`jet` against nested forward mode to order 4, against JAX, and under other transformations."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax, nn
from spmd.errors import ArgumentError, DtypeError, RefusedError, ShapeError
from spmd.jet import jet

ORDER = 4
X = np.array([0.35, 0.72, 0.51])
M = np.array([[3.0, 0.2, -0.4], [0.1, 2.5, 0.3], [0.5, -0.2, 3.5]])
TERMS = np.random.default_rng(7).normal(size=(ORDER, 3)) * 0.3


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    with spmd.enable_x64(True):
        yield


def nested(f, order):
    """The derivatives of a function of a scalar at 0, by jvp of jvp of ..."""
    out = []
    for _ in range(order):
        f = (lambda g: lambda t: spmd.jvp(g, (t,), (1.0,))[1])(f)
        out.append(f(0.0))
    return out


def curve(x, terms):
    return lambda t: sum((v * t**k / math.factorial(k) for k, v in enumerate(terms, 1)), x)


UNARY = (
    "exp exp2 expm1 log log1p sin cos tan tanh sinh cosh sqrt rsqrt cbrt square logistic asin acos "
    "atan asinh atanh erf erfc erf_inv lgamma digamma bessel_i0e bessel_i1e abs neg sign floor"
).split()


@spmd.custom_jvp
def scaled_sine(x):
    return snp.sin(x)


# A rule that is not the function's derivative shows that it is the rule which is used.
scaled_sine.defjvp(lambda p, t: (scaled_sine(p[0]), 2 * snp.cos(p[0]) * t[0]))


@spmd.custom_jvp
def squared(x):
    return x * x


squared.defjvp(lambda p, t: (squared(p[0]), 2 * p[0] * t[0]))

PROGRAMS = {
    "integer_pow": lambda x: lax.integer_pow(x, 5) + lax.integer_pow(x, -2) + x**0,
    "pow": lambda x: x**2.5 + 2.0**x + x**x,
    "pow at zero": lambda x: snp.power(x - X, 2.0) + lax.integer_pow(x - X, 3),
    "quotients": lambda x: 1 / x + x / (1 + x) - x / 3,
    "scalar operands": lambda x: x[0] * x - x[1] + (x[2] - x) / x[1],
    "dot": lambda x: snp.dot(x, x) * x,
    "matmul": lambda x: snp.outer(x, x) @ M @ snp.outer(x, x),
    "convolve": lambda x: snp.convolve(x, x),
    "fft": lambda x: snp.fft.fft(x).real ** 2,
    "complex abs": lambda x: abs(x + 1j * x**2),
    "atan2": lambda x: snp.arctan2(x, x[::-1]),
    "gather": lambda x: x[snp.array([0, 2, 0])] * x,
    "scatter": lambda x: snp.zeros(3).at[1].add(x[0]).at[2].mul(x[1]) * snp.asarray(x).at[0].set(2),
    "sort": lambda x: snp.sort(x) ** 2,
    "maximum": lambda x: snp.maximum(x, 0.5) * x + snp.where(x > 0.6, x**2, x),
    "reductions": lambda x: snp.prod(x) * snp.max(x) + snp.cumprod(x) + snp.cumsum(x) ** 2,
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x) + nn.logsumexp(x),
    "inverse": lambda x: snp.linalg.inv(M + snp.outer(x, x)),
    "cholesky": lambda x: snp.linalg.cholesky(4 * snp.eye(3) + snp.outer(x, x)),
    "softmax": nn.softmax,
    "gelu": nn.gelu,
    "attention": lambda x: nn.dot_product_attention(*[snp.outer(x, x).reshape(1, 3, 1, 3)] * 3),
    "jit": spmd.jit(lambda x: snp.tanh(x) * x),
    "checkpoint": spmd.checkpoint(lambda x: snp.sin(snp.sin(x))),
    "custom_jvp": lambda x: squared(snp.sin(x)),
    "grad inside": lambda x: spmd.grad(lambda y: snp.sum(snp.sin(y) ** 3))(x),
    "vmap inside": lambda x: spmd.vmap(lambda a: snp.sin(a) * x)(x),
    "scan": lambda x: lax.scan(lambda c, y: (snp.sin(c) * y + x[0], c * y), 1.0, x),
    "fori": lambda x: lax.fori_loop(0, 3, lambda i, c: c * snp.sin(x) + i, snp.ones(3)),
    "while": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x)),
    "cond": lambda x: lax.cond(x[0] > 0, lambda x: x**3, lambda x: snp.ones(3), x),
    "switch": lambda x: lax.switch(1, [lambda x: x, lambda x: x**2, snp.zeros_like], x),
    "associative_scan": lambda x: lax.associative_scan(snp.multiply, x),
}


def agree(f, x=X, terms=TERMS, order=ORDER):
    out, found = jet(f, (x,), (list(terms[:order]),))
    along = curve(x, terms[:order])
    want = nested(lambda t: f(along(t)), order)
    for a, b in zip(spmd.tree.leaves(out), spmd.tree.leaves(f(x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    for k in range(order):
        mine = spmd.tree.map(lambda _, terms, k=k: terms[k], out, found)
        for a, b in zip(spmd.tree.leaves(mine), spmd.tree.leaves(want[k]), strict=True):
            if b.dtype != spmd.float0:
                message = f"order {k + 1}"
                np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8, err_msg=message)


@pytest.mark.parametrize("name", UNARY)
def test_a_function_of_one_array_is_nested_forward_mode(name):
    agree(getattr(lax, name))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_nested_forward_mode(name):
    agree(PROGRAMS[name])


def test_a_custom_jvp_is_used_by_its_rule_at_every_order():
    _, (terms,) = jet(lambda x: (scaled_sine(x),), (0.4,), ((1.0, 0.0, 0.0),))
    np.testing.assert_allclose(terms, [2 * np.cos(0.4), -2 * np.sin(0.4), -2 * np.cos(0.4)])


def test_a_custom_vjp_is_taken_by_its_body():
    @spmd.custom_vjp
    def f(x):
        return x**3

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (3 * x**2 * ct,))
    _, terms = jet(f, (2.0,), ((1.0, 0.0, 0.0),))
    np.testing.assert_allclose(terms, [12.0, 12.0, 6.0])


def test_jet_takes_several_arguments_and_constant_outputs():
    out, terms = jet(lambda x, y: {"p": x * y, "c": 3.0}, (2.0, 5.0), ((1.0, 0.5), (2.0, 0.0)))
    assert out["p"] == 10 and out["c"] == 3
    np.testing.assert_allclose(terms["p"], [2 * 2 + 5, 2 * 1 * 2 + 0.5 * 5])
    np.testing.assert_allclose(terms["c"], [0, 0])


def test_without_factorials_terms_are_coefficients_of_polynomials():
    # (1 + t + t^2)^2 = 1 + 2 t + 3 t^2 + 2 t^3 + t^4
    out, terms = jet(lambda x: x * x, (1.0,), ((1.0, 1.0, 0.0, 0.0),), factorial_scaled=False)
    np.testing.assert_allclose([out, *terms], [1, 2, 3, 2, 1], rtol=1e-6)


def test_jet_works_under_jit_vmap_and_grad():
    def second(x):
        return jet(lambda y: snp.sin(y) * y, (x,), ((1.0, 0.0),))[1][1]

    exact = lambda x: 2 * np.cos(x) - x * np.sin(x)  # noqa: E731
    slope = lambda x: -3 * np.sin(x) - x * np.cos(x)  # noqa: E731
    np.testing.assert_allclose(spmd.jit(second)(0.3), exact(0.3))
    np.testing.assert_allclose(spmd.vmap(second)(X), exact(X))
    np.testing.assert_allclose(spmd.vmap(spmd.grad(second))(X), slope(X))
    np.testing.assert_allclose(spmd.jit(spmd.grad(second))(0.3), slope(0.3))


def test_jet_passes_through_shard_map_and_its_collectives():
    mesh = spmd.make_mesh((4,), ("i",))
    x = np.linspace(0.2, 0.9, 4)

    def body(x):
        c, _ = lax.scan(lambda c, _: (c * snp.sin(x), None), 0 * x + 1, None, length=2)
        return c * lax.psum(x, "i")

    f = spmd.shard_map(body, mesh=mesh, in_specs=spmd.P("i"), out_specs=spmd.P("i"))
    terms = np.random.default_rng(3).normal(size=(3, 4))
    agree(f, x, terms, order=3)
    inside = spmd.shard_map(
        lambda x: jet(body, (x,), ([x, 0 * x],))[1][1],
        mesh=mesh,
        in_specs=spmd.P("i"),
        out_specs=spmd.P("i"),
    )
    _, (_, want) = jet(f, (x,), ([x, 0 * x],))
    np.testing.assert_allclose(inside(x), want)


def test_integer_results_have_zero_terms_as_in_jax():
    out, terms = jet(lambda x: (x > 0.5, snp.argmax(x)), (X,), (list(TERMS[:2]),))
    assert out[0].dtype == bool and int(out[1]) == 1
    for t in spmd.tree.leaves(terms):
        np.testing.assert_array_equal(t, np.zeros_like(t))


@pytest.mark.parametrize("name", ["sin", "exp", "tanh", "log", "sqrt", "logistic", "expm1"])
def test_jet_gives_the_numbers_of_jax(name):
    jax = pytest.importorskip("jax")
    from jax.experimental import jet as jax_jet

    with jax.enable_x64(True):
        want, want_terms = jax_jet.jet(getattr(jax.lax, name), (X,), (list(TERMS),))
        plain = jax_jet.jet(getattr(jax.lax, name), (X,), (list(TERMS),), factorial_scaled=False)[1]
    out, terms = jet(getattr(lax, name), (X,), (list(TERMS),))
    np.testing.assert_allclose(out, want, rtol=1e-9)
    np.testing.assert_allclose(terms, want_terms, rtol=1e-5)  # JAX's factorials are exp(lgamma)
    ours = jet(getattr(lax, name), (X,), (list(TERMS),), factorial_scaled=False)[1]
    np.testing.assert_allclose(ours, plain, rtol=1e-7, atol=1e-12)


def test_mistakes_are_named():
    with pytest.raises(ArgumentError, match=r"equally many terms, got \[1, 2\]"):
        jet(lambda x, y: x, (1.0, 2.0), ((1.0,), (1.0, 2.0)))
    with pytest.raises(ArgumentError, match="primals has 1 arguments and series has 2"):
        jet(lambda x: x, (1.0,), ((1.0,), (1.0,)))
    with pytest.raises(ArgumentError, match="argument 0 must be an array, got a pytree"):
        jet(lambda x: x, ([1.0],), ([1.0],))
    with pytest.raises(DtypeError, match="argument x is ~int64"):
        jet(lambda x: x, (1,), ((1,),))
    with pytest.raises(ShapeError, match=r"term 2 of argument x must have its shape \(3,\)"):
        jet(lambda x: x, (X,), ((X, 1.0),))
    with pytest.raises(RefusedError, match="a callback has no derivative"):
        jet(lambda x: spmd.pure_callback(np.sin, x, x), (X,), ((X,),))
