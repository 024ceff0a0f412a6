"""Traces and tracers: how a primitive finds the transformation that handles it.

Tracing is stackless. One trace is current; it processes every primitive, and lifts operands that
are not its own tracers to constants. A transformation's rule runs with the parent trace current.
Outside any transformation the current trace is `EvalTrace`, which computes.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np

import spmd.base.context as context
from spmd.base import dtypes
from spmd.base.context import current_trace
from spmd.base.errors import (
    ArgumentError,
    ConcretizationError,
    MutationError,
    TracerArrayConversionError,
    TracerBoolConversionError,
    TracerIntegerConversionError,
    UnexpectedTracerError,
)
from spmd.base.source import UNKNOWN, Source, current_source
from spmd.core.aval import HasAval, ShapedArray, ShapeDtypeStruct, register_array_type, typeof
from spmd.core.primitive import Primitive

__all__ = ["EvalTrace", "Trace", "Tracer", "current_trace", "full_lower", "set_eager"]


class Trace:
    """The interpreter of one transformation. `parent` is the trace its rules run under."""

    parent: Any = None
    alive: bool = True
    # Its name in the names of scopes that are entered under it.
    transform: str = ""
    # Whether it stages a function, and the mutable arrays that this reached outside of itself.
    stages: bool = False
    touches: Any = None
    # The cells of values of libraries' mutable types that were made under it.
    kept: list[Any] | None = None

    def process(self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """Apply `prim` to operands, some of which may be this trace's tracers."""
        raise NotImplementedError

    def keep(self, cell: Any) -> None:
        """Let a cell that was made under this trace live as long as it does."""
        if self.parent is not None:  # a cell of the outermost can be made anew
            self.kept = [*(self.kept or ()), cell]

    def finish(self) -> None:
        """Declare that no tracer of this trace may be used any more."""
        self.alive = False


