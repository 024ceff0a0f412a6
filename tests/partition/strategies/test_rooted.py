"""Rows of a split dim that one device has: what is computed of them stays there, as by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug, lax
from tests.partition.programs import auto_mesh

N, BATCH, WIDTH, BATCHES = 4, 4, 8, 6
RNG = np.random.default_rng(0)
A = RNG.normal(size=(N, BATCH, WIDTH)).astype(np.float32)
W = (RNG.normal(size=(N, WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
X = RNG.normal(size=(BATCHES, BATCH, WIDTH)).astype(np.float32)
ROW = BATCH * WIDTH * 4


def moves(f: Callable[..., Any], *args: Any) -> dict[str, int]:
    """How many bytes a device receives in collectives of each kind, in all iterations."""
    found: Counter[str] = Counter()
    for c in debug.collectives(spmd.jit(f))(*args):
        found[c.kind] += c.received * c.times
    return dict(found)


def split(x: Any, mesh: spmd.Mesh, *spec: Any) -> Any:
    return spmd.device_put(x, NamedSharding(mesh, P(*spec)))


def alike(f: Callable[..., Any], over_mesh: Any, arguments: Any) -> None:
    for one, other in zip(
        spmd.tree.leaves(spmd.jit(f)(*over_mesh)),
        spmd.tree.leaves(spmd.jit(f)(*arguments)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


CASES: dict[str, tuple[Callable[[Any], Any], dict[str, int]]] = {
    "a row, whole": (lambda a: a[-1], {"exchange": ROW}),
    "what is computed of a row": (lambda a: (snp.tanh(a[2]) ** 2).mean(), {"exchange": 4}),
    "softmax of a row": (lambda a: snp.log(spmd.nn.softmax(a[1])).sum(), {"exchange": 4}),
    "a row beside whole values": (
        lambda a: (a[1] * snp.arange(WIDTH, dtype=np.float32)).sum(), {"exchange": 4},
    ),
    "two rows of one device": (lambda a: (a[3] - 2 * a[3, ::-1]).sum(), {"exchange": 4}),
    "sums of rows of two devices": (lambda a: (a[0] + a[3]).sum(), {"all_reduce": 4 * 6 // 4}),
    "rows of two devices": (lambda a: (a[0] * a[3]).sum(), {"permute": ROW, "exchange": 4}),
    "into its own row": (lambda a: a.at[2].set(snp.sin(a[2])), {}),
    "into a row of another": (lambda a: a.at[0].set(snp.sin(a[2])), {"permute": ROW}),
    "its gradient": (spmd.grad(lambda a: (snp.tanh(a[2]) ** 2).sum()), {}),
    "a product of a row": (lambda a: a[1] @ W[0], {"exchange": ROW}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_computed_of_a_row_stays_where_it_is(name: str):
    f, expected = CASES[name]
    a = split(A, auto_mesh((N,), ("s",)), "s")
    assert moves(f, a) == expected
    alike(f, (a,), (A,))


def test_a_row_over_two_axes_with_another_dim_split():
    mesh = auto_mesh((2, 2), ("x", "y"))

    def f(a: Any) -> Any:
        return (snp.tanh(a[1]) ** 2).sum(0), a.at[3].set(2 * a[1])

    for spec in (("x", "y"), (("y", "x"),), ("y", None, "x")):
        alike(f, (split(A, mesh, *spec),), (A,))
        alike(
            spmd.grad(lambda a: sum(snp.sin(x).sum() for x in f(a))), (split(A, mesh, *spec),), (A,)
        )


def test_a_row_decides_branches_and_loops():
    a = split(A, auto_mesh((N,), ("s",)), "s")

    def f(a: Any) -> Any:
        number = a[3, 0, 0]
        chosen = lax.cond(number > 0, lambda: a.sum(0), lambda: a[1] * number)
        last = lax.while_loop(
            lambda c: c[0] < number + 3, lambda c: (c[0] + 1, c[1] + a[0]), (number, chosen)
        )
        return chosen, last

    alike(f, (a,), (A,))


def test_garbage_of_other_rows_is_not_read():
    """The logarithm of other rows is no number, and raises nothing."""
    rows = np.stack([-np.ones((BATCH, WIDTH)), *[np.ones((BATCH, WIDTH))] * 3]).astype(np.float32)
    a = split(rows, auto_mesh((N,), ("s",)), "s")

    def f(a: Any) -> Any:
        found = snp.log(a[1])
        return found.sum(), a.at[2].set(found), found[0] + a[:, 0]

    alike(f, (a,), (rows,))
    with spmd.debug_nans(True):
        alike(f, (a,), (rows,))


# ---- pipelines -----------------------------------------------------------------------------------


def tick(w: Any, state: Any, x: Any) -> Any:
    mesh = auto_mesh((N,), ("s",))
    state = snp.tanh(spmd.vmap(snp.matmul)(snp.roll(state, 1, 0).at[0].set(x), w))
    return lax.with_sharding_constraint(state, NamedSharding(mesh, P("s")))


def stacked(w: Any, x: Any) -> Any:
    def body(state: Any, x: Any) -> Any:
        state = tick(w, state, x)
        return state, state[-1]

    return lax.scan(body, snp.zeros_like(A), padded(x))[1][N - 1 :]


def unrolled(w: Any, x: Any) -> Any:
    state, outs = snp.zeros_like(A), []
    for row in padded(x):
        state = tick(w, state, row)
        outs.append(state[-1])
    return snp.stack(outs[N - 1 :])


def padded(x: Any) -> Any:
    return snp.concatenate([x, snp.zeros((N - 1, BATCH, WIDTH), np.float32)])


@pytest.mark.parametrize("run", [stacked, unrolled])
def test_a_pipeline_moves_a_row_a_tick(run: Callable[..., Any]):
    """Forwards and backwards; the loss is made by the last stage, and one number is sent."""
    w, ticks = split(W, auto_mesh((N,), ("s",)), "s"), BATCHES + N - 1

    def loss(w: Any, x: Any) -> Any:
        return (run(w, x) ** 2).mean()

    rolls = ticks * ROW if run is stacked else (ticks - 1) * ROW
    assert moves(loss, w, X) == {"permute": rolls, "exchange": 4}
    assert moves(spmd.value_and_grad(loss), w, X) == {"permute": 2 * rolls, "exchange": 4}
    alike(spmd.value_and_grad(loss), (w, X), (W, X))
