"""Loops over split rows: each device runs its own iterations, and sums are made behind the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug, lax
from spmd.sharding import AxisType
from tests.partition.programs import auto_mesh, kinds

A = np.random.default_rng(0).standard_normal((48, 16)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32) / 4


def put(x: np.ndarray, count: int, *spec: Any) -> spmd.Array:
    devices = spmd.devices()[:count]
    mesh = spmd.make_mesh((count,), ("x",), AxisType.Auto, devices=devices)
    return spmd.device_put(x, NamedSharding(mesh, P(*spec)))


def same(found: Any, expected: Any) -> None:
    for one, other in zip(spmd.tree.leaves(found), spmd.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-5)


def mapped(a: Any, w: Any) -> Any:
    return lax.map(lambda r: snp.tanh(r @ w), a)


def slopes(f: Callable[..., Any]) -> Callable[..., Any]:
    return spmd.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1))


def summed(a: Any, w: Any) -> Any:
    """Two sums, one of which begins with something, and rows that are stacked."""

    def step(carry: Any, r: Any) -> Any:
        total, squares = carry
        h = snp.sin(r @ w)
        return (total + h, 2.0 * h + squares + h * h), h[:4]

    return lax.scan(step, (snp.zeros(16), w[0]), a)


def nested(a: Any, w: Any) -> Any:
    inner = lambda r: lax.map(lambda e: e * snp.cos(w[0, 0] * e), r)  # noqa: E731
    return lax.map(inner, a)


def counted(a: Any, w: Any) -> Any:
    """The carry is read by what is stacked: rows have to be whole."""
    return lax.scan(lambda c, r: (c + r @ w, c * r), snp.zeros(16), a)


# The rows of `a` are split over 4 devices.
LOOPS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "map": (mapped, {}),
    "its gradient": (slopes(mapped), {"all_reduce": 1}),
    "sums": (summed, {"all_reduce": 2}),
    "from behind": (
        lambda a, w: lax.scan(lambda c, r: (c + r, w @ r), snp.zeros(16), a, reverse=True),
        {"all_reduce": 1},
    ),
    "maps in maps": (nested, {}),
    "the gradient of maps in maps": (slopes(nested), {"all_reduce": 1}),
    "a map under vmap": (
        lambda a, w: spmd.vmap(lambda c: lax.map(snp.tanh, c), 1, 1)(a), {},
    ),
    "a while loop in each row": (
        lambda a, w: lax.map(
            lambda r: lax.while_loop(lambda c: c.sum() < 9, lambda c: abs(c) * 1.5 + 1, r), a
        ), {},
    ),
    "a carry that is read": (counted, {"all_gather": 1}),
    "a branch in each row": (
        lambda a, w: lax.map(lambda r: lax.cond(r[0] > 0, lambda r: r * 2, lambda r: r @ w, r), a),
        {},
    ),
    "integers": (
        lambda a, w: lax.scan(
            lambda c, r: (c + (r > 0).sum(), r.argmax()), snp.int32(5), a
        ), {"all_reduce": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_each_device_runs_its_own_iterations(name: str):
    f, expected = LOOPS[name]
    assert kinds(f, put(A, 4, "x"), W) == expected
    for count in (2, 3, 4):
        same(spmd.jit(f)(put(A, count, "x"), W), spmd.jit(f)(A, W))


def test_nothing_moves_what_it_is_not_asked_for():
    f = spmd.jit(mapped)
    assert f(put(A, 4, "x"), W).sharding.spec == P("x")
    rows = A.copy()
    rows[3, 5], rows[40, 1], rows[9] = np.nan, -0.0, np.inf
    doubled = lambda a: lax.map(lambda r: r + r, a)  # noqa: E731
    found = np.asarray(spmd.jit(doubled)(put(rows, 4, "x")))
    np.testing.assert_array_equal(found.view(np.int32), (rows + rows).view(np.int32))


def test_weights_that_are_split_are_gathered_once_or_rows_are_where_that_is_less():
    arguments = put(np.tile(A, (40, 1)), 4, "x"), put(W, 4, "x")
    assert kinds(mapped, *arguments) == {"all_gather": 1}
    found = kinds(spmd.jit(slopes(mapped), out_shardings=tuple(x.sharding for x in arguments)),
                  *arguments)  # fmt: skip
    assert found == {"all_gather": 1, "reduce_scatter": 1}
    same(
        spmd.jit(slopes(mapped))(*arguments), spmd.jit(slopes(mapped))(*map(np.asarray, arguments))
    )
    wide = np.random.default_rng(2).standard_normal((2048, 2048)).astype(np.float32) / 40
    few = np.random.default_rng(3).standard_normal((4, 2048)).astype(np.float32)
    arguments = put(few, 4, "x"), put(wide, 4, None, "x")
    assert all(c.received < few.nbytes * 4 for c in debug.collectives(mapped)(*arguments))
    same(spmd.jit(mapped)(*arguments), mapped(few, wide))


def test_rows_that_a_map_or_a_constraint_inside_fixes_are_whole():
    mesh = auto_mesh((4,), ("x",))
    place = NamedSharding(mesh, P("x"))
    a = spmd.device_put(A, place)

    def constrained(a: Any) -> Any:
        return lax.map(lambda r: lax.with_sharding_constraint(r * 2, place), a)

    def manual(a: Any) -> Any:
        body = lambda r: r + lax.psum(r, "x")  # noqa: E731
        spread = spmd.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        return lax.map(spread, a)

    same(spmd.jit(constrained)(a), A * 2)
    same(spmd.jit(manual)(a), A + np.tile(A.reshape(48, 4, 4).sum(1), (1, 4)))


def test_callbacks_in_iterations_see_each_row_once():
    seen: list[float] = []

    def row(r: Any) -> Any:
        spmd.debug.callback(lambda v: seen.append(float(v)), r[0])
        return r * 2

    same(spmd.jit(lambda a: lax.map(row, a))(put(A, 4, "x")), A * 2)
    spmd.effects_barrier()
    assert sorted(seen) == sorted(map(float, A[:, 0]))


# ---- sums over parts of rows -------------------------------------------------------------------


def accumulated(w: Any, batches: Any) -> Any:
    """The gradients of a few batches, added up in a loop."""

    def step(total: Any, batch: Any) -> Any:
        slope = spmd.grad(lambda w: (snp.tanh(batch @ w) ** 2).mean())(w)
        return total + slope, None

    return lax.scan(step, snp.zeros_like(w), batches)[0] / len(batches)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_gradients_of_batches_are_summed_once_behind_the_loop(count: int):
    batches = np.random.default_rng(4).standard_normal((5, 24, 16)).astype(np.float32)
    arguments = put(W, count), put(batches, count, None, "x")
    (found,) = debug.collectives(accumulated)(*arguments)
    assert (found.kind, found.times, found.received) == (
        "all_reduce", 1, 2 * W.nbytes * (count - 1) // count,
    )  # fmt: skip
    same(spmd.jit(accumulated)(*arguments), spmd.jit(accumulated)(W, batches))


def test_losses_that_a_loop_stacks_are_summed_once_behind_it():
    batches = np.random.default_rng(4).standard_normal((6, 8, 16)).astype(np.float32)

    def f(w: Any, batches: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            loss = lambda w: (snp.tanh(x @ w) ** 2).mean()  # noqa: E731
            value, slope = spmd.value_and_grad(loss)(w)
            return w - 0.1 * slope, (value, x.sum(0))

        return lax.scan(step, w, batches)

    given = W, put(batches, 4, None, "x")
    found = sorted((c.kind, c.received, c.times) for c in debug.collectives(spmd.jit(f))(*given))
    # The gradient in each step; six losses and six sums of rows behind them.
    share = 2 * 3 / 4
    assert found == [
        ("all_reduce", 6 * 4 * share, 1),
        ("all_reduce", 6 * 16 * 4 * share, 1),
        ("all_reduce", W.nbytes * share, 6),
    ]
    same(spmd.jit(f)(*given), spmd.jit(f)(W, batches))


def test_a_sum_that_is_split_is_scattered_in_each_iteration():
    """A term of it would be as large as the whole."""
    batches = np.random.default_rng(4).standard_normal((5, 24, 16)).astype(np.float32)
    arguments = put(W, 4, "x"), put(batches, 4, None, "x")
    place = arguments[0].sharding
    f = spmd.jit(accumulated, out_shardings=place)
    found = kinds(f, *arguments)
    assert found["reduce_scatter"] == 5 and not found["all_reduce"]
    same(f(*arguments), spmd.jit(accumulated)(W, batches))


def smoothed(c: Any) -> Any:
    return snp.pad(c[:-1], ((1, 0), (0, 0))) + c + snp.pad(c[1:], ((0, 1), (0, 0)))


UNEVEN: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    # The last move brings the result to parts of one size.
    "repeated": (
        lambda a: lax.fori_loop(0, 3, lambda k, c: smoothed(c) / 3, a[1:-1]),
        ["permute", "permute", "permute", "exchange"],
    ),
    "while": (
        lambda a: lax.while_loop(lambda c: (c**2).mean() > 0.2, lambda c: smoothed(c) / 3, a[1:-1]),
        ["permute", "all_reduce", "permute", "permute", "exchange"],
    ),
    "gradient": (
        spmd.grad(
            lambda a: (lax.scan(lambda c, _: (snp.tanh(c), c), a[1:-1], None, 3)[1] ** 2).sum()
        ),
        ["permute", "permute"],
    ),
    "from zeros": (
        lambda a: lax.scan(
            lambda c, x: (snp.tanh(c + x), None), snp.zeros((46, 16)), snp.stack([a[1:-1]] * 3)
        )[0].sum(),
        ["permute", "all_reduce"],
    ),
    "sorted": (
        lambda a: lax.fori_loop(0, 3, lambda k, c: snp.sort(c, 0)[::-1] / 2, a[1:-1]).sum(),
        ["permute", "exchange"],
    ),
    "branches": (
        lambda a: lax.cond(a[0, 0] > 0, snp.sin, lambda c: 2 * c, a[1:-1]).sum(),
        ["permute", "exchange", "all_reduce"],
    ),
    "gradient of branches": (
        spmd.grad(lambda a: (lax.cond(a[0, 0] > 0, snp.sin, lambda c: 2 * c, a[1:-1])).sum()),
        ["permute", "exchange", "permute"],
    ),
    "branches in branches in a loop": (
        lambda a: lax.fori_loop(
            0, 3,
            lambda k, c: lax.cond(
                k > 0, lambda c: lax.cond(k > 1, lambda c: -c, snp.tanh, c), snp.sin, c
            ),
            a[1:-1],
        ).max(),
        ["permute", "all_reduce"],
    ),
    "zeros in a branch": (
        lambda a: lax.cond(a.sum() > 0, snp.zeros_like, snp.sin, a[1:-1]).sum(),
        ["all_reduce", "permute", "all_reduce"],
    ),
    "reversed in a branch": (
        lambda a: lax.cond(a.sum() > 0, lambda c: c[::-1], snp.sin, a[1:-1])[3:].sum(),
        ["all_reduce", "permute", "exchange", "permute", "all_reduce"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNEVEN)
def test_carries_in_parts_of_different_sizes_stay_where_they_are(name: str):
    f, expected = UNEVEN[name]
    same(spmd.jit(f)(put(A, 4, "x")), f(A))
    assert [c.kind for c in debug.collectives(spmd.jit(f))(put(A, 4, "x"))] == expected


def test_a_sum_over_two_axes_is_a_term_along_both():
    mesh = auto_mesh((2, 2), ("x", "y"))
    a = np.random.default_rng(5).standard_normal((8, 12, 16)).astype(np.float32)
    given = spmd.device_put(a, NamedSharding(mesh, P("x", "y")))

    def f(a: Any) -> Any:
        step = lambda c, r: (c + snp.sin(r).sum(0), r.max(0))  # noqa: E731
        return lax.scan(step, snp.zeros(16), a)

    found = [(c.kind, c.times) for c in debug.collectives(f)(given)]
    # The sum once over both axes, the maxima in each of a device's four iterations.
    assert sorted(found) == [("all_reduce", 1), ("all_reduce", 4)]
    same(spmd.jit(f)(given), spmd.jit(f)(a))


@pytest.mark.parametrize("seed", range(12))
def test_random_loops_are_those_of_one_device(seed: int):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((12, 8, 4)).astype(np.float32)
    w = rng.standard_normal((4, 4)).astype(np.float32)
    bodies: list[Callable[..., Any]] = [
        lambda c, r, w: (c + r.sum(0), r @ w),
        lambda c, r, w: (c + r[0] + r[1], snp.cumsum(r, 0)),
        lambda c, r, w: (c + snp.max(r @ w, 0), snp.sort(r, 0)),
        lambda c, r, w: (snp.tanh(c + r[2]), c * r),
        lambda c, r, w: (r[3] + c, lax.map(lambda e: e * w[0], r)),
        lambda c, r, w: (c, r.T @ r + w),
    ]
    body = bodies[rng.integers(len(bodies))]
    from_zero = bool(rng.integers(2))

    def f(a: Any, w: Any) -> Any:
        init = snp.zeros(4) if from_zero else w[1]
        return lax.scan(lambda c, r: body(c, r, w), init, a, reverse=bool(seed % 2))

    def loss(a: Any, w: Any) -> Any:
        return sum(snp.cos(x).sum() for x in f(a, w))

    mesh = auto_mesh((2, 2), ("x", "y"))
    specs = [P("x"), P("x", "y"), P(("x", "y")), P(None, "x"), P("y", None, "x")]
    spec = specs[rng.integers(len(specs))]
    given = spmd.device_put(a, NamedSharding(mesh, spec))
    weight = spmd.device_put(w, NamedSharding(mesh, [P(), P("x"), P(None, "y")][seed % 3]))
    for g in (f, spmd.grad(loss, (0, 1))):
        same(spmd.jit(g)(given, weight), spmd.jit(g)(a, w))
