"""Inline: replace calls by the equations they stand for, so that nothing below sees a call.

Calls are the primitives with an `inline` slot: `jit`, and the custom derivative calls, whose rules
have done their work when a program is compiled. What has an `expand` slot is compiled as the jaxpr
that it holds.
"""

from __future__ import annotations

from spmd.compile.passes.substitute import Writer, finish, map_subjaxprs, start
from spmd.core.ir import ClosedJaxpr, Eqn


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Flatten all calls, also those inside the bodies of control flow."""
    writer, invars = start(closed)
    for eqn in closed.eqns:
        _write(writer, eqn)
    return finish(writer, closed, invars)


def _write(writer: Writer, eqn: Eqn) -> None:
    inside = eqn.prim.inline or eqn.prim.expand
    if inside is None:
        writer.copy(eqn, map_subjaxprs(eqn, inline_calls))
        return
    body: ClosedJaxpr = inside(eqn.params)
    writer.define_consts(body)
    for inner, operand in zip(body.jaxpr.invars, eqn.invars, strict=True):
        writer.define(inner, writer.read(operand))
    for inner_eqn in body.eqns:
        _write(writer, inner_eqn)
    for outer, inner_out in zip(eqn.outvars, body.jaxpr.outvars, strict=True):
        writer.define(outer, writer.read(inner_out))
