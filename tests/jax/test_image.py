"""`spmd.image` beside JAX's: all methods, with and without antialias, values and gradients."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import spmd

METHODS = "nearest linear lanczos3 lanczos5 cubic cubic-pytorch area".split()
SHAPES = [
    ((7, 9), (3, 4)),
    ((5, 6), (11, 6)),
    ((1, 4), (3, 1)),
    ((2, 8, 8, 3), (2, 5, 13, 3)),
    ((4, 3), (0, 3)),
    ((9,), (9,)),
]


def jax() -> Any:
    """The library, where it has to be asked."""
    return importlib.import_module("jax")


def resized(j: Any, method: str, antialias: bool) -> list[Any]:
    """Images of all shapes, each with the gradient of a weighted sum of it."""
    random, found = np.random.default_rng(0), []
    for shape, out in SHAPES:
        x = random.standard_normal(shape).astype(np.float32)
        weights = random.standard_normal(out).astype(np.float32)

        def resize(x: Any, out: Any = out) -> Any:
            return j.image.resize(x, out, method, antialias)

        def loss(x: Any, resize: Any = resize, weights: Any = weights) -> Any:
            return (resize(x) * weights).sum()

        found += [resize(x), j.grad(loss)(x)]
    return found


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_resized_images(method, antialias, from_jax):
    found = resized(spmd, method, antialias)
    wanted = from_jax(lambda: resized(jax(), method, antialias))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def moved(j: Any, method: str, antialias: bool) -> list[Any]:
    """A scaled and moved image, weighted and summed, and the gradients of that."""
    random = np.random.default_rng(0)
    x = random.standard_normal((6, 7)).astype(np.float32)
    weights = random.standard_normal((5, 9)).astype(np.float32)
    scale, shift = np.array([0.7, 1.3], np.float32), np.array([0.2, -1.0], np.float32)

    def loss(x: Any, scale: Any, shift: Any) -> Any:
        made = j.image.scale_and_translate(x, (5, 9), (0, -1), scale, shift, method, antialias)
        return (made * weights).sum()

    return j.tree.leaves(j.value_and_grad(loss, (0, 1, 2))(x, scale, shift))


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("method", METHODS[1:])
def test_images_scaled_and_moved(method, antialias, from_jax):
    wanted = from_jax(lambda: moved(jax(), method, antialias))
    for ours, theirs in zip(moved(spmd, method, antialias), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float16, np.complex64])
@pytest.mark.parametrize("method", ["nearest", "linear"])
def test_dtypes_of_resized_images(method, dtype, from_jax):
    x = np.arange(12).reshape(3, 4).astype(dtype)
    ours = spmd.image.resize(x, (6, 2), method)
    theirs = from_jax(lambda: jax().image.resize(x, (6, 2), method))
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
