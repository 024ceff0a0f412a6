"""Arrays between meshes of the same devices, in any order: each device gets what it lacks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
from spmd import NamedSharding, P
from spmd.base.config import config
from spmd.collectives.rectangles import lacking
from spmd.compile.executable import mesh_executable
from spmd.sharding import AxisType, Mesh
from spmd.sharding.operand_layouts import spec_over

SHAPES = [(8,), (4, 2), (2, 4), (2, 2, 2)]


@pytest.fixture(scope="module", autouse=True)
def eight_devices() -> Iterator[None]:
    """Meshes of this file have up to eight devices."""
    with config.override("num_cpu_devices", 8):
        yield


@st.composite
def layouts(draw: st.DrawFn) -> tuple[NamedSharding, list[int]]:
    """A sharding of eight devices in some order, and into how many parts it cuts three dims."""
    shape = draw(st.sampled_from(SHAPES))
    order = draw(st.permutations(range(8)))
    axes = dict(zip("xyz", shape, strict=False))
    kind = draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    devices = np.array([spmd.devices()[k] for k in order]).reshape(shape)
    mesh = Mesh(devices, tuple(axes), axis_types=(kind,) * len(axes))
    entries: list[tuple[str, ...]] = [(), (), ()]
    for axis in draw(st.permutations(list(axes))):
        d = draw(st.integers(-1, 2))
        if d >= 0:
            entries[d] = (*entries[d], axis)
    parts = [int(np.prod([axes[a] for a in own])) for own in entries]
    return NamedSharding(mesh, P(*[own or None for own in entries])), parts


def rectangles(sharding: Any, shape: tuple[int, ...]) -> dict[Any, Any]:
    return {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }


def received(sharding: Any, other: Any, shape: tuple[int, ...]) -> int:
    """What the device that lacks the most lacks, in elements."""
    have, want = rectangles(sharding, shape), rectangles(other, shape)
    return max(lacking(have[d], want[d]) for d in have)


def check(out: Any, value: np.ndarray, sharding: Any) -> None:
    """Every shard is on its device, and holds its part."""
    assert out.sharding.is_equivalent_to(sharding, value.ndim) and out.shape == value.shape
    places = sharding.devices_indices_map(value.shape)
    assert [s.device for s in out.addressable_shards] == list(places)
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, value[places[shard.device]])
    np.testing.assert_array_equal(out, value)


@settings(deadline=None, max_examples=60)
@given(layouts(), layouts(), st.tuples(*[st.integers(1, 3)] * 3))
def test_any_layout_becomes_any_other_by_what_lacks(one: Any, other: Any, more: Any):
    (have, parts), (want, others) = one, other
    shape = tuple(int(np.lcm(a, b)) * n for a, b, n in zip(parts, others, more, strict=True))
    value = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    x = spmd.device_put(value, have)
    lacks = 2 * received(have, want, shape)
    with spmd.debug.expect_collectives(at_most=lacks) as moved:
        out = spmd.device_put(x, want)
    check(out, value, want)
    assert moved.received == lacks and len(moved.collectives) <= 1
    check(x, value, have)


def reversed_mesh(kind: Any) -> Mesh:
    return Mesh(np.array(spmd.devices()[::-1]), ("r",), axis_types=(kind,))


@pytest.mark.parametrize("how", ["reshard", "constraint", "device_put"])
def test_every_way_to_ask_for_another_mesh(how: str):
    kind = AxisType.Explicit if how == "reshard" else AxisType.Auto
    value = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    x = spmd.device_put(value, NamedSharding(spmd.make_mesh((4, 2), ("x", "y"), kind), P("x")))
    want = NamedSharding(reversed_mesh(kind), P("r"))
    move = {
        "reshard": spmd.reshard,
        "constraint": spmd.lax.with_sharding_constraint,
        "device_put": spmd.device_put,
    }[how]
    with spmd.debug.expect_collectives(exchange=1, at_most=2 * 3 * 4):
        out = move(x, want)
    check(out, value, want)


def test_the_same_order_by_other_names_moves_nothing():
    value = np.arange(16.0)
    x = spmd.device_put(value, NamedSharding(spmd.make_mesh((8,), ("x",)), P("x")))
    grid = Mesh(np.array(spmd.devices()).reshape(2, 4), ("a", "b"))
    with spmd.debug.expect_collectives(at_most=0) as moved:
        check(spmd.device_put(x, want := NamedSharding(grid, P(("a", "b")))), value, want)
        again = NamedSharding(grid, P())
        whole = spmd.device_put(value, again)
        check(spmd.device_put(whole, want), value, want)
        turned = NamedSharding(reversed_mesh(AxisType.Auto), P("r"))
        check(spmd.device_put(whole, turned), value, turned)
    assert not moved.collectives


def test_rows_of_pmap_become_columns_of_a_mesh():
    value = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    rows = spmd.pmap(lambda x: x * 1)(value)
    want = NamedSharding(reversed_mesh(AxisType.Auto), P(None, "r"))
    with spmd.debug.expect_collectives(exchange=1, at_most=7 * 2 * 4):
        check(spmd.device_put(rows, want), value, want)


def test_sums_are_made_before():
    mesh = spmd.make_mesh((8,), ("x",), AxisType.Explicit)
    value = np.arange(16.0, dtype=np.float32)
    x = spmd.device_put(value, NamedSharding(mesh, P()))
    terms = spmd.reshard(x, P(unreduced={"x"}))
    want = NamedSharding(reversed_mesh(AxisType.Explicit), P("r"))
    check(spmd.device_put(terms, want), value, want)


def test_other_devices_get_the_whole_as_before():
    value = np.arange(8.0)
    x = spmd.device_put(value, NamedSharding(spmd.make_mesh((4,), ("x",)), P("x")))
    others = Mesh(np.array(spmd.devices()[4:]), ("x",))
    check(spmd.device_put(x, want := NamedSharding(others, P("x"))), value, want)


@pytest.mark.parametrize("dtype", [np.bool_, np.complex64, np.int8])
def test_every_dtype_and_typed_keys(dtype: Any):
    orders = list(itertools.islice(itertools.permutations(range(4)), 0, 24, 5))
    value = np.arange(24).reshape(4, 6).astype(dtype)
    x: Any = spmd.device_put(value, NamedSharding(spmd.make_mesh((4,), ("x",)), P("x")))
    for order in orders:
        mesh = Mesh(np.array([spmd.devices()[k] for k in order]), ("x",))
        x = spmd.device_put(x, want := NamedSharding(mesh, P("x")))
        check(x, value, want)
    keys = spmd.random.split(spmd.random.key(0), 4)
    placed = spmd.device_put(keys, NamedSharding(spmd.make_mesh((4,), ("x",)), P("x")))
    moved = spmd.device_put(placed, NamedSharding(mesh, P("x")))
    data = spmd.random.key_data
    np.testing.assert_array_equal(data(moved), data(keys))


# ---- meshes in one program ---------------------------------------------------------------------


def test_a_spec_is_said_over_another_mesh_where_its_axes_are_there():
    grid = spmd.make_mesh((4, 2), ("x", "y"), AxisType.Auto)
    devices = np.array(spmd.devices())
    line = Mesh(devices, ("r",))
    turned = Mesh(devices.reshape(4, 2).T, ("a", "b"))
    split = Mesh(devices.reshape(2, 2, 2), ("p", "q", "s"))
    odd = Mesh(devices[[1, 0, 2, 3, 4, 5, 6, 7]], ("r",))
    for mesh, spec, expected in [
        (line, P("r"), P(("x", "y"))),
        (line, P(None, "r"), P(None, ("x", "y"))),
        (turned, P("a", "b"), P("y", "x")),
        (turned, P(("b", "a")), P(("x", "y"))),
        (split, P("s"), P("y")),
        (split, P(("p", "q")), P("x")),
        (split, P(("p", "q", "s")), P(("x", "y"))),
        (split, P(("q", "p")), None),
        (split, P("p"), None),
        (turned, P(P.UNCONSTRAINED, "a"), P(P.UNCONSTRAINED, "y")),
        (odd, P("r"), None),
        (odd, P(), P()),
    ]:
        assert spec_over(grid, NamedSharding(mesh, spec)) == expected, (mesh, spec)
    sharding = NamedSharding(grid, P(("x", "y")))
    assert spec_over(line, sharding) == P("r") and spec_over(grid, sharding) == sharding.spec
    assert spec_over(line, NamedSharding(grid, P("x"))) is None


def test_results_and_constraints_over_a_mesh_of_another_shape():
    grid = spmd.make_mesh((4, 2), ("x", "y"), AxisType.Auto)
    line = NamedSharding(Mesh(np.array(spmd.devices()), ("r",)), P(None, "r"))
    value = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    x = spmd.device_put(value, NamedSharding(grid, P("x", "y")))
    for f in (
        spmd.jit(lambda a: a * 2, out_shardings=line),
        spmd.jit(lambda a: spmd.lax.with_sharding_constraint(a * 2, line)),
        spmd.jit(lambda a: spmd.device_put(a * 2, line)),
    ):
        with spmd.debug.expect_collectives(exchange=1) as moved:
            check(f(x), 2 * value, line)
        assert moved.received == 4 * received(x.sharding, line, value.shape)


def test_arguments_over_meshes_of_other_shapes_are_not_made_whole(monkeypatch: pytest.MonkeyPatch):
    devices = np.array(spmd.devices())
    value = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    x = spmd.device_put(value, NamedSharding(Mesh(devices, ("r",)), P("r")))
    y = spmd.device_put(value, NamedSharding(Mesh(devices.reshape(4, 2), ("x", "y")), P("x", "y")))
    monkeypatch.setattr(mesh_executable, "to_numpy", None)  # the way through a whole value
    with spmd.debug.expect_collectives(exchange=1, at_most=4 * 16):
        out = spmd.jit(lambda a, b: a + b)(x, y)
    np.testing.assert_array_equal(out, 2 * value)
