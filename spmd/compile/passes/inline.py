"""Inline: replace calls by the equations they stand for, so that nothing below sees a call.

Calls are the primitives with an `inline` slot: `jit`, and the custom derivative calls, whose rules
have done their work when a program is compiled. What has an `expand` slot is compiled as the jaxpr
that it holds.
"""

from __future__ import annotations

from spmd.compile.passes.substitute import Writer, finish, map_subjaxprs, nests, start
from spmd.core.ir import ClosedJaxpr, Eqn


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Flatten all calls, also those inside the bodies of control flow."""
    if not any(eqn.prim.inline or eqn.prim.expand or nests(eqn) for eqn in closed.eqns):
        return closed
    writer = start(closed)
    for eqn in closed.eqns:
        inside = eqn.prim.inline or eqn.prim.expand
        if inside is None:
            writer.keep(eqn, map_subjaxprs(eqn, inline_calls))
        else:
            _write_body(writer, eqn, inside(eqn.params))
    return finish(writer, closed)


def _write_body(writer: Writer, eqn: Eqn, body: ClosedJaxpr) -> None:
    """Write what a call stands for, under new names: the same body may be called again."""
    writer.define_consts(body)
    for inner, operand in zip(body.jaxpr.invars, eqn.invars, strict=True):
        writer.define(inner, writer.read(operand))
    for inner_eqn in body.eqns:
        inside = inner_eqn.prim.inline or inner_eqn.prim.expand
        if inside is None:
            writer.copy(inner_eqn, map_subjaxprs(inner_eqn, inline_calls))
        else:
            _write_body(writer, inner_eqn, inside(inner_eqn.params))
    for outer, inner_out in zip(eqn.outvars, body.jaxpr.outvars, strict=True):
        writer.define(outer, writer.read(inner_out))
