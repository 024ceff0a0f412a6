"""A model of another kind than those of the plans: its collectives and bytes beside the least.

Tied embeddings, layer norm, rotary positions, fewer heads of keys than of queries, a gated block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import P, debug, lax, nn
from spmd.base.config import config
from tests.partition.programs import auto_mesh


@pytest.fixture(autouse=True)
def eight_devices() -> Iterator[None]:
    with config.override("num_cpu_devices", 8):
        yield


TOKENS, WIDTH, HEADS, SHARED, SIZE, HIDDEN, LAYERS, BATCH, TIME = 256, 64, 4, 2, 16, 128, 2, 16, 24
Params = dict[str, Any]
SPLIT = ("emb", "wq", "wk", "wv", "wo", "up", "gate", "down")


def init() -> Params:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32)

    params: Params = {"emb": normal(TOKENS, WIDTH), "last": np.ones(WIDTH, np.float32)}
    for n in range(LAYERS):
        params[f"layer{n}"] = {
            "scale": np.ones((2, WIDTH), np.float32),
            "bias": np.zeros((2, WIDTH), np.float32),
            "wq": normal(WIDTH, HEADS * SIZE),
            "wk": normal(WIDTH, SHARED * SIZE),
            "wv": normal(WIDTH, SHARED * SIZE),
            "wo": normal(HEADS * SIZE, WIDTH),
            "up": normal(WIDTH, HIDDEN),
            "gate": normal(WIDTH, HIDDEN),
            "down": normal(HIDDEN, WIDTH),
        }
    return params


def norm(x: Any, scale: Any, bias: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def rotated(x: Any) -> Any:
    half = x.shape[-1] // 2
    angles = snp.arange(x.shape[1])[:, None] * 100.0 ** (-snp.arange(half) / half)
    cos, sin = snp.cos(angles)[None, :, None], snp.sin(angles)[None, :, None]
    left, right = x[..., :half], x[..., half:]
    return snp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def loss(params: Params, tokens: Any, dtype: Any) -> Any:
    w = spmd.tree.map(lambda x: x.astype(dtype), params)
    x = w["emb"][tokens[:, :-1]]
    b, t, _ = x.shape
    for n in range(LAYERS):
        layer = w[f"layer{n}"]
        h = norm(x, layer["scale"][0], layer["bias"][0])
        q = rotated((h @ layer["wq"]).reshape(b, t, HEADS, SIZE))
        k = rotated((h @ layer["wk"]).reshape(b, t, SHARED, SIZE))
        v = (h @ layer["wv"]).reshape(b, t, SHARED, SIZE)
        seen = nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + seen.reshape(b, t, -1) @ layer["wo"]
        h = norm(x, layer["scale"][1], layer["bias"][1])
        x = x + (nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    scores = nn.log_softmax(((x * w["last"]) @ w["emb"].T).astype(np.float32))
    return -snp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()


def step(dtype: Any) -> Any:
    def run(params: Params, tokens: Any) -> Any:
        value, slope = spmd.value_and_grad(loss)(params, tokens, dtype)
        return spmd.tree.map(lambda w, g: w - 0.1 * g, params, slope), value

    return run


def placed(mesh: Any, params: Params, specs: dict[str, P]) -> Params:
    def place(path: Any, x: Any) -> Any:
        return spmd.device_put(x, spmd.NamedSharding(mesh, specs.get(path[-1].key, P())))

    return spmd.tree_util.tree_map_with_path(place, params)


PARAMS = init()
LEAVES = spmd.tree_util.tree_leaves_with_path(PARAMS)
LARGE = sum(x.nbytes for path, x in LEAVES if path[-1].key in SPLIT)
SMALL = sum(x.nbytes for path, x in LEAVES if path[-1].key not in SPLIT)
MATRICES = sum(path[-1].key in SPLIT for path, _ in LEAVES)
VECTORS = 4 * LAYERS + 1
STREAM = BATCH * TIME * WIDTH * 4  # bytes between the layers
EMB = TOKENS * WIDTH * 4


def fully(*axes: Any) -> dict[str, P]:
    return dict.fromkeys(SPLIT, P(axes))


def tensor(model: Any, emb: P, data: Any = None) -> dict[str, P]:
    columns, rows = P(data, model), P(model, data)
    specs = dict.fromkeys(("wq", "wk", "wv", "up", "gate"), columns)
    return specs | {"wo": rows, "down": rows, "emb": emb}


def share(n: int, times: int = 1) -> float:
    """What each device receives of a byte in a gather, or twice that in an all_reduce."""
    return times * (n - 1) / n


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("dtype", [snp.float32, snp.bfloat16])
@pytest.mark.parametrize("plan", ["data", "fully sharded"])
def test_data_and_fully_sharded_steps_move_the_least(n: int, dtype: Any, plan: str):
    mesh = auto_mesh((n,), ("x",))
    tokens = np.random.default_rng(1).integers(0, TOKENS, (BATCH, TIME + 1)).astype(np.int32)
    batch = spmd.device_put(tokens, spmd.NamedSharding(mesh, P("x")))
    specs = fully("x") if plan == "fully sharded" else {}
    params = placed(mesh, PARAMS, specs)
    found = debug.collectives(spmd.jit(step(dtype)))(params, batch)
    kinds, received = Counter(c.kind for c in found), sum(c.received for c in found)
    rest = SMALL * share(n, 2) + 8
    if plan == "data":
        assert kinds == {"all_reduce": MATRICES + VECTORS + 1}
        assert received <= LARGE * share(n, 2) + rest
        return
    # The tied embedding is gathered once, too, and all in the type in which they are read.
    expected = {"all_gather": MATRICES, "reduce_scatter": MATRICES, "all_reduce": VECTORS + 1}
    assert kinds == expected
    width = np.dtype(dtype).itemsize
    assert received <= LARGE * share(n) * (1 + width / 4) + rest


def by_hand(mesh: Any, model: bool = True) -> float:
    """What a hand-written step moves, weights along the axes of data, sums along that of the model.

    Weights are gathered and gradients scattered; the stream is summed four times a layer, and for
    the head. Where heads of keys are too few, attention is split by batch. The embedding is moved
    as a weight is, and there is room for a table of it, and for the small numbers.
    """
    m = mesh.shape["m"] if model else 1
    n = mesh.size // m
    part = STREAM / n
    sums = (4 * LAYERS + 1) * part * share(m, 2) if model else 0
    heads = 8 * LAYERS * part * (m - 1) / m**2 if SHARED < m else 0
    return 2 * LARGE / m * share(n) + sums + heads + 2 * EMB + 2 * SMALL + 4096


MESHES: dict[str, Any] = {
    # The table by rows, by columns, along one axis or two, in the order of the mesh or not.
    "tensor, rows": ((4,), tensor("m", P("m")), P(), True),
    "tensor, columns": ((4,), tensor("m", P(None, "m")), P(), True),
    "both, rows": ((2, 4), tensor("m", P("m", "d"), "d"), P("d"), True),
    "both, columns": ((2, 4), tensor("m", P("d", "m"), "d"), P("d"), True),
    "both, the other mesh": ((4, 2), tensor("m", P("m", "d"), "d"), P("d"), True),
    "fully, two axes": ((2, 4), fully("d", "m"), P(("d", "m")), False),
    "fully, turned round": ((4, 2), fully("m", "d"), P(("d", "m")), False),
    "groups of replicas": ((4, 2), fully("m"), P(("d", "m")), False),
    "three axes": ((2, 2, 2), tensor("m", P("m", "f"), "f"), P(("d", "f")), True),
}


def names_of(sizes: tuple[int, ...]) -> tuple[str, ...]:
    return {1: ("m",), 2: ("d", "m"), 3: ("d", "f", "m")}[len(sizes)]


@pytest.mark.parametrize("name", MESHES)
def test_steps_over_meshes_move_little_and_give_the_same(name: str):
    sizes, specs, split, model = MESHES[name]
    mesh = auto_mesh(sizes, names_of(sizes))
    tokens = np.random.default_rng(1).integers(0, TOKENS, (BATCH, TIME + 1)).astype(np.int32)
    batch = spmd.device_put(tokens, spmd.NamedSharding(mesh, split))
    run: Any = spmd.jit(step(snp.float32))
    found = debug.collectives(run)(placed(mesh, PARAMS, specs), batch)
    assert sum(c.received for c in found) <= by_hand(mesh, model)
    updated, value = run(placed(mesh, PARAMS, specs), batch)
    expected, once = run(PARAMS, tokens)
    np.testing.assert_allclose(value, once, rtol=1e-5)
    for one, other in zip(spmd.tree.leaves(updated), spmd.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
