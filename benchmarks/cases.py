"""The programs that are timed, each written once for all sides.

A case's `make(side)` prepares inputs on that side and returns a function of no arguments. Calling
it once is what gets timed; what it returns is waited for, unless the case says `wait=False`, and is
compared between the sides before anything is timed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy

from benchmarks.sides import Side

BOTH = ("spmd", "jax")
ALL = ("spmd", "jax", "numpy")


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    make: Callable[[Side], Callable[[], Any]]
    sides: tuple[str, ...] = ALL
    wait: bool = True
    devices: int = 1
    tolerance: float = 2e-5


def normal(*shape: int, seed: int = 0) -> numpy.ndarray:
    """Reproducible single-precision numbers, the same on each side."""
    return numpy.random.default_rng(seed).normal(size=shape).astype(numpy.float32)


# ---- dispatch: what a call costs when there is nothing to compute ------------------------------


def multiply_add(side: Side, x, y):
    """The smallest program worth compiling."""
    return x * y + x


def call_jitted(side: Side, size: int, convert: bool = True) -> Callable[[], Any]:
    """A jitted `x*y+x`; `convert=False` passes NumPy arrays in each call."""
    function = side.jit(partial(multiply_add, side))
    x, y = normal(size), normal(size, seed=1)
    if convert:
        x, y = side.array(x), side.array(y)
    return lambda: function(x, y)


def call_eager(side: Side, size: int) -> Callable[[], Any]:
    """One product without jit."""
    x, y = side.array(normal(size)), side.array(normal(size, seed=1))
    return lambda: x * y


def call_tree(side: Side, leaves: int) -> Callable[[], Any]:
    """A jitted function from a dict of small arrays to a dict of small arrays."""
    state = {f"parameter_{i:02}": side.array(normal(4, seed=i)) for i in range(leaves)}
    if side.tree is None:
        return lambda: {name: value + 1 for name, value in state.items()}
    function = side.jit(lambda t: side.tree.map(lambda x: x + 1, t))
    return lambda: function(state)


def dispatch_cases() -> list[Case]:
    """Calls whose time is the framework's own."""
    return [
        Case("dispatch/jit x*y+x, size 1, not waiting", partial(call_jitted, size=1), wait=False),
        Case("dispatch/jit x*y+x, size 1", partial(call_jitted, size=1)),
        Case("dispatch/jit x*y+x, size 1024", partial(call_jitted, size=1024)),
        Case("dispatch/jit x*y+x, NumPy arguments", partial(call_jitted, size=1, convert=False)),
        Case("dispatch/eager x*y, size 1", partial(call_eager, size=1)),
        Case("dispatch/jit tree of 60 leaves", partial(call_tree, leaves=60)),
    ]


# ---- kernels -----------------------------------------------------------------------------------


