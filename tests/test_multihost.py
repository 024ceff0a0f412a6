"""`spmd.multihost`: values between processes, alone and in a job of two ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from jax.experimental import multihost_utils as theirs

import spmd
from spmd import multihost
from spmd.errors import ArgumentError, CollectiveError, ShardingError
from spmd.sharding import NamedSharding
from spmd.sharding import PartitionSpec as P

TREE = {"a": np.arange(6.0).reshape(2, 3), "b": np.array([True, False])}


# ---- one process -------------------------------------------------------------------------------


@pytest.mark.parametrize("tiled", [False, True])
def test_gathering_alone(tiled: bool):
    found = multihost.process_allgather(TREE, tiled=tiled)
    expected = theirs.process_allgather(TREE, tiled=tiled)
    for name in TREE:
        assert found[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(found[name], expected[name])
    assert multihost.process_allgather(2.0, tiled=tiled).tolist() == [2.0]
    assert multihost.process_allgather(np.zeros((0, 2))).shape == (1, 0, 2)


def test_gathering_any_dtype():
    keys = spmd.random.split(spmd.random.key(0), 2)
    found = multihost.process_allgather(keys, tiled=True)
    data = spmd.random.key_data
    np.testing.assert_array_equal(data(found), data(keys))
    half = spmd.numpy.arange(3, dtype="bfloat16")
    np.testing.assert_array_equal(multihost.process_allgather(half, tiled=True), half)


def test_broadcasting_alone():
    found = multihost.broadcast_one_to_all({**TREE, "n": 3})
    np.testing.assert_array_equal(found["a"], TREE["a"])
    assert found["n"] == 3 and isinstance(found["n"], np.ndarray)
    with pytest.raises(CollectiveError, match=r"must be True on one process; it is on 0"):
        multihost.broadcast_one_to_all(TREE, is_source=False)


def test_comparing_alone():
    multihost.assert_equal({**TREE, "n": 3})
    multihost.sync_global_devices("here")
    for assert_equal in (multihost.assert_equal, theirs.assert_equal):
        with pytest.raises(AssertionError, match="not a number"):
            assert_equal(np.array([1.0, np.nan]), "not a number")


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, ("x", "y")), P("y", "x")], ids=str)
def test_all_of_an_array_is_local_to_one_process(spec: P):
    mesh = spmd.make_mesh((2, 2), ("x", "y"))
    value = np.arange(32, dtype=np.float32).reshape(8, 4)
    x = multihost.host_local_array_to_global_array(value, mesh, spec)
    assert x.sharding == NamedSharding(mesh, spec) and x.shape == (8, 4)
    np.testing.assert_array_equal(x, value)
    again = multihost.host_local_array_to_global_array(x, mesh, spec)
    assert [s.data for s in again.addressable_shards] == [s.data for s in x.addressable_shards]
    assert multihost.global_array_to_host_local_array(x, mesh, spec) is x
    np.testing.assert_array_equal(multihost.process_allgather(x, tiled=True), value)


def test_what_is_no_array_or_spec():
    mesh = spmd.make_mesh((4,), ("x",))
    with pytest.raises(ArgumentError, match=r"process_allgather: argument in_tree\['a'\] is 'x'"):
        multihost.process_allgather({"a": "x"})
    for function in (
        multihost.host_local_array_to_global_array,
        multihost.global_array_to_host_local_array,
    ):
        for specs in (None, {"a": None}):
            with pytest.raises(ArgumentError, match=r"pspecs must hold PartitionSpecs, got None"):
                function({"a": np.ones(4)}, mesh, specs)
    with pytest.raises(ShardingError, match=r"local_inputs\['a'\], this process's part, has shape"):
        multihost.host_local_array_to_global_array({"a": np.ones(6)}, mesh, P("x"))


# ---- two processes -----------------------------------------------------------------------------

PROGRAM = """
import numpy as np
import spmd
from spmd import lax, multihost
from spmd.errors import ArgumentError, CollectiveError, ReplicaError, ShardingError
from spmd.sharding import Mesh, NamedSharding, PartitionSpec as P

rank, ranks = spmd.process_index(), spmd.process_count()
assert ranks == 2


