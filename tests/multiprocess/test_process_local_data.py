"""`make_array_from_process_local_data` under a real mpirun: any spec, parts or all of the data."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

PROGRAM = """
import numpy as np
import spmd
from spmd import lax
from spmd.errors import ShapeError
from spmd.sharding import Mesh, NamedSharding, PartitionSpec as P

rank, ranks = spmd.process_index(), spmd.process_count()
devices = np.array(spmd.devices(), dtype=object)
n = devices.size
whole = np.arange(4.0 * n * n, dtype=np.float32).reshape(2 * n, 2 * n)
side = 2 if n % 2 == 0 else 1
meshes = [
    Mesh(devices.reshape(side, n // side), ("i", "j")),  # a process has neighbours in a row
    Mesh(devices.reshape(n // side, side).T, ("i", "j")),  # or not
]
specs = [
    P(), P("i"), P("j"), P(None, "i"), P(None, "j"), P("i", "j"), P("j", "i"), P(("i", "j")),
    P(("j", "i")), P(None, ("i", "j")), P(None, ("j", "i")),
]
count = guessed = 0
for mesh in meshes:
    for spec in specs:
        sharding = NamedSharding(mesh, spec)
        places = sharding.addressable_devices_indices_map(whole.shape)
        held = [
            sorted({int(k) for index in places.values() for k in np.arange(size)[index[d]]})
            for d, size in enumerate(whole.shape)
        ]
        part = whole[np.ix_(*held)]
        given = [(part, whole.shape), (whole, whole.shape), (whole[held[0]], whole.shape)]
        try:  # the shape follows from the parts, or not: on all ranks alike
            assert spmd.make_array_from_process_local_data(sharding, part).shape == whole.shape
            guessed += 1
        except ShapeError as error:
            assert "pass global_shape=" in str(error), error
        for local, shape in given:
            made = spmd.make_array_from_process_local_data(sharding, local, shape)
            assert made.shape == whole.shape and made.sharding == sharding
            assert len(made.addressable_shards) == len(places)
            for shard in made.addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[places[shard.device]])
        count += 1
        if spec not in (P("i", "j"), P(None, "i")):
            continue
        # What a map over the mesh reads is what the sharding says.
        total = spmd.shard_map(
            lambda x, axes=spec.all_axes(): lax.psum(x.sum(), axes),
            mesh=mesh, in_specs=spec, out_specs=P(),
        )(made)
        assert float(total.addressable_data(0)) == whole.sum(), (spec, total)
try:
    spmd.make_array_from_process_local_data(
        NamedSharding(meshes[0], P(("i", "j"))), whole[:3], whole.shape
    )
    raise SystemExit("no error")
except ShapeError as error:
    assert "along dim 0" in str(error), error
assert guessed > count // 2
print(f"rank {rank}: {count} specs")
"""


@pytest.mark.parametrize("ranks, devices", [(2, 2), (4, 1)], ids=["2x2", "4"])
def test_parts_of_ranks(
    mpirun: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    ranks: int,
    devices: int,
):
    program = tmp_path / "parts.py"
    program.write_text(PROGRAM)
    done = mpirun(ranks, [str(program)], env={"SPMD_NUM_CPU_DEVICES": str(devices)}, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        assert f"rank {rank}: 22 specs" in done.stdout
