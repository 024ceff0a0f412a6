"""Automatic partitioning over real ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

Run = Callable[..., subprocess.CompletedProcess[str]]

more = pytest.mark.nightly(reason="fewer ranks and several devices each run in CI")
LAYOUTS = [(2, 2), (3, 1), pytest.param(4, 1, marks=more)]


@pytest.mark.parametrize("ranks, devices", [(2, 1), (3, 2), pytest.param(4, 1, marks=more)])
def test_random_programs_over_ranks(mpirun: Run, ranks: int, devices: int):
    program = ["-m", "tests.multiprocess.programs.partition", "6"]
    done = mpirun(ranks, program, env={"SPMD_NUM_CPU_DEVICES": str(devices)}, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"over {ranks} ranks, {ranks * devices} devices: all right" in done.stdout


@pytest.mark.parametrize("ranks, devices", LAYOUTS)
def test_explicit_mode_and_partly_manual_maps_over_ranks(mpirun: Run, ranks: int, devices: int):
    program = ["-m", "tests.multiprocess.programs.explicit"]
    done = mpirun(ranks, program, env={"SPMD_NUM_CPU_DEVICES": str(devices)}, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"over {ranks} ranks, {ranks * devices} devices: all right" in done.stdout


@pytest.mark.parametrize("ranks, devices", LAYOUTS)
def test_results_under_set_mesh_over_ranks(mpirun: Run, ranks: int, devices: int):
    program = ["-m", "tests.multiprocess.programs.in_scope"]
    done = mpirun(ranks, program, env={"SPMD_NUM_CPU_DEVICES": str(devices)}, timeout=240)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        assert f"rank {rank}: in scope of {ranks * devices} devices" in done.stdout


@pytest.mark.parametrize("ranks, devices", LAYOUTS)
def test_pmaps_inside_of_programs_over_ranks(mpirun: Run, ranks: int, devices: int):
    program = ["-m", "tests.multiprocess.programs.pmaps_in_programs"]
    done = mpirun(ranks, program, env={"SPMD_NUM_CPU_DEVICES": str(devices)}, timeout=240)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        assert f"rank {rank}: pmaps in programs on {ranks} ranks x {devices}" in done.stdout


MISTAKES = """
import numpy as np, spmd, spmd.numpy as snp
from spmd import NamedSharding, P, lax
from spmd.sharding import AxisType
mesh = spmd.make_mesh((4,), ("x",), AxisType.Auto)
x = spmd.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("x")))
for fetch in (np.asarray, float, list, lambda x: spmd.device_get({"w": [x]})):
    try:
        fetch(x)
    except spmd.errors.ShardingError as error:
        assert "has shards on other processes" in str(error), error
        assert "spmd.multihost.process_allgather(x, tiled=True)" in str(error), error
    else:
        raise AssertionError("a value that is not here")
found = spmd.multihost.process_allgather(x, tiled=True)  # as the error says
assert found.shape == (8, 8)
mine = P("x") if spmd.process_index() == 0 else P(None, "x")
sharding = NamedSharding(mesh, mine)
try:
    spmd.jit(lambda y: lax.with_sharding_constraint(snp.sort(y, axis=0), sharding))(x)
except spmd.errors.CollectiveError as error:
    text = str(error)
    assert "nothing of it has run" in text and "differs in kind and shape" in text, text
    assert "rank 0: all_gather f32[2,8]" in text and "rank 1: all_to_all f32[2,4,2]" in text, text
    assert text.count("<string>:") >= 3, text
else:
    raise AssertionError("ranks that partition differently")
rows = spmd.device_put(np.ones((8, 8), np.float32), sharding)
try:  # without a collective on rank 0
    spmd.jit(lambda batch: snp.cumsum(batch["tokens"], axis=1))({"tokens": rows})
except spmd.errors.CollectiveError as error:
    text = str(error)
    assert "argument batch['tokens'] differs:" in text, text
    assert "rank 0: f32[2,8] on each device, laid out by P('x',)" in text, text
    assert "rank 1: f32[8,2] on each device, laid out by P(None, 'x')" in text, text
    assert "device_put(x, sharding)" in text, text
else:
    raise AssertionError("ranks that lay an argument out differently")
if spmd.process_index() == 0:  # one operation without a collective needs no other rank
    for _ in range(4):
        assert (np.asarray((x + 1.0).addressable_shards[0].data) == 2).all()
print("all right")
"""


def test_spread_values_and_ranks_that_partition_differently_are_told(mpirun: Run):
    done = mpirun(2, ["-c", MISTAKES], env={"SPMD_NUM_CPU_DEVICES": "2"}, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all right") == 2


@pytest.mark.parametrize("ranks, devices", LAYOUTS)
def test_parts_of_global_arrays_and_own_partitions_over_ranks(
    mpirun: Run, ranks: int, devices: int
):
    program = ["-m", "tests.multiprocess.programs.twins"]
    done = mpirun(ranks, program, env={"SPMD_NUM_CPU_DEVICES": str(devices)}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"of {ranks}: all right") == ranks


@pytest.mark.parametrize("ranks, devices", LAYOUTS)
def test_parts_of_different_sizes_over_ranks(mpirun: Run, tmp_path: Path, ranks: int, devices: int):
    program = ["-m", "tests.multiprocess.programs.uneven", str(tmp_path)]
    done = mpirun(ranks, program, env={"SPMD_NUM_CPU_DEVICES": str(devices)}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"of {ranks}: all right") == ranks


SUB_AXES = """
import numpy as np, spmd, spmd.numpy as snp
from spmd import NamedSharding, P, debug, nn
from spmd.multihost import process_allgather
from spmd.sharding import AxisType

mesh = spmd.make_mesh((2, 4), ("x", "y"), AxisType.Auto)
rng = np.random.default_rng(0)
q, k = (rng.standard_normal((4, 8, n, 4)).astype(np.float32) for n in (8, 2))
args = [
    spmd.device_put(x, NamedSharding(mesh, spec))
    for x, spec in ((q, P("x", None, "y")), (k, P("x")), (k, P("x")))
]


def attend(q, k, v):
    return nn.dot_product_attention(q, k, v, is_causal=True)


def slopes(*args):
    return spmd.grad(lambda *args: (attend(*args) ** 2).sum(), (0, 1, 2))(*args)


assert debug.collectives(spmd.jit(attend))(*args) == []
assert any(":(" in str(c) for c in debug.collectives(spmd.jit(slopes))(*args))
for f in (attend, slopes):
    pairs = zip(spmd.tree.leaves(spmd.jit(f)(*args)), spmd.tree.leaves(f(q, k, k)))
    for got, want in pairs:
        assert got.sharding.mesh == mesh
        whole = process_allgather(got, tiled=True)
        np.testing.assert_allclose(whole, want, rtol=1e-4, atol=1e-5)
print("all right", flush=True)
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=more)])
def test_parts_of_axes_over_ranks(mpirun: Run, ranks: int):
    done = mpirun(
        ranks, ["-c", SUB_AXES], env={"SPMD_NUM_CPU_DEVICES": str(8 // ranks)}, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all right") == ranks
