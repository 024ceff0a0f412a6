"""Exported programs of several devices: pmap and shard_map in a file, run where it is loaded."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import ShapeDtypeStruct, export, lax
from spmd.errors import DeviceError, ShardingError
from spmd.sharding import PartitionSpec as P
from spmd.sharding import reshard

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3)).astype(np.float32)
W = RNG.normal(size=(3, 2)).astype(np.float32)


def layer(x: Any, w: Any) -> Any:
    """Collectives over one axis and both, a call, a loop, a value that every device holds."""
    h = spmd.jit(snp.tanh)(x @ w)
    rows = lax.all_gather(h, "j", axis=0, tiled=True)
    start = lax.pvary(0.0, ("i", "j"))
    total, _ = lax.scan(lambda c, r: (c + lax.psum(r.sum(), "i"), None), start, rows)
    return lax.pmean(total, ("i", "j")) + lax.psum(h.sum(0), ("i", "j")), h


def mapped() -> Any:
    both = P(("i", "j"))
    mesh = spmd.make_mesh((2, 2), ("i", "j"))
    return spmd.shard_map(layer, mesh=mesh, in_specs=(both, P()), out_specs=(P(), both))


PROGRAMS = {
    "shard_map": (mapped, (X, W)),
    "without types": (
        lambda: spmd.shard_map(
            lambda x: lax.psum(x, "i"),
            mesh=spmd.make_mesh((4,), ("i",)),
            in_specs=P("i"),
            out_specs=P(),
            check_vma=False,
        ),
        (X,),
    ),
    "pmap": (
        lambda: spmd.pmap(lambda x: lax.psum(x, "a") * lax.axis_index("a"), axis_name="a"),
        (X[:4],),
    ),
    "pmap without a name": (lambda: spmd.pmap(lambda x: snp.sin(x) + 1), (X[:4],)),
    "nested pmap": (lambda: spmd.pmap(spmd.pmap(lambda x: x * 2)), (X[:4].reshape(2, 2, 3),)),
    "a map inside of a program": (
        lambda: lambda x, w: mapped()(x * 2, w)[1] - 1,
        (X, W),
    ),
    "devices in another order": (
        lambda: spmd.shard_map(
            lambda x: x + lax.axis_index("i"),
            mesh=spmd.sharding.Mesh(spmd.devices()[3:1:-1], ("i",)),
            in_specs=P("i"),
            out_specs=P("i"),
        ),
        (X,),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_the_same_program_on_the_same_devices(name: str):
    make, args = PROGRAMS[name]
    f = spmd.jit(make())
    exported = export.export(f)(*args)
    loaded = export.deserialize(exported.serialize())
    assert loaded.nr_devices == exported.nr_devices == 4
    for found, want in zip(
        spmd.tree.leaves(loaded.call(*args)), spmd.tree.leaves(f(*args)), strict=True
    ):
        np.testing.assert_array_equal(found, want)
        assert found.sharding.device_set == want.sharding.device_set
        where = [s.index for s in found.addressable_shards]
        assert where == [s.index for s in want.addressable_shards]


def test_derivatives():
    f, g = mapped(), export.export(spmd.jit(mapped()))(X, W)
    loaded = export.deserialize(g.serialize(vjp_order=1))

    def loss(call: Any) -> Any:
        return lambda x, w: (lambda total, h: snp.sum(h**2) + snp.sum(total))(*call(x, w))

    want = spmd.grad(loss(f), (0, 1))(X, W)
    for found, exact in zip(spmd.grad(loss(loaded.call), (0, 1))(X, W), want, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)


def test_for_all_sizes():
    rows = ShapeDtypeStruct(export.symbolic_shape("4*b, 3"), "float32")
    loaded = export.deserialize(export.export(spmd.jit(mapped()))(rows, W).serialize())
    for count in (4, 8, 20):
        x = RNG.normal(size=(count, 3)).astype(np.float32)
        for found, want in zip(loaded.call(x, W), mapped()(x, W), strict=True):
            np.testing.assert_array_equal(found, want)


def test_another_process_needs_as_many_devices(tmp_path: Any):
    (tmp_path / "f").write_bytes(export.export(spmd.jit(mapped()))(X, W).serialize())
    np.savez(tmp_path / "in.npz", x=X, w=W)
    program = """
