"""`debug.assert_replicated`: on arrays, stacked copies, between ranks, and in per-device code."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.errors import ArgumentError, ReplicaError
from spmd.debug import assert_replicated
from spmd.sharding import NamedSharding
from spmd.sharding import PartitionSpec as P
from spmd.sharding.array import from_numpy, from_shards
from spmd.transport import world
from spmd.transport.threads import LocalCommunicator, LocalGroup


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Threads as ranks: the communicator of all ranks is what a thread sets as `comm`."""
    own = threading.local()
    monkeypatch.setattr(world, "world", lambda: own.comm)
    return own


def test_equal_copies_are_fine():
    state = {"w": snp.ones((4, 3)), "step": np.full(4, 7), "nan": np.full((4, 2), np.nan)}
    assert_replicated(state, stacked=True)
    assert_replicated(spmd.pmap(lambda x: x * 2)(np.ones((4, 2), np.float32)), stacked=True)
    assert_replicated(np.array([0.0, -0.0]), stacked=True)
    mesh = spmd.make_mesh((4,), ("i",))
    assert_replicated(spmd.device_put(np.arange(8.0), NamedSharding(mesh, P())))
    assert_replicated(spmd.device_put(np.arange(8.0), NamedSharding(mesh, P("i"))))
    assert_replicated(np.arange(3.0))  # one copy only


def test_stacked_copies_that_differ_name_the_leaf_and_the_place():
    w = np.ones((4, 2, 3), np.float32)
    w[2, 1, 0] = 1.25
    with pytest.raises(ReplicaError) as caught:
        assert_replicated({"params": [np.zeros(4), w]}, stacked=True)
    text = str(caught.value)
    assert "['params'][1] float32[2,3]: row 2 differs from row 0 by up to 0.25 at [1, 0]" in text
    assert "1.0 on row 0, 1.25 on row 2" in text
    assert "test_replicated.py:" in text and "['params'][0]" not in text


def test_copies_of_a_sharded_array():
    mesh = spmd.make_mesh((2, 2), ("i", "j"))
    sharding = NamedSharding(mesh, P("i"))
    pieces = [np.full(2, k, np.float32) for k in (0, 0, 1, 5)]
    shards = [from_numpy(x, None, d) for x, d in zip(pieces, mesh.flat_devices(), strict=True)]
    x = from_shards(spmd.typeof(np.zeros(4, np.float32)), sharding, shards)
    with pytest.raises(ReplicaError, match=r"cpu:3 differs from cpu:2 by up to 4 at \[0\]"):
        assert_replicated(x)


@pytest.mark.parametrize(
    "values, told",
    [
        ([1.0, 1.0, 1.5], "float32[]: rank 2 differs from rank 0 by up to 0.5: 1.0 on rank 0"),
        ([np.ones(2), np.ones(3), np.ones(2)], "float32[2] on rank 0, float32[3] on rank 1"),
        ([np.nan, 1.0, np.nan], "rank 1 differs from rank 0 by up to inf"),
        ([np.arange(3), np.arange(3), np.arange(3) * 2], "by up to 2 at [2]: 2 on rank 0, 4 on"),
    ],
)
def test_ranks_that_differ_all_raise_the_same(ranks: Any, values: list[Any], told: str):
    def body(comm: LocalCommunicator) -> str:
        ranks.comm = comm
        w, b = np.asarray(values[comm.rank]), np.zeros(2)
        with pytest.raises(ReplicaError) as caught:
            assert_replicated({"w": w, "b": b})
        assert_replicated({"b": b})  # the ranks are still in step
        return str(caught.value)

    texts = LocalGroup(3).run(body)
    assert len(set(texts)) == 1
    assert "['w']" in texts[0] and told in texts[0] and "['b']" not in texts[0]


def test_a_leaf_that_only_some_ranks_have_is_named(ranks: Any):
    def body(comm: LocalCommunicator) -> str:
        ranks.comm = comm
        names = ["w", "b"] if comm.rank else ["w"]
        with pytest.raises(ReplicaError) as caught:
            assert_replicated({name: np.zeros(2) for name in names})
        return str(caught.value)

    texts = LocalGroup(3).run(body)
    assert len(set(texts)) == 1 and "['b'] is on ranks 1, 2, not on rank 0" in texts[0]


def test_many_differences_are_counted():
    tree = {f"w{k}": np.arange(4.0) for k in range(12)}
    with pytest.raises(ReplicaError, match=r"(?s)\['w0'\].*and 7 more"):
        assert_replicated(tree, stacked=True)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_in_per_device_code(dtype: str):
    def f(x: Any) -> Any:
        assert_replicated({"w": x}, "i")
        return x

    mapped = spmd.pmap(f, axis_name="i")
    same = np.ones((4, 3), dtype)
    np.testing.assert_array_equal(mapped(same), same)
    other = same.copy()
    other[3, 1] = 0
    with pytest.raises(ReplicaError, match=r"\['w'\] differs from that at i=0 at i=3 by up to 1\n"):
        mapped(other)


def test_in_per_device_code_nan_differs_from_a_number():
    def f(x: Any) -> Any:
        assert_replicated(x, "i")
        return x

    x = np.full((4, 2), np.nan, np.float32)
    spmd.pmap(f, axis_name="i")(x)
    x[1, 1] = 0
    with pytest.raises(ReplicaError, match="at i=1 by up to inf"):
        spmd.pmap(f, axis_name="i")(x)


def test_arguments_that_make_no_sense():
    with pytest.raises(ArgumentError, match="give axis_name"):
        spmd.jit(lambda x: assert_replicated(x))(np.ones(3))
    with pytest.raises(ArgumentError, match="a scalar has no leading dim"):
        assert_replicated(1.0, stacked=True)
