"""The smoke test: one breath through every layer, under ten seconds; also a pre-commit hook."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax


def loss(w, x):
    """Something with a product, a curve and a sum."""
    return snp.sum(snp.tanh(x @ w) ** 2)


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(3, 2)).astype("float32"), rng.normal(size=(8, 3)).astype("float32")


def test_eager_is_numpy(data):
    w, x = data
    np.testing.assert_allclose(loss(w, x), np.sum(np.tanh(x @ w) ** 2), rtol=1e-5)


def test_jit_is_eager(data):
    w, x = data
    np.testing.assert_allclose(spmd.jit(loss)(w, x), loss(w, x), rtol=1e-5)


def test_grad_is_the_derivative(data):
    w, x = data
    t = np.tanh(x @ w)
    np.testing.assert_allclose(
        spmd.jit(spmd.grad(loss))(w, x), x.T @ (2 * t * (1 - t**2)), rtol=1e-4, atol=1e-5
    )


def test_vmap_is_a_loop(data):
    w, x = data
    each = spmd.jit(spmd.vmap(spmd.grad(loss), in_axes=(None, 0)))(w, x)
    loop = np.stack([spmd.grad(loss)(w, row) for row in x])
    np.testing.assert_allclose(each, loop, rtol=1e-4, atol=1e-5)


def test_pmap_averages_over_devices(data):
    w, x = data
    devices = spmd.local_device_count()
    assert devices >= 4
    shards = x.reshape(4, 2, 3)
    step = spmd.pmap(
        lambda w, x: lax.pmean(spmd.grad(loss)(w, x), "i"), axis_name="i", in_axes=(None, 0)
    )
    expected = spmd.grad(loss)(w, x) / 4
    for got in step(w, shards):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
