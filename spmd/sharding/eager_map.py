"""`disable_jit` inside pmap and shard_map: the user's Python runs once, on every device's values.

A `LockstepTracer` holds one concrete NumPy array for each local device. Printing it (or looking at
it in a debugger) shows each device with its position and value; Python control flow works where all
devices agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.context import current_trace, state
from spmd.base.device import Device
from spmd.base.errors import ConcretizationError
from spmd.base.source import current_source
from spmd.core.aval import NO_AXES, ShapedArray, typeof
from spmd.core.axis import AxisFrame, extend_axes
from spmd.core.primitive import Primitive
from spmd.core.trace import EVAL, Trace, Tracer, check_usable, to_numpy
from spmd.sharding.lockstep_interpreter import Lockstep, Values


class LockstepTracer(Tracer):
    """One value for each local device."""

    __slots__ = ("aval", "values")

    def __init__(self, trace: LockstepTrace, values: Values, aval: ShapedArray):
        self._trace = trace
        self.values = values
        self.aval = aval

    def concrete(self) -> Any:
        """The value, if all local devices hold the same; an error names those that differ."""
        first = self.values[0]
        if all(v.tobytes() == first.tobytes() for v in self.values[1:]):
            return first
        return None

    def _need(self, error: type[ConcretizationError], what: str, advice: str) -> Any:
        value = self.concrete()
        if value is None:
            raise error(
                f"{current_source()}: this needs {what}, but the devices hold different values:\n"
                f"{self._listing()}\n{advice}"
            )
        return value

    def _listing(self) -> str:
        trace: LockstepTrace = self._trace  # type: ignore[assignment]
        rows = []
        for label, value in zip(trace.labels, self.values, strict=True):
            text = np.array2string(value, separator=", ", prefix=f"  {label}: ")
            rows.append(f"  {label}: {text}")
        return "\n".join(rows)

    def __repr__(self) -> str:
        kind = f"{dtypes.long_name(self.dtype)}{list(self.shape)}"
        return f"Array {kind} on {len(self.values)} devices:\n{self._listing()}"

    __str__ = __repr__


class LockstepTrace(Trace):
    """Applies every primitive on all local devices."""

    def __init__(self, lockstep: Lockstep, devices: Sequence[Device]):
        self.parent = state.trace
        self.lockstep = lockstep
        self.devices = list(devices)
        self.labels = [_label(devices, lockstep, k) for k in lockstep.local]

    def values_of(self, x: Any) -> Values:
        """A value on each local device; values from outside are equal on all."""
        if isinstance(x, Tracer):
            if x._trace is self:
                return x.values  # type: ignore[attr-defined]
            check_usable(x)
        return self.lockstep.everywhere(to_numpy(x))

    def process(self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        values = [self.values_of(x) for x in operands]
        expected = _result_avals(prim, [typeof(x) for x in operands], params)
        found = self.lockstep.apply(prim, values, params)
        if not prim.multiple:
            return self.join(found, expected[0])
        return [self.join(x, a) for x, a in zip(found, expected, strict=True)]

    def join(self, values: Values, aval: ShapedArray) -> LockstepTracer:
        """A tracer for one value on each local device."""
        return LockstepTracer(self, [np.asarray(v, aval.dtype) for v in values], aval)


def _result_avals(
    prim: Primitive, avals: Sequence[ShapedArray], params: dict[str, Any]
) -> list[ShapedArray]:
    """The avals of a primitive's results, with the typed axes over which they vary."""
    out = prim.rule("abstract")(*avals, **params)
    outs = list(out) if prim.multiple else [out]
    if prim.vma == "given":
        return outs
    vma = prim.vma(avals, params) if callable(prim.vma) else NO_AXES.union(*(a.vma for a in avals))
    return [a.update(vma=frozenset(vma)) for a in outs]


def _label(devices: Sequence[Device], lockstep: Lockstep, k: int) -> str:
    place = ", ".join(f"{name}={i}" for name, i in lockstep.positions[k].items())
    return f"{devices[k]} ({place})" if k < len(devices) else f"({place})"


def run_lockstep(
    f: Callable[..., Sequence[Any]],
    args: Sequence[Values],
    avals: Sequence[ShapedArray],
    sizes: dict[Any, int],
    devices: Sequence[Device],
    kind: str = "pmap",
) -> tuple[list[Values], list[ShapedArray]]:
    """Run a function of flat per-device arguments op by op: results by local device, and avals."""
    trace = current_lockstep()
    if trace is not None:
        return _run_inner(trace, f, args, avals, sizes)
    processes = [d.process_index for d in devices]
    trace = LockstepTrace(Lockstep(sizes, processes, devices), devices)
    frames = [AxisFrame(n, s, kind) for n, s in sizes.items()]
    with extend_axes(frames), current_trace(trace):
        tracers = [trace.join(v, a) for v, a in zip(args, avals, strict=True)]
        outs = f(*tracers)
        return [trace.values_of(x) for x in outs], [typeof(x) for x in outs]


def runs_eagerly() -> bool:
    """Whether a map called under `disable_jit` runs op by op: outside of transforms, or in a map.

    Under grad or vmap the body must be traced, as its values are not all there is to it.
    """
    return state.trace is EVAL or current_lockstep() is not None


def current_lockstep() -> LockstepTrace | None:
    """The lockstep trace that is current, if one is."""
    return state.trace if isinstance(state.trace, LockstepTrace) else None


def _run_inner(
    outer: LockstepTrace,
    f: Callable[..., Sequence[Any]],
    args: Sequence[Values],
    avals: Sequence[ShapedArray],
    sizes: dict[Any, int],
) -> tuple[list[Values], list[ShapedArray]]:
    """A map inside a map: every outer device becomes a row of inner ones.

    `args[k]` has one value for each (outer, inner) pair, inner fastest, and so have the results.
    """
    lockstep = Lockstep({**outer.lockstep.sizes, **sizes})
    trace = LockstepTrace(lockstep, ())
    frames = [AxisFrame(n, s, "pmap") for n, s in sizes.items()]
    inner = lockstep.count // outer.lockstep.count

    def lift(x: Any) -> Any:
        if isinstance(x, LockstepTracer) and x._trace is outer:
            return trace.join([v for v in x.values for _ in range(inner)], x.aval)
        return x

    trace.values_of = lambda x: LockstepTrace.values_of(trace, lift(x))  # type: ignore
    with extend_axes(frames), current_trace(trace):
        outs = f(*[trace.join(v, a) for v, a in zip(args, avals, strict=True)])
        return [trace.values_of(x) for x in outs], [typeof(x) for x in outs]