import sys, numpy as np, spmd
from spmd import export
folder = sys.argv[1]
loaded = export.deserialize(open(folder + "/f", "rb").read())
given = np.load(folder + "/in.npz")
total, h = loaded.call(given["x"], given["w"])
assert len(h.sharding.device_set) == 4, h.sharding
np.savez(folder + "/out.npz", total=total, h=h)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    found, (total, h) = np.load(tmp_path / "out.npz"), mapped()(X, W)
    np.testing.assert_array_equal(found["total"], total)
    np.testing.assert_array_equal(found["h"], h)
    loaded = export.deserialize((tmp_path / "f").read_bytes())
    before = spmd.config.num_cpu_devices
    spmd.config.update("num_cpu_devices", 2)
    try:
        with pytest.raises(DeviceError, match="needs 4 devices, but there are 2"):
            loaded.call(X, W)
    finally:
        spmd.config.update("num_cpu_devices", before)


OVER_RANKS = """
import sys, numpy as np, spmd
from spmd import export
x = np.arange(8, dtype=np.float32)
out = export.deserialize(open(sys.argv[1], "rb").read()).call(x)
assert len(out.sharding.device_set) == 4 and len(out.addressable_shards) == 2
want = x - np.tile(x.reshape(4, 2).mean(0), 4)
for shard in out.addressable_shards:
    np.testing.assert_allclose(shard.data, want[shard.index])
print("all right")
"""


@pytest.mark.mpi
def test_a_file_runs_over_the_devices_of_several_ranks(mpirun: Any, tmp_path: Any):
    mesh = spmd.make_mesh((4,), ("i",))
    centred = spmd.shard_map(
        lambda x: x - lax.pmean(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i")
    )
    x = np.arange(8, dtype=np.float32)
    (tmp_path / "f").write_bytes(export.export(spmd.jit(centred))(x).serialize())
    program = ["-c", OVER_RANKS, str(tmp_path / "f")]
    done = mpirun(2, program, env={"SPMD_NUM_CPU_DEVICES": "2"}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all right") == 2


@pytest.mark.parametrize("kind", [spmd.sharding.AxisType.Auto, spmd.sharding.AxisType.Explicit])
def test_programs_with_layouts_are_written_with_them(kind):
    mesh = spmd.make_mesh((2, 2), ("x", "y"), kind)
    sharding = spmd.NamedSharding(mesh, spmd.P("x", "y"))
    x = spmd.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), sharding)

    @spmd.jit
    def f(x):
        total = spmd.shard_map(
            lambda x: spmd.lax.psum(x, "x"),
            mesh=mesh,
            in_specs=spmd.P("x"),
            out_specs=spmd.P(),
            axis_names={"x"},
        )(x)
        if kind is spmd.sharding.AxisType.Auto:
            free = spmd.P(spmd.P.UNCONSTRAINED, "y")
            return spmd.lax.with_sharding_constraint(total, spmd.NamedSharding(mesh, free))
        return spmd.reshard(total, spmd.NamedSharding(mesh, spmd.P("y")))

    written = spmd.export.export(f)(x).serialize()
    found = spmd.export.deserialize(written).call(x)
    want = f(x)
    np.testing.assert_array_equal(found, want)
    assert found.sharding == want.sharding
    assert spmd.typeof(found) is spmd.typeof(want)


def test_sums_that_are_made_later_are_kept():
    """The sets of specs, the types that have them, and the casts between them."""
    terms = P(unreduced={"x"})

    def f(a: Any, b: Any, w: Any) -> Any:
        a, b = reshard(a, P(None, "x")), reshard(b, P("x"))
        w = reshard(w, P(reduced={"x"}))
        product = snp.matmul(a, b, out_sharding=terms)
        cast = spmd.shard_map(lambda a, b: lax.pcast(a @ b, "x", to="unreduced"), out_specs=terms)(
            a, b
        )
        slope = spmd.grad(lambda w: snp.sum((a.T @ w[:2]) ** 2))(w)
        return reshard(product + cast, P()), slope, product

    given = np.ones((2, 4), np.float32), np.ones((4, 2), np.float32), np.ones((4, 2), np.float32)
    with spmd.set_mesh(spmd.make_mesh((2,), ("x",))):
        expected = spmd.jit(f)(*given)
        exported = export.deserialize(export.export(spmd.jit(f))(*given).serialize())
        found = exported.call(*given)
        for one, other in zip(found, expected, strict=True):
            assert spmd.typeof(one) is spmd.typeof(other)
            np.testing.assert_array_equal(reshard(one, P()), reshard(other, P()))
    assert [spmd.typeof(x).short() for x in found[1:]] == ["f32[4,2]{U:x}", "f32[2,2]{U:x}"]


