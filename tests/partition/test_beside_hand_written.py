"""An automatic step beside one that is written by hand with `shard_map`: collectives and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug, lax, nn
from spmd.base.config import config
from tests.partition.programs import auto_mesh


@pytest.fixture(autouse=True)
def eight_devices() -> Iterator[None]:
    with config.override("num_cpu_devices", 8):
        yield


LAYERS, WIDTH, HIDDEN, TOKENS, HEADS, BATCH, TIME = 2, 64, 256, 128, 8, 16, 32
RNG = np.random.default_rng(0)
TOKEN_ROWS = RNG.integers(0, TOKENS, (BATCH, TIME + 1)).astype(np.int32)
Params = dict[str, Any]


def init() -> Params:
    def normal(*shape: int) -> np.ndarray:
        return (RNG.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32)

    shapes = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
    }
    layers = [{k: normal(*shape) for k, shape in shapes.items()} for _ in range(LAYERS)]
    return {"emb": normal(TOKENS, WIDTH), "layers": layers}


PARAMS = init()


def norm(x: Any) -> Any:
    return x * lax.rsqrt(snp.mean(x * x, -1, keepdims=True) + 1e-5)


def loss(
    params: Params,
    tokens: Any,
    heads: int = HEADS,
    whole: Any = lambda w: w,
    total: Any = lambda x: x,
) -> Any:
    """Cross entropy; by hand, weights are made `whole` and products become a `total`."""
    emb = whole(params["emb"])
    x = emb[tokens[:, :-1]]
    b, t, d = x.shape
    for w in params["layers"]:
        h = norm(x)
        q, k, v = ((h @ whole(w[n])).reshape(b, t, heads, d // HEADS) for n in "qkv")
        seen = nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, -1)
        x = x + total(seen @ whole(w["o"]))
        x = x + total(nn.gelu(norm(x) @ whole(w["up"])) @ whole(w["down"]))
    scores = nn.log_softmax(norm(x) @ emb.T)
    return -snp.take_along_axis(scores, tokens[:, 1:, None], -1).sum() / (BATCH * TIME)


def automatic(params: Params, tokens: Any) -> Any:
    value, slope = spmd.value_and_grad(loss)(params, tokens)
    return spmd.tree.map(lambda w, g: w - 0.1 * g, params, slope), value


def by_hand(params: Params, tokens: Any, data: Any, model: Any, sharded: Any) -> Any:
    options: dict[str, Any] = {}
    if model is not None:
        options = {
            "total": lambda x: lax.psum(x, model),
            "heads": HEADS // lax.axis_size(model),
        }
    if sharded is not None:
        options["whole"] = lambda w: lax.all_gather(w, sharded, axis=0, tiled=True)
    value, slope = spmd.value_and_grad(loss)(params, tokens, **options)
    value = value if data is None else lax.psum(value, data)
    return spmd.tree.map(lambda w, g: w - 0.1 * g, params, slope), value


def spec_of(path: Any, data: Any, model: Any, sharded: Any) -> P:
    if sharded is not None:
        return P(sharded)
    name = path[-1].key
    if model is None or name == "emb":
        return P()
    return P(model) if name in ("o", "down") else P(None, model)


PLANS: dict[str, tuple[dict[str, int], str | None, str | None, str | None]] = {
    "data": ({"d": 8}, "d", None, None),
    "fully sharded": ({"d": 8}, "d", None, "d"),
    "tensor": ({"m": 4}, None, "m", None),
    "both": ({"d": 4, "m": 2}, "d", "m", None),
}


@pytest.mark.parametrize("name", PLANS)
def test_an_automatic_step_moves_and_holds_no_more(name: str):
    axes, data, model, sharded = PLANS[name]
    mesh = auto_mesh(tuple(axes.values()), tuple(axes))
    specs = spmd.tree_util.tree_map_with_path(
        lambda path, _: spec_of(path, data, model, sharded), PARAMS
    )
    placed = spmd.tree.map(
        lambda x, spec: spmd.device_put(x, NamedSharding(mesh, spec)), PARAMS, specs
    )
    batch = spmd.device_put(TOKEN_ROWS, NamedSharding(mesh, P(data)))
    mapped = spmd.shard_map(
        partial(by_hand, data=data, model=model, sharded=sharded),
        mesh=mesh,
        in_specs=(specs, P(data)),
        out_specs=(specs, P()),
    )
    steps = [spmd.jit(f) for f in (automatic, mapped)]
    here, there = (debug.sharding(f, show=False)(placed, batch) for f in steps)
    counts = [Counter(c.kind for c in found.collectives) for found in (here, there)]
    assert counts[0] <= counts[1], counts
    assert here.received <= there.received
    held = [found.memory.peak_memory_in_bytes for found in (here, there)]
    assert held[0] <= 1.05 * held[1], held
    (updated, value), (others, other) = (f(placed, batch) for f in steps)
    np.testing.assert_allclose(value, other, rtol=1e-5)
    for x, y in zip(spmd.tree.leaves(updated), spmd.tree.leaves(others), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
