"""`debug_nans` over a mesh: the device, the operation and the line that first made a NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.sharding import PartitionSpec as P

X = np.array([1.0, 4.0, -1.0, 9.0], np.float32)


@pytest.fixture(autouse=True)
def look() -> Iterator[None]:
    with spmd.config.override("debug_nans", True):
        yield


def body(x: Any) -> Any:
    y = snp.sqrt(x)
    return lax.psum(y, "i") + x


def test_pmap_names_device_operation_and_line():
    told = (
        r"pmap\(body\): sqrt made a NaN on cpu:2 \(i=2\) at .*test_mesh_nan_check.py:\d+ \(body\)"
    )
    f = spmd.pmap(body, axis_name="i")
    for _ in range(3):  # also when the call has become a fast one
        np.testing.assert_allclose(f(abs(X)), snp.sqrt(abs(X)).sum() + abs(X), rtol=1e-6)
    for _ in range(3):
        with pytest.raises(FloatingPointError, match=told):
            f(X)


@pytest.mark.parametrize("jitted", [False, True])
def test_shard_map_names_the_device_with_a_nan(jitted: bool):
    f = spmd.shard_map(body, mesh=spmd.make_mesh((4,), ("i",)), in_specs=P("i"), out_specs=P("i"))
    f = spmd.jit(f) if jitted else f
    with pytest.raises(FloatingPointError, match=r"shard_map\(body\): sqrt made a NaN on cpu:2"):
        f(X)


def test_a_nan_in_a_loop_with_collectives_is_found():
    def f(x: Any) -> Any:
        step = lambda _, c: snp.log(lax.psum(c, "i") - 20)  # noqa: E731
        return lax.fori_loop(0, 3, step, x)

    with pytest.raises(FloatingPointError, match=r"log made a NaN on cpu:0 .* \(and on 3 more"):
        spmd.pmap(f, axis_name="i")(X)


def test_a_nan_in_an_argument_is_named():
    def f(state: Any) -> Any:
        return lax.psum(state["w"], "i")

    x = np.array([1, np.nan, 3, 4], np.float32)
    with pytest.raises(FloatingPointError, match=r"argument state\['w'\] holds a NaN on cpu:1"):
        spmd.pmap(f, axis_name="i")({"w": x})


def test_the_difference_of_infinities_is_named():
    x = np.array([np.inf, -np.inf, 0, 0], np.float32)
    with pytest.raises(FloatingPointError, match="infinities of both signs"):
        spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)


def test_donated_arguments_survive_the_search():
    def f(w: Any, x: Any) -> Any:
        return w + snp.log(x - lax.pmean(x, "i"))

    mapped = spmd.pmap(f, axis_name="i", donate_argnums=(0,))
    for _ in range(2):
        w = spmd.pmap(lambda x: x)(X)
        with pytest.raises(FloatingPointError, match="log made a NaN on cpu:0"):
            mapped(w, abs(X))


# ---- programs that were partitioned ------------------------------------------------------------

Y = np.ones((4, 6), np.float32)
Y[3, 4] = -1

PARTITIONED: dict[str, tuple[Any, str]] = {
    "a part": (
        lambda x: snp.log(x) * 2,
        r"log made a NaN at \[3, 4\] of f32\[4,6\], on cpu:3 \(x=1, y=1\) at ",
    ),
    "transposed": (
        lambda x: snp.log(x.T).sum(),
        r"log made a NaN at \[4, 3\] of f32\[6,4\], on cpu:3 \(x=1, y=1\) at ",
    ),
    "parts of unequal size": (
        lambda x: snp.sum(snp.log(x[1:]) * 2),
        r"log made a NaN at \[2, 4\] of f32\[3,6\], on cpu:3 \(x=1, y=1\) at ",
    ),
    "a gradient": (
        spmd.grad(lambda x: snp.sqrt(x).sum()),
        r"sqrt made a NaN at \[3, 4\] of f32\[4,6\], on cpu:3",
    ),
    "a scalar": (lambda x: snp.log(x.min()), r"log made a NaN on cpu:0 .* at "),
    "a call": (
        lambda x: spmd.jit(lambda y: snp.log(y) + 1)(x * 2),
        r"log made a NaN at \[3, 4\] of f32\[4,6\], on cpu:3",
    ),
    "a pmap inside": (
        lambda x: spmd.pmap(lambda r: snp.log(r))(x) + 1,
        r"log made a NaN on cpu:3 \(x=1, y=1\)",
    ),
}


@pytest.mark.parametrize("name", PARTITIONED)
def test_a_partitioned_program_names_the_index_in_the_whole_value(name: str):
    f, told = PARTITIONED[name]
    mesh = spmd.make_mesh((2, 2), ("x", "y"), spmd.sharding.AxisType.Auto)
    x = spmd.device_put(Y, spmd.NamedSharding(mesh, P("x", "y")))
    with pytest.raises(FloatingPointError, match=r"^jit\(.*\): " + told) as found:
        spmd.jit(f)(x)
    assert "test_mesh_nan_check.py" in str(found.value)
    np.testing.assert_allclose(spmd.jit(f)(abs(x)), spmd.jit(f)(abs(Y)), rtol=1e-6)


def test_a_nan_in_a_split_argument_is_named():
    mesh = spmd.make_mesh((2, 2), ("x", "y"), spmd.sharding.AxisType.Auto)
    x = spmd.device_put(Y * np.nan, spmd.NamedSharding(mesh, P("x", "y")))

    def f(table: Any) -> Any:
        return table * 2

    with pytest.raises(FloatingPointError, match=r"jit\(f\): argument table holds a NaN on cpu:0"):
        spmd.jit(f)(x)