@pytest.mark.parametrize("kind", [spmd.sharding.AxisType.Auto, spmd.sharding.AxisType.Explicit])
def test_arguments_and_results_are_exported_with_their_shardings(kind: Any):
    """However an argument of the call lies, results lie as those of the export do."""
    mesh = spmd.make_mesh((2, 2), ("x", "y"), kind)
    rows, columns = (spmd.NamedSharding(mesh, P(*spec)) for spec in (("x",), (None, "y")))
    is_typed = kind is spmd.sharding.AxisType.Explicit
    f = spmd.jit(lambda x, w: (x @ w, x.sum(0)), out_shardings=(columns, None))
    a, b = X[:, :2], W[:2]
    made = export.export(f)(spmd.device_put(a, rows), b)
    for e in (made, export.deserialize(made.serialize())):
        assert e.nr_devices == 4
        assert e.in_shardings_jax(mesh) == (rows, None)
        assert e.out_shardings_jax(mesh)[0] == columns
        assert [i.sharding and i.sharding.spec for i in e.in_avals] == (
            [P("x", None), None] if is_typed else [None, None]
        )
        assert e.out_avals[0].sharding == (columns.explicit_part(2) if is_typed else None)
        want = f(spmd.device_put(a, rows), b)
        both = (spmd.sharding.AxisType.Auto, spmd.sharding.AxisType.Explicit)
        others = [spmd.make_mesh((2, 2), ("x", "y"), other) for other in both]
        for x in (a, *(spmd.device_put(a, spmd.NamedSharding(m, P("y"))) for m in others)):
            for found, exact in zip(e.call(x, b), want, strict=True):
                np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)
                assert found.sharding.is_equivalent_to(exact.sharding, found.ndim)
        other = spmd.make_mesh((4,), ("z",))
        with pytest.raises(ShardingError, match=r"with axes \{'x': 2, 'y': 2\}.*has \{'z': 4\}"):
            e.in_shardings_jax(other)


@pytest.mark.parametrize("kind", [spmd.sharding.AxisType.Auto, spmd.sharding.AxisType.Explicit])
def test_derivatives_of_exported_functions_over_a_mesh(kind: Any):
    mesh = spmd.make_mesh((2, 2), ("x", "y"), kind)
    x = spmd.device_put(X[:, :2], spmd.NamedSharding(mesh, P("x")))
    w = spmd.device_put(W[:2], spmd.NamedSharding(mesh, P(None, "y")))
    f = spmd.jit(lambda x, w: snp.sin(x @ w))
    loaded = export.deserialize(export.export(f)(x, w).serialize(vjp_order=1))

    def loss(call: Any) -> Any:
        return lambda x, w: snp.sum(call(x, w) ** 2)

    want = spmd.grad(loss(f), (0, 1))(x, w)
    for found, exact in zip(spmd.grad(loss(loaded.call), (0, 1))(x, w), want, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)
        assert found.sharding.is_equivalent_to(exact.sharding, 2)


def test_all_sizes_over_a_mesh():
    rows = spmd.NamedSharding(spmd.make_mesh((4,), ("x",)), P("x"))
    shape = export.symbolic_shape("4*b, 3")
    given = ShapeDtypeStruct(shape, "float32", sharding=rows)
    loaded = export.deserialize(export.export(spmd.jit(lambda x: x * 2))(given).serialize())
    assert [str(n) for n in loaded.in_avals[0].shape] == ["4*b", "3"]
    for count in (4, 12):
        x = RNG.normal(size=(count, 3)).astype(np.float32)
        found = loaded.call(x)
        np.testing.assert_array_equal(found, x * 2)
        assert found.sharding.is_equivalent_to(rows, 2)
