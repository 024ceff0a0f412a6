"""`debug_nans` and `debug_infs`: find the operation that first made a NaN, or an infinity.

A compiled call is looked at from outside: only when a result holds one is its jaxpr run again,
equation by equation, until one makes a NaN out of operands that hold none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.source import Source
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr, Literal
from spmd.core.trace import to_numpy


def check_nans(closed: ClosedJaxpr, name: str, operands: Sequence[Any], results: Any) -> None:
    """Raise a FloatingPointError that names the user's line if a result holds a bad value."""
    bad = next(filter(None, map(what_is_wrong, results)), None)
    if bad is None:
        return
    arguments = [to_numpy(x) for x in operands]
    found = _search(closed.jaxpr, [to_numpy(c) for c in closed.consts], arguments)
    if found is None:
        raise FloatingPointError(f"jit({name}): {bad} among its arguments reached its results")
    prim, bad, source = found
    raise FloatingPointError(f"jit({name}): {prim} made {bad} at {source}")


def what_is_wrong(x: Any) -> str | None:
    """ "a NaN" or "an inf" if an array holds one that is looked for; only inexact ones can."""
    value = to_numpy(x)
    if not dtypes.is_inexact(value.dtype):
        return None
    if config.debug_nans and np.isnan(value).any():
        return "a NaN"
    return "an inf" if config.debug_infs and np.isinf(value).any() else None


def _search(
    jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]
) -> tuple[str, str, Source] | None:
    """The primitive, its results, and the line of the first equation that makes a NaN of none."""
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
        bad = next(filter(None, map(what_is_wrong, outs)), None)
        if bad is not None and not any(map(what_is_wrong, operands)):
            return _inside(eqn, operands) or (eqn.prim.name, bad, eqn.source)
        values.update(zip(eqn.outvars, outs, strict=True))
    return None


def _inside(eqn: Eqn, operands: Sequence[Any]) -> tuple[str, str, Source] | None:
    """The culprit inside a call."""
    if eqn.prim.inline is None:
        return None
    body: ClosedJaxpr = eqn.prim.inline(eqn.params)
    return _search(body.jaxpr, body.consts, operands)
