"""Staging: run a Python function on tracers and write its operations down, as a jaxpr.

Everything that happens while a `JaxprTrace` is current is staged, operations on constants too
(omnistaging). Values of outer traces become constants of the jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import spmd.base.context as context
from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.context import current_trace, state
from spmd.base.errors import ArgumentError, RefError, TracingError
from spmd.base.record import record
from spmd.base.source import UNKNOWN, Source, current_source
from spmd.core.aval import NO_AXES, HasAval, ShapedArray, is_arraylike, typeof
from spmd.core.axis import cast_to_vma
from spmd.core.explicit import align_sums, result_avals
from spmd.core.ir import NO_EFFECTS, Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, ShownParams, Var
from spmd.core.mutable.cells import Cell, cell_of
from spmd.core.primitive import Primitive
from spmd.core.trace import Trace, Tracer, check_no_leak, check_usable

PYTHON_SCALARS = (bool, int, float, complex)
# Integers below fit, whether x64 is on or not.
_SMALL = 2**31


@record
class Debug:
    """The traced function, for names and errors: its name and its flat arguments' names."""

    name: str = "<function>"
    arg_names: tuple[str, ...] = ()
    source: Source = UNKNOWN
    # Takes the mutable arrays from outside that the function only read.
    reads: list[Cell] | None = None


NO_DEBUG = Debug()


# The entries of `process_again`, by the types of operands: the types of results, the effects, the
# axes over which operands have to vary, and which operands do not yet.
Known = dict[
    tuple[ShapedArray, ...],
    tuple[tuple[ShapedArray, ...], frozenset[str], frozenset[Any], tuple[int, ...]],
]


class JaxprTracer(Tracer):
    """Stands for a variable of the jaxpr being written."""

    __slots__ = ("_var", "aval")

    def __init__(self, trace: JaxprTrace, aval: ShapedArray, var: Var):
        self._trace = trace
        self.aval = aval
        self._var = var

    def __repr__(self) -> str:
        return f"JitTracer({self.aval})"

    def where_from(self) -> str:
        trace: JaxprTrace = self._trace  # type: ignore[assignment]
        return trace.where_from(self)


