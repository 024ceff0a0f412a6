"""`vmap(spmd_axis_name=...)`: a shard_map inside splits the examples; JAX is the oracle."""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.errors import ShardingError
from spmd.sharding import NamedSharding
from spmd.sharding import PartitionSpec as P

RNG = np.random.default_rng(4)
X = RNG.normal(size=(6, 4)).astype(np.float32)
W = RNG.normal(size=3).astype(np.float32)
OURS = types.SimpleNamespace(spmd=spmd, np=snp, lax=lax, P=P, mesh=lambda: mesh_of())


def mesh_of() -> spmd.sharding.Mesh:
    return spmd.make_mesh((2, 2), ("i", "j"))


def body(lib: Any, x: Any, w: Any) -> Any:
    total, _ = lib.lax.scan(lambda c, y: (c * y + w.sum(), None), 0 * x[0], x)
    return lib.lax.psum(lib.np.sin(x) * total, "j"), w * 2


def one_axis(lib: Any) -> Any:
    specs = {"in_specs": (lib.P("j"), lib.P()), "out_specs": (lib.P(), lib.P())}
    f = lib.spmd.shard_map(functools.partial(body, lib), mesh=lib.mesh(), **specs)
    return lib.spmd.vmap(f, in_axes=(0, None), out_axes=(0, None), spmd_axis_name="i")


def two_axes(lib: Any) -> Any:
    f = lib.spmd.shard_map(
        lambda x, w: x * x.sum() + w.sum(), mesh=lib.mesh(), in_specs=lib.P(), out_specs=lib.P()
    )
    return lib.spmd.vmap(f, in_axes=(1, None), spmd_axis_name=("i", "j"))


def nested(lib: Any) -> Any:
    f = lib.spmd.shard_map(
        lambda x, w: lib.np.cumsum(x), mesh=lib.mesh(), in_specs=lib.P(), out_specs=lib.P()
    )
    inner = lib.spmd.vmap(f, in_axes=(0, None), spmd_axis_name="i")
    outer = lib.spmd.vmap(inner, in_axes=(0, None), spmd_axis_name="j")
    return lambda x, w: outer(x.reshape(2, 2, 6), w)


PROGRAMS = (one_axis, two_axes, nested)


@pytest.mark.parametrize("make", PROGRAMS)
def test_values_and_shardings_are_those_of_jax(make: Any):
    jax = pytest.importorskip("jax")
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("i", "j"))
    theirs = types.SimpleNamespace(
        spmd=jax, np=jax.numpy, lax=jax.lax, P=jax.sharding.PartitionSpec, mesh=lambda: mesh
    )
    found = make(OURS)(X, W)
    want = jax.jit(make(theirs))(X, W)
    for a, b in zip(spmd.tree.leaves(found), spmd.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        mine = {s.device.id: s.index for s in a.addressable_shards}
        other = {s.device.id: s.index for s in b.addressable_shards}
        for device, index in other.items():
            assert bounds(mine[device], a.shape) == bounds(index, b.shape)


def bounds(index: Any, shape: Any) -> list[Any]:
    return [s.indices(n) for s, n in zip(index, shape, strict=True)]


@pytest.mark.parametrize("jitted", [False, True])
def test_the_meaning_is_that_of_vmap_without_it(jitted: bool):
    def loss(f: Any) -> Any:
        return lambda x, w: snp.sum(f(x, w)[0] ** 2)

    split = one_axis(OURS)
    mapped = spmd.shard_map(
        functools.partial(body, OURS),
        mesh=mesh_of(),
        in_specs=(P("j"), P()),
        out_specs=(P(), P()),
    )
    whole = spmd.vmap(mapped, in_axes=(0, None), out_axes=(0, None))
    wrap = spmd.jit if jitted else lambda f: f
    for a, b in zip(wrap(split)(X, W), wrap(whole)(X, W), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    found = wrap(spmd.grad(loss(split), (0, 1)))(X, W)
    want = wrap(spmd.grad(loss(whole), (0, 1)))(X, W)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def test_each_device_computes_its_share_of_the_examples():
    shapes = []

    def one(x: Any) -> Any:
        shapes.append(x.shape)
        return spmd.pure_callback(lambda x: x * 2, x, x, vmap_method="expand_dims")

    f = spmd.shard_map(one, mesh=mesh_of(), in_specs=P(), out_specs=P())
    out = spmd.vmap(f, spmd_axis_name=("i", "j"))(X.reshape(8, 3))
    assert shapes == [(3,)] and out.sharding == NamedSharding(mesh_of(), P(("i", "j")))
    assert {s.data.shape for s in out.addressable_shards} == {(2, 3)}
    np.testing.assert_array_equal(out, X.reshape(8, 3) * 2)


def test_without_a_shard_map_it_changes_nothing():
    np.testing.assert_array_equal(spmd.vmap(snp.sin, spmd_axis_name="i")(X), snp.sin(X))


def test_mistakes_are_named():
    f = spmd.shard_map(lambda x: x, mesh=mesh_of(), in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(ShardingError, match="its specs use mesh axis 'i' too"):
        spmd.vmap(f, spmd_axis_name="i")(X)
    with pytest.raises(ShardingError, match="mesh axis 'k' does not exist; the mesh has 'i', 'j'"):
        spmd.vmap(f, spmd_axis_name="k")(X)
    with pytest.raises(ShardingError, match="3 examples cannot be split over 2 devices"):
        spmd.vmap(f, spmd_axis_name="j")(X[:3])
    g = spmd.shard_map(
        lambda x: lax.axis_index("i") + x, mesh=mesh_of(), in_specs=P(), out_specs=P("i")
    )
    with pytest.raises(ShardingError, match="'i' too"):
        spmd.vmap(g, spmd_axis_name="i")(X)
