"""Programs: whole steps as users write them, each a jitted function whose state goes round."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy

from benchmarks.case import integers, normal
from benchmarks.products import conv, max_pool
from benchmarks.sides import Side


def loop(side: Side, step: Callable[..., Any], state: Any, *fixed: Any) -> Callable[[], Any]:
    """Steps that follow each other, as in a training loop: `state, loss = step(state, *fixed)`."""
    jitted = side.jit(step)

    def run():
        nonlocal state
        state, loss = jitted(state, *fixed)
        return state, loss

    return run


def to_side(side: Side, tree: Any) -> Any:
    """Nested dicts and lists of NumPy arrays on a side."""
    return side.tree.map(side.array, tree)


def cross_entropy(side: Side, scores, labels, classes: int):
    """The mean over a batch, of any rank."""
    chosen = side.nn.one_hot(labels, classes) * side.nn.log_softmax(scores)
    return -side.np.mean(side.np.sum(chosen, axis=-1))


# ---- a multilayer perceptron -------------------------------------------------------------------


def mlp_params(sizes: tuple[int, ...]) -> Any:
    """Weights and biases."""
    return [
        (normal(a, b, seed=a) / numpy.float32(math.sqrt(a)), numpy.zeros(b, numpy.float32))
        for a, b in itertools.pairwise(sizes)
    ]


def mlp_scores(side: Side, params, x):
    """A network with relu."""
    for w, b in params[:-1]:
        x = side.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def mlp_loss(side: Side, params, x, y):
    """Cross entropy of ten classes."""
    return cross_entropy(side, mlp_scores(side, params, x), y, 10)


def mlp_step(side: Side, params, x, y):
    """One step of gradient descent."""
    loss, grads = side.top.value_and_grad(partial(mlp_loss, side))(params, x, y)
    return side.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss


def mlp_batch(sizes: tuple[int, ...], batch: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Images and labels."""
    return normal(batch, sizes[0], seed=2), numpy.arange(batch, dtype=numpy.int32) % 10


def train_mlp(side: Side, sizes: tuple[int, ...], batch: int) -> Callable[[], Any]:
    """Steps of gradient descent."""
    params = to_side(side, mlp_params(sizes))
    return loop(side, partial(mlp_step, side), params, *to_side(side, mlp_batch(sizes, batch)))


# ---- per-example gradients ---------------------------------------------------------------------


def private_step(side: Side, params, x, y):
    """Each example's gradient is clipped to length one before they are summed (DP-SGD)."""

    def loss(p, image, label):
        return mlp_loss(side, p, image[None], label[None])

    losses, grads = side.top.vmap(side.top.value_and_grad(loss), (None, 0, 0))(params, x, y)
    squares = sum(
        side.np.sum(g.reshape(g.shape[0], -1) ** 2, axis=1) for g in side.tree.leaves(grads)
    )
    shrink = 1 / side.np.maximum(1.0, side.np.sqrt(squares))

    def update(p, g):
        return p - 0.01 * side.np.tensordot(shrink, g, axes=1) / x.shape[0]

    return side.tree.map(update, params, grads), side.np.mean(losses)


def train_private(side: Side, sizes: tuple[int, ...], batch: int) -> Callable[[], Any]:
    """Steps of gradient descent with clipped gradients."""
    params = to_side(side, mlp_params(sizes))
    return loop(side, partial(private_step, side), params, *to_side(side, mlp_batch(sizes, batch)))


# ---- a transformer -----------------------------------------------------------------------------


def transformer_params(vocabulary: int, length: int, width: int, layers: int) -> Any:
    """As in GPT-2, with learnt positions; the last product uses the embedding."""
    seeds = itertools.count()

    def weights(a: int, b: int) -> numpy.ndarray:
        return normal(a, b, seed=next(seeds)) * numpy.float32(1 / math.sqrt(a))

    def norm() -> Any:
        return {"scale": numpy.ones(width, numpy.float32), "shift": numpy.zeros(width, "float32")}

    blocks = [
        {
            "norm1": norm(),
            "qkv": weights(width, 3 * width),
            "out": weights(width, width),
            "norm2": norm(),
            "up": weights(width, 4 * width),
            "up_bias": numpy.zeros(4 * width, numpy.float32),
            "down": weights(4 * width, width),
            "down_bias": numpy.zeros(width, numpy.float32),
        }
        for _ in range(layers)
    ]
    embed = weights(vocabulary, width)
    return {"embed": embed, "place": weights(length, width), "blocks": blocks, "norm": norm()}