def raises(kind, text, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except kind as error:
        assert text in str(error), error
    else:
        raise SystemExit(f"no error that says {text!r}")


# Every process's values.
found = multihost.process_allgather({"a": np.arange(3) + rank, "b": 0.5 * rank})
assert found["a"].tolist() == [[0, 1, 2], [1, 2, 3]] and found["b"].tolist() == [0.0, 0.5], found
assert multihost.process_allgather(spmd.numpy.arange(2) + rank, tiled=True).tolist() == [0, 1, 1, 2]
raises(CollectiveError, "in_tree is int64[2] on process 0 and int64[3] on process 1",
       multihost.process_allgather, np.arange(2 + rank))
raises(CollectiveError, "the leaves [\\"in_tree['r0']\\"] and process 1 gave [\\"in_tree['r1']\\"]",
       multihost.process_allgather, {f"r{rank}": 1})

# One process's values, from different lines.
own = {"a": np.full(3, rank), "key": spmd.random.key(rank)}
if rank == 0:
    sent = multihost.broadcast_one_to_all(own)
else:
    sent = multihost.broadcast_one_to_all(own)
assert sent["a"].tolist() == [0, 0, 0]
data = spmd.random.key_data
assert (data(sent["key"]) == data(spmd.random.key(0))).all()
assert multihost.broadcast_one_to_all(rank, is_source=rank == 1) == 1
raises(CollectiveError, "must be True on one process; it is on 2 ([0, 1]) of 2",
       multihost.broadcast_one_to_all, rank, is_source=True)

# Comparing them.
multihost.assert_equal({"step": 3, "w": np.ones(4)})
raises(ReplicaError, "seeds: in_tree['s'] is not equal on all processes: process 1 has 1, process 0"
       " has 0", multihost.assert_equal, {"s": rank}, "seeds")
multihost.sync_global_devices("here")
raises(ReplicaError, "process 0 is at 'r0' and process 1 at 'r1'",
       multihost.sync_global_devices, f"r{rank}")

# Blocks that all processes leave alike.
with multihost.live_devices(spmd.devices()[::-1]) as alive:
    assert alive == spmd.devices(), alive
def fails_on_one():
    with multihost.live_devices(spmd.devices()):
        if rank == 1:
            raise ZeroDivisionError("lost")
kind, text = [(CollectiveError, "failed on process 1: ZeroDivisionError: lost"),
              (ZeroDivisionError, "lost")][rank]
raises(kind, text, fails_on_one)

# Parts of global arrays.
devices = np.array(spmd.devices(), dtype=object)
mesh = Mesh(devices.reshape(2, 2), ("p", "d"))
assert mesh.is_multi_process and mesh.local_mesh.device_ids.tolist() == [[2 * rank, 2 * rank + 1]]
assert spmd.make_mesh((4,), ("x",)).local_mesh.size == 2
whole = np.arange(32, dtype=np.float32).reshape(8, 4)
parts = {
    P(): whole,
    P("p"): whole[4 * rank : 4 * rank + 4],
    P(("p", "d")): whole[4 * rank : 4 * rank + 4],
    P("d"): whole,
    P("d", "p"): whole[:, 2 * rank : 2 * rank + 2],
    P(None, ("p", "d")): whole[:, 2 * rank : 2 * rank + 2],
}
for spec, part in parts.items():
    x = multihost.host_local_array_to_global_array(part, mesh, spec)
    assert x.shape == whole.shape and x.sharding == NamedSharding(mesh, spec)
    for shard in x.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
    here = [s.data is not None for s in x.global_shards]
    assert here == [d.process_index == rank for d in devices], here
    np.testing.assert_array_equal(multihost.process_allgather({"x": x}, tiled=True)["x"], whole)
    raises(ArgumentError, "in_tree['x'] (f32[8,4])", multihost.process_allgather, {"x": x})
    local = multihost.global_array_to_host_local_array(x, mesh, spec)
    np.testing.assert_array_equal(local, part)
    assert local.is_fully_addressable and local.sharding == NamedSharding(mesh.local_mesh, spec)
    again = multihost.host_local_array_to_global_array(local, mesh, spec)
    assert multihost.host_local_array_to_global_array(x, mesh, spec) is x
    np.testing.assert_array_equal(multihost.process_allgather(again, tiled=True), whole)
    if x.is_fully_replicated:
        multihost.assert_equal(x)
    else:
        raises(ShardingError, "has shards on other processes", multihost.assert_equal, x)
raises(ShardingError, "is laid out by", multihost.global_array_to_host_local_array, x, mesh, P("p"))

# Rows that lie crosswise: a process has the first and third quarter.
crossed = Mesh(devices.reshape(2, 2).T, ("i", "j"))
y = spmd.make_array_from_callback(
    whole.shape, NamedSharding(crossed, P(("i", "j"))), lambda index: whole[index]
)
np.testing.assert_array_equal(multihost.process_allgather(y, tiled=True), whole)
rows = spmd.pmap(lambda x: x + 1)(np.arange(2.0) + 2 * rank)
assert multihost.process_allgather(rows, tiled=True).tolist() == [1.0, 2.0, 3.0, 4.0]

# A program that is still running meets first.
with spmd.set_mesh(mesh):
    total = spmd.shard_map(lambda x: lax.psum(x.sum(), ("p", "d")), in_specs=P("p"), out_specs=P())
    for k in range(3):
        z = total(spmd.device_put(whole, P("p")))
        multihost.sync_global_devices(f"step {k}")
assert float(z.addressable_data(0)) == 2 * whole.sum()
print(f"rank {rank}: all right")
"""


@pytest.mark.mpi
def test_two_processes(mpirun: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path):
    program = tmp_path / "parts.py"
    program.write_text(PROGRAM)
    done = mpirun(2, [str(program)], env={"SPMD_NUM_CPU_DEVICES": "2"}, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank}: all right" in done.stdout
