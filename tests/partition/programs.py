"""Random programs for the partitioner: a few operations on a few arrays, as a table by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import debug, lax, nn


def auto_mesh(sizes: Sequence[int], names: Sequence[str]) -> spmd.Mesh:
    """A mesh along whose axes the compiler decides how values are laid out."""
    return spmd.make_mesh(sizes, names, spmd.sharding.AxisType.Auto)


Operation = Callable[[np.random.Generator, list[Any]], Any]


def _one(rng: np.random.Generator, values: list[Any], least: int = 0) -> Any:
    found = [x for x in values if x.ndim >= least]
    return found[rng.integers(len(found))] if found else None


def _pair(rng: np.random.Generator, values: list[Any]) -> tuple[Any, Any] | None:
    """Two values of one shape."""
    x = _one(rng, values)
    same = [y for y in values if y.shape == x.shape]
    return x, same[rng.integers(len(same))]


def _elementwise(rng: np.random.Generator, values: list[Any]) -> Any:
    f = [snp.tanh, snp.sin, lambda x: x * 2 + 1, nn.relu, lambda x: -x, abs, snp.exp2]
    return f[rng.integers(len(f))](snp.clip(_one(rng, values), -4, 4))


def _binary(rng: np.random.Generator, values: list[Any]) -> Any:
    x, y = _pair(rng, values)
    f = [snp.add, snp.subtract, snp.multiply, snp.maximum, lambda x, y: snp.where(x > 0, x, y)]
    return f[rng.integers(len(f))](x, y)


def _outer(rng: np.random.Generator, values: list[Any]) -> Any:
    x = _one(rng, values, 1)
    return x - snp.mean(x, axis=int(rng.integers(x.ndim)), keepdims=True)


def _matmul(rng: np.random.Generator, values: list[Any]) -> Any:
    x = _one(rng, values, 2)
    if x is None:
        return None
    for y in rng.permutation(len(values)):
        if values[y].ndim == 2 and values[y].shape[0] == x.shape[-1]:
            return snp.matmul(x, values[y]) / 4
    return snp.matmul(x, snp.swapaxes(x, -1, -2)) / 4


def _reduce(rng: np.random.Generator, values: list[Any]) -> Any:
    x = _one(rng, values, 1)
    f = [snp.sum, snp.max, snp.min, snp.mean, snp.prod, snp.var]
    return f[rng.integers(len(f))](snp.tanh(x), axis=int(rng.integers(x.ndim)))


def _transpose(rng: np.random.Generator, values: list[Any]) -> Any:
    x = _one(rng, values, 1)
    return snp.transpose(x, tuple(map(int, rng.permutation(x.ndim))))


def _reshape(rng: np.random.Generator, values: list[Any]) -> Any:
    x = _one(rng, values, 1)
    shape = list(x.shape)
    d = int(rng.integers(len(shape)))
    if rng.integers(2) and len(shape) > 1 and d + 1 < len(shape):
        shape[d : d + 2] = [shape[d] * shape[d + 1]]
    elif shape[d] % 4 == 0 and len(shape) < 4:
        shape[d : d + 1] = [4, shape[d] // 4] if rng.integers(2) else [shape[d] // 4, 4]
    return snp.reshape(x, shape)


def _softmax(rng: np.random.Generator, values: list[Any]) -> Any:
    x = _one(rng, values, 1)
    return nn.softmax(x, axis=int(rng.integers(x.ndim)))


def _indexing(rng: np.random.Generator, values: list[Any]) -> Any:
    x = _one(rng, values, 1)
    size = x.shape[0]
    f: list[Callable[[], Any]] = [
        lambda: x[0],
        lambda: x[: size // 2],
        lambda: x[..., ::2],
        lambda: x[snp.arange(4) * 3 % size],
        lambda: x.at[1].set(0.5),
        lambda: x.at[snp.arange(8) % size].add(snp.ones((8, *x.shape[1:]))),
        lambda: snp.roll(x, 3, 0),
        lambda: snp.flip(x, -1),
        lambda: lax.dynamic_slice_in_dim(x, snp.argmax(x.ravel()) % size, 1, 0),
        lambda: snp.take_along_axis(x, snp.argsort(x, 0), 0),
    ]
    return f[rng.integers(len(f))]()


def _rows(rng: np.random.Generator, values: list[Any]) -> Any:
    x = _one(rng, values, 1)
    f: list[Callable[[], Any]] = [
        lambda: snp.cumsum(x, 0) / 4,
        lambda: snp.sort(x, 0),
        lambda: snp.concatenate([x, x * 2], 0),
        lambda: snp.pad(x, [(1, 1), *[(0, 0)] * (x.ndim - 1)]),
        lambda: snp.stack([x, -x], 1),
        lambda: lax.top_k(x, 2)[0],
        lambda: snp.argmax(x, 0) * 0.25,
        lambda: snp.ones_like(x) * snp.arange(x.shape[-1], dtype=x.dtype) + x,
        lambda: x + spmd.random.normal(spmd.random.key(3), x.shape),
    ]
    return f[rng.integers(len(f))]()


def _control(rng: np.random.Generator, values: list[Any]) -> Any:
    x = _one(rng, values, 1)
    f: list[Callable[[], Any]] = [
        lambda: lax.scan(lambda c, r: (snp.tanh(c + r), c * r), snp.zeros(x.shape[1:]), x),
        lambda: lax.fori_loop(0, 3, lambda k, y: snp.sin(y) + x * k, x),
        lambda: lax.while_loop(lambda y: y.sum() < 5, lambda y: abs(y) + 1, lax.stop_gradient(x)),
        lambda: lax.cond(x.sum() > 0, lambda y: y * 2, lambda y: snp.cos(y), x),
        lambda: spmd.checkpoint(lambda y: snp.sin(snp.sin(y)))(x),
        lambda: spmd.vmap(lambda r: r - snp.max(r))(x),
        lambda: spmd.jit(lambda y: snp.tanh(y).sum(0))(x),
    ]
    k = int(rng.integers(len(f)))
    found = f[k]()
    return found[1] if k == 0 else found


def _windows(rng: np.random.Generator, values: list[Any]) -> Any:
    """What cuts, pads or slides along a dim, of which parts may get different sizes."""
    x = _one(rng, values, 1)
    d = int(rng.integers(x.ndim))
    size, low, high = x.shape[d], *(int(n) for n in rng.integers(0, 3, 2))

    def cut(start: int, stop: int, step: int = 1) -> Any:
        first = min(start, size - 1)
        return lax.slice_in_dim(x, first, min(max(stop, first + 1), size), step, d)

    config = [(low, high, 0) if n == d else (0, 0, 0) for n in range(x.ndim)]
    window = tuple(2 + low % 2 if n == d else 1 for n in range(x.ndim))
    f: list[Callable[[], Any]] = [
        lambda: cut(low, size - high),
        lambda: cut(1, size) - cut(0, size - 1),
        lambda: cut(low % 2, size, 2),
        lambda: lax.pad(x, np.float32(0.5), config),
        lambda: lax.reduce_window(x, 0.0, lax.add, window, (1,) * x.ndim, "SAME") / 2,
        lambda: lax.reduce_window(x, -np.inf, lax.max, window, window, "VALID"),
        lambda: snp.roll(x, low - high, d) + x,
        lambda: snp.concatenate([x, cut(0, 1 + low)], d),
        lambda: snp.cumsum(cut(low, size), d) / 4,
        lambda: nn.softmax(cut(low, size), d),
        lambda: cut(low, size).sum(d),
        lambda: snp.sort(cut(0, size - high), d),
    ]
    return f[rng.integers(len(f))]()


def _single_rows(rng: np.random.Generator, values: list[Any]) -> Any:
    """What reads rows of one device, joins them, and writes them into others."""
    x = _one(rng, values, 1)
    d = int(rng.integers(x.ndim))
    size = x.shape[d]
    j, k = (int(n) for n in rng.integers(0, size, 2))

    def row(n: int, count: int = 1) -> Any:
        first = min(n, size - count)
        return lax.slice_in_dim(x, first, first + count, 1, d)

    config = [(j, size - 1 - j, 0) if n == d else (0, 0, 0) for n in range(x.ndim)]
    f: list[Callable[[], Any]] = [
        lambda: snp.take(x, snp.array(k), d) * 2,
        lambda: row(k),
        lambda: row(k, 2),
        lambda: row(j) + row(k),
        lambda: row(j) * snp.sin(row(k)),
        lambda: row(k) - x,
        lambda: lax.pad(snp.tanh(row(k)), np.float32(0.5), config),
        lambda: lax.dynamic_update_slice_in_dim(x, snp.cos(row(k)), j, d),
        lambda: lax.squeeze(row(k), (d,)),
        lambda: lax.dynamic_update_slice_in_dim(x, snp.sin(row(j, max(size - 2, 1))), k, d),
        lambda: lax.dynamic_slice_in_dim(x, k, max(size - 2, 1), d),
        lambda: snp.concatenate([row(k), x], d),
        lambda: snp.concatenate([row(j), row(k)], d),
        lambda: snp.concatenate([row(k), lax.slice_in_dim(x, 0, max(size - 1, 1), 1, d)], d),
        lambda: nn.softmax(lax.squeeze(row(k), (d,))) if x.ndim > 1 else row(j),
        lambda: lax.scan(lambda c, r: (c + r, r * 2), row(k), snp.stack([row(j)] * 2))[1],
        lambda: lax.scan(lambda c, _: (c + row(k), row(j)), x, None, length=2),
    ]
    found = f[rng.integers(len(f))]()
    return found[0] + found[1].sum(0) if isinstance(found, tuple) else found


OPERATIONS: Sequence[Operation] = (
    _elementwise, _binary, _outer, _matmul, _reduce, _transpose, _reshape, _softmax, _indexing,
    _rows, _control,
)  # fmt: skip
WINDOWED: Sequence[Operation] = (_elementwise, _binary, _matmul, _reduce, *[_windows] * 5)
ROWED: Sequence[Operation] = (_elementwise, _binary, _reduce, _reshape, *[_single_rows] * 5)
SHAPES = ((8, 16), (16, 8), (8,), (4, 8, 16), (16, 16), (2, 8, 4))


def draw(
    seed: int, steps: int = 6, operations: Sequence[Operation] = OPERATIONS
) -> tuple[Callable[..., list[Any]], list[np.ndarray]]:
    """A program and its arguments: the operations are drawn again, alike, whenever it is traced."""
    rng = np.random.default_rng(seed)
    shapes = [SHAPES[rng.integers(len(SHAPES))] for _ in range(3)]
    arguments = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    def program(*args: Any) -> list[Any]:
        again = np.random.default_rng(seed + 1_000_000)
        values, made = [snp.asarray(x) for x in args], []
        for _ in range(steps):
            out = operations[again.integers(len(operations))](again, values)
            if out is not None and out.size and out.ndim <= 4:
                values.append(out)
                made.append(out)
        return made

    return program, arguments


def draw_spec(rng: np.random.Generator, shape: Sequence[int], axes: dict[str, int]) -> spmd.P:
    """A spec by which a shape can be split over some of the axes."""
    free = list(axes)
    entries: list[Any] = []
    for size in shape:
        chosen: list[str] = []
        for axis in [free[k] for k in rng.permutation(len(free))]:
            count = int(np.prod([axes[a] for a in (*chosen, axis)]))
            if rng.integers(2) and size % count == 0:
                chosen.append(axis)
                free.remove(axis)
        entries.append(tuple(chosen) if len(chosen) > 1 else chosen[0] if chosen else None)
    return spmd.P(*entries)


def kinds(f: Callable[..., Any], *args: Any) -> Counter[str]:
    """How often a call makes each kind of collective."""
    found: Counter[str] = Counter()
    for c in debug.collectives(f)(*args):
        found[c.kind] += c.times
    return found
