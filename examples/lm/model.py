"""A small transformer over bytes, written for one device: no line of it knows of meshes.

Shapes: B batch, T time, D width, N heads, H width of a head, F hidden width, V tokens, L layers.
"""

from __future__ import annotations

import math
from typing import Any

import spmd
import spmd.numpy as snp
from spmd import lax, nn, random

TOKENS = 128  # ASCII
HEADS = 8

Params = dict[str, Any]


def init(key: Any, layers: int, width: int) -> Params:
    """Normal weights, stacked over layers; the embedding also makes the scores."""
    shapes = {
        "attention": (layers, width, 3 * width),
        "join": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
    }
    keys = random.split(key, len(shapes) + 1)
    weights = {
        name: random.normal(k, shape) / math.sqrt(shape[1])
        for k, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return {"embedding": random.normal(keys[-1], (TOKENS, width)) * 0.1, **weights}


def norm(x: Any) -> Any:
    """Root mean square normalisation over the last dim."""
    return x * lax.rsqrt(snp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def layer(x_BTD: Any, w: Params) -> tuple[Any, None]:
    """Attention to what came before, then a hidden layer; both are added to the stream."""
    b, t, d = x_BTD.shape
    heads = (norm(x_BTD) @ w["attention"]).reshape(b, t, HEADS, 3, d // HEADS)
    q, k, v = (heads[:, :, :, n] for n in range(3))
    seen_BTNH = nn.dot_product_attention(q, k, v, is_causal=True)
    x_BTD = x_BTD + seen_BTNH.reshape(b, t, d) @ w["join"]
    return x_BTD + nn.gelu(norm(x_BTD) @ w["up"]) @ w["down"], None


def scores(params: Params, tokens_BT: Any) -> Any:
    """Unnormalised log-probabilities of the next token at every place, (B, T, V)."""
    place = snp.arange(tokens_BT.shape[1])[:, None] * snp.exp2(-snp.arange(16.0))
    place = snp.concatenate([snp.sin(place), snp.cos(place)], axis=1)
    x_BTD = params["embedding"][tokens_BT]
    x_BTD = x_BTD + snp.tile(place, x_BTD.shape[2] // 32) * 0.1
    layers = {name: w for name, w in params.items() if name != "embedding"}
    x_BTD, _ = lax.scan(layer, x_BTD, layers)
    return norm(x_BTD) @ params["embedding"].T


def loss(params: Params, tokens_BT: Any) -> Any:
    """Mean cross entropy of each token given those before it, in nats."""
    found = nn.log_softmax(scores(params, tokens_BT[:, :-1]))
    return -snp.mean(snp.take_along_axis(found, tokens_BT[:, 1:, None], axis=2))


def update(params: Params, moments: tuple[Params, Params], count: Any, tokens_BT: Any) -> Any:
    """One step of Adam: the loss, the new weights and the new moments."""
    value, slope = spmd.value_and_grad(loss)(params, tokens_BT)
    mean = spmd.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], slope)
    square = spmd.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, moments[1], slope)

    def moved(w: Any, m: Any, s: Any) -> Any:
        return w - 2e-3 * (m / (1 - 0.9**count)) / (snp.sqrt(s / (1 - 0.99**count)) + 1e-8)

    return value, spmd.tree.map(moved, params, mean, square), (mean, square)
