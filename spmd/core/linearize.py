"""Reverse mode's first half: run a function once, and keep the residuals of its derivative.

A `LinearizeTrace` pairs each value with a tangent that is only *written down*: primal work happens
in the parent trace, tangent work is staged into a linear jaxpr whose constants are the residuals.
The jvp rules are the same as in forward mode; `MixedTrace` sends each bind of a rule to the right
side.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.config import config
from spmd.base.context import current_trace, state
from spmd.base.source import current_source
from spmd.core.aval import ShapedArray, typeof
from spmd.core.axis import cast_to_vma
from spmd.core.ir import ClosedJaxpr, Var
from spmd.core.jvp import JVPTrace, JVPTracer, apply_jvp, instantiate
from spmd.core.primitive import Primitive, Zero
from spmd.core.rewrite import eval_closed, hoist_consts, opens
from spmd.core.stage import Debug, JaxprTrace, JaxprTracer
from spmd.core.trace import Trace, Tracer, check_no_leak


class MixedTrace(Trace):
    """Current while a jvp rule runs: operations on tangents are staged, the rest is computed."""

    def __init__(self, parent: Trace, tangent_trace: JaxprTrace):
        self.parent = parent
        self.tangent_trace = tangent_trace

    def is_tangent(self, x: Any) -> bool:
        """Whether `x` depends on a tangent, and so is only written down."""
        return isinstance(x, Tracer) and x._trace is self.tangent_trace

    def process(self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        tangents = self.tangent_trace
        # The tangents' trace makes its own tracers, and nothing that wraps them.
        staged = [type(x) is JaxprTracer and x._trace is tangents for x in operands]
        trace = tangents if True in staged else self.parent
        if trace is not self.parent and not all(staged):
            # Of both primals and tangents: look inside, so that primal work stays primal.
            if prim.inline is not None and opens(prim):
                return eval_closed(prim.inline(params), *operands)  # type: ignore[misc]
            if prim.known is not None:
                return self._apart(prim, operands, params, staged)
        return self._under(trace, prim, operands, params)

    def _apart(
        self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any], staged: list[bool]
    ) -> list[Any]:
        """Control flow of both: those of its results that no tangent reaches are primal."""
        given, known, smaller = prim.known(staged, params)  # type: ignore[misc]
        outs = self._under(self.tangent_trace, prim, operands, params)
        if not any(known):
            return outs
        kept = [x for x, keep in zip(operands, given, strict=True) if keep]
        values = iter(self._under(self.parent, prim, kept, smaller))
        return [next(values) if k else x for x, k in zip(outs, known, strict=True)]

    def _under(
        self, trace: Trace, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        # As `current_trace` does, which needs no look at where evaluation begins: it has ended.
        before = state.trace
        state.trace = trace
        try:
            return trace.process(prim, operands, params)
        finally:
            state.trace = before


class GradTracer(JVPTracer):
    """A primal with a tangent that is only written down."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"GradTracer(primal={self.primal}, typeof(tangent)={self.aval.tangent().short()})"


