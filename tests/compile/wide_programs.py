"""Random wide programs: many dims, of sizes that no vector divides, whose values cross each other.

`WideProgram(seed)(*arguments)` runs random operations of `spmd.numpy` and `spmd.lax` on floats,
integers and booleans of up to five dims: indexing of all kinds, scatters, sorts, windows, products
with batches, loops and branches around them. A value carries a bound of its elements, so that
bounded values flow on as they are, and fusion sees more than a `tanh` between any two operations.
Integers and booleans are made of integers only: a rounding decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import lax, nn

DIMS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 33, 64, 97, 127, 257)
MOST_ELEMENTS = 30_000
# Values are brought back to a few units when they may have become as large as this.
FLOAT_BOUND, INTEGER_BOUND = 50, 10**6


class Value:
    """An array, its kind (f, i or b), and a bound of the magnitudes of its elements."""

    def __init__(self, x: Any, kind: str, bound: float):
        self.x, self.kind, self.bound = x, kind, bound

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape)

    @property
    def ndim(self) -> int:
        return self.x.ndim

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def moved(self, x: Any) -> Value:
        """The same elements, or some of them, elsewhere."""
        return Value(x, self.kind, self.bound)


class WideProgram:
    """A program whose choices depend on the seed alone; small ones have few elements."""

    def __init__(self, seed: int, length: int, small: bool = False):
        self.seed, self.length = seed, length
        rng = np.random.default_rng([seed, 0])
        self.most = 600 if small else MOST_ELEMENTS
        # Few sizes in a program, so that shapes meet.
        self.dims = [int(d) for d in rng.choice(DIMS[:9] if small else DIMS, 3, replace=False)]
        self.rng, self.values = rng, []

    def arguments(self) -> list[np.ndarray]:
        """Three float arrays, one of integers, and a float."""
        rng = np.random.default_rng([self.seed, 1])
        out = []
        for _ in range(3):
            shape = tuple(int(d) for d in rng.choice(self.dims, int(rng.integers(1, 4))))
            while np.prod(shape) > self.most:
                shape = shape[1:]
            out.append(rng.uniform(-1, 1, shape).astype(np.float32))
        count = int(rng.choice(self.dims[:2]))
        number = np.float32(rng.uniform(0.5, 1))
        return [*out, rng.integers(-5, 12, count).astype(np.int32), np.asarray(number)]

    def __call__(self, *args: Any) -> list[Any]:
        self.rng = np.random.default_rng([self.seed, 2])
        kinds, bounds = "fffif", (1, 1, 1, 12, 1)
        arrays = zip(map(snp.asarray, args), kinds, bounds, strict=True)
        self.values = [Value(*given) for given in arrays]
        self.grow(OPERATIONS)
        count = min(int(self.rng.integers(1, 5)), len(self.values))
        picked = self.rng.choice(len(self.values), count, replace=False)
        return [*(self.values[int(k)].x for k in picked), self.values[-1].x]

    def grow(self, operations: Any) -> None:
        for _ in range(self.length):
            make = operations[int(self.rng.integers(len(operations)))]
            made = make(self, self.pick())
            for value in made if isinstance(made, list) else [made]:
                if value is not None and 0 < value.size <= self.most and value.ndim <= 5:
                    self.values.append(self.tamed(value))

    def tamed(self, v: Value) -> Value:
        """The value, or a function of it with a smaller bound."""
        if v.kind == "i" and v.bound > INTEGER_BOUND:
            return Value(v.x % 17, "i", 17)
        if v.kind != "f" or v.bound <= FLOAT_BOUND:
            return v
        choice = int(self.rng.integers(4))
        if choice == 0:
            return Value(snp.tanh(v.x), "f", 1)
        if choice == 1:
            return Value(v.x / (1 + v.x * v.x), "f", 1)
        if choice == 2:
            return Value(snp.clip(v.x, -2.0, 2.0), "f", 2)
        return Value(v.x * (2 / v.bound), "f", 2)

    def keeping_shape(self) -> Callable[[Any, Any], Any]:
        """A random function of an array and an integer that returns an array of the same shape."""
        seed = int(self.rng.integers(1 << 30))
        inner = WideProgram(seed, int(self.rng.integers(2, 8)))
        inner.dims, inner.most = self.dims, self.most

        def f(x: Any, k: Any) -> Any:
            if not x.ndim:
                return snp.sin(x) + 0.1 * k
            inner.rng = np.random.default_rng(seed)
            count = snp.reshape(snp.asarray(k, "int32"), (1,))
            inner.values = [Value(snp.asarray(x), "f", 2), Value(count, "i", 4)]
            inner.grow(FLAT_OPERATIONS)
            floats = [v for v in inner.values if v.kind == "f"]
            same = [v for v in floats if v.shape == tuple(x.shape)]
            return 2 * snp.tanh(0.5 * same[-1].x + snp.tanh(floats[-1].x.mean()))

        return f

    # -- choices --

    def pick(self, kind: str | None = None) -> Value:
        """A value, more likely a late one."""
        given = [v for v in self.values if kind in (None, v.kind)]
        return given[int(self.rng.integers(len(given), size=2).max())]

    def like(self, x: Value) -> Value:
        """A value of the same kind and shape; perhaps `x` itself."""
        given = [v for v in self.values if (v.kind, v.shape) == (x.kind, x.shape)] or [x]
        return given[int(self.rng.integers(len(given)))]

    def index(self) -> Any:
        """An integer that only the arguments know."""
        return self.pick("i").x.reshape(-1)[0]

    def one(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def axis(self, x: Value) -> int:
        return int(self.rng.integers(x.ndim))

    def coin(self) -> bool:
        return bool(self.rng.integers(2))


def of_floats(operation: Any) -> Any:
    """An operation that is given a float array of rank one or more."""

    def given_floats(p: WideProgram, x: Value) -> Any:
        x = x if x.kind == "f" else p.pick("f")
        return operation(p, x) if x.ndim else Value(snp.sin(x.x), "f", 1)

    return given_floats


def of_arrays(operation: Any) -> Any:
    """An operation that is given an array of rank one or more, of any kind."""
    return lambda p, x: operation(p, x) if x.ndim else None


# ---- operations --------------------------------------------------------------------------------


@of_floats
def elementwise(p, x):
    y = p.like(x)
    return p.one(
        Value(x.x + y.x, "f", x.bound + y.bound),
        Value(x.x * y.x, "f", x.bound * y.bound),
        Value(snp.maximum(x.x, y.x), "f", max(x.bound, y.bound)),
        Value(x.x / (1 + y.x * y.x), "f", x.bound),
        Value(snp.exp(x.x / x.bound), "f", 3),
        Value(lax.rsqrt(x.x * x.x + 0.2), "f", 3),
        Value(nn.sigmoid(x.x) * float(p.rng.uniform(-1, 1)), "f", 1),
    )


@of_floats
def outer(p, x):
    y = p.pick("f")
    if x.size * y.size > p.most:
        return None
    return Value(x.x[(..., *[None] * y.ndim)] * y.x, "f", x.bound * y.bound)


@of_arrays
def reduced(p, x):
    axes = tuple(d for d in range(x.ndim) if p.coin()) or (p.axis(x),)
    how = {"axis": p.one(axes, axes, None), "keepdims": p.coin()}
    if x.kind == "b":
        return Value(p.one(snp.any, snp.all)(x.x, **how), "b", 1)
    if x.kind == "f" and p.coin():
        return Value(nn.logsumexp(x.x, **how), "f", x.bound + 12)
    return p.one(
        Value(snp.sum(x.x, **how), x.kind, x.bound * x.size),
        x.moved(snp.max(x.x, **how)),
        x.moved(snp.min(x.x, **how)),
    )


@of_floats
def normalised(p, x):
    axis = p.axis(x)
    centred = x.x - x.x.mean(axis, keepdims=True)
    spread = (centred * centred).mean(axis, keepdims=True)
    return p.one(
        Value(nn.softmax(x.x, axis), "f", 1),
        Value(nn.log_softmax(x.x, axis), "f", 2 * x.bound + 12),
        Value(centred * lax.rsqrt(spread + 0.1), "f", 6 * x.bound),
    )


@of_floats
def masked(p, x):
    axis = p.axis(x)
    at = lax.broadcasted_iota("int32", x.shape, axis)
    mask = p.one(
        at % 3 != 1, at <= lax.broadcasted_iota("int32", x.shape, p.axis(x)), at > p.index()
    )
    y = p.like(x)
    total = Value(snp.sum(x.x, axis, where=mask), "f", x.bound * x.shape[axis])
    return [Value(snp.where(mask, x.x, y.x), "f", max(x.bound, y.bound)), total]


@of_arrays
def moved(p, x):
    axis, size = p.axis(x), int(p.one(1, 2, *p.dims))
    merged = (*x.shape[:axis], -1, *x.shape[axis + 2 :])
    wide = (*x.shape[:axis], size, *x.shape[axis:])
    return x.moved(
        p.one(
            lambda: snp.transpose(x.x, [int(d) for d in p.rng.permutation(x.ndim)]),
            lambda: snp.flip(x.x, axis),
            lambda: snp.roll(x.x, int(p.rng.integers(-5, 6)), axis),
            lambda: snp.reshape(x.x, merged),
            lambda: snp.broadcast_to(snp.expand_dims(x.x, axis), wide),
        )()
    )


@of_arrays
def cut(p, x):
    index: list[Any] = []
    for size in x.shape:
        low = int(p.rng.integers(size))
        high = int(p.rng.integers(low + 1, size + 1))
        back = slice(high - 1, low - 1 if low else None, -2)
        forth = slice(low, high, int(p.rng.integers(1, 4)))
        index.append(p.one(slice(None), forth, slice(None, None, -1), back, low))
    return x.moved(x.x[tuple(index)])


@of_arrays
def joined(p, x):
    axis, y = p.axis(x), p.like(x)
    both = [x.x, y.x, snp.flip(x.x, axis)]
    join = snp.stack if p.coin() else snp.concatenate
    return Value(join(both, axis), x.kind, max(x.bound, y.bound))


@of_floats
def padded(p, x):
    if p.coin():
        return x.moved(snp.pad(x.x, min(2, *x.shape) - 1, p.one("edge", "reflect", "wrap")))
    config = [(int(p.rng.integers(4)), int(p.rng.integers(4)), p.one(0, 0, 1, 2)) for _ in x.shape]
    return x.moved(lax.pad(x.x, np.float32(0.5), config))


@of_arrays
def gathered(p, x):
    axis = p.axis(x)
    size = x.shape[axis]
    rows = p.rng.integers(-x.shape[0], x.shape[0], int(p.rng.integers(1, 40)))
    each = p.rng.integers(0, size, x.shape)
    sizes = [int(p.rng.integers(1, n + 1)) for n in x.shape]
    return x.moved(
        p.one(
            lambda: snp.take(x.x, p.pick("i").x.reshape(-1)[:40], axis, mode=p.one("clip", "wrap")),
            lambda: x.x[snp.asarray(rows)],
            lambda: snp.take_along_axis(x.x, snp.asarray(each), axis),
            lambda: lax.dynamic_slice(x.x, [p.index()] * x.ndim, sizes),
        )()
    )


@of_floats
def scattered(p, x):
    given = p.pick("i").x.reshape(-1)[:9]
    count = given.shape[0]
    weights = snp.reshape(snp.arange(1.0, count + 1), (count, *[1] * (x.ndim - 1)))
    at = getattr(x.x.at[given], p.one("add", "set", "max", "min"))
    part = x.x[tuple(slice(0, max(1, n // 2)) for n in x.shape)]
    return p.one(
        lambda: Value(at(0.5 * weights * x.x[:1]), "f", x.bound * (1 + count * count)),
        lambda: Value(x.x.at[::2].add(x.x[-1]), "f", 2 * x.bound),
        lambda: x.moved(lax.dynamic_update_slice(x.x, -part, [p.index()] * x.ndim)),
    )()


@of_floats
def product(p, x):
    """With any other value that has a dim of the same size; batched over another such dim."""
    others = [(y, a, b) for y in p.values[-12:] for a in range(x.ndim) for b in range(y.ndim)]
    others = [(y, a, b) for y, a, b in others if y.kind == "f" and x.shape[a] == y.shape[b]]
    if not others:
        return None
    y, a, b = others[int(p.rng.integers(len(others)))]
    same = [
        (c, d)
        for c in range(x.ndim)
        for d in range(y.ndim)
        if c != a and d != b and x.shape[c] == y.shape[d]
    ]
    batch = ((), ()) if not same else ((same[0][0],), (same[0][1],))
    size = x.size * y.size // x.shape[a] ** 2 // (x.shape[same[0][0]] if same else 1)
    if size > p.most:
        return None
    made = lax.dot_general(x.x, y.x, (((a,), (b,)), batch))
    return Value(made, "f", x.bound * y.bound * x.shape[a])


@of_arrays
def running(p, x):
    axis, back = p.axis(x), p.coin()
    if x.kind == "b":
        return Value(snp.where(x.x, 1, 0), "i", 1)
    if p.coin():
        return x.moved(p.one(lax.cummax, lax.cummin)(x.x, axis, reverse=back))
    return Value(lax.cumsum(x.x, axis, reverse=back), x.kind, x.bound * x.shape[axis])


@of_arrays
def ordered(p, x):
    axis = p.axis(x)
    if x.kind != "i" or p.coin():
        return x.moved(snp.sort(x.x, axis))
    found = p.one(snp.argsort, snp.argmax, snp.argmin)(x.x, axis)
    return Value(found, "i", x.shape[axis])


def integers(p, x):
    x = x if x.kind == "i" else p.pick("i")
    y = p.like(x)
    return p.one(
        Value(3 * x.x - y.x, "i", 3 * x.bound + y.bound),
        Value((x.x ^ (y.x << 2)) & 31, "i", 31),
        Value(x.x > y.x // 2, "b", 1),
        Value(x.x.astype("float32") * 0.1, "f", max(1, 0.1 * x.bound)),
    )


@of_floats
def windows(p, x):
    sizes = [int(p.rng.integers(1, min(4, n + 1))) for n in x.shape]
    steps = [int(p.rng.integers(1, 3)) for _ in sizes]
    kind = p.one("SAME", "VALID")
    if x.ndim in (2, 3) and p.coin() and x.shape[0] < 40:
        kernel = p.rng.normal(size=(3, x.shape[0], *sizes[1:])).astype(np.float32)
        found = lax.conv_general_dilated(x.x[None], kernel, steps[1:], kind)[0]
        return Value(found, "f", x.bound * 3 * kernel[0].size)
    if p.coin():
        return x.moved(lax.reduce_window(x.x, -np.inf, lax.max, sizes, steps, "VALID"))
    total = lax.reduce_window(x.x, 0.0, lax.add, sizes, steps, kind)
    return Value(total, "f", x.bound * float(np.prod(sizes)))


@of_floats
def controlled(p, x):
    """A loop, a branch or a map around some of the other operations."""
    f, k, axis, to = p.keeping_shape(), p.index(), p.axis(x), p.axis(x)

    def row(carry: Any, r: Any) -> Any:
        carry = f(carry, 1)
        return carry, (0.5 * carry, r.mean() + carry)

    def scanned() -> Any:
        last, (ys, zs) = lax.scan(row, x.x[0], x.x, reverse=p.coin())
        return [Value(v, "f", bound) for v, bound in ((ys, 2), (zs, 2 + x.bound), (last, 2))]

    bound = max(2, x.bound)
    return p.one(
        lambda: Value(lax.fori_loop(0, 3, lambda i, c: f(c, i), x.x), "f", bound),
        scanned,
        lambda: Value(spmd.vmap(lambda r: f(r, 2), axis, to)(x.x), "f", bound),
        lambda: Value(lax.cond(k > 3, lambda v: f(v, 3), lambda v: 0.5 * v, x.x), "f", bound),
        lambda: Value(
            lax.while_loop(
                lambda c: c[1] < 3 + k % 3, lambda c: (f(c[0], c[1]), c[1] + 1), (x.x, 0)
            )[0],
            "f",
            bound,
        ),
    )()


FLAT_OPERATIONS = (
    elementwise, elementwise, elementwise, elementwise, outer, reduced, reduced, normalised,
    masked, moved, moved, moved, cut, cut, joined, joined, padded, gathered, gathered, scattered,
    scattered, product, running, ordered, integers, windows,
)  # fmt: skip
OPERATIONS = (*FLAT_OPERATIONS, controlled, controlled)
