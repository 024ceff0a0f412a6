"""A `pmap` over the devices of all ranks, inside of programs and transformations.

Every rank has rows of its own. The oracle is `vmap` over the rows of all ranks, on each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.multihost import process_allgather

RANK, RANKS = spmd.process_index(), spmd.process_count()
ROWS, ALL = spmd.local_device_count(), spmd.device_count()

rng = np.random.default_rng(7)
EVERY = rng.standard_normal((ALL, 6)).astype(np.float32)
OWN = slice(RANK * ROWS, (RANK + 1) * ROWS)
W = rng.standard_normal((6, 6)).astype(np.float32)


def body(x: Any, w: Any) -> Any:
    """What each device does."""
    mean = lax.pmean(x, "i")
    turned = lax.ppermute(x @ w, "i", [(k, (k + 1) % ALL) for k in range(ALL)])
    return snp.tanh(turned) + mean * lax.axis_index("i")


mapped = spmd.pmap(body, axis_name="i", in_axes=(0, None))
whole = spmd.vmap(body, axis_name="i", in_axes=(0, None))
columns = spmd.pmap(lambda x: x - lax.pmax(x, "j"), axis_name="j", in_axes=1, out_axes=1)
all_columns = spmd.vmap(lambda x: x - lax.pmax(x, "j"), axis_name="j", in_axes=1, out_axes=1)
total = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i", out_axes=None)


def forward(f: Callable[..., Any], x: Any, w: Any) -> Any:
    """A layer, with work around it."""
    return snp.sin(f(x * 2, w)) + x


def looped(f: Callable[..., Any], x: Any, w: Any) -> Any:
    """Three layers, by scan."""
    return lax.scan(lambda x, _: (forward(f, x, w), x.sum(1)), x, None, length=3)[0]


def check(name: str, got: Any, want: Any) -> None:
    """Fail if a result of this rank is not its part of the oracle's."""
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), 2e-5, 2e-5, err_msg=name)


def main() -> None:
    """Run all cases."""
    x = EVERY[OWN]
    check("jit(pmap)", spmd.jit(mapped)(x, W), whole(EVERY, W)[OWN])
    for name, layers in ("layer", forward), ("scan", looped):
        want = layers(whole, EVERY, W)
        program = spmd.jit(lambda x, w, layers=layers: layers(mapped, x, w))
        out = program(x, W)
        check(name, out, want[OWN])
        assert out.is_fully_addressable and out.shape == x.shape, out
        check(f"{name}, again", program(out, W), layers(whole, want, W)[OWN])
        check(f"{name}, not compiled", layers(mapped, x, W), want[OWN])

        def loss(f: Any, x: Any, w: Any, layers: Any = layers) -> Any:
            return (layers(f, x, w) ** 2).sum()

        # A cotangent is that of the sum of all ranks' losses.
        of_all = spmd.grad(lambda x, w, loss=loss: loss(whole, x, w), (0, 1))(EVERY, W)
        of_rank = spmd.grad(lambda x, w, loss=loss: loss(mapped, x, w), (0, 1))
        for how, f in ("eager", of_rank), ("jit", spmd.jit(of_rank)):
            dx, dw = f(x, W)
            check(f"{how} gradient of rows of {name}", dx, of_all[0][OWN])
            check(f"{how} gradient of {name}", dw, of_all[1])

    tangent = np.ones_like(EVERY)
    _, want = spmd.jvp(lambda x: forward(whole, x, W), (EVERY,), (tangent,))
    forwards = lambda x, t: spmd.jvp(lambda x: forward(mapped, x, W), (x,), (t,))[1]  # noqa: E731
    check("jvp", spmd.jit(forwards)(x, tangent[OWN]), want[OWN])

    many = np.stack([EVERY, EVERY[::-1] * 3], 2)
    want = spmd.vmap(whole, in_axes=(2, None), out_axes=1)(many, W)
    rows = spmd.vmap(mapped, in_axes=(2, None), out_axes=1)
    check("vmap", rows(many[OWN], W), want[OWN])
    check("jit(vmap)", spmd.jit(rows)(many[OWN], W), want[OWN])

    two = spmd.jit(lambda x: columns(mapped(x, W).T))
    check("two pmaps", two(x), all_columns(whole(EVERY, W).T)[:, OWN])

    # Ranks make other numbers of rounds, and take other branches, around maps that all enter.
    def until(f: Any, x: Any, last: Any) -> Any:
        def step(state: Any) -> Any:
            return state[0] + 1, f(state[1], W)

        return lax.while_loop(lambda state: state[0] < last, step, (0, x))[1]

    rounds = spmd.jit(lambda x, last: until(mapped, x, last))(x, 2 + RANK)
    state = EVERY
    for k in range(1 + RANKS):  # a rank that has finished keeps its rows
        going = np.repeat([k < 2 + r for r in range(RANKS)], ROWS)[:, None]
        state = snp.where(going, whole(state, W), state)
    check("while", rounds, state[OWN])

    check("out_axes=None", spmd.jit(total)(x), EVERY.sum(0))
    spread = spmd.device_put(EVERY, spmd.NamedSharding(spmd.make_mesh((ALL,), ("d",)), spmd.P("d")))
    out, low = spmd.jit(lambda x, s: (mapped(x, W) + s.sum(), s.min(0)))(x, spread)
    check("with an array over all ranks", out, whole(EVERY, W)[OWN] + EVERY.sum())
    check("of an array over all ranks", low, EVERY.min(0))
    given = spmd.pmap(lambda x: x * 1)(x)
    step = spmd.jit(lambda x: mapped(x, W), donate_argnums=0)
    check("donated", step(given), whole(EVERY, W)[OWN])
    assert given.is_deleted()

    params, rate = {"w": W, "b": np.zeros(6, np.float32)}, 0.05

    def device_loss(params: Any, x: Any) -> Any:
        return ((x @ params["w"] + params["b"]) ** 2).mean()

    def device_step(params: Any, x: Any) -> Any:
        loss, grads = spmd.value_and_grad(device_loss)(params, x)
        grads = lax.pmean(grads, "i")
        return spmd.tree.map(lambda p, g: p - rate * g, params, grads), lax.pmean(loss, "i")

    train = spmd.pmap(device_step, axis_name="i", in_axes=(None, 0), out_axes=(None, None))
    oracle = spmd.vmap(device_step, axis_name="i", in_axes=(None, 0), out_axes=(None, None))
    several = lambda f, p, x: lax.scan(lambda p, _: f(p, x), p, None, length=4)  # noqa: E731
    trained, losses = spmd.jit(lambda p, x: several(train, p, x))(params, x)
    want, want_losses = several(oracle, params, EVERY)
    check("losses", losses, want_losses)
    check("weights", trained["w"], want["w"])
    same = process_allgather(trained["w"])
    assert (same == same[0]).all()
    print(f"rank {RANK}: pmaps in programs on {RANKS} ranks x {ROWS} devices: all right")


if __name__ == "__main__":
    main()
