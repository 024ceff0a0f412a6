"""`NamedSharding(..., uneven=True)`: arrays whose dims the devices do not divide."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, checkpoints, export, lax, multihost
from spmd.base.config import config
from spmd.errors import ArgumentError, ShardingError
from spmd.sharding import AxisType
from tests.sharding.uneven_programs import PROGRAMS

AUTO = AxisType.Auto
LAYOUTS = {
    "rows": ((4,), ("x",), P("x")),
    "columns": ((4,), ("x",), P(None, "x")),
    "both": ((2, 2), ("x", "y"), P("y", "x")),
    "one dim by both": ((2, 2), ("x", "y"), P(("x", "y"))),
    "replicated along one": ((2, 2), ("x", "y"), P("y")),
}


def layout(name: str = "rows", uneven: bool = True) -> NamedSharding:
    sizes, axes, spec = LAYOUTS[name]
    return NamedSharding(spmd.make_mesh(sizes, axes, AUTO), spec, uneven=uneven)


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def sizes_of(n: int, p: int) -> list[int]:
    """The rule: pieces of ceil(n/p), the last shorter or empty."""
    piece = math.ceil(n / p)
    return [max(0, min(piece, n - k * piece)) for k in range(p)]


def check(found: Any, want: Any) -> None:
    """Values, and that each shard is the rows that its index says."""
    for one, other in zip(spmd.tree.leaves(found), spmd.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
        for shard in one.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(one)[shard.index])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 10])
def test_parts_of_every_size(n: int):
    x = values(n, 3)
    y = spmd.device_put(x, layout())
    np.testing.assert_array_equal(y, x)
    assert [s.data.shape[0] for s in y.addressable_shards] == sizes_of(n, 4)
    assert [y.addressable_data(k).shape[0] for k in range(4)] == sizes_of(n, 4)
    assert layout().shard_shape((n, 3)) == (math.ceil(n / 4), 3)
    check(y, x)


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_along_every_layout(name: str):
    """One rule for all axes of a dim together: pieces are never cut again."""
    x = values(7, 5)
    y = spmd.device_put(x, layout(name))
    check(y, x)
    if name == "one dim by both":
        assert [s.data.shape for s in y.addressable_shards] == [(2, 5), (2, 5), (2, 5), (1, 5)]
    if name == "both":
        assert sorted({s.data.shape for s in y.addressable_shards}) == [
            (3, 2),
            (3, 3),
            (4, 2),
            (4, 3),
        ]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("where", "shape"), [("rows", (10, 3)), ("both", (7, 5)), ("columns", (4, 6))]
)
def test_programs_are_those_of_whole_arrays(where: str, shape: tuple[int, int], name: str):
    """Jitted, operation by operation, and called so often that a closure or a program is made."""
    x, f = values(*shape), PROGRAMS[name]
    y, want = spmd.device_put(x, layout(where)), f(snp.asarray(x))
    jitted = spmd.jit(f)
    for _ in range(3):
        check(jitted(y), want)
    check(f(y), want)
    check(jitted(x), want)


def test_elementwise_results_stay_uneven_and_move_nothing():
    y = spmd.device_put(values(10, 3), layout())
    f = spmd.jit(lambda x: snp.sin(x) + 1)
    assert f(y).sharding == layout() and not spmd.debug.collectives(f)(y)
    out = y
    for _ in range(12):  # eager operations become programs
        out = out * 0.5 + y
        assert out.sharding == layout()
    assert snp.zeros_like(y).sharding == layout()
    total = spmd.debug.collectives(lambda x: x.sum(0))(y)
    assert [c.kind for c in total] == ["all_reduce"]


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_resharding_brings_what_is_lacking(source: str, target: str):
    x = values(7, 5)
    y = spmd.device_put(x, layout(source))
    for there in (layout(target), NamedSharding(layout(target).mesh, P())):
        moved = spmd.device_put(y, there)
        assert moved.sharding == there
        check(moved, x)
        back = spmd.device_put(moved, y.sharding)
        check(back, x)
    if layout(source).mesh == layout(target).mesh:
        check(spmd.jit(lambda x: x, out_shardings=layout(target))(y), x)


def test_jit_s_shardings():
    x, there = values(10, 3), layout()
    for f in (
        spmd.jit(lambda x: x + 1, in_shardings=there),
        spmd.jit(lambda x: x + 1, out_shardings=there),
        spmd.jit(lambda x: lax.with_sharding_constraint(x + 1, there)),
        spmd.jit(lambda x: spmd.device_put(x + 1, there)),
    ):
        out = f(x)
        assert out.sharding == there
        check(out, x + 1)
    y = spmd.device_put(x, there)
    compiled = spmd.jit(lambda x: x * 2).lower(y).compile()
    assert compiled.input_shardings[0][0] == compiled.output_shardings == there
    check(compiled(y), 2 * x)
    check(compiled(x), 2 * x)
    donated = spmd.device_put(x, there)
    check(spmd.jit(lambda x: x * 2, donate_argnums=0)(donated), 2 * x)
    assert donated.is_deleted()
    closed_over = spmd.jit(lambda z: y * z)
    check(closed_over(2.0), 2 * x)


def test_arrays_made_of_parts():
    x, there = values(10, 3), layout()
    made = spmd.make_array_from_callback((10, 3), there, lambda index: x[index])
    check(made, x)
    again = spmd.make_array_from_single_device_arrays(
        (10, 3), there, [shard.data for shard in made.addressable_shards]
    )
    check(spmd.jit(lambda x: x.sum(0))(again), x.sum(0))
    np.testing.assert_array_equal(multihost.process_allgather(made, tiled=True), x)
    with pytest.raises(ShardingError, match=r"uneven parts, .* use make_array_from_callback"):
        spmd.make_array_from_process_local_data(there, x)


def test_checkpoints(tmp_path: Path):
    x = values(10, 3)
    checkpoints.save(tmp_path, 1, {"x": spmd.device_put(x, layout())})
    for name in LAYOUTS:
        like = spmd.ShapeDtypeStruct((10, 3), np.float32, sharding=layout(name))
        _, found = checkpoints.restore(tmp_path, {"x": like})
        assert found["x"].sharding == layout(name)
        check(found["x"], x)


def test_it_is_strict_otherwise():
    x = values(10, 3)
    y = spmd.device_put(x, layout())
    with pytest.raises(ShardingError, match="10 is not a multiple of 4"):
        spmd.device_put(x, layout(uneven=False))
    with pytest.raises(ShardingError, match="10 is not a multiple of 4"):
        spmd.jit(lambda x: x, out_shardings=layout(uneven=False))(y)
    with pytest.raises(ShardingError, match="along Auto axes only"):
        mesh = spmd.make_mesh((4,), ("x",))
        spmd.device_put(x, NamedSharding(mesh, P("x"), uneven=True))
    with pytest.raises(ShardingError, match="10 is not a multiple of 4"):
        spmd.shard_map(lambda x: x, mesh=layout().mesh, in_specs=P("x"), out_specs=P("x"))(y)
    with pytest.raises(ArgumentError, match="parts of different sizes, which a file cannot hold"):
        export.export(spmd.jit(lambda x: x))(y)


def test_shardings_that_are_uneven_are_other_shardings():
    one, other = layout(), layout(uneven=False)
    assert one != other and one == layout() and hash(one) == hash(layout())
    assert repr(one).endswith("uneven=True)") and "uneven" not in repr(other)
    assert pickle.loads(pickle.dumps(one)) == one and one.update(spec=P()).uneven
    even = values(8, 3)
    for a, b in ((one, other), (other, one)):
        check(spmd.device_put(spmd.device_put(even, a), b), even)


STAYS: dict[str, Any] = {
    "cumsum": lambda x: snp.cumsum(x, axis=0),
    "cumsum, reversed": lambda x: lax.cumsum(x, axis=0, reverse=True),
    "argmax": lambda x: snp.argmax(x, axis=0),
    "top_k": lambda x: lax.top_k(x.T, 3),
    "rows": lambda x: x[snp.array([0, -1, 0])],
    "update": lambda x: x.at[snp.array([0, -1])].add(1.0),
    "columns reversed": lambda x: snp.cumsum(x, 0)[:, ::-1],
    "map": lambda x: lax.map(lambda row: row / (1 + snp.abs(row).sum()), x),
    "gradient": spmd.grad(lambda x: (snp.cumsum(x, 0)[snp.array([3, -1])] ** 2).sum()),
}


@pytest.mark.parametrize("name", STAYS)
def test_unequal_parts_are_not_gathered(name: str):
    x = values(1022, 8)
    x[5] = np.nan if name == "update" else 1.0
    y = spmd.device_put(x, layout())
    with spmd.debug.expect_collectives(at_most=x.nbytes // 20):
        found = spmd.jit(STAYS[name])(y)
    check(found, STAYS[name](snp.asarray(x)))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float32, np.bool_])
def test_devices_sort_unequal_parts_together(dtype: Any):
    with config.override("num_cpu_devices", 8):
        x = (np.random.default_rng(0).normal(size=(8 * 4096 - 5, 2)) * 99).astype(dtype)
        x[7] = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else x[7]
        if dtype is np.float32:
            x[[1, 60, 500]] = [[np.nan, np.inf], [0.0, -0.0], [-0.0, 0.0]]
        mesh = spmd.make_mesh((8,), ("x",), AUTO)
        y = spmd.device_put(x, NamedSharding(mesh, P("x"), uneven=True))
        f = spmd.jit(
            lambda x: lax.sort((x, lax.broadcasted_iota(np.int32, x.shape, 0)), dimension=0)
        )
        found, places = f(y)
        order = np.argsort(x, axis=0, kind="stable")
        np.testing.assert_array_equal(found, np.take_along_axis(x, order, 0))
        np.testing.assert_array_equal(places, order)
        kinds = {c.kind for c in spmd.debug.collectives(f)(y)}
        assert "all_to_all" in kinds and "all_gather" not in kinds, kinds


@pytest.mark.parametrize("n", [5, 9, 10, 11, 1022])
def test_a_reversal_brings_each_device_its_rows(n: int):
    x = values(n, 3)
    y = spmd.device_put(x, layout())
    part = math.ceil(n / 4) * x[0].nbytes
    with spmd.debug.expect_collectives(at_most=part, exchange=1):
        check(spmd.jit(lambda x: x[::-1])(y), x[::-1])
    slope = spmd.jit(spmd.grad(lambda x: (x[::-1] * snp.arange(3 * n).reshape(n, 3)).sum()))(y)
    check(slope, snp.asarray(np.arange(3.0 * n, dtype=np.float32).reshape(n, 3)[::-1]))
