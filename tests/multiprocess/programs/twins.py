"""Over all ranks: parts of global arrays there and back, and functions with own partitions."""

from __future__ import annotations

from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax, multihost
from spmd.custom_partitioning import custom_partitioning
from spmd.sharding import AxisType, Mesh
from tests.multiprocess.programs.partition import check


def parts(kind: AxisType) -> None:
    """Each rank gives the rows or columns of its devices; the whole is what they make together."""
    ranks, rank = spmd.process_count(), spmd.process_index()
    devices = np.array(spmd.devices(), dtype=object).reshape(ranks, -1)
    mesh = Mesh(devices, ("p", "d"), (kind, kind))
    n = 2 * devices.shape[1]
    whole = np.arange(n * ranks * n * ranks, dtype=np.float32).reshape(n * ranks, n * ranks)
    mine = slice(n * rank, n * rank + n)
    given = {
        P(): whole,
        P("p"): whole[mine],
        P(("p", "d")): whole[mine],
        P("d"): whole,
        P("d", "p"): whole[:, mine],
        P(None, ("p", "d")): whole[:, mine],
    }
    tree, specs = {"a": list(given.values())}, {"a": list(given)}
    there = multihost.host_local_array_to_global_array(tree, mesh, specs)
    back = multihost.global_array_to_host_local_array(there, mesh, specs)
    for spec, part, x, local in zip(given, tree["a"], there["a"], back["a"], strict=True):
        assert x.sharding == NamedSharding(mesh, spec) and x.shape == whole.shape
        assert spmd.typeof(x) is spmd.typeof(spmd.device_put(whole, NamedSharding(mesh, spec)))
        check(x, whole, f"the whole by {spec}")
        assert local.is_fully_addressable
        assert local.sharding == NamedSharding(mesh.local_mesh, spec)
        np.testing.assert_array_equal(local, part)
        again = multihost.host_local_array_to_global_array(local, mesh, spec)
        check(again, whole, f"there again by {spec}")
        shards = zip(local.addressable_shards, again.addressable_shards, strict=True)
        assert all(one.data is other.data for one, other in shards), "a shard was copied"


def product() -> Any:
    """A product whose parts are summed where the inner dim is split, with its own derivative."""

    @custom_partitioning
    def f(a: Any, b: Any) -> Any:
        return a @ b

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        shardings = tuple(s.sharding for s in arg_shapes)
        axes = shardings[0].spec.axes_of(1)
        lower = lambda a, b: lax.psum(a @ b, axes) if axes else a @ b  # noqa: E731
        return mesh, lower, result_shape.sharding, shardings

    f.def_partition(partition, sharding_rule="i j, j k -> i k")
    g = spmd.custom_vjp(f)
    g.defvjp(lambda a, b: (f(a, b), (a, b)), lambda kept, ct: (f(ct, kept[1].T), f(kept[0].T, ct)))
    return g


def means_of_rows() -> Any:
    """Rows minus their means: the last dim is not split, whatever the operand is."""

    @custom_partitioning
    def f(x: Any) -> Any:
        return x - x.mean(-1, keepdims=True)

    def rows(x: Any) -> NamedSharding:
        return NamedSharding(x.sharding.mesh, P(x.sharding.spec.axes_of(0) or None, None))

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        layout = rows(arg_shapes[0])
        return mesh, lambda x: x - x.mean(-1, keepdims=True), layout, (layout,)

    f.def_partition(
        partition, infer_sharding_from_operands=lambda mesh, args, result: rows(args[0])
    )
    return f


def own_partitions() -> None:
    """Values and gradients are those of one device, under every spec, alone and with other work."""
    count = spmd.device_count()
    split = 2 if count % 2 == 0 else 1
    mesh = spmd.make_mesh((count // split, split), ("x", "y"), AxisType.Auto)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((24, 24)).astype(np.float32) for _ in range(2))
    f, g = product(), means_of_rows()
    for one in (P("x"), P("x", "y"), P(None, "x"), P()):
        for other in (P(None, "y"), P("x"), P("y", "x")):
            x, y = (spmd.device_put(v, NamedSharding(mesh, s)) for v, s in ((a, one), (b, other)))
            what = f"{one}, {other}"
            check(spmd.jit(f)(x, y), a @ b, f"a product of {what}")
            check(spmd.jit(lambda x, y: snp.sin(f(x * 2, y)))(x, y), np.sin(2 * a @ b), what)
            slope = spmd.jit(spmd.grad(lambda x, y: f(x, y).sum(), (0, 1)))
            ones = np.ones((24, 24), np.float32)
            check(slope(x, y), (ones @ b.T, a.T @ ones), f"gradients of {what}")
            exact = a - a.mean(-1, keepdims=True)
            check(spmd.jit(lambda x: g(x) + 1)(x), exact + 1, f"rows of {what}")


if __name__ == "__main__":
    for kind in (AxisType.Auto, AxisType.Explicit):
        parts(kind)
    own_partitions()
    print(f"rank {spmd.process_index()} of {spmd.process_count()}: all right")
