"""`debug_nans` and `debug_infs`: find the operation that first made a NaN, or an infinity.

A compiled call is looked at from outside: only when a result holds one is its jaxpr run again,
equation by equation, until one makes a NaN out of operands that hold none. Results in the memory of
a device are looked at when the host reads values there, so that a call does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.record import record
from spmd.base.source import Source, current_source
from spmd.core.aval import typeof
from spmd.core.ir import ClosedJaxpr, Eqn, Literal
from spmd.core.trace import to_numpy
from spmd.sharding.array import Array, alias
from spmd.sharding.future import DeviceMemory


def check_nans(closed: ClosedJaxpr, name: str, operands: Sequence[Any], results: Any) -> None:
    """Raise a FloatingPointError that names the user's line if a result holds a bad value."""
    given = held(operands)
    look(results, lambda made: _check_nans(closed, name, given, made))


def look(results: Sequence[Any], check: Callable[[Sequence[Any]], None]) -> None:
    """Check results now, or with these settings when values of their devices are read."""
    shards = [s for x in results if type(x) is Array for s in x.shards or (x,)]
    owners = {s.device: s.owner for s in shards if isinstance(s.owner, DeviceMemory)}
    if not owners:
        check(results)
        return
    nans, infs, left = config.debug_nans, config.debug_infs, [held(results)]

    def later() -> None:
        if left:  # no other device had it made
            with config.override("debug_nans", nans), config.override("debug_infs", infs):
                check(left.pop())

    for owner in owners.values():
        owner.defer(later)


def _check_nans(closed: ClosedJaxpr, name: str, operands: Sequence[Any], results: Any) -> None:
    bad = next(filter(None, map(what_is_wrong, results)), None)
    if bad is None:
        return
    arguments = [to_numpy(x) for x in operands]
    found = search_nan(closed, [to_numpy(c) for c in closed.consts], arguments)
    if found is None:
        raise FloatingPointError(f"jit({name}): {bad} among its arguments reached its results")
    raise FloatingPointError(f"jit({name}): {found.text} at {found.source}")


def kept_operands(operands: Sequence[Any], donated: Sequence[bool]) -> list[Any]:
    """The operands, with copies of those donated, so that they can be checked after the run."""
    taken = dict(enumerate(donated))
    return [
        np.array(to_numpy(x)) if taken.get(k) and not _is_far(x) else x
        for k, x in enumerate(held(operands))
    ]


def held(values: Sequence[Any]) -> list[Any]:
    """The values, those of devices as other arrays: their memory is neither freed nor taken."""
    return [alias(x) if _is_far(x) else x for x in values]


def _is_far(x: Any) -> bool:
    """Whether the values of an array, or some of them, lie in the memory of a device."""
    return type(x) is Array and any(isinstance(s.owner, DeviceMemory) for s in x.shards or (x,))


def check_operation(name: str, results: Sequence[Any]) -> None:
    """Raise a FloatingPointError that names the user's line if an operation made a bad value."""
    source = current_source()
    look(results, lambda made: _check_operation(name, made, source))


def _check_operation(name: str, results: Sequence[Any], source: Source) -> None:
    for x in results:
        bad = what_is_wrong(x)
        if bad is not None:
            value = to_numpy(x)
            raise FloatingPointError(f"{name} made {bad}{_place(value)} at {source}")


def check_created(name: str, x: Any, made_of: Any) -> None:
    """`check_operation` of an array that was made of numbers or of a NumPy array."""
    if (config.debug_nans or config.debug_infs) and not isinstance(made_of, Array):
        if isinstance(x, Array):
            check_operation(name, [x])


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