class JaxprTrace(Trace):
    """Writes equations instead of computing."""

    stages = True

    def __init__(self, debug: Debug = NO_DEBUG, parent: Trace | None = None):
        self.parent = context.state.trace if parent is None else parent
        self.debug = debug
        self.eqns: list[Eqn] = []
        self.invars: list[Var] = []
        # By identity: the value as it was given (kept alive), its tracer, and the jaxpr's constant.
        self.consts: dict[int, tuple[Any, JaxprTracer, Any]] = {}
        # Whether arrays without dims are constants, not literals.
        self.keeps_arrays = False

    # -- values --

    def new_arg(self, aval: ShapedArray) -> JaxprTracer:
        """A tracer for one more input."""
        var = Var(aval)
        self.invars.append(var)
        return JaxprTracer(self, aval, var)

    def atom(self, x: Any) -> Atom:
        """The variable or literal that stands for any value in this jaxpr."""
        if isinstance(x, JaxprTracer) and x._trace is self:
            return x._var
        if isinstance(x, PYTHON_SCALARS):
            aval = typeof(x)
            if type(x) is int and not -_SMALL <= x < _SMALL:
                dtypes.exact_integer(x, aval.dtype)  # raises if it does not fit
            return Literal(x, aval)
        return self.const(x)

    def const(self, x: Any) -> Atom:
        """A literal or constant variable for a value from outside."""
        if isinstance(x, Tracer):
            if not x._trace.alive:
                check_usable(x)
        elif not self.keeps_arrays or not isinstance(x, HasAval):
            scalar = _literal(x)
            if scalar is not None:
                return scalar
        found = self.consts.get(id(x))
        if found is None:
            aval = typeof(x)
            tracer = JaxprTracer(self, aval, Var(aval))
            found = self.consts[id(x)] = (x, tracer, _fixed(x, aval))
        return found[1]._var

    # -- the work --

    def process(self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        source = state.source or current_source(3)
        invars = self._atoms(operands)
        avals = tuple([v.aval for v in invars])
        plain = True
        for aval in avals:
            if not aval.is_plain:
                plain = False
        if plain:
            out: Any = prim.abstract(*avals, **params) if params else _abstract(prim, avals)
            outs = list(out) if prim.multiple else [out]
        else:
            if prim.vma == "union":
                aligned = self._align_vma(operands, avals)
                if aligned is not operands:
                    invars = self._atoms(aligned)
            outs = result_avals(prim, avals, params)
        if prim.vma != "given" and not (plain and prim.vma == "union"):
            outs = self._with_vma(prim, avals, outs, params)
        if prim.text is not None:
            params = ShownParams(prim, invars, params)
        if prim.is_plain:
            var = Var(outs[0])
            self.eqns.append(Eqn(prim, invars, (var,), params, NO_EFFECTS, source))
            return JaxprTracer(self, var.aval, var)
        outvars = tuple([Var(a) for a in outs])
        self.eqns.append(Eqn(prim, invars, outvars, params, prim.effects(params), source))
        tracers = [JaxprTracer(self, v.aval, v) for v in outvars]
        return tracers if prim.multiple else tracers[0]

    def process_again(
        self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any], known: Known
    ) -> list[Any]:
        """Process a primitive that others like it have been processed before, as a list of results.

        `known` keeps what was found out about these: it is the caller's, for one primitive and for
        parameters that give the same types, and at first empty.
        """
        avals = tuple([x.aval if type(x) is JaxprTracer else typeof(x) for x in operands])
        found = known.get(avals)
        if found is None:
            out = self.process(prim, operands, params)
            outs = list(out) if prim.multiple else [out]
            types = tuple([x.aval for x in outs])
            if prim.vma == "union" and not any([a.explicit for a in (*avals, *types)]):
                union = NO_AXES.union(*[a.vma for a in avals])
                casts = tuple([k for k, a in enumerate(avals) if a.vma != union])
                known[avals] = types, prim.effects(params), union, casts
            return outs
        types, effects, union, casts = found
        if casts:
            operands = list(operands)
            for k in casts:
                if isinstance(x := operands[k], Tracer):
                    operands[k] = cast_to_vma(x, union, avals[k].vma)
        invars, source = self._atoms(operands), state.source or current_source(3)
        if len(types) == 1:
            var = Var(types[0])
            self.eqns.append(Eqn(prim, invars, (var,), params, effects, source))
            return [JaxprTracer(self, types[0], var)]
        outvars = tuple([Var(a) for a in types])
        self.eqns.append(Eqn(prim, invars, outvars, params, effects, source))
        return [JaxprTracer(self, v.aval, v) for v in outvars]

    def _atoms(self, operands: Sequence[Any]) -> tuple[Atom, ...]:
        """The atom for each operand; most are tracers of this trace."""
        return tuple(
            [
                x._var if type(x) is JaxprTracer and x._trace is self else self.atom(x)
                for x in operands
            ]
        )

    def _align_vma(self, operands: Sequence[Any], avals: Sequence[ShapedArray]) -> Sequence[Any]:
        """Cast traced operands to vary over the same axes, so that transposing sums them back."""
        union = NO_AXES.union(*[a.vma for a in avals])
        for aval in avals:
            if aval.explicit is not None:
                union, operands = align_sums(union, operands, avals)
                break
        else:
            if all([a.vma == union for a in avals]):
                return operands
        return [
            cast_to_vma(x, union, x.aval.vma)
            if isinstance(x, Tracer) and x.aval.vma != union
            else x
            for x in operands
        ]

    def _with_vma(
        self, prim: Primitive, avals: Sequence[ShapedArray], outs: list[ShapedArray], params: Any
    ) -> list[ShapedArray]:
        if callable(prim.vma):
            return [a.with_vma(frozenset(prim.vma(avals, params))) for a in outs]
        union = NO_AXES.union(*[a.vma for a in avals]) if avals else NO_AXES
        return [a.with_vma(union) for a in outs] if union else outs

    def to_jaxpr(self, outs: Sequence[Any]) -> ClosedJaxpr:
        """Close the trace: the jaxpr whose outputs are `outs`.

        Raises `TouchedCells` if what was staged wrote to a mutable array from outside.
        """
        if self.touches is not None:
            self.touches.restore()
            self.touches.check(self.debug.name, self.debug.reads)
        outvars = [self.atom(x) for x in outs]
        consts: list[tuple[Any, Var]] = []
        if self.consts:
            used: set[Any] = {*outvars, *[a for eqn in self.eqns for a in eqn.invars]}
            consts = [(v, t._var) for _, t, v in self.consts.values() if t._var in used]
        names = self.debug.name, self.debug.arg_names
        jaxpr = Jaxpr([v for _, v in consts], self.invars, self.eqns, outvars, *names)
        return ClosedJaxpr(jaxpr, [c for c, _ in consts])

    # -- errors --

    def where_from(self, tracer: JaxprTracer) -> str:
        """A sentence on a tracer's origin."""
        name = self.debug.name
        if tracer._var in self.invars:
            k = self.invars.index(tracer._var)
            arg = self.debug.arg_names[k] if k < len(self.debug.arg_names) else f"number {k}"
            return f"It is argument {arg} of {name}, traced at {self.debug.source}.\n"
        for eqn in self.eqns:
            if tracer._var in eqn.outvars:
                return f"It was computed by {eqn.prim.name} at {eqn.source}, in {name}.\n"
        return f"It was made while tracing {name}.\n"


