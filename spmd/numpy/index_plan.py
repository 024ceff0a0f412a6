"""From a parsed index to what reads or writes it: a region of the array, or one gather.

A static index selects a `Region`: slices, with dims reversed, removed and added. An index with
arrays of integers, or one that must not clip, becomes a `GatherPlan`, which serves a scatter too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import lax
from spmd.base import dtypes
from spmd.base.record import record
from spmd.core.aval import typeof
from spmd.numpy.index_expr import IndexExpr, NewDim, Part, Point, Span, Table
from spmd.numpy.promotion import broadcast_shapes_of, broadcast_to

INT32_MAX = np.iinfo(np.int32).max

# ---- regions -----------------------------------------------------------------------------------


@record
class Region:
    """The block of an array that a static index selects, before dims are removed and added."""

    starts: tuple[int, ...]
    limits: tuple[int, ...]
    strides: tuple[int, ...]
    reversed: tuple[int, ...]
    removed: tuple[int, ...]
    added: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        bounds = zip(self.starts, self.limits, self.strides, strict=True)
        return tuple(len(range(*b)) for b in bounds)

    @property
    def contiguous(self) -> bool:
        return all(s == 1 for s in self.strides)


def static_region(expr: IndexExpr) -> Region:
    """The region of an index without arrays; traced points count as 0."""
    bounds: list[tuple[int, int, int]] = []
    reversed_dims, removed, added = [], [], []
    ndim = 0
    for part in expr.parts:
        if isinstance(part, NewDim):
            added.append(ndim)
        elif isinstance(part, Point):
            at = part.at if part.static else 0
            at = min(max(at, 0), expr.shape[part.dim] - 1)
            bounds.append((at, at + 1, 1))
            removed.append(part.dim)
            continue
        elif isinstance(part, Span):
            bounds.append(_ascending(part))
            if part.step < 0 and part.size > 1:
                reversed_dims.append(part.dim)
        ndim += 1
    starts, limits, strides = zip(*bounds, strict=True) if bounds else ((), (), ())
    return Region(starts, limits, strides, tuple(reversed_dims), tuple(removed), tuple(added))


def _ascending(span: Span) -> tuple[int, int, int]:
    """Start, limit and positive stride of the elements of a span."""
    if span.size == 0:
        return 0, 0, 1
    last = span.start + (span.size - 1) * span.step
    first, last = min(span.start, last), max(span.start, last)
    return first, last + 1, abs(span.step) if span.size > 1 else 1


# ---- gathers ----------------------------------------------------------------------------------


@record
class GatherPlan:
    """How an index is one gather: from `x` (with `inserted` dims) to a stack, then `added` dims.

    A scatter uses the same plan the other way around.
    """

    inserted: tuple[int, ...]
    indices: Any
    numbers: lax.GatherDimensionNumbers
    slice_sizes: tuple[int, ...]
    shape: tuple[int, ...]
    added: tuple[int, ...]
    unique: bool
    sorted: bool

    @property
    def stack_shape(self) -> tuple[int, ...]:
        return tuple(s for d, s in enumerate(self.shape) if d not in self.added)


class _Planner:
    """Collects the columns of the index array while walking over an index's parts."""

    def __init__(self, expr: IndexExpr):
        self.expr = expr
        self.shape: list[int] = []  # of the result
        self.added: list[int] = []  # dims of the result that are new
        self.batch: list[int] = []  # sizes of the index array's dims so far
        self.offsets: list[int] = []  # dims of the stack inside windows
        self.collapsed: list[int] = []
        self.columns: list[tuple[int, Any, int]] = []  # dim of x, values, first batch dim
        self.sizes = [1] * len(expr.shape)
        self.ordered = True

    @property
    def stack_ndim(self) -> int:
        return len(self.shape) - len(self.added)

    def tables(self, advanced: list[Point | Table]) -> None:
        """All advanced indices at once: broadcast, they make the next dims of the result."""
        shapes = [typeof(part.at).shape for part in advanced]
        shape = broadcast_shapes_of("indexing", shapes)
        for part in advanced:
            values = part.at
            if isinstance(values, (int, np.ndarray)):
                values = np.broadcast_to(np.asarray(values), shape)
            else:
                values = broadcast_to(values, shape)
            self.column(part.dim, values, len(self.batch))
        self.batch.extend(shape)
        self.shape.extend(shape)
        self.ordered = False

    def column(self, dim: int, values: Any, at: int) -> None:
        self.columns.append((dim, values, at))
        self.collapsed.append(dim)

    def basic(self, part: Part) -> None:
        if isinstance(part, NewDim):
            self.added.append(len(self.shape))
            self.shape.append(1)
        elif isinstance(part, Span):
            self.span(part)
        else:
            self.column(part.dim, part.at, len(self.batch))

    def span(self, part: Span) -> None:
        if part.step == 1:
            self.offsets.append(self.stack_ndim)
            self.sizes[part.dim] = part.size
            if part.size != self.expr.shape[part.dim]:
                self.columns.append((part.dim, part.start, len(self.batch)))
        else:
            values = part.start + part.step * np.arange(part.size)
            self.column(part.dim, values, len(self.batch))
            self.batch.append(part.size)
            self.ordered &= part.step > 0
        self.shape.append(part.size)


