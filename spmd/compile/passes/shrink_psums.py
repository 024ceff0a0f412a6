"""Reordering of sums: a device's elements are summed before the sum over devices.

The gradient of a bias that all examples share is a psum of every example's, and then their sum:
that is how the transposes of a cast and of a broadcast follow each other. Both sums are linear, and
the other order sends the bias' size instead of the batch's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from spmd.core.ir import ClosedJaxpr, Eqn, Var
from spmd.core.rewriting.equations import map_subjaxprs


def shrink_psums(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Move psums behind the `reduce_sum` that alone reads them, in control flow bodies too."""
    if "psum" not in closed.jaxpr.primitives:
        return closed
    nested = closed.jaxpr.nested
    times: Counter[Any] = Counter(closed.jaxpr.outvars)
    summed: set[Any] = set()
    for eqn in closed.eqns:
        times.update(eqn.invars)
        if eqn.prim.name == "reduce_sum":
            summed.update(eqn.invars)
    done: list[Eqn] = []
    waiting: dict[Any, Eqn] = {}  # psums by their result, until their sum is reached

    def write(psum: Eqn) -> None:
        (out,) = psum.outvars
        if out in summed and times[out] == 1:
            waiting[out] = psum
        else:
            done.append(psum)

    for old in closed.eqns:
        eqn = old
        if old in nested:
            eqn = old.replace(params=map_subjaxprs(old, shrink_psums))
        psum = waiting.pop(eqn.invars[0], None) if eqn.invars else None
        if psum is not None:
            out = eqn.outvars[0]
            here = Var(out.aval.update(vma=psum.invars[0].aval.vma))
            done.append(eqn.replace(invars=psum.invars, outvars=(here,)))
            write(psum.replace(invars=(here,), outvars=(out,)))
        elif eqn.prim.name == "psum":
            write(eqn)
        else:
            done.append(eqn)
    return ClosedJaxpr(closed.jaxpr.replace(eqns=done), closed.consts)
