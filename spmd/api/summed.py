"""The classic wrong scale: a loss summed over devices inside of the differentiated function.

Under `pmap` the transpose of psum is psum (JAX's convention): each device's cotangent of 1 comes
back as the number of devices. Types make it right in `shard_map`, dividing makes it right (pmean).
"""

from __future__ import annotations

import math
import warnings

from spmd.base.context import state
from spmd.base.errors import CollectiveWarning
from spmd.core.axis import axis_frame
from spmd.core.ir import ClosedJaxpr, Eqn, Literal

# Operations between a psum and the loss that change neither.
_CASTS = ("convert_element_type", "reshape", "squeeze", "pvary")


def warn_of_summed_loss(name: str, linear: ClosedJaxpr) -> None:
    """Warn if the first output of a linear jaxpr, the loss, is a sum over a pmapped axis."""
    if not any(frame.kind == "pmap" for frame in state.axes):
        return
    eqn = _maker(linear, 0)
    if eqn is None or eqn.prim.name != "psum" or eqn.params["groups"] is not None:
        return
    axes = [a for a in eqn.params["axes"] if axis_frame(a).kind == "pmap"]
    if not axes:
        return
    count, shown = math.prod(axis_frame(a).size for a in axes), ", ".join(map(repr, axes))
    text = (
        f"grad({name}): the loss is a psum over {shown} (at {eqn.source.short}). Under pmap psum "
        f"transposes to psum, so each device gets {count} times the gradient of its own part of "
        f"the loss.\nReturn the device's own loss and combine the gradients: lax.pmean(grads, "
        f"{axes[0]!r}) for a mean, lax.psum for a sum; lax.pmean of the loss has the scale that "
        "pmean of the gradients expects. In shard_map a psum of the loss needs none of this."
    )
    warnings.warn_explicit(text, CollectiveWarning, eqn.source.file, eqn.source.line)


def _maker(closed: ClosedJaxpr, k: int) -> Eqn | None:
    """The equation that makes output `k`, behind casts and inside calls."""
    jaxpr = closed.jaxpr
    by_result = {v: (eqn, at) for eqn in jaxpr.eqns for at, v in enumerate(eqn.outvars)}
    atom = jaxpr.outvars[k] if k < len(jaxpr.outvars) else None
    while atom is not None and not isinstance(atom, Literal) and atom in by_result:
        eqn, at = by_result[atom]
        if eqn.prim.inline is not None:
            return _maker(eqn.prim.inline(eqn.params), at)
        if eqn.prim.name not in _CASTS:
            return eqn
        atom = eqn.invars[0]
    return None
