"""Attention by blocks: against its formula and against JAX, in all derivatives and shapes."""

from functools import partial

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import nn
from spmd.compile.executable.executable import compile_jaxpr
from spmd.core.rewrite import eval_closed
from spmd.lax.attention import attention_and_residual, attention_formula, attention_p
from spmd.lax.attention_blocks import Attention
from spmd.testing import check_grads

jax = pytest.importorskip("jax", reason="JAX is the oracle")
jnn = jax.nn


def values(*shape: int, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def triple(b, t, s, n, k, h, dtype=np.float32):
    shapes = [(b, t, n, h), (b, s, k, h), (b, s, k, h)]
    return [values(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def bools(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).random(shape) < 0.6


LENGTHS = np.array([3, 200], np.int32)

CASES = {
    "plain": ((2, 33, 70, 2, 2, 8), {}),
    "one block": ((1, 5, 6, 1, 1, 4), {}),
    "one query": ((2, 1, 40, 4, 2, 8), {}),
    "blocks with a rest": ((2, 300, 160, 1, 1, 4), {"scale": 0.2}),
    "grouped heads": ((2, 40, 24, 6, 2, 8), {}),
    "causal": ((2, 64, 64, 2, 2, 8), {"is_causal": True}),
    "causal in chunks": ((1, 520, 520, 2, 1, 4), {"is_causal": True}),
    "causal, fewer keys": ((1, 520, 300, 1, 1, 4), {"is_causal": True}),
    "causal, more keys": ((1, 300, 520, 1, 1, 4), {"is_causal": True}),
    "window": ((1, 300, 300, 2, 2, 4), {"local_window_size": (17, 5)}),
    "causal window": ((1, 300, 300, 2, 2, 4), {"local_window_size": 20, "is_causal": True}),
    "mask": ((2, 150, 140, 4, 2, 4), {"mask": bools(2, 4, 150, 140)}),
    "mask for all heads": ((2, 150, 140, 4, 2, 4), {"mask": bools(2, 1, 150, 140)}),
    "mask of keys": ((2, 150, 140, 4, 2, 4), {"mask": bools(2, 1, 1, 140)}),
    "mask for all": ((2, 150, 140, 2, 2, 4), {"mask": bools(1, 1, 150, 140), "is_causal": True}),
    "nothing is seen": ((2, 150, 40, 2, 2, 4), {"mask": np.zeros((2, 1, 150, 40), np.bool_)}),
    "bias": ((2, 150, 40, 2, 2, 4), {"bias": values(2, 2, 150, 40)}),
    "bias for all": ((2, 150, 40, 4, 2, 4), {"bias": values(1, 4, 150, 40), "is_causal": True}),
    "lengths": (
        (2, 220, 230, 2, 2, 4),
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS[::-1].copy()},
    ),
}  # fmt: skip


def loss(m, options, q, k, v):
    return (m.dot_product_attention(q, k, v, **options) * np.cos(np.arange(q.shape[-1]))).sum()


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_jax_s(name):
    shape, options = CASES[name]
    args = triple(*shape)
    ours = spmd.jit(spmd.value_and_grad(partial(loss, nn, options), (0, 1, 2)))(*args)
    theirs = jax.jit(jax.value_and_grad(partial(loss, jnn, options), (0, 1, 2)))(*args)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
    for mine, wanted in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["plain", "grouped heads", "causal in chunks", "mask", "bias"])
def test_the_program_by_blocks_is_the_formula(name):
    shape, options = CASES[name]
    args = triple(*shape)
    found = spmd.jit(partial(nn.dot_product_attention, **options))(*args)
    with spmd.disable_jit():
        wanted = nn.dot_product_attention(*args, **options)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [snp.bfloat16, np.float16])
def test_narrow_floats(dtype):
    args = triple(2, 60, 70, 4, 2, 16, dtype=dtype)
    with_grad = (partial(loss, nn, {"is_causal": True}), (0, 1, 2))
    ours = spmd.jit(spmd.grad(*with_grad))(*args)
    theirs = jax.grad(partial(loss, jnn, {"is_causal": True}), (0, 1, 2))(*args)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == wanted.dtype
        np.testing.assert_allclose(
            np.asarray(mine, np.float32), np.asarray(wanted, np.float32), rtol=0.05, atol=0.05
        )