def plan_gather(expr: IndexExpr) -> GatherPlan:
    """The gather that reads (or scatter that writes) what an index selects."""
    planner = _Planner(expr)
    advanced: list[Point | Table] = []
    if expr.has_tables:
        advanced = [part for part in expr.parts if isinstance(part, (Point, Table))]
    pending = bool(advanced)
    for part in expr.parts:
        if pending and (not expr.adjacent or part is advanced[0]):
            planner.tables(advanced)
            pending = False
        if not advanced or not isinstance(part, (Point, Table)):
            planner.basic(part)
    numbers = lax.GatherDimensionNumbers(
        tuple(planner.offsets),
        tuple(sorted(planner.collapsed)),
        tuple(dim for dim, _, _ in planner.columns),
    )
    return GatherPlan(
        expr.inserted,
        _index_array(planner),
        numbers,
        tuple(planner.sizes),
        tuple(planner.shape),
        tuple(planner.added),
        unique=not advanced,
        sorted=planner.ordered,
    )


def _index_array(planner: _Planner) -> Any:
    """The columns, broadcast over the batch dims and stacked along a new last dim."""
    shape = tuple(planner.batch)
    known = [isinstance(values, (int, np.ndarray)) for _, values, _ in planner.columns]
    columns = []
    for (_, values, at), static in zip(planner.columns, known, strict=True):
        columns.append(_aligned(values, at, shape, static))
    if all(known):
        return np.stack(columns, -1) if columns else np.zeros((*shape, 0), np.int32)
    return lax.concatenate([lax.expand_dims(c, (len(shape),)) for c in columns], len(shape))


def _aligned(values: Any, at: int, shape: tuple[int, ...], static: bool) -> Any:
    """One column as int32 of the index array's batch shape, its own dims starting at `at`."""
    if not static:
        dtype = typeof(values).dtype
        if dtype.itemsize > 4 and dtype.kind == "i":
            values = lax.clamp(dtype.type(-INT32_MAX), values, dtype.type(INT32_MAX))
        elif dtypes.iinfo(dtype).max > INT32_MAX:
            values = lax.min(values, dtype.type(INT32_MAX))
        values = lax.convert_element_type(values, np.int32)
        ndim = typeof(values).ndim
        return lax.broadcast_in_dim(values, shape, range(at, at + ndim))
    values = np.clip(np.asarray(values), -INT32_MAX, INT32_MAX).astype(np.int32)
    behind = len(shape) - at - values.ndim
    return np.broadcast_to(values.reshape(values.shape + (1,) * behind), shape)
