"""Shrink: psums behind the sums that read them; types of varying values cost nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.compile.passes.pipeline import run_passes
from spmd.compile.passes.shrink_psums import shrink_psums
from spmd.core.ir import all_eqns
from spmd.sharding import PartitionSpec as P

MESH = spmd.make_mesh((4,), ("i",))
X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
mapped = partial(spmd.shard_map, mesh=MESH, in_specs=P("i"))


def sizes_of_psums(f: Any, *args: Any) -> list[int]:
    """The elements of each psum of the one map that a program is, after all passes."""
    (eqn,) = spmd.make_jaxpr(f)(*args).eqns
    final = run_passes(eqn.params["jaxpr"])
    return [e.outvars[0].aval.size for e in all_eqns(final) if e.prim.name == "psum"]


def assert_same(f: Any, *args: Any) -> None:
    with spmd.disable_jit():
        expected = f(*args)
    for a, b in zip(spmd.tree.leaves(spmd.jit(f)(*args)), spmd.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@partial(mapped, out_specs=P())
def summed(x: Any) -> Any:
    return lax.psum(x * 2, "i").sum(0)


@partial(mapped, out_specs=P())
def summed_twice(x: Any) -> Any:
    return snp.sum(snp.sum(lax.psum(x, "i"), 1))


@partial(mapped, out_specs=(P(), P()))
def read_twice(x: Any) -> Any:
    total = lax.psum(x, "i")
    return total.sum(0), total


@partial(mapped, out_specs=P())
def summed_and_read(x: Any) -> Any:
    total = lax.psum(x, "i")
    return total - total.sum(0)


@partial(mapped, out_specs=P())
def in_a_loop(x: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return carry + lax.psum(row * x, "i").sum(), None

    return lax.scan(body, snp.float32(0), snp.arange(3.0))[0]


@partial(mapped, out_specs=P())
def largest(x: Any) -> Any:
    return lax.pmax(x, "i").sum(0)


@pytest.mark.parametrize(
    "f, sizes",
    [
        (summed, [6]),
        (summed_twice, [1]),
        (read_twice, [12]),
        (summed_and_read, [12]),
        (in_a_loop, [1]),
        (largest, []),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_psum_that_one_sum_reads_moves_behind_it(f, sizes):
    assert sizes_of_psums(f, X) == sizes
    assert_same(f, X)


def test_gradients_of_shared_biases_travel_alone():
    """The transposes of the cast and of the broadcast make a psum of a whole batch of them."""

    @partial(spmd.shard_map, mesh=MESH, in_specs=(P(), P(), P("i")), out_specs=P())
    def gradient(w: Any, b: Any, x: Any) -> Any:
        def loss(w: Any, b: Any) -> Any:
            return lax.pmean(snp.mean(snp.tanh(x @ w + b) ** 2), "i")

        return spmd.grad(loss, (0, 1))(w, b)

    w, b = X[:6, :3], X[0, :3]
    assert sorted(sizes_of_psums(gradient, w, b, X)) == [3, 18]
    assert_same(gradient, w, b, X)
    whole = spmd.grad(lambda w, b: snp.mean(snp.tanh(X @ w + b) ** 2), (0, 1))(w, b)
    for a, e in zip(gradient(w, b, X), whole, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6)


def test_casts_leave_no_work():
    """A value that is cast to vary fuses with what reads it, as any other."""

    @partial(spmd.shard_map, mesh=MESH, in_specs=(P(), P("i")), out_specs=P("i"))
    def f(b: Any, x: Any) -> Any:
        return snp.tanh(x + b)

    (eqn,) = spmd.make_jaxpr(f)(X[0], X).eqns
    assert [e.prim.name for e in run_passes(eqn.params["jaxpr"]).eqns] == ["fused"]
    assert_same(f, X[0], X)


def test_programs_without_psums_are_left_alone():
    closed = spmd.make_jaxpr(lambda x: snp.sum(x * 2))(X)
    assert shrink_psums(closed) is closed
