"""Tools to extend spmd: make a primitive, give it a kernel, walk a jaxpr.

Mostly a re-export of the stable parts of the floors below; `docs/extending.md` is the tutorial.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.base.errors import ArgumentError as _ArgumentError
from spmd.compile.lazy import elementwise as _elementwise
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.primitive import Dims, Linear, Primitive, Refused, Zero, dims, linear
from spmd.core.rewrite import eval_jaxpr
from spmd.core.stage import trace_to_jaxpr
from spmd.core.trace import Trace, Tracer, current_trace
from spmd.lax.families import FLOAT, INEXACT, INTEGER, NUMERIC, elementwise

__all__ = [
    "FLOAT",
    "INEXACT",
    "INTEGER",
    "NUMERIC",
    "ClosedJaxpr",
    "Dims",
    "Eqn",
    "Jaxpr",
    "KernelBuilder",
    "Linear",
    "Literal",
    "Primitive",
    "Refused",
    "ShapedArray",
    "Trace",
    "Tracer",
    "Var",
    "Zero",
    "current_trace",
    "dims",
    "elementwise",
    "eval_jaxpr",
    "linear",
    "register_lowering",
    "trace_to_jaxpr",
    "typeof",
]


class KernelBuilder:
    """The builder of a lowering rule: operations on the values of one element."""

    def __init__(self, builder: Any):
        self._builder = builder

    def op(self, name: str, *values: int) -> int:
        """One operation of the kernel IR on values of equal dtype: "add", "exp", "select", ..."""
        return _elementwise.apply(self._builder, name, *values)

    def const(self, number: float, like: int) -> int:
        """A number of the dtype of a value."""
        return self._builder.const(number, self._builder.dtype(like))

    def dtype(self, value: int) -> str:
        """The dtype of a value, as the kernel IR calls it: "f32", "i64", "bool", ..."""
        return self._builder.dtype(value)


def register_lowering(prim: Primitive, rule: Callable[..., int]) -> None:
    """Give an elementwise primitive a kernel: compiled programs fuse it, on every platform.

    `rule(k, *values, **params)` writes the operations on one element with the `KernelBuilder` `k`,
    and returns the result's value. Without a rule, or where an operation does not take the
    operands' dtypes, a program runs the primitive's `impl` as a step of its own. Raises an
    `ArgumentError` if there is a rule already: programs may have been compiled with it.
    """
    entries = _elementwise.ENTRIES
    if prim.name in entries:
        raise _ArgumentError(f"register_lowering: {prim.name} has a kernel already")

    def entry(builder: Any, values: Any, params: dict[str, Any], out: str) -> int:
        return rule(KernelBuilder(builder), *values, **params)

    entries[prim.name] = entry
