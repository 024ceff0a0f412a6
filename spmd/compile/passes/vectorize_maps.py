"""Loops without a carry, over a few numbers: their work is done on all numbers at once.

The one idea: `lax.map` of an elementwise function is that function of the array. The executor takes
10 ns for an iteration, and a vector of numbers takes one. Loops over larger arrays stay: their
iterations fill vectors by themselves, and what they keep lies in a cache.
"""

from __future__ import annotations

from typing import Any

from spmd.base.source import Source
from spmd.compile.expressions.scalar_ops import can_lower
from spmd.core.ir import Atom, ClosedJaxpr, Eqn
from spmd.core.rewriting.equations import Walk, finish, map_subjaxprs, start
from spmd.core.vmap import BatchAxis, batch_jaxpr


def vectorize_maps(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr without such loops."""
    if "scan" not in closed.jaxpr.primitives:
        return closed
    writer = start(closed)
    _Vectorizer(writer).run(closed.jaxpr)
    return finish(writer, closed)


# Elements of an iteration's values: as many as vectors have lanes.
MOST_ELEMENTS = 16


class _Vectorizer(Walk):
    def replaces(self, eqn: Eqn, ins: tuple[Atom, ...], source: Source) -> bool:
        """Write the body of a loop over a few numbers as one of arrays."""
        if eqn.prim.name != "scan" or eqn.effects or not _is_small(eqn):
            return False
        body, fixed = eqn.params["jaxpr"], eqn.params["num_consts"]
        is_batched = [k >= fixed for k in range(len(body.in_avals))]
        axis = BatchAxis(None, eqn.params["length"])
        self.call(batch_jaxpr(body, axis, is_batched, True)[0], eqn, ins, source)
        return True

    def params_of(self, eqn: Eqn) -> dict[str, Any]:
        return map_subjaxprs(eqn, vectorize_maps)


def _is_small(eqn: Eqn) -> bool:
    """Whether a loop has no carry, and computes a few numbers elementwise."""
    body: ClosedJaxpr = eqn.params["jaxpr"]
    if eqn.params["num_carry"]:
        return False
    every = (*body.jaxpr.constvars, *body.jaxpr.invars)
    made = tuple([v for inner in body.eqns for v in inner.outvars])
    most = max([v.aval.size for v in (*every, *made)], default=0)
    return most <= MOST_ELEMENTS and all(map(can_lower, body.eqns))
