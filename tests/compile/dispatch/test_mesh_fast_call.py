"""Repeated calls of mapped functions: the closures give what the general path gives."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.errors import DeletedError, DeviceError, ShapeError
from spmd.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    get_abstract_mesh,
    use_abstract_mesh,
)
from spmd.sharding import PartitionSpec as P
from tests.compile.dispatch.fast_calls import is_fast

X = np.arange(8, dtype=np.float32).reshape(4, 2)


def repeat(f: Any, *args: Any, times: int = 4) -> Any:
    """The results of several equal calls, which must all be alike; the last one."""
    outs = [f(*args) for _ in range(times)]
    for out in outs[1:]:
        for a, b in zip(spmd.tree.leaves(out), spmd.tree.leaves(outs[0]), strict=True):
            assert a.aval is b.aval
            assert a.sharding == b.sharding
            np.testing.assert_array_equal(a, b)
    return outs[-1]


def test_sharded_arguments_take_the_fast_call():
    f = spmd.pmap(lambda x: lax.psum(x, "i") + x, axis_name="i")
    y = f(X)
    np.testing.assert_array_equal(repeat(f, y), np.asarray(y) + np.asarray(y).sum(0))
    assert is_fast(f, y)


def test_results_of_fast_calls_are_arguments_of_the_next():
    f = spmd.pmap(lambda x: lax.pmean(x, "i") + 1, axis_name="i")
    out = X
    for _ in range(6):
        out = f(out)
    np.testing.assert_allclose(out, np.broadcast_to(X.mean(0) + 6, X.shape))
    assert len({s.data.ptr for s in out.addressable_shards}) == 4
    assert [s.device for s in out.addressable_shards] == spmd.devices()[:4]


@pytest.mark.parametrize("kind", ["numpy", "array"])
@pytest.mark.parametrize("in_axes", [0, None])
def test_whole_arguments_are_cut_by_address(kind: str, in_axes: int | None):
    f = spmd.pmap(
        lambda x: x * (1 + lax.axis_index("i")), axis_name="i", in_axes=in_axes, axis_size=4
    )
    x = X if kind == "numpy" else spmd.device_put(X)
    row = X if in_axes == 0 else np.broadcast_to(X, (4, *X.shape))
    scale = np.arange(1, 5, dtype=np.float32).reshape(4, *[1] * (row.ndim - 1))
    np.testing.assert_array_equal(repeat(f, x), row * scale)
    assert is_fast(f, x)
    # The closure reads what is there now, and a view of other strides goes the general way.
    other = X[::-1] + 1
    expected = (other if in_axes == 0 else np.broadcast_to(other, row.shape)) * scale
    np.testing.assert_array_equal(f(other), expected)
    np.testing.assert_array_equal(f(np.asfortranarray(other)), expected)


def test_arguments_cut_along_another_dim_take_the_general_path():
    f = spmd.pmap(lambda x: x.sum(), in_axes=1)
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(repeat(f, x), x.sum(0))
    assert not is_fast(f, x)


def test_numbers_static_arguments_trees_and_keywords_are_matched():
    def f(params: Any, scale: Any, mode: str, *, x: Any) -> Any:
        out = {"y": params["w"] * scale + x, "same": params["b"]}
        return (out, [x + 0]) if mode == "pair" else (out, [])

    mapped = spmd.pmap(f, in_axes=(0, None, None), static_broadcasted_argnums=2)
    params = {"w": spmd.pmap(lambda x: x)(X), "b": spmd.pmap(lambda x: x)(X + 1)}

    def call(scale: float, mode: str) -> Any:
        return mapped(params, scale, mode, x=X)

    for scale, mode in [(2.0, "pair"), (3.5, "pair"), (2.0, "one")]:
        out, rest = repeat(call, scale, mode)
        np.testing.assert_array_equal(out["y"], X * np.float32(scale) + X)
        np.testing.assert_array_equal(out["same"], X + 1)
        assert len(rest) == (mode == "pair")
    assert is_fast(call, 2.0, "pair") and is_fast(call, 2.0, "one")


def test_other_shapes_dtypes_and_shardings_miss():
    f = spmd.pmap(lambda x: x + 1)
    y = f(X)
    repeat(f, y)
    np.testing.assert_array_equal(f(f(X[:, :1])), X[:, :1] + 2)
    np.testing.assert_array_equal(f(f(X.astype(np.int32))), X + 2)
    mesh = spmd.make_mesh((2, 2), ("a", "b"))
    elsewhere = spmd.device_put(X, NamedSharding(mesh, P(("b", "a"))))
    with pytest.raises(DeviceError, match="nothing is moved silently"):
        f(elsewhere)
    with pytest.raises(ShapeError):
        f(3.0)


def test_transformations_do_not_use_fast_calls():
    f = spmd.pmap(lambda x: snp.sin(x) * lax.psum(x, "i"), axis_name="i")
    y = spmd.pmap(lambda x: x)(X)
    repeat(f, y)
    assert is_fast(f, y)
    gradient = spmd.grad(lambda x: f(x).sum())(y)
    plain = spmd.vmap(lambda x: snp.sin(x) * lax.psum(x, "i"), axis_name="i")
    np.testing.assert_allclose(gradient, spmd.grad(lambda x: plain(x).sum())(X), rtol=1e-5)
    np.testing.assert_allclose(spmd.jit(f)(y), plain(X), rtol=1e-6)
    seen = []
    with spmd.disable_jit():
        spmd.pmap(lambda x: seen.append(str(x)), axis_name="i")(y)
    assert "cpu:3 (i=3)" in seen[0]


def test_wide_dicts_are_matched_by_their_keys():
    f = spmd.pmap(lambda t: {k: v + lax.axis_index("i") for k, v in t.items()}, axis_name="i")
    tree = {f"k{7 * k % 10}": X + k for k in range(10)}
    for given in (tree, f(tree)):
        for _ in range(4):
            out = f(given)
            for k, v in given.items():
                np.testing.assert_array_equal(out[k], v + np.arange(4, dtype=np.float32)[:, None])


def test_donated_arguments_are_deleted():
    f = spmd.pmap(lambda x, y: (x + y, y), donate_argnums=0)
    make = spmd.pmap(lambda x: x * 1)
    y = make(X)
    for _ in range(4):
        x = make(X)
        out, same = f(x, y)
        np.testing.assert_array_equal(out, 2 * X)
        np.testing.assert_array_equal(same, X)
        assert x.is_deleted() and not y.is_deleted()
    with pytest.raises(DeletedError):
        f(x, y)


def test_deleted_arguments_are_errors():
    f = spmd.pmap(lambda x: x * 2)
    y = f(X)
    repeat(f, y)
    y.delete()
    with pytest.raises(DeletedError):
        f(y)


def test_shard_map_has_large_and_small_results():
    mesh = spmd.make_mesh((2, 2), ("a", "b"))
    specs = {"in_specs": (P("a", "b"), P()), "out_specs": (P("a", "b"), P(), P("b"))}

    @spmd.shard_map(mesh=mesh, **specs)
    def f(x: Any, w: Any) -> Any:
        return x * w, lax.psum(x.sum(), ("a", "b")), lax.psum(x, "a")[0]

    x = np.random.default_rng(0).normal(size=(256, 512)).astype(np.float32)
    placed = spmd.device_put(x, NamedSharding(mesh, P("a", "b")))
    for w in (2.0, 3.0):
        large, total, column = repeat(f, placed, w)
        np.testing.assert_array_equal(large, x * np.float32(w))
        np.testing.assert_allclose(total, x.sum(), rtol=1e-3)
        np.testing.assert_allclose(column, x[0] + x[128], rtol=1e-5)


def test_a_change_of_settings_forgets_fast_calls():
    f = spmd.pmap(lambda x: x + 1)
    repeat(f, X)
    assert is_fast(f, X)
    with spmd.config.override("enable_x64", True):
        assert not is_fast(f, X)
        assert f(X.astype(np.float64)).dtype == np.float64


# ---- jit of a whole shard_map ------------------------------------------------------------------


def mapped_rows(f: Any) -> Any:
    return spmd.shard_map(
        f, mesh=spmd.make_mesh((4,), ("i",)), in_specs=(P(), P("i")), out_specs=(P(), P("i"))
    )


def test_jit_of_shard_map_keeps_shards_in_place():
    f = spmd.jit(mapped_rows(lambda w, x: (lax.psum(x.sum(), "i") + w, x * w)))
    total, rows = f(2.0, X)
    assert rows.sharding.spec == P("i")
    for _ in range(4):
        total, rows = f(total * 0 + 1, rows)
        np.testing.assert_allclose(total, 2 * X.sum() + 1)
        np.testing.assert_array_equal(rows, 2 * X)
    assert is_fast(f, total, rows)
    compiled = f.lower(total, rows).compile()
    np.testing.assert_array_equal(compiled(total, rows)[1], np.asarray(total) * 2 * X)


def test_jit_of_shard_map_may_capture_swap_and_repeat_values():
    inner = mapped_rows(lambda w, x: (w * 1, x * w))
    captured = spmd.device_put(X)

    @spmd.jit
    def f(x: Any, unused: Any, w: Any) -> Any:
        first, rows = inner(w, captured)
        return rows, first, rows

    for _ in range(3):
        a, b, c = f(X, X, 3.0)
        np.testing.assert_array_equal(a, 3 * X)
        np.testing.assert_array_equal(c, 3 * X)
        assert float(b) == 3.0


def test_jit_of_shard_map_donates_its_arguments():
    f = spmd.jit(mapped_rows(lambda w, x: (w + 1, x + w)), donate_argnums=1)
    w, x = f(0.0, X)
    for _ in range(4):
        old = x
        w, x = f(w, x)
        assert old.is_deleted()
    np.testing.assert_array_equal(x, X + 10)


def test_jit_may_hold_more_than_a_shard_map():
    inner = mapped_rows(lambda w, x: (lax.psum(x.sum(), "i"), x * w))
    f = spmd.jit(lambda w, x: (inner(w + 1, x * 2)[1] - 1, x))
    for argument in (X, inner(1.0, X)[1]):
        for _ in range(3):
            y, same = f(1.0, argument)
            np.testing.assert_array_equal(y, X * 4 - 1)
            np.testing.assert_array_equal(same, X)


def general_calls(f: Any, *args: Any) -> int:
    """How often a call of a jitted function takes the general path."""
    with cProfile.Profile() as profile:
        f(*args)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return sum(count for (_, _, name), (count, *_) in stats.items() if name == "_call_pure")


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in another"])
def test_what_reads_the_mesh_has_fast_calls_outside_of_it(nested: bool):
    """In each scope the function sees the mesh there, however often it was called elsewhere."""

    def reads(x: Any) -> Any:
        return x + len(get_abstract_mesh().axis_names)

    inner = spmd.jit(reads)
    f = spmd.jit(lambda x: inner(x) * 1) if nested else inner
    x = np.zeros(3, np.float32)
    for axes in ((), ("x",), (), ("x", "y"), ("x",), ()):
        with use_abstract_mesh(AbstractMesh((2,) * len(axes), axes)):
            for _ in range(3):
                assert (np.asarray(f(x)) == len(axes)).all()
            assert general_calls(f, x) == 0
    for _ in range(3):
        assert (np.asarray(f(x)) == 0).all()
    assert general_calls(f, x) == 0


def test_a_spec_over_the_mesh_around_has_fast_calls_where_it_means_the_same():
    first, second = (
        spmd.make_mesh(
            (2,),
            ("x",),
            devices=spmd.devices()[k : k + 2],
            axis_types=(AxisType.Auto,),
        )
        for k in (0, 2)
    )
    f = spmd.jit(lambda x: spmd.lax.with_sharding_constraint(x + 1, spmd.P("x")))
    x = np.zeros(4, np.float32)
    for mesh in (first, second, first, second):
        with mesh:
            for _ in range(3):
                assert f(x).sharding.mesh is mesh
            assert general_calls(f, x) == 0
