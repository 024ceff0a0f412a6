"""Gathers and convolutions of sparse arrays beside the same of dense ones."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.errors import RefusedError, ShapeError
from spmd.experimental import sparse
from spmd.lax import GatherDimensionNumbers

RANDOM = np.random.default_rng(0)


def some(*shape):
    return (RANDOM.normal(size=shape) * (RANDOM.random(shape) < 0.5)).astype(np.float32)


CONVOLUTIONS = [
    ((1, 1, 7), (1, 1, 3), {"window_strides": (1,), "padding": "SAME"}),
    ((1, 1, 7), (1, 1, 3), {"window_strides": (2,), "padding": [(1, 2)], "lhs_dilation": (2,),
                            "rhs_dilation": (2,)}),
    ((1, 1, 7, 6), (1, 1, 3, 2), {"window_strides": (1, 2), "padding": "VALID"}),
    ((1, 7, 6, 1), (3, 2, 1, 1), {"window_strides": (2, 1), "padding": [(1, 1), (0, 2)],
                                  "rhs_dilation": (1, 2),
                                  "dimension_numbers": ("NHWC", "HWIO", "NHWC")}),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "window", "options"), CONVOLUTIONS)
def test_convolutions(shape, window, options):
    x, w = some(*shape), some(*window)
    expected = lax.conv_general_dilated(x, w, **options)
    padded = sparse.BCOO.fromdense(w, nse=w.size + 2)
    pairs = [
        (sparse.BCOO.fromdense(x, n_batch=1), w),
        (x, padded),
        (sparse.BCOO.fromdense(x), padded),
    ]
    for a, b in pairs:
        found = sparse.bcoo_conv_general_dilated(a, b, **options)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found.todense(), expected, atol=1e-5)
    by_function = sparse.sparsify(lambda a, b: lax.conv_general_dilated(a, b, **options))
    np.testing.assert_allclose(spmd.jit(by_function)(*pairs[1]).todense(), expected, atol=1e-5)


GATHERS = [
    (GatherDimensionNumbers((1, 2), (0,), (0,)), (1, 4, 3), np.array([[1], [3]])),
    (GatherDimensionNumbers((0, 1), (0,), (0,)), (1, 4, 3), np.array([[1], [3]])),
    (GatherDimensionNumbers((0, 1, 2), (), (0,)), (2, 4, 3), np.array([1])),
    (GatherDimensionNumbers((2,), (0, 1), (0, 1)), (1, 1, 3), RANDOM.integers(0, 4, (2, 3, 2))),
    (GatherDimensionNumbers((1,), (0, 1), (1, 0)), (1, 1, 3), RANDOM.integers(0, 4, (2, 2))),
]


@pytest.mark.parametrize("n_batch", [0, 1])
@pytest.mark.parametrize(("numbers", "sizes", "at"), GATHERS)
def test_gathers(numbers, sizes, at, n_batch):
    x = some(5, 4, 3)
    expected = lax.gather(x, at, numbers, sizes)
    found = sparse.bcoo_gather(sparse.BCOO.fromdense(x, n_batch=n_batch), at, numbers, sizes)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.todense(), expected)


def test_indices_of_a_sparsified_function():
    x, at = some(5, 4, 3), np.array([0, 2])
    for f in (lambda m: m[at], lambda m: m[:, at], lambda m: snp.take(m, at, axis=2)):
        found = sparse.sparsify(f)(sparse.BCOO.fromdense(x)).todense()
        np.testing.assert_array_equal(found, f(snp.asarray(x)))


def test_mistakes():
    m = sparse.BCOO.fromdense(some(2, 1, 4))
    with pytest.raises(ShapeError, match=r"got shape \(2, 1, 4\), of which dims \(0, 1\)"):
        sparse.bcoo_conv_general_dilated(m, m, window_strides=(1,), padding="SAME")
    numbers = GatherDimensionNumbers((1, 2), (0,), (0,))
    with pytest.raises(RefusedError, match="mode='clip' is not supported"):
        sparse.bcoo_gather(m, np.array([[0]]), numbers, (1, 1, 4), mode="clip")
