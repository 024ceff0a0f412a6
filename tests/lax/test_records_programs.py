"""The rules of primitives that hold programs, on their table of op records. And none is missing."""

from __future__ import annotations

import json

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.base import dtypes
from tests.collectives.table import CASES, OURS
from tests.lax import (
    records,
    records_fft,
    records_indexing,
    records_linalg,
    records_special,
    records_windows,
)
from tests.lax import test_records as suite
from tests.lax.checks import check_derivatives
from tests.lax.records_programs import RECORDS

TABLES = (records, records_fft, records_indexing, records_linalg, records_special, records_windows)
ALL = [r for table in TABLES for r in table.RECORDS] + RECORDS


@pytest.fixture(autouse=True)
def wide_dtypes():
    with spmd.enable_x64(True):
        yield


def each(choose):
    return [
        pytest.param(r, d, id=f"{r}-{dtypes.short_name(d)}") for r in RECORDS for d in choose(r)
    ]


@pytest.mark.parametrize("record, dtype", each(lambda r: r.dtypes))
def test_value(record, dtype):
    operands = record.make(dtype)
    wanted = record.reference(*operands)
    suite.assert_close(record.function(lax, *operands), wanted, record.tolerance)
    compiled = spmd.jit(lambda *xs: record.function(lax, *xs))(*operands)
    suite.assert_close(compiled, wanted, record.tolerance)
    if record.case == "no step":
        return  # op by op nobody knows the type of what no step made: an error, as in JAX
    with spmd.disable_jit():
        suite.assert_close(record.function(lax, *operands), wanted, record.tolerance)


@pytest.mark.parametrize("record, dtype", each(lambda r: r.gradient_dtypes if r.order else ()))
def test_derivatives(record, dtype):
    suite.test_derivatives(record, dtype)


def test_second_derivatives_of_attention():
    (record,) = [r for r in RECORDS if r.primitive == "attention"]
    check_derivatives(lambda *xs: record.function(lax, *xs), record.make(np.float32))


@pytest.mark.parametrize("record", [r for r in RECORDS if r.vmap], ids=str)
def test_vmap_is_a_loop(record):
    suite.test_vmap_is_a_loop(record)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_the_record_uses_its_primitive(record):
    def names(closed):
        for eqn in closed.eqns:
            yield eqn.prim.name
            for value in eqn.params.values():
                for inner in value if isinstance(value, tuple) else (value,):
                    if hasattr(inner, "eqns"):
                        yield from names(inner)

    operands = record.make(record.dtypes[0])
    closed = spmd.make_jaxpr(lambda *xs: record.function(lax, *xs))(*operands)
    assert record.primitive in set(names(closed))


# ---- none is missing ---------------------------------------------------------------------------

# Primitives without a record, and what tests them instead.
ELSEWHERE = {
    "check": "is for checkify's rewrite: tests/checkify",
    "fused": "is made by a pass: tests/compile/test_fusion.py",
    "product": "is made by a pass: tests/compile/passes/test_fuse_epilogues.py",
    "attention_block": "is made by a definition for GPUs: tests/compile/cuda/test_attention.py",
    "custom_lin": "is how linearize writes custom_vjp: tests/core/test_custom_vjp.py",
    "io_callback": "has side effects that are counted: tests/lax/test_callback.py",
    "shard_map": "is for meshes: tests/sharding/test_shard_map.py",
    "pvary": "is put in by shard_map: tests/sharding/test_shard_map.py",
    "unvary": "is put in around untyped maps: tests/partition/test_untyped_maps.py",
    "pcast": "is for meshes: tests/sharding/test_unreduced.py",
    "sharding_constraint": "is for meshes: tests/partition/test_plans.py",
    "device_put": "moves derivatives: tests/api/test_placement.py",
    "custom_partitioning": "is for meshes: tests/partition/test_custom_partitioning.py",
    "inspect_sharding": "is for meshes: tests/debug/test_picture.py",
    "shard_alike": "is for meshes: tests/sharding/test_shard_alike.py",
    "reshard": "is for meshes: tests/sharding/test_explicit_types.py",
    "to_auto": "is for meshes: tests/sharding/test_explicit_types.py",
    "rows_of_all": "is for pmaps over processes: tests/multiprocess/test_partition.py",
    "own_rows": "is for pmaps over processes: tests/multiprocess/test_partition.py",
    "axis_index": "is for devices: tests/collectives/table.py",
}
COLLECTIVES = {
    "all_gather": "all_gather", "all_to_all": "all_to_all", "exchange": "exchange", "pmax": "pmax",
    "pmin": "pmin",
    "ppermute": "ppermute", "psum": "psum", "reduce_scatter": "psum_scatter",
}  # fmt: skip

PROGRAM = """
import json, pkgutil, importlib, spmd
for module in pkgutil.walk_packages(spmd.__path__, "spmd."):
    if not any(part in module.name for part in (".cuda.", "transport.mpi", "__main__")):
        importlib.import_module(module.name)
from spmd.core.primitive import all_primitives
print(json.dumps([p.name for p in all_primitives()]))
"""


def test_every_primitive_has_a_record(run_python):
    # In a process of its own: other tests define primitives for themselves.
    done = run_python(["-c", PROGRAM])
    assert done.returncode == 0, done.stderr
    known = json.loads(done.stdout.splitlines()[-1])
    assert len(known) > 150
    missing = set(known) - {r.primitive for r in ALL} - set(ELSEWHERE) - set(COLLECTIVES)
    assert not missing, f"add a record in tests/lax/records*.py for {sorted(missing)}"
    twice = (set(ELSEWHERE) | set(COLLECTIVES)) & {r.primitive for r in ALL}
    assert not twice, f"{sorted(twice)} have records now: take them out of ELSEWHERE"


@pytest.mark.parametrize("primitive", COLLECTIVES)
def test_every_collective_has_a_case(primitive):
    assert any(COLLECTIVES[primitive] in str(case) for case in (*CASES, *OURS))
