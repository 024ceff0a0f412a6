"""shard_alike: two values get one layout, in every transformation, and values stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax
from spmd.errors import ArgumentError, PytreeError, ShapeError, ShardingTypeError
from spmd.shard_alike import shard_alike
from spmd.sharding import AxisType

A = np.arange(64, dtype=np.float32).reshape(8, 8) / 8
B = np.cos(A)


def mesh_of(kind: AxisType = AxisType.Auto) -> spmd.Mesh:
    return spmd.make_mesh((4,), ("x",), kind)


def put(x: Any, *spec: Any) -> Any:
    return spmd.device_put(x, NamedSharding(mesh_of(), P(*spec)))


def test_it_is_exported_where_layouts_are():
    assert spmd.sharding.shard_alike is shard_alike


def test_an_array_that_is_not_placed_lies_as_the_other():
    f = spmd.jit(lambda x, y: shard_alike(x, y))
    for x, y in shard_alike(put(A, "x"), B), f(put(A, "x"), B):
        assert x.sharding.spec == y.sharding.spec == P("x")
        np.testing.assert_array_equal(x, A)
        np.testing.assert_array_equal(y, B)
    y, x = f(B, put(A, None, "x"))
    assert x.sharding.spec == y.sharding.spec == P(None, "x")
    assert not spmd.debug.collectives(f)(put(A, "x"), B)


def test_an_inner_value_lies_as_the_other():
    @spmd.jit
    def f(x):
        x, zeros = shard_alike(x, snp.zeros((8, 8)))
        return zeros + lax.iota(np.float32, 8)

    assert f(put(A, "x")).sharding.spec == P("x")


def test_of_two_layouts_one_is_moved():
    f = spmd.jit(lambda x, y: shard_alike(x, y))
    arguments = put(A, "x"), put(B, None, "x")
    x, y = f(*arguments)
    assert x.sharding.spec == y.sharding.spec
    np.testing.assert_array_equal(x, A)
    np.testing.assert_array_equal(y, B)
    assert [c.kind for c in spmd.debug.collectives(f)(*arguments)] == ["all_to_all"]


def test_without_a_mesh_arguments_are_returned():
    x, y = shard_alike(A, B)
    assert x is A and y is B
    x, y = spmd.jit(lambda x, y: shard_alike(x, y))(A, B)
    np.testing.assert_array_equal(x, A)
    np.testing.assert_array_equal(y, B)


def test_pytrees_and_dtypes():
    x = {"a": put(A, "x"), "b": (put(A, None, "x"),)}
    y = {"a": A.astype(np.int32), "b": (A > 1,)}
    x, y = spmd.jit(lambda x, y: shard_alike(x, y))(x, y)
    assert y["a"].sharding.spec == P("x") and y["b"][0].sharding.spec == P(None, "x")
    assert (y["a"].dtype, y["b"][0].dtype) == (np.int32, np.bool_)
    np.testing.assert_array_equal(y["a"], A.astype(np.int32))


def test_scan():
    def f(xs, y):
        def step(c, x):
            c, x = shard_alike(c + x, snp.sin(x))
            return c, x

        return lax.scan(step, y, xs)

    carry, ys = spmd.jit(f)(put(A, None, "x"), B[0])
    assert (carry.sharding.spec, ys.sharding.spec) == (P("x"), P(None, "x"))
    wanted = f(A, B[0])
    np.testing.assert_allclose(carry, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(ys, wanted[1], rtol=1e-6)


def test_grad():
    def loss(x, y):
        x, y = shard_alike(snp.sin(x), y)
        return (x * y).sum()

    grads = spmd.jit(spmd.grad(loss, argnums=(0, 1)))(put(A, "x"), B)
    assert [g.sharding.spec for g in grads] == [P("x"), P("x")]
    np.testing.assert_allclose(grads[0], np.cos(A) * B, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads[1], np.sin(A), rtol=1e-5, atol=1e-6)


def test_derivatives_where_one_side_has_none():
    f = lambda x: (shard_alike(x * 2, np.arange(8))[0] * 3).sum()  # noqa: E731
    np.testing.assert_array_equal(spmd.jit(spmd.grad(f))(A[0]), np.full(8, 6.0))
    _, tangents = spmd.jvp(lambda x: shard_alike(x, B), (A,), (np.ones_like(A),))
    np.testing.assert_array_equal(tangents[0], np.ones_like(A))
    np.testing.assert_array_equal(tangents[1], np.zeros_like(A))
    hessian = spmd.hessian(lambda x: shard_alike(x, B[0])[0] @ shard_alike(x, x)[1])(A[0])
    np.testing.assert_allclose(hessian, 2 * np.eye(8), atol=1e-6)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (0, 1), (1, 1)])
def test_vmap(axes):
    given = [v[0] if d is None else v for v, d in zip((A, B), axes, strict=True)]
    x, y = spmd.jit(spmd.vmap(shard_alike, axes))(*given)
    for out, v, d in zip((x, y), given, axes, strict=True):
        wanted = np.broadcast_to(v, (8, 8)) if d is None else np.moveaxis(v, d, 0)
        np.testing.assert_array_equal(out, wanted)


def test_in_shard_map():
    @spmd.shard_map(mesh=mesh_of(), in_specs=(P("x"), P()), out_specs=P("x"))
    def f(x, y):
        x, y = shard_alike(x, y)
        return x * y

    np.testing.assert_allclose(f(A, B[:2]), A * np.tile(B[:2], (4, 1)), rtol=1e-6)
    g = spmd.jit(spmd.grad(lambda y: f(A, y).sum()))(B[:2])
    np.testing.assert_allclose(g, A.reshape(4, 2, 8).sum(0), rtol=1e-5)


def test_explicit_types_must_agree():
    rows, columns = (
        NamedSharding(mesh_of(AxisType.Explicit), P(*s)) for s in (("x",), (None, "x"))
    )
    x, y = spmd.jit(shard_alike)(spmd.device_put(A, rows), B)
    assert spmd.typeof(x).short() == spmd.typeof(y).short() == "f32[8@x,8]"
    with pytest.raises(ShardingTypeError, match="shard_alike of"):
        spmd.jit(shard_alike)(spmd.device_put(A, rows), spmd.device_put(B, columns))


def test_errors():
    with pytest.raises(ShapeError, match=r"x\['b'\] has shape \(8, 8\), and y\['b'\] has \(3, 8\)"):
        shard_alike({"a": A, "b": A}, {"a": A, "b": A[:3]})
    with pytest.raises(ShapeError, match="Reshape or broadcast"):
        spmd.jit(shard_alike)(A, 1.0)
    with pytest.raises(PytreeError, match="give two pytrees of one structure"):
        shard_alike((A,), A)
    with pytest.raises(ArgumentError, match="argument y is 'a'"):
        shard_alike(A, "a")
