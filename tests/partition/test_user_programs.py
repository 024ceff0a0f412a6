"""Programs as users write them for one device, on meshes: the values are those of one device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax, nn, random
from spmd.base.config import config
from tests.partition.programs import auto_mesh

RNG = np.random.default_rng(0)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}


@pytest.fixture(scope="module", autouse=True)
def eight_devices() -> Iterator[None]:
    with config.override("num_cpu_devices", 8):
        yield


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def below(most: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, most, shape).astype(np.int32)


def program(*args: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def note(f: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[f.__name__] = f, args
        return f

    return note


# ---- models ------------------------------------------------------------------------------------

HEADS, SHARED, SIZE = 8, 2, 8
WIDTH = HEADS * SIZE
LAYER = {
    "q": normal(WIDTH, WIDTH) / 8,
    "k": normal(WIDTH, SHARED * SIZE) / 8,
    "v": normal(WIDTH, SHARED * SIZE) / 8,
    "o": normal(WIDTH, WIDTH) / 8,
}


def rotated(x: Any, place: Any) -> Any:
    half = x.shape[-1] // 2
    angles = place * 100.0 ** (-snp.arange(half) / half)
    left, right = snp.split(x, 2, -1)
    cos, sin = snp.cos(angles), snp.sin(angles)
    return snp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


@program(LAYER, normal(8, 16, SHARED, SIZE), normal(8, 16, SHARED, SIZE), normal(8, WIDTH))
def decoding_with_a_cache(w: Any, keys: Any, values: Any, x: Any) -> Any:
    def step(carry: Any, place: Any) -> Any:
        x, keys, values = carry
        q = rotated((x @ w["q"]).reshape(8, HEADS, SIZE), place)
        k = rotated((x @ w["k"]).reshape(8, 1, SHARED, SIZE), place)
        keys = lax.dynamic_update_slice(keys, k, (0, place, 0, 0))
        v = (x @ w["v"]).reshape(8, 1, SHARED, SIZE)
        values = lax.dynamic_update_slice(values, v, (0, place, 0, 0))
        scores = snp.einsum("bkgd,bskd->bkgs", q.reshape(8, SHARED, -1, SIZE), keys)
        scores = snp.where(snp.arange(16) <= place, scores, -1e30)
        seen = snp.einsum("bkgs,bskd->bkgd", nn.softmax(scores), values)
        return (snp.tanh(x + seen.reshape(8, WIDTH) @ w["o"]), keys, values), x.argmax(-1)

    return lax.scan(step, (x, keys, values), snp.arange(3, 6))


@program(normal(16, 8), normal(8, 16, 32) / 4, normal(8, 32, 16) / 4, normal(32, 16))
def experts_with_capacity(route: Any, up: Any, down: Any, x: Any) -> Any:
    def run(route: Any, up: Any, down: Any) -> Any:
        gates, chosen = lax.top_k(nn.softmax(x @ route), 2)
        hot = nn.one_hot(chosen, 8)
        place = snp.cumsum(hot.reshape(-1, 8), 0).reshape(hot.shape) - 1
        kept = (hot * (place < 8))[..., None] * nn.one_hot(place.astype(np.int32), 8)
        given = snp.einsum("tkec,td->ecd", kept, x)
        made = snp.einsum("ecf,efd->ecd", nn.relu(snp.einsum("ecd,edf->ecf", given, up)), down)
        return snp.einsum("tkec,ecd->td", kept * gates[..., None, None], made)

    return spmd.value_and_grad(lambda *w: (run(*w) ** 2).sum(), (0, 1, 2))(route, up, down)


@program(normal(8, 16, 16, 3), normal(48, 32) / 7, normal(32, 96) / 6, normal(1, 32))
def patches_of_images(x: Any, embed: Any, qkv: Any, first: Any) -> Any:
    x = x.reshape(8, 4, 4, 4, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(8, 16, 48) @ embed
    x = snp.concatenate([snp.broadcast_to(first, (8, 1, 32)), x], 1)
    q, k, v = (a.reshape(8, 17, 4, 8) for a in snp.split(x @ qkv, 3, -1))
    return nn.dot_product_attention(q, k, v).reshape(8, 17, 32)[:, 0]


@program(normal(32, 16), below(32, 64), below(32, 64))
def graph_attention(x: Any, source: Any, target: Any) -> Any:
    def run(x: Any) -> Any:
        score = (x[source] * x[target]).sum(-1) / 4
        weight = snp.exp(score - spmd.ops.segment_max(score, target, 32)[target])
        total = spmd.ops.segment_sum(weight, target, 32)
        return spmd.ops.segment_sum(weight[:, None] * x[source], target, 32) / (1 + total[:, None])

    return run(x), spmd.grad(lambda x: (run(x) ** 2).sum())(x)


@program(normal(8, 24) / 3, normal(8, 24) / 3, normal(6, 8, 8))
def gated_recurrent_unit(w: Any, u: Any, xs: Any) -> Any:
    def run(w: Any, u: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            (r, z, c), (s, y, d) = snp.split(x @ w, 3, -1), snp.split(h @ u, 3, -1)
            z = nn.sigmoid(z + y)
            h = (1 - z) * snp.tanh(c + nn.sigmoid(r + s) * d) + z * h
            return h, h

        return lax.scan(step, snp.zeros((8, 8)), xs)[1]

    return spmd.grad(lambda w, u: (run(w, u) ** 2).sum(), (0, 1))(w, u)


@program(normal(4, 16, 8), normal(8, 4), normal(4, 16, 8), normal(4, 16, 4))
def selective_state_space(x: Any, a: Any, steps: Any, b: Any) -> Any:
    steps = nn.softplus(steps)[..., None]
    kept = snp.exp(-steps * snp.exp(a))
    given = steps * b[:, :, None] * x[..., None]

    def joined(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    return lax.associative_scan(joined, (kept, given), axis=1)[1].sum(-1)


@program(normal(32, 16), normal(32, 16))
def contrastive_loss(a: Any, b: Any) -> Any:
    def loss(a: Any, b: Any) -> Any:
        a, b = (x / snp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
        scores = a @ b.T * 5
        return -sum(snp.diag(nn.log_softmax(s)).mean() for s in (scores, scores.T))

    return spmd.value_and_grad(loss, (0, 1))(a, b)


@program(normal(8, 16, 32) / 2)
def beam_search(scores: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        best, tokens, place = carry
        total = best[:, :, None] + nn.log_softmax(row)[:, None, :]
        best, chosen = lax.top_k(total.reshape(8, -1), 4)
        tokens = snp.take_along_axis(tokens, (chosen // 32)[..., None], 1)
        return (best, tokens.at[:, :, place].set(chosen % 32), place + 1), None

    best = snp.where(snp.arange(4) == 0, 0.0, -1e9)[None].repeat(8, 0)
    start = best, snp.zeros((8, 4, 16), np.int32), 0
    return lax.scan(step, start, scores.transpose(1, 0, 2))[0][:2]


# ---- sciences ----------------------------------------------------------------------------------


@program(normal(64, 8), normal(8, 8))
def means_of_clusters(x: Any, centres: Any) -> Any:
    def step(_: Any, c: Any) -> Any:
        hot = nn.one_hot(((x[:, None] - c) ** 2).sum(-1).argmin(1), 8)
        return hot.T @ x / snp.maximum(hot.sum(0), 1)[:, None]

    return lax.fori_loop(0, 4, step, centres)


@program(normal(8, 8), normal(8, 16, 8))
def most_likely_states(moves: Any, seen: Any) -> Any:
    def step(a: Any, x: Any) -> Any:
        scores = a[:, :, None] + moves
        return scores.max(1) + x, scores.argmax(1)

    def back(state: Any, came: Any) -> Any:
        return snp.take_along_axis(came, state[:, None], 1)[:, 0], state

    last, came = lax.scan(step, seen[:, 0], seen.transpose(1, 0, 2)[1:])
    return lax.scan(back, last.argmax(-1), came, reverse=True)


@program(below(256, 64))
def radix_sort(values: Any) -> Any:
    def step(v: Any, bit: Any) -> Any:
        ones = (v >> bit) & 1
        zeros = snp.cumsum(1 - ones)
        place = snp.where(ones == 0, zeros - 1, zeros[-1] + snp.cumsum(ones) - 1)
        return snp.zeros_like(v).at[place].set(v), place[0]

    return lax.scan(step, values, snp.arange(8))


@program(normal(64, 8), normal(4, 8), np.int32(62))
def a_ring_of_past_values(ring: Any, new: Any, place: Any) -> Any:
    ring = ring.at[(place + snp.arange(4)) % 64].set(new)
    return ring, ring[random.randint(random.key(0), (8,), 0, 64)]


@program(below(2, 32, 32))
def game_of_life(cells: Any) -> Any:
    def step(_: Any, x: Any) -> Any:
        p = snp.pad(x, 1, mode="wrap")
        near = sum(p[a : a + 32, b : b + 32] for a in range(3) for b in range(3)) - x
        return ((near == 3) | ((near == 2) & (x == 1))).astype(np.int32)

    return lax.fori_loop(0, 4, step, cells)


@program(normal(32, 16), normal(16, 16))
def matrices_and_statistics(x: Any, s: Any) -> Any:
    positive = s @ s.T + snp.eye(16)
    return (
        snp.linalg.solve(positive, x.T),
        snp.linalg.slogdet(positive)[1],
        snp.median(x, 0),
        snp.cov(x.T),
        snp.histogram(x, 8, range=(-3, 3))[0],
        snp.searchsorted(snp.sort(x[:, 0]), x[:, 1]),
    )


# ---- on meshes ---------------------------------------------------------------------------------

MESHES = [(1, 8), (2, 4), (4, 2)]
WAYS = ["rows", "both axes", "random"]


def specs(name: str, way: str, shapes: Sequence[Any], sizes: dict[str, int]) -> list[P]:
    """How arguments lie: by their first dim, by two dims, or anyhow."""
    rng = np.random.default_rng(zlib.crc32(f"{name} {sizes}".encode()))
    found = []
    for shape in shapes:
        wanted: list[Any] = {"rows": [("x", "y")], "both axes": [("x",), ("y",)]}.get(way, [])
        if way == "random":
            wanted = [()] * len(shape)
            for axis in rng.permutation(["x", "y"]) if shape else ():
                d = rng.integers(len(shape))
                wanted[d] = (*wanted[d], str(axis))
        rows = zip(shape, wanted, strict=False)
        found.append(
            P(*[a if a and n % math.prod(sizes[k] for k in a) == 0 else None for n, a in rows])
        )
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_the_values_of_one_device(name: str):
    f, args = PROGRAMS[name]
    leaves, tree = spmd.tree.flatten(args)
    want = spmd.tree.leaves(spmd.jit(f)(*args))
    for mesh_sizes, way in zip(MESHES, WAYS[len(name) % 3 :] + WAYS[: len(name) % 3], strict=True):
        mesh = auto_mesh(mesh_sizes, ("x", "y"))
        layouts = specs(name, way, [x.shape for x in leaves], dict(mesh.shape))
        placed = [
            spmd.device_put(x, NamedSharding(mesh, s)) for x, s in zip(leaves, layouts, strict=True)
        ]
        got = spmd.tree.leaves(spmd.jit(f)(*tree.unflatten(placed)))
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype
            if snp.issubdtype(one.dtype, np.integer):
                np.testing.assert_array_equal(one, other, str(layouts))
            else:
                most = 1e-3 * float(abs(np.asarray(other)).max())
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=most, err_msg=str(layouts))
