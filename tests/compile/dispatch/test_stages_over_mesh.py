"""Ahead of time over a mesh: structures with shardings, and compiled calls that move nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import spmd
from spmd import NamedSharding, P
from spmd.errors import ArgumentError, ShardingError
from spmd.sharding import AxisType, SingleDeviceSharding

X = np.arange(32, dtype=np.float32).reshape(8, 4)


def placed(*spec: str | None) -> spmd.Array:
    mesh = spmd.make_mesh((2, 2), ("x", "y"), AxisType.Auto)
    return spmd.device_put(X, NamedSharding(mesh, P(*spec)))


def test_a_compiled_call_refuses_an_array_that_it_would_have_to_move():
    x = placed("x")
    compiled = spmd.jit(lambda x: x * 2).lower(x).compile()
    np.testing.assert_array_equal(compiled(x), X * 2)
    np.testing.assert_array_equal(compiled(X), X * 2)
    with pytest.raises(ShardingError, match=r"argument x .*nothing is moved silently"):
        compiled(placed("y"))


def test_structures_carry_shardings():
    explicit = NamedSharding(spmd.make_mesh((2, 2), ("x", "y")), P("x", "y"))
    struct = spmd.ShapeDtypeStruct((8, 4), np.float32, sharding=explicit)
    assert struct != spmd.ShapeDtypeStruct((8, 4), np.float32)
    assert struct.update(shape=(4, 4)).shape == (4, 4) and struct.update() == struct
    assert "sharding=NamedSharding" in repr(struct)
    found = spmd.eval_shape(lambda x: x.sum(0), struct)
    assert found.sharding.spec == P("y")
    compiled = spmd.jit(lambda x: x.T).lower(struct).compile()
    assert compiled.output_shardings.spec == P("y", "x")


def test_jit_takes_shardings_of_one_device():
    device = spmd.devices()[1]
    there = SingleDeviceSharding(device)
    for options in ({"in_shardings": there}, {"out_shardings": there}):
        out = spmd.jit(lambda x: x + 1, **options)(X)
        np.testing.assert_array_equal(out, X + 1)
        assert out.devices() == {device}


def test_copies_lie_where_the_array_lies():
    x = placed("x", "y")
    assert copy.deepcopy(x).sharding == x.sharding == copy.copy(x).sharding
    one = spmd.device_put(X, spmd.devices()[1])
    assert copy.deepcopy(one).devices() == one.devices()
    assert x.on_device_size_in_bytes() == X.nbytes
    assert x.sharding.with_memory_kind("device") == x.sharding
    with pytest.raises(ArgumentError, match="'pinned_host' does not exist"):
        x.sharding.with_memory_kind("pinned_host")
