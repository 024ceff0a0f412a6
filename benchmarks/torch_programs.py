"""The training steps in PyTorch, eager as most users run them, from the same numbers.

Each function is given the module `torch` and returns what one call runs: a step, of which the loss
is compared. It is the third step's, so gradients and updates have been compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy

from benchmarks.case import integers, normal
from benchmarks.programs import convnet_params, mlp_batch, mlp_params, transformer_params


def _leaf(torch: Any, value: numpy.ndarray) -> Any:
    return torch.from_numpy(value.copy()).requires_grad_()


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _map(function, value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map(function, value) for value in tree)
    return function(tree)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for name in sorted(tree) for leaf in _leaves(tree[name])]
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in _leaves(item)]
    return [tree]


def train_mlp(torch: Any, sizes: tuple[int, ...], batch: int) -> Callable[[], Any]:
    """Steps of torch.optim.SGD."""
    params = _map(lambda value: _leaf(torch, value), mlp_params(sizes))
    x, y = (torch.from_numpy(a) for a in mlp_batch(sizes, batch))
    optimizer = torch.optim.SGD(_leaves(params), lr=0.01)

    def run():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(_mlp(torch, params, x), y.long())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


def _mlp(torch: Any, params: Any, x: Any) -> Any:
    for w, b in params[:-1]:
        x = torch.relu(torch.addmm(b, x, w))
    w, b = params[-1]
    return torch.addmm(b, x, w)


def train_convnet(torch: Any, batch: int) -> Callable[[], Any]:
    """Steps of torch.optim.SGD with momentum, channels last."""
    numbers = convnet_params()
    last = torch.channels_last
    params = _map(lambda value: _leaf(torch, value), numbers["dense"])
    kernels = [
        torch.from_numpy(k).permute(3, 2, 0, 1).contiguous(memory_format=last).requires_grad_()
        for k in numbers["kernels"]
    ]
    images = torch.from_numpy(normal(batch, 32, 32, 3)).permute(0, 3, 1, 2)
    labels = torch.arange(batch) % 10
    optimizer = torch.optim.SGD([*kernels, *_leaves(params)], lr=0.01, momentum=0.9)
    functional = torch.nn.functional

    def run():
        optimizer.zero_grad()
        x = images
        for kernel in kernels:
            x = functional.max_pool2d(torch.relu(functional.conv2d(x, kernel, padding=1)), 2)
        scores = _mlp(torch, params, x.permute(0, 2, 3, 1).flatten(1))
        loss = functional.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


def train_transformer(
    torch: Any, layers: int, width: int, length: int, batch: int, vocabulary: int = 512
) -> Callable[[], Any]:
    """Steps of torch.optim.Adam, with PyTorch's own attention and layernorm."""
    numbers = transformer_params(vocabulary, length, width, layers)
    params = _map(lambda value: _leaf(torch, value), numbers)
    tokens = torch.from_numpy(integers(vocabulary, batch, length + 1)).long()
    optimizer = torch.optim.Adam(_leaves(params), lr=1e-3)

    def run():
        optimizer.zero_grad()
        loss = _transformer_loss(torch, params, tokens, heads=4)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


def _transformer_loss(torch: Any, params: Any, tokens: Any, heads: int) -> Any:
    functional = torch.nn.functional

    def norm(p, x):
        return functional.layer_norm(x, x.shape[-1:], p["scale"], p["shift"])

    x = params["embed"][tokens[:, :-1]] + params["place"]
    b, t, d = x.shape
    for p in params["blocks"]:
        qkv = (norm(p["norm1"], x) @ p["qkv"]).reshape(b, t, 3, heads, d // heads)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        scale = 1 / math.sqrt(d // heads)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        x = x + seen.transpose(1, 2).reshape(b, t, d) @ p["out"]
        h = functional.gelu(norm(p["norm2"], x) @ p["up"] + p["up_bias"], approximate="tanh")
        x = x + h @ p["down"] + p["down_bias"]
    scores = norm(params["norm"], x) @ params["embed"].T
    return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
