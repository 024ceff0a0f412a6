"""Taylor mode: a value travels together with its derivatives along a curve, up to some order.

Terms are derivatives, not divided by factorials: then the derivative of a curve is the same curve
moved by one, and a primitive needs nothing but its jvp rule. The k-th derivative of `f(x(t))` is
the (k-1)-th of `f'(x(t)) x'(t)`, which is the rule, run one order lower. That serves every
primitive, at a cost that can double with each order; `rules` holds the better ones (Leibniz for
products, recurrences for exp and sin), which `lax/taylor.py` and `lax/taylor_control.py` add.

A term that is None is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.config import config
from spmd.base.context import current_trace, state
from spmd.base.util import unzip2
from spmd.core.aval import typeof
from spmd.core.ir import ClosedJaxpr
from spmd.core.jvp import JVPTracer, apply_jvp, is_float0
from spmd.core.primitive import Primitive, Zero, linear
from spmd.core.rewrite import close, eval_closed
from spmd.core.structural import zeros_like_aval
from spmd.core.trace import Trace, Tracer, check_no_leak, check_usable

Terms = list[Any]  # the derivatives of orders 1, 2, ..., each an array or None

# Primitive -> `rule(prim, primals, series, params) -> (out, terms)`, or lists of both if multiple.
rules: dict[Primitive, Callable[..., Any]] = {}


# ---- the trace ---------------------------------------------------------------------------------


class JetTracer(JVPTracer):
    """A primal with its derivatives, the terms, as `tangent`."""

    __slots__ = ()

    def concrete(self) -> Any:
        return None

    def __repr__(self) -> str:
        return f"JetTracer(primal={self.primal}, terms={self.tangent!r})"


class JetTrace(Trace):
    """Pushes truncated Taylor series through every primitive."""

    def __init__(self, parent: Trace, order: int):
        self.parent = parent
        self.order = order

    def split(self, x: Any) -> tuple[Any, Terms]:
        """A value as primal and terms under this trace."""
        if isinstance(x, Tracer):
            if x._trace is self:
                return x.primal, x.tangent  # type: ignore[attr-defined]
            check_usable(x)
        return x, [None] * self.order

    def join(self, primal: Any, terms: Terms) -> Any:
        """One value of a primal and its terms; just the primal where all of them are zero."""
        if is_constant(terms):
            return primal
        return JetTracer(self, primal, terms)

    def process(self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        primals, series = unzip2([self.split(x) for x in operands])
        with current_trace(self.parent):
            if all([is_constant(terms) for terms in series]):
                return prim.bind(*primals, **params)
            out, terms = apply_jet(prim, primals, series, params)
        if prim.multiple:
            return [self.join(o, t) for o, t in zip(out, terms, strict=True)]
        return self.join(out, terms)


def is_constant(terms: Terms) -> bool:
    """Whether all terms are zero."""
    return all([t is None for t in terms])


# ---- rules -------------------------------------------------------------------------------------


def apply_jet(
    prim: Primitive, primals: Sequence[Any], series: Sequence[Terms], params: dict[str, Any]
) -> tuple[Any, Any]:
    """A primitive's outputs and their terms."""
    rule = rules.get(prim)
    if rule is None:
        rule = by_linearity if prim.jvp is linear else by_derivative
    return rule(prim, primals, series, params)


def by_linearity(
    prim: Primitive, primals: Sequence[Any], series: Sequence[Terms], params: dict[str, Any]
) -> tuple[Any, Any]:
    """A primitive that is linear in all its operands is applied to the terms of each order."""
    out = prim.bind(*primals, **params)
    columns = []
    for column in zip(*series, strict=True):
        if is_constant(list(column)):
            columns.append([None] * len(out) if prim.multiple else None)
        else:
            full = [instantiate(t, x) for t, x in zip(column, primals, strict=True)]
            columns.append(prim.bind(*full, **params))
    return out, by_output(columns) if prim.multiple else columns


