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


def layer(x: Any, w: Any) -> Any:
    return x + snp.tanh(x @ w)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_checkpoint_gathers_again_and_moves_nothing_else(looped: bool, asked: bool):
    """Whether the gather is the compiler's, or a constraint's that its policy does not save."""
    ws, x = placed(64)
    stack = put(np.stack([np.asarray(w) for w in ws]), None, "data")

    def whole(w: Any) -> Any:
        return lax.with_sharding_constraint(w, spmd.NamedSharding(MESH, P())) if asked else w

    policy = spmd.checkpoint_policies.dots_saveable if asked else None
    kept = spmd.checkpoint(lambda x, w: layer(x, whole(w)), policy=policy)

    def total(stack: Any, x: Any) -> Any:
        if looped:
            return (lax.scan(lambda x, w: (kept(x, w), None), x, stack)[0] ** 2).mean()
        for k in range(LAYERS):
            x = kept(x, stack[k])
        return (x * x).mean()

    moved = debug.sharding(spmd.jit(lambda w, x: step(w, x, total)), show=False)(stack, x)
    kinds = Counter[str]()
    for c in moved.collectives:
        kinds[c.kind] += c.times
    # The products are kept where their policy says so; the first one's operand has no gradient.
    gathers = 2 * LAYERS - (asked and not looped)
    # A constraint is one of the cotangent, too: a loop stacks terms of the whole, for one sum.
    sums = 1 if asked and looped else LAYERS
    assert kinds == {"all_gather": gathers, "reduce_scatter": sums}
    times = gathers + LAYERS
    assert moved.received == times * 64 * 64 * 4 * 3 // 4  # no activations among them


def test_casts_of_weights_are_not_kept_for_a_backward_pass_that_is_far(
    monkeypatch: pytest.MonkeyPatch,
):
    ws, x = placed()

    def cast(ws: Any, x: Any) -> Any:
        return loss([w.astype(snp.bfloat16) for w in ws], x.astype(snp.bfloat16))

    def held(*specs: Any) -> tuple[int, list[np.ndarray]]:
        spmd.clear_caches()
        given = [put(np.asarray(w), *specs) for w in ws]
        f = spmd.jit(lambda w, x: step(w, x, cast))
        moved = debug.sharding(f, show=False)(given, x)
        return moved.memory.temp_size_in_bytes, [np.asarray(g) for g in f(given, x)]

    for specs in ((), ("data",)):
        less, again = held(*specs)
        with monkeypatch.context() as patch:
            patch.setattr(values, "FAR_EQUATIONS", 10**9)
            more, once = held(*specs)
        assert more - less >= (LAYERS // 2 - 2) * WIDTH * WIDTH * 2
        for one, other in zip(again, once, strict=True):
            np.testing.assert_array_equal(one, other)
    spmd.clear_caches()
