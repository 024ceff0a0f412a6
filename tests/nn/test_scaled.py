"""Products of block-scaled operands beside the same in NumPy, element by element."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import spmd
from spmd import nn
from spmd.errors import ArgumentError, DtypeError, ShapeError

RANDOM = np.random.default_rng(3)
NUMBERS = (((2,), (2,)), ((0,), (0,)))


def normal(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


def rounded(x, mode, whole=1.0):
    """The elements of the last dim as the format has them, a block at a time."""
    size, small = (
        (32, ml_dtypes.float8_e4m3fn) if mode == "mxfp8" else (16, ml_dtypes.float4_e2m1fn)
    )
    largest = float(ml_dtypes.finfo(small).max)
    blocks = (x / np.float32(whole)).reshape(-1, size)
    out = np.zeros_like(blocks)
    for k, block in enumerate(blocks):
        scale = np.abs(block).max() / np.float32(largest)
        if mode == "mxfp8":
            scale = np.float32(2.0 ** np.ceil(np.log2(scale))) if scale else np.float32(1)
        else:
            scale = np.float32(min(scale, 448.0).astype(ml_dtypes.float8_e4m3fn))
        if scale:
            kept = np.clip(block / scale, -largest, largest).astype(small)
            out[k] = kept.astype(np.float32) * scale
    return out.reshape(x.shape) * np.float32(whole)


def formats(mode, whole=None):
    return [nn.get_scaled_dot_general_config(mode, whole)] * 3


@pytest.mark.parametrize("mode", ["mxfp8", "nvfp4"])
def test_product_of_rounded_operands(mode):
    x, y = normal(2, 3, 64), normal(2, 4, 64)
    x[0, 0] = 0  # a block of zeros
    expected = np.einsum("bmk,bnk->bmn", rounded(x, mode), rounded(y, mode))
    f = lambda x, y: nn.scaled_dot_general(x, y, NUMBERS, configs=formats(mode))  # noqa: E731
    np.testing.assert_allclose(f(x, y), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(spmd.jit(f)(x, y), expected, rtol=1e-5, atol=1e-5)


def test_any_dims_are_contracted():
    x, y = normal(8, 3, 2, 4), normal(4, 5, 8, 2)
    numbers = ((0, 3), (2, 0)), ((2,), (3,))
    out = nn.scaled_dot_general(x, y, numbers, configs=formats("mxfp8"))
    rows_of_x = rounded(x.transpose(2, 1, 0, 3).reshape(2, 3, 32), "mxfp8")
    rows_of_y = rounded(y.transpose(3, 1, 2, 0).reshape(2, 5, 32), "mxfp8")
    np.testing.assert_allclose(out, rows_of_x @ rows_of_y.transpose(0, 2, 1), rtol=1e-5, atol=1e-5)


def test_cotangents_of_mxfp8_are_rounded_too():
    x, y, ct = normal(1, 32, 64), normal(1, 32, 64), normal(1, 32, 32)
    f = lambda x, y: nn.scaled_dot_general(x, y, NUMBERS, configs=formats("mxfp8"))  # noqa: E731
    d_x, d_y = spmd.vjp(f, x, y)[1](ct)
    across = lambda a: rounded(a.swapaxes(1, 2), "mxfp8")  # noqa: E731  # dim 1 is contracted
    np.testing.assert_allclose(
        d_x, rounded(ct, "mxfp8") @ across(y).swapaxes(1, 2), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(d_y, across(ct) @ across(x).swapaxes(1, 2), rtol=1e-5, atol=1e-5)


def test_cotangents_of_nvfp4_end_where_its_range_does():
    whole = np.array([1e-3], np.float32)
    x, y, ct = normal(1, 4, 16), normal(1, 2, 16), normal(1, 4, 2)
    x[0, 1, 2] = 3.0  # the range is 1e-3 * 6 * 448 = 2.688
    configs = formats("nvfp4", whole)
    f = lambda x: nn.scaled_dot_general(x, y, NUMBERS, configs=configs)  # noqa: E731
    expected = np.where(np.abs(x) <= 2.688, ct @ y, 0)
    assert expected[0, 1, 2] == 0
    np.testing.assert_allclose(spmd.vjp(f, x)[1](ct)[0], expected, rtol=1e-5, atol=1e-6)


def test_without_formats_nothing_is_rounded():
    x, y = normal(2, 3, 5), normal(2, 4, 5)
    plain = nn.scaled_dot_general(x, y, NUMBERS)
    np.testing.assert_allclose(plain, np.einsum("bmk,bnk->bmn", x, y), rtol=1e-5, atol=1e-5)


def test_mistakes():
    x = normal(1, 2, 48)
    with pytest.raises(ShapeError, match="size of 48 is no multiple of the 32 elements"):
        nn.scaled_dot_general(x, x, NUMBERS, configs=formats("mxfp8"))
    with pytest.raises(DtypeError, match="must be float32, bfloat16 or float16, got int8"):
        nn.scaled_dot_general(x, x, NUMBERS, np.int8, configs=formats("nvfp4"))
    with pytest.raises(ArgumentError, match=r"must hold three formats.*got 2"):
        nn.scaled_dot_general(x, x, NUMBERS, configs=formats("nvfp4")[:2])
    with pytest.raises(ArgumentError, match="mode must be 'nvfp4' or 'mxfp8', got 'int4'"):
        nn.get_scaled_dot_general_config("int4")
    with pytest.warns(DeprecationWarning, match="implementation is ignored"):
        nn.scaled_dot_general(x, x, NUMBERS, implementation="cudnn")
