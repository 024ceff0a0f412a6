"""Random differentiable programs with control flow, in either library.

`RandomProgram(seed)(j, floats, index)` runs fifty random operations of the library `j` (as
in tests/jax/compare.py) on a tree of floating arrays and an integer. All of them are smooth almost
everywhere, and keep values bounded: derivatives can be compared with finite differences.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SHAPES = ((), (3,), (2, 3), (3, 3))
LENGTH = 50


class RandomProgram:
    """A program that is the same whenever it is run: its choices depend on the seed alone."""

    def __init__(self, seed: int, length: int = LENGTH):
        self.seed = seed
        self.length = length

    def arguments(self, dtype: Any = np.float32) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Example arguments: a dict of one array of each shape, and an integer."""
        rng = np.random.default_rng(self.seed)
        floats = {f"x{len(s)}{s[0] if s else 0}": rng.uniform(-1, 1, s) for s in SHAPES}
        return {k: v.astype(dtype) for k, v in floats.items()}, np.int32(rng.integers(3))

    def __call__(self, j: Any, floats: Any, index: Any) -> Any:
        rng = np.random.default_rng([self.seed, 1])
        values = [j.np.asarray(floats[k]) for k in sorted(floats)]
        index = j.np.asarray(index)
        for _ in range(self.length):
            make = OPERATIONS[int(rng.integers(len(OPERATIONS)))]
            values.append(make(j, rng, pick(rng, values), values, index))
        return {"last": values[-1], "some": [pick(rng, values), pick(rng, values[-5:])]}

    def loss(self, j: Any, floats: Any, index: Any) -> Any:
        """One number that depends on all results."""
        out = self(j, floats, index)
        return sum((j.np.sin(x + 0.3) * x).sum() for x in (out["last"], *out["some"]))


def pick(rng: Any, values: list[Any]) -> Any:
    """A value, more likely a late one."""
    k = max(rng.integers(len(values)), rng.integers(len(values)))
    return values[int(k)]


def like(rng: Any, x: Any, values: list[Any]) -> Any:
    """A value of the same shape; perhaps `x` itself."""
    return pick(rng, [v for v in values if np.shape(v) == np.shape(x)] or [x])


# ---- operations --------------------------------------------------------------------------------


def unary(j, rng, x, values, index):
    return getattr(j.np, str(rng.choice(["sin", "cos", "tanh", "arctan", "square"])))(x * 0.9)


def binary(j, rng, x, values, index):
    y = like(rng, x, values)
    choice = rng.integers(4)
    return [j.np.tanh(x + y), x * j.np.cos(y), j.np.sin(x - y), x / (1 + y * y)][int(choice)]


def with_scalar(j, rng, x, values, index):
    scalars = [v for v in values if np.shape(v) == ()]
    return j.np.tanh(x * pick(rng, scalars) + float(rng.uniform(-1, 1)))


def reduce(j, rng, x, values, index):
    if not x.ndim:
        return j.np.sin(x)
    return j.np.tanh(x.sum(axis=int(rng.integers(x.ndim)), keepdims=True) + x)


def total(j, rng, x, values, index):
    return j.np.tanh(x.mean()) if rng.integers(2) else j.np.tanh(x.max())


def softmax(j, rng, x, values, index):
    if not x.ndim:
        return j.np.cos(x)
    e = j.np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def move(j, rng, x, values, index):
    choice = int(rng.integers(3))
    if not x.ndim:
        return j.np.broadcast_to(x, (3,)) * j.np.arange(3.0).astype(x.dtype)
    if choice == 0:
        return j.np.flip(x, axis=0)
    if choice == 1 and x.ndim == 2:
        return x.T.reshape(x.shape)
    return j.np.roll(x, 1, axis=-1)


def index_into(j, rng, x, values, index):
    if not x.ndim:
        return x * index
    return j.np.sin(x[index % x.shape[0]] + x[..., -1:].sum())


def update(j, rng, x, values, index):
    if not x.ndim:
        return x + index
    return j.np.tanh(x.at[index % x.shape[0]].add(x[0] * x[-1]).at[0].multiply(0.5))


