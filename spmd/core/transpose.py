"""Reverse mode's second half: run a linear jaxpr backwards, turning cotangents of its outputs into
cotangents of its inputs.

Equations that depend on no linear input (they recompute residuals, as in `checkpoint`) run forward
first. Knows no operation: it asks each primitive for its `transpose` rule. The layouts of
cotangents are the compiler's choice, but for those of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base import dtypes
from spmd.base.context import state
from spmd.base.source import UNKNOWN, Source, transposed
from spmd.core.aval import ShapedArray, typeof
from spmd.core.explicit import match_sharding, to_auto
from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var
from spmd.core.primitive import Linear, Refused, Zero
from spmd.core.rewrite import close, prune_eqn
from spmd.core.structural import add_any, zeros_like_aval


def add_cotangents(x: Any, y: Any) -> Any:
    """The sum of two cotangents, either of which may be a `Zero`."""
    if isinstance(x, Zero):
        return y
    if isinstance(y, Zero):
        return x
    return add_any(x, y)


class _Cotangents:
    """The cotangent collected so far for each linear variable."""

    def __init__(self) -> None:
        self._of: dict[Var, Any] = {}

    def add(self, var: Atom, ct: Any) -> None:
        if ct is None or isinstance(ct, Zero) or isinstance(var, Literal):
            return
        aval = typeof(ct)
        if aval.dtype == dtypes.float0:
            return
        if aval.explicit is not None:
            ct = to_auto(ct)
        before = self._of.get(var)
        self._of[var] = ct if before is None else add_any(before, ct)

    def take(self, var: Var) -> Any:
        found = self._of.pop(var, None)
        return Zero(var.aval) if found is None else found

    def result(self, var: Var) -> Any:
        """The cotangent of an input, laid out as that is."""
        ct, aval = self.take(var), var.aval.cotangent()
        if isinstance(ct, Zero):
            return Zero(aval)
        return ct if typeof(ct).explicit is aval.explicit else match_sharding(ct, aval)


def backward_pass(
    jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any], cts: Sequence[Any]
) -> list[Any]:
    """Cotangents of the `Linear` operands of a jaxpr (None for the others).

    `operands[k]` is a `Linear(aval)` where the jaxpr is linear in input k, else that input's value.
    """
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    for var, x in zip(jaxpr.invars, operands, strict=True):
        if not isinstance(x, Linear):
            values[var] = x
    found = _Cotangents()
    before = state.source
    try:
        backwards = _run_nonlinear(jaxpr, values, before)
        for var, ct in zip(jaxpr.outvars, cts, strict=True):
            if isinstance(var, Var) and var not in values:
                found.add(var, ct)
        for eqn in reversed(backwards):
            source = eqn.source
            if source.name_stack and "jvp(" in source.name_stack:
                source = transposed(source, _count_jvps(state.trace))
            state.source = before if source is UNKNOWN else source
            _transpose_eqn(eqn, values, found)
    finally:
        state.source = before
    return [
        found.result(var) if isinstance(x, Linear) else None
        for var, x in zip(jaxpr.invars, operands, strict=True)
    ]


def _count_jvps(trace: Any) -> int:
    """How many forward derivatives are being taken."""
    count = 0
    while trace is not None:
        count += trace.transform == "jvp"
        trace = trace.parent if not trace.stages else None
    return count


def _run_nonlinear(jaxpr: Jaxpr, values: dict[Var, Any], before: Source | None) -> list[Eqn]:
    """Evaluate the equations without linear operands; return the others."""
    linear_eqns = []
    for eqn in jaxpr.eqns:
        if all([isinstance(a, Literal) or a in values for a in eqn.invars]):
            state.source = before if eqn.source is UNKNOWN else eqn.source
            args = [a.val if isinstance(a, Literal) else values[a] for a in eqn.invars]
            outs = eqn.prim.bind(*args, **eqn.params)
            values.update(zip(eqn.outvars, outs if eqn.prim.multiple else [outs], strict=True))
        else:
            linear_eqns.append(eqn)
    return linear_eqns


def _transpose_eqn(eqn: Eqn, values: dict[Var, Any], found: _Cotangents) -> None:
    cts = [found.take(v) for v in eqn.outvars]
    reached = [type(ct) is not Zero for ct in cts]
    if not any(reached) and (eqn.outvars or not eqn.effects):
        return
    prim, operands = eqn.prim, []
    if prim.dce is not None and not eqn.effects:
        of = dict(zip(eqn.outvars, cts, strict=True))
        eqn = prune_eqn(eqn, reached)
        cts = [of[v] for v in eqn.outvars]
    for a in eqn.invars:
        if isinstance(a, Literal):
            operands.append(a.val)
        else:
            x = values.get(a)
            if x is None:
                x = Linear(a.aval if prim.vma == "given" else _without_layout(a.aval))
            elif typeof(x).explicit is not None:
                x = to_auto(x)
            operands.append(x)
    rule: Any = prim.transpose
    if isinstance(rule, Refused):
        rule = prim.rule("transpose")
    in_cts = rule(cts if prim.multiple else cts[0], *operands, **eqn.params)
    for atom, x, ct in zip(eqn.invars, operands, in_cts, strict=True):
        if type(x) is Linear:
            found.add(atom, ct)


def _without_layout(aval: ShapedArray) -> ShapedArray:
    """A value's type for a rule: cotangents have no layouts, nor have zeros that it adds to them.

    The terms of a sum that devices of a map hold are no layout.
    """
    if aval.explicit is None or any(aval.manual_sets()):
        return aval
    return aval.strip_sharding()


def transpose_jaxpr(
    closed: ClosedJaxpr,
    linear: Sequence[bool],
    ct_nonzero: Sequence[bool],
    force: bool = False,
) -> tuple[ClosedJaxpr, list[bool]]:
    """The jaxpr of (non-linear inputs, nonzero output cotangents) -> nonzero input cotangents.

    Returns it with the list that says which of the linear inputs have a nonzero cotangent; with
    `force` all have, as arrays of zeros where need be.
    """
    residual_avals = [a for a, lin in zip(closed.in_avals, linear, strict=True) if not lin]
    ct_avals = [a.cotangent() for a, nz in zip(closed.out_avals, ct_nonzero, strict=True) if nz]
    nonzero: list[bool] = []

    def f(*args: Any) -> list[Any]:
        residuals = iter(args[: len(residual_avals)])
        given = iter(args[len(residual_avals) :])
        operands = [
            Linear(a) if lin else next(residuals)
            for a, lin in zip(closed.in_avals, linear, strict=True)
        ]
        cts = [
            next(given) if nz else Zero(a)
            for a, nz in zip(closed.out_avals, ct_nonzero, strict=True)
        ]
        outs = backward_pass(closed.jaxpr, closed.consts, operands, cts)
        found = [ct for ct in outs if ct is not None]
        if force:
            found = [zeros_like_aval(ct.aval) if isinstance(ct, Zero) else ct for ct in found]
        nonzero.extend(not isinstance(ct, Zero) for ct in found)
        return [ct for ct in found if not isinstance(ct, Zero)]

    out = close(f, [*residual_avals, *ct_avals], f"transpose_{closed.jaxpr.name}")
    return out, nonzero
