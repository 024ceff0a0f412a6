"""JAX reads the same sharding rules, and its `partition` callbacks see the same layouts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is an oracle of these tests: pip install jax")

import spmd
from spmd.custom_partitioning import custom_partitioning
from spmd.shard_alike import shard_alike
from tests.partition.programs import auto_mesh
from tests.sharding.test_sharding_rule import RULES

A = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
# How two operands are placed; None is a NumPy array.
SPECS: dict[str, list[Any]] = {
    "rows": [["x"], []],
    "columns": [[], [None, "x"]],
    "inner dim": [[None, "x"], ["x"]],
    "inner dim of one": [[None, "x"], None],
    "nothing": [[], []],
}


def product_of(lax: Any, custom: Any, seen: list[Any]) -> Any:
    """A product that is summed by hand; `seen` gets the specs that its callback sees."""

    @custom
    def product(a, b):
        return a @ b

    def partition(mesh, args, result):
        seen[:] = [[*s.sharding.spec] for s in (*args, result)]
        axis = args[0].sharding.spec[1]
        lower_fn = lambda a, b: lax.psum(a @ b, axis) if axis else a @ b  # noqa: E731
        return mesh, lower_fn, result.sharding, tuple(s.sharding for s in args)

    product.def_partition(partition, sharding_rule="i j, j k -> i k", reduction_factors=("j",))
    return product


def _put(lib: Any, mesh: Any, spec: Any) -> Any:
    place = lib.sharding.NamedSharding(mesh, lib.sharding.PartitionSpec(*spec))
    return lib.device_put(A, place)


def layouts(lib: Any, lax: Any, custom: Any, alike: Any, mesh: Any) -> dict[str, Any]:
    """What callbacks see of a product, its layout and values, and the layouts of shard_alike."""
    found: dict[str, Any] = {}
    for name, specs in SPECS.items():
        seen: list[Any] = []
        a, b = (A if spec is None else _put(lib, mesh, spec) for spec in specs)
        out = lib.jit(product_of(lax, custom, seen))(a, b)
        specs_alike = [[*x.sharding.spec] for x in lib.jit(alike)(a, A + 1)]
        found[name] = [seen, [*out.sharding.spec], specs_alike, np.asarray(out).tolist()]
    return found


IN_JAX = """
import json, jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.shard_alike import shard_alike
from tests.jax.test_custom_partitioning import RULES, layouts

def accepts(rule):
    f = custom_partitioning(lambda *args: args)
    try:
        f.def_partition(lambda *args: None, sharding_rule=rule)
    except ValueError:
        return False
    return True

mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,))
found = layouts(jax, jax.lax, custom_partitioning, shard_alike, mesh)
print(json.dumps([{rule: accepts(rule) for rule in RULES}, found]))
"""


def test_jax_reads_the_same_rules_and_makes_the_same_layouts(run_python: Any):
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = run_python(["-c", IN_JAX], env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    rules, wanted = json.loads(done.stdout.splitlines()[-1])
    assert rules == {rule: error is None for rule, error in RULES.items()}
    mesh = auto_mesh((4,), ("x",))
    for name, found in layouts(spmd, spmd.lax, custom_partitioning, shard_alike, mesh).items():
        assert found[:-1] == wanted[name][:-1], name
        np.testing.assert_allclose(found[-1], wanted[name][-1], rtol=1e-5, err_msg=name)
