"""Random deep programs: layers that are alike, nearly alike, or only look as if they were.

`program(seed)` draws what a layer does, what it carries along besides its values, which weights it
reads, where something is different, what the tail reads of all that, and whether the whole is a
forward pass, a gradient or a training step. What shortens deep programs must make of each what the
passes make of it, or leave it alone.
"""

from __future__ import annotations

import numpy as np

import spmd.numpy as snp
from spmd import lax, nn
from spmd.api import value_and_grad, vmap
from spmd.core.remat import checkpoint
from spmd.core.tree import tree_map

ROWS, WIDTH = 4, 8


class Drawn:
    """A program drawn from a seed: `function(*args)`."""

    def __init__(self, seed: int, depth: int | None = None):
        self.rng = rng = np.random.default_rng(seed)
        self.depth = int(rng.integers(13, 41)) if depth is None else depth
        self.places = sorted(rng.choice(self.depth, 3, replace=False).tolist())
        self.kinds = _some(rng, LAYERS, 3)
        self.order = rng.choice([0] * 12 + [1, 2, 3, 4, 5, 6])
        self.difference = rng.choice(DIFFERENCES) if rng.random() < 0.2 else None
        self.indexing = rng.choice(INDEXINGS) if rng.random() < 0.25 else "own"
        self.states = [
            STATES[k] for k in rng.permutation(len(STATES))[: rng.choice([0, 0, 1, 1, 2, 3])]
        ]
        self.state_weights = bool(rng.random() < 0.3)
        self.parts = rng.choice(["no", "no", "no", "checkpoint", "vmap"])
        self.tails = [TAILS[k] for k in rng.permutation(len(TAILS))[: rng.choice([0, 0, 1, 1, 2])]]
        self.how = rng.choice(["forward", "gradient", "gradient", "all", "sgd", "momentum"])
        self.named = bool(rng.random() < 0.25)
        self.literal = float(rng.choice([0.5, 0.9, 1.01, -1.0]))
        self.args = self._args()

    def _args(self):
        rng, n = self.rng, self.depth

        def normal(*shape):
            return (0.3 * rng.standard_normal(shape)).astype(np.float32)

        extra = int(rng.choice([0, 0, 1, 5]))
        weights = [normal(WIDTH, WIDTH) for _ in range(n + extra)]
        biases = [normal(WIDTH) for _ in range(n)]
        other = [normal(WIDTH, WIDTH) for _ in range(n)]
        params = {"w": weights, "b": biases, "v": other}
        if self.named:
            params = {k: {f"layer{j}": a for j, a in enumerate(f)} for k, f in params.items()}
        return params, normal(ROWS, WIDTH), normal(WIDTH, WIDTH), normal(), normal(n, WIDTH)

    def __repr__(self) -> str:
        kinds = [k.__name__ for k in self.kinds]
        states = [s.__name__ for s in self.states]
        tails = [t.__name__ for t in self.tails]
        return (
            f"{self.how} of {self.depth} layers, {kinds} in order {self.order}, {states}, {tails}, "
            f"{self.indexing}, {self.difference} at {self.places}, {self.parts}, {self.named}"
        )

    def kind(self, k: int):
        """What layer `k` does: all the same, by turns, or in patterns of four."""
        a, b, c = self.kinds
        n, order = self.depth, self.order
        if order == 1:
            return (a, b)[k % 2]
        if order == 2:
            return (a, b, a, c)[k % 4]
        if order == 3:
            return a if k < n // 2 else b
        if order == 4:  # the same backwards
            return (a, b, c)[min(k, n - 1 - k) % 3]
        if order == 5:
            return b if k in (0, n - 1) else a
        if order == 6:
            return b if k == self.places[0] else a
        return a

    def index(self, k: int, length: int) -> int:
        """Which of a family's weights layer `k` reads."""
        n = self.depth
        found = {
            "own": k,
            "backwards": n - 1 - k,
            "by turns": k % 3,
            "twice": k // 2,
            "skewed": k + 2,
            "there and back": min(k, n - 1 - k),
            "tied in pairs": k - k % 2,
            "one tied": self.places[0] if k == self.places[1] else k,
            "one": 0,
            "mixed": k * 7 % n,
        }[str(self.indexing)]
        return min(found, length - 1)

    def model(self, params, x, shared, scalar, table):
        if self.named:
            params = {k: [f[f"layer{j}"] for j in range(len(f))] for k, f in params.items()}
        inputs = _Inputs(self, params, shared, scalar, table)
        states = [s(inputs, None, None, None) for s in self.states]
        seen, aux = [x], []
        for k in range(self.depth):
            inputs.k = k
            inputs.w = params["w"][self.index(k, len(params["w"]))]
            inputs.b = params["b"][self.index(k, len(params["b"]))]
            inputs.v = params["v"][k]
            before = x
            x = self.layer(k, x, inputs, seen)
            x = self.changed(k, x, before, inputs)
            states = [s(inputs, state, x, k) for s, state in zip(self.states, states, strict=True)]
            seen.append(x)
        loss = snp.sum(x * x)
        for tail in self.tails:
            term, more = tail(self, inputs, seen, params)
            loss = loss + term
            aux += more
        return loss, (x, states, aux)

    def layer(self, k, x, inputs, seen):
        kind = self.kind(k)
        if self.parts == "checkpoint":
            body = checkpoint(lambda x, w, b, v: kind(x, inputs.of(w, b, v), seen))
            return body(x, inputs.w, inputs.b, inputs.v)
        if self.parts == "vmap" and kind in (dense, gated, scaled, product):
            return vmap(lambda row: kind(row, inputs, seen))(x)
        return kind(x, inputs, seen)

    def changed(self, k, x, before, inputs):
        """One or two layers are different."""
        if self.difference is None or k not in self.places[:2]:
            return x
        return {
            "factor": lambda: x * 2.0,
            "same factor": lambda: x * 1.0,
            "residual": lambda: x + before,
            "bias": lambda: x + inputs.scalar,
            "nothing": lambda: before,
            "type": lambda: x.astype(snp.bfloat16).astype(snp.float32),
            "transposed twice": lambda: x.T.T,
            "order": lambda: inputs.scalar * x,
        }[str(self.difference)]()

    def function(self, params, *rest):
        if self.how == "forward":
            return self.model(params, *rest)
        if self.how == "all":
            return value_and_grad(self.model, argnums=(0, 1, 2), has_aux=True)(params, *rest)
        found = value_and_grad(self.model, has_aux=True)(params, *rest)
        if self.how == "gradient":
            return found
        grads = found[1]
        if self.how == "sgd":
            return found[0], tree_map(lambda p, g: p - 0.1 * g, params, grads)
        moved = tree_map(lambda p, g: 0.9 * p + g, params, grads)
        norm = sum(snp.sum(g * g) for g in _leaves(grads))
        return tree_map(lambda p, m: p - 0.1 * m / snp.sqrt(norm + 1.0), params, moved), moved


