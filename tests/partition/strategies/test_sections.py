"""Slices that together are all rows of a split value: one exchange makes all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug, lax, nn
from tests.partition.programs import auto_mesh, kinds

HIDDEN, WIDTH, BATCH, TIME = 24, 12, 6, 5
RNG = np.random.default_rng(0)
X, W, U = (
    RNG.standard_normal(shape).astype(np.float32)
    for shape in ((TIME, BATCH, WIDTH), (WIDTH, 4 * HIDDEN), (HIDDEN, 4 * HIDDEN))
)


def lstm(w: Any, u: Any, xs: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        h, c = carry
        i, f, g, o = snp.split(x @ w + h @ u, 4, -1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * snp.tanh(g)
        h = nn.sigmoid(o) * snp.tanh(c)
        return (h, c), h

    start = snp.zeros((BATCH, HIDDEN), np.float32)
    return lax.scan(step, (start, start), xs)[1]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_gates_of_an_lstm_are_dealt_out_by_one_exchange(count: int):
    mesh = auto_mesh((count,), ("x",))
    w, u = (spmd.device_put(x, NamedSharding(mesh, P(None, "x"))) for x in (W, U))
    assert kinds(lstm, w, u, X) == {"all_gather": TIME, "exchange": TIME}
    (found,) = [c for c in debug.collectives(lstm)(w, u, X) if c.kind == "exchange"]
    # Of each gate a device lacks what it does not have of its own columns.
    assert found.received <= 4 * BATCH * 4 * HIDDEN // count
    np.testing.assert_allclose(spmd.jit(lstm)(w, u, X), lstm(W, U, X), rtol=1e-5, atol=1e-6)

    def loss(w: Any, u: Any) -> Any:
        return (lstm(w, u, X) ** 2).sum()

    slope = spmd.grad(loss, (0, 1))
    # The cotangents of the gates are joined by one exchange.
    assert kinds(slope, w, u)["exchange"] == 2 * TIME
    for one, other in zip(spmd.jit(slope)(w, u), slope(W, U), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_sections_are_those_of_whole_arrays(parts: int, dim: int):
    """In any order, along a dim that one axis splits, or two in either order."""
    x = RNG.standard_normal((48, 72)).astype(np.float32)

    def run(x: Any, wanted: Any) -> Any:
        size = x.shape[dim] // parts
        cut = [lax.slice_in_dim(x, k * size, (k + 1) * size, axis=dim) for k in range(parts)]
        cut = cut[1:] + cut[:1]
        return [lax.with_sharding_constraint(snp.sin(y), wanted) + 1 for y in cut]

    for sizes, axes in (((4,), "x"), ((2, 2), ("x", "y")), ((2, 2), ("y", "x")), ((2, 2), "y")):
        mesh = auto_mesh(sizes, ("x", "y")[: len(sizes)])
        wanted = NamedSharding(mesh, P(axes) if dim == 0 else P(None, axes))
        if x.shape[dim] // parts % (4 if len(axes) > 1 or sizes == (4,) else 2):
            continue
        placed = spmd.device_put(x, wanted)
        f = lambda x, wanted=wanted: run(x, wanted)  # noqa: E731
        assert kinds(f, placed) == {"exchange": 1}
        for one, other in zip(spmd.jit(f)(placed), f(x), strict=True):
            np.testing.assert_array_equal(one, other)


def test_padded_rows_that_are_added_up_to_a_whole_are_joined_by_one_exchange():
    """Rows of several sizes, in any order; of those that leave a gap or meet each row is padded."""
    mesh = auto_mesh((4,), ("x",))
    x = RNG.standard_normal((16, 24)).astype(np.float32)
    rows = NamedSharding(mesh, P("x"))
    cuts = [(4, 12), (12, 24), (0, 4)]

    def loss(x: Any, cuts: Any = cuts) -> Any:
        parts = [lax.slice_in_dim(x, a, b, axis=1) for a, b in cuts]
        return sum(((k + 1) * snp.sin(part)).sum() for k, part in enumerate(parts))

    for own in (cuts, cuts[:2], [*cuts, (2, 6)]):
        slope = spmd.grad(lambda x, own=own: loss(x, own))
        for spec in (P("x"), P(None, "x")):
            placed = spmd.device_put(x, NamedSharding(mesh, spec))
            np.testing.assert_allclose(spmd.jit(slope)(placed), slope(x), rtol=1e-6)

    def joined(a: Any, b: Any, c: Any) -> Any:
        _, pull = spmd.vjp(lambda y: snp.split(y, 3), snp.zeros((24, 2), np.float32))
        return pull([a, b, c])[0]

    parts = [np.full((8, 2), k, np.float32) for k in range(3)]
    given = [spmd.device_put(part, rows) for part in parts]
    assert kinds(joined, *given) == {"exchange": 1}
    np.testing.assert_array_equal(spmd.jit(joined)(*given), np.concatenate(parts))
