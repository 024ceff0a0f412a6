"""`jax.extend.core`: jaxprs and their parts, primitives, and the state of tracing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import numpy as np

import spmd.core.check as check
import spmd.core.ir as ir
from spmd.as_jax.jax.api_util import DebugInfo
from spmd.as_jax.jax.extend import primitives
from spmd.as_jax.primitive import Primitive
from spmd.as_jax.refuse import missing
from spmd.as_jax.trace import Trace, Tracer
from spmd.base import dtypes
from spmd.base.context import state
from spmd.base.errors import ConcretizationError, JaxprTypeError
from spmd.core.aval import ShapedArray, is_arraylike
from spmd.core.ir import ClosedJaxpr, Literal, Var
from spmd.core.ir import Eqn as JaxprEqn
from spmd.core.rewrite import eval_closed
from spmd.core.stage import JaxprTrace
from spmd.core.trace import EVAL
from spmd.core.trace import Trace as _OurTrace
from spmd.core.vmap import BatchTrace
from spmd.numpy.array_type import Array

__all__ = [
    "AbstractToken",
    "CallPrimitive",
    "ClosedJaxpr",
    "DebugInfo",
    "DropVar",
    "Effect",
    "Effects",
    "Jaxpr",
    "JaxprEqn",
    "JaxprTypeError",
    "Literal",
    "Primitive",
    "Token",
    "Trace",
    "TraceTag",
    "Tracer",
    "Var",
    "array_types",
    "call_impl",
    "check_jaxpr",
    "concrete_or_error",
    "find_top_trace",
    "full_lower",
    "gensym",
    "get_opaque_trace_state",
    "jaxpr_as_fun",
    "jaxprs_in_params",
    "mapped_aval",
    "new_jaxpr_eqn",
    "no_effects",
    "nonempty_axis_env_DO_NOT_USE",
    "primal_dtype_to_tangent_dtype",
    "primitives",
    "set_current_trace",
    "subjaxprs",
    "take_current_trace",
    "unmapped_aval",
    "unsafe_am_i_under_a_jit_DO_NOT_USE",
    "unsafe_am_i_under_a_vmap_DO_NOT_USE",
    "unsafe_get_axis_names_DO_NOT_USE",
    "valid_jaxtype",
]
__getattr__ = missing("jax.extend.core")

__path__: list[str] = []  # `primitives` is below it

no_effects: frozenset[Any] = frozenset()
Effects = Set[Any]
valid_jaxtype = is_arraylike
array_types = {np.ndarray, *(dtype.type for dtype in dtypes.ANY)}
AbstractToken = ShapedArray
Token = Array


class Effect:
    """The base of classes of effects; primitives of spmd have effects by name."""


class DropVar(Var):
    """The class of results that nothing reads; spmd's jaxprs keep a variable for each."""


class TraceTag:
    """The identity that two traces of one transformation have in common."""


class _Ours(type):
    """The type of a class whose instances are those of a class of ours."""

    ours: type

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, cls.ours)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.ours)


class Jaxpr(metaclass=_Ours):
    """Makes a jaxpr from JAX's arguments, in JAX's order."""

    ours = ir.Jaxpr

    def __new__(  # type: ignore[misc]
        cls,
        constvars: Sequence[Var],
        invars: Sequence[Var],
        outvars: Sequence[Any],
        eqns: Sequence[JaxprEqn],
        effects: Any = no_effects,
        debug_info: Any = None,
    ) -> ir.Jaxpr:
        return ir.Jaxpr(constvars, invars, eqns, outvars)


class CallPrimitive(Primitive):
    """A primitive with a function among its parameters; its rules say what a call means."""

    call_primitive = True

    def __init__(self, name: str):
        super().__init__(name)
        self.multiple_results = True


def call_impl(f: Any, *args: Any, **params: Any) -> Any:
    """Call a wrapped function; the parameters are those of its primitive."""
    return f.call_wrapped(*args)


def primal_dtype_to_tangent_dtype(primal_dtype: Any) -> np.dtype:
    """The dtype of tangents of values of a dtype."""
    return ShapedArray((), np.dtype(primal_dtype)).tangent().dtype


def new_jaxpr_eqn(
    invars: Sequence[Any],
    outvars: Sequence[Var],
    primitive: Any,
    params: dict[str, Any],
    effects: Any = no_effects,
    source_info: Any = None,
    ctx: Any = None,
) -> JaxprEqn:
    """Make an equation."""
    return JaxprEqn(primitive, tuple(invars), tuple(outvars), params, frozenset(effects))


def gensym(*_: Any) -> Callable[[ShapedArray], Var]:
    """A function that makes a new variable of an aval."""
    return Var