class LinearizeTrace(JVPTrace):
    """A JVP trace whose tangents are staged into `tangent_trace`."""

    tracer = GradTracer

    def __init__(self, parent: Trace, tangent_trace: JaxprTrace):
        super().__init__(parent)
        self.tangent_trace = tangent_trace
        self.mixed = MixedTrace(parent, tangent_trace)

    def differentiate(
        self, prim: Primitive, primals: list[Any], tangents: list[Any], params: dict[str, Any]
    ) -> tuple[Any, Any]:
        # All that is staged here is of one line of the user's: the stack is read once for it.
        before, parent = state.source, state.trace
        state.source = before or current_source(4)
        try:
            if prim.linearize is not None:
                return prim.linearize(self, primals, tangents, **params)
            state.trace = self.mixed
            return apply_jvp(prim, primals, tangents, params)
        finally:
            state.source, state.trace = before, parent

    def bind_linear(self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """Stage one equation of the linear jaxpr; for `linearize` rules."""
        with current_trace(self.tangent_trace):
            return prim.bind(*operands, **params)


def linearize_flat(
    f: Callable[..., Sequence[Any]], primals: Sequence[Any], nonzero: Sequence[bool] | None = None
) -> tuple[list[Any], ClosedJaxpr, list[bool]]:
    """Outputs of `f`, its linear part as a jaxpr closed over residuals, and the nonzero outputs.

    The linear jaxpr maps the tangents of the inputs marked `nonzero` (default all) to the tangents
    of the outputs marked in the result.
    """
    nonzero = [True] * len(primals) if nonzero is None else nonzero
    parent = state.trace
    tangent_trace = JaxprTrace(Debug("linear"))
    trace = LinearizeTrace(parent, tangent_trace)
    args = []
    for x, nz in zip(primals, nonzero, strict=True):
        aval = typeof(x).tangent()
        args.append(trace.tracer(trace, x, tangent_trace.new_arg(aval)) if nz else x)
    try:
        with current_trace(trace):
            outs = list(f(*args))
        pairs = [trace.split(x) for x in outs]
        out_nonzero = [not isinstance(t, Zero) for _, t in pairs]
        with current_trace(tangent_trace):
            tangents = [_varying_like(t, p) for p, t in pairs if not isinstance(t, Zero)]
            linear = tangent_trace.to_jaxpr(tangents)
    finally:
        trace.finish()
        tangent_trace.finish()
    primals_out = [p for p, _ in pairs]
    del args, outs, pairs, tangents
    if config.check_leaks:
        check_no_leak(trace, "the function being differentiated")
    return primals_out, linear, out_nonzero


def _varying_like(tangent: Any, primal: Any) -> Any:
    """A tangent cast to vary over the mesh axes that its primal varies over.

    The cotangent that comes back varies over them too, and the cast's transpose adds it up.
    """
    wanted = typeof(primal).vma
    return cast_to_vma(tangent, wanted, typeof(tangent).vma) if wanted else tangent


_cache: weakref.WeakKeyDictionary[ClosedJaxpr, dict[Any, Any]] = weakref.WeakKeyDictionary()


class Linearized:
    """A jaxpr cut in two: `primal` gives (outs, residuals), `linear` maps (residuals, tangents).

    `out_nonzero` marks the outputs that have a tangent; `residual_avals` types the residuals.
    """

    __slots__ = ("linear", "num_residuals", "out_nonzero", "primal", "residual_avals")

    def __init__(
        self,
        primal: ClosedJaxpr,
        linear: ClosedJaxpr,
        out_nonzero: list[bool],
        residual_avals: list[ShapedArray],
    ):
        self.primal = primal
        self.linear = linear
        self.out_nonzero = out_nonzero
        self.residual_avals = residual_avals
        self.num_residuals = len(residual_avals)


def linearize_jaxpr(
    closed: ClosedJaxpr, nonzero: Sequence[bool], force: Sequence[bool] | None = None
) -> Linearized:
    """Cut a jaxpr into its primal and its linear part, for inputs with `nonzero` tangents.

    Outputs marked in `force` get a tangent even if it is zero (loops need fixed types).
    """
    key = (tuple(nonzero), None if force is None else tuple(force), state.axes)
    entries = _cache.setdefault(closed, {})
    if key not in entries:
        entries[key] = _linearize_jaxpr(closed, nonzero, force)
    return entries[key]


def _linearize_jaxpr(
    closed: ClosedJaxpr, nonzero: Sequence[bool], force: Sequence[bool] | None
) -> Linearized:
    """Trace primal and linear part side by side; constants of the linear part are the residuals."""
    name = closed.jaxpr.name
    primal_trace = JaxprTrace(Debug(name))
    tangent_trace = JaxprTrace(Debug(f"linear_{name}"))
    trace = LinearizeTrace(primal_trace, tangent_trace)
    args: list[Any] = []
    for aval, nz in zip(closed.in_avals, nonzero, strict=True):
        x = primal_trace.new_arg(aval)
        args.append(trace.tracer(trace, x, tangent_trace.new_arg(aval.tangent())) if nz else x)
    with current_trace(trace):
        outs = eval_closed(closed, *args)
    pairs = [trace.split(x) for x in outs]
    force = [False] * len(pairs) if force is None else force
    out_nonzero = [
        must or not isinstance(t, Zero) for (_, t), must in zip(pairs, force, strict=True)
    ]
    with current_trace(tangent_trace):
        tangents = [
            _varying_like(instantiate(t), p)
            for (p, t), nz in zip(pairs, out_nonzero, strict=True)
            if nz
        ]
        linear = tangent_trace.to_jaxpr(tangents)
    linear, residuals = hoist_consts(_dead_code_gone(linear))
    with current_trace(primal_trace):
        primal = primal_trace.to_jaxpr([*(p for p, _ in pairs), *residuals])
    trace.finish()
    primal_trace.finish()
    tangent_trace.finish()
    return Linearized(primal, linear, out_nonzero, linear.in_avals[: len(residuals)])


def _dead_code_gone(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Without equations that no output needs, so that they keep no residuals alive."""
    jaxpr = closed.jaxpr
    live: set[Any] = {v for v in jaxpr.outvars if isinstance(v, Var)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in live for v in eqn.outvars):
            kept.append(eqn)
            live.update(eqn.invars)
    consts = [c for c in zip(jaxpr.constvars, closed.consts, strict=True) if c[0] in live]
    jaxpr = jaxpr.replace(eqns=kept[::-1], constvars=[var for var, _ in consts])
    return ClosedJaxpr(jaxpr, [value for _, value in consts])
