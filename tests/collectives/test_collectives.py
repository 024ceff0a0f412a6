"""Every collective with every dtype: pmap means vmap, op by op and compiled, and what JAX means."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd.sharding import PartitionSpec as P
from tests.collectives.compare import assert_close, assert_same
from tests.collectives.table import CASES, Case, cases_for

N = 4
ALL = pytest.mark.parametrize("case, dtype", cases_for(N), ids=str)


def body_of(case: Case, n: int, module: Any = lax) -> Any:
    """The per-device function of a case."""
    return lambda x: case.body(module, x, n)


@ALL
def test_pmap_means_vmap(case: Case, dtype: str):
    x = case.example(N, dtype)
    f = body_of(case, N)
    assert_close(spmd.pmap(f, axis_name="i")(x), spmd.vmap(f, axis_name="i")(x))


@ALL
def test_compiled_means_op_by_op(case: Case, dtype: str):
    x = case.example(N, dtype)
    mapped = spmd.pmap(body_of(case, N), axis_name="i")
    with spmd.disable_jit():
        expected = mapped(x)
    # Collectives alone: the same bits, as both combine in the order of the devices.
    check = assert_close if case.name in ("ring_sum", "psum_twice") else assert_same
    check(mapped(x), expected)


@ALL
def test_shard_map_means_pmap(case: Case, dtype: str):
    x = case.example(N, dtype)
    f = body_of(case, N)
    for typed in (True, False):
        mapped = spmd.shard_map(
            lambda rows: f(rows[0])[None],
            mesh=spmd.make_mesh((N,), ("i",)),
            in_specs=P("i"),
            out_specs=P("i"),
            check_vma=typed,
        )
        assert_same(mapped(x), spmd.pmap(f, axis_name="i")(x))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_any_number_of_devices(n: int):
    for case, dtype in cases_for(n):
        if dtype in ("int32", "bfloat16"):
            x = case.example(n, dtype)
            f = body_of(case, n)
            assert_close(spmd.pmap(f, axis_name="i")(x), spmd.vmap(f, axis_name="i")(x), str(case))


def test_a_thousand_devices_by_vmap():
    n = 1024
    x = np.arange(float(n), dtype=np.float32)
    shifted = spmd.vmap(
        lambda x: lax.ppermute(x, "i", [(k, (k + 1) % n) for k in range(n)]), axis_name="i"
    )
    np.testing.assert_array_equal(shifted(x), np.roll(x, 1))
    total = spmd.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)
    np.testing.assert_array_equal(total, np.full(n, x.sum()))


def test_sums_of_16_bit_floats_round_once():
    x = np.array([256.0, 1.0, 1.0, 1.0]).astype(spmd.numpy.bfloat16)
    out = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)
    # 256 + 1 is 256 in bfloat16; in float32 the sum is 259, which rounds to 260.
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.full(4, 260.0))


def test_special_values_keep_their_meaning():
    nan, inf = np.nan, np.inf
    x = np.array([[-0.0, nan, inf], [-0.0, 1, -inf], [-0.0, 2, 0], [-0.0, 3, 1]], np.float32)
    for op in (lax.psum, lax.pmax, lax.pmin):
        out = np.asarray(spmd.pmap(functools.partial(op, axis_name="i"), axis_name="i")(x))
        assert np.signbit(out[:, 0]).all()
        assert np.isnan(out[:, 1]).all()
    moved = spmd.pmap(lambda x: lax.pbroadcast(x, "i", 0), axis_name="i")(x)
    assert np.asarray(moved).tobytes() == np.stack([x[0]] * 4).tobytes()


# ---- several axes ------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [("x",), ("y",), ("x", "y"), ("y", "x")], ids=str)
@pytest.mark.parametrize("what", ["psum", "pmax", "all_gather", "tiled", "scatter", "index"])
def test_tuples_of_axes(what: str, axes: tuple[str, ...]):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, 2, 4)).astype(np.float32)
    size = 2 ** len(axes)

    def f(x):
        if what == "scatter":
            return lax.psum_scatter(x, axes, tiled=True)
        if what == "index":
            return x + lax.axis_index(axes)
        if what == "tiled":
            return lax.all_gather(x, axes, tiled=True)
        return getattr(lax, what)(x, axes)

    mapped = spmd.shard_map(
        lambda x: f(x[0, 0])[None, None],
        mesh=spmd.make_mesh((2, 2), ("x", "y")),
        in_specs=P("x", "y"),
        out_specs=P("x", "y"),
    )
    order = [("x", "y").index(a) for a in axes]
    rest = [d for d in range(2) if d not in order]
    groups = x.transpose(*rest, *order, 2).reshape(-1, size, 4)
    member = np.arange(size, dtype=np.float32)[:, None]
    wanted = np.stack(
        [
            {
                "psum": lambda g: np.broadcast_to(g.sum(0), (size, 4)),
                "pmax": lambda g: np.broadcast_to(g.max(0), (size, 4)),
                "all_gather": lambda g: np.stack([g] * size),
                "tiled": lambda g: np.stack([g.reshape(-1)] * size),
                "scatter": lambda g: g.sum(0).reshape(size, -1),
                "index": lambda g: g + member,
            }[what](g)
            for g in groups
        ]
    )
    wanted = wanted.reshape(*([2] * len(rest)), *([2] * len(order)), *wanted.shape[2:])
    back = np.argsort([*rest, *order])
    wanted = wanted.transpose(*back, *range(2, wanted.ndim))
    np.testing.assert_allclose(mapped(x), wanted, rtol=1e-6, atol=1e-6)


# ---- JAX ---------------------------------------------------------------------------------------

# What JAX's vmap refuses; its pmap takes more time to compile.
_ONLY_PMAP = ("groups", "ppermute_some", "ppermute_none")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_jax_means_the_same(case: Case):
    jax = pytest.importorskip("jax")
    mapper = jax.pmap if any(part in case.name for part in _ONLY_PMAP) else jax.vmap
    for dtype in case.dtypes:
        x = case.example(N, dtype)
        expected = mapper(body_of(case, N, jax.lax), axis_name="i")(x)
        assert_close(spmd.pmap(body_of(case, N), axis_name="i")(x), expected, dtype)


UNEQUAL = [[2], [0, 3, 1]]
REDUCTIONS: dict[str, Any] = {
    "psum": np.sum,
    "pmean": np.mean,
    "pmax": np.max,
    "pmin": np.min,
}


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_groups_of_different_sizes(name: str, dtype: str):
    x = np.random.default_rng(0).integers(-9, 9, (N, 3)).astype(spmd.numpy.dtype(dtype))
    f = functools.partial(getattr(lax, name), axis_name="i", axis_index_groups=UNEQUAL)
    want = np.zeros((N, 3))
    for group in UNEQUAL:
        want[group] = REDUCTIONS[name](x[group].astype(np.float64), axis=0)
    mesh, rows = spmd.make_mesh((N,), ("i",)), P("i")
    mapped = [
        spmd.vmap(f, axis_name="i"),
        spmd.pmap(f, axis_name="i"),
        spmd.jit(spmd.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows)),
        spmd.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False),
    ]
    for g in mapped:
        np.testing.assert_allclose(np.asarray(g(x), np.float64), want, 1e-2)
    with spmd.disable_jit():
        np.testing.assert_allclose(np.asarray(mapped[1](x), np.float64), want, 1e-2)


def test_derivatives_and_numbers_of_groups_of_different_sizes():
    x = np.arange(1.0, N + 1, dtype=np.float32)

    def f(x: Any) -> Any:
        return lax.psum(x, "i", axis_index_groups=UNEQUAL) ** 2

    sums = np.zeros((N, N), np.float32)
    for group in UNEQUAL:
        sums[np.ix_(group, group)] = 1
    want = spmd.grad(lambda x: ((sums @ x) ** 2).sum())(x)
    for wrap in (spmd.pmap, spmd.vmap):
        slope = spmd.grad(lambda x, wrap=wrap: wrap(f, axis_name="i")(x).sum())(x)
        np.testing.assert_allclose(slope, want, 1e-5)
    count = spmd.pmap(lambda x: x * lax.psum(1, "i", axis_index_groups=UNEQUAL), axis_name="i")
    np.testing.assert_array_equal(count(x), x * [3, 3, 1, 3])
    with pytest.raises(spmd.errors.ArgumentError, match="must all have the same size"):
        spmd.pmap(lambda x: lax.all_gather(x, "i", axis_index_groups=UNEQUAL), axis_name="i")(x)
