"""Cells: mutable places for values, which transformations and jaxprs know nothing of.

A cell holds a value of the trace under which it was made, and a write puts another value there, so
differentiation and batching see pure operations. A function that is staged writes no jaxpr with
effects: when it writes to a cell from outside, its staging ends in `TouchedCells`, and the caller
stages it again with the cell's value as one more argument and one more result (`held`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from spmd.base.context import state
from spmd.base.errors import RefError
from spmd.base.source import Source, current_source
from spmd.core.aval import ShapedArray
from spmd.core.trace import Trace, Tracer, leak_message

R = TypeVar("R")


class Cell:
    """A mutable place for one value of fixed shape and dtype."""

    __slots__ = ("__weakref__", "_frozen", "_level", "_value", "aval", "made_at")

    aval: ShapedArray

    def __init__(self, value: Any, aval: ShapedArray):
        self.aval = aval
        self._value = value
        # The trace that was current when the value came in: it may hold this one's tracers.
        self._level: Trace = state.trace
        self._frozen: Source | None = None
        self.made_at: Source = current_source()


class AbstractRef:
    """The type of a mutable array: `inner_aval` is that of its values."""

    __slots__ = ("inner_aval",)

    def __init__(self, inner_aval: Any):
        self.inner_aval = inner_aval

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner_aval.shape

    @property
    def dtype(self) -> np.dtype:
        return self.inner_aval.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AbstractRef) and self.inner_aval is other.inner_aval

    def __hash__(self) -> int:
        return hash((AbstractRef, self.inner_aval))

    def __repr__(self) -> str:
        return f"Ref{{{self.inner_aval}}}"


class TouchedCells(RefError):
    """Cells from outside that a staged function wrote to; its caller stages it again."""

    def __init__(self, name: str, cells: Sequence[Cell]):
        self.cells = list(cells)
        super().__init__(
            f"{name} writes to a mutable array ({cells[0].aval.short()}, made at "
            f"{cells[0].made_at}) that it closes over. Functions under jit, scan, while_loop, "
            "cond, checkpoint and their like can do that; here, return the value instead"
        )


class Touches:
    """The cells that a function being staged reached outside of itself, and how to undo it."""

    def __init__(self) -> None:
        self.before: dict[int, tuple[Cell, Any, Trace]] = {}
        self.written: dict[int, Cell] = {}

    def restore(self) -> None:
        """Give the cells the values that they had."""
        for cell, value, level in self.before.values():
            cell._value, cell._level = value, level

    def check(self, name: str, reads: list[Cell] | None) -> None:
        """Raise if a cell was written to; put those that were read alone into `reads`."""
        if self.written:
            raise TouchedCells(name, list(self.written.values()))
        if reads is not None:
            reads += [cell for cell, _, _ in self.before.values()]


# ---- reading and writing -----------------------------------------------------------------------


def _stages_above(cell: Cell) -> list[Trace]:
    """The traces of staged functions between the current one and the cell's, innermost first."""
    home = _stage_of(cell._level)
    found: list[Trace] = []
    at = state.trace
    while at is not None and at is not home:
        if at.stages:
            found.append(at)
        at = at.parent
    if home is not None and at is not home:
        value = cell._value
        if isinstance(value, Tracer) and not cell._level.alive:
            raise RefError(leak_message(value))
        return []
    return found


def _stage_of(trace: Any) -> Trace | None:
    """The innermost staged function that a trace runs in; None outside of any."""
    while trace is not None and not trace.stages:
        trace = trace.parent
    return trace


def _reach(cell: Cell, what: str) -> Trace | None:
    """Make a cell from outside one of the functions that are being staged."""
    if cell._frozen is not None:
        raise RefError(
            f"{current_source()}: {what}: this mutable array ({cell.aval.short()}) was frozen at "
            f"{cell._frozen} and is none any more; use the array that freeze returned"
        )
    stages = _stages_above(cell)
    for stage in reversed(stages):
        if stage.touches is None:
            stage.touches = Touches()
        stage.touches.before.setdefault(id(cell), (cell, cell._value, cell._level))
        cell._level = stage
    return _stage_of(cell._level)


def read(cell: Cell, what: str = "get") -> Any:
    """The value of a cell now."""
    _reach(cell, what)
    return cell._value


