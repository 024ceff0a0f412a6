"""Recompute: values that a kernel makes again instead of reading them; the results are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax, nn
from spmd.compile.passes.fusion.rematerialize import LEAST_BYTES, rematerialize
from spmd.compile.passes.pipeline import PASSES, run_passes
from spmd.core.call import impl_jaxpr
from spmd.core.ir import ClosedJaxpr, all_eqns
from spmd.testing import check_grads

F = np.float32
RNG = np.random.default_rng(0)
X, W, V = (RNG.normal(size=shape).astype(F) / F(6) for shape in ((64, 32), (32, 96), (96, 32)))
BODIES = RNG.normal(size=(48, 3)).astype(F)


def steps(f: Any, *args: Any) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """A program after `fuse`, and after `rematerialize`."""
    before = PASSES[: PASSES.index(rematerialize)]
    fused = run_passes(spmd.make_jaxpr(f)(*args), passes=before)
    return fused, rematerialize(fused)


def kept(closed: ClosedJaxpr) -> int:
    """The bytes that groups write."""
    groups = [e for e in all_eqns(closed) if e.prim.name == "fused"]
    return sum(v.aval.nbytes for e in groups for v in e.outvars)


def layer(w: Any, v: Any, x: Any) -> Any:
    return snp.sum((nn.gelu(x @ w) @ v) ** 2)


def pull(place: Any) -> Any:
    apart = place[None] - place[:, None]
    near = snp.sum(apart * apart, axis=-1) + 0.1
    return snp.sum(apart * (near**-1.5)[..., None], axis=1)


def looped(x: Any) -> Any:
    return lax.fori_loop(0, 4, lambda _, y: y + 0.01 * pull(y), x)


PROGRAMS = {
    "gelu": (spmd.grad(layer, (0, 1, 2)), (W, V, X)),
    "distances": (pull, (BODIES,)),
    "in a loop": (looped, (BODIES,)),
    "of all pairs' gradient": (spmd.grad(lambda x: snp.sum(snp.sin(pull(x)))), (BODIES,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_less_is_kept_and_the_meaning_is_the_same(name: str):
    f, args = PROGRAMS[name]
    fused, lighter = steps(f, *args)
    assert kept(lighter) < kept(fused)
    for a, b in zip(impl_jaxpr(np, fused, *args), impl_jaxpr(np, lighter, *args), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_agree_with_single_operations(name: str):
    f, args = PROGRAMS[name]
    with spmd.disable_jit():
        expected = spmd.tree.leaves(f(*args))
    for a, b in zip(spmd.tree.leaves(spmd.jit(f)(*args)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)


def test_gradients_through_recomputed_values_agree_with_differences():
    check_grads(lambda x: nn.gelu(x @ W[:, :40]) @ V[:40], (X[:40],), order=2, atol=2e-2, rtol=2e-2)


def test_bodies_keep_one_number_for_each_pair():
    """The distances themselves, three numbers a pair, are differences of what is read anyway."""
    _, lighter = steps(pull, BODIES)
    count = len(BODIES)
    assert kept(lighter) == F(0).nbytes * (count * count + 3 * count)
    needed = spmd.jit(pull).lower(BODIES).compile().memory_analysis().temp_size_in_bytes
    assert needed == F(0).nbytes * count * count


def test_values_that_are_dear_small_or_read_otherwise_stay():
    def dear(x: Any) -> Any:
        y = snp.exp(x)
        return snp.cumsum(y, 0) @ y.T

    def read_by_a_product(x: Any) -> Any:
        y = x + 1
        return (y @ y.T).sum() * y

    small = X[:2, :2]
    assert small.nbytes < LEAST_BYTES
    for f, args in (
        (dear, (X,)),
        (read_by_a_product, (X,)),
        (spmd.grad(lambda x: snp.sum(nn.gelu(x @ x))), (small,)),
    ):
        fused, lighter = steps(f, *args)
        assert kept(lighter) == kept(fused)


def test_like_layers_stay_alike():
    """Four layers change as one does, so that they share its kernels."""

    def deep(ws: Any, x: Any) -> Any:
        for w, v in ws:
            x = x + nn.gelu(x @ w) @ v
        return snp.sum(x**2)

    _, lighter = steps(spmd.grad(deep), [(W, V)] * 4, X)
    groups = [e for e in all_eqns(lighter) if e.prim.name == "fused"]
    bodies = {id(e.params["jaxpr"]) for e in groups}
    # The first layer and the last are different, those between are alike.
    assert len(bodies) <= 2 + len(groups) - 4
    single = {id(e.params["jaxpr"]) for e in groups if "tanh" in str(e.params["jaxpr"])}
    assert len(single) == 1
