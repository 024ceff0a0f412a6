"""Avals: one object per type, and how values get theirs."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest

from spmd.base import dtypes
from spmd.base.errors import ArgumentError
from spmd.core.aval import ShapedArray, is_arraylike, typeof


def test_equal_avals_are_one_object():
    a = ShapedArray((2, 3), np.float32)
    assert a is ShapedArray([2, np.int64(3)], "float32")
    assert a is not ShapedArray((2, 3), np.float32, weak_type=True)
    assert a is not ShapedArray((2, 3), np.float32, vma=frozenset({"i"}))
    assert a is pickle.loads(pickle.dumps(a))
    assert a.update(shape=(3,)).update(shape=(2, 3)) is a


def test_an_aval_knows_its_sizes_and_tangent_type():
    a = ShapedArray((2, 3), np.float32)
    assert (a.ndim, a.size, a.nbytes) == (2, 6, 24)
    assert ShapedArray((), np.int32).tangent().dtype == dtypes.float0
    assert ShapedArray((), np.float32, True).strip_weak() is ShapedArray((), np.float32)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "ShapedArray(bool[])"),
        (1, "ShapedArray(int32[], weak_type=True)"),
        (1.0, "ShapedArray(float32[], weak_type=True)"),
        (1j, "ShapedArray(complex64[], weak_type=True)"),
        (np.float64(1), "ShapedArray(float32[])"),
        (np.zeros((2, 0), np.int64), "ShapedArray(int32[2,0])"),
        (ml_dtypes.bfloat16(1), "ShapedArray(bfloat16[])"),
    ],
)
def test_typeof_gives_the_aval_of_a_value(value, text):
    assert repr(typeof(value)) == text


def test_avals_print_dtype_shape_and_axes():
    a = ShapedArray((2,), np.float32, vma=frozenset({"j", "i"}))
    assert a.short() == "f32[2]{V:(i,j)}"
    assert str(a) == "float32[2]{V:(i,j)}"


def test_objects_with_the_array_protocol_are_arrays():
    class Wrapped:
        def __spmd_array__(self):
            return np.zeros(3, np.float32)

    assert is_arraylike(Wrapped()) and typeof(Wrapped()).shape == (3,)


@pytest.mark.parametrize("value", ["text", [1, 2], None, object()])
def test_other_values_are_refused(value):
    assert not is_arraylike(value)
    with pytest.raises(ArgumentError, match="is not an array or a number"):
        typeof(value)
