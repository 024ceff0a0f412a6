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
    with pytest.raises(ArgumentError, match="there is no memory kind 'tape'"):
        x.sharding.with_memory_kind("tape")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_is_known_of_results_before_they_are_there(kind: AxisType):
    """Types before the compiler has run, `out_shardings` always, all of it after it has."""
    mesh = spmd.make_mesh((2, 2), ("x", "y"), kind)
    x = spmd.device_put(X, NamedSharding(mesh, P("x")))
    is_typed = kind is AxisType.Explicit
    free = spmd.jit(lambda x: {"a": x * 2})
    for found in (free.eval_shape(x), spmd.eval_shape(lambda x: {"a": x * 2}, x)):
        assert found["a"].sharding == (
            NamedSharding(mesh.abstract_mesh, P("x", None)) if is_typed else None
        )
    lowered = free.lower(x)
    assert lowered.out_info["a"].sharding == (
        NamedSharding(mesh, P("x", None)) if is_typed else None
    )
    compiled = lowered.compile()
    assert compiled.out_info["a"].sharding == compiled.output_shardings["a"]
    assert compiled.out_info["a"].sharding.is_equivalent_to(free(x)["a"].sharding, 2)

    turned = NamedSharding(mesh, P("y"))
    fixed = spmd.jit(lambda x: (x * 2, x.sum()), out_shardings=(turned, None))
    stages = fixed.trace(x), fixed.lower(x), fixed.lower(x).compile()
    for info in (fixed.eval_shape(x), spmd.eval_shape(fixed, x), *(s.out_info for s in stages)):
        assert info[0].sharding.is_equivalent_to(turned, 2) and info[0].shape == (8, 4)
    with spmd.set_mesh(mesh):
        by_spec = spmd.jit(lambda x: x, out_shardings=P("y"))
        assert by_spec.eval_shape(x).sharding == turned
    one = spmd.jit(lambda x: x + 1).lower(X).compile()
    assert one.out_info.sharding == one.output_shardings == SingleDeviceSharding(spmd.devices()[0])


def test_stages_know_their_arguments():
    mesh = spmd.make_mesh((2, 2), ("x", "y"))
    x = spmd.device_put(X, NamedSharding(mesh, P("x")))
    f = spmd.jit(lambda x, rest: x * rest["b"], donate_argnums=0)
    traced = f.trace(x, {"b": 2.0})
    for stage in (traced, traced.lower(), traced.lower().compile()):
        args, kwargs = stage.in_avals
        assert kwargs == {} and args[0].short() == "f32[8@x,4]" and args[1]["b"].shape == ()
        (first, rest), _ = stage.args_info
        assert (first.donated, rest["b"].donated, stage.donate_argnums) == (True, False, (0,))
        assert (first.shape, first.dtype) == ((8, 4), np.float32)
        assert stage.in_tree == traced.in_tree
    assert traced.out_avals.short() == "f32[8@x,4]"
