"""Dead-code elimination: equations that nothing needs, and such results of loops and branches."""

from __future__ import annotations

from typing import Any

from spmd.core.ir import ClosedJaxpr
from spmd.core.rewrite import prune_eqn


def prune(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Drop equations, results and constants that neither outputs nor effects need."""
    jaxpr = closed.jaxpr
    needed: set[Any] = set(jaxpr.outvars)
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars) and not eqn.effects:
            continue
        if eqn.prim.dce is not None:
            eqn = prune_eqn(eqn, [v in needed for v in eqn.outvars])
        kept.append(eqn)
        needed.update(eqn.invars)  # literals do no harm
    consts = [c for c in zip(jaxpr.constvars, closed.consts, strict=True) if c[0] in needed]
    jaxpr = jaxpr.replace(eqns=kept[::-1], constvars=[var for var, _ in consts])
    return ClosedJaxpr(jaxpr, [value for _, value in consts])
