"""The class of cases, and the inputs that all of them are made from.

A case's `make(side)` prepares inputs on that side and returns a function of no arguments. Calling
it once is what gets timed; what it returns is waited for, unless the case says `wait=False`, and is
compared between the sides before anything is timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy

from benchmarks.sides import Side

BOTH = ("spmd", "jax")
# JAX with 512-bit vectors, where the width of vectors can matter.
WIDE = ("spmd", "jax", "jax512")
NUMPY = ("spmd", "jax", "jax512", "numpy")
ALL = ("spmd", "jax", "jax512", "numpy", "torch")

Make = Callable[[Side], Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    `nbytes` is what the case has to read and write at least, `flops` what it has to compute at
    least: with one of them it is also compared with what the machine can do (see `limits`). In a
    comparison NaNs are equal and errors count relative to the largest element.
    """

    name: str
    make: Make
    sides: tuple[str, ...] = WIDE
    wait: bool = True
    devices: int = 1
    tolerance: float = 2e-5
    nbytes: int = 0
    flops: int = 0
    x64: bool = False
    # What PyTorch runs instead of `make`, where the program is not written in terms of a Side.
    torch: Callable[[Any], Callable[[], Any]] | None = None

    @property
    def settings(self) -> tuple[int, bool]:
        """The settings with which a process is started to run the case."""
        return self.devices, self.x64

    @property
    def all_sides(self) -> tuple[str, ...]:
        """The sides, and the limit of the machine if it is known what that means."""
        torch = ("torch",) if self.torch is not None and "torch" not in self.sides else ()
        return (*self.sides, *torch, *(("limit",) if self.nbytes or self.flops else ()))

    def replace(self, **changes: Any) -> Case:
        """The same case with other fields."""
        return dataclasses.replace(self, **changes)


def normal(*shape: int, seed: int = 0) -> numpy.ndarray:
    """Reproducible single-precision numbers, the same on each side."""
    return numpy.random.default_rng(seed).normal(size=shape).astype(numpy.float32)


def integers(high: int, *shape: int, seed: int = 0) -> numpy.ndarray:
    """Reproducible indices below `high`."""
    return numpy.random.default_rng(seed).integers(0, high, size=shape).astype(numpy.int32)


def jitted(
    side: Side, body: Callable[..., Any], *arrays: numpy.ndarray, grad: bool = False
) -> Callable[[], Any]:
    """A call of the jitted `body(side, *arrays)`, or of its gradient in all arrays.

    The gradient is that of the sum of the results times fixed numbers that differ, since the plain
    sum of many functions (softmax, say) is a constant.
    """

    def loss(*operands):
        out = body(side, *operands)
        return side.np.sum(out * side.np.cos(out))

    if grad:
        assert side.grad is not None
        function = side.jit(side.grad(loss, tuple(range(len(arrays)))))
    else:
        function = side.jit(partial(body, side))
    operands = [side.array(a) for a in arrays]
    return lambda: function(*operands)


def of(body: Callable[..., Any], *arrays: Callable[[], numpy.ndarray], grad: bool = False) -> Make:
    """The `make` of a case that calls `body(side, *arrays)`; arrays are made when it runs."""
    return lambda side: jitted(side, body, *(make() for make in arrays), grad=grad)


def array(*shape: int, seed: int = 0, scale: float = 1.0) -> Callable[[], numpy.ndarray]:
    """An operand for `of`: normal numbers."""
    return lambda: normal(*shape, seed=seed) * numpy.float32(scale)


def shuffled(size: int) -> Callable[[], numpy.ndarray]:
    """An operand for `of`: different numbers in any order."""
    return lambda: numpy.random.default_rng(0).permutation(size).astype(numpy.float32)


def indices(high: int, *shape: int, seed: int = 0) -> Callable[[], numpy.ndarray]:
    """An operand for `of`: integers below `high`."""
    return lambda: integers(high, *shape, seed=seed)
