"""Inline: replace calls by the equations they stand for, so that nothing below sees a call.

Calls are the primitives with an `inline` slot: `jit`, and the custom derivative calls, whose rules
have done their work when a program is compiled. A primitive with an `expand` slot is compiled as
the jaxpr that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.compile.passes.rewriter import JaxprBuilder, finish, map_subjaxprs, start
from spmd.core.ir import Atom, ClosedJaxpr


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Flatten all calls, also those inside the bodies of control flow."""
    called = {prim for prim in {eqn.prim for eqn in closed.eqns} if prim.inline or prim.expand}
    nested = closed.jaxpr.nested
    if not called and not nested:
        return closed
    writer = start(closed)
    for eqn in closed.eqns:
        if eqn.prim not in called:
            params = map_subjaxprs(eqn, inline_calls) if eqn in nested else None
            writer.keep(eqn, params)
        else:
            outs = write_body(writer, eqn.stands_for(), writer.read_all(eqn.invars))
            for outer, found in zip(eqn.outvars, outs, strict=True):
                writer.define(outer, found)
    return finish(writer, closed)


def write_body(writer: JaxprBuilder, body: ClosedJaxpr, operands: Sequence[Atom]) -> Sequence[Atom]:
    """Write the body of a call, under new names: the same body may be called again.

    `operands` are atoms of the new jaxpr, as are the results that it gives.
    """
    writer.define_consts(body)
    for inner, operand in zip(body.jaxpr.invars, operands, strict=True):
        writer.define(inner, operand)
    for inner_eqn in body.eqns:
        inside = inner_eqn.stands_for()
        if inside is None:
            nested = inner_eqn in body.jaxpr.nested
            writer.copy(inner_eqn, map_subjaxprs(inner_eqn, inline_calls) if nested else None)
        else:
            outs = write_body(writer, inside, writer.read_all(inner_eqn.invars))
            for outer, found in zip(inner_eqn.outvars, outs, strict=True):
                writer.define(outer, found)
    return writer.read_all(body.jaxpr.outvars)
