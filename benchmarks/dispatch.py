"""Dispatch: what a call costs when there is nothing to compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.case import BOTH, Case, normal
from benchmarks.sides import Side

SIDES = ("spmd", "jax", "numpy")


def multiply_add(side: Side, x, y):
    """The smallest program worth compiling."""
    return x * y + x


def call_jitted(side: Side, size: int = 1, convert: bool = True) -> Callable[[], Any]:
    """A jitted `x*y+x`; `convert=False` passes NumPy arrays in each call."""
    function = side.jit(partial(multiply_add, side))
    x, y = normal(size), normal(size, seed=1)
    if convert:
        x, y = side.array(x), side.array(y)
    return lambda: function(x, y)


def call_scalar(side: Side) -> Callable[[], Any]:
    """A jitted function of an array and a Python number."""
    function, x = side.jit(partial(multiply_add, side)), side.array(normal(16))
    return lambda: function(x, 0.5)


def call_eager(
    side: Side, operation: Callable[..., Any], shape: tuple[int, ...]
) -> Callable[[], Any]:
    """One operation without jit."""
    x, y = side.array(normal(*shape)), side.array(normal(*shape, seed=1))
    return lambda: operation(side, x, y)


def call_tree(side: Side, leaves: int) -> Callable[[], Any]:
    """A jitted function from a dict of small arrays to a dict of small arrays."""
    state = {f"parameter_{i:02}": side.array(normal(4, seed=i)) for i in range(leaves)}
    if side.tree is None:
        return lambda: {name: value + 1 for name, value in state.items()}
    function = side.jit(lambda t: side.tree.map(lambda x: x + 1, t))
    return lambda: function(state)


def call_nested(side: Side) -> Callable[[], Any]:
    """A training state: lists of tuples of arrays, a counter, and a keyword argument."""
    layers = [(side.array(normal(3, 4, seed=i)), side.array(normal(4, seed=i))) for i in range(6)]
    count = side.array(normal())

    @side.jit
    def step(state, *, rate):
        params, n = state
        return [(w - rate * w, b - rate * b) for w, b in params], n + 1

    state = (layers, count)
    return lambda: step(state, rate=0.1)


# Calls of a program, and what Python does after each of them.
BESIDE_CALLS = 10
BESIDE_SECONDS = 5e-3


def compute(seconds: float) -> None:
    """Keep one core busy, and the interpreter."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def recurrence(side: Side, x):
    """Some 5 ms of a program that one core runs: its steps need each other."""
    return side.lax.fori_loop(0, 60_000, lambda k, c: side.np.sin(c) * 1.1, x)


def products(side: Side, x):
    """Some 5 ms of a program that runs on all cores."""
    weights, y = x / 16, x
    for _ in range(14):
        y = side.np.tanh(y @ weights)  # neither fades nor is chaotic
    return y


def call_beside(
    side: Side, program: Callable[..., Any], shape: tuple[int, ...], host: Callable[[float], None]
) -> Callable[[], Any]:
    """A loop over batches: Python prepares the next one while a program works on the last."""
    function, x = side.jit(partial(program, side)), side.array(normal(*shape))

    def run():
        out = []
        for _ in range(BESIDE_CALLS):
            out.append(function(x))
            host(BESIDE_SECONDS)
        return [side.ready(y) for y in out]

    return run


def beside(name: str, program: Callable[..., Any], shape: tuple[int, ...], host: Any) -> Case:
    """The case of host work beside programs."""
    make = partial(call_beside, program=program, shape=shape, host=host)
    return Case(f"dispatch/{BESIDE_CALLS} x 5 ms {name}", make, sides=BOTH)


EAGER: dict[str, Callable[..., Any]] = {
    "x*y": lambda side, x, y: x * y,
    "tanh(x)": lambda side, x, y: side.np.tanh(x),
    "x+1": lambda side, x, y: x + 1,
    "sum(x)": lambda side, x, y: side.np.sum(x),
    "x @ y": lambda side, x, y: x @ y,
    "x[1:3]": lambda side, x, y: x[1:3],
    "reshape": lambda side, x, y: side.np.reshape(x, (-1,)),
    "where": lambda side, x, y: side.np.where(x > y, x, y),
}


def eager(name: str, *shape: int) -> Case:
    """The case of one eager operation."""
    label = " x ".join(map(str, shape))
    make = partial(call_eager, operation=EAGER[name], shape=shape)
    return Case(f"dispatch/eager {name}, {label}", make, sides=SIDES)


def dispatch_cases() -> list[Case]:
    """Calls whose time is the framework's own."""
    return [
        Case("dispatch/jit x*y+x, size 1, not waiting", call_jitted, sides=SIDES, wait=False),
        Case("dispatch/jit x*y+x, size 1", call_jitted, sides=SIDES),
        Case("dispatch/jit x*y+x, size 1024", partial(call_jitted, size=1024), sides=SIDES),
        Case(
            "dispatch/jit x*y+x, NumPy arguments",
            partial(call_jitted, convert=False),
            sides=SIDES,
        ),
        Case("dispatch/jit x*0.5+x, a Python number", call_scalar, sides=SIDES),
        Case("dispatch/jit tree of 60 leaves", partial(call_tree, leaves=60), sides=SIDES),
        Case("dispatch/jit training state of 13 leaves", call_nested, sides=BOTH),
        beside("of sleep + a recurrence", recurrence, (64,), time.sleep),
        beside("of Python + a recurrence", recurrence, (64,), compute),
        beside("of sleep + products", products, (256, 256), time.sleep),
        beside("of Python + products", products, (256, 256), compute),
        *(eager(name, 4, 4) for name in EAGER),
        eager("x*y", 1000, 1000),
    ]
