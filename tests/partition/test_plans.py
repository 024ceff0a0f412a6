"""The collectives that plans of parallelism take: kinds and numbers, beside the least possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax, nn

LAYERS, WIDTH, HEADS, HIDDEN, TOKENS, BATCH, TIME = 2, 32, 4, 64, 48, 8, 12
Params = dict[str, Any]


def put(x: Any, mesh: spmd.Mesh, *spec: Any) -> Any:
    return spmd.device_put(x, NamedSharding(mesh, P(*spec)))


def kinds(f: Callable[..., Any], *args: Any) -> Counter[str]:
    """How many collectives of each kind a call runs."""
    found: Counter[str] = Counter()
    for c in spmd.debug.collectives(f)(*args):
        found[c.kind] += c.times
    return found


# ---- single operations -------------------------------------------------------------------------

A = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
RING = {"x": 4}
GRID = {"x": 2, "y": 2}
CASES: dict[str, tuple[Mapping[str, int], Any, tuple[Any, ...], dict[str, int]]] = {
    "elementwise": (RING, lambda a, b: snp.tanh(a) * b, (("x",), ("x",)), {}),
    "rows times whole": (RING, lambda a, b: a @ b, (("x",), ()), {}),
    "contracted": (RING, lambda a, b: a @ b, ((None, "x"), ("x",)), {"all_reduce": 1}),
    "rows times columns": (RING, lambda a, b: a @ b, (("x",), (None, "x")), {"all_gather": 1}),
    "two dims": (GRID, lambda a, b: a @ b, (("x", "y"), ("x", "y")), {"all_gather": 2}),
    "sum over the split dim": (RING, lambda a, b: a.sum(0), (("x",), ()), {"all_reduce": 1}),
    "sum over another dim": (RING, lambda a, b: a.sum(1), (("x",), ()), {}),
    "max over the split dim": (RING, lambda a, b: a.max(0), (("x",), ()), {"all_reduce": 1}),
    "softmax of split classes": (
        RING, lambda a, b: nn.softmax(a), ((None, "x"), ()), {"all_reduce": 2},
    ),
    "transpose": (GRID, lambda a, b: a.T + 1, (("x", "y"), ()), {}),
    "heads cut": (RING, lambda a, b: a.reshape(64, 8, 8) * 2, ((None, "x"), ()), {}),
    "heads merged": (
        RING, lambda a, b: a.reshape(8, 8, 64).reshape(64, 64) + 1, (("x",), ()), {},
    ),
    "random numbers": (
        RING, lambda a, b: a + spmd.random.normal(spmd.random.key(0), (64, 64)), (("x",), ()), {},
    ),
    "two sums added": (
        RING, lambda a, b: a @ b + (2 * a) @ b, ((None, "x"), ("x",)), {"all_reduce": 1},
    ),
    "lookup in a table": (RING, lambda a, b: a[snp.arange(8)], ((None, "x"), ()), {}),
    "scan over rows": (
        RING, lambda a, b: lax.scan(lambda c, r: (c + r, c * r), a[0], a)[1], ((None, "x"), ()), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_operation(name: str):
    axes, f, specs, expected = CASES[name]
    mesh = spmd.make_mesh(tuple(axes.values()), tuple(axes))
    arguments = [put(A, mesh, *spec) for spec in specs]
    assert kinds(f, *arguments) == expected
    np.testing.assert_allclose(spmd.jit(f)(*arguments), spmd.jit(f)(A, A), rtol=1e-4, atol=1e-4)


def test_a_sum_that_is_wanted_split_is_scattered():
    mesh = spmd.make_mesh((4,), ("x",))
    f = spmd.jit(lambda a, b: a @ b, out_shardings=NamedSharding(mesh, P("x")))
    arguments = put(A, mesh, None, "x"), put(A, mesh, "x")
    assert kinds(f, *arguments) == {"reduce_scatter": 1}
    assert f(*arguments).sharding.spec == P("x")


def test_a_split_that_moves_to_another_dim_is_one_exchange():
    mesh = spmd.make_mesh((4,), ("x",))
    f = spmd.jit(lambda a: a, out_shardings=NamedSharding(mesh, P(None, "x")))
    assert kinds(f, put(A, mesh, "x")) == {"all_to_all": 1}
    np.testing.assert_array_equal(f(put(A, mesh, "x")), A)


def test_bytes_are_those_of_the_formulas():
    mesh = spmd.make_mesh((4,), ("x",))
    (found,) = spmd.debug.collectives(lambda a, b: a @ b)(
        put(A, mesh, None, "x"), put(A, mesh, "x")
    )
    assert (found.axes, found.devices, found.received) == (("x",), 4, 2 * A.nbytes * 3 // 4)
    (found,) = spmd.debug.collectives(lambda a, b: a @ b)(
        put(A, mesh, "x"), put(A, mesh, None, "x")
    )
    assert (found.kind, found.received) == ("all_gather", A.nbytes * 3 // 4)


# ---- a language model --------------------------------------------------------------------------


def init() -> Params:
    rng = np.random.default_rng(1)
    shapes = {
        "emb": (TOKENS, WIDTH), "q": (LAYERS, WIDTH, WIDTH), "k": (LAYERS, WIDTH, WIDTH),
        "v": (LAYERS, WIDTH, WIDTH), "o": (LAYERS, WIDTH, WIDTH), "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
    }  # fmt: skip
    return {
        name: (rng.standard_normal(shape) / shape[-2] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def norm(x: Any) -> Any:
    return x * lax.rsqrt(snp.mean(x * x, -1, keepdims=True) + 1e-5)


def loss(p: Params, tokens: Any) -> Any:
    x = p["emb"][tokens[:, :-1]]
    b, t, _ = x.shape
    for n in range(LAYERS):
        h = norm(x)
        q, k, v = ((h @ p[name][n]).reshape(b, t, HEADS, WIDTH // HEADS) for name in "qkv")
        x = x + nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, WIDTH) @ p["o"][n]
        x = x + nn.gelu(norm(x) @ p["up"][n]) @ p["down"][n]
    scores = nn.log_softmax(norm(x) @ p["emb"].T)
    return -snp.mean(snp.take_along_axis(scores, tokens[:, 1:, None], -1))


def step(p: Params, tokens: Any) -> Any:
    value, slope = spmd.value_and_grad(loss)(p, tokens)
    return value, spmd.tree.map(lambda w, g: w - 0.1 * g, p, slope)


WEIGHTS = 6 * LAYERS + 1
COLUMNS, ROWS = P(None, None, "model"), P(None, "model")
TENSOR = dict.fromkeys(("q", "k", "v", "up"), COLUMNS) | dict.fromkeys(("o", "down"), ROWS)
PLANS: dict[str, tuple[dict[str, int], dict[str, P], P, dict[str, int]]] = {
    # Each weight's gradient once, the tied embedding's too, and the loss.
    "data": ({"data": 4}, {}, P("data"), {"all_reduce": WEIGHTS + 1}),
    # Weights are gathered (the embedding for each of its two uses), gradients scattered.
    "fully sharded": (
        {"data": 4},
        {"emb": P("data"), **dict.fromkeys(("q", "k", "v", "o", "up", "down"), P(None, "data"))},
        P("data"),
        {"all_gather": WEIGHTS + 1, "reduce_scatter": WEIGHTS, "all_reduce": 1},
    ),
    # Two sums a layer forward, two backward.
    "tensor": ({"model": 4}, TENSOR, P(), {"all_reduce": 4 * LAYERS}),
    "data and tensor": (
        {"data": 2, "model": 2}, TENSOR, P("data"), {"all_reduce": WEIGHTS + 1 + 4 * LAYERS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_training_step_takes_the_least_collectives_and_the_same_values(name: str):
    axes, specs, split, expected = PLANS[name]
    mesh = spmd.make_mesh(tuple(axes.values()), tuple(axes))
    params, tokens = init(), np.random.default_rng(2).integers(0, TOKENS, (BATCH, TIME + 1))
    placed = {k: put(w, mesh, *specs.get(k, P())) for k, w in params.items()}
    batch = put(tokens.astype(np.int32), mesh, *split)
    assert kinds(step, placed, batch) == expected
    value, updated = spmd.jit(step)(placed, batch)
    wanted, plain = spmd.jit(step)(params, tokens.astype(np.int32))
    assert float(value) == pytest.approx(float(wanted), abs=1e-5)
    for key, found in updated.items():
        np.testing.assert_allclose(found, plain[key], atol=1e-5)
        assert found.sharding.spec == placed[key].sharding.spec, "weights stay where they are"


def test_gradients_of_a_scan_of_sharded_layers_are_scattered_in_each_iteration():
    mesh = spmd.make_mesh((4,), ("data",))
    rng = np.random.default_rng(3)
    layers = rng.standard_normal((3, 2, 16, 16)).astype(np.float32) / 4
    x = rng.standard_normal((64, 16)).astype(np.float32)

    def loss(layers: Any, x: Any) -> Any:
        return snp.mean(lax.scan(lambda h, w: (snp.tanh(h @ w[0]) @ w[1], None), x, layers)[0] ** 2)

    def step(layers: Any, x: Any) -> Any:
        return layers - 0.1 * spmd.grad(loss)(layers, x)

    arguments = put(layers, mesh, None, None, "data"), put(x, mesh, "data")
    found = kinds(step, *arguments)
    # Of each layer two weights, gathered forward and backward.
    assert found == {"all_gather": 3 * 2 * 2, "reduce_scatter": 3 * 2}
    np.testing.assert_allclose(spmd.jit(step)(*arguments), spmd.jit(step)(layers, x), atol=1e-5)
