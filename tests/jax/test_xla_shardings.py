"""Shardings in XLA's words are those that JAX writes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import ArgumentError, ShardingError
from spmd.sharding import AbstractMesh, NamedSharding
from spmd.sharding.xla.gspmd import GSPMDSharding
from spmd.sharding.xla.hlo_sharding import HloSharding, OpSharding, OpShardingType

MESHES = [((4, 2), ("x", "y")), ((2, 2, 2), ("x", "y", "z")), ((1, 4, 1), ("x", "y", "z"))]


def specs(axes: tuple[str, ...], ndim: int) -> list[tuple[Any, ...]]:
    """Specs of `ndim` entries, each None, an axis or two, none of them used twice."""
    entries = [None, *axes, *itertools.permutations(axes, 2)]
    found = []
    for spec in itertools.product(entries, repeat=ndim):
        named = [a for e in spec for a in (e if isinstance(e, tuple) else (e,)) if a is not None]
        if len(set(named)) == len(named):
            found.append(spec)
    return found


@pytest.mark.parametrize(("sizes", "axes"), MESHES)
def test_shardings_in_xlas_words(sizes, axes):
    jax = pytest.importorskip("jax", reason="the oracle of this test is JAX")
    theirs, ours = jax.sharding.AbstractMesh(sizes, axes), AbstractMesh(sizes, axes)
    for spec in specs(axes, 2):
        wanted = jax.NamedSharding(theirs, jax.P(*spec))._to_xla_hlo_sharding(2)
        found = NamedSharding(ours, P(*spec))._to_xla_hlo_sharding(2)
        assert repr(found) == repr(wanted), spec
        assert list(found.tile_assignment_devices()) == list(wanted.tile_assignment_devices())
        assert found.tile_assignment_dimensions() == list(wanted.tile_assignment_dimensions())
        if found.is_tiled():
            assert found.get_axis_sizes() == list(wanted.get_axis_sizes())


def test_terms_of_sums_in_xlas_words():
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(spmd.sharding.AxisType.Explicit,) * 2)
    texts = {
        P("x", unreduced={"y"}): "{devices=[4,2]<=[8] last_tile_dims={unreduced}}",
        P(None, unreduced={"y"}): "{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dims={unreduced, "
        "replicated}}",
        P(None, unreduced={"x", "y"}): "{unreduced}",
    }
    for spec, text in texts.items():
        assert repr(NamedSharding(mesh, spec)._to_xla_hlo_sharding(1)) == text


@pytest.mark.parametrize(
    "text",
    [
        "{replicated}",
        "{manual}",
        "{unreduced}",
        "{maximal device=3}",
        "{devices=[4,2]<=[8]}",
        "{devices=[4,2]0,2,1,3,4,6,5,7}",
        "{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}",
        "{devices=[2,2,2]<=[2,2,2]T(0,2,1) last_tile_dims={manual, replicated}}",
    ],
)
def test_a_description_is_read_as_it_is_written(text):
    made = HloSharding.from_string(text)
    assert repr(made) == text
    assert HloSharding.from_proto(made.to_proto()) == made
    assert hash(HloSharding.from_proto(made.to_proto())) == hash(made)


def test_subgroups_are_put_in_order():
    kinds = [OpShardingType.REPLICATED, OpShardingType.MANUAL]
    made = HloSharding.iota_tile((2, 2, 2), (8,), (0,), kinds)
    assert repr(made) == "{devices=[2,2,2]<=[2,2,2]T(0,2,1) last_tile_dims={manual, replicated}}"
    assert repr(HloSharding.iota_tile((1, 8), (8,), (0,), kinds[:1])) == "{replicated}"
    grid = np.array([[0, 3], [2, 1]])
    made = HloSharding.subgroup_with_device_ordering(grid, kinds[:1])
    assert repr(made) == "{devices=[2,2]0,3,1,2 last_tile_dim_replicate}"


def test_arrays_over_a_description():
    record = OpSharding()
    record.type = OpSharding.Type.OTHER
    record.tile_assignment_dimensions = [2, 2]
    record.tile_assignment_devices = [0, 2, 1, 3]
    devices = spmd.devices()[:4]
    place = GSPMDSharding(devices, record)
    x = np.arange(32.0).reshape(8, 4)
    y = spmd.device_put(x, place)
    assert y.sharding is place
    assert {s.device.id: s.data.tolist() for s in y.addressable_shards}[2] == x[:4, 2:].tolist()
    assert np.array_equal(spmd.jit(lambda x: x @ x.T)(y), x @ x.T)
    out = spmd.jit(lambda x: x * 2)(y)
    assert out.sharding.is_equivalent_to(place, 2)
    rows = spmd.jit(lambda x: x * 2, out_shardings=place)(x)
    assert rows.sharding.is_equivalent_to(place, 2) and np.array_equal(rows, 2 * x)
    whole = GSPMDSharding.get_replicated(devices)
    assert whole.is_fully_replicated and whole == GSPMDSharding(devices, HloSharding.replicate())


def test_errors_of_descriptions():
    devices = spmd.devices()[:4]
    with pytest.raises(ArgumentError, match="is for 8 devices, and 4 are given"):
        GSPMDSharding(devices, HloSharding.iota_tile((8,)))
    with pytest.raises(ArgumentError, match="does not say which device holds which part"):
        GSPMDSharding(devices, HloSharding.manual())
    with pytest.raises(ShardingError, match="splits 2 dims, and an array of shape"):
        GSPMDSharding(devices, HloSharding.iota_tile((2, 2))).shard_shape((8,))
    with pytest.raises(ArgumentError, match="no sharding in XLA's words"):
        HloSharding.from_string("{rows}")
    with pytest.raises(ArgumentError, match="are for 4 devices, and 3 are given"):
        HloSharding(OpShardingType.OTHER, (2, 2), (0, 1, 2))
