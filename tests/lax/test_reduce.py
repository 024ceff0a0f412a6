"""Reductions: nothing to reduce, NaN, ties, zeros in products, and any monoid."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.core.aval import typeof
from spmd.core.stage import trace_to_jaxpr
from spmd.testing import check_grads

X = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)


@pytest.mark.parametrize(
    "f, dtype, identity",
    [
        (lax.reduce_sum, np.float32, 0),
        (lax.reduce_prod, np.int32, 1),
        (lax.reduce_max, np.float32, -np.inf),
        (lax.reduce_min, np.int8, 127),
        (lax.reduce_max, np.bool_, False),
        (lax.reduce_and, np.bool_, True),
        (lax.reduce_and, np.uint8, 255),
        (lax.reduce_or, np.int32, 0),
        (lax.reduce_xor, np.int32, 0),
    ],
)
def test_empty_gives_the_identity(f, dtype, identity):
    found = f(np.zeros((0, 2), dtype), (0,))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.full(2, identity, dtype))


@pytest.mark.parametrize("f", [lax.reduce_max, lax.reduce_min])
def test_nan_wins(f):
    x = np.array([1.0, np.nan, 3.0], np.float32)
    assert np.isnan(f(x, (0,)))
    assert lax.argmax(x, 0, np.int32) == 1
    assert lax.argmin(x, 0, np.int32) == 1


def test_argmax_takes_the_first():
    x = np.array([[3, 5, 5], [7, 7, 1]], np.int32)
    found = lax.argmax(x, 1, np.int32)
    np.testing.assert_array_equal(found, [1, 0])
    assert found.dtype == np.int32


def test_argmax_of_bfloat16_and_bool():
    assert lax.argmax(np.array([1, 3, 2], dtypes.bfloat16), 0, np.int32) == 1
    assert lax.argmin(np.array([True, False]), 0, np.int32) == 1


def test_narrow_sums_are_rounded_once():
    x = np.full(1000, 0.1, np.float16)
    assert lax.reduce_sum(x, (0,)) == np.sum(x.astype(np.float32)).astype(np.float16)


def test_tied_maxima_share_the_gradient():
    grad = spmd.grad(lambda x: lax.reduce_max(x, (0,)))(np.array([1.0, 3.0, 3.0], np.float32))
    np.testing.assert_array_equal(grad, [0, 0.5, 0.5])


@pytest.mark.parametrize("zeros", [(), (1,), (1, 3)])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_gradient_of_a_product_with_zeros(zeros, size):
    x = np.arange(1.0, size + 1).astype(np.float32)
    x[[z for z in zeros if z < size]] = 0
    grad = spmd.grad(lambda x: lax.reduce_prod(x, (0,)))(x)
    others = [np.prod(np.delete(x, k)) for k in range(size)]
    np.testing.assert_allclose(grad, others)


def test_second_derivative_of_a_product():
    x = np.array([[2.0, 3.0, 0.0], [1.0, -1.0, 4.0]])
    with spmd.config.override("enable_x64", True):
        check_grads(lambda x: lax.reduce_prod(x, (0, 1)), (x,), 2)


# ---- errors ------------------------------------------------------------------------------------


def traced(f, x):
    return trace_to_jaxpr(lambda a: [f(a)], [typeof(x)])


def test_errors():
    with pytest.raises(ShapeError, match=r"axes=\(3,\) must be different numbers in range\(3\)"):
        traced(lambda x: lax.reduce_max(x, (3,)), X)
    with pytest.raises(ShapeError, match="is empty, so no element can be named"):
        traced(lambda x: lax.argmax(x, 0, np.int32), np.zeros((0, 2), np.float32))
    with pytest.raises(DtypeError, match="must be an integer dtype"):
        traced(lambda x: lax.argmax(x, 0, np.float32), X)
    with pytest.raises(DtypeError, match="reduce_prod: accepts"):
        traced(lambda x: lax.reduce_prod(x, (0,)), np.zeros(3, np.bool_))


# ---- any monoid --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "computation, init, name",
    [(lax.add, 1.0, "reduce_sum"), (lax.max, 0.0, "reduce_max"), (lax.mul, 2.0, "reduce_prod")],
)
def test_known_monoids_become_reductions(computation, init, name):
    jaxpr = traced(lambda x: lax.reduce(x, init, computation, (1,)), X)
    assert jaxpr.eqns[0].prim.name == name
    jax = pytest.importorskip("jax")
    wanted = jax.lax.reduce(X, np.float32(init), getattr(jax.lax, computation.__name__), (1,))
    np.testing.assert_allclose(
        lax.reduce(X, np.float32(init), computation, (1,)), wanted, rtol=2e-5
    )


@pytest.mark.parametrize("dimensions", [(0,), (1, 2), (2, 0), (0, 1, 2)])
def test_any_monoid(dimensions):
    """logaddexp has no reduction of its own."""

    def combine(x, y):
        top = lax.max(x, y)
        return lax.add(top, lax.log(lax.add(lax.exp(lax.sub(x, top)), lax.exp(lax.sub(y, top)))))

    found = lax.reduce(X, np.float32(-30), combine, dimensions)
    wanted = np.log(np.exp(-30.0) + np.sum(np.exp(X), axis=tuple(sorted(dimensions))))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_reduce_of_several_operands():
    """An argmax written by hand."""

    def pick(left, right):
        (x, i), (y, j) = left, right
        first = lax.ge(x, y)
        return lax.select(first, x, y), lax.select(first, i, j)

    places = np.broadcast_to(np.arange(4, dtype=np.int32)[:, None], (3, 4, 5))
    values, found = lax.reduce((X, places), (np.float32(-np.inf), np.int32(0)), pick, (1,))
    np.testing.assert_array_equal(values, X.max(1))
    np.testing.assert_array_equal(found, X.argmax(1))


def test_reduce_of_nothing_is_the_init_value():
    found = lax.reduce(np.zeros((0, 3), np.float32), 7.0, lambda x, y: lax.add(x, y), (0,))
    np.testing.assert_array_equal(found, [7, 7, 7])


def test_reduce_errors():
    with pytest.raises(ArgumentError, match="same structure"):
        lax.reduce((X, X), 0.0, lambda x, y: x, (0,))
    with pytest.raises(ShapeError, match="init values be scalars"):
        lax.reduce(X, np.zeros(3, np.float32), lambda x, y: x, (0,))


def test_logsumexp_of_large_and_infinite():
    x = np.array([[1000.0, 1000.0], [-np.inf, -np.inf], [np.inf, 0.0]], np.float32)
    found = lax.logsumexp(x, (1,))
    np.testing.assert_allclose(found, [1000 + np.log(2), -np.inf, np.inf], rtol=1e-6)
