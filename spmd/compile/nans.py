"""`debug_nans`: find the operation that first made a NaN.

A compiled call is looked at from outside: only when a result holds a NaN is its jaxpr run again,
equation by equation, until one makes a NaN out of operands that hold none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.core import dtypes
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr, Literal
from spmd.core.source import Source
from spmd.core.trace import to_numpy


def check_nans(closed: ClosedJaxpr, name: str, operands: Sequence[Any], results: Any) -> None:
    """Raise a FloatingPointError that names the user's line if a result holds a NaN."""
    if not any(has_nan(x) for x in results):
        return
    arguments = [to_numpy(x) for x in operands]
    found = _search(closed.jaxpr, [to_numpy(c) for c in closed.consts], arguments)
    if found is None:
        raise FloatingPointError(f"jit({name}): a NaN among its arguments reached its results")
    prim, source = found
    raise FloatingPointError(f"jit({name}): {prim} made a NaN at {source}")


def has_nan(x: Any) -> bool:
    """Whether an array holds a NaN; only floating and complex ones can."""
    value = to_numpy(x)
    return dtypes.is_inexact(value.dtype) and bool(np.isnan(value).any())


def _search(
    jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]
) -> tuple[str, Source] | None:
    """The primitive and line of the first equation that makes a NaN out of none."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        operands = [
            np.asarray(a.val if isinstance(a, Literal) else values[a], a.aval.dtype)
            for a in eqn.invars
        ]
        with np.errstate(all="ignore"):
            outs = eqn.prim.rule("impl")(np, *operands, **eqn.params)
        outs = list(outs) if eqn.prim.multiple else [outs]
        if any(has_nan(x) for x in outs) and not any(has_nan(x) for x in operands):
            return _inside(eqn, operands) or (eqn.prim.name, eqn.source)
        values.update(zip(eqn.outvars, outs, strict=True))
    return None


def _inside(eqn: Eqn, operands: Sequence[Any]) -> tuple[str, Source] | None:
    """The culprit inside a call."""
    if eqn.prim.inline is None:
        return None
    body: ClosedJaxpr = eqn.prim.inline(eqn.params)
    return _search(body.jaxpr, body.consts, operands)