def norm_layer(side: Side, p, x):
    """Layernorm with scale and shift."""
    centred = x - x.mean(-1, keepdims=True)
    spread = side.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return centred * spread * p["scale"] + p["shift"]


def attend(side: Side, p, x_BTD, heads: int):
    """Causal self-attention."""
    b, t, d = x_BTD.shape
    qkv = (x_BTD @ p["qkv"]).reshape(b, t, 3, heads, d // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = side.np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(d // heads)
    seen = side.np.tril(side.np.ones((t, t), bool))
    weights = side.nn.softmax(side.np.where(seen, scores, -1e30), axis=-1)
    return side.np.einsum("bnts,bsnh->btnh", weights, v).reshape(b, t, d) @ p["out"]


def block(side: Side, p, x_BTD, heads: int):
    """Attention and a network with gelu, each with its residual."""
    x_BTD = x_BTD + attend(side, p, norm_layer(side, p["norm1"], x_BTD), heads)
    h = norm_layer(side, p["norm2"], x_BTD)
    h = side.nn.gelu(h @ p["up"] + p["up_bias"])
    return x_BTD + h @ p["down"] + p["down_bias"]


def transformer_loss(side: Side, params, tokens_BT, heads: int):
    """Cross entropy of each next token."""
    x = params["embed"][tokens_BT[:, :-1]]
    x = x + params["place"][: x.shape[1]]
    for p in params["blocks"]:
        x = block(side, p, x, heads)
    scores = norm_layer(side, params["norm"], x) @ params["embed"].T
    return cross_entropy(side, scores, tokens_BT[:, 1:], params["embed"].shape[0])


def adam(side: Side, state, grads):
    """Adam, with its bias corrections; state is (params, first moments, second moments, count)."""
    params, first, second, count = state
    count = count + 1
    first = side.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = side.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)
    rate = 1e-3 * side.np.sqrt(1 - 0.999**count) / (1 - 0.9**count)

    def update(p, m, v):
        return p - rate * m / (side.np.sqrt(v) + 1e-8)

    return side.tree.map(update, params, first, second), first, second, count


def adam_state(side: Side, params: Any) -> Any:
    """The state before the first step."""
    zeros = [side.tree.map(numpy.zeros_like, params) for _ in range(2)]
    return to_side(side, (params, *zeros, numpy.zeros((), numpy.float32)))


def transformer_step(side: Side, state, tokens, *, heads: int):
    """One step of Adam."""
    loss, grads = side.top.value_and_grad(partial(transformer_loss, side), 0)(
        state[0], tokens, heads
    )
    return adam(side, state, grads), loss


def train_transformer(
    side: Side, layers: int, width: int, length: int, batch: int, vocabulary: int = 512
) -> Callable[[], Any]:
    """Steps of Adam."""
    state = adam_state(side, transformer_params(vocabulary, length, width, layers))
    tokens = side.array(integers(vocabulary, batch, length + 1))
    return loop(side, partial(transformer_step, side, heads=4), state, tokens)


# ---- a convolutional network -------------------------------------------------------------------

CHANNELS = (3, 32, 64)


def convnet_params() -> Any:
    """Two convolutions and two layers."""
    kernels = [
        normal(3, 3, a, b, seed=a) / numpy.float32(3 * math.sqrt(a))
        for a, b in itertools.pairwise(CHANNELS)
    ]
    return {"kernels": kernels, "dense": mlp_params((8 * 8 * CHANNELS[-1], 128, 10))}


def convnet_loss(side: Side, params, images_NHWC, labels):
    """Cross entropy; each convolution is followed by relu and a pooling that halves the image."""
    x = images_NHWC
    for kernel in params["kernels"]:
        x = max_pool(side, side.nn.relu(conv(side, x, kernel)))
    x = x.reshape(x.shape[0], -1)
    return cross_entropy(side, mlp_scores(side, params["dense"], x), labels, 10)


