"""Random SPMD programs: about twenty operations and collectives on values of changing shape.

`random_program(seed, n)` is a per-device function of one array, written in terms of a `lax` and a
`numpy` module. Every step keeps values near 1, so that rounding stays small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import spmd.numpy as snp
from spmd import lax

AXIS = "i"
STEPS = 20
Step = Callable[[list[Any]], Any]


def random_program(seed: int, n: int) -> Callable[[Any], Any]:
    """A function that runs `STEPS` random steps, each on values made before."""
    rng = np.random.default_rng([seed, n])
    recipe = [(int(rng.integers(len(MAKERS))), rng.integers(1 << 30, size=4)) for _ in range(STEPS)]

    def program(x: Any) -> Any:
        pool = [x]
        for kind, numbers in recipe:
            made = MAKERS[kind](pool, [int(k) for k in numbers], n)
            if made is not None and made.size <= 4096:
                pool.append(made)
        return sum(calm(v).sum() for v in pool), pool[-1], pool[len(pool) // 2]

    return program


def calm(x: Any) -> Any:
    """Bounded and smooth."""
    return snp.tanh(x) + 0.1 * x


def pick(pool: list[Any], number: int) -> Any:
    """A value made before; late ones more often."""
    return pool[-1 - (number % len(pool)) % 4] if len(pool) >= 4 else pool[number % len(pool)]


def some_perm(number: int, n: int) -> list[int]:
    return [int(k) for k in np.random.default_rng(number).permutation(n)]


# ---- steps -------------------------------------------------------------------------------------


def unary(pool: list[Any], k: list[int], n: int) -> Any:
    f = (calm, snp.sin, snp.cos, lambda x: x * 0.7 - 0.1, lambda x: x / (1 + abs(x)))[k[0] % 5]
    return f(pick(pool, k[1]))


def binary(pool: list[Any], k: list[int], n: int) -> Any:
    x = pick(pool, k[0])
    y = next((v for v in pool[::-1] if v.shape == x.shape and v is not x), calm(x))
    f = (snp.add, snp.subtract, snp.multiply, snp.maximum)[k[2] % 4]
    return calm(f(x, y))


def reduction(pool: list[Any], k: list[int], n: int) -> Any:
    x = pick(pool, k[0])
    axis = k[1] % x.ndim if x.ndim else None
    return calm(snp.sum(x, axis) if k[2] % 2 else snp.max(x, axis)) if x.ndim > 1 else None


def shape(pool: list[Any], k: list[int], n: int) -> Any:
    x = pick(pool, k[0])
    return (lambda x: x.T, lambda x: x.reshape(-1), lambda x: x[..., ::-1])[k[1] % 3](x)


def product(pool: list[Any], k: list[int], n: int) -> Any:
    x = pick(pool, k[0])
    return calm(x @ x.T) * 0.3 if x.ndim == 2 else None


def reduce_over_devices(pool: list[Any], k: list[int], n: int) -> Any:
    f = (lax.psum, lax.pmean, lax.pmax, lax.pmin)[k[0] % 4]
    groups = None
    if n % 2 == 0 and k[2] % 4 == 0:
        groups = np.array(some_perm(k[3], n)).reshape(2, -1).tolist()
    return calm(f(pick(pool, k[1]), AXIS, axis_index_groups=groups))


def move(pool: list[Any], k: list[int], n: int) -> Any:
    order = some_perm(k[0], n)
    return lax.pshuffle(pick(pool, k[1]), AXIS, order)


def move_some(pool: list[Any], k: list[int], n: int) -> Any:
    pairs = list(zip(some_perm(k[0], n), some_perm(k[2], n), strict=True))[: n // 2]
    return lax.ppermute(pick(pool, k[1]), AXIS, pairs)


def gather(pool: list[Any], k: list[int], n: int) -> Any:
    x = pick(pool, k[0])
    if x.ndim > 2:
        return None
    axis = k[1] % max(x.ndim, 1)
    return lax.all_gather(x, AXIS, axis=axis, tiled=bool(x.ndim and k[2] % 2)) * 0.5


def scatter(pool: list[Any], k: list[int], n: int) -> Any:
    x = pick(pool, k[0])
    dims = [d for d in range(x.ndim) if x.shape[d] % n == 0]
    if not dims:
        return None
    dim = dims[k[1] % len(dims)]
    return calm(lax.psum_scatter(x, AXIS, scatter_dimension=dim, tiled=True))


def exchange(pool: list[Any], k: list[int], n: int) -> Any:
    x = pick(pool, k[0])
    dims = [d for d in range(x.ndim) if x.shape[d] % n == 0]
    if not dims:
        return None
    return lax.all_to_all(x, AXIS, dims[k[1] % len(dims)], k[2] % x.ndim, tiled=True)


def place(pool: list[Any], k: list[int], n: int) -> Any:
    return calm(pick(pool, k[0]) + 0.1 * lax.axis_index(AXIS))


def loop(pool: list[Any], k: list[int], n: int) -> Any:
    """A scan that communicates in each round: its carry varies over the devices."""
    x = pick(pool, k[0]) + 0.0 * lax.axis_index(AXIS)
    ring = [(d, (d + 1 + k[1] % n) % n) for d in range(n)]

    def step(carry: Any, t: Any) -> Any:
        carry = calm(lax.ppermute(carry, AXIS, ring) + t)
        return carry, lax.pmean(carry, AXIS)

    last, seen = lax.scan(step, x, snp.arange(3, dtype=np.float32))
    return last if k[2] % 2 else seen.mean(0)


def branch(pool: list[Any], k: list[int], n: int) -> Any:
    """A branch by device without collectives."""
    x = pick(pool, k[0])
    return lax.cond(lax.axis_index(AXIS) % 2 == k[1] % 2, calm, lambda x: x * 0.5, x)


MAKERS = [
    unary,
    binary,
    binary,
    reduction,
    shape,
    product,
    reduce_over_devices,
    reduce_over_devices,
    move,
    move_some,
    gather,
    scatter,
    exchange,
    place,
    loop,
    branch,
]


def example(seed: int, n: int) -> np.ndarray:
    """An operand for each device."""
    return np.random.default_rng([seed, n, 1]).normal(size=(n, 2 * n, 3)).astype(np.float32)
