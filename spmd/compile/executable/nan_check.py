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
from spmd.base.record import record
from spmd.base.source import Source, current_source
from spmd.core.aval import typeof
from spmd.core.ir import ClosedJaxpr, Eqn, Literal
from spmd.core.trace import to_numpy


def check_nans(closed: ClosedJaxpr, name: str, operands: Sequence[Any], results: Any) -> None:
    """Raise a FloatingPointError that names the user's line if a result holds a bad value."""
    bad = next(filter(None, map(what_is_wrong, results)), None)
    if bad is None:
        return
    arguments = [to_numpy(x) for x in operands]
    found = search_nan(closed, [to_numpy(c) for c in closed.consts], arguments)
    if found is None:
        raise FloatingPointError(f"jit({name}): {bad} among its arguments reached its results")
    raise FloatingPointError(f"jit({name}): {found.text} at {found.source}")


def kept_operands(operands: Sequence[Any], donated: Sequence[bool]) -> list[Any]:
    """The operands, copied where a program takes their memory, for a look at them afterwards."""
    taken = dict(enumerate(donated))
    return [np.array(to_numpy(x)) if taken.get(k) else x for k, x in enumerate(operands)]


def check_operation(name: str, results: Sequence[Any]) -> None:
    """Raise a FloatingPointError that names the user's line if an operation made a bad value."""
    for x in results:
        bad = what_is_wrong(x)
        if bad is not None:
            value = to_numpy(x)
            raise FloatingPointError(f"{name} made {bad}{_place(value)} at {current_source()}")


@record
class Culprit:
    """The first operation that made a NaN, in words: "log made a NaN at [3, 4] of f32[4,6],"."""

    prim: str
    text: str
    source: Source


def what_is_wrong(x: Any) -> str | None:
    """ "a NaN" or "an inf" if an array holds one that is looked for; only inexact ones can."""
    value = to_numpy(x)
    if not dtypes.is_inexact(value.dtype):
        return None
    if config.debug_nans and np.isnan(value).any():
        return "a NaN"
    return "an inf" if config.debug_infs and np.isinf(value).any() else None


def _place(x: np.ndarray) -> str:
    """The index of the first bad value, and its kind; nothing for a scalar."""
    if not x.ndim:
        return ""
    bad = np.zeros(x.shape, bool)
    for is_bad, looked_for in ((np.isnan, config.debug_nans), (np.isinf, config.debug_infs)):
        if looked_for:
            bad |= is_bad(x)
    index = ", ".join(str(int(k)) for k in np.argwhere(bad)[0])
    return f" at [{index}] of {typeof(x).short()},"


def search_nan(
    closed: ClosedJaxpr, consts: Sequence[Any], arguments: Sequence[Any]
) -> Culprit | None:
    """The first equation that makes a NaN of operands that have none, run on whole values."""
    jaxpr = closed.jaxpr
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
        wrong = next((x for x in map(np.asarray, outs) if what_is_wrong(x)), None)
        if wrong is not None and not any(map(what_is_wrong, operands)):
            text = f"{eqn.prim.name} made {what_is_wrong(wrong)}{_place(wrong)}"
            return _inside(eqn, operands) or Culprit(eqn.prim.name, text, eqn.source)
        values.update(zip(eqn.outvars, outs, strict=True))
    return None


def _inside(eqn: Eqn, operands: Sequence[Any]) -> Culprit | None:
    """The culprit inside a call."""
    if eqn.prim.inline is None:
        return None
    body: ClosedJaxpr = eqn.prim.inline(eqn.params)
    return search_nan(body, body.consts, operands)