def by_derivative(
    prim: Primitive, primals: Sequence[Any], series: Sequence[Terms], params: dict[str, Any]
) -> tuple[Any, Any]:
    """The terms of the result's derivative: the jvp rule on curves of one order less."""
    lower = JetTrace(state.trace, len(series[0]) - 1)
    curves = [lower.join(x, terms[:-1]) for x, terms in zip(primals, series, strict=True)]
    moved = []
    for x, (first, *rest) in zip(primals, series, strict=True):
        if first is None and is_constant(rest):
            moved.append(Zero(typeof(x).tangent()))
        else:
            moved.append(lower.join(instantiate(first, x), rest))
    try:
        with current_trace(lower):
            outs, tangents = apply_jvp(prim, curves, moved, params)
        if not prim.multiple:
            return lower.split(outs)[0], _terms_of(lower, tangents)
        terms = [_terms_of(lower, t) for t in tangents]
        return [lower.split(x)[0] for x in outs], terms
    finally:
        lower.finish()


def _terms_of(lower: JetTrace, tangent: Any) -> Terms:
    """The derivative of a curve, as the terms of that curve."""
    if isinstance(tangent, Zero) or is_float0(tangent):
        return [None] * (lower.order + 1)
    first, rest = lower.split(tangent)
    return [first, *rest]


def instantiate(term: Any, primal: Any) -> Any:
    """A term as an array: zeros like the primal for None."""
    return zeros_like_aval(typeof(primal).tangent()) if term is None else term


def by_output(columns: Sequence[Sequence[Any]]) -> list[Terms]:
    """From the outputs of each order to the terms of each output."""
    return [list(terms) for terms in zip(*columns, strict=True)]


# ---- flat jets, and jets of jaxprs -------------------------------------------------------------


def jet_flat(
    f: Callable[..., Sequence[Any]], primals: Sequence[Any], series: Sequence[Terms], order: int
) -> tuple[list[Any], list[Terms]]:
    """Outputs of a function of flat arguments, and their terms."""
    trace = JetTrace(state.trace, order)
    args = [trace.join(x, terms) for x, terms in zip(primals, series, strict=True)]
    try:
        with current_trace(trace):
            outs = f(*args)
        found = unzip2([trace.split(x) for x in outs])
    finally:
        trace.finish()
    del args, outs
    if config.check_leaks:
        check_no_leak(trace, "the function under jet")
    return found


def interleave(primals: Sequence[Any], series: Sequence[Terms], flags: Sequence[bool]) -> list[Any]:
    """Each primal followed, where its flag is set, by its terms as arrays."""
    out = []
    for x, terms, moves in zip(primals, series, flags, strict=True):
        out.append(x)
        if moves:
            out += [instantiate(t, x) for t in terms]
    return out


def separate(
    values: Sequence[Any], flags: Sequence[bool], order: int
) -> tuple[list[Any], list[Terms]]:
    """The inverse of `interleave`."""
    left = iter(values)
    primals, series = [], []
    for moves in flags:
        primals.append(next(left))
        series.append([next(left) if moves else None for _ in range(order)])
    return primals, series


def jet_jaxpr(
    closed: ClosedJaxpr,
    moves: Sequence[bool],
    order: int,
    force_out: Sequence[bool] | None = None,
    vma: frozenset[Any] = frozenset(),
) -> tuple[ClosedJaxpr, list[bool]]:
    """A jaxpr of interleaved inputs and outputs, and which outputs have terms.

    Inputs and outputs are interleaved; the terms of the inputs also vary over `vma`.
    """
    avals: list[Any] = []
    for a, m in zip(closed.in_avals, moves, strict=True):
        term = a.tangent().strip_weak()
        avals += [a, *([term.update(vma=term.vma | vma)] * (order if m else 0))]
    force = force_out or [False] * len(closed.out_avals)
    out_moves: list[bool] = []

    def f(*args: Any) -> list[Any]:
        primals, series = separate(args, moves, order)
        outs, terms = jet_flat(lambda *xs: eval_closed(closed, *xs), primals, series, order)
        out_moves.extend(must or not is_constant(t) for t, must in zip(terms, force, strict=True))
        return interleave(outs, terms, out_moves)

    return close(f, avals, f"jet_{closed.jaxpr.name}"), out_moves
