"""Attention along split sequences: values and gradients of one device, and what is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import NamedSharding, P, debug, lax, nn
from spmd.partition.strategies import attention as strategies
from spmd.sharding import AxisType
from tests.partition.programs import auto_mesh, kinds

RNG = np.random.default_rng(0)


def operands(batch: int, queries: int, keys: int, heads: int, groups: int = 1) -> list[np.ndarray]:
    """Query, key and value, of so many key heads with so many query heads each."""
    shapes = (batch, queries, heads * groups, 8), *((batch, keys, heads, 8),) * 2
    return [RNG.standard_normal(shape).astype(np.float32) for shape in shapes]


def put(x: np.ndarray, count: int, *spec: Any) -> spmd.Array:
    devices = spmd.devices()[:count]
    mesh = spmd.make_mesh((count,), ("x",), AxisType.Auto, devices=devices)
    return spmd.device_put(x, NamedSharding(mesh, P(*spec)))


def slopes(f: Callable[..., Any]) -> Callable[..., Any]:
    return spmd.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2))


def same(found: Any, expected: Any) -> None:
    for one, other in zip(spmd.tree.leaves(found), spmd.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=3e-4, atol=3e-5)


Case = dict[str, Any]
CASES: dict[str, Case] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 2)},
    "causal window": {"is_causal": True, "local_window_size": (5, 0)},
    "bias": {"bias": RNG.standard_normal((1, 1, 24, 24)).astype(np.float32), "is_causal": True},
    "bias of keys": {"bias": RNG.standard_normal((1, 3, 1, 24)).astype(np.float32)},
    "mask": {"mask": RNG.integers(0, 2, (2, 1, 24, 24)).astype(bool)},
    "lengths": {
        "query_seq_lengths": np.array([24, 7]), "key_value_seq_lengths": np.array([5, 20]),
        "is_causal": True,
    },
    # All keys of some blocks, and of the queries of a device, are at -inf.
    "bias of -inf": {"bias": np.where(np.arange(24) < 9, 0, -np.inf).astype(np.float32)[None, None,
                                                                                        None]},
}  # fmt: skip


@pytest.mark.parametrize("ring", [False, True], ids=["gathered", "ring"])
@pytest.mark.parametrize("name", CASES)
def test_sequences_of_one_length(name: str, ring: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(strategies, "RING_BYTES", 0 if ring else 1 << 30)
    q, k, v = operands(2, 24, 24, 3)
    f = lambda q, k, v: nn.dot_product_attention(q, k, v, **CASES[name])  # noqa: E731
    for g in (f, slopes(f)):
        expected = spmd.jit(g)(q, k, v)
        for count in (2, 3, 4) if name == "causal" else (4,):
            given = [put(x, count, None, "x") for x in (q, k, v)]
            same(spmd.jit(g)(*given), expected)
            assert all(
                x.sharding.spec == P(None, "x") for x in spmd.tree.leaves(spmd.jit(g)(*given))
            )
    found = kinds(f, *[put(x, 4, None, "x") for x in (q, k, v)])
    # Keys and values: three times those of the device before, or all at once.
    assert found == ({"permute": 6} if ring else {"all_gather": 2})
    found = kinds(slopes(f), *[put(x, 4, None, "x") for x in (q, k, v)])
    if ring:
        # Forward; backward with the derivatives, which make the last step home.
        assert found == {"permute": 6 + 12 + 2}
    else:
        assert found == {"all_gather": 2, "reduce_scatter": 2}


def test_a_device_receives_keys_and_values():
    q, k, v = operands(1, 64, 64, 3)
    f = lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    given = [put(x, 4, None, "x") for x in (q, k, v)]
    assert [c.received for c in debug.collectives(f)(*given)] == [k.nbytes * 3 // 4] * 2


def test_heads_take_the_axis_where_that_moves_less():
    q, k, v = operands(1, 1024, 1024, 4)
    f = lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    given = [put(x, 4, None, "x") for x in (q, k, v)]
    found = debug.collectives(f)(*given)
    assert [(c.kind, c.received) for c in found] == [("all_to_all", q.nbytes * 3 // 16)] * 4
    same(spmd.jit(f)(*given), spmd.jit(f)(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_few_queries_go_to_the_keys(causal: bool):
    """One position is written, and the keys of those before it are split."""
    q, k, v = operands(2, 1, 4096, 2, 3)
    length = np.array([4000, 17])

    def f(q: Any, k: Any, v: Any) -> Any:
        return nn.dot_product_attention(
            q, k, v, is_causal=causal, key_value_seq_lengths=None if causal else length
        )

    for g in (f, slopes(f)):
        for count in (2, 4):
            given = [put(q, count), *(put(x, count, None, "x") for x in (k, v))]
            same(spmd.jit(g)(*given), spmd.jit(g)(q, k, v))
    found = debug.collectives(f)(*given)
    assert {c.kind for c in found} == {"all_reduce"}
    assert sum(c.received for c in found) == 2 * (q.nbytes + 2 * q.nbytes // 8) * 3 // 4
    assert set(kinds(slopes(f), *given)) == {"all_reduce"}


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_two_lengths(causal: bool):
    q, k, v = operands(2, 12, 36, 3)
    f = lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    mesh = auto_mesh((2, 2), ("x", "y"))
    specs = [P(), P(None, "x"), P(None, "y"), P(None, ("x", "y")), P("y", "x")]
    for g in (f, slopes(f)):
        expected = spmd.jit(g)(q, k, v)
        for of_queries in specs:
            for of_keys in specs:
                given = [
                    spmd.device_put(x, NamedSharding(mesh, s))
                    for x, s in zip((q, k, v), (of_queries, of_keys, of_keys), strict=True)
                ]
                same(spmd.jit(g)(*given), expected)


def test_query_heads_of_one_key_head_are_split():
    q, k, v = operands(2, 12, 12, 1, 8)
    f = lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    given = [put(q, 4, None, None, "x"), put(k, 4), put(v, 4)]
    assert not kinds(f, *given) and spmd.jit(f)(*given).sharding.spec == P(None, None, "x")
    # The derivatives of keys and values are sums over the query heads.
    assert kinds(slopes(f), *given) == {"all_reduce": 2}
    for g in (f, slopes(f)):
        same(spmd.jit(g)(*given), spmd.jit(g)(q, k, v))


@pytest.mark.parametrize("ring", [False, True], ids=["gathered", "ring"])
def test_a_nan_stays_in_the_queries_that_see_it(ring: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(strategies, "RING_BYTES", 0 if ring else 1 << 30)
    q, k, v = operands(1, 24, 24, 3)
    k[0, 13, 1, 2], q[0, 5] = np.nan, -0.0
    f = lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    found, expected = spmd.jit(f)(*[put(x, 4, None, "x") for x in (q, k, v)]), spmd.jit(f)(q, k, v)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    assert 0 < np.isnan(expected).sum() < expected.size / 2
    same(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats_are_summed_in_wide_ones(dtype: str, monkeypatch: pytest.MonkeyPatch):
    q, k, v = (np.asarray(snp.asarray(x).astype(dtype)) for x in operands(1, 24, 24, 3))
    f = lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    g = spmd.grad(lambda *args: (f(*args).astype(np.float32) ** 2).sum(), (0, 1, 2))
    for ring_bytes in (0, 1 << 30):
        monkeypatch.setattr(strategies, "RING_BYTES", ring_bytes)
        given = [put(x, 4, None, "x") for x in (q, k, v)]
        for h in (f, g):
            for one, other in zip(
                spmd.tree.leaves(spmd.jit(h)(*given)), spmd.tree.leaves(spmd.jit(h)(q, k, v)),
                strict=True,
            ):  # fmt: skip
                assert one.dtype == other.dtype
                wide = np.asarray(one).astype(np.float32), np.asarray(other).astype(np.float32)
                np.testing.assert_allclose(*wide, rtol=3e-2, atol=3e-2)


def test_forward_derivatives_and_batches():
    q, k, v = operands(2, 12, 12, 3)
    f = lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    given = [put(x, 4, None, "x") for x in (q, k, v)]
    along = lambda q, k, v: spmd.jvp(f, (q, k, v), (k, q, snp.sin(v)))  # noqa: E731
    same(spmd.jit(along)(*given), spmd.jit(along)(q, k, v))
    stacked = [np.stack([x, 2 * x, -x]) for x in (q, k, v)]
    over = [put(x, 4, None, None, "x") for x in stacked]
    same(spmd.jit(spmd.vmap(f))(*over), spmd.jit(spmd.vmap(f))(*stacked))


def test_a_layer_of_a_model_whose_sequences_are_split():
    """Of the layer only keys and values move, forward; their derivatives, backward."""
    width, time = 24, 16
    x = RNG.standard_normal((2, time, width)).astype(np.float32)
    w = RNG.standard_normal((4, width, width)).astype(np.float32) / 5

    def layer(x: Any, w: Any) -> Any:
        q, k, v = ((x @ w[n]).reshape(2, time, 3, 8) for n in range(3))
        found = nn.dot_product_attention(q, k, v, is_causal=True).reshape(2, time, width)
        return x + snp.tanh(found @ w[3])

    given = put(x, 4, None, "x"), put(w, 4)
    assert kinds(layer, *given) == {"all_gather": 2}
    slope = spmd.grad(lambda x, w: (layer(x, w) ** 2).sum())
    assert kinds(slope, *given) == {"all_gather": 2, "reduce_scatter": 2}
    same(spmd.jit(slope)(*given), spmd.jit(slope)(x, w))
    steps = lambda x, w: lax.scan(lambda x, _: (layer(x, w), None), x, length=3)[0]  # noqa: E731
    same(spmd.jit(steps)(*given), spmd.jit(steps)(x, w))
