"""Forward mode: a value travels together with its tangent.

Knows no operation: it asks each primitive for its `jvp` rule and runs it one trace further out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.context import current_trace, state
from spmd.base.errors import ConcretizationError
from spmd.base.source import UNKNOWN, current_source
from spmd.base.util import unzip2
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import ClosedJaxpr
from spmd.core.primitive import Primitive, Refused, Zero, linear
from spmd.core.rewrite import close, eval_closed
from spmd.core.structural import zeros_like_aval
from spmd.core.trace import (
    Trace,
    Tracer,
    check_no_leak,
    check_usable,
    concretization_message,
    origin,
)

# ---- tangents ----------------------------------------------------------------------------------


def zero_tangent(x: Any) -> Zero:
    """The zero tangent of a value."""
    aval = typeof(x)
    found = _zeros.get(aval)
    if found is None:
        found = _zeros[aval] = Zero(aval.tangent())
    return found


# The zero tangent of each type of value: types are kept for ever, so these may be.
_zeros: dict[ShapedArray, Zero] = {}


def instantiate(tangent: Any) -> Any:
    """A tangent as an array: zeros for a `Zero`."""
    return zeros_like_aval(tangent.aval) if isinstance(tangent, Zero) else tangent


def is_float0(t: Any) -> bool:
    """Whether a tangent carries no information, as those of integers do."""
    return not isinstance(t, Zero) and typeof(t).dtype == dtypes.float0


def apply_jvp(
    prim: Primitive, primals: Sequence[Any], tangents: Sequence[Any], params: dict[str, Any]
) -> tuple[Any, Any]:
    """Run a primitive's jvp rule; `linear` primitives are applied to the tangents."""
    rule: Any = prim.jvp
    if isinstance(rule, Refused):
        rule = prim.rule("jvp")
    if rule is not linear:
        return rule(primals, tangents, **params)
    out = prim.bind(*primals, **params)
    return out, prim.bind(*[instantiate(t) for t in tangents], **params)


# ---- the trace ---------------------------------------------------------------------------------


class JVPTracer(Tracer):
    """A primal with its tangent."""

    __slots__ = ("_source", "aval", "primal", "tangent")

    def __init__(self, trace: Trace, primal: Any, tangent: Any):
        self._trace = trace
        self._source = current_source() if config.check_leaks else UNKNOWN
        self.aval = typeof(primal)
        self.primal = primal
        self.tangent = tangent

    def concrete(self) -> Any:
        primal = self.primal
        return primal.concrete() if isinstance(primal, Tracer) else primal

    def _take(self, error: type[ConcretizationError], what: str, advice: str) -> Any:
        """Raise: as a Python number or NumPy array, the value would lose its tangent."""
        if self.concrete() is None:
            raise error(concretization_message(self, what, advice))
        raise error(
            f"{current_source()}: this needs the value of an array that is being differentiated as "
            f"{what}, and the derivative would be lost: {self!r}.\n{self.where_from()}Keep it an "
            "array: the functions of spmd.numpy take it. Where no derivative is meant, take "
            "lax.stop_gradient(x)."
        )

    def where_from(self) -> str:
        return origin(self._source, self.primal)

    def __repr__(self) -> str:
        return f"JVPTracer(primal={self.primal}, tangent={self.tangent})"


class JVPTrace(Trace):
    """Pushes tangents through every primitive."""

    tracer: Callable[..., Any] = JVPTracer
    transform = "jvp"

    def __init__(self, parent: Trace):
        self.parent = parent

    def split(self, x: Any) -> tuple[Any, Any]:
        """A value as primal and tangent under this trace."""
        if isinstance(x, Tracer):
            if x._trace is self:
                return x.primal, x.tangent  # type: ignore[attr-defined]
            check_usable(x)
        return x, zero_tangent(x)

    def join(self, out: Any, tangent: Any) -> Any:
        """One value out of a primal and a tangent; just the primal where the tangent is zero."""
        if isinstance(tangent, Zero) or is_float0(tangent):
            return out
        return self.tracer(self, out, tangent)

    def process(self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        primals, tangents, any_tangent = [], [], False
        for x in operands:
            primal, tangent = self.split(x)
            primals.append(primal)
            tangents.append(tangent)
            any_tangent = any_tangent or type(tangent) is not Zero
        # As `current_trace` does, which needs no look at where evaluation begins: it has ended.
        before = state.trace
        state.trace = self.parent
        try:
            if not any_tangent:
                return prim.bind(*primals, **params)
            out, tangent = self.differentiate(prim, primals, tangents, params)
        finally:
            state.trace = before
        if prim.multiple:
            return [self.join(o, t) for o, t in zip(out, tangent, strict=True)]
        return self.join(out, tangent)

    def differentiate(
        self, prim: Primitive, primals: list[Any], tangents: list[Any], params: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Outputs and tangents of one primitive."""
        return apply_jvp(prim, primals, tangents, params)


# ---- flat jvp, and jvp of a jaxpr --------------------------------------------------------------


def jvp_flat(
    f: Callable[..., Sequence[Any]], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Outputs and tangents of a function of flat arguments (tangents may be `Zero`)."""
    trace = JVPTrace(state.trace)
    args = [trace.join(p, t) for p, t in zip(primals, tangents, strict=True)]
    try:
        with current_trace(trace):
            outs = f(*args)
        found = unzip2(trace.split(x) for x in outs)
    finally:
        trace.finish()
    del args, outs
    if config.check_leaks:
        check_no_leak(trace, "the function under jvp")
    return found


def jvp_jaxpr(
    closed: ClosedJaxpr, nonzero: Sequence[bool], instantiate_outs: bool | Sequence[bool] = False
) -> tuple[ClosedJaxpr, list[bool]]:
    """The jaxpr of (primals, nonzero tangents) -> (outs, nonzero tangents), and which are."""
    avals = closed.in_avals
    n = len(avals)
    tangent_avals = [a.tangent() for a, nz in zip(avals, nonzero, strict=True) if nz]
    out_nonzero: list[bool] = []
    force = (
        [instantiate_outs] * len(closed.out_avals)
        if isinstance(instantiate_outs, bool)
        else list(instantiate_outs)
    )

    def f(*args: Any) -> list[Any]:
        given = iter(args[n:])
        tangents = [
            next(given) if nz else Zero(a.tangent()) for a, nz in zip(avals, nonzero, strict=True)
        ]
        outs, out_tangents = jvp_flat(lambda *xs: eval_closed(closed, *xs), args[:n], tangents)
        out_nonzero.extend(
            must or not isinstance(t, Zero) for t, must in zip(out_tangents, force, strict=True)
        )
        kept = [instantiate(t) for t, nz in zip(out_tangents, out_nonzero, strict=True) if nz]
        return [*outs, *kept]

    out = close(f, [*avals, *tangent_avals], f"jvp_{closed.jaxpr.name}")
    return out, out_nonzero
