"""Reshapes of split dims of which a second one is split, with mesh axes and with parts of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug, lax, nn
from spmd.base.config import config
from spmd.partition.strategies.reshaping import carried
from tests.partition.programs import auto_mesh


@pytest.fixture(scope="module", autouse=True)
def eight_devices() -> Iterator[None]:
    """Meshes of this file have up to eight devices."""
    with config.override("num_cpu_devices", 8):
        yield


def placed(mesh: Any, x: Any, *spec: Any) -> Any:
    return spmd.device_put(x, NamedSharding(mesh, P(*spec)))


def received(f: Any, *args: Any) -> int:
    return sum(c.received * c.times for c in debug.collectives(f)(*args))


# ---- the law of reshapes -----------------------------------------------------------------------


def parts(x: np.ndarray, split: Sequence[Any], sizes: dict[str, int]) -> list[np.ndarray]:
    """The part of an array on each device, the devices row-major along the axes."""
    found = []
    for place in np.ndindex(*sizes.values()):
        at, part = dict(zip(sizes, place, strict=True)), x
        for d, axes in enumerate(split):
            for axis in axes:
                part = np.split(part, sizes[axis], d)[at[axis]]
        found.append(part.ravel())
    return found


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_devices_have_the_same_elements_of_what_a_reshape_carries_on(data: Any):
    sizes = data.draw(
        st.sampled_from([{"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2}, {"x": 2, "y": 3}])
    )
    factors = data.draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=5))

    def shape() -> tuple[int, ...]:
        cuts = data.draw(st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)))
        made = [1]
        for n, starts in zip(factors, cuts, strict=True):
            made = [*made, n] if starts else [*made[:-1], made[-1] * n]
        return tuple(made)

    old, new, left = shape(), shape(), list(sizes)
    split: list[tuple[str, ...]] = []
    for size in old:
        axes: tuple[str, ...] = ()
        for axis in data.draw(st.permutations(left)):
            if data.draw(st.booleans()) and size % math.prod(sizes[a] for a in (*axes, axis)) == 0:
                axes = (*axes, axis)
        left = [a for a in left if a not in axes]
        split.append(axes)
    made = carried(old, new, split, sizes)
    assume(carried(new, old, made, sizes) == tuple(split))  # all axes are carried on
    x = np.arange(math.prod(old))
    for a, b in zip(
        parts(x.reshape(old), split, sizes), parts(x.reshape(new), made, sizes), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_programs_of_reshapes_have_the_values_of_one_device(data: Any):
    sizes = data.draw(st.sampled_from([{"x": 8}, {"x": 2, "y": 4}, {"x": 4, "y": 2}]))
    shapes = [(8, 16), (2, 4, 16), (8, 2, 8), (2, 4, 4, 4), (128,), (4, 2, 16), (8, 4, 4), (2, 64)]
    way = data.draw(st.lists(st.sampled_from(shapes), min_size=2, max_size=4))
    axis = data.draw(st.integers(0, 3))
    takes_slope = data.draw(st.booleans())

    def f(x: Any, w: Any) -> Any:
        for k, shape in enumerate(way):
            x = snp.tanh(x.reshape(shape)) if k != 1 else x.reshape(shape)
            d = axis % len(shape)
            x = x - x.mean(d, keepdims=True)
            if axis == 3:
                x = snp.swapaxes(x, 0, -1)
        return (x.reshape(8, 16) @ w).reshape(2, 4, 4, -1).sum(axis % 2)

    def run(x: Any, w: Any) -> Any:
        slopes = spmd.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1)) if takes_slope else f
        return slopes(x, w)

    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in (way[0], (16, 8)))
    mesh = auto_mesh(tuple(sizes.values()), tuple(sizes))

    def entries(shape: Sequence[int]) -> list[Any]:
        found: list[Any] = [None] * len(shape)
        d = data.draw(st.integers(0, len(shape) - 1))
        axes = tuple(data.draw(st.permutations(list(sizes))))
        for n in range(len(axes), 0, -1):
            if shape[d] % math.prod(sizes[a] for a in axes[:n]) == 0:
                found[d] = axes[:n]
                break
        return found

    args = [placed(mesh, a, *entries(a.shape)) for a in (x, w)]
    for got, want in zip(
        spmd.tree.leaves(spmd.jit(run)(*args)), spmd.tree.leaves(run(x, w)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


# ---- heads of queries that share keys ----------------------------------------------------------

BATCH, TIME, HEADS, SHARED, SIZE = 8, 16, 8, 2, 16
WIDTH = HEADS * SIZE
_rng = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return (_rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)


WEIGHTS = {
    "q": _normal(WIDTH, WIDTH),
    "k": _normal(WIDTH, SHARED * SIZE),
    "v": _normal(WIDTH, SHARED * SIZE),
    "o": _normal(WIDTH, WIDTH),
}
X = _normal(BATCH, TIME, WIDTH)


def attend(q: Any, k: Any, v: Any) -> Any:
    return nn.dot_product_attention(q, k, v, is_causal=True)


def attend_by_groups(q: Any, k: Any, v: Any) -> Any:
    b, t, *_ = q.shape
    q = q.reshape(b, t, SHARED, -1, SIZE)
    scores = snp.einsum("btkgd,bskd->bkgts", q, k) / SIZE**0.5
    scores = snp.where(snp.tril(snp.ones((t, t), bool)), scores, -1e30)
    return snp.einsum("bkgts,bskd->btkgd", nn.softmax(scores), v).reshape(b, t, HEADS, SIZE)


def block(attend: Any) -> Any:
    def run(w: Any, x: Any) -> Any:
        b, t, _ = x.shape
        q, k, v = (
            (x @ w[name]).reshape(b, t, heads, SIZE)
            for name, heads in (("q", HEADS), ("k", SHARED), ("v", SHARED))
        )
        return x + attend(q, k, v).reshape(b, t, WIDTH) @ w["o"]

    return run


@pytest.mark.parametrize("sizes", [(1, 8), (2, 4), (4, 2)], ids=str)
def test_attention_with_fewer_heads_of_keys_than_devices_moves_nothing(sizes: Any):
    mesh = auto_mesh(sizes, ("x", "y"))
    q, k, v = _normal(BATCH, TIME, HEADS, SIZE), *(_normal(BATCH, TIME, SHARED, SIZE),) * 2
    args = placed(mesh, q, "x", None, "y"), placed(mesh, k, "x"), placed(mesh, v, "x")
    f = spmd.jit(attend)
    assert debug.collectives(f)(*args) == []
    out = f(*args)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x", None, "y")), 4)
    np.testing.assert_allclose(out, attend(q, k, v), rtol=1e-4, atol=1e-5)
    assert ":(" not in str(out.sharding) and "y" in str(out.sharding.spec)


# What a device receives in a block whose heads are split, and with its gradient: at most. JAX
# 0.10.2 receives 126976, 53248 and 16384 bytes, and 180224, 139264 and 139264.
MOST = {(1, 8): (126976, 167936), (2, 4): (53248, 126976), (4, 2): (16384, 139264)}


@pytest.mark.parametrize("sizes", MOST, ids=str)
@pytest.mark.parametrize("attend", [attend, attend_by_groups])
def test_blocks_with_fewer_heads_of_keys_move_no_more_than_in_jax(sizes: Any, attend: Any):
    mesh, run = auto_mesh(sizes, ("x", "y")), block(attend)
    specs = {"q": (None, "y"), "k": (None, "y"), "v": (None, "y"), "o": ("y",)}
    weights = {name: placed(mesh, w, *specs[name]) for name, w in WEIGHTS.items()}
    x = placed(mesh, X, "x")

    def slopes(w: Any, x: Any) -> Any:
        return spmd.grad(lambda w: (run(w, x) ** 2).mean())(w)

    forward, backward = MOST[sizes]
    assert received(spmd.jit(run), weights, x) <= forward
    assert received(spmd.jit(slopes), weights, x) <= backward
    np.testing.assert_allclose(spmd.jit(run)(weights, x), run(WEIGHTS, X), rtol=1e-4, atol=1e-4)
    got, want = spmd.jit(slopes)(weights, x), slopes(WEIGHTS, X)
    for name in WEIGHTS:
        assert got[name].sharding.mesh == mesh
        np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-5)


def test_layers_in_a_scan_keep_heads_split():
    mesh, run = auto_mesh((2, 4), ("x", "y")), block(attend)
    specs = {"q": (None, "y"), "k": (None, "y"), "v": (None, "y"), "o": ("y",)}
    stacked = {name: np.stack([w, w * 0.5]) for name, w in WEIGHTS.items()}
    weights = {name: placed(mesh, w, None, *specs[name]) for name, w in stacked.items()}

    def layers(w: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (run(w, x), None), x, w)[0]

    assert received(spmd.jit(layers), weights, placed(mesh, X, "x")) <= 2 * 53248
    got = spmd.jit(layers)(weights, placed(mesh, X, "x"))
    np.testing.assert_allclose(got, layers(stacked, X), rtol=1e-3, atol=1e-3)


def test_a_constraint_in_such_a_program_is_over_the_mesh_of_its_user():
    mesh = auto_mesh((2, 4), ("x", "y"))

    def f(x: Any) -> Any:
        y = x.reshape(8, 2, 4, 16) * 2
        y = lax.with_sharding_constraint(y, NamedSharding(mesh, P("x", None, "y")))
        return y.reshape(8, 8, 16), snp.sin(x).reshape(8, 2, 4, 16).sum(2)

    x = _normal(8, 8, 16)
    y, z = spmd.jit(f)(placed(mesh, x, None, "y"))
    want_y, want_z = x * 2, np.sin(x).reshape(8, 2, 4, 16).sum(2)
    np.testing.assert_allclose(y, want_y, rtol=1e-6)
    np.testing.assert_allclose(z, want_z, rtol=1e-5, atol=1e-6)
    assert y.sharding.mesh == z.sharding.mesh == mesh


def test_what_such_a_program_moves_is_shown_over_the_mesh_of_its_user():
    mesh = auto_mesh((2, 4), ("x", "y"))
    q, k = _normal(BATCH, TIME, HEADS, SIZE), _normal(BATCH, TIME, SHARED, SIZE)
    args = placed(mesh, q, "x", None, "y"), placed(mesh, k, "x"), placed(mesh, k, "x")
    text = str(debug.sharding(lambda *a: spmd.grad(lambda *a: (attend(*a) ** 2).sum())(*a))(*args))
    assert text.startswith("<lambda> over Mesh('x': 2, 'y': 4")
    assert "result: f32[8@x,16,8@y,16]" in text
