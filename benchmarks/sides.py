"""The sides of a comparison: one small record of functions each, so a case is written once.

Only the side that is asked for gets imported: a worker process holds one framework and one pool.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy


@dataclass(frozen=True)
class Side:
    """What a case may use of a framework; `jit` of NumPy is the function itself."""

    name: str
    np: ModuleType
    lax: Any
    nn: Any
    tree: Any
    jit: Callable[..., Any]
    pmap: Callable[..., Any] | None
    value_and_grad: Callable[..., Any] | None
    array: Callable[[numpy.ndarray], Any]
    ready: Callable[[Any], Any]


def load_side(name: str) -> Side:
    """Import one side: `spmd`, `jax` or `numpy`."""
    if name == "numpy":
        return _numpy()
    top = importlib.import_module(name)
    return Side(
        name=name,
        np=importlib.import_module(f"{name}.numpy"),
        lax=importlib.import_module(f"{name}.lax"),
        nn=importlib.import_module(f"{name}.nn"),
        tree=importlib.import_module(f"{name}.tree"),
        jit=top.jit,
        pmap=top.pmap,
        value_and_grad=top.value_and_grad,
        array=top.device_put,
        ready=top.block_until_ready,
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
        tree=None,
        jit=lambda function, **_: function,
        pmap=None,
        value_and_grad=None,
        array=lambda a: a,
        ready=lambda a: a,
    )
