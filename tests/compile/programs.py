"""Random programs over lax primitives, and what running them compiled is compared with.

`random_program(seed)` gives a function of arrays and its arguments. The operations keep values
bounded, so that a tolerance in units of the last place is meaningful; everything is float32, int32
or bool, so that the compiler's reassociation of sums is the only difference there may be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd import lax
from spmd.core.aval import typeof
from spmd.core.call import impl_jaxpr
from spmd.core.ir import ClosedJaxpr
from spmd.core.stage import trace_to_jaxpr

SHAPES = ((6, 8), (8, 6), (4, 6, 8), (8,), (6,), (1, 8), (3, 17))
# No floor or sign: next to a jump, two right answers may differ by one.
UNARY = ("tanh", "sin", "cos", "logistic", "abs", "neg", "square")
BINARY = ("add", "sub", "mul", "max", "min")


class Program:
    """Grows a list of values by random operations, on tracers or arrays alike."""

    def __init__(self, seed: int, length: int):
        self.seed = seed
        self.length = length

    def arguments(self) -> list[np.ndarray]:
        """Example arguments: three float arrays and one of integers."""
        rng = np.random.default_rng(self.seed)
        shapes = [SHAPES[rng.integers(len(SHAPES))] for _ in range(3)]
        floats = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
        return [*floats, rng.integers(-3, 9, (5,)).astype(np.int32)]

    def __call__(self, *args: Any) -> list[Any]:
        rng = np.random.default_rng(self.seed + 1)
        values = list(args[:3])
        for _ in range(self.length):
            made = self.operation(rng, values, args[3])
            if 0 < typeof(made).size <= 4096:
                values.append(made)
        count = int(rng.integers(1, 4))
        picked = rng.choice(len(values), size=count)
        return [values[int(k)] for k in picked] + [values[-1]]

    def operation(self, rng: np.random.Generator, values: list[Any], indices: Any) -> Any:
        """One random operation on earlier values."""
        x = values[int(rng.integers(max(0, len(values) - 6), len(values)))]
        makers: list[Callable[..., Any]] = [
            unary,
            unary,
            binary,
            binary,
            binary,
            with_scalar,
            normalise,
            reduce,
            broadcast,
            move,
            cut,
            join,
            pad,
            read,
            choose,
            product,
            running,
            update,
        ]
        return makers[int(rng.integers(len(makers)))](rng, x, values, indices)


def unary(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    return getattr(lax, str(rng.choice(UNARY)))(x)


def binary(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    same = [v for v in values if typeof(v).shape == typeof(x).shape]
    other = same[int(rng.integers(len(same)))]
    return lax.tanh(getattr(lax, str(rng.choice(BINARY)))(x, other))


def with_scalar(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    scalar = np.float32(rng.uniform(0.5, 1.5))
    operands = (x, scalar) if rng.integers(2) else (scalar, x)
    return getattr(lax, str(rng.choice(BINARY)))(*operands)


def normalise(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    """A softmax over one dim."""
    shape = typeof(x).shape
    if not shape:
        return lax.sin(x)
    axis = int(rng.integers(len(shape)))
    kept = [d for d in range(len(shape)) if d != axis]
    top = lax.broadcast_in_dim(lax.reduce_max(x, (axis,)), shape, kept)
    exps = lax.exp(lax.sub(x, top))
    return lax.div(exps, lax.broadcast_in_dim(lax.reduce_sum(exps, (axis,)), shape, kept))


def reduce(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    ndim = typeof(x).ndim
    axes = tuple(d for d in range(ndim) if rng.integers(2))
    name = str(rng.choice(["reduce_sum", "reduce_max", "reduce_min"]))
    return lax.tanh(getattr(lax, name)(x, axes)) if axes else lax.cos(x)


def broadcast(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    shape = typeof(x).shape
    at = int(rng.integers(len(shape) + 1))
    new = (*shape[:at], int(rng.integers(1, 5)), *shape[at:])
    return lax.broadcast_in_dim(x, new, [d + (d >= at) for d in range(len(shape))])


def move(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    shape = typeof(x).shape
    choice = int(rng.integers(3))
    if choice == 0:
        return lax.transpose(x, [int(d) for d in rng.permutation(len(shape))])
    if choice == 1 and shape:
        return lax.rev(x, (int(rng.integers(len(shape))),))
    flat = lax.reshape(x, (typeof(x).size,))
    return lax.reshape(flat, (typeof(x).size // 2, 2)) if typeof(x).size % 2 == 0 else flat


def cut(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    shape = typeof(x).shape
    starts = [int(rng.integers(s)) for s in shape]
    limits = [int(rng.integers(b + 1, s + 1)) for b, s in zip(starts, shape, strict=True)]
    return lax.slice(x, starts, limits, [int(rng.integers(1, 3)) for _ in shape])


def join(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    shape = typeof(x).shape
    if not shape:
        return lax.neg(x)
    same = [v for v in values if typeof(v).shape == shape]
    parts = [same[int(rng.integers(len(same)))] for _ in range(2)]
    return lax.concatenate([x, *parts], int(rng.integers(len(shape))))


def pad(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    config = []
    for size in typeof(x).shape:
        config.append((int(rng.integers(0, 3)), int(rng.integers(-min(size - 1, 2), 3)), 0))
    return lax.pad(x, np.float32(0.5), config)


def read(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    """A dynamic slice whose start is an argument."""
    shape = typeof(x).shape
    start = lax.reshape(lax.slice(indices, (1,), (2,)), ())
    sizes = [int(rng.integers(1, s + 1)) for s in shape]
    return lax.dynamic_slice(x, [start] * len(shape), sizes)


def update(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    shape = typeof(x).shape
    if not shape:
        return lax.sin(x)
    start = lax.reshape(lax.slice(indices, (2,), (3,)), ())
    part = lax.slice(x, [0] * len(shape), [max(1, s // 2) for s in shape])
    return lax.dynamic_update_slice(x, lax.neg(part), [start] * len(shape))


def choose(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    same = [v for v in values if typeof(v).shape == typeof(x).shape]
    other = same[int(rng.integers(len(same)))]
    return lax.select(lax.gt(x, np.float32(0.1)), x, other)


def product(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    if typeof(x).ndim != 2:
        return lax.tanh(x)
    side = int(rng.integers(2))
    return lax.tanh(lax.dot_general(x, x, (((side,), (side,)), ((), ()))))


def running(rng: Any, x: Any, values: Any, indices: Any) -> Any:
    shape = typeof(x).shape
    if not shape:
        return lax.cos(x)
    return lax.tanh(lax.cumsum(x, int(rng.integers(len(shape))), bool(rng.integers(2))))


def random_program(seed: int, length: int = 14) -> tuple[ClosedJaxpr, list[np.ndarray]]:
    """A traced random program and arguments for it."""
    program = Program(seed, length)
    args = program.arguments()
    return trace_to_jaxpr(program, [typeof(a) for a in args]), args


def by_impl(closed: ClosedJaxpr, args: list[np.ndarray]) -> list[np.ndarray]:
    """The oracle: every primitive's `impl` over NumPy."""
    with np.errstate(all="ignore"):
        return impl_jaxpr(np, closed, *args)