def product(j, rng, x, values, index):
    if x.ndim != 2:
        return j.np.tanh(x * x)
    return j.np.tanh(x @ x.T @ x)


def running(j, rng, x, values, index):
    return j.np.tanh(j.np.cumsum(x, axis=0)) if x.ndim else j.np.arctan(x)


def choose(j, rng, x, values, index):
    return j.np.where(index > int(rng.integers(3)), x, j.np.sin(like(rng, x, values)))


def branch(j, rng, x, values, index):
    y = like(rng, x, values)
    return j.lax.cond(index > int(rng.integers(3)), lambda x: j.np.sin(x) * y, lambda x: x + y, x)


def several(j, rng, x, values, index):
    y = like(rng, x, values)
    return j.lax.switch(
        index, [lambda x, y: x * y, lambda x, y: j.np.cos(x), lambda x, y: j.np.tanh(y + x)], x, y
    )


def loop(j, rng, x, values, index):
    y = like(rng, x, values)
    return j.lax.fori_loop(0, 3, lambda i, c: j.np.sin(c * y + i * x), x)


def scan(j, rng, x, values, index):
    """A recurrence over the leading dim, with a counter, a constant, and rows going both ways."""
    if not x.ndim:
        return j.np.cos(x)
    y = like(rng, x, values)

    def body(carry, row):
        k, c = carry
        c = j.np.tanh(c * row[0] + row[1] * (1 + k) + y.sum())
        return (k + 1, c), (c, row[0] * c)

    if rng.integers(2):
        body = j.checkpoint(body)
    (_, last), (first, second) = j.lax.scan(
        body, (0, x[0]), (x, y), reverse=bool(rng.integers(2)), unroll=int(rng.integers(1, 3))
    )
    return j.np.tanh(first + second * last)


def nested(j, rng, x, values, index):
    def body(c, k):
        inner = j.lax.fori_loop(0, 2, lambda i, d: j.np.sin(d + k * x), c)
        return j.lax.cond(k > 1, lambda: inner, lambda: inner * c), None

    return j.lax.scan(body, x, j.np.arange(3))[0]


def data_loop(j, rng, x, values, index):
    """A loop that data end; no derivative goes through it."""

    def step(c):
        return c[0] * 0.5 + 0.1 * c[1], c[1] + 1

    value, count = j.lax.while_loop(lambda c: c[1] < index + 2, step, (j.np.ones((), x.dtype), 0))
    return j.np.sin(x * value + count)


def call(j, rng, x, values, index):
    y = like(rng, x, values)
    return j.jit(lambda a, b: (j.np.sin(a) * b, j.np.cos(y)))(x, y)[int(rng.integers(2))]


def again(j, rng, x, values, index):
    y = like(rng, x, values)
    policy = rng.choice([None, j.checkpoint_policies.dots_saveable])
    return j.checkpoint(lambda a: j.np.sin(j.np.sin(a * y) + a), policy=policy)(x)


def over_rows(j, rng, x, values, index):
    if x.ndim != 2:
        return j.np.arctan(x)
    axis = int(rng.integers(2))
    return j.vmap(lambda r: j.np.tanh(r * r.sum() + index), in_axes=axis, out_axes=axis)(x)


def own_rule(j, rng, x, values, index):
    """A function with a rule that uses a loop over the tangent."""

    @j.custom_jvp
    def f(a, b):
        return j.np.sin(a) * b

    @f.defjvp
    def rule(primals, tangents):
        (a, b), (ta, tb) = primals, tangents
        slope = j.lax.fori_loop(0, 1, lambda i, t: t * j.np.cos(a), ta)
        return f(a, b), slope * b + j.np.sin(a) * tb

    return f(x, like(rng, x, values))


def prefix(j, rng, x, values, index):
    if not x.ndim:
        return j.np.sin(x)
    return j.np.tanh(j.lax.associative_scan(lambda a, b: a * b + b, x))


OPERATIONS = (
    unary, binary, binary, with_scalar, reduce, total, softmax, move, index_into, update, product,
    running, choose, branch, several, loop, scan, nested, data_loop, call, again, over_rows,
    own_rule, prefix,
)  # fmt: skip
