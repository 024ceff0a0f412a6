"""Deep programs: what the passes make of a few layers, continued, is what they make of all."""

from __future__ import annotations

import numpy as np
import pytest

import spmd.numpy as snp
from spmd import lax, nn
from spmd.api import grad, jit, value_and_grad
from spmd.compile import pipeline
from spmd.compile.passes import shorten as shortening
from spmd.compile.passes.inline import inline_calls
from spmd.compile.passes.periods import find_regions, table_of
from spmd.compile.pipeline import comparable
from spmd.core.check import check_jaxpr
from spmd.core.config import config
from spmd.core.errors import InternalError
from spmd.core.ir import ClosedJaxpr, Var
from spmd.core.tree import tree_leaves, tree_map
from tests.compile.deep_programs import Drawn
from tests.compile.fusion_programs import normal
from tests.compile.programs import by_impl
from tests.compile.test_repeat import deep


@pytest.fixture(autouse=True)
def of_any_length(monkeypatch):
    monkeypatch.setattr(shortening, "LEAST_EQNS", 0)


def layers(count, seed=0, width=16):
    return [
        (0.2 * normal(width, width, seed=seed + k), 0.2 * normal(width, seed=seed + k))
        for k in range(count)
    ]


def traced(function, args):
    return inline_calls(jit(function).trace(*args).jaxpr)


def passes(closed):
    for step in pipeline.PASSES[1:]:
        closed = step(closed)
    return closed


def by_few(closed):
    """What the passes make of a few layers, continued; None if they take all of them."""
    short = shortening.shorten(closed)
    if short is None:
        return None
    check_jaxpr(short.closed)
    assert len(short.closed.eqns) < len(closed.eqns)
    found = short.lengthen(passes(short.closed))
    if found is not None:
        check_jaxpr(found)
    return found


# ---- programs that repeat themselves -----------------------------------------------------------


def mlp(params, x):
    for w, b in params:
        x = snp.tanh(x @ w + b)
    return snp.sum(x * x)


def backwards(params, x):
    return mlp(params[::-1], x)


def named(params, x):
    """Sorted by their names, layers are in another order than they are used in."""
    for k in range(len(params)):
        x = snp.tanh(x @ params[str(k)])
    return snp.sum(x * x)


def with_sums(params, x):
    """Something is added up along the layers, and something weighs each."""
    total = 0.0
    for w, b in params:
        x = snp.tanh(x @ w + b) * b[0]
        total = total + snp.mean(x * x) + snp.sum(w * w)
    return total


def two_kinds(params, x):
    for k, (w, b) in enumerate(params):
        x = snp.tanh(x @ w + b) if k % 2 else nn.relu(x @ w) * b
    return snp.sum(x * x)


