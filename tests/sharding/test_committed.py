"""Arguments that are committed to other devices are never moved silently: each way, each place."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax
from spmd.base.config import config
from spmd.errors import DeviceError, ShardingError
from spmd.sharding import Mesh, SingleDeviceSharding

X = np.arange(8, dtype=np.float32)
ROWS = P("x")


@pytest.fixture(autouse=True)
def _eight_devices():
    with config.override("num_cpu_devices", 8):
        yield


def line(*ids: int) -> Mesh:
    return Mesh(np.array(spmd.devices(), dtype=object)[list(ids)], ("x",))


def over(*ids: int, spec: P = ROWS) -> NamedSharding:
    return NamedSharding(line(*ids), spec)


def double(x: Any) -> Any:
    return spmd.shard_map(
        lambda a: a * 2, mesh=line(0, 1, 2, 3), in_specs=P("x"), out_specs=P("x")
    )(x)


def untyped(x: Any) -> Any:
    return spmd.shard_map(
        lambda a: a * 2, mesh=line(0, 1, 2, 3), in_specs=P("x"), out_specs=P("x"), check_vma=False
    )(x)


def mapped(x: Any) -> Any:
    return spmd.pmap(lambda a: a * 2, devices=spmd.devices()[:4])(x.reshape(4, 2)).reshape(8)


def held(x: Any) -> Any:
    return lax.with_sharding_constraint(x, over(0, 1, 2, 3)) * 2


def scanned(x: Any) -> Any:
    return lax.scan(lambda c, _: (double(c), None), x, None, length=1)[0]


SHAPE = spmd.ShapeDtypeStruct((8,), np.float32)

# Each doubles its argument on devices 0 to 3.
WAYS: dict[str, Callable[[Any], Any]] = {
    "map": double,
    "jit of a map": lambda x: spmd.jit(double)(x),
    "jit of jit": lambda x: spmd.jit(lambda x: spmd.jit(double)(x))(x),
    "map and other work": lambda x: spmd.jit(lambda x: double(x + 0))(x),
    "jit of a map without types": lambda x: spmd.jit(untyped)(x),
    "jit of a pmap": lambda x: spmd.jit(mapped)(x),
    "jit of a grad of a pmap": lambda x: spmd.jit(spmd.grad(lambda x: (mapped(x) ** 2).sum() / 4))(
        x
    ),
    "scan": lambda x: spmd.jit(scanned)(x),
    "cond": lambda x: spmd.jit(lambda x: lax.cond(True, double, lambda y: y, x))(x),
    "remat": lambda x: spmd.jit(spmd.checkpoint(double))(x),
    "constraint": held,
    "jit of a constraint": lambda x: spmd.jit(held)(x),
    "device_put in jit": lambda x: spmd.jit(lambda x: spmd.device_put(x, over(0, 1, 2, 3)) * 2)(x),
    "compiled map": lambda x: spmd.jit(double).lower(SHAPE).compile()(x),
    "compiled constraint": lambda x: spmd.jit(held).lower(SHAPE).compile()(x),
    "in_shardings": lambda x: spmd.jit(lambda x: x * 2, in_shardings=over(0, 1, 2, 3))(x),
    "grad of a map": lambda x: spmd.vjp(double, x)[1](snp.asarray(x) if x is X else X)[0],
    "grad of a constraint": lambda x: spmd.vjp(held, x)[0],
    "grad of a map without types": lambda x: spmd.vjp(untyped, x)[0],
    "grad of a pmap": lambda x: spmd.grad(lambda x: (mapped(x) ** 2).sum() / 4)(x),
    "vmap of a pmap": lambda x: spmd.vmap(mapped)(x[None])[0],
    "jvp": lambda x: spmd.jvp(double, (x,), (X,))[0],
    "jvp of a map without types": lambda x: spmd.jvp(untyped, (x,), (X,))[0],
    "jit of grad": lambda x: spmd.jit(spmd.grad(lambda x: (double(x) ** 2).sum() / 4))(x),
    "used inside": lambda x: spmd.shard_map(
        lambda a: a + x, mesh=line(0, 1, 2, 3), in_specs=P(), out_specs=P()
    )(X),
}
BATCHED = {"vmap of a map": double, "vmap of a constraint": held}

PLACES: dict[str, Callable[[], Any]] = {
    "cpu:0": lambda: spmd.devices()[0],
    "cpu:2": lambda: spmd.devices()[2],
    "cpu:6": lambda: SingleDeviceSharding(spmd.devices()[6]),
    "[0]": lambda: over(0),
    "[0, 1]": lambda: over(0, 1),
    "[4, 5, 6, 7]": lambda: over(4, 5, 6, 7),
    "[0, 1, 2, 3, 4, 5, 6, 7]": lambda: over(*range(8)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_an_argument_on_other_devices_is_an_error(way: str, place: str):
    x = spmd.device_put(X, PLACES[place]())
    for _ in range(3):  # closures of repeated calls, too
        with pytest.raises((DeviceError, ShardingError)) as caught:
            WAYS[way](x)
    text = str(caught.value)
    where = place.removeprefix("cpu:").strip("[]")
    assert place in text or f"cpu:{where}" in text or f"id={where}" in text
    assert "moved silently" in text and "device_put(" in text
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize("way", WAYS)
def test_an_argument_that_is_not_committed_or_lies_there_is_taken(way: str):
    lies = spmd.device_put(X, over(0, 1, 2, 3))
    whole = spmd.device_put(X, over(0, 1, 2, 3, spec=P()))
    strict = way == "in_shardings" or way.startswith("compiled")
    given = [X, snp.asarray(X), lies, *([] if strict else [whole])]
    want = np.asarray(WAYS[way](X))
    for x in given:
        np.testing.assert_allclose(WAYS[way](x), want)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", BATCHED)
def test_a_batch_on_other_devices_is_an_error(way: str, place: str):
    where = PLACES[place]()
    if isinstance(where, NamedSharding):
        where = NamedSharding(where.mesh, P(None, "x"))
    rows = np.stack([X, X])
    for jit in (lambda f: f, spmd.jit):
        with pytest.raises((DeviceError, ShardingError), match="moved silently"):
            jit(spmd.vmap(BATCHED[way]))(spmd.device_put(rows, where))
        np.testing.assert_array_equal(jit(spmd.vmap(BATCHED[way]))(rows), rows * 2)


def test_a_call_that_was_made_before_does_not_hide_the_error():
    step, mapped = (
        spmd.jit(double),
        spmd.shard_map(lambda a: a * 2, mesh=line(0, 1, 2, 3), in_specs=P("x"), out_specs=P("x")),
    )
    for f in (step, mapped):
        for _ in range(4):
            np.testing.assert_array_equal(f(snp.asarray(X)), X * 2)
        with pytest.raises(DeviceError, match="committed to cpu:0"):
            f(spmd.device_put(X, spmd.devices()[0]))
        np.testing.assert_array_equal(f(snp.asarray(X)), X * 2)


def test_a_mesh_of_one_device_takes_what_is_on_it():
    mesh = line(3)
    mapped = spmd.shard_map(lambda a: a * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    x = spmd.device_put(X, spmd.devices()[3])
    for f in (mapped, spmd.jit(mapped)):
        for _ in range(4):
            np.testing.assert_array_equal(f(x), X * 2)
        with pytest.raises(DeviceError, match="committed to cpu:2"):
            f(spmd.device_put(X, spmd.devices()[2]))


def test_a_constant_of_a_jitted_function_has_no_place():
    for place in PLACES.values():
        x = spmd.device_put(X, place())
        np.testing.assert_array_equal(spmd.jit(lambda x=x: double(x))(), X * 2)


def test_an_argument_that_nothing_reads_may_lie_anywhere():
    y = spmd.device_put(X, spmd.devices()[7])
    np.testing.assert_array_equal(spmd.jit(lambda x, y: double(x))(X, y), X * 2)
    mesh = line(0, 1, 2, 3)
    specs: Any = {"in_specs": (P("x"), P("x")), "out_specs": P("x")}
    first = spmd.shard_map(lambda a, b: a * 2, mesh=mesh, **specs)
    np.testing.assert_array_equal(spmd.jit(first)(X, y), X * 2)


# ---- types that say how an argument lies -------------------------------------------------------

TYPED: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "map": lambda f: f,
    "jit": spmd.jit,
    "jit of more": lambda f: spmd.jit(lambda x: f(x + 0)),
    "grad": lambda f: spmd.grad(lambda x: f(x).sum()),
    "vmap": lambda f: lambda x: spmd.vmap(f)(snp.stack([x, x])),
}


@pytest.mark.parametrize("way", TYPED)
def test_a_whole_array_over_an_explicit_mesh_is_not_split_silently(way: str):
    mesh = spmd.make_mesh((4,), ("x",))
    f = TYPED[way](spmd.shard_map(lambda a: a * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    whole = spmd.device_put(X, NamedSharding(mesh, P()))
    with pytest.raises(ShardingError, match=r"f32\[8\], and its in_spec is P\('x',\); nothing is"):
        f(whole)
    free, split = f(X), f(spmd.reshard(whole, NamedSharding(mesh, P("x"))))
    np.testing.assert_array_equal(free, split)


def test_a_whole_array_is_split_along_other_axes_as_in_jax():
    mesh = spmd.make_mesh((2, 2), ("x", "y"))
    whole = spmd.device_put(X, NamedSharding(mesh, P()))
    specs: Any = {"in_specs": P("x"), "out_specs": P("x")}
    f = spmd.shard_map(lambda a: a * 2, mesh=mesh, axis_names={"x"}, **specs)
    np.testing.assert_array_equal(f(whole), X * 2)
    kinds = (spmd.sharding.AxisType.Explicit, spmd.sharding.AxisType.Auto)
    mixed = spmd.make_mesh((2, 2), ("x", "y"), kinds)
    f = spmd.shard_map(lambda a: a * 2, mesh=mixed, **specs)
    np.testing.assert_array_equal(f(spmd.device_put(X, NamedSharding(mixed, P()))), X * 2)


def test_a_device_put_moves_under_transformations():
    x = spmd.device_put(X, spmd.devices()[2])
    put = over(0, 1, 2, 3)
    np.testing.assert_array_equal(
        spmd.grad(lambda x: (spmd.device_put(x, put) ** 2).sum())(x), X * 2
    )
    moved = spmd.vmap(lambda x: spmd.device_put(x, over(0, 1, 2, 3, spec=P())))(x)
    np.testing.assert_array_equal(moved, X)


def test_a_compiled_call_runs_where_it_was_lowered_for():
    devices = spmd.devices()
    f = spmd.jit(lambda x: x * 2)
    x, y = spmd.device_put(X, devices[2]), spmd.device_put(X, devices[0])
    for shape in (
        x,
        spmd.ShapeDtypeStruct((8,), np.float32, sharding=SingleDeviceSharding(devices[2])),
    ):
        compiled = f.lower(shape).compile()
        assert compiled.input_shardings[0] == (SingleDeviceSharding(devices[2]),)
        assert compiled(x).devices() == {devices[2]}
        with pytest.raises(
            ShardingError, match=r"argument x .*laid out by cpu:0, compiled for cpu:2"
        ):
            compiled(y)
    compiled = f.lower(X).compile()
    np.testing.assert_array_equal(compiled(y), X * 2)
    with pytest.raises(ShardingError, match=r"argument x .*laid out by cpu:2, compiled for cpu:0"):
        compiled(x)
    there = spmd.jit(lambda x: x * 2, in_shardings=SingleDeviceSharding(devices[2]))
    np.testing.assert_array_equal(there.lower(X).compile()(x), X * 2)


def test_the_message_names_path_devices_and_fix():
    """The whole text, once for each kind of call."""
    tree = {"w": [spmd.device_put(X, spmd.devices()[5])]}
    mapped = spmd.shard_map(
        lambda d: d["w"][0] * 2, mesh=line(0, 1, 2, 3), in_specs=P("x"), out_specs=P("x")
    )
    found = []
    for f in (mapped, spmd.jit(lambda d: mapped(d)), spmd.jit(lambda d: held(d["w"][0]))):
        with pytest.raises(DeviceError) as caught:
            f(tree)
        text = str(caught.value).split(": ", 1)[1]
        found.append(text.split(" in it (")[0] + text[text.index(" is over ") :])
    there = "is over devices [0, 1, 2, 3]; nothing is moved silently. Pass device_put(d['w'][0], "
    here = "d['w'][0] (f32[8]) is committed to cpu:5, and "
    fix = "NamedSharding(mesh, spec))"
    assert found[0].startswith(f"shard_map(<lambda>): {here}the mesh {there}{fix}")
    assert found[1].startswith(f"jit(<lambda>): {here}shard_map(<lambda>) {there}{fix}")
    assert found[2].startswith(f"jit(<lambda>): {here}a sharding constraint {there}{fix}")
    with pytest.raises(DeviceError) as caught:
        lax.with_sharding_constraint(tree, over(0, 1, 2, 3))
    assert str(caught.value).split(": ", 1)[1] == (
        "with_sharding_constraint: x['w'][0] (f32[8]) is committed to cpu:5, and the sharding is "
        "over devices [0, 1, 2, 3]; nothing is moved silently. Pass device_put(x['w'][0], sharding)"
    )


def calls(f: Callable[[], object]) -> int:
    """The Python calls that a repeated call makes."""
    for _ in range(5):
        f()
    profile = cProfile.Profile()
    profile.enable()
    f()
    profile.disable()
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def test_calls_on_one_device_do_nothing_more():
    x = snp.asarray(X)
    step = spmd.jit(lambda x: x * 2)
    assert calls(lambda: step(x)) <= 6
