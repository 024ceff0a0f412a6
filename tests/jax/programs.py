"""Small functions, written once, that both libraries trace, differentiate and run.

A program takes the library as its first argument: `lib.numpy`, `lib.lax`, `lib.nn` are JAX's names
in JAX and ours in spmd. What is compared is their jaxprs, their values and their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

rng = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    """Numbers in (-2, 2), away from the points where functions have no derivative."""
    x = rng.uniform(0.1, 2, shape) * rng.choice([-1, 1], shape)
    return x.astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    """Numbers in (0.2, 2)."""
    return rng.uniform(0.2, 2, shape).astype(np.float32)


@dataclass(frozen=True)
class Program:
    """A function of the library and of arrays, and the arrays it is called with."""

    f: Callable[..., Any]
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return self.f.__name__

    def of(self, lib: Any) -> Callable[..., Any]:
        """The function of arrays alone, in one of the libraries."""

        def program(*args: Any) -> Any:
            return self.f(lib, *args)

        return program


PROGRAMS: list[Program] = []


def program(*args: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function with its arguments."""

    def enter(f: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(Program(f, args))
        return f

    return enter


# ---- one operation -----------------------------------------------------------------------------


@program(np.float32(0.7))
def sine(lib, x):
    return lib.numpy.sin(x)


@program(floats(3, 4), floats(4))
def broadcast_add(lib, x, y):
    return x + y


@program(floats(3))
def weak_scalar(lib, x):
    return 2 * x + 1


@program(floats(3))
def integer_power(lib, x):
    return x**3


@program(positive(3), floats(3))
def real_power(lib, x, y):
    return lib.numpy.power(x, y)


@program(floats(3), floats(3))
def maximum(lib, x, y):
    return lib.numpy.maximum(x, y)


@program(floats(3))
def absolute(lib, x):
    return lib.numpy.abs(x)


@program(floats(3), floats(3))
def where(lib, x, y):
    return lib.numpy.where(x > y, x, y)


@program(floats(2, 3))
def transpose(lib, x):
    return x.T


@program(floats(2, 6))
def reshape(lib, x):
    return x.reshape(3, 4)


@program(floats(2, 3))
def total(lib, x):
    return x.sum()


@program(floats(2, 3))
def column_means(lib, x):
    return x.mean(0)


@program(floats(2, 3))
def largest(lib, x):
    return x.max(axis=1)


@program(floats(5))
def running_sum(lib, x):
    return lib.numpy.cumsum(x)


@program(floats(3, 4), floats(4, 2))
def matmul(lib, x, y):
    return x @ y


@program(floats(2, 3, 4), floats(2, 4, 5))
def batched_matmul(lib, x, y):
    return lib.numpy.matmul(x, y)


@program(floats(3, 4), floats(3))
def einsum(lib, x, y):
    return lib.numpy.einsum("ij,i->j", x, y)


@program(floats(2), floats(3))
def concatenate(lib, x, y):
    return lib.numpy.concatenate([x, y])


@program(floats(5, 3))
def static_slice(lib, x):
    return x[1:4, ::2]


@program(floats(5, 3))
def row(lib, x):
    return x[2]


@program(floats(5), np.int32(2))
def dynamic_slice(lib, x, i):
    return lib.lax.dynamic_slice(x, (i,), (2,))


@program(floats(5), floats(2))
def update_slice(lib, x, y):
    return lib.lax.dynamic_update_slice(x, y, (1,))


@program(floats(5))
def sort(lib, x):
    return lib.numpy.sort(x)


@program(positive(3))
def logarithm(lib, x):
    return lib.numpy.log(x)


@program(floats(3))
def error_function(lib, x):
    return lib.lax.erf(x)


@program(positive(3))
def reciprocal_root(lib, x):
    return lib.lax.rsqrt(x)


# ---- several operations ------------------------------------------------------------------------


@program(floats(3))
def selu(lib, x):
    np_ = lib.numpy
    return 1.05 * np_.where(x > 0, x, 1.67 * np_.exp(x) - 1.67)


@program(floats(3))
def tanh_by_hand(lib, x):
    y = lib.numpy.exp(-2.0 * x)
    return (1.0 - y) / (1.0 + y)


@program(floats(4, 3), floats(3), np.float32(0.5))
def logistic_regression(lib, x, w, b):
    return 0.5 * (lib.numpy.tanh((x @ w + b) / 2) + 1)


@program(floats(4, 3), floats(3, 2), floats(2), floats(2, 2))
def two_layers(lib, x, w, b, v):
    return lib.numpy.tanh(x @ w + b) @ v


@program(floats(4, 3), floats(4))
def squared_error(lib, x, y):
    return lib.numpy.mean((x.sum(1) - y) ** 2)


@program(floats(2, 5))
def log_sum_exp_by_hand(lib, x):
    top = lib.lax.stop_gradient(x.max(-1, keepdims=True))
    return lib.numpy.log(lib.numpy.exp(x - top).sum(-1)) + top[:, 0]


@program(floats(3, 8))
def layer_norm(lib, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lib.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


@program(floats(4, 3), floats(4, 3), floats(4, 3))
def attention(lib, q, k, v):
    scores = q @ k.T / 2.0
    e = lib.numpy.exp(scores - lib.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return (e / e.sum(-1, keepdims=True)) @ v


@program(floats(6), floats(3))
def windows(lib, x, w):
    return lib.numpy.stack([x[i : i + 3] @ w for i in range(4)])


@program(floats(5, 2))
def pairwise_distances(lib, x):
    return ((x[:, None] - x[None]) ** 2).sum(-1)


# ---- control flow ------------------------------------------------------------------------------


@program(floats(5), np.float32(0.3))
def scan_sum(lib, xs, c):
    return lib.lax.scan(lambda c, x: (c * x + 1.0, lib.numpy.sin(c)), c, xs)


@program(floats(7, 2), floats(2, 3), floats(3, 3))
def recurrent(lib, xs, w, u):
    def step(h, x):
        h = lib.numpy.tanh(x @ w + h @ u)
        return h, h

    return lib.lax.scan(step, lib.numpy.zeros(3), xs)[1]


@program(floats(3))
def known_trips(lib, x):
    return lib.lax.fori_loop(0, 4, lambda i, x: lib.numpy.sin(x) * 1.5, x)


@program(np.float32(0.4), floats(3))
def branches(lib, p, x):
    return lib.lax.cond(p > 0, lib.numpy.sin, lambda x: 2.0 * x, x)


@program(floats(4, 3), floats(3))
def vectorised(lib, x, w):
    return lib.vmap(lambda row: lib.numpy.tanh(row @ w), in_axes=0)(x)
