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


PLANS: dict[str, tuple[dict[str, int], Any, str | None, str | None]] = {
    "data": ({"d": 8}, "d", None, None),
    "fully sharded": ({"d": 8}, "d", None, "d"),
    "tensor": ({"m": 4}, None, "m", None),
    "both": ({"d": 4, "m": 2}, "d", "m", None),
    "groups of replicas": ({"r": 2, "d": 4}, ("r", "d"), None, "d"),
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
    assert_no_more(automatic, mapped, placed, batch)


def assert_no_more(automatic: Any, mapped: Any, *args: Any) -> None:
    """The automatic step has the same values, no more collectives, bytes or memory."""
    steps = [spmd.jit(f) for f in (automatic, mapped)]
    here, there = (debug.sharding(f, show=False)(*args) for f in steps)
    counts = [Counter(c.kind for c in found.collectives) for found in (here, there)]
    assert counts[0] <= counts[1], counts
    assert here.received <= there.received
    held = [found.memory.peak_memory_in_bytes for found in (here, there)]
    assert held[0] <= 1.05 * held[1], held
    assert_same(*(f(*args) for f in steps))


def assert_same(found: Any, expected: Any) -> None:
    for x, y in zip(spmd.tree.leaves(found), spmd.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


# ---- experts: tokens go to the device that has theirs, and back ---------------------------------

EXPERTS, GROUPS, ROWS, SLOTS, SIZE = 8, 8, 32, 8, 32


def experts(p: Any, x: Any, exchange: Any) -> Any:
    """A layer of experts, of whom each takes a few tokens of each group."""
    probs = nn.softmax(x @ p["router"])
    hot = nn.one_hot(snp.argmax(probs, -1), EXPERTS)
    place = (snp.cumsum(hot, 1) - 1) * hot
    slot = nn.one_hot(place.sum(-1).astype(np.int32), SLOTS)
    mask = (hot * (place < SLOTS))[..., None] * slot[:, :, None]
    gate = mask * (probs * hot).sum(-1)[..., None, None]
    given = exchange(snp.einsum("gsec,gsd->egcd", mask, x), 0, 1)
    h = nn.gelu(snp.einsum("egcd,edh->egch", given, p["up"]))
    out = exchange(snp.einsum("egch,ehd->egcd", h, p["down"]), 1, 0)
    return x + snp.einsum("gsec,egcd->gsd", gate, out)


def experts_step(exchange: Any = lambda v, *_: v, total: Any = lambda v: v) -> Any:
    def step(p: Any, x: Any) -> Any:
        def loss(p: Any, x: Any) -> Any:
            return (experts(p, x, exchange) ** 2).sum() / (GROUPS * ROWS * SIZE)

        value, slope = spmd.value_and_grad(loss)(p, x)
        return spmd.tree.map(lambda w, g: w - 0.1 * g, p, slope), total(value)

    return step


def test_experts_exchange_tokens_as_by_hand():
    mesh = auto_mesh((8,), ("e",))
    specs = {"router": P(), "up": P("e"), "down": P("e")}
    shapes = {
        "router": (SIZE, EXPERTS),
        "up": (EXPERTS, SIZE, 2 * SIZE),
        "down": (EXPERTS, 2 * SIZE, SIZE),
    }

    def put(shape: tuple[int, ...], spec: P) -> Any:
        x = (RNG.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32)
        return spmd.device_put(x, NamedSharding(mesh, spec))

    params = {name: put(shapes[name], spec) for name, spec in specs.items()}
    x = put((GROUPS, ROWS, SIZE), P("e"))
    mapped = spmd.shard_map(
        experts_step(
            lambda v, source, target: lax.all_to_all(v, "e", source, target, tiled=True),
            lambda v: lax.psum(v, "e"),
        ),
        mesh=mesh,
        in_specs=(specs, P("e")),
        out_specs=(specs, P()),
    )
    assert_no_more(experts_step(), mapped, params, x)


# ---- stages: a roll of what they hold is one permute ---------------------------------------------

STAGES, BATCHES = 4, 8


def test_a_pipeline_of_stages_permutes_as_by_hand():
    mesh = auto_mesh((STAGES,), ("s",))
    w = RNG.normal(size=(STAGES, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
    w = spmd.device_put(w, NamedSharding(mesh, P("s")))
    x = RNG.normal(size=(BATCHES, BATCH, WIDTH)).astype(np.float32)
    x = spmd.device_put(x, NamedSharding(mesh, P()))
    ticks = np.zeros((STAGES - 1, BATCH, WIDTH), np.float32)

    def automatic(w: Any, x: Any) -> Any:
        def tick(state: Any, x: Any) -> Any:
            state = snp.roll(state, 1, 0).at[0].set(x)
            state = snp.tanh(spmd.vmap(snp.matmul)(state, w))
            state = lax.with_sharding_constraint(state, NamedSharding(mesh, P("s")))
            return state, state[-1]

        state = snp.zeros((STAGES, BATCH, WIDTH), np.float32)
        _, ys = lax.scan(tick, state, snp.concatenate([x, ticks]))
        return (ys[STAGES - 1 :] ** 2).mean()

    def by_hand(w: Any, x: Any) -> Any:
        stage = lax.axis_index("s")

        def tick(state: Any, x: Any) -> Any:
            state = lax.ppermute(state, "s", [(k, k + 1) for k in range(STAGES - 1)])
            state = snp.tanh(snp.where(stage == 0, x, state) @ w[0])
            return state, state

        state = lax.pcast(snp.zeros((BATCH, WIDTH), np.float32), "s", to="varying")
        _, ys = lax.scan(tick, state, snp.concatenate([x, ticks]))
        mean = (ys[STAGES - 1 :] ** 2).mean()
        return lax.psum(snp.where(stage == STAGES - 1, mean, 0.0), "s")

    def step(f: Any) -> Any:
        def run(w: Any, x: Any) -> Any:
            value, slope = spmd.value_and_grad(f)(w, x)
            return w - 0.1 * slope, value

        return run

    mapped = spmd.shard_map(
        step(by_hand), mesh=mesh, in_specs=(P("s"), P()), out_specs=(P("s"), P())
    )
    args, steps = (w, x), [spmd.jit(f) for f in (step(automatic), mapped)]
    here, there = (debug.sharding(f, show=False)(*args) for f in steps)
    permutes = [
        sum(c.times for c in found.collectives if c.kind == "permute") for found in (here, there)
    ]
    assert permutes[0] == permutes[1] == 2 * (BATCHES + STAGES - 1)
    received = [sum(c.received * c.times for c in f.collectives) for f in (here, there)]
    assert received[0] == received[1] - 2  # the loss is sent, not added up
    # What stages make is stacked once by hand, as output and for the derivative.
    outputs = (BATCHES + STAGES - 1) * BATCH * WIDTH * 4
    held = [found.memory.peak_memory_in_bytes for found in (here, there)]
    assert held[0] <= 1.05 * held[1] + outputs, held
    assert_same(*(f(*args) for f in steps))
