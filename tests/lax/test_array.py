"""Making arrays and changing their shape: helpers, typed keys, errors."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.core.aval import ShapedArray, typeof
from spmd.core.stage import trace_to_jaxpr

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda lax: lax.iota(np.int32, 4),
        lambda lax: lax.broadcasted_iota(np.uint8, (2, 3), 0),
        lambda lax: lax.full((2, 3), 7),
        lambda lax: lax.full((2,), 7, np.float32),
        lambda lax: lax.full((), 1.5),
        lambda lax: lax.full_like(X, 2),
        lambda lax: lax.full_like(X, 2, shape=(4,)),
        lambda lax: lax.full_like(X, 2.9, np.int32),
        lambda lax: lax.broadcast(X, (4, 1)),
        lambda lax: lax.expand_dims(X, (0, 2)),
        lambda lax: lax.expand_dims(X, (-1,)),
        lambda lax: lax.squeeze(X[:, None, :1], (1, -1)),
        lambda lax: lax.collapse(X[None], 1),
        lambda lax: lax.collapse(X[None], 0, 2),
        lambda lax: lax.rev(X, (1,)),
        lambda lax: lax.transpose(X, (1, 0)),
        lambda lax: lax.reshape(X, (3, 2)),
        lambda lax: lax.reshape(X, (3, 2), (1, 0)),
        lambda lax: lax.tile(X, (2, 3)),
        lambda lax: lax.broadcast_to_rank(X, 4),
    ],
)
def test_as_jax(call):
    jax = pytest.importorskip("jax")
    wanted = call(jax.lax)
    (aval,) = trace_to_jaxpr(lambda: [call(lax)], []).out_avals
    assert (aval.shape, aval.weak_type) == (wanted.shape, wanted.aval.weak_type)
    assert aval.dtype == wanted.dtype
    np.testing.assert_array_equal(call(lax), np.asarray(wanted))


def test_broadcast_shapes():
    assert lax.broadcast_shapes((2, 1), (3,), ()) == (2, 3)
    assert lax.broadcast_shapes((0,), (1,)) == (0,)
    assert lax.broadcast_shapes() == ()
    with pytest.raises(ShapeError, match=r"\(2, 3\), \(4,\) do not broadcast: dim -1 has sizes"):
        lax.broadcast_shapes((2, 3), (4,))


@pytest.mark.parametrize("offset", [-1, 0, 2])
def test_eye_and_tri(offset):
    np.testing.assert_array_equal(lax.eye(np.float32, (3, 4), offset), np.eye(3, 4, offset))
    np.testing.assert_array_equal(lax.tri(np.int32, (3, 4), offset), np.tri(3, 4, offset))


def test_nothing_to_do_is_no_equation():
    def f(x):
        x = lax.squeeze(lax.rev(lax.expand_dims(x, ()), ()), ())
        return [lax.transpose(lax.reshape(x, (2, 3)), (0, 1))]

    assert not trace_to_jaxpr(f, [ShapedArray((2, 3), np.float32)]).eqns


def test_typed_keys_move_like_elements():
    keys = np.zeros((2, 3), dtypes.key_dtype)
    keys[dtypes.key_dtype.names[1]] = np.arange(6).reshape(2, 3)
    pairs = [
        (lax.reshape(keys, (3, 2)), keys.reshape(3, 2)),
        (lax.transpose(keys, (1, 0)), keys.T),
        (lax.rev(keys, (1,)), keys[:, ::-1]),
        (lax.broadcast(keys, (2,)), np.broadcast_to(keys, (2, 2, 3))),
        (lax.squeeze(keys[:, :1], (1,)), keys[:, 0]),
        (lax.copy(keys), keys),
        (spmd.vmap(lambda k: lax.rev(k, (0,)))(keys), keys[:, ::-1]),
        (lax.full_like(keys, 0), np.zeros((2, 3), dtypes.key_dtype)),
    ]
    for found, wanted in pairs:
        assert found.dtype == dtypes.key_dtype
        np.testing.assert_array_equal(spmd.random.key_data(found), spmd.random.key_data(wanted))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_stack_and_unstack(axis):
    parts = [X, X + 1, X * 2]
    stacked = lax.stack(parts, axis)
    np.testing.assert_array_equal(stacked, np.stack(parts, axis))
    for found, wanted in zip(lax.unstack(stacked, axis), parts, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_unstack_of_nothing():
    assert lax.unstack(np.zeros((2, 0), np.float32), 1) == ()


def test_errors():
    def traced(f):
        return trace_to_jaxpr(lambda x: [f(x)], [typeof(X)])

    with pytest.raises(ShapeError, match=r"dim 0 of float32\[2,3\] has size 2; only 1 can go"):
        traced(lambda x: lax.squeeze(x, (0,)))
    with pytest.raises(ShapeError, match=r"rev: dimensions=\(2,\)"):
        traced(lambda x: lax.rev(x, (2,)))
    with pytest.raises(ShapeError, match="fill_value must be a scalar"):
        lax.full((2,), X)
    with pytest.raises(ShapeError, match="negative size"):
        lax.full((-1,), 0.0)
    with pytest.raises(ShapeError, match="must be a sequence of integers"):
        lax.full((1.5,), 0.0)
    with pytest.raises(DtypeError, match="iota"):
        trace_to_jaxpr(lambda: [lax.iota(np.bool_, 3)], [])
    with pytest.raises(ArgumentError, match="names one twice"):
        lax.expand_dims(X, (0, 0))
    with pytest.raises(ArgumentError, match="not a range"):
        lax.collapse(X, 2, 1)