def test_no_array_of_all_scores_is_made():
    q, k, v = triple(1, 1024, 1024, 2, 2, 8)
    step = spmd.jit(spmd.grad(lambda *x: nn.dot_product_attention(*x).sum(), (0, 1, 2)))
    closed = spmd.make_jaxpr(step)(q, k, v)
    executable = compile_jaxpr(closed)
    assert sum(executable.frames.arenas) < q.shape[2] * 4 * 1024**2, "less than one array of scores"


def test_derivatives_of_both_modes_and_orders():
    q, k, v = triple(1, 5, 6, 2, 1, 3)
    check_grads(lambda *x: nn.dot_product_attention(*x, is_causal=True), (q, k, v), order=2,
                atol=2e-2, rtol=2e-2, eps=1e-2)  # fmt: skip


def test_derivatives_of_the_bias():
    q, k, v = triple(1, 5, 6, 2, 1, 3)
    check_grads(nn.dot_product_attention, (q, k, v, values(1, 1, 5, 6)), order=2, atol=2e-2,
                rtol=2e-2, eps=1e-2)  # fmt: skip


def test_hessian_is_jax_s():
    args = triple(1, 4, 5, 1, 1, 2)
    f = lambda m, *x: (m.dot_product_attention(*x) ** 2).sum()  # noqa: E731
    ours = spmd.hessian(partial(f, nn), (0, 1, 2))(*args)
    theirs = jax.hessian(partial(f, jnn), (0, 1, 2))(*args)
    for row, wanted in zip(ours, theirs, strict=True):
        for mine, there in zip(row, wanted, strict=True):
            np.testing.assert_allclose(mine, there, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("in_axes", [(0, 0, 0, 0), (1, None, None, None), (None, 0, 0, None),
                                     (None, 2, None, 0), (None, None, None, 0)])  # fmt: skip
@pytest.mark.parametrize("batch", [1, 2])
def test_vmap_is_a_loop(in_axes, batch):
    q, k, v = triple(batch, 6, 7, 2, 1, 3)
    mask = bools(batch, 1, 6, 7)
    shapes = [(batch, 6, 2, 3), (batch, 7, 1, 3), (batch, 7, 1, 3)]
    args = [
        np.stack([x + i for i in range(3)], at) if at is not None else x
        for x, at in zip((q, k, v), in_axes, strict=False)
    ]
    masks = np.stack([mask, ~mask, mask | True]) if in_axes[3] == 0 else mask
    assert [x.ndim for x, s in zip((q, k, v), shapes, strict=True)] == [4, 4, 4]

    def f(q, k, v, mask):
        return spmd.value_and_grad(
            lambda *x: (nn.dot_product_attention(*x, mask=mask) ** 2).sum(), (0, 1, 2)
        )(q, k, v)

    found = spmd.jit(spmd.vmap(f, in_axes=in_axes))(*args, masks)
    for i in range(3):
        one = [
            x if at is None else np.take(x, i, at)
            for x, at in zip((*args, masks), in_axes, strict=True)
        ]
        spmd.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=2e-4, atol=2e-5),
            found,
            f(*one),
        )


def test_results_do_not_depend_on_the_number_of_threads():
    args = triple(3, 200, 200, 2, 1, 8)
    step = spmd.jit(spmd.grad(partial(loss, nn, {"is_causal": True}), (0, 1, 2)))
    before = spmd.config.num_threads
    try:
        found = []
        for threads in (1, 2, 3):
            spmd.config.update("num_threads", threads)
            found.append(step(*args))
    finally:
        spmd.config.update("num_threads", before)
    for other in found[1:]:
        spmd.tree.map(np.testing.assert_array_equal, found[0], other)


def test_wrong_shapes_are_named():
    q, k, v = triple(1, 5, 6, 2, 1, 3)
    with pytest.raises(spmd.errors.ShapeError, match=r"mask of shape \(1, 3, 5, 6\)"):
        nn.dot_product_attention(q, k, v, mask=np.ones((1, 3, 5, 6), np.bool_))
    with pytest.raises(spmd.errors.ShapeError, match=r"bias of shape \(4, 6\)|bias of shape"):
        nn.dot_product_attention(q, k, v, bias=np.ones((4, 6), np.float32))


def test_attention_stays_one_equation_until_it_is_compiled():
    q, k, v = triple(1, 5, 6, 2, 1, 3)
    names = [e.prim.name for e in spmd.make_jaxpr(nn.dot_product_attention)(q, k, v).eqns]
    assert names.count("attention") == 1 and "exp" not in names
    assert attention_p.expand is not None