class Tracer(HasAval):
    """A value under transformation: it has an aval and behaves like an array of it."""

    __slots__ = ("__weakref__", "_trace")
    __array_priority__ = 1000
    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __init__(self, trace: Trace):
        self._trace = trace

    @property
    def nbytes(self) -> int:
        return self.aval.nbytes

    @property
    def vma(self) -> frozenset[str]:
        return self.aval.vma

    def concrete(self) -> Any:
        """The concrete value, where this transformation knows it; else None."""
        return None

    def where_from(self) -> str:
        """A sentence on where this value comes from, for errors."""
        return ""

    def __repr__(self) -> str:
        return f"Traced<{self.aval!r}>with<{type(self._trace).__name__}>"

    # -- where Python wants a concrete value --

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        raise ConcretizationError(
            f"{current_source()}: an f-string or format() was to write a traced value as {spec!r}, "
            f"but it has a number only when the program runs: {self!r}.\n"
            f"{self.where_from().strip()}\n"
            f'Write debug.print("{{x:{spec}}}", x=...), without f: it formats the number then.'
        )

    def _need(self, error: type[ConcretizationError], what: str, advice: str) -> Any:
        value = self.concrete()
        if value is None:
            raise error(concretization_message(self, what, advice))
        return value

    def _take(self, error: type[ConcretizationError], what: str, advice: str) -> Any:
        """The value, for a number or array that keeps no tangent (`JVPTracer` overrides this)."""
        return self._need(error, what, advice)

    def __bool__(self) -> bool:
        return bool(self._need(TracerBoolConversionError, "a Python bool", _BOOL_ADVICE))

    def __int__(self) -> int:
        return int(self._need(ConcretizationError, "a Python int", _STATIC_ADVICE))

    def __float__(self) -> float:
        return float(self._take(ConcretizationError, "a Python float", _STATIC_ADVICE))

    def __complex__(self) -> complex:
        return complex(self._take(ConcretizationError, "a Python complex", _STATIC_ADVICE))

    def __index__(self) -> int:
        return self._need(TracerIntegerConversionError, "a Python index", _INDEX_ADVICE).__index__()

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        value = self._take(TracerArrayConversionError, "a NumPy array", _ARRAY_ADVICE)
        return np.asarray(value, *args, **kwargs)

    def item(self, *args: Any) -> Any:
        value = self._need(ConcretizationError, "a Python scalar", _STATIC_ADVICE)
        return np.asarray(value).item(*args)

    def tolist(self) -> Any:
        value = self._take(ConcretizationError, "a Python list", _STATIC_ADVICE)
        return np.asarray(value).tolist()

    def tobytes(self, order: Any = "C") -> bytes:
        raise ConcretizationError(concretization_message(self, "bytes", _STATIC_ADVICE))

    def __dlpack__(self, **options: Any) -> Any:
        what = "memory of another library"
        raise ConcretizationError(concretization_message(self, what, _ARRAY_ADVICE))

    def __reduce__(self) -> Any:
        raise ConcretizationError(concretization_message(self, "a pickle", _ARRAY_ADVICE))

    # -- where an array's memory or place is meant, which a traced value has none of --

    committed = property(lambda self: self._unplaced("committed"))
    addressable_shards = property(lambda self: self._unplaced("addressable_shards"))
    global_shards = property(lambda self: self._unplaced("global_shards"))
    is_fully_addressable = property(lambda self: self._unplaced("is_fully_addressable"))
    is_fully_replicated = property(lambda self: self._unplaced("is_fully_replicated"))

    def devices(self) -> Any:
        self._unplaced("devices()")

    def is_deleted(self) -> Any:
        self._unplaced("is_deleted()")

    def delete(self) -> None:
        self._unplaced("delete()")

    def addressable_data(self, index: int) -> Any:
        self._unplaced("addressable_data()")

    def on_device_size_in_bytes(self) -> int:
        self._unplaced("on_device_size_in_bytes()")

    def unsafe_buffer_pointer(self) -> int:
        self._unplaced("unsafe_buffer_pointer()")

    def _unplaced(self, what: str) -> NoReturn:
        raise ConcretizationError(
            f"{current_source()}: {what} is asked of a traced value, which lies nowhere before the "
            f"program runs: {self!r}.\n{self.where_from()}Ask it of the argument or of the result, "
            "outside of the transformed function."
        )

    def __len__(self) -> int:
        if not self.aval.shape:
            raise TypeError("len() of an array without dimensions")
        return self.aval.shape[0]

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise MutationError(in_place_message())

    @property
    def block_until_ready(self) -> NoReturn:
        raise AttributeError(
            f"{current_source()}: block_until_ready is asked of a traced value, which nothing "
            f"computes before the program runs: {self!r}. Ask it of the result"
        )

    def __copy__(self) -> Tracer:
        return self

    def __deepcopy__(self, memo: Any) -> Tracer:
        return self


register_array_type(Tracer, operator.attrgetter("aval"))

_BOOL_ADVICE = (
    "Python's if, while, and, or, not and assert need a concrete value. Use spmd.numpy.where or "
    "lax.cond to choose, lax.while_loop to repeat, & | ~ for logic; or mark the argument static "
    "(jit's static_argnums)."
)
_STATIC_ADVICE = "Keep it an array, or mark the argument it comes from static (static_argnums)."
_INDEX_ADVICE = (
    "Shapes, range() and list indices need concrete integers: mark the argument static "
    "(jit's static_argnums), or use lax.fori_loop, lax.dynamic_slice or jnp.take."
)
_ARRAY_ADVICE = (
    "NumPy functions cannot be traced: use the function of the same name in spmd.numpy, "
    "or move the call outside the transformed function."
)


def in_place_message() -> str:
    """The text of a MutationError."""
    return (
        f"{current_source()}: arrays are immutable; in-place assignment 'x[i] = v' is not "
        "possible. Write 'x = x.at[i].set(v)' (or .add, .multiply, .min, .max) instead."
    )


def concretization_message(tracer: Tracer, what: str, advice: str) -> str:
    origin = tracer.where_from()
    return (
        f"{current_source()}: this needs the value of a traced array as {what}, but only its shape "
        f"and dtype are known: {tracer!r}.\n{origin}{advice}"
    )


# ---- evaluation --------------------------------------------------------------------------------