# Results of primitives without parameters, by the types of operands and by the setting that dtypes
# depend on. Avals are kept for ever, so these may be.
_known_avals: dict[Any, Any] = {}


def _abstract(prim: Primitive, avals: tuple[ShapedArray, ...]) -> Any:
    """The abstract rule of a primitive without parameters, asked once for each kind of operands."""
    key = prim, avals, config.enable_x64
    found = _known_avals.get(key)
    if found is None:
        found = _known_avals[key] = prim.abstract(*avals)
    return found


def _fixed(x: Any, aval: ShapedArray) -> Any:
    """A constant as it is now: a program does not change when its caller writes to an array."""
    if not isinstance(x, np.ndarray) or not x.flags.writeable:
        return x
    copy = x.astype(aval.dtype)
    copy.flags.writeable = False
    return copy


def _literal(x: Any) -> Literal | None:
    """A literal for a concrete scalar; None where it needs a constant variable."""
    aval = typeof(x)
    if aval.shape or aval.dtype.names or dtypes.is_small(aval.dtype):
        return None
    value = x[()] if type(x) is np.ndarray else np.asarray(x)[()]
    if value.dtype is not aval.dtype:
        value = value.astype(aval.dtype)
    if aval.weak_type:
        value = value.item()
        return Literal(value, aval) if typeof(value) is aval else None
    return Literal(value, aval)


def is_staging() -> bool:
    """Whether operations become equations of a program that is being traced."""
    at = state.trace
    while at is not None and not isinstance(at, JaxprTrace):
        at = at.parent
    return at is not None


def check_outputs(outs: Sequence[Any], debug: Debug) -> None:
    """Raise an ArgumentError for a traced function's output that is no array."""
    for x in outs:
        cell = cell_of(x)
        if cell is not None:
            raise RefError(
                f"{debug.name} (at {debug.source}) returned a mutable array ({cell.aval.short()}, "
                f"made at {cell.made_at}), which can't be returned: return freeze(ref) or ref[...]"
            )
        if not is_arraylike(x):
            raise ArgumentError(
                f"{debug.name} (at {debug.source}) returned {x!r} of type {type(x).__name__}; "
                "a transformed function must return arrays, numbers, or pytrees of them"
            )


def trace_to_jaxpr(
    f: Callable[..., Sequence[Any]],
    in_avals: Sequence[ShapedArray],
    debug: Debug | None = None,
    keeps_arrays: bool = False,
) -> ClosedJaxpr:
    """Trace a function of flat arguments that returns a flat list, at the given avals.

    With `keeps_arrays` all arrays from outside are constants of the jaxpr; without, those that have
    no dims are literals.
    """
    debug = debug or Debug(getattr(f, "__name__", "<function>"))
    if config.no_tracing:
        raise TracingError(
            f"{debug.name} (at {debug.source}) would be traced, and no_tracing is set: this call "
            "differs from those before in shapes, dtypes, structure or static values"
        )
    trace = JaxprTrace(debug)
    trace.keeps_arrays = keeps_arrays
    try:
        with current_trace(trace):
            args = [trace.new_arg(a) for a in in_avals]
            outs = list(f(*args))
            check_outputs(outs, debug)
            closed = trace.to_jaxpr(outs)
    finally:
        if trace.touches is not None:
            trace.touches.restore()
        trace.finish()
    del args, outs
    if config.check_leaks:
        kept = [tracer for _, tracer, _ in trace.consts.values()]
        check_no_leak(trace, debug.name, kept)
    return closed