def test_the_formula_is_softmax():
    q, k, v = values(1, 1, 1, 4, 3), values(1, 1, 5, 3), values(1, 1, 5, 3, seed=1)
    formula = attention_formula(Attention(0.5), tuple(map(spmd.typeof, (q, k, v))))
    out, top, rest = map(np.asarray, eval_closed(formula, q, k, v))
    scores = 0.5 * np.einsum("tn,sn->ts", q[0, 0, 0], k[0, 0])
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(out[0, 0, 0], weights @ v[0, 0], rtol=1e-5)
    np.testing.assert_allclose((top + rest)[0, 0, 0], np.log(np.exp(scores).sum(-1)), rtol=1e-5)
    np.testing.assert_allclose(attention_and_residual(q, k, v, scale=0.5)[0], out, rtol=1e-5)


def test_over_devices_with_keys_that_all_share():
    """shard_map over the batch: cotangents of keys and values are added up over the devices."""
    q, k, v = triple(4, 40, 30, 2, 1, 8)
    k, v = k[:1], v[:1]

    def f(m, q, k, v):
        return (m.dot_product_attention(q, k, v, is_causal=True) ** 2).sum()

    before = spmd.config.num_cpu_devices
    spmd.config.update("num_cpu_devices", 4)
    try:
        mesh = spmd.make_mesh((4,), ("i",))
        P = spmd.sharding.PartitionSpec
        step = spmd.shard_map(
            lambda *x: spmd.grad(lambda *y: spmd.lax.psum(f(nn, *y), "i"), (0, 1, 2))(*x),
            mesh=mesh,
            in_specs=(P("i"), P(), P()),
            out_specs=(P("i"), P(), P()),
        )
        found = [np.asarray(x) for x in spmd.jit(step)(q, k, v)]
    finally:
        spmd.config.update("num_cpu_devices", before)
    wide = lambda x: np.broadcast_to(x, (4, *x.shape[1:]))  # noqa: E731
    wanted = spmd.grad(lambda q, k, v: f(nn, q, k, v), (0, 1, 2))(q, wide(k), wide(v))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    for mine, there in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(mine[0], np.asarray(there).sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "grouped heads", "causal in chunks", "mask", "lengths"])
def test_the_residual_is_the_logsumexp_of_jax(name):
    sizes, options = CASES[name]
    args = triple(*sizes)
    out, residual = nn.dot_product_attention(*args, **options, return_residual=True)
    want, want_residual = jnn.dot_product_attention(*args, **options, return_residual=True)
    assert residual.shape == args[0].shape[:-1] and residual.dtype == want_residual.dtype
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(residual, want_residual, rtol=2e-5, atol=2e-6)
    slope = spmd.grad(
        lambda q: nn.dot_product_attention(q, *args[1:], return_residual=True)[1].sum()
    )
    np.testing.assert_array_equal(slope(args[0]), np.zeros_like(args[0]))


@pytest.mark.parametrize("name", ["plain", "grouped heads", "causal in chunks", "bias", "mask"])
def test_float64_is_computed_in_float64(name):
    """JAX narrows its scores to float32 here; the formula in NumPy is the oracle."""
    with spmd.enable_x64(True):
        sizes, options = CASES[name]
        args = triple(*sizes, dtype=np.float64)
        q, k, v = args
        heads = q.shape[2] // k.shape[2]
        k, v = (np.repeat(x, heads, 2) for x in (k, v))
        scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[3])
        scores = scores + options.get("bias", 0)
        seen = np.broadcast_to(options.get("mask", True), scores.shape)
        if options.get("is_causal"):
            seen = seen & np.tril(np.ones(scores.shape[2:], bool))
        weights = np.where(seen, np.exp(scores), 0)
        weights /= weights.sum(-1, keepdims=True)
        attend = spmd.jit(lambda *a: nn.dot_product_attention(*a, **options))
        out = attend(*args)
        assert out.dtype == np.float64
        np.testing.assert_allclose(out, np.einsum("bnts,bsnh->btnh", weights, v), rtol=1e-11)
    with spmd.enable_x64(True):
        small = triple(1, 3, 4, 2, 1, 2, dtype=np.float64)
        check_grads(lambda *a: nn.dot_product_attention(*a), small, order=2)
