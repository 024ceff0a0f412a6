"""Arrays over several devices: their shards, their values, and what computes with them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.errors import DeletedError, ShardingError
from spmd.sharding import NamedSharding, PmapSharding, SingleDeviceSharding
from spmd.sharding import PartitionSpec as P

X = np.arange(16, dtype=np.float32).reshape(8, 2)
SPECS = [P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b")), P(("b", "a")), P("a", None)]
EACH = pytest.mark.parametrize("spec", SPECS, ids=str)


def sharding_of(spec: P) -> NamedSharding:
    mesh = spmd.make_mesh((2, 2), ("a", "b"), spmd.sharding.AxisType.Auto)
    return NamedSharding(mesh, spec)


@EACH
def test_shards_and_values(spec: P):
    x = spmd.device_put(X, sharding_of(spec))
    assert x.shape == X.shape and x.dtype == X.dtype and len(x) == 8
    assert x.sharding == sharding_of(spec)
    assert x.devices() == set(spmd.devices()[:4])
    assert x.is_fully_addressable
    assert x.is_fully_replicated == (spec == P())
    np.testing.assert_array_equal(np.asarray(x), X)
    shards = x.addressable_shards
    assert [s.device for s in shards] == spmd.devices()[:4]
    for shard in shards:
        np.testing.assert_array_equal(shard.data, X[shard.index])
        assert shard.data.sharding == SingleDeviceSharding(shard.device)
        assert shard.data.shape == x.sharding.shard_shape(X.shape)
    copies = 4 * shards[0].data.size // X.size
    assert sorted(s.replica_id for s in shards) == sorted([*range(copies)] * (4 // copies))


@EACH
def test_indexing_iterating_converting(spec: P):
    x = spmd.device_put(X, sharding_of(spec))
    np.testing.assert_array_equal(x[3], X[3])
    np.testing.assert_array_equal(x[2:7, ::-1], X[2:7, ::-1])
    np.testing.assert_array_equal(x[np.array([0, 5])], X[[0, 5]])
    np.testing.assert_array_equal(np.stack([np.asarray(row) for row in x]), X)
    assert float(x[1, 1]) == 3.0 and x[7, 0].item() == 14.0
    assert x.tolist() == X.tolist()
    assert repr(x) == repr(spmd.device_put(X))
    assert str(x) == str(X)


@EACH
def test_operations_and_jit(spec: P):
    x = spmd.device_put(X, sharding_of(spec))
    np.testing.assert_array_equal(x + 1, X + 1)
    np.testing.assert_array_equal(x * x, X * X)
    np.testing.assert_array_equal(x + X, X + X)
    np.testing.assert_allclose(snp.sum(x, 0), X.sum(0))
    np.testing.assert_allclose(x.T @ x, X.T @ X)
    f = spmd.jit(lambda x, y: (snp.sin(x) + y).sum())
    for _ in range(3):
        np.testing.assert_allclose(f(x, X), (np.sin(X) + X).sum(), rtol=1e-5)
    np.testing.assert_allclose(spmd.grad(lambda x: (x * x).sum())(x), 2 * X)
    np.testing.assert_allclose(spmd.vmap(lambda r: r.sum())(x), X.sum(1))


@EACH
def test_moving(spec: P):
    x = spmd.device_put(X, sharding_of(spec))
    for other in SPECS:
        moved = spmd.device_put(x, sharding_of(other))
        assert moved.sharding == sharding_of(other)
        np.testing.assert_array_equal(moved, X)
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(shard.data, X[shard.index])
    single = spmd.device_put(x, spmd.devices()[2])
    assert single.devices() == {spmd.devices()[2]}
    np.testing.assert_array_equal(single, X)


def test_device_put_of_trees_and_prefixes():
    tree = {"w": X, "b": [X[0], 3.0]}
    split, whole = sharding_of(P("a")), sharding_of(P())
    out = spmd.device_put(tree, {"w": split, "b": whole})
    assert out["w"].sharding == split
    assert [v.sharding for v in out["b"]] == [whole, whole]
    again = spmd.device_put(out["w"], split)
    assert again is out["w"]


def test_a_sharding_must_divide_the_array():
    with pytest.raises(ShardingError) as caught:
        spmd.device_put({"w": [np.ones((10, 3))]}, sharding_of(P(("a", "b"))))
    text = str(caught.value)
    assert "device_put: x['w'][0] has shape (10, 3)" in text
    assert "splits dim 0 (size 10) over mesh axis 'a' and 'b' (size 4)" in text
    assert "10 is not a multiple of 4.\nPad dim 0 to 12, or leave it whole with None." in text


def test_rows_of_devices():
    rows = [X[k] for k in range(4)]
    out = spmd.device_put_sharded(rows, spmd.devices()[:4])
    assert isinstance(out.sharding, PmapSharding)
    np.testing.assert_array_equal(out, X[:4])
    same = spmd.device_put_replicated({"x": X[0]}, spmd.devices()[:4])["x"]
    np.testing.assert_array_equal(same, np.stack([X[0]] * 4))
    np.testing.assert_array_equal(spmd.pmap(lambda a, b: a + b)(out, same), X[:4] + X[0])


def test_made_from_a_callback():
    sharding = sharding_of(P("b"))
    out = spmd.make_array_from_callback(X.shape, sharding, lambda index: X[index])
    assert out.sharding == sharding
    np.testing.assert_array_equal(out, X)


def test_deleted():
    x = spmd.device_put(X, sharding_of(P("a")))
    part = x.addressable_data(0)
    x.delete()
    assert x.is_deleted() and part.is_deleted()
    assert repr(x) == "Array(deleted, float32[8,2])"
    for use in (lambda: np.asarray(x), lambda: x[0], lambda: x + 1, lambda: spmd.jit(snp.sin)(x)):
        with pytest.raises(DeletedError):
            use()


def test_layouts_do_not_depend_on_names():
    devices: Any = np.array(spmd.devices()[:4])
    rows = NamedSharding(spmd.Mesh(devices, ("i",)), P("i"))
    assert rows != NamedSharding(spmd.Mesh(devices, ("batch",)), P("batch"))
    for other in (
        NamedSharding(spmd.Mesh(devices, ("batch",)), P("batch", None)),
        NamedSharding(spmd.Mesh(devices.reshape(4, 1), ("x", "one")), P(("one", "x"))),
        PmapSharding(spmd.devices()[:4]),
    ):
        assert rows.layout == other.layout
    for other in (
        NamedSharding(spmd.Mesh(devices[::-1], ("i",)), P("i")),
        NamedSharding(spmd.Mesh(devices, ("i",)), P(None, "i")),
        NamedSharding(spmd.Mesh(devices, ("i",)), P()),
        sharding_of(P("a")),
        PmapSharding(spmd.devices()[:4], 1),
    ):
        assert rows.layout != other.layout


@pytest.mark.parametrize("kind", list(spmd.sharding.AxisType)[:2], ids=str)
@pytest.mark.parametrize("before, after", list(itertools.product(SPECS, SPECS)), ids=str)
def test_arrays_over_a_mesh_are_laid_out_anew(kind: Any, before: P, after: P):
    mesh = spmd.make_mesh((2, 2), ("a", "b"), kind)
    renamed = spmd.make_mesh((2, 2), ("b", "a"), kind)
    value = np.arange(64, dtype=np.int32).reshape(8, 8)
    x = spmd.device_put(value, NamedSharding(mesh, before))
    for place in (NamedSharding(mesh, after), NamedSharding(renamed, after)):
        moved = spmd.device_put(x, place)
        assert moved.sharding == place
        assert moved.aval.explicit == place.explicit_part(2)
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index])


def test_devices_that_hold_the_same_share_one_copy():
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    x = spmd.device_put(value, sharding_of(P("a")))
    shards = [np.asarray(shard.data) for shard in x.addressable_shards]
    assert np.shares_memory(shards[0], shards[1]) and np.shares_memory(shards[2], shards[3])
    assert not np.shares_memory(shards[0], shards[2])
    assert [s.data.devices() for s in x.addressable_shards] == [{d} for d in spmd.devices()]
    other = spmd.jit(lambda x: x + 1, donate_argnums=0)(spmd.device_put(x, sharding_of(P())))
    np.testing.assert_array_equal(other, value + 1)
    np.testing.assert_array_equal(x, value)
