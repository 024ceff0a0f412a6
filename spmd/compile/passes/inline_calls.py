"""Inlining: calls become the equations that they stand for, so that no later pass sees a call.

Calls are the primitives with an `inline` slot: `jit`, and the custom derivative calls, whose rules
have done their work when a program is compiled. A primitive with an `expand` slot is compiled as
the jaxpr that it holds.
"""

from __future__ import annotations

from typing import Any

from spmd.base.source import Source
from spmd.core.ir import Atom, ClosedJaxpr, Eqn
from spmd.core.primitive import Primitive
from spmd.core.rewriting.equations import Walk, finish, map_subjaxprs, start


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Flatten all calls, also those inside the bodies of control flow."""
    jaxpr = closed.jaxpr
    if not jaxpr.nested and not any(_is_call(prim) for prim in {eqn.prim for eqn in jaxpr.eqns}):
        return closed
    writer = start(closed)
    _Inliner(writer).run(jaxpr)
    return finish(writer, closed)


def _is_call(prim: Primitive) -> bool:
    return prim.inline is not None or prim.expand is not None


class _Inliner(Walk):
    """A walk that writes bodies in the place of calls, and their equations under new names."""

    def replaces(self, eqn: Eqn, ins: tuple[Atom, ...], source: Source) -> bool:
        """Write the body of a call."""
        body = eqn.stands_for() if _is_call(eqn.prim) else None
        if body is not None:
            self.call(body, eqn, ins, source)
        return body is not None

    def params_of(self, eqn: Eqn) -> dict[str, Any]:
        """The parameters of control flow with the calls in its bodies flattened."""
        return map_subjaxprs(eqn, inline_calls)


# Primitives that stand for one kernel or product.
_FINISHED = frozenset(("fused", "product"))


def with_bodies(closed: ClosedJaxpr) -> frozenset[Eqn]:
    """The equations whose jaxprs are run step by step, so that a pass goes through these, too.

    A group or a product has one as well, which gives its meaning and is finished.
    """
    nested = closed.jaxpr.nested
    return frozenset([e for e in nested if e.prim.name not in _FINISHED]) if nested else nested
