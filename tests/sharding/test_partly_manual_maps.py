"""`shard_map` along some axes of a mesh; along others the compiler, or types, decide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax
from spmd.errors import ArgumentError, AxisError, ShardingError
from spmd.sharding import AxisType

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
TYPES = pytest.mark.parametrize(
    "types", [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)], ids=str
)


def mesh_of(*types: AxisType) -> spmd.Mesh:
    return spmd.make_mesh((2, 2), ("x", "y"), types)


def put(x: Any, mesh: spmd.Mesh, *spec: Any) -> spmd.Array:
    return spmd.device_put(x, NamedSharding(mesh, P(*spec)))


def total(x: Any) -> Any:
    return lax.psum(snp.sin(x) * 2, "x")


TOTAL = np.sin(X[:4]) * 2 + np.sin(X[4:]) * 2


@TYPES
@pytest.mark.parametrize("how", ["eager", "jit", "with other work", "disable_jit"])
def test_values_along_the_other_axis_stay_split(types: Any, how: str):
    mesh = mesh_of(*types)
    mapped = spmd.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P(), axis_names={"x"})
    f = {"jit": spmd.jit(mapped), "with other work": spmd.jit(lambda x: mapped(x * 1) + 0)}
    for x in (X, put(X, mesh, "x", "y"), put(X, mesh, "x")):
        with spmd.disable_jit(how == "disable_jit"):
            out = f.get(how, mapped)(x)
        np.testing.assert_allclose(out, TOTAL, 1e-6, 1e-6)
    if how != "disable_jit":
        split = f.get(how, mapped)(put(X, mesh, "x", "y"))
        assert split.addressable_shards[0].data.shape == (4, 2)


@TYPES
def test_gradients_are_those_of_one_device(types: Any):
    mesh = mesh_of(*types)

    def loss(w: Any, x: Any) -> Any:
        return lax.pmean((snp.tanh(snp.matmul(x, w)) ** 2).sum(), "x")

    mapped = spmd.shard_map(
        loss, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(), axis_names={"x"}
    )
    w, x = put(W, mesh, None, "y"), put(X, mesh, "x")
    want, slope = spmd.value_and_grad(lambda w: (snp.tanh(X @ w) ** 2).sum() / 2)(W)
    value, found = spmd.jit(spmd.value_and_grad(mapped))(w, x)
    np.testing.assert_allclose(value, want, 1e-5)
    np.testing.assert_allclose(found, slope, 1e-5, 1e-6)
    kinds = [c.kind for c in spmd.debug.collectives(spmd.jit(spmd.grad(mapped)))(w, x)]
    assert "all_gather" not in kinds and "all_to_all" not in kinds


def test_types_inside_say_what_is_left():
    seen: list[str] = []

    def look(x: Any) -> Any:
        seen.append(spmd.typeof(x).short())
        return x * 2

    for types in ((EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)):
        mesh = mesh_of(*types)
        spec = P("x")
        spmd.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"x"})(
            put(X, mesh, "x", "y")
        )
    assert seen == ["f32[4,4@y]{V:x}", "f32[4,4]{V:x}", "f32[4,4@y]{V:x}"]


@pytest.mark.parametrize("split", [("x",), ("x", "y"), ()], ids=str)
def test_collectives_along_the_manual_axis_of_values_split_along_the_other(split: Any):
    mesh = mesh_of(AUTO, AUTO)
    line = spmd.make_mesh((2,), ("x",), AUTO)

    def f(x: Any) -> Any:
        gathered = lax.all_gather(x, "x", axis=0, tiled=True)
        return (
            gathered,
            lax.all_gather(x, "x", axis=1)[:, 0],
            lax.psum_scatter(gathered, "x", scatter_dimension=0, tiled=True),
            lax.all_to_all(x, "x", 0, 1, tiled=True),
            lax.ppermute(x, "x", [(0, 1), (1, 0)]) + lax.axis_index("x"),
            lax.pmax(x, "x"),
        )

    specs = (P("x"), P("x"), P("x"), P(None, "x"), P("x"), P())
    here = spmd.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=specs, axis_names={"x"})
    there = spmd.shard_map(f, mesh=line, in_specs=P("x"), out_specs=specs)
    for found, want in zip(spmd.jit(here)(put(X, mesh, *split)), there(X), strict=True):
        np.testing.assert_array_equal(found, want)


def test_a_map_inside_takes_the_axes_that_are_left():
    mesh = mesh_of(AUTO, AUTO)

    def inner(x: Any) -> Any:
        return lax.psum(x * lax.axis_index("x"), "y")

    def outer(x: Any) -> Any:
        return spmd.shard_map(inner, in_specs=P(None, "y"), out_specs=P())(x)

    f = spmd.shard_map(outer, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    want = np.concatenate([0 * X[:4], X[4:]])
    for run in (f, spmd.jit(f)):
        np.testing.assert_array_equal(run(X), want[:, :2] + want[:, 2:])


def test_vmap_scan_and_control_flow_inside():
    mesh = mesh_of(AUTO, AUTO)

    def f(x: Any) -> Any:
        carry, ys = lax.scan(lambda c, r: (c + lax.psum(r, "x"), c), snp.zeros(4), x)
        small = lax.cond(lax.axis_index("x") == 0, lambda c: c, lambda c: -c, carry)
        return small[None], ys

    g = spmd.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=(P("x"), P()), axis_names={"x"})
    steps = X[:4] + X[4:]
    carry, ys = spmd.jit(g)(put(X, mesh, "x", "y"))
    np.testing.assert_allclose(carry, [steps.sum(0), -steps.sum(0)], 1e-5, 1e-6)
    np.testing.assert_allclose(ys, np.cumsum(steps, 0) - steps, 1e-5, 1e-6)
    mapped = spmd.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P(), axis_names={"x"})
    twice = spmd.jit(spmd.vmap(mapped))(np.stack([X, X]))
    np.testing.assert_allclose(twice, [TOTAL, TOTAL], 1e-6, 1e-6)


def test_prints_come_from_each_position_along_the_manual_axis(capfd):
    mesh = mesh_of(AUTO, AUTO)

    def f(x: Any) -> Any:
        spmd.debug.print("row {}", x[0, 0])
        return x

    g = spmd.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    spmd.jit(g)(np.arange(8, dtype=np.float32).reshape(8, 1)).block_until_ready()
    spmd.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "row 0.0", "row 4.0"]


def test_specs_are_those_of_the_arguments_unless_given():
    mesh = mesh_of(EXPLICIT, EXPLICIT)
    x = put(X, mesh, "x", "y")
    out = spmd.shard_map(lambda x: x.sum(keepdims=True), mesh=mesh, out_specs=P("x", "y"))(x)
    np.testing.assert_allclose(out, X.reshape(2, 4, 2, 2).sum((1, 3)), 1e-5)
    part = spmd.shard_map(total, mesh=mesh, out_specs=P(), axis_names={"x"})(x)
    assert spmd.typeof(part).short() == "f32[4,4@y]"


def gathered(x: Any) -> Any:
    """Equal on all devices, which types do not know."""
    return lax.all_gather(snp.sin(x), "x", tiled=True)


def loop(x: Any) -> Any:
    return lax.scan(lambda c, row: (c + lax.psum(row, "x") ** 2, None), snp.zeros_like(x[0]), x)[0]


# The map, its out_spec, and what it means for whole values.
TRUSTED = {
    "sum": (total, P(), lambda x: 2 * snp.sin(x[:4]) + 2 * snp.sin(x[4:])),
    "gathered": (gathered, P(), snp.sin),
    "split": (lambda x: x * (1 + lax.axis_index("x")), P("x"), lambda x: x * (1 + (ROWS > 3))),
    "loop": (loop, P(), lambda x: ((x[:4] + x[4:]) ** 2).sum(0)),
    "no axis": (lambda x: snp.cos(x[:1]) * 0 + 1, P(), lambda x: snp.ones((1, 4))),
}
ROWS = np.arange(8)[:, None]


@TYPES
@pytest.mark.parametrize("name", TRUSTED)
def test_results_that_are_equal_by_the_user_s_word(types: Any, name: str):
    """`check_vma=False`: values, gradients and batches are those of whole arrays."""
    mesh = mesh_of(*types)
    body, out, meaning = TRUSTED[name]
    f = spmd.shard_map(
        body, mesh=mesh, in_specs=P("x"), out_specs=out, axis_names={"x"}, check_vma=False
    )
    x = put(X, mesh, "x", "y")
    more = spmd.jit(lambda x: f(x * 2) + 1)
    for found, want in (
        (f(x), meaning(X)),
        (spmd.jit(f)(x), meaning(X)),
        (more(x), meaning(2 * X) + 1),
        (spmd.jit(spmd.vmap(f))(snp.stack([x, x * 3])), spmd.vmap(meaning)(np.stack([X, 3 * X]))),
        (
            spmd.jit(spmd.grad(lambda x: (f(x) ** 2).sum()))(x),
            spmd.grad(lambda x: (meaning(x) ** 2).sum())(X),
        ),
    ):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    with spmd.disable_jit():
        np.testing.assert_allclose(f(x), meaning(X), rtol=1e-5, atol=1e-5)
    if AUTO in types and name == "gathered":  # without the user's word it is a mistake
        with pytest.raises(ShardingError, match="varies there"):
            spmd.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=out, axis_names={"x"})(x)


def test_trusted_maps_are_exported_and_split_along_the_compiler_s_axes():
    mesh = mesh_of(AUTO, AUTO)
    f = spmd.jit(
        spmd.shard_map(
            gathered, mesh=mesh, in_specs=P("x"), out_specs=P(), axis_names={"x"}, check_vma=False
        )
    )
    x = put(X, mesh, "x", "y")
    loaded = spmd.export.deserialize(spmd.export.export(f)(x).serialize())
    np.testing.assert_allclose(loaded.call(x), np.sin(X), rtol=1e-6)
    assert f(x).sharding.is_equivalent_to(NamedSharding(mesh, P(None, "y")), 2)
    assert [c.kind for c in spmd.debug.collectives(f)(x)] == ["all_gather"]


@pytest.mark.parametrize(
    ("types", "how", "error", "told"),
    [
        (AUTO, {"in_specs": P("y"), "axis_names": {"x"}}, ShardingError, "not among axis_names"),
        (AUTO, {"in_specs": P("x"), "axis_names": {"q"}}, ShardingError, "names 'q'"),
        (AUTO, {"axis_names": {"x"}}, ArgumentError, "give in_specs"),
        (EXPLICIT, {"in_specs": P("x")}, ShardingError, "nothing is moved silently"),
        (EXPLICIT, {"in_specs": P("y"), "axis_names": {"y"}}, ShardingError, "moved silently"),
    ],
)
def test_mistakes_are_named(types: Any, how: dict[str, Any], error: Any, told: str):
    mesh = mesh_of(types, types)
    with pytest.raises(error, match=told):
        spmd.shard_map(lambda x: x, mesh=mesh, out_specs=P("x"), **how)(put(X, mesh, "x", "y"))


def test_collectives_along_axes_of_the_compiler_are_refused():
    mesh = mesh_of(AUTO, AUTO)
    f = spmd.shard_map(
        lambda x: lax.psum(x, "y"), mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    with pytest.raises(AxisError, match="unbound axis name 'y'"):
        f(X)
    with pytest.raises(ShardingError, match=r"out_spec of output 0.*not among axis_names"):
        spmd.shard_map(lambda x: x, mesh=mesh, in_specs=P("x"), out_specs=P("y"), axis_names={"x"})(
            X
        )


def test_work_that_is_not_partitioned_beside_such_a_map_is_an_error():
    mesh = mesh_of(AUTO, AUTO)
    mapped = spmd.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P(), axis_names={"x"})
    same = spmd.pmap(lambda x: x, devices=spmd.devices()[:4])
    found = spmd.jit(lambda x: mapped(x) + same(x[:4]).sum())(X)
    np.testing.assert_allclose(found, mapped(X) + X[:4].sum(), rtol=1e-5)
    other = spmd.pmap(lambda x: x, devices=spmd.devices()[:2])
    with pytest.raises(ShardingError, match="leaves axes to the compiler"):
        spmd.jit(lambda x: mapped(x) + other(x[:2]).sum())(X)


def test_smap_takes_dims_for_specs():
    mesh = mesh_of(AUTO, AUTO)

    def f(x: Any, w: Any) -> Any:
        return x @ w, lax.psum(x.sum(0), "x")

    with spmd.set_mesh(mesh):
        rows, total = spmd.smap(f, in_axes=(0, None), out_axes=(0, None), axis_name="x")(X, W)
        columns = spmd.smap(lambda x: x * 2, in_axes=-1, out_axes=1, axis_name="y")(X)
        with pytest.raises(spmd.errors.ArgumentError, match="in_axes=2 must be"):
            spmd.smap(lambda x: x, in_axes=2, out_axes=0, axis_name="x")(X)
    np.testing.assert_allclose(rows, X @ W, 1e-5, 1e-6)
    np.testing.assert_allclose(total, X.sum(0), 1e-5, 1e-6)
    np.testing.assert_array_equal(columns, X * 2)
    with spmd.set_mesh(mesh_of(EXPLICIT, EXPLICIT)) as _:
        x = spmd.device_put(X, P("x", "y"))
        out = spmd.smap(lambda x: x + 1, out_axes=0, axis_name="x")(x)
        assert spmd.typeof(out).short() == "f32[8@x,4@y]"


def test_constraints_inside_lay_out_along_the_other_axis():
    mesh = mesh_of(AUTO, AUTO)

    def f(x: Any) -> Any:
        h = lax.with_sharding_constraint(snp.sin(x), NamedSharding(mesh, P(None, "y")))
        return h * 2

    g = spmd.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    out = spmd.jit(g)(put(X, mesh, "x"))
    np.testing.assert_allclose(out, np.sin(X) * 2, 1e-6, 1e-6)
    assert out.sharding.spec == P("x", "y")
    for names, spec in (({"x"}, P("x")), ({"x", "y"}, P())):
        wrong = NamedSharding(mesh, spec)
        with pytest.raises(ShardingError, match="one device's shard already"):
            spmd.shard_map(
                lambda x, wrong=wrong: lax.with_sharding_constraint(x, wrong),
                mesh=mesh,
                in_specs=P("x"),
                out_specs=P("x"),
                axis_names=names,
            )(X)


@pytest.mark.parametrize("names", [None, {"x"}, {"x", "y"}], ids=["none", "one", "both"])
def test_a_map_inside_needs_no_axes_of_its_own(names: Any):
    """As in JAX, a map over axes that are manual already is a call."""
    mesh = mesh_of(AUTO, AUTO)

    def inside(x: Any) -> Any:
        return x * 2 + lax.psum(x, "y") + lax.axis_index("x")

    def outside(x: Any) -> Any:
        own = {} if names is None else {"axis_names": names}
        return spmd.shard_map(inside, in_specs=P(), out_specs=P(), **own)(x)

    mapped = spmd.shard_map(outside, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    want = X * 4 + np.repeat([0, 1], 4)[:, None]
    for f in (mapped, spmd.jit(mapped)):
        np.testing.assert_allclose(f(X), want, 1e-6)
    slope = spmd.jit(spmd.grad(lambda x: mapped(x).sum()))(X)
    np.testing.assert_allclose(slope, np.full_like(X, 4), 1e-6)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"in_specs": P("x"), "out_specs": P()}, r"in_specs has P\('x',\).*manual.*Write P\(\)"),
        ({"in_specs": P(), "out_specs": P("y")}, r"out_specs has P\('y',\).*manual.*Write P\(\)"),
        ({"mesh": True, "in_specs": P("x"), "out_specs": P("x")}, "made 'x' manual already.*mesh="),
    ],
    ids=str,
)
def test_a_map_inside_cannot_split_what_is_split(how: Any, told: str):
    mesh = mesh_of(AUTO, AUTO)
    how = how | {"mesh": mesh} if "mesh" in how else how
    f = spmd.shard_map(
        lambda x: spmd.shard_map(snp.sin, **how)(x), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    with pytest.raises(AxisError, match=told):
        f(X)
