"""Traces that libraries define: JAX's `Trace` and `Tracer` to derive from, over ours.

Ours hands every primitive to `process`. JAX's hands calls with rules of their own to methods of
their own, with functions to call in place of jaxprs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import spmd.core.trace as core
from spmd.as_jax.jax.extend.linear_util import WrappedFun, wrap_init
from spmd.base.util import split_list
from spmd.core.aval import ShapedArray
from spmd.core.custom import custom_jvp_call_p
from spmd.core.custom_common import SymbolicZero
from spmd.core.custom_vjp import custom_vjp_call_p
from spmd.core.ir import ClosedJaxpr
from spmd.core.jvp import instantiate
from spmd.core.primitive import Primitive, Zero
from spmd.core.rewrite import eval_closed

__all__ = ["Trace", "Tracer"]


class _StandsFor(type(core.Tracer)):
    """The type of a class that stands for one of ours in `isinstance`; its subclasses do not."""

    def __instancecheck__(cls, x: Any) -> bool:
        return cls.__subclasscheck__(type(x))

    def __subclasscheck__(cls, kind: type) -> bool:
        stands: Any = cls.__base__ if "_stands" in vars(cls) else None
        return super().__subclasscheck__(kind) if stands is None else issubclass(kind, stands)


class Trace(core.Trace, metaclass=_StandsFor):
    """The base of a library's trace: it handles primitives in `process_primitive`."""

    _stands = True

    def __init__(self) -> None:
        pass

    def process(self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """Apply a primitive: JAX has methods for functions with derivatives of their own."""
        if prim is custom_jvp_call_p and _handles(self, "process_custom_jvp_call"):
            fun, _ = _functions(params, ())
            jvp = wrap_init(_flat_jvp(params["_jvp"], params["num_consts"]))
            return self.process_custom_jvp_call(prim, fun, jvp, operands, symbolic_zeros=False)
        if prim is custom_vjp_call_p and _handles(self, "process_custom_vjp_call"):
            fun, (fwd, bwd) = _functions(params, ("_fwd", "_bwd"))
            return self.process_custom_vjp_call(
                prim, fun, fwd, bwd, operands, out_trees=None, symbolic_zeros=False
            )
        return self.process_primitive(prim, operands, params)

    def process_primitive(
        self, primitive: Primitive, tracers: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """Apply a primitive; a list of results if it has several."""
        raise NotImplementedError(f"{type(self).__name__} has no process_primitive")

    def process_custom_jvp_call(
        self,
        primitive: Primitive,
        fun: WrappedFun,
        jvp: Any,
        tracers: Sequence[Any],
        *,
        symbolic_zeros: bool,
    ) -> Any:
        """Apply a `custom_jvp` function."""
        raise NotImplementedError(f"{type(self).__name__} has no process_custom_jvp_call")

    def process_custom_vjp_call(
        self,
        primitive: Primitive,
        fun: WrappedFun,
        fwd: Any,
        bwd: Any,
        tracers: Sequence[Any],
        *,
        out_trees: Any,
        symbolic_zeros: bool,
    ) -> Any:
        """Apply a `custom_vjp` function."""
        raise NotImplementedError(f"{type(self).__name__} has no process_custom_vjp_call")

    def stage_value(self, val: Any) -> Any:
        """A tracer of this trace for a value."""
        raise NotImplementedError(f"{type(self).__name__} has no stage_value")

    def full_raise(self, x: Any) -> Any:
        """The value itself: JAX lifts none beforehand, and keeps the method."""
        return x

    def invalidate(self) -> None:
        """Declare that no tracer of this trace may be used any more."""
        self.finish()

    def is_valid(self) -> bool:
        """Whether tracers of this trace may be used."""
        return self.alive

    @property
    def main(self) -> Any:
        """The tag of the trace, if it has one."""
        return getattr(self, "tag", None)


class Tracer(core.Tracer, metaclass=_StandsFor):
    """The base of a library's tracer; every tracer of ours counts as one."""

    _stands = True
    _aval: ShapedArray

    def __init__(self, trace: Any, aval: ShapedArray | None = None):
        super().__init__(trace)
        if aval is not None:
            self._aval = aval

    @property
    def aval(self) -> ShapedArray:  # type: ignore[override]
        """The shape and dtype."""
        return self._aval

    def full_lower(self) -> Any:
        """The simplest value that means the same."""
        return self


def _handles(trace: Trace, name: str) -> bool:
    return getattr(type(trace), name) is not getattr(Trace, name)


def _functions(
    params: dict[str, Any], rules: tuple[str, ...]
) -> tuple[WrappedFun, list[WrappedFun]]:
    """The function of a call with rules of its own, and its rules, as functions of flat lists."""
    closed: ClosedJaxpr = params["jaxpr"]
    fun: Callable[..., Any] = lambda *args: eval_closed(closed, *args)  # noqa: E731
    fun.__name__ = params["name"]
    return wrap_init(fun), [wrap_init(params[name]) for name in rules]


def _flat_jvp(rule: Callable[..., Any], num_consts: int) -> Callable[..., list[Any]]:
    """A rule as JAX has it: from primals and tangents in one list to those of the results."""

    def jvp(*args: Any) -> list[Any]:
        primals, tangents = split_list(args, [len(args) // 2])
        ins = [Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in tangents]
        outs, moves = rule(primals[num_consts:], ins[num_consts:])
        return [*outs, *map(instantiate, moves)]

    return jvp