def convnet_step(side: Side, state, images, labels):
    """One step of gradient descent with momentum."""
    params, speed = state
    loss, grads = side.top.value_and_grad(partial(convnet_loss, side))(params, images, labels)
    speed = side.tree.map(lambda s, g: 0.9 * s + g, speed, grads)
    return (side.tree.map(lambda p, s: p - 0.01 * s, params, speed), speed), loss


def train_convnet(side: Side, batch: int) -> Callable[[], Any]:
    """Steps of gradient descent."""
    params = convnet_params()
    state = to_side(side, (params, side.tree.map(numpy.zeros_like, params)))
    images, labels = normal(batch, 32, 32, 3), numpy.arange(batch, dtype=numpy.int32) % 10
    return loop(side, partial(convnet_step, side), state, side.array(images), side.array(labels))


# ---- loops -------------------------------------------------------------------------------------


def gru_gradient(side: Side, inputs_TBD, w_x, w_h, bias):
    """Gradient of a recurrent network through time."""
    width = w_h.shape[0]

    def turn(weights, h, x):
        w_x, w_h, bias = weights
        given, kept = x @ w_x + bias, h @ w_h
        update = side.nn.sigmoid(given[:, :width] + kept[:, :width])
        reset = side.nn.sigmoid(given[:, width : 2 * width] + kept[:, width : 2 * width])
        new = side.np.tanh(given[:, 2 * width :] + reset * kept[:, 2 * width :])
        h = (1 - update) * h + update * new
        return h, h

    def loss(weights):
        start = side.np.zeros((inputs_TBD.shape[1], width), side.np.float32)
        _, states = side.lax.scan(partial(turn, weights), start, inputs_TBD)
        return side.np.mean(states**2)

    return side.top.grad(loss)((w_x, w_h, bias))


def n_body(side: Side, place, speed, steps: int):
    """Leapfrog steps of bodies that attract each other."""

    def force(place):
        apart = place[None] - place[:, None]
        near = side.np.sum(apart * apart, axis=-1) + 0.1
        return side.np.sum(apart * (near**-1.5)[..., None], axis=1) / place.shape[0]

    def step(_, state):
        place, speed = state
        speed = speed + 0.01 * force(place)
        return place + 0.01 * speed, speed

    return side.lax.fori_loop(0, steps, step, (place, speed))


def power_iteration(side: Side, matrix, start):
    """A while loop that ends when the vector has settled."""

    def unsettled(state):
        _, change, count = state
        return (change > 1e-5) & (count < 200)

    def turn(state):
        vector, _, count = state
        new = matrix @ vector
        new = new / side.np.sqrt(side.np.sum(new * new))
        return new, side.np.max(side.np.abs(new - vector)), count + 1

    start = start / side.np.sqrt(side.np.sum(start * start))
    return side.lax.while_loop(unsettled, turn, (start, side.np.float32(1.0), 0))[0]


# ---- second derivatives, optimizers ------------------------------------------------------------


def hessian(side: Side, weights, inputs, targets):
    """Of a logistic regression with a curved feature: forward over reverse."""

    def loss(w):
        z = side.np.tanh(inputs @ w) * 2
        return side.np.mean(side.np.log1p(side.np.exp(-targets * z))) + 1e-3 * side.np.sum(w * w)

    return side.top.hessian(loss)(weights)


def adam_only(side: Side) -> Callable[[], Any]:
    """The update of sixty small parameters, without what makes gradients."""
    params = [normal(64, 64 if k % 2 else 1, seed=k) for k in range(60)]
    grads = to_side(side, [p * numpy.float32(0.1) for p in params])

    def step(state, grads):
        return adam(side, state, grads), 0.0

    return loop(side, step, adam_state(side, params), grads)


def positive(size: int) -> Callable[[], numpy.ndarray]:
    """A matrix whose largest eigenvalue stands apart, so that the iteration ends."""

    def make() -> numpy.ndarray:
        root = normal(size, size) / numpy.float32(size)
        return root @ root.T + numpy.outer(*[normal(size, seed=1) / numpy.float32(size)] * 2)

    return make
