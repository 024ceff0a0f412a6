"""Random long programs: chains, combs and trees of many equations, arguments and leaves.

`LongProgram(shape, seed, length)` runs `length` operations on its arguments. Values stay near one,
so that a program of thousands of operations neither overflows nor loses its digits, and so do its
derivatives: each operation is bounded, and changes its operand by little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import spmd.numpy as snp
from spmd import lax

SHAPES = ("chain", "comb", "tree", "mixed")

# Of a value, and of two.
UNARY: tuple[Callable[[Any, float], Any], ...] = (
    lambda x, c: snp.sin(x) + 0.1 * c,
    lambda x, c: snp.tanh(x * (1 + 0.01 * c)),
    lambda x, c: x * 0.9 + c * 0.05,
    lambda x, c: snp.where(x > c, x, 0.5 * x + 0.5 * c),
    lambda x, c: snp.cos(x[::-1]),
    lambda x, c: x - 0.5 * x.mean(),
    lambda x, c: snp.exp(-x * x) - c * 0.1,
    lambda x, c: lax.rsqrt(1 + x * x),
    lambda x, c: snp.concatenate([x[1:], x[:1]]) * 0.95,
    lambda x, c: x.at[0].set(c),
)
BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: 0.5 * (x + y),
    lambda x, y: snp.tanh(x - y),
    lambda x, y: snp.sin(x) * y,
    lambda x, y: snp.maximum(x, y) * 0.9,
    lambda x, y: x / (1 + y * y),
)


class LongProgram:
    """A program whose choices depend on the seed alone."""

    def __init__(self, shape: str, seed: int, length: int, operands: int = 2):
        self.shape, self.length, self.operands = shape, length, operands
        rng = np.random.default_rng([seed, 7])
        self.kinds = rng.integers(0, 1 << 16, length)
        self.numbers = np.round(rng.uniform(-1, 1, length), 3).tolist()
        # Of a mixed program: how far back the second operand lies.
        self.back = rng.integers(1, 40, length)
        self.inputs = rng.uniform(-1, 1, (operands, 8)).astype(np.float32)

    def __call__(self, *xs: Any) -> Any:
        return getattr(self, f"_{self.shape}")(list(xs))

    def _one(self, k: int, x: Any) -> Any:
        return UNARY[self.kinds[k] % len(UNARY)](x, self.numbers[k])

    def _two(self, k: int, x: Any, y: Any) -> Any:
        return BINARY[self.kinds[k] % len(BINARY)](x, y)

    def _chain(self, xs: list[Any]) -> Any:
        """Each operation on the result of the one before."""
        x = self._sum(xs)
        for k in range(self.length):
            x = self._one(k, x)
        return x

    def _comb(self, xs: list[Any]) -> Any:
        """One value, and the arguments in turn."""
        x = self._sum(xs)
        for k in range(self.length):
            x = self._two(k, x, xs[k % len(xs)])
        return x

    def _tree(self, xs: list[Any]) -> Any:
        """Neighbours by pairs, until one value is left."""
        count = max(self.length // 2, 1)
        level = [xs[k % len(xs)] * (1 + 0.001 * (k % 7)) for k in range(count)]
        k = 0
        while len(level) > 1:
            pairs = list(zip(level[::2], level[1::2], strict=False))
            rest = level[2 * len(pairs) :]
            level = [self._two((k := (k + 1) % self.length), *pair) for pair in pairs] + rest
        return level[0]

    def _mixed(self, xs: list[Any]) -> Any:
        """Each operation on some of the results before, which others read too."""
        values = list(xs)
        for k in range(self.length):
            if self.kinds[k] % 3:
                values.append(self._one(k, values[-1]))
            else:
                values.append(self._two(k, values[-1], values[-min(self.back[k], len(values))]))
        return values[-1]

    def _sum(self, xs: Sequence[Any]) -> Any:
        """The mean of all arguments, added one by one."""
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        return total * (1 / len(xs))
