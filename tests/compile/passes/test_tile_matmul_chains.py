"""By rows: attention as a formula goes block by block, with the same bits and little memory."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax, nn
from spmd.compile.lower.lowering import lower
from spmd.compile.passes import tile_matmul_chains as module
from spmd.compile.passes.pipeline import PASSES, run_passes
from spmd.compile.passes.tile_matmul_chains import tile_matmul_chains
from spmd.compile.schedule.memory_plan import plan_memory
from spmd.core.call import impl_jaxpr
from spmd.core.ir import ClosedJaxpr, all_eqns
from spmd.sharding import PartitionSpec as P

F = np.float32
B, N, T, S, H = 2, 4, 96, 80, 8


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(F)


Q, K, V = normal(B, N, T, H), normal(B, N, S, H, seed=1), normal(B, N, S, H, seed=2)
SQUARE = normal(B, N, T, H, seed=3)
BIAS = normal(T, S, seed=4)
SEEN = np.random.default_rng(5).random((B, 1, T, S)) < 0.7
WIDE = B * N * T * S * 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of sixteen rows, of values that would otherwise be too small for them."""
    monkeypatch.setattr(module, "LEAST_BYTES", WIDE // B // N)
    monkeypatch.setattr(module, "MOST_ROWS", 16)
    monkeypatch.setattr(module, "COPIED_PART", 1)
    monkeypatch.setattr(module, "LEAST_ROUNDS", 2)


def scores(q: Any, k: Any) -> Any:
    return snp.einsum("bnth,bnsh->bnts", q, k) / math.sqrt(H)


def mixed(weights: Any, v: Any) -> Any:
    return snp.einsum("bnts,bnsh->bnth", weights, v)


def plain(q: Any, k: Any, v: Any) -> Any:
    return mixed(nn.softmax(scores(q, k), axis=-1), v)


def causal(q: Any, k: Any, v: Any) -> Any:
    seen = snp.tril(snp.ones((T, S), bool))
    return mixed(nn.softmax(snp.where(seen, scores(q, k), -1e30), axis=-1), v)


def biased(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return mixed(nn.softmax(scores(q, k) + bias, axis=-1), v)


def masked(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return mixed(nn.softmax(snp.where(seen, scores(q, k), -snp.inf), axis=-1), v)


def sloped(q: Any, k: Any, v: Any) -> Any:
    """Each head looks back another distance: ALiBi."""
    slopes = 2.0 ** -snp.arange(1.0, N + 1)
    apart = snp.arange(T)[:, None] - snp.arange(S)[None]
    return mixed(nn.softmax(scores(q, k) - slopes[:, None, None] * abs(apart), axis=-1), v)


def by_hand(q: Any, k: Any, v: Any) -> Any:
    grown = snp.exp(scores(q, k) - 3)
    return mixed(grown, v) / grown.sum(-1, keepdims=True)


def normed(q: Any, k: Any, v: Any) -> Any:
    """Not attention, but rows between products all the same."""
    s = scores(q, k)
    return mixed((s - s.mean(-1, keepdims=True)) * lax.rsqrt(s.var(-1, keepdims=True) + 1), v)


def heads_behind(q: Any, k: Any, v: Any) -> Any:
    """Dims in the order in which a layer makes them."""
    q, k, v = (snp.swapaxes(x, 1, 2) for x in (q, k, v))
    s = snp.einsum("btnh,bsnh->bnts", q + 1, k + 1)
    return snp.einsum("bnts,bsnh->btnh", nn.softmax(s, axis=-1), v + 1)


def one_head(q: Any, k: Any, v: Any) -> Any:
    return nn.softmax(q[0, 0] @ k[0, 0].T, axis=-1) @ v[0, 0]


def one_of_a_batch(q: Any, k: Any, v: Any) -> Any:
    return plain(q[:1], k[:1], v[:1])


def of_examples(q: Any, k: Any, v: Any) -> Any:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return nn.softmax(snp.einsum("nth,nsh->nts", q, k), axis=-1) @ v

    return spmd.vmap(attend)(q, k, v)


def in_layers(q: Any, k: Any, v: Any) -> Any:
    layers = snp.stack([k, 2 * k, k + 1])
    return lax.scan(lambda x, k: (plain(x, k, v), None), q, layers)[0]


def in_a_map(q: Any, k: Any, v: Any) -> Any:
    mesh = spmd.make_mesh((2,), ("i",))
    return spmd.shard_map(plain, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(q, k, v)


FORMULAS = {
    "plain": (plain, Q, K, V),
    "causal": (causal, Q, K, V),
    "biased": (biased, Q, K, V, BIAS),
    "masked": (masked, Q, K, V, SEEN),
    "sloped": (sloped, Q, K, V),
    "normed": (normed, Q, K, V),
    "heads behind": (heads_behind, Q, K, V),
    "one head": (one_head, Q, K, V),
    "one of a batch": (one_of_a_batch, Q, K, V),
    "of examples": (of_examples, Q, K, V),
    "in layers": (in_layers, Q, K, V),
    "queries are keys": (plain, SQUARE, SQUARE, SQUARE),
}


def around(f: Any, *args: Any) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """A program before the pass, and after it."""
    before = PASSES[: PASSES.index(tile_matmul_chains)]
    closed = run_passes(spmd.make_jaxpr(f)(*args), passes=before)
    return closed, tile_matmul_chains(closed)


def largest(closed: ClosedJaxpr) -> int:
    """The bytes of the largest value that an equation makes."""
    return max(v.aval.nbytes for e in all_eqns(closed) for v in e.outvars)


def planned(f: Any, *args: Any) -> int:
    return spmd.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", FORMULAS)
def test_no_array_of_queries_times_keys_is_left(name: str):
    f, *args = FORMULAS[name]
    whole, rows = around(f, *args)
    loops = [e for e in all_eqns(rows) if e.prim.name == "scan" and not e.params["num_carry"]]
    assert loops and largest(rows) < largest(whole)
    for a, b in zip(impl_jaxpr(np, whole, *args), impl_jaxpr(np, rows, *args), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [*FORMULAS, "in a map"])
def test_tiled_chains_give_the_same_bits_in_less_memory(name: str, monkeypatch: pytest.MonkeyPatch):
    f, *args = {**FORMULAS, "in a map": (in_a_map, Q, K, V)}[name]
    found, less = np.asarray(spmd.jit(f)(*args)), planned(f, *args)
    monkeypatch.setattr(module, "LEAST_BYTES", 2 * WIDE)
    whole = partial(f)  # another function: nothing of the first is known
    assert less < planned(whole, *args)
    np.testing.assert_array_equal(found, spmd.jit(whole)(*args))
    with spmd.disable_jit():
        np.testing.assert_allclose(found, f(*args), rtol=2e-4, atol=2e-5)


def test_each_thread_has_memory_for_one_block():
    """A block of scores, and of weights in its place, on each lane, however many queries."""
    q, k = normal(1, 1, 2048, H), normal(1, 1, 256, H)
    steps = lower(run_passes(spmd.make_jaxpr(plain)(q, k, k))).steps
    for threads in (2, 4):
        assert plan_memory(steps, threads).arena == threads * 16 * 256 * 4


def whole_rows_wanted(q: Any, k: Any, v: Any) -> Any:
    weights = nn.softmax(scores(q, k), axis=-1)
    return mixed(weights, v), weights


def over_queries(q: Any, k: Any, v: Any) -> Any:
    return mixed(nn.softmax(scores(q, k), axis=-2), v)


def without_a_reduction(q: Any, k: Any, v: Any) -> Any:
    return mixed(snp.tanh(scores(q, k)), v)


def squared(q: Any, k: Any, v: Any) -> Any:
    weights = nn.softmax(scores(q, k)[..., :S], axis=-1)[:, :, :S]
    return snp.einsum("bnts,bnsr->bntr", weights, weights)


@pytest.mark.parametrize(
    "f",
    [
        whole_rows_wanted,
        over_queries,
        without_a_reduction,
        squared,
        spmd.grad(lambda *qkv: snp.sum(plain(*qkv) ** 2), (0, 1, 2)),
    ],
)
def test_products_that_are_wanted_as_a_whole_stay(f: Any):
    _, rows = around(f, Q, K, V)
    assert not any(e.prim.name == "scan" for e in all_eqns(rows))
    with spmd.disable_jit():
        expected = spmd.tree.leaves(f(Q, K, V))
    for a, b in zip(spmd.tree.leaves(spmd.jit(f)(Q, K, V)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_weights_that_the_sum_and_the_result_read_stay():
    """The sum divides the result, not the weights, so that both read them: they stay."""
    whole, rows = around(by_hand, Q, K, V)
    assert largest(rows) == largest(whole)


def test_rows_that_no_block_divides_stay_together():
    q = normal(B, N, 97, H)
    _, rows = around(plain, q, K, V)
    products = [e.outvars[0].aval.shape for e in all_eqns(rows) if e.prim.name == "dot_general"]
    assert products == [(1, 1, 97, S), (1, 1, 97, H)]
