"""The sides of a comparison: one small record of functions each, so a case is written once.

Only the side that is asked for gets imported: a worker process holds one framework and one pool.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy


@dataclass(frozen=True)
class Side:
    """The functions of a framework for cases; `jit` of NumPy and PyTorch is the function itself.

    `top` is the framework's own module: what only some sides have is found there.
    """

    name: str
    np: Any
    lax: Any
    nn: Any
    array: Callable[[numpy.ndarray], Any]
    ready: Callable[[Any], Any]
    jit: Callable[..., Any] = lambda function, **_: function
    tree: Any = None
    random: Any = None
    top: Any = None

    @property
    def grad(self) -> Callable[..., Any] | None:
        """`grad` of a function, where the side has one."""
        return getattr(self.top, "grad", None)


def load_side(name: str) -> Side:
    """Import one side: `spmd`, `jax` (also as `jax512`), `numpy` or `torch`."""
    if name == "numpy":
        return _numpy()
    if name == "torch":
        return _torch()
    name = name.removesuffix("512")
    top = importlib.import_module(name)
    for module in ("numpy.linalg", "numpy.fft", "scipy.linalg", "scipy.special"):
        importlib.import_module(f"{name}.{module}")
    return Side(
        name=name,
        np=importlib.import_module(f"{name}.numpy"),
        lax=importlib.import_module(f"{name}.lax"),
        nn=importlib.import_module(f"{name}.nn"),
        tree=importlib.import_module(f"{name}.tree"),
        random=importlib.import_module(f"{name}.random"),
        jit=top.jit,
        array=top.device_put,
        ready=top.block_until_ready,
        top=top,
    )


def _numpy() -> Side:
    def rsqrt(x):
        return 1 / numpy.sqrt(x)

    def softmax(x, axis=-1):
        grown = numpy.exp(x - x.max(axis, keepdims=True))
        return grown / grown.sum(axis, keepdims=True)

    return Side(
        name="numpy",
        np=numpy,
        lax=SimpleNamespace(rsqrt=rsqrt),
        nn=SimpleNamespace(softmax=softmax),
        array=lambda a: a,
        ready=lambda a: a,
    )


def _torch() -> Side:
    torch = importlib.import_module("torch")
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def softmax(x, axis=-1):
        return torch.softmax(x, axis)

    return Side(
        name="torch",
        np=torch,
        lax=SimpleNamespace(rsqrt=torch.rsqrt),
        nn=SimpleNamespace(softmax=softmax),
        array=torch.from_numpy,
        ready=lambda a: a,
        top=torch,
    )
