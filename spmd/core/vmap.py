"""Vectorisation: a value may carry a batched dim; each primitive's `batch` rule handles it.

The batched dim of an operand can be anywhere; a rule says where its result's is. A collective over
the axis's own name becomes a reduction (or shuffle) along the batched dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.config import config
from spmd.base.context import current_trace, state
from spmd.base.record import record
from spmd.base.source import UNKNOWN, current_source
from spmd.core.aval import ShapedArray, typeof
from spmd.core.axis import AxisFrame, extend_axes
from spmd.core.explicit import sliced_aval, stacked_aval
from spmd.core.ir import ClosedJaxpr
from spmd.core.primitive import Primitive
from spmd.core.rewrite import close, eval_closed
from spmd.core.structural import to_front
from spmd.core.trace import Trace, Tracer, check_no_leak, check_usable, origin


@record
class BatchAxis:
    """The axis being vectorised over. A `name` of None cannot be used by collectives.

    `spmd_names` are the mesh axes over which a `shard_map` splits it; inside of one that has, they
    are in `vary`: batched values vary over them. `entry` names the `Explicit` axes that split it.
    """

    name: Any
    size: int
    spmd_names: tuple[Any, ...] = ()
    vary: frozenset[Any] = frozenset()
    entry: Any = None


def leading_axis(arrays: Sequence[Any], size: int) -> BatchAxis:
    """The axis, without a name, of the first dims of arrays; it is split as those are."""
    layouts = [typeof(x).explicit for x in arrays]
    split = [s.spec[0] for s in layouts if s is not None and s.spec[0] is not None]
    return BatchAxis(None, size, entry=split[0] if split else None)


class BatchTracer(Tracer):
    """A value with a batched dim; its aval is that of one example."""

    __slots__ = ("_source", "dim", "val")

    def __init__(self, trace: Trace, val: Any, dim: int):
        self._trace = trace
        self._source = current_source() if config.check_leaks else UNKNOWN
        self.val = val
        self.dim = dim

    @property
    def aval(self) -> ShapedArray:  # type: ignore[override]
        return sliced_aval(typeof(self.val), self.dim)

    def where_from(self) -> str:
        return origin(self._source, self.val)

    def __repr__(self) -> str:
        return f"VmapTracer(aval={self.aval}, batched={typeof(self.val)})"


class BatchTrace(Trace):
    """Vectorises every primitive over one axis."""

    transform = "vmap"

    def __init__(self, parent: Trace, axis: BatchAxis):
        self.parent = parent
        self.axis = axis

    def split(self, x: Any) -> tuple[Any, int | None]:
        """A value with the position of its batched dim, None if it has none."""
        if isinstance(x, Tracer):
            if x._trace is self:
                return x.val, x.dim  # type: ignore[attr-defined]
            check_usable(x)
        return x, None

    def join(self, x: Any, dim: int | None) -> Any:
        return x if dim is None else BatchTracer(self, x, dim)

    def process(self, prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        pairs = [self.split(x) for x in operands]
        named = self.axis.name is not None and self.axis.name in prim.axes(params)
        with current_trace(self.parent):
            if not named and all(d is None for _, d in pairs):
                return prim.bind(*operands, **params)
            rule = prim.rule("batch")
            values, at = [v for v, _ in pairs], [d for _, d in pairs]
            out, out_dim = rule(self.axis, values, at, **params)
        if prim.multiple:
            return [self.join(x, d) for x, d in zip(out, out_dim, strict=True)]
        return self.join(out, out_dim)


def batch_flat(
    f: Callable[..., Sequence[Any]],
    axis: BatchAxis,
    args: Sequence[Any],
    in_dims: Sequence[int | None],
) -> tuple[list[Any], list[int | None]]:
    """Run a function of flat arguments over a batched dim; outputs with their batched dims."""
    trace = BatchTrace(state.trace, axis)
    tracers = [trace.join(x, d) for x, d in zip(args, in_dims, strict=True)]
    frames = [] if axis.name is None else [AxisFrame(axis.name, axis.size, "vmap")]
    try:
        with extend_axes(frames), current_trace(trace):
            outs = list(f(*tracers))
        pairs = [trace.split(x) for x in outs]
    finally:
        trace.finish()
    del tracers, outs
    if config.check_leaks:
        check_no_leak(trace, "the function under vmap")
    return [x for x, _ in pairs], [d for _, d in pairs]


def batch_jaxpr(
    closed: ClosedJaxpr,
    axis: BatchAxis,
    in_batched: Sequence[bool],
    force_out: Sequence[bool] | bool = False,
) -> tuple[ClosedJaxpr, list[bool]]:
    """A jaxpr over batched inputs (batched dims first), and which outputs are batched (first)."""
    avals = [
        stacked_aval(a.update(vma=a.vma | axis.vary), axis.size, axis.entry) if b else a
        for a, b in zip(closed.in_avals, in_batched, strict=True)
    ]
    force = [force_out] * len(closed.out_avals) if isinstance(force_out, bool) else force_out
    out_batched: list[bool] = []

    def f(*args: Any) -> list[Any]:
        in_dims = [0 if b else None for b in in_batched]
        outs, dims = batch_flat(lambda *xs: eval_closed(closed, *xs), axis, args, in_dims)
        out_batched.extend(must or d is not None for d, must in zip(dims, force, strict=True))
        return [
            to_front(x, d, axis.size) if b else x
            for x, d, b in zip(outs, dims, out_batched, strict=True)
        ]

    out = close(f, avals, closed.jaxpr.name)
    return out, out_batched


def fronts(axis: BatchAxis, operands: Sequence[Any], at: Sequence[int | None]) -> list[Any]:
    """Operands with their batched dims moved to the front; unbatched ones as they are."""
    return [
        x if d is None else to_front(x, d, axis.size) for x, d in zip(operands, at, strict=True)
    ]
