"""`spmd.image` beside JAX's: all methods, with and without antialias, values and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
from tests.jax.compare import jax

METHODS = "nearest linear lanczos3 lanczos5 cubic cubic-pytorch area".split()
SHAPES = [
    ((7, 9), (3, 4)),
    ((5, 6), (11, 6)),
    ((1, 4), (3, 1)),
    ((2, 8, 8, 3), (2, 5, 13, 3)),
    ((4, 3), (0, 3)),
    ((9,), (9,)),
]
RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_resized_images(method, antialias):
    for shape, out in SHAPES:
        x = RANDOM.standard_normal(shape).astype(np.float32)
        weights = RANDOM.standard_normal(out).astype(np.float32)
        ours = spmd.image.resize(x, out, method, antialias)
        theirs = jax.image.resize(x, out, method, antialias)
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)

        def loss(j: Any, x: Any, out: Any = out, weights: Any = weights) -> Any:
            return (j.image.resize(x, out, method, antialias) * weights).sum()

        ours = spmd.grad(loss, 1)(spmd, x)
        theirs = jax.grad(lambda x: loss(jax, x))(x)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("method", METHODS[1:])
def test_images_scaled_and_moved(method, antialias):
    x = RANDOM.standard_normal((6, 7)).astype(np.float32)
    weights = RANDOM.standard_normal((5, 9)).astype(np.float32)
    scale, shift = np.array([0.7, 1.3], np.float32), np.array([0.2, -1.0], np.float32)

    def loss(j: Any) -> Any:
        def of(x: Any, scale: Any, shift: Any) -> Any:
            moved = j.image.scale_and_translate(x, (5, 9), (0, -1), scale, shift, method, antialias)
            return (moved * weights).sum()

        return of

    ours = spmd.value_and_grad(loss(spmd), (0, 1, 2))(x, scale, shift)
    theirs = jax.value_and_grad(loss(jax), (0, 1, 2))(x, scale, shift)
    for a, b in zip(spmd.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float16, np.complex64])
@pytest.mark.parametrize("method", ["nearest", "linear"])
def test_dtypes_of_resized_images(method, dtype):
    x = np.arange(12).reshape(3, 4).astype(dtype)
    ours = spmd.image.resize(x, (6, 2), method)
    theirs = jax.image.resize(x, (6, 2), method)
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
