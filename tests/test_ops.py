"""Segment reductions against loops in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import errors, ops
from spmd.testing import check_grads

_data = np.random.default_rng(7).normal(size=(9, 2)).astype(np.float32)
_ids = np.array([0, 3, 1, 3, -1, 9, 2, 0, 0])

_CASES = {
    "segment_sum": (np.sum, 0.0),
    "segment_prod": (np.prod, 1.0),
    "segment_max": (np.max, -np.inf),
    "segment_min": (np.min, np.inf),
}


def _expected(name: str, count: int) -> np.ndarray:
    fold, empty = _CASES[name]
    rows = [_data[_ids == k] for k in range(count)]
    return np.array([fold(r, 0) if len(r) else np.full(2, empty) for r in rows], np.float32)


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("bucket", [None, 2])
def test_segments_are_reduced(name, bucket):
    f = getattr(ops, name)
    np.testing.assert_allclose(f(_data, _ids, bucket_size=bucket), _expected(name, 10), rtol=1e-6)
    g = spmd.jit(lambda x, i: f(x, i, num_segments=5, bucket_size=bucket))
    np.testing.assert_allclose(g(_data, _ids), _expected(name, 5), rtol=1e-6)


@pytest.mark.parametrize("name", ["segment_sum", "segment_max", "segment_min"])
def test_gradients_of_segments(name):
    check_grads(lambda x: getattr(ops, name)(x, _ids % 4, 4), (_data,), order=2)


def test_integers_have_their_own_limits():
    x = np.array([3, 4], np.int32)
    found = ops.segment_max(x, np.array([0, 0]), 2)
    np.testing.assert_array_equal(found, [4, np.iinfo(np.int32).min])
    assert ops.segment_sum(x, np.array([1, 1])).dtype == np.int32


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        (2.0, [0, 1, 0]),
        ([[1.0, 2.0]], [0, 1, 0]),
        ([1.0, 2.0, 4.0], [[0, 1, 1], [2, 0, 0]]),
        ([1.0, 2.0], [[0, 1], [1, 2]]),
        (3.0, 1),
    ],
)
def test_rows_are_broadcast_to_the_numbers(data, ids, from_jax):
    def ask():
        import jax

        given = np.array(data, np.float32), np.array(ids)
        return jax.ops.segment_sum(*given, num_segments=3).tolist()

    found = ops.segment_sum(np.array(data, np.float32), np.array(ids), num_segments=3)
    assert found.tolist() == from_jax(ask)


def test_segments_refuse_what_does_not_fit():
    with pytest.raises(errors.DtypeError, match="integers"):
        ops.segment_sum(_data, _data[:, 0])
    with pytest.raises(TypeError, match="integer"):
        ops.segment_sum(_data, _ids, num_segments=4.0)
    with pytest.raises(errors.ShapeError, match="each row"):
        ops.segment_sum(_data, _ids[:3])
    with pytest.raises(errors.ShapeError, match="bucket_size= takes a vector"):
        ops.segment_sum(_data[:2, 0], np.array([[0, 1], [1, 1]]), bucket_size=1)
    with pytest.raises(errors.ConcretizationError, match="num_segments"):
        spmd.jit(lambda i: ops.segment_sum(_data, i))(_ids)
    with pytest.raises(errors.ArgumentError, match="bucket_size"):
        ops.segment_sum(_data, _ids, bucket_size=0)
