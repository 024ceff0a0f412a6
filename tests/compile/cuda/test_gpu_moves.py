"""Arrays that move between the memories of GPUs: to other layouts, other GPUs, by no host."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P
from spmd import numpy as snp
from spmd.base.config import config
from spmd.base.errors import ShardingError
from spmd.compile.cuda.driver import driver
from spmd.compile.cuda.emulator.device_memory import device_of

pytestmark = pytest.mark.usefixtures("gpus")

X = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)


@pytest.fixture
def copied(monkeypatch):
    """The bytes of each copy, with the devices of source and target; None is the host."""
    found, gpu = [], driver()
    copy, copy_rows = gpu.copy, gpu.copy_rows

    def one(device, target, source, nbytes, stream=None):
        found.append((device_of(source), device_of(target), nbytes))
        copy(device, target, source, nbytes, stream)

    def rows(device, target, step, source, source_step, nbytes, count, stream=None):
        found.append((device_of(source), device_of(target), nbytes * count))
        copy_rows(device, target, step, source, source_step, nbytes, count, stream)

    monkeypatch.setattr(gpu, "copy", one)
    monkeypatch.setattr(gpu, "copy_rows", rows)
    return found


def over(devices, sizes, *spec):
    """A sharding over some GPUs."""
    numbers = np.array([spmd.devices()[k] for k in devices]).reshape(sizes)
    return spmd.NamedSharding(spmd.Mesh(numbers, tuple("ij")[: len(sizes)]), P(*spec))


# Layouts by name: one GPU, or devices, the mesh's shape and a spec.
PLACES = {
    "one": lambda: spmd.devices()[1],
    "rows": lambda: over(range(4), (4,), "i"),
    "columns": lambda: over(range(4), (2, 2), None, "j", "i"),
    "planes": lambda: over((3, 1), (2,), None, None, "i"),
    "two dims": lambda: over((2, 3), (2,), ("i",), None),
    "everywhere": lambda: over((2, 0, 1), (3,)),
    "each dim": lambda: over(range(4), (2, 2), None, "i", "j"),
}


@pytest.mark.parametrize("source", PLACES)
def test_arrays_move_to_other_layouts(source, copied):
    x = spmd.device_put(X, PLACES[source]()) * 1  # made by the GPUs
    shards = x.addressable_shards
    for name, place in PLACES.items():
        copied.clear()
        y = spmd.device_put(x, place())
        assert all(None not in copy for copy in copied), f"{name}: through the host"
        if source == "one":  # as many bytes as others hold
            others = [s for s in y.addressable_shards if s.device != x.device]
            far = sum(nbytes for one, other, nbytes in copied if one != other)
            assert far == sum(s.data.nbytes for s in others)
        np.testing.assert_array_equal(y, X, err_msg=name)
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(shard.data, X[shard.index])
            assert shard.data.device == shard.device
    assert [s.device for s in shards] == [s.device for s in x.addressable_shards]


def test_uneven_parts_are_filled_with_zeros(copied):
    x = spmd.device_put(X[:3, :5], spmd.devices()[1]) * 1
    copied.clear()
    uneven = spmd.NamedSharding(over(range(4), (4,)).mesh, P(None, "i"), uneven=True)
    y = spmd.device_put(x, uneven)
    back = spmd.device_put(y, spmd.devices()[2])
    assert all(None not in copy for copy in copied)
    np.testing.assert_array_equal(back, X[:3, :5])
    np.testing.assert_array_equal(spmd.jit(lambda y: y.sum(1))(y), X[:3, :5].sum(1))


@pytest.mark.parametrize("shape", [(), (0, 3), (5,)])
def test_small_arrays(shape):
    x = spmd.device_put(np.ones(shape, np.int8), spmd.devices()[1]) + np.int8(1)
    y = spmd.device_put(x, over((2, 3), (2,)))
    np.testing.assert_array_equal(y, np.full(shape, 2, np.int8))
    assert [s.device.id for s in y.addressable_shards] == [2, 3]


def test_rows_of_each_gpu(copied):
    devices = spmd.devices()
    rows = [spmd.device_put(X * k, devices[k]) * 1 for k in range(4)]
    copied.clear()
    stacked = spmd.device_put_sharded(rows[::-1], devices)
    copies = spmd.device_put_replicated(rows[2], devices[:2])
    assert {one for one, _, _ in copied} == {0, 1, 2, 3}
    np.testing.assert_array_equal(stacked, [X * k for k in (3, 2, 1, 0)])
    np.testing.assert_array_equal(copies, [X * 2] * 2)


def test_a_moved_array_stays_when_its_source_is_donated():
    """The copies are late, and the memory that they read is not written over before."""
    step = spmd.jit(lambda x: x * 2 + 1, donate_argnums=0)
    x = spmd.device_put(X, spmd.devices()[0]) * 1
    for place in PLACES.values():
        y, before = spmd.device_put(x, place()), np.array(x)
        x = step(x)
        np.testing.assert_array_equal(y, before)


def test_between_cpu_and_gpu():
    cpu, gpu = spmd.devices("cpu")[0], spmd.devices()[1]
    x = spmd.device_put(X, gpu) * 1
    y = spmd.device_put(x, cpu)
    assert y.device == cpu and y.unsafe_buffer_pointer() < 1 << 62
    np.testing.assert_array_equal(spmd.jit(snp.square)(y), X * X)
    assert spmd.jit(snp.square)(y).device == cpu
    z = spmd.device_put(y, gpu)
    assert z.device == gpu and spmd.jit(snp.square)(z).device == gpu
    # A staged program runs where its arguments are, as in JAX.
    for value, other in ((x, cpu), (y, gpu)):
        out = spmd.jit(lambda v, other=other: spmd.device_put(v, other) + 1)(value)
        assert out.device == value.device
        np.testing.assert_array_equal(out, X + 1)
    both = spmd.device_put({"a": x, "b": y}, {"a": cpu, "b": gpu})
    assert [both[k].device for k in "ab"] == [cpu, gpu]


def test_devices_of_two_platforms_are_refused():
    cpu, gpu = spmd.devices("cpu")[0], spmd.devices()[0]
    told = r"{}: cuda:0 and cpu:0 are of two platforms.*spmd.devices\('gpu'\) or of spmd.devices"
    with pytest.raises(ShardingError, match=told.format("Mesh")):
        spmd.Mesh(np.array([gpu, cpu]), ("i",))
    with pytest.raises(ShardingError, match=told.format("PmapSharding")):
        spmd.device_put_sharded([X, X], [gpu, cpu])
    with config.override("platform", "cpu"):
        assert spmd.make_mesh((1,), ("i",)).devices[0].platform == "cpu"
