"""pmaps and maps with `check_vma=False` in programs over a mesh: nodes with fixed layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax
from spmd.partition.untyped_maps import with_typed_maps
from tests.partition.programs import auto_mesh

RNG = np.random.default_rng(0)
X = RNG.random((4, 4)).astype(np.float32)
W = RNG.random((4, 4)).astype(np.float32)
TURN = [(k, (k + 1) % 4) for k in range(4)]

Case = Callable[[Any, Any], Any]


def rolled(row: Any) -> Any:
    return lax.scan(
        lambda c, a: (c + lax.ppermute(a, "i", TURN), a * lax.psum(c, "i")), snp.float32(0), row
    )[1]


CASES: dict[str, Case] = {
    "a sum": lambda x, w: spmd.pmap(
        lambda r, w: lax.psum(r @ w, "i"), axis_name="i", in_axes=(0, None), out_axes=None
    )(x, w),
    "a sum of what is equal on all": lambda x, w: spmd.pmap(
        lambda r: r * lax.psum(2.0, "i"), axis_name="i"
    )(x),
    "a sum of an argument that all share": lambda x, w: spmd.pmap(
        lambda r, w: r + lax.psum(w, "i").sum(0), axis_name="i", in_axes=(0, None)
    )(x, w),
    "columns": lambda x, w: spmd.pmap(
        lambda c, w: c * lax.psum(snp.sin(c) @ w, "i"),
        axis_name="i",
        in_axes=(1, None),
        out_axes=1,
    )(x, w),
    "positions": lambda x, w: spmd.pmap(
        lambda r: r * lax.axis_index("i") + lax.pmax(r, "i"), axis_name="i"
    )(x),
    "groups": lambda x, w: spmd.pmap(
        lambda r: lax.all_gather(r, "i", axis_index_groups=[[0, 1], [2, 3]]), axis_name="i"
    )(x),
    "a loop": lambda x, w: spmd.pmap(rolled, axis_name="i")(x),
    "a branch": lambda x, w: spmd.pmap(
        lambda r: lax.cond(r[0] > 0.5, lambda a: a * 2, lambda a: -a, r), axis_name="i"
    )(x),
    "a call": lambda x, w: spmd.pmap(spmd.jit(lambda r: r - lax.pmean(r, "i")), axis_name="i")(x),
    "scattered": lambda x, w: spmd.pmap(
        lambda r: lax.psum_scatter(r, "i") + lax.all_to_all(r, "i", 0, 0)[0], axis_name="i"
    )(x),
    "in a scan": lambda x, w: lax.scan(
        lambda c, _: (spmd.pmap(lambda r: snp.sin(r) + lax.pmean(r, "i"), axis_name="i")(c), c[0]),
        x,
        length=3,
    )[0],
}


def around(f: Case) -> Case:
    """A map with automatic work before and behind it."""
    return lambda x, w: snp.tanh(f(x * 2, w + 1)) + 1


def put(x: np.ndarray, mesh: spmd.Mesh, *spec: Any) -> Any:
    return spmd.device_put(x, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_a_pmap_is_what_it_is_alone_and_so_are_its_gradients(name: str, sizes: tuple[int, ...]):
    f = around(CASES[name])
    mesh = auto_mesh(sizes, ("x", "y")[: len(sizes)])
    x, w = put(X, mesh, "x", *(("y",) if len(sizes) > 1 else ())), put(W, mesh, None, "x")
    found = spmd.jit(f)(x, w)
    np.testing.assert_allclose(found, f(X, W), rtol=1e-5)
    assert isinstance(found.sharding, NamedSharding) and found.sharding.mesh == mesh

    def loss(x: Any, w: Any) -> Any:
        return snp.sin(f(x, w)).sum()

    slopes = spmd.jit(spmd.grad(loss, (0, 1)))(x, w)
    for one, other in zip(slopes, spmd.grad(loss, (0, 1))(X, W), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        assert one.sharding.mesh == mesh


def test_rows_of_a_pmap_stay_on_their_devices():
    mesh = auto_mesh((2, 2), ("x", "y"))
    x = put(X, mesh, ("x", "y"))

    def f(x: Any) -> Any:
        return spmd.pmap(lambda r: r - lax.pmean(r, "i"), axis_name="i")(snp.sin(x)) * 2

    (found,) = spmd.debug.collectives(f)(x)
    assert (found.kind, found.axes, found.value) == ("all_reduce", ("x", "y"), "f32[4]")
    assert spmd.jit(f)(x).sharding.spec == P(("x", "y"))


def test_two_pmaps_without_sharded_arguments_are_one_program_of_their_mesh():
    def f(x: Any) -> Any:
        y = spmd.pmap(lambda r: r * 2, axis_name="i")(x) + 1
        return spmd.pmap(lambda r: r + lax.axis_index("j"), axis_name="j")(y)

    found = spmd.jit(f)(X)
    assert found.sharding.spec == P("i")
    np.testing.assert_array_equal(found, X * 2 + 1 + np.arange(4, dtype=np.float32)[:, None])


def test_maps_without_types_keep_their_axes():
    mesh = auto_mesh((2, 2), ("x", "y"))

    def body(a: Any) -> Any:
        return a * lax.axis_index("y") + lax.psum(a, ("x", "y"))

    def f(x: Any) -> Any:
        whole = spmd.shard_map(
            body, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False
        )
        return whole(x * 2) + 1

    x = put(X, mesh, "x", "y")
    blocks = 2 * X.reshape(2, 2, 2, 2)
    expected = (blocks * np.arange(2)[:, None] + blocks.sum((0, 2))[:, None, :] + 1).reshape(4, 4)
    found = spmd.jit(f)(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.sharding.spec == P("x", "y")


def test_calls_of_python_in_a_pmap_are_those_of_each_device(capfd: pytest.CaptureFixture[str]):
    def row(r: Any) -> Any:
        spmd.debug.print("row {}", r[0])
        return r * 2

    x = put(X, auto_mesh((4,), ("x",)), "x")
    spmd.jit(lambda x: spmd.pmap(row)(x) + 1)(x).block_until_ready()
    spmd.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")[:-1]) == sorted(f"row {r[0]}" for r in X)


def test_a_map_over_other_devices_stays_as_it_is():
    def f(x: Any) -> Any:
        return spmd.pmap(lambda r: r * 2, axis_name="i")(x.reshape(2, 8)) + 1

    mesh = auto_mesh((4,), ("x",))
    x = put(X, mesh, "x")
    closed = spmd.jit(f).trace(x).jaxpr
    assert with_typed_maps(closed, mesh).eqns == closed.eqns
    np.testing.assert_array_equal(spmd.jit(f)(X), X.reshape(2, 8) * 2 + 1)
    with pytest.raises(spmd.errors.DeviceError, match=r"x \(f32\[4,4\]\) is committed to devices"):
        spmd.jit(f)(x)
