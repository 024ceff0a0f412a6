"""Equal equations are merged before a program is partitioned: no collective is made twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, lax, nn
from spmd.base.config import config
from spmd.partition.merging import without_repeats
from tests.partition.programs import auto_mesh, kinds


@pytest.fixture(autouse=True)
def eight_devices() -> Iterator[None]:
    with config.override("num_cpu_devices", 8):
        yield


def rows(n: int = 4) -> Any:
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    return spmd.device_put(x, NamedSharding(auto_mesh((n,), ("x",)), P("x")))


def inner(x: Any) -> Any:
    return snp.tanh(x.sum(0)) + x.sum(0) * 2


CASES: dict[str, tuple[Callable[[Any], Any], dict[str, int]]] = {
    "one is scaled": (lambda x: (snp.tanh(x.sum(0)), x.sum(0) * 2 + 1), {"all_reduce": 1}),
    "mean and variance": (lambda x: (x.mean(0), x.var(0)), {"all_reduce": 2}),
    "products": (lambda x: (snp.tanh(x.T @ x), 1 - x.T @ x), {"all_reduce": 1}),
    "calls": (
        lambda x: (snp.tanh(spmd.jit(inner)(x)), -spmd.jit(inner)(x)),
        {"all_reduce": 1},
    ),
    "along broadcasts": (
        lambda x: (snp.exp(x - x.max(0)).sum(0), snp.exp(x - x.max(0)).sum(0) * 3),
        {"all_reduce": 2},
    ),
    "a loop": (
        lambda x: lax.fori_loop(0, 3, lambda k, y: snp.sin(y) + inner(y) * y, x),
        {"all_reduce": 3},
    ),
    "branches": (
        lambda x: lax.cond(x.sum() > 0, inner, lambda y: y.sum(0) - y.sum(0) * 3, x),
        {"all_reduce": 3},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_sums_are_made_once(name: str):
    f, expected = CASES[name]
    x = rows()
    assert kinds(spmd.jit(f), x) == expected
    pairs = zip(spmd.tree.leaves(spmd.jit(f)(x)), spmd.tree.leaves(f(np.asarray(x))), strict=True)
    for found, want in pairs:
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_a_value_and_its_gradient_share_their_sums():
    def loss(x: Any) -> Any:
        return nn.log_softmax(x.T @ x).mean()

    once, both = (
        spmd.jit(spmd.value_and_grad(loss)),
        spmd.jit(lambda x: (loss(x), spmd.grad(loss)(x))),
    )
    assert kinds(both, rows()) == kinds(once, rows())


def names(f: Callable[..., Any], *args: Any) -> list[str]:
    return [eqn.prim.name for eqn in without_repeats(spmd.jit(f).trace(*args).jaxpr).eqns]


def test_what_differs_in_a_parameter_stays():
    x = np.ones((8, 8), np.float32)
    assert names(lambda x: x[1:3] + x[2:4], x).count("slice") == 2
    assert names(lambda x: (x.sum(0), x.sum(1), x.sum(0)), x) == ["reduce_sum"] * 2
    assert names(lambda x: (x + 0.0, x + -0.0, x + 0.0), x) == ["add"] * 2

    def filled(x: Any, places: Any) -> Any:
        return [x.at[places].get(mode="fill", fill_value=v) for v in (0.0, -0.0, 0.0)]

    assert names(filled, x, np.array([1, 9])).count("gather") == 2
    cast = names(lambda x: [x.astype(t) for t in (np.int32, np.float16, np.int32)], x)
    assert cast == ["convert_element_type"] * 2


def test_readers_of_a_constant_have_their_own():
    """Each is laid out as it is wanted there, as if none of the others were."""
    mesh = auto_mesh((4, 2), ("x", "y"))
    x, y = (
        spmd.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P(axis)))
        for axis in ("x", "y")
    )
    row = spmd.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P()))

    def f(x: Any, y: Any, row: Any) -> Any:
        return (
            x * lax.iota(np.float32, 64).reshape(8, 8) * snp.broadcast_to(row, (8, 8)),
            y * lax.iota(np.float32, 64).reshape(8, 8) * snp.broadcast_to(row, (8, 8)),
        )

    assert not kinds(spmd.jit(f), x, y, row)


def test_effects_and_random_numbers_are_kept(capfd: pytest.CaptureFixture[str]):
    def f(x: Any) -> Any:
        spmd.debug.print("{}", x.sum())
        spmd.debug.print("{}", x.sum())
        draws = [spmd.random.normal(spmd.random.key(k), (8,)) for k in (0, 1, 0)]
        return x, draws

    _, (first, second, third) = spmd.jit(f)(rows())
    spmd.effects_barrier()
    assert len(capfd.readouterr().out.split()) == 2
    assert (np.asarray(first) == np.asarray(third)).all()
    assert (np.asarray(first) != np.asarray(second)).any()