def one_is_different(params, x):
    for k, (w, b) in enumerate(params):
        x = snp.tanh(x @ w + b) * (2 if k == len(params) // 2 + 5 else 1)
    return snp.sum(x * x)


def masked(params, x):
    """All layers read one value that the program makes before."""
    mask = x > 0
    for w, b in params:
        x = snp.where(mask, snp.tanh(x @ w + b), x * x[0])
    return snp.sum(x * x)


def adam(params, m, v, x):
    loss, g = value_and_grad(mlp)(params, x)
    m = tree_map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
    v = tree_map(lambda a, b: 0.99 * a + 0.01 * b * b, v, g)
    new = tree_map(lambda p, a, b: p - 0.001 * a / (snp.sqrt(b) + 1e-8), params, m, v)
    return loss, new, m, v


def attention_block(params, x):
    for wq, wk, wv, w in params:
        h = (x - x.mean(-1, keepdims=True)) / snp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        scores = nn.softmax(snp.where(snp.tril(snp.ones((8, 8), bool)), h @ wq @ (h @ wk).T, -1e9))
        x = x + scores @ (h @ wv)
        x = x + nn.gelu(x @ w) @ w.T
    return snp.sum(x * x)


def decoder(params, x):
    """Blocks with gains and biases, whose updates merge with their gradients."""
    for g, b, wq, wk, w in params:
        h = (x - x.mean(-1, keepdims=True)) / snp.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b
        x = x + nn.softmax(snp.where(MASK, h @ wq @ (h @ wk).mT, -1e9)) @ nn.gelu(h @ w)
    return snp.mean(x * x)


def two_batches(params, x):
    """The masked scores of both batches' first layers are one kernel if layers are few."""
    a, b = grad(decoder)(params, x), grad(decoder)(params, 2 * x)
    return tree_map(lambda p, a, b: p - 0.1 * (a + b), params, a, b)


def blocks(count, seed=0):
    return [
        [normal(16, seed=seed + 5 * k), normal(16, seed=seed + 5 * k + 1)]
        + [0.2 * normal(16, 16, seed=seed + 5 * k + j) for j in (2, 3, 4)]
        for k in range(count)
    ]


def normed(x, gain, bias):
    x = x - x.mean(-1, keepdims=True)
    return x / snp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain + bias


def transformer(params, x):
    for g1, b1, wq, wk, wv, wo, g2, b2, w1, c1, w2, c2 in params:
        h = normed(x, g1, b1)
        q, k, v = (snp.einsum("bsd,dhk->bhsk", h, w) for w in (wq, wk, wv))
        scores = nn.softmax(snp.einsum("bhsk,bhtk->bhst", q, k) / 4)
        x = x + snp.einsum("bhst,bhtk,hkd->bsd", scores, v, wo)
        x = x + nn.gelu(normed(x, g2, b2) @ w1 + c1) @ w2 + c2
    return snp.mean(x * x)


def transformer_step(params, x):
    """The kernel of the first layer's update, outside of regions, takes its gradient along."""
    return tree_map(lambda p, g: p - 0.1 * g, params, grad(transformer)(params, x))


def transformer_blocks(count):
    shapes = [(32,), (32,), *[(32, 4, 8)] * 3, (4, 8, 32), (32,), (32,), (32, 64), (64,), (64, 32)]
    shapes.append((32,))
    return [
        [0.2 * normal(*shape, seed=20 * k + j) for j, shape in enumerate(shapes)]
        for k in range(count)
    ]


MASK = np.tril(np.ones((8, 8), bool))
X = normal(8, 16, seed=500)
EVEN = {
    "transformer step": (transformer_step, (transformer_blocks(14), normal(2, 16, 32))),
    "mlp forward": (mlp, (layers(24), X)),
    "mlp": (value_and_grad(mlp), (layers(24), X)),
    "backwards": (value_and_grad(backwards), (layers(24), X)),
    "named": (
        value_and_grad(named),
        ({str(k): normal(16, 16, seed=k) for k in range(24)}, X),
    ),
    "with sums": (grad(with_sums), (layers(24), X)),
    "two kinds": (grad(two_kinds), (layers(40), X)),
    "one is different": (grad(one_is_different), (layers(48), X)),
    "masked": (value_and_grad(masked), (layers(24), X)),
    "adam": (adam, (layers(24), layers(24, 100), tree_map(np.square, layers(24, 200)), X)),
    "attention": (
        value_and_grad(attention_block),
        ([[normal(16, 16, seed=4 * k + j) for j in range(4)] for k in range(13)], X),
    ),
    **{f"random {seed}": deep(14, seed) for seed in (0, 4, 7, 11)},
    "told first": deep(18, 3, told=(1,)),
    "told all": deep(14, 3, told=tuple(range(14))),
}


@pytest.mark.parametrize("name", EVEN)
def test_a_few_layers_continued_are_all(name):
    closed = traced(*EVEN[name])
    found = by_few(closed)
    assert found is not None
    assert str(found) == str(passes(closed))
    assert found.jaxpr.invars == closed.jaxpr.invars


@pytest.mark.parametrize("name", ["backwards", "with sums", "one is different", "adam"])
def test_values(name):
    function, args = EVEN[name]
    closed = traced(function, args)
    found = by_few(closed)
    leaves = tree_leaves(args)
    for a, b in zip(by_impl(found, leaves), by_impl(closed, leaves), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    again = tree_leaves(jit(function)(*args))
    for a, b in zip(again, by_impl(closed, leaves), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


# ---- programs that look as if they did ---------------------------------------------------------


def counted(params, x):
    """A number that is known in every layer decides what the last layers do."""
    count = snp.zeros((), snp.int32)
    for w, b in params:
        x, count = jit(lambda x, c, w, b: (snp.where(c < 20, snp.tanh(x @ w + b), x @ w), c + 1))(
            x, count, w, b
        )
    return x, count


def scaled(params, x):
    """The last result depends on how many layers there were, by a number that is folded."""
    scale = snp.ones(())
    for w, b in params:
        x = snp.tanh(x @ w + b)
        scale = jit(lambda c: c * 0.5)(scale)
    return x * scale


def turned(params, x, y):
    """What is transposed in every layer is transposed, or not, in the end."""
    for w, b in params:
        x, y = snp.tanh(x @ w + b), y.T
    return x, y


def negated(params, x, y):
    for w, b in params:
        x, y = snp.tanh(x @ w + b), -y
    return x, y


def stacked(params, x):
    seen = []
    for w, b in params:
        x = snp.tanh(x @ w + b)
        seen.append(x)
    return snp.stack(seen)


def masked_weights(params, x):
    """All layers' masked weights are made at once, as they read the same mask."""
    mask = snp.tril(snp.ones((16, 16), bool)) & (x[0] > 0)
    for w, b in params:
        x = snp.tanh(x @ snp.where(mask, w, 0.0) + b)
    return snp.sum(x * x)


def numbered(params, x):
    for k, (w, b) in enumerate(params):
        x = snp.tanh(x @ w + b) * (1 + k)
    return snp.sum(x * x)


def tied(params, x):
    """Two layers in the middle have the same weights."""
    for k, (w, b) in enumerate(params):
        x = snp.tanh(x @ (params[10][0] if k == 13 else w) + b)
    return snp.sum(x * x)


def shuffled(params, x):
    """On the way back the layers' values are needed in another order."""
    seen = []
    for w, b in params:
        x = snp.tanh(x @ w + b)
        seen.append(x)
    for k, (w, _) in enumerate(params):
        x = snp.tanh(x @ w) * seen[7 * k % len(params)]
    return x


def one_element(x):
    for _ in range(100):
        x = snp.sin(x * 1.01) + 0.5
    return x


def looped(params, x):
    """Each layer has a loop of its own, which is like no other."""
    for w, b in params:
        x, _ = lax.scan(lambda h, _, w=w, b=b: (snp.tanh(h @ w + b), None), x, None, length=2)
    return x


def scalars(params, x, s):
    """What is computed besides, of numbers that are given, becomes one kernel."""
    for w, b in params:
        x, s = snp.tanh(x @ w + b), s * s[0] + 0.5
    return x, s


def sum_from_one(params, x):
    """One kernel outside adds up what all weights but the first contribute."""
    total = snp.zeros(())
    for w, b in params:
        x = snp.tanh(x @ w + b)
    for _, b in params[1:]:
        total = total + b[0] * b[1]
    return x, total


def decoded(params, x):
    """What reads the last three layers looks like three layers."""
    seen = []
    for w, b in params:
        x = snp.tanh(x @ w + b)
        seen.append(x)
    y = x @ x.T
    for h in seen[-3:][::-1]:
        y = snp.tanh(y @ y) * (h @ h.T)
    return y


def last_weights(params, x):
    """A penalty on three weights looks like part of three layers."""
    total = mlp(params, x)
    for w, _ in params[-3:]:
        total = total + snp.sum(w @ w)
    return total


def read_late(params, x):
    """A value of the fourth layer is read at the end."""
    seen = []
    for w, b in params:
        x = snp.tanh(x @ w + b)
        seen.append(x)
    return snp.sum(x + seen[3] * 2)


def by_turns(params, x):
    """Weights are read in a circle, which has neither a first nor a last."""
    for k in range(len(params)):
        x = snp.tanh(x @ params[k % 3][0]) + x[0]
    return x


def chosen_count(params, x):
    """A counter that is chosen from itself and what layers have, always itself."""
    count = lax.full((), 20, snp.int32)
    for w, b in params:
        count = _chosen(count, b[0].astype(snp.int32))
        x = _by_count(count, snp.tanh(x @ w + b), snp.sin(x @ w))
    return x


def waiting(params, x):
    """Numbers move up one place in each layer; what the last layers read is still far back."""
    scales = [lax.full((), 1 + k // 20, snp.float32) for k in range(22)]
    for w, b in params:
        x = snp.tanh(x @ w + b) * scales[0]
        scales = [_kept(scale, b[0]) for scale in (*scales[1:], scales[0])]
    return x


@jit
def _kept(scale, other):
    return lax.select(scale < 1e9, scale, other)


@jit
def _chosen(count, other):
    return lax.select(count > -1000, count - 1, other)


@jit
def _by_count(count, a, b):
    return lax.select(snp.broadcast_to(count > 0, a.shape), a, b)


def doubled(params, x, p):
    """Turned in two ways that are one: in the end it is what it was, or not."""
    for w, b in params:
        x, p = snp.tanh(x @ w + b) * p[0, 0], snp.maximum(p.T, p.T)
    return x, p


def ends_alike(params, x, y):
    """The first and the last kernel read what all layers read, and would be one of few layers."""
    first = snp.sin(y)
    for w, b in params:
        x = snp.tanh(x @ w + b) * y
    return first, x, snp.cos(y)


def read_again(params, x):
    """What a layer makes of its weights is made again ten layers later."""
    for (w, b), (v, _) in zip(params[:-10], params[10:], strict=True):
        x = snp.tanh(x @ snp.sin(w) + x @ snp.sin(v) + b)
    return x


UNEVEN = {
    "two batches": (two_batches, (blocks(24), normal(2, 8, 16))),
    "chosen count": (chosen_count, (layers(32), X)),
    "waiting": (waiting, (layers(30), X)),
    "doubled": (doubled, (layers(25), X, normal(5, 5))),
    "ends alike": (ends_alike, (layers(24), X, normal(8, 16))),
    "read again": (read_again, (layers(30), X)),
    "by turns": (by_turns, (layers(24), X)),
    "scalars": (scalars, (layers(24), X, X[0])),
    "sum from one": (sum_from_one, (layers(24), X)),
    "decoded": (decoded, (layers(24), X)),
    "last weights": (last_weights, (layers(24), X)),
    "read late": (grad(read_late), (layers(24), X)),
    "counted": (counted, (layers(25), X)),
    "counted, in the middle": (counted, (layers(40), X)),
    "scaled": (scaled, (layers(24), X)),
    "turned": (turned, (layers(24), X, normal(5, 5))),
    "turned, odd": (turned, (layers(25), X, normal(5, 5))),
    "negated": (negated, (layers(25), X, normal(5, 5))),
    "stacked": (stacked, (layers(24), X)),
    "masked weights": (value_and_grad(masked_weights), (layers(24), X)),
    "numbered": (grad(numbered), (layers(24), X)),
    "tied": (grad(tied), (layers(24), X)),
    "shuffled": (shuffled, (layers(24), X)),
    "one element": (one_element, (normal(100),)),
    "looped": (looped, (layers(24), X)),
    "told one": deep(14, 3, told=(7,)),
    "told even ones": deep(14, 3, told=tuple(range(0, 14, 2))),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_what_does_not_go_on_evenly_is_left_alone(name):
    assert by_few(traced(*UNEVEN[name])) is None


@pytest.mark.parametrize("seed", range(8))
def test_random_changes(seed):
    """Whatever is changed in one layer, or between two: the program is the same, or left alone."""
    rng = np.random.default_rng(seed)
    count = 26
    places = rng.choice(count, size=2, replace=False).tolist()
    kind = rng.integers(5)

    def loss(params, x):
        extra = []
        other = x[0]
        for k, (w, b) in enumerate(params):
            before = x
            if k in places and kind == 0:
                w = params[places[0]][0]
            x = snp.tanh(x @ w + (other if kind == 1 and k in places else b))
            if k in places and kind == 2:
                x = x.sum(-1, keepdims=True) + before
            if kind == 3:
                x = x + (before if k in places else before * 0.5)
            if kind == 4 and k in places:
                extra.append(x.max(0))
                other = x[1]
        return snp.sum(x * x), extra

    closed = traced(value_and_grad(loss, has_aux=True), (layers(count), X))
    found = by_few(closed)
    if found is not None:
        assert str(found) == str(passes(closed))


# The first are some of which the copies were once put back wrong, or of what was left as it was.
@pytest.mark.parametrize("seed", [39, 76, 86, 175, 239, 244, 378, 435, 459, 530, 4396, *range(12)])
def test_random_programs(seed):
    drawn = Drawn(seed)
    closed = traced(drawn.function, drawn.args)
    found = by_few(closed)
    if found is not None:
        assert comparable(found) == comparable(passes(closed)), drawn
    short = shortening.shorten(closed)
    again = short and short.lengthen(short.closed)
    assert again is None or comparable(again) == comparable(closed), drawn


def test_names_inside_kernels_make_no_difference():
    """Which of the groups that share a kernel gave it its variables may be another."""
    closed = traced(mlp, (layers(3), X))
    done = passes(closed)
    k = next(k for k, eqn in enumerate(done.eqns) if "jaxpr" in eqn.params)
    eqn = done.eqns[k]
    inner = eqn.params["jaxpr"]
    renamed = ClosedJaxpr(substituted(inner.jaxpr), inner.consts)
    eqns = [*done.eqns]
    eqns[k] = eqn.replace(params={**eqn.params, "jaxpr": renamed})
    again = ClosedJaxpr(done.jaxpr.replace(eqns=eqns), done.consts)
    assert comparable(again) == comparable(done)
    del eqns[k]
    other = ClosedJaxpr(done.jaxpr.replace(eqns=eqns), done.consts)
    assert comparable(other) != comparable(done)


def substituted(jaxpr):
    """The same jaxpr with variables of its own."""
    new = {v: Var(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)}
    new.update({v: Var(v.aval) for eqn in jaxpr.eqns for v in eqn.outvars})

    def of(atoms):
        return tuple([new.get(a, a) for a in atoms])

    eqns = [e.replace(invars=of(e.invars), outvars=of(e.outvars)) for e in jaxpr.eqns]
    return jaxpr.replace(
        constvars=of(jaxpr.constvars),
        invars=of(jaxpr.invars),
        eqns=eqns,
        outvars=of(jaxpr.outvars),
    )


# ---- the parts ---------------------------------------------------------------------------------


def test_regions_of_a_gradient():
    closed = traced(value_and_grad(mlp), (layers(20), X))
    table = table_of(closed)
    back, forth = find_regions(table, 12)
    assert {back.sign, forth.sign} == {1, -1}
    assert min(back.copies, forth.copies) >= 19
    for region in (back, forth):
        for k in range(region.start, region.end - region.period):
            assert closed.eqns[k].prim is closed.eqns[k + region.period].prim


def test_it_is_said_how_much_repeats_itself():
    report = pipeline.Report()
    closed = traced(value_and_grad(mlp), (layers(24), X))
    pipeline.run_passes(closed, report)
    assert "equations repeat themselves: 23 of 7" in report.repeats
    assert set(report.jaxprs) == {step.__name__ for step in pipeline.PASSES}


def test_a_difference_is_an_error(monkeypatch):
    """With `SPMD_CHECK=1` both roads are walked."""
    closed = traced(value_and_grad(mlp), (layers(24), X))
    whole = pipeline.run_passes(closed)
    monkeypatch.setattr(
        shortening.Shortened, "lengthen", lambda *_: passes(traced(mlp, (layers(24), X)))
    )
    with (
        config.override("check", True),
        pytest.raises(InternalError, match="the passes make of all layers"),
    ):
        pipeline.run_passes(closed)
    assert len(whole.eqns) > 24