def full_lower(x: Any) -> Any:
    """The simplest value that means the same, as the class of a library's tracer says."""
    return x.full_lower() if isinstance(x, Tracer) and hasattr(x, "full_lower") else x


def jaxpr_as_fun(closed_jaxpr: ClosedJaxpr, *args: Any) -> Callable[..., list[Any]]:
    """A function of (the rest of) flat arguments that does what a closed jaxpr says."""
    return functools.partial(eval_closed, closed_jaxpr, *args)


def jaxprs_in_params(params: dict[str, Any]) -> Iterator[ir.Jaxpr]:
    """The jaxprs in an equation's parameters."""
    for _, inner in ir.subjaxprs(params):
        yield inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner


def subjaxprs(jaxpr: ir.Jaxpr) -> Iterator[ir.Jaxpr]:
    """The jaxprs in the parameters of a jaxpr's equations, without those inside them."""
    for eqn in jaxpr.eqns:
        yield from jaxprs_in_params(eqn.params)


def check_jaxpr(jaxpr: ir.Jaxpr) -> None:
    """Raise a `JaxprTypeError` that names the first equation that breaks the rules."""
    check.check_jaxpr(jaxpr)


def mapped_aval(size: int, axis: int | None, aval: ShapedArray) -> ShapedArray:
    """The aval of one example of a value with a batched dim."""
    if axis is None:
        return aval
    return aval.update(shape=aval.shape[:axis] + aval.shape[axis + 1 :])


def unmapped_aval(
    size: int, axis: int | None, aval: ShapedArray, explicit_mesh_axis: Any = None
) -> ShapedArray:
    """The aval of examples stacked along a dim."""
    if axis is None:
        return aval
    return aval.update(shape=(*aval.shape[:axis], size, *aval.shape[axis:]))


def concrete_or_error(force: Any, val: Any, context: str = "") -> Any:
    """The concrete val of `val`, through `force`; raises what a tracer raises."""
    if isinstance(val, Tracer) and val.concrete() is None:
        val._need(ConcretizationError, "a concrete val", f"{context} ")
    return val if force is None else force(val)


# ---- the state of tracing ----------------------------------------------------------------------


class OpaqueTraceState:
    """The trace that is current, to be compared with that of another time."""

    def __init__(self, trace: _OurTrace):
        self._trace = trace

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpaqueTraceState) and self._trace is other._trace

    def __hash__(self) -> int:
        return id(self._trace)

    def __repr__(self) -> str:
        return f"OpaqueTraceState({type(self._trace).__name__})"


def get_opaque_trace_state(convention: str | None = None) -> OpaqueTraceState:
    """The trace that is current, as an object to compare."""
    return OpaqueTraceState(state.trace)


# A trace stands for its own transformation, as JAX's `trace.main` did.
_OurTrace.main = property(lambda trace: trace)  # type: ignore[attr-defined]
# Any value is one of a trace of ours, which lifts it when an operation takes it.
_OurTrace.stage_value = lambda trace, x: x  # type: ignore[attr-defined]


def find_top_trace(args: Any = ()) -> _OurTrace:
    """The trace that handles operations now."""
    return state.trace


def trace_state_clean() -> bool:
    """Whether nothing is being traced."""
    return state.trace is EVAL


@contextlib.contextmanager
def take_current_trace() -> Iterator[_OurTrace]:
    """The current trace; in the block, operations are evaluated."""
    before = state.trace
    state.trace = EVAL
    try:
        yield before
    finally:
        state.trace = before


@contextlib.contextmanager
def set_current_trace(trace: _OurTrace, check_leaks: bool = False) -> Iterator[None]:
    """In the block, `trace` handles operations."""
    before = state.trace
    state.trace = trace
    try:
        yield
    finally:
        state.trace = before


def nonempty_axis_env_DO_NOT_USE() -> bool:
    """Whether an axis has a name in scope."""
    return bool(state.axes)


def unsafe_get_axis_names_DO_NOT_USE() -> list[Any]:
    """The names of the axes in scope: those of `vmap`, `pmap` and `shard_map`."""
    return [axis.name for axis in state.axes]


def unsafe_am_i_under_a_jit_DO_NOT_USE() -> bool:
    """Whether a function is being staged to a jaxpr."""
    return any(isinstance(trace, JaxprTrace) for trace in _stack())


def unsafe_am_i_under_a_vmap_DO_NOT_USE() -> bool:
    """Whether a function is being vectorised."""
    return any(isinstance(trace, BatchTrace) for trace in _stack())


def _stack() -> Iterator[_OurTrace]:
    """The current trace, and those that it hands operations to."""
    trace: Any = state.trace
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent", None)
