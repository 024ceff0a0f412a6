"""What is gathered of an argument is not kept for uses far apart: FSDP holds few layers at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import P, debug, lax
from spmd.partition import values
from tests.partition.programs import auto_mesh

LAYERS, WIDTH, ROWS = 10, 512, 4096
RNG = np.random.default_rng(0)
MESH = auto_mesh((4,), ("data",))


def put(x: np.ndarray, *spec: Any) -> Any:
    return spmd.device_put(x, spmd.NamedSharding(MESH, P(*spec)))


def weights(width: int = WIDTH) -> list[np.ndarray]:
    shape = width, width
    return [RNG.normal(size=shape).astype(np.float32) / width**0.5 for _ in range(LAYERS)]


def loss(ws: list[Any], x: Any) -> Any:
    for w in ws:
        y = x @ w
        for k in range(4):  # some work between layers
            y = snp.tanh(y) + snp.sin(y * k)
        x = x + y
    return (x * x).mean()


def step(ws: Any, x: Any, loss: Any = loss) -> Any:
    """The weights after a step of gradient descent, split as they were."""
    return spmd.tree.map(lambda w, g: w - 0.1 * g, ws, spmd.grad(loss)(ws, x))


def placed(width: int = WIDTH) -> tuple[list[Any], Any]:
    x = RNG.normal(size=(ROWS, width)).astype(np.float32)
    return [put(w, "data") for w in weights(width)], put(x, "data")


def counts(ws: list[Any], x: Any) -> tuple[Counter[str], int]:
    spmd.clear_caches()
    moved = debug.sharding(spmd.jit(step), show=False)(ws, x)
    kinds = Counter[str]()
    for c in moved.collectives:
        kinds[c.kind] += c.times
    return kinds, moved.memory.temp_size_in_bytes


def test_weights_are_gathered_again_for_a_backward_pass_that_is_far(
    monkeypatch: pytest.MonkeyPatch,
):
    ws, x = placed()
    again, less = counts(ws, x)
    values_again = [np.asarray(g) for g in spmd.jit(step)(ws, x)]
    monkeypatch.setattr(values, "FAR_EQUATIONS", 10**9)
    once, more = counts(ws, x)
    assert once == {"all_gather": LAYERS, "reduce_scatter": LAYERS}
    assert again["reduce_scatter"] == LAYERS
    # All layers but the last ones, whose backward pass comes soon.
    regathered = again["all_gather"] - LAYERS
    assert LAYERS // 2 < regathered < LAYERS
    # The arena is smaller by weights that were held whole.
    assert more - less >= (regathered - 2) * WIDTH * WIDTH * 4
    spmd.clear_caches()
    for one, other in zip(values_again, spmd.jit(step)(ws, x), strict=True):
        np.testing.assert_array_equal(one, other)


def test_small_weights_are_kept():
    kinds, _ = counts(*placed(128))
    assert kinds["all_gather"] == LAYERS


def test_a_loop_over_layers_gathers_in_its_body_both_ways():
    ws, x = placed()
    stack = put(np.stack([np.asarray(w) for w in ws]), None, "data")

    def looped(stack: Any, x: Any) -> Any:
        return (lax.scan(lambda x, w: (x + snp.tanh(x @ w), None), x, stack)[0] ** 2).mean()

    moved = debug.sharding(spmd.jit(lambda w, x: step(w, x, looped)), show=False)(stack, x)
    found = [(c.kind, c.times) for c in moved.collectives if c.kind != "all_reduce"]
    assert sorted(found) == [("all_gather", LAYERS)] * 2 + [("reduce_scatter", LAYERS)]
