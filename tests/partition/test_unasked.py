"""`config.unasked_gathers`: moves that no sharding asks for are told of, and others are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax
from spmd.base.errors import CollectiveWarning, SettingError, ShardingError
from spmd.sharding import AxisType

X = np.ones((64, 32), np.float32)
W = np.ones((32, 64), np.float32)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.fixture
def small() -> Iterator[None]:
    """All moves count, however small."""
    with spmd.config.override("unasked_gathers_from", 0):
        yield


def placed(kind: AxisType) -> tuple[Any, Any, Any]:
    mesh = spmd.make_mesh((4,), ("x",), kind)
    rows = NamedSharding(mesh, P("x"))
    return mesh, spmd.device_put(X, rows), spmd.device_put(W, rows)


def whole(mesh: Any, x: Any) -> Any:
    if mesh.axis_types[0] is EXPLICIT:
        return spmd.reshard(x, P())
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P()))


def fold(x: Any) -> Any:
    return lax.scan(lambda c, row: (snp.sin(c) + snp.sort(row), None), snp.zeros(32), x)[0]


# Each with what a device receives; the programs, of the mesh, `x` and `w`, both split by rows.
MOVED: dict[str, tuple[AxisType, str, int, Callable[[Any, Any, Any], Any]]] = {
    "product": (AUTO, "dot_general wants w", 3 * W.nbytes // 4, lambda m, x, w: x @ w),
    "typed product": (EXPLICIT, "dot_general wants w", 3 * W.nbytes // 4, lambda m, x, w: x @ w),
    "sort": (
        AUTO,
        "sort wants a value of this line",
        X.nbytes * 3 // 16,
        lambda m, x, w: snp.sort(x + 1, axis=0),
    ),
    "scan": (AUTO, "scan wants x", 3 * X.nbytes // 4, lambda m, x, w: fold(x)),
    "slice": (AUTO, "slice wants x", 0, lambda m, x, w: snp.sin(x[1:-1, :3]) * 2),
    "uneven result": (
        AUTO,
        "the result wants",
        0,
        lambda m, x, w: lax.with_sharding_constraint(x[1:-1] * 2, NamedSharding(m, P("x"))),
    ),
}


# Programs that are otherwise, or not allowed, operation by operation.
TOGETHER = ("halos", "slice", "uneven result")


@pytest.mark.parametrize("name", MOVED)
def test_moves_that_no_spec_asks_for(small: None, name: str):
    kind, said, received, f = MOVED[name]
    mesh, x, w = placed(kind)
    text = f"{received / 1000:.3g} KB" if received >= 1000 else f"{received} B"
    match = rf"unasked_gathers='raise'.*\n.*test_unasked.py:\d+ .*{said} .*" + (
        f"receives {text}" if received else "receives"
    )
    with spmd.config.override("unasked_gathers", "raise"):
        with pytest.raises(ShardingError, match=match):
            spmd.jit(lambda x, w: f(mesh, x, w))(x, w)
        if name not in TOGETHER:
            with pytest.raises(ShardingError, match="unasked_gathers"):
                f(mesh, x, w)
    found = spmd.jit(lambda x, w: f(mesh, x, w))(x, w)
    np.testing.assert_allclose(found, spmd.jit(lambda x, w: f(mesh, x, w))(X, W), rtol=1e-5)


ASKED: dict[str, tuple[AxisType, Callable[[Any, Any, Any], Any]]] = {
    "constraint": (AUTO, lambda m, x, w: x @ whole(m, w)),
    "reshard": (EXPLICIT, lambda m, x, w: x @ whole(m, w)),
    "constraint to columns": (
        AUTO,
        lambda m, x, w: lax.with_sharding_constraint(x, NamedSharding(m, P(None, "x"))),
    ),
    "device_put": (AUTO, lambda m, x, w: spmd.device_put(x, NamedSharding(m, P()))),
    "map": (
        AUTO,
        lambda m, x, w: spmd.shard_map(snp.sin, mesh=m, in_specs=P(), out_specs=P())(x),
    ),
    "a map's own": (
        AUTO,
        lambda m, x, w: spmd.shard_map(
            lambda x: lax.all_gather(x, "x"), mesh=m, in_specs=P("x"), out_specs=P("x")
        )(x),
    ),
    "sum": (AUTO, lambda m, x, w: x.sum(0)),
    "elementwise": (AUTO, lambda m, x, w: snp.sin(x) * 2 + x),
    "halos": (AUTO, lambda m, x, w: snp.roll(x, 1, 0)),
}


@pytest.mark.parametrize("name", ASKED)
def test_moves_that_are_asked_for_and_sums(small: None, name: str):
    kind, f = ASKED[name]
    mesh, x, w = placed(kind)
    with spmd.config.override("unasked_gathers", "raise"):
        found = spmd.jit(lambda x, w: f(mesh, x, w))(x, w)
        if name not in TOGETHER:
            np.testing.assert_allclose(f(mesh, x, w), found, rtol=1e-6)


def test_results_that_are_asked_for(small: None):
    mesh, x, _ = placed(AUTO)
    columns = NamedSharding(mesh, P(None, "x"))
    with spmd.config.override("unasked_gathers", "raise"):
        found = spmd.jit(lambda x: x + 1, out_shardings=columns)(x)
        assert found.sharding.is_equivalent_to(columns, 2)


def test_the_advice_is_followed_and_nothing_is_left_to_tell(small: None):
    """The code in the message, put before the line that it names."""
    mesh, x, w = placed(AUTO)
    with spmd.config.override("unasked_gathers", "raise"):
        with pytest.raises(ShardingError) as told:
            spmd.jit(lambda x, w: x @ w)(x, w)
        advice = str(told.value).partition("ask for it: ")[2]
        assert advice == "w = lax.with_sharding_constraint(w, NamedSharding(mesh, P()))"

        def advised(x: Any, w: Any) -> Any:
            scope = {"w": w, "lax": lax, "NamedSharding": NamedSharding, "mesh": mesh, "P": P}
            exec(advice, scope)
            return x @ scope["w"]

        np.testing.assert_allclose(spmd.jit(advised)(x, w), X @ W, rtol=1e-5)


def test_small_moves_are_allowed():
    _, x, w = placed(AUTO)
    f = spmd.jit(lambda x, w: x @ w)
    with spmd.config.override("unasked_gathers", "raise"):
        f(x, w)  # below 1 MiB
        with spmd.config.override("unasked_gathers_from", "6 KB"), pytest.raises(ShardingError):
            f(x, w)
        with spmd.config.override("unasked_gathers_from", "7 KB"):
            f(x, w)
    with pytest.raises(ValueError, match=r"unasked_gathers_from.*text like '8 MB'"):
        spmd.config.update("unasked_gathers_from", "much")
    with pytest.raises((SettingError, ValueError), match="one of allow, warn, raise"):
        spmd.config.update("unasked_gathers", "never")


def test_a_warning_names_the_line_once_a_program(small: None):
    _, x, w = placed(AUTO)
    f = spmd.jit(lambda x, w: (x @ w, snp.sort(x, axis=0)))
    f(x, w)  # what was compiled before is looked at again
    with (
        spmd.config.override("unasked_gathers", "warn"),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        for _ in range(4):
            f(x, w)
    (warning,) = seen
    assert warning.category is CollectiveWarning and warning.filename == __file__
    assert "2 moves between devices" in str(warning.message)


def test_a_program_that_is_not_partitioned_tells_what_it_gathers(small: None):
    _, x, _ = placed(AUTO)
    backwards = spmd.devices()[3::-1]
    double = spmd.pmap(lambda row: row * 2, devices=backwards)
    f = spmd.jit(lambda x: double(x.reshape(4, 16, 32)) + 1)
    with (
        spmd.config.override("unasked_gathers", "raise"),
        pytest.raises(ShardingError, match=r"is not partitioned.*\n  x \(f32\[64,32\].*6.14 KB"),
    ):
        f(x)
    assert f(x).shape == (4, 16, 32)
