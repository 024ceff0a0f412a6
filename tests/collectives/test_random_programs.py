"""Random SPMD programs: pmap and shard_map mean vmap, and so do their gradients."""

from __future__ import annotations

from typing import Any

import pytest

import spmd
import spmd.numpy as snp
from spmd.sharding import PartitionSpec as P
from tests.collectives.compare import assert_close
from tests.collectives.programs import example, random_program

SEEDS = pytest.mark.parametrize("seed", range(30))


def over_mesh(f: Any, n: int) -> Any:
    def rows(x: Any) -> Any:
        return spmd.tree.map(lambda y: y[None], f(x[0]))

    mesh = spmd.make_mesh((n,), ("i",))
    return spmd.shard_map(rows, mesh=mesh, in_specs=P("i"), out_specs=P("i"))


@SEEDS
def test_pmap_and_shard_map_give_the_values_of_vmap(seed: int):
    n = 2 + seed % 3
    f, x = random_program(seed, n), example(seed, n)
    expected = spmd.vmap(f, axis_name="i")(x)
    assert_close(spmd.pmap(f, axis_name="i")(x), expected, "pmap", 100)
    assert_close(over_mesh(f, n)(x), expected, "shard_map", 100)
    with spmd.disable_jit():
        assert_close(spmd.pmap(f, axis_name="i")(x), expected, "op by op", 100)


@SEEDS
def test_pmap_and_shard_map_give_the_gradients_of_vmap(seed: int):
    n = 2 + seed % 3
    f, x = random_program(seed, n), example(seed, n)

    def gradient(mapped: Any) -> Any:
        return spmd.grad(lambda x: snp.sum(mapped(x)[0]))(x)

    expected = gradient(spmd.vmap(f, axis_name="i"))
    assert_close(gradient(spmd.pmap(f, axis_name="i")), expected, "pmap", 1000)
    assert_close(gradient(over_mesh(f, n)), expected, "shard_map", 1000)
    inside = spmd.grad(lambda x: f(x)[0])
    expected = spmd.vmap(inside, axis_name="i")(x)
    assert_close(spmd.pmap(inside, axis_name="i")(x), expected, "inside", 1000)