def write(cell: Cell, value: Any, what: str = "set") -> None:
    """Put a value of the cell's type into it."""
    stage = _reach(cell, what)
    if isinstance(value, Tracer) and not _is_within(value._trace, cell._level):
        raise RefError(
            f"{current_source()}: {what}: the value {value!r} belongs to a transformation that "
            f"this mutable array ({cell.aval.short()}, made at {cell.made_at}) is outside of. "
            "Make the array inside of the transformed function, or pass it as an argument"
        )
    touches = None if stage is None else stage.touches
    if touches is not None and id(cell) in touches.before:
        touches.written[id(cell)] = cell
    cell._value = value


def _is_within(trace: Any, level: Any) -> bool:
    """Whether values of a trace may be held at a level: it is the level's, or further out."""
    while level is not None:
        if level is trace:
            return True
        level = level.parent
    return False


def freeze(cell: Cell) -> Any:
    """The last value of a cell, which is none any more."""
    value = read(cell, "freeze")
    cell._frozen = current_source()
    return value


# ---- functions of cells as pure functions ------------------------------------------------------


@contextmanager
def held(cells: Sequence[Cell], values: Sequence[Any]) -> Iterator[None]:
    """Let cells hold other values, of the current trace, for the length of a `with` block."""
    before = [(cell._value, cell._level) for cell in cells]
    for cell, value in zip(cells, values, strict=True):
        cell._value, cell._level = value, state.trace
    try:
        yield
    finally:
        for cell, (value, level) in zip(cells, before, strict=True):
            cell._value, cell._level = value, level


def with_cells(run: Callable[[list[Cell]], Any]) -> Any:
    """`run(cells)` with the cells that it has to take as values: none at first.

    It is asked again, with more, as long as staging a function ends in `TouchedCells`.
    """
    cells: list[Cell] = []
    while True:
        try:
            return run(cells)
        except TouchedCells as found:
            known = {id(cell) for cell in cells}
            more = [cell for cell in found.cells if id(cell) not in known]
            if not more:
                raise
            cells = [*cells, *more]


def values_of(cells: Sequence[Cell]) -> list[Any]:
    """The values that cells hold now."""
    return [read(cell) for cell in cells]


def put_back(cells: Sequence[Cell], values: Sequence[Any]) -> None:
    """Write what a pure function returned for the cells."""
    for cell, value in zip(cells, values, strict=True):
        write(cell, value)


# ---- cells among the leaves of arguments -------------------------------------------------------


def take_cells(leaves: Sequence[Any]) -> tuple[dict[int, Cell], list[Any]]:
    """The cells among leaves, by their positions, and the other leaves."""
    cells = {k: x for k, x in enumerate(leaves) if isinstance(x, Cell)}
    return cells, [x for x in leaves if not isinstance(x, Cell)] if cells else list(leaves)


def put_cells(cells: Mapping[int, Any], others: Sequence[Any]) -> list[Any]:
    """The leaves that `take_cells` took apart, or others in the places of the cells."""
    leaves = list(others)
    for k, cell in cells.items():  # in rising order of positions
        leaves.insert(k, cell)
    return leaves


def pure_of_cells(
    f: Callable[..., Sequence[Any]],
    leaves: Sequence[Any],
    stage: Callable[[Callable[..., list[Any]], list[Any]], R],
) -> R:
    """`stage(pure, values)` for a flat function that uses cells, given or from outside.

    `pure` takes values in place of the cells among `leaves`, and returns what is left in those that
    `f` wrote to, behind its results: first in those given, then in those from outside.
    """
    places = [k for k, x in enumerate(leaves) if isinstance(x, Cell)]
    kinds = [(type(leaves[k]), leaves[k].aval) for k in places]
    values = [read(x) if isinstance(x, Cell) else x for x in leaves]

    def attempt(outside: list[Cell]) -> R:
        if not places and not outside:
            return stage(f, values)
        before = values_of(outside)

        def pure(*xs: Any) -> list[Any]:
            inner = {k: kind(xs[k], aval) for k, (kind, aval) in zip(places, kinds, strict=True)}
            given = [inner.get(k, x) for k, x in enumerate(xs)]
            first = [*(xs[k] for k in places), *before]
            with held(outside, before):
                outs = f(*given)
                after = [*values_of([*inner.values()]), *values_of(outside)]
            return [*outs, *(y for x, y in zip(first, after, strict=True) if x is not y)]

        return stage(pure, values)

    return with_cells(attempt)
