"""`jax.interpreters.partial_eval`: tracing to jaxprs, with or without known values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

from spmd.as_jax.jax.extend.linear_util import WrappedFun
from spmd.as_jax.refuse import missing
from spmd.base.context import current_trace, state
from spmd.core.aval import ShapedArray
from spmd.core.ir import Jaxpr
from spmd.core.linearize import MixedTrace
from spmd.core.rewrite import dce
from spmd.core.stage import JaxprTrace, JaxprTracer, trace_to_jaxpr

__all__ = [
    "DynamicJaxprTracer",
    "JaxprTracer",
    "PartialVal",
    "dce_jaxpr",
    "dce_jaxpr_consts",
    "trace_to_jaxpr_dynamic",
    "trace_to_jaxpr_nounits",
]
__getattr__ = missing("jax.interpreters.partial_eval")

DynamicJaxprTracer = JaxprTracer


class PartialVal(tuple):
    """A pair: the aval of a value that is not known, or None; and a known value, or None."""

    @staticmethod
    def known(const: Any) -> PartialVal:
        """A known value."""
        return PartialVal((None, const))

    @staticmethod
    def unknown(aval: ShapedArray) -> PartialVal:
        """A value of which only the aval is known."""
        return PartialVal((aval, None))

    @property
    def aval(self) -> ShapedArray | None:
        """The aval of an unknown value."""
        return self[0]

    @property
    def const(self) -> Any:
        """A known value."""
        return self[1]

    def is_known(self) -> bool:
        """Whether the value is known."""
        return self.aval is None

    def get_known(self) -> Any:
        """The value if it is known, else None."""
        return self.const if self.aval is None else None

    def get_aval(self) -> Any:
        """The aval of an unknown value."""
        return self.aval


def trace_to_jaxpr_nounits(
    fun: WrappedFun, pvals: Sequence[PartialVal], instantiate: bool | Sequence[bool] = False
) -> tuple[Jaxpr, list[PartialVal], tuple[Any, ...]]:
    """Compute what follows from the known values; the jaxpr is what is left to compute.

    Results marked in `instantiate` are in the jaxpr though they are known.
    """
    unknown = JaxprTrace()
    try:
        with current_trace(MixedTrace(state.trace, unknown)):
            args = [p.const if p.aval is None else unknown.new_arg(p.aval) for p in pvals]
            outs = list(fun.call_wrapped(*args))
        forced = [instantiate] * len(outs) if isinstance(instantiate, bool) else list(instantiate)
        staged = [
            f or (isinstance(x, JaxprTracer) and x._trace is unknown)
            for x, f in zip(outs, forced, strict=True)
        ]
        closed = unknown.to_jaxpr(list(compress(outs, staged)))
    finally:
        unknown.finish()
    avals = iter(closed.out_avals)
    found = [
        PartialVal.unknown(next(avals)) if s else PartialVal.known(x)
        for x, s in zip(outs, staged, strict=True)
    ]
    return closed.jaxpr, found, closed.consts


def trace_to_jaxpr_dynamic(
    fun: WrappedFun,
    in_avals: Sequence[ShapedArray],
    *,
    keep_inputs: Sequence[bool] | None = None,
    lower: bool = False,
    auto_dce: bool = False,
) -> tuple[Jaxpr, list[ShapedArray], tuple[Any, ...]]:
    """Trace a function of flat arguments: its jaxpr, the avals of results, and the constants."""
    closed = trace_to_jaxpr(fun.call_wrapped, list(in_avals))
    return closed.jaxpr, closed.out_avals, closed.consts


def dce_jaxpr(
    jaxpr: Jaxpr, used_outputs: Sequence[bool], instantiate: bool | Sequence[bool] = False
) -> tuple[Jaxpr, list[bool]]:
    """The jaxpr of the used outputs and of what they need, and which inputs it has kept."""
    smaller, used = dce(jaxpr, used_outputs)
    kept = [instantiate] * len(used) if isinstance(instantiate, bool) else list(instantiate)
    used = [u or k for u, k in zip(used, kept, strict=True)]
    return smaller.replace(invars=list(compress(smaller.invars, used))), used


def dce_jaxpr_consts(
    jaxpr: Jaxpr, used_outputs: Sequence[bool], instantiate: bool | Sequence[bool] = False
) -> tuple[Jaxpr, list[bool], list[bool]]:
    """The same, and of the constants those that it needs: which it has kept, and which inputs."""
    count = len(jaxpr.constvars)
    opened = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    inputs = [instantiate] * len(jaxpr.invars) if isinstance(instantiate, bool) else instantiate
    smaller, used = dce_jaxpr(opened, used_outputs, [False] * count + list(inputs))
    kept = sum(used[:count])
    parts = {"constvars": smaller.invars[:kept], "invars": smaller.invars[kept:]}
    return smaller.replace(**parts), used[:count], used[count:]
