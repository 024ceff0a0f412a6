"""Copies of NumPy arrays: their values, and where they lie."""

import ml_dtypes
import numpy as np
import pytest

import spmd
from spmd.base.aligned_copy import aligned_copy

DTYPES = [np.dtype(t) for t in (np.float32, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (0, 4000), (63, 65), (2**21 + 1,)], ids=str)
def test_values_dtypes_and_places(dtype, shape):
    rng = np.random.default_rng(1)
    value = (rng.integers(-3, 4, size=shape) * 1.0).astype(np.float32)
    copy = aligned_copy(value, dtype)
    np.testing.assert_array_equal(copy, value.astype(dtype))
    assert copy.dtype == dtype
    assert copy.shape == shape
    assert copy.flags.c_contiguous
    assert not np.shares_memory(copy, value)
    if copy.nbytes >= 4096:
        assert copy.ctypes.data % 64 == 0
    if copy.nbytes >= 2**21:
        assert copy.ctypes.data % 2**21 == 0


def test_any_strides():
    value = np.arange(24000.0).reshape(20, 30, 40)
    for view in (value.T, value[::2, ::-1], np.broadcast_to(value[0], (5, 30, 40))):
        np.testing.assert_array_equal(aligned_copy(view, np.dtype("f4")), view)


def test_arrays_are_copies():
    value = np.ones((100, 100), np.float32)
    x = spmd.device_put(value)
    value[...] = 7
    assert np.asarray(x).max() == 1
    assert x.ptr % 64 == 0