def gelu(side: Side, x):
    """The tanh form, written out, so that every side computes the same formula."""
    return 0.5 * x * (1 + side.np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def tanh_exp(side: Side, x):
    """Two transcendentals and little memory traffic."""
    return side.np.tanh(0.7 * x + 0.1) * side.np.exp(-x * x)


def black_scholes(side: Side, x):
    """Price of a call option; the normal distribution by its logistic approximation."""
    spot, strike, rate, volatility = 100 + 10 * x, 100.0, 0.02, 0.3
    d1 = (side.np.log(abs(spot) / strike) + rate + volatility**2 / 2) / volatility

    def distribution(d):
        return 1 / (1 + side.np.exp(-1.5976 * d - 0.070565992 * d * d * d))

    return spot * distribution(d1) - strike * math.exp(-rate) * distribution(d1 - volatility)


def tanh_chain(side: Side, x):
    """A long dependent chain: latency, not bandwidth."""
    for k in range(12):
        x = side.np.tanh(x * 1.1 + 0.01 * k)
    return x


def softmax(side: Side, x):
    """Over rows."""
    return side.nn.softmax(x, axis=-1)


def layernorm(side: Side, x):
    """Over rows, without scale and shift."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * side.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)


def full_sum(side: Side, x):
    """One number of a whole array."""
    return side.np.sum(x)


def square(side: Side, x):
    """One array in, one out, for `multiply_add` over a single argument."""
    return multiply_add(side, x, x)


def of_one_array(side: Side, body: Callable[..., Any], shape: tuple[int, ...]) -> Callable[[], Any]:
    """A jitted function of one array."""
    function, x = side.jit(partial(body, side)), side.array(normal(*shape))
    return lambda: function(x)


def matmul(side: Side, size: int) -> Callable[[], Any]:
    """A square product in single precision."""
    function = side.jit(lambda a, b: a @ b)
    a, b = side.array(normal(size, size)), side.array(normal(size, size, seed=1))
    return lambda: function(a, b)


def kernel_cases() -> list[Case]:
    """Fused elementwise work, rows, reductions, and matrix products."""
    cases = []
    for name, body, tolerance in (
        ("x*x+x", square, 2e-5),
        ("gelu", gelu, 2e-5),
        ("tanh exp", tanh_exp, 2e-5),
        ("black-scholes", black_scholes, 2e-4),
        ("chain of 12 tanh", tanh_chain, 2e-4),
    ):
        cases += [
            Case(
                f"kernels/{name}, {size:.0e}",
                partial(of_one_array, body=body, shape=(size,)),
                tolerance=tolerance,
            )
            for size in (10_000, 1_000_000)
        ]
    large = partial(of_one_array, body=gelu, shape=(10_000_000,))
    cases.append(Case("kernels/gelu, 1e+07", large))
    for name, body in (("softmax", softmax), ("layernorm", layernorm)):
        cases += [
            Case(
                f"kernels/{name}, {rows} x 1024",
                partial(of_one_array, body=body, shape=(rows, 1024)),
            )
            for rows in (10, 1000)
        ]
    cases += [
        Case(
            f"kernels/full sum, {size:.0e}",
            partial(of_one_array, body=full_sum, shape=(size,)),
            tolerance=1e-3,
        )
        for size in (10_000, 1_000_000)
    ]
    cases += [
        Case(f"kernels/matmul {n}", partial(matmul, size=n), tolerance=1e-3)
        for n in (64, 256, 1024)
    ]
    return cases


# ---- a training step ---------------------------------------------------------------------------


def mlp_loss(side: Side, params, x, y):
    """Cross entropy of a network with relu."""
    for w, b in params[:-1]:
        x = side.nn.relu(x @ w + b)
    w, b = params[-1]
    scores = side.nn.log_softmax(x @ w + b)
    return -side.np.mean(side.np.sum(scores * side.nn.one_hot(y, 10), axis=-1))


def mlp_step(side: Side, params, x, y):
    """One step of gradient descent."""
    assert side.value_and_grad is not None
    loss, grads = side.value_and_grad(partial(mlp_loss, side))(params, x, y)
    return side.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss


def mlp_inputs(side: Side, sizes: tuple[int, ...], batch: int) -> tuple[Any, Any, Any]:
    """Parameters, images and labels."""
    params = [
        (
            side.array(normal(a, b, seed=a) / numpy.float32(math.sqrt(a))),
            side.array(numpy.zeros(b, numpy.float32)),
        )
        for a, b in itertools.pairwise(sizes)
    ]
    labels = numpy.arange(batch, dtype=numpy.int32) % 10
    return params, side.array(normal(batch, sizes[0], seed=2)), side.array(labels)


def train_mlp(side: Side, sizes: tuple[int, ...], batch: int) -> Callable[[], Any]:
    """Steps that follow each other, as in a training loop."""
    step = side.jit(partial(mlp_step, side))
    params, x, y = mlp_inputs(side, sizes, batch)

    def run():
        nonlocal params
        params, loss = step(params, x, y)
        return params, loss

    return run


def mlp_cases() -> list[Case]:
    """A small network, where calls count, and one where products count."""
    return [
        Case(
            f"mlp/{'-'.join(map(str, sizes))}, batch {batch}",
            partial(train_mlp, sizes=sizes, batch=batch),
            sides=BOTH,
            tolerance=1e-3,
        )
        for sizes, batch in (((64, 256, 128, 10), 128), ((784, 512, 512, 10), 128))
    ]


# ---- psum over the devices of one process ------------------------------------------------------


def psum_call(side: Side, devices: int, nbytes: int, inside: int) -> Callable[[], Any]:
    """A pmapped psum; `inside` of them in a row within the program."""
    assert side.pmap is not None

    def body(x):
        for _ in range(inside):
            x = side.lax.psum(x, "i") / devices
        return x

    function = side.pmap(body, axis_name="i")
    # Placed by a first call: what is timed is a step that follows another.
    x = function(normal(devices, nbytes // 4))
    return lambda: function(x)


def psum_cases() -> list[Case]:
    """Devices × sizes; and ten in one program, where the call itself counts little."""
    sizes = {"4 B": 4, "64 KiB": 65536, "1 MiB": 2**20, "16 MiB": 2**24}
    return [
        Case(
            f"psum/{devices} devices, {label}" + (f", {inside} in a program" if inside > 1 else ""),
            partial(psum_call, devices=devices, nbytes=nbytes, inside=inside),
            sides=BOTH,
            devices=devices,
        )
        for devices in (2, 4, 8)
        for label, nbytes in sizes.items()
        for inside in ((1, 10) if nbytes <= 2**20 else (1,))
    ]


SUBJECTS: dict[str, Callable[[], list[Case]]] = {
    "dispatch": dispatch_cases,
    "kernels": kernel_cases,
    "mlp": mlp_cases,
    "psum": psum_cases,
}


def find_case(name: str) -> Case:
    """The case of that name, whatever its subject."""
    subject = name.partition("/")[0]
    return next(case for case in SUBJECTS[subject]() if case.name == name)