class _Inputs:
    """What a layer reads."""

    def __init__(self, drawn, params, shared, scalar, table):
        self.drawn, self.params = drawn, params
        self.shared, self.scalar, self.table = shared, scalar, table
        self.k, self.w, self.b, self.v = 0, params["w"][0], params["b"][0], params["v"][0]

    def of(self, w, b, v):
        found = _Inputs(self.drawn, self.params, self.shared, self.scalar, self.table)
        found.k, found.w, found.b, found.v = self.k, w, b, v
        return found


def _leaves(tree):
    return [a for f in tree.values() for a in (f.values() if isinstance(f, dict) else f)]


def _some(rng, items, count):
    return [items[k] for k in rng.integers(len(items), size=count)]


# ---- layers ------------------------------------------------------------------------------------


def dense(x, p, seen):
    return snp.tanh(x @ p.w + p.b)


def product(x, p, seen):
    return x @ p.w


def gated(x, p, seen):
    h = x @ p.w
    return h * nn.sigmoid(x @ p.v) + x


def scaled(x, p, seen):
    return snp.sin(x * p.b) + x * p.drawn.literal


def shared(x, p, seen):
    return snp.tanh(x @ p.shared)


def shared_turned(x, p, seen):
    return snp.tanh(p.shared @ x.T).T * p.b


def weightless(x, p, seen):
    return snp.sin(x) - p.drawn.literal * x


def negative(x, p, seen):
    return -(x @ p.w)


def reversed_rows(x, p, seen):
    return (x @ p.w)[::-1]


def skipping(x, p, seen):
    back = seen[-3] if len(seen) > 2 else seen[0]
    return snp.tanh(x @ p.w) + 0.5 * back


def first_again(x, p, seen):
    return snp.tanh(x @ p.w) + seen[0] * p.scalar


def normed(x, p, seen):
    x = (x - x.mean(-1, keepdims=True)) / snp.sqrt(x.var(-1, keepdims=True) + 1e-3)
    return x @ p.w + p.b


def attention(x, p, seen):
    scores = nn.softmax(snp.where(snp.tril(snp.ones((ROWS, ROWS), bool)), x @ p.w @ x.T, -1e9))
    return x + scores @ (x @ p.v)


def position(x, p, seen):
    return snp.tanh(x @ p.w) + p.table[p.k]


def looped(x, p, seen):
    return lax.fori_loop(0, 2, lambda _, h: snp.tanh(h @ p.w), x)


def growing(x, p, seen):
    return x * p.b + float(p.k)


def halves(x, p, seen):
    a, b = snp.split(x, 2, axis=-1)
    return snp.concatenate([b, a + snp.tanh(b * p.b[:4])], axis=-1)


def max_pooled(x, p, seen):
    return nn.relu(x @ p.w) - x.max(0)


