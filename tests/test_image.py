"""`spmd.image`: what resizing means, its batching and errors. Values: `tests/jax/test_image.py`."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import errors
from spmd import numpy as snp
from spmd.image import ResizeMethod, resize, scale_and_translate

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_area_averages_what_a_pixel_covers():
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_allclose(resize(x, (2, 3), "area"), x.reshape(2, 2, 3, 2).mean((1, 3)))


@pytest.mark.parametrize("method", list(ResizeMethod))
def test_an_image_of_the_same_size_stays(method):
    np.testing.assert_array_equal(resize(X, X.shape, method), X)


@pytest.mark.parametrize("method", ["linear", "cubic", "lanczos3", "area", "cubic-pytorch"])
def test_a_constant_stays_constant(method):
    for antialias in (True, False):
        out = resize(np.full((5, 7), 3, np.float32), (4, 11), method, antialias)
        np.testing.assert_allclose(out, np.full((4, 11), 3), rtol=1e-6)


def test_images_in_a_batch_under_jit():
    xs = np.stack([X, X + 1, 2 * X])
    mapped = spmd.jit(spmd.vmap(lambda x: resize(x, (6, 2), "cubic")))(xs)
    np.testing.assert_allclose(mapped, resize(xs, (3, 6, 2), "cubic"), rtol=1e-5, atol=1e-6)


def test_images_split_over_devices_stay_split():
    mesh = spmd.make_mesh((4,), ("i",), (spmd.sharding.AxisType.Auto,))
    x = spmd.device_put(np.ones((4, 8, 8), np.float32), spmd.NamedSharding(mesh, spmd.P("i")))
    out = resize(x, (4, 4, 4), "linear")
    assert out.sharding.is_equivalent_to(x.sharding, 3)
    np.testing.assert_allclose(out, np.ones((4, 4, 4)))


def test_names_of_methods():
    assert ResizeMethod.from_string("trilinear") is ResizeMethod.LINEAR
    assert ResizeMethod.from_string("bicubic-pytorch") is ResizeMethod.CUBIC_PYTORCH
    with pytest.raises(errors.ArgumentError, match=r"unknown resize method 'best'.*nearest"):
        resize(X, (2, 2), "best")
    with pytest.raises(errors.ArgumentError, match="must be a ResizeMethod or its name, got 1"):
        resize(X, (2, 2), 1)  # type: ignore[arg-type]


def test_shapes_that_do_not_fit():
    with pytest.raises(errors.ShapeError, match=r"shape=\(2,\) must have a size for each of the 2"):
        resize(X, (2,), "linear")
    with pytest.raises(errors.ArgumentError, match="sequence of sizes, got 3"):
        resize(X, 3, "linear")  # type: ignore[arg-type]
    one = snp.ones(1)
    with pytest.raises(errors.ShapeError, match=r"scale is float32\[1\], and spatial_dims has 2"):
        scale_and_translate(X, (3, 4), (0, 1), one, one, "linear")
    with pytest.raises(errors.DimensionError, match="spatial_dims has 2"):
        scale_and_translate(X, (3, 4), (2,), one, one, "linear")
    with pytest.raises(errors.ArgumentError, match="has no NEAREST"):
        scale_and_translate(X, (3, 4), (0,), one, one, "nearest")