def _no_eager(prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Evaluate with the primitive's `impl` over NumPy: the evaluation below compile/dispatch."""
    arrays = [to_numpy(x) for x in operands]
    return prim.rule("impl")(np, *arrays, **params)


# Operands that are neither arrays of ours nor tracers.
CONSTANTS = (np.ndarray, np.generic, bool, int, float, complex)


def to_numpy(x: Any) -> np.ndarray:
    """A number or array as NumPy array of its aval's dtype."""
    aval = typeof(x)
    if type(x) is int:
        return dtypes.exact_integer(x, aval.dtype)
    if type(x) is ShapeDtypeStruct:
        raise ArgumentError(
            f"{current_source()}: {x} says a shape and a dtype and has no values; eval_shape, "
            "make_jaxpr, lower and export take it, and computations take arrays"
        )
    return np.asarray(x) if aval.dtype.names else np.asarray(x, dtype=aval.dtype)


class EvalTrace(Trace):
    """The bottom trace: it computes. Its work is done by the hook set by compile/dispatch."""

    eager: Callable[[Primitive, Sequence[Any], dict[str, Any]], Any] = staticmethod(_no_eager)
    array_of: Callable[..., Any] = staticmethod(lambda x, aval=None: x)

    def process(self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        for x in operands:
            if isinstance(x, Tracer):
                raise UnexpectedTracerError(leak_message(x))
        return self.eager(prim, operands, params)


def set_eager(hook: Callable[[Primitive, Sequence[Any], dict[str, Any]], Any]) -> None:
    """Name the function that evaluates primitives outside any transformation."""
    EvalTrace.eager = staticmethod(hook)


def set_array_of(hook: Callable[..., Any]) -> None:
    """Name the function that makes an array of a number or NumPy array; it may get an aval too."""
    EvalTrace.array_of = staticmethod(hook)


def constant(x: Any, aval: ShapedArray) -> Any:
    """A concrete value met in tracing, as an array of spmd's: NumPy's arithmetic differs.

    Staged, a constant of rank 0 is a literal.
    """
    return EvalTrace.array_of(x, aval)


def unchanged(x: Any) -> Any:
    """The result of an operation that has nothing to do: `x`, as an array if it is a constant."""
    return EvalTrace.array_of(x) if isinstance(x, CONSTANTS) else x


EVAL = EvalTrace()
context.evaluation[0] = EVAL
context.state.trace = EVAL


def full_lower(x: Any) -> Any:
    """The simplest value that means the same: a tracer that carries nothing gives its primal."""
    return x


def leak_message(tracer: Tracer) -> str:
    """The text of an UnexpectedTracerError."""
    return (
        f"{current_source()}: a tracer was used after the transformation that made it had ended: "
        f"{tracer!r}.\n{tracer.where_from()}"
        "A traced function must not save intermediate values in globals, attributes, lists or "
        "closures; return them as outputs instead. SPMD_CHECK_LEAKS=1 finds out when it is kept, "
        "and names the line that made it."
    )


def origin(source: Source, inner: Any) -> str:
    """The origin of a tracer that wraps `inner`; lines are recorded under SPMD_CHECK_LEAKS."""
    if isinstance(inner, Tracer) and (told := inner.where_from()):
        return told
    return "" if source is UNKNOWN else f"It was made at {source}.\n"


def check_usable(x: Tracer) -> None:
    """Raise an UnexpectedTracerError if `x`'s trace has ended."""
    if not x._trace.alive:
        raise UnexpectedTracerError(leak_message(x))


def check_no_leak(trace: Trace, what: str, kept: Sequence[Tracer] = ()) -> None:
    """Raise an UnexpectedTracerError if a tracer of a finished trace is still referenced.

    `kept` are those that the trace itself refers to.
    """
    gc.collect()
    ours = {id(x) for x in kept}
    tracers = [x for x in gc.get_objects() if isinstance(x, Tracer) and x._trace is trace]
    leaked = [x for x in tracers if id(x) not in ours]
    if leaked:
        raise UnexpectedTracerError(
            f"{current_source()}: {what} leaked {len(leaked)} traced value(s), the first "
            f"{leaked[0]!r}. {leaked[0].where_from()}Something outside the function keeps it, "
            "where nothing can use it: return it instead."
        )