LAYERS = (dense, dense, product, gated, scaled, shared, shared_turned, weightless, negative)
LAYERS += (reversed_rows, skipping, first_again, normed, attention, position, looped, growing)
LAYERS += (halves, max_pooled)
DIFFERENCES = ("factor", "same factor", "residual", "bias", "nothing", "type", "transposed twice")
DIFFERENCES += ("order",)
INDEXINGS = ("backwards", "by turns", "twice", "skewed", "there and back", "tied in pairs")
INDEXINGS += ("one tied", "one", "mixed")


# ---- what is carried along besides: the first value if there is none yet, else the next one ------


def total(p, state, x, k):
    return snp.zeros(()) if k is None else state + snp.mean(x * x)


def decay(p, state, x, k):
    return snp.ones(()) if k is None else state * 0.9


def chain(p, state, x, k):
    return p.scalar if k is None else state * p.scalar + p.shared[0, 0]


def chain_of_weights(p, state, x, k):
    return p.shared[0] if k is None else snp.tanh(state) * p.b


def counter(p, state, x, k):
    return snp.zeros((), snp.int32) if k is None else state + 1


def counted(p, state, x, k):
    """A choice that depends on a number that is known."""
    if k is None:
        return snp.zeros((), snp.int32), p.shared
    count, y = state
    return count + 1, snp.where(count < 20, snp.tanh(y), y * p.scalar)


def turned(p, state, x, k):
    return p.shared if k is None else state.T


def negated(p, state, x, k):
    return p.shared if k is None else -state


def turned_product(p, state, x, k):
    return p.shared if k is None else (state @ p.shared).T


def weights_penalty(p, state, x, k):
    return snp.zeros(()) if k is None else state + snp.sum(p.w * p.w)


def swapped(p, state, x, k):
    if k is None:
        return p.shared[0], p.shared[1]
    return state[1], state[0] * p.scalar + p.b


def random_walk(p, state, x, k):
    return p.shared[0] if k is None else state + snp.cumsum(p.b)[::-1]


STATES = (total, decay, chain, chain_of_weights, counter, counted, turned, negated)
STATES += (turned_product, weights_penalty, swapped, random_walk)


# ---- tails: a term of the loss, and more results -------------------------------------------------


def last_weights(drawn, p, seen, params):
    count = int(drawn.places[0] % 5) + 1
    return sum(snp.sum(w @ w) for w in params["w"][-count:]), []


def first_weights(drawn, p, seen, params):
    count = int(drawn.places[1] % 5) + 1
    return sum(snp.sum(w * w) for w in params["v"][:count]), []


def all_weights(drawn, p, seen, params):
    return 0.1 * sum(snp.sum(w * w) for w in params["w"]), []


def weights_from_one(drawn, p, seen, params):
    t = snp.zeros(())
    for b in params["b"][1 + drawn.places[0] % 2 :]:
        t = t + b[0] * b[1]
    return t, []


def all_seen(drawn, p, seen, params):
    return 0.0, list(seen[1:])


def every_other_seen(drawn, p, seen, params):
    return 0.0, list(seen[1::2])


def stacked(drawn, p, seen, params):
    return 0.0, [snp.stack(seen)]


def one_seen(drawn, p, seen, params):
    return snp.sum(seen[drawn.places[2]] * p.scalar), []


def one_near_the_end(drawn, p, seen, params):
    return snp.sum(seen[-1 - drawn.places[2] % 6] * p.scalar), []


def decoder(drawn, p, seen, params):
    """The way back of a network in the shape of a U."""
    y = seen[-1] @ seen[-1].T
    for s in seen[-1 - drawn.places[0] % 6 :][::-1]:
        y = snp.tanh(y @ y) * (s @ s.T)
    return snp.sum(y), [y]


def second_half(drawn, p, seen, params):
    """As many layers again, in the other order."""
    y = seen[-1]
    for w, v in zip(params["w"][::-1], params["v"], strict=False):
        y = snp.tanh(y @ w) + v[0]
    return snp.sum(y), []


def more_of_the_same(drawn, p, seen, params):
    y = seen[-1]
    for w in params["w"][-3:]:
        y = snp.tanh(y @ w)
    return snp.sum(y), [y]


def inputs_as_results(drawn, p, seen, params):
    return 0.0, [*params["b"], seen[-1], p.shared]


def sums_of_seen(drawn, p, seen, params):
    return 0.0, [sum(snp.sum(s) for s in seen[1:]), seen[0]]


def chain_of_scalars(drawn, p, seen, params):
    s = p.scalar
    for _ in range(drawn.depth):
        s = s * p.scalar + 0.5
    return s, []


def running_max(drawn, p, seen, params):
    m = seen[0]
    for s in seen[1:]:
        m = snp.maximum(m, s)
    return snp.sum(m), [m]


TAILS = (last_weights, first_weights, all_weights, weights_from_one, all_seen, every_other_seen)
TAILS += (stacked, one_seen, one_near_the_end, decoder, second_half, more_of_the_same)
TAILS += (inputs_as_results, sums_of_seen, chain_of_scalars, running_max)
