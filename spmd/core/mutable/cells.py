"""Cells: mutable places for values, of which transformations and jaxprs know nothing.

A cell holds a value of the trace under which it was made, and a write puts another value there, so
differentiation and batching see pure operations. A function that is staged writes no jaxpr with
effects: when it writes to a cell from outside, its staging ends in `TouchedCells`, and the caller
stages it again with the cell's value as one more argument and one more result (`held`).

A library's mutable type (JAX's `hijax`) becomes a kind of cell by `register_box_type`: a `Box`
stands for one value of it. It holds a pytree, whose structure may change with a write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from spmd.base.context import state
from spmd.base.errors import RefError
from spmd.base.source import Source, current_source
from spmd.base.tree import register_pytree_node, tree_flatten, tree_unflatten
from spmd.core.aval import ShapedArray
from spmd.core.trace import Trace, Tracer, leak_message

R = TypeVar("R")


class Cell:
    """A mutable place for one value of fixed shape and dtype."""

    __slots__ = ("__weakref__", "_frozen", "_level", "_value", "aval", "is_row", "made_at")

    aval: ShapedArray

    def __init__(self, value: Any, aval: ShapedArray):
        self.aval = aval
        self._value = value
        # The trace that was current when the value came in: it may hold this one's tracers.
        self._level: Trace = state.trace
        self._frozen: Source | None = None
        self.is_row = False  # whether it holds a row of another one for an iteration of a loop
        self.made_at: Source = current_source()

    @property
    def shown(self) -> Any:
        """The form that functions see."""
        return self

    def row(self, k: Any) -> Any:
        """A row of it, `k` of which is a value: reads and writes of it go to this cell."""
        raise NotImplementedError

    @classmethod
    def holding(cls, value: Any, aval: Any) -> Cell:
        """A new cell of this kind for a value of the current trace."""
        return cls(value, aval)

    @staticmethod
    def parts(value: Any) -> Sequence[Any]:
        """The arrays of a value that a cell of this kind holds."""
        return (value,)


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


class RowOfLoop(RefError):
    """A rule of the user's takes a cell that holds a row of a loop.

    The backward pass would write to it when its iteration is long over. The loop is staged again
    with views of the cells that have the rows.
    """


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
        tracers = [x for x in cell.parts(cell._value) if isinstance(x, Tracer)]
        if tracers and not cell._level.alive:
            raise RefError(leak_message(tracers[0]))
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
    _check_within(cell, value, what)
    _note_write(cell, stage)
    cell._value = value


def _check_within(cell: Cell, value: Any, what: str) -> None:
    for x in cell.parts(value):
        if isinstance(x, Tracer) and not _is_within(x._trace, cell._level):
            raise RefError(
                f"{current_source()}: {what}: the value {x!r} belongs to a transformation that "
                f"this mutable array ({cell.aval.short()}, made at {cell.made_at}) is outside of. "
                "Make the array inside of the transformed function, or pass it as an argument"
            )


def _note_write(cell: Cell, stage: Trace | None) -> None:
    touches = None if stage is None else stage.touches
    if touches is not None and id(cell) in touches.before:
        touches.written[id(cell)] = cell


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
    cells = {k: cell for k, x in enumerate(leaves) if (cell := cell_of(x)) is not None}
    return cells, [x for k, x in enumerate(leaves) if k not in cells] if cells else list(leaves)


def put_cells(cells: Mapping[int, Any], others: Sequence[Any]) -> list[Any]:
    """The leaves that `take_cells` took apart, or others in the places of the cells."""
    leaves = list(others)
    for k, cell in cells.items():  # in rising order of positions
        leaves.insert(k, cell)
    return leaves


# By the position of each cell among leaves, its class and its type.
Kinds: TypeAlias = Mapping[int, tuple[type[Cell], Any]]


def kinds_of(cells: Mapping[int, Cell]) -> Kinds:
    """The class and the type of each cell, by its position."""
    return {k: (type(cell), cell.aval) for k, cell in cells.items()}


def call_on_values(
    f: Callable[[list[Any]], R],
    kinds: Kinds,
    values: Sequence[Any],
    others: Sequence[Any],
    outside: Sequence[Cell],
    outside_values: Sequence[Any],
) -> tuple[R, list[Any], list[Any]]:
    """`f(leaves)` on new cells that hold `values`, while cells from outside hold other values.

    `kinds` describes the new cells, `others` are the leaves beside them.
    Returns the result, the last values of the new cells, and those of the cells from outside.
    """
    new = {
        k: kind.holding(x, aval) for (k, (kind, aval)), x in zip(kinds.items(), values, strict=True)
    }
    with held(outside, outside_values):
        out = f(put_cells({k: cell.shown for k, cell in new.items()}, others))
        return out, values_of([*new.values()]), values_of(outside)


def pure_of_cells(
    f: Callable[..., Sequence[Any]],
    leaves: Sequence[Any],
    stage: Callable[[Callable[..., Sequence[Any]], list[Any]], R],
) -> R:
    """`stage(pure, values)` for a flat function that uses cells, given or from outside.

    `pure` takes values in place of the cells among `leaves`, and returns what is left in those that
    `f` wrote to, behind its results: first in those given, then in those from outside.
    """
    cells, others = take_cells(leaves)
    kinds, values = kinds_of(cells), values_of([*cells.values()])
    flat, tree = tree_flatten(put_cells(dict(zip(cells, values, strict=True)), others))

    def attempt(outside: list[Cell]) -> R:
        if not cells and not outside:
            return stage(f, flat)
        before = values_of(outside)

        def pure(*xs: Any) -> list[Any]:
            given = tree_unflatten(tree, xs)
            first = [given[k] for k in cells]
            rest = [x for k, x in enumerate(given) if k not in cells]
            outs, after, outside_after = call_on_values(
                lambda leaves: f(*leaves), kinds, first, rest, outside, before
            )
            pairs = zip([*first, *before], [*after, *outside_after], strict=True)
            return [*outs, *(part for old, new in pairs for part in _changed(old, new))]

        return stage(pure, flat)

    return with_cells(attempt)


def _changed(old: Any, new: Any) -> list[Any]:
    """The arrays of the value that was written over another one; none if that is still there."""
    (before, tree), (after, tree_after) = tree_flatten(old), tree_flatten(new)
    same = tree == tree_after and all(x is y for x, y in zip(before, after, strict=True))
    return [] if same else after


# ---- mutable types of libraries ----------------------------------------------------------------

# The functions that give the type of a value, by its class, and the cells that stand for values.
_box_types: dict[type, Callable[[Any], Any]] = {}
_boxes: WeakValueDictionary[int, Box] = WeakValueDictionary()


class Contents:
    """The arrays of a value of a library's mutable type, and a state that says their order."""

    __slots__ = ("leaves", "state")

    def __init__(self, leaves: Sequence[Any], state: Any):
        self.leaves, self.state = list(leaves), state


register_pytree_node(
    Contents, lambda x: (x.leaves, x.state), lambda state, leaves: Contents(leaves, state)
)


class BoxType:
    """The type of a box: `kind` is the library's, with JAX's methods of a mutable type."""

    __slots__ = ("kind",)

    def __init__(self, kind: Any):
        self.kind = kind

    def short(self) -> str:
        """The type's name in messages."""
        return str(self.kind)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoxType) and self.kind == other.kind

    def __hash__(self) -> int:
        return hash((BoxType, self.kind))


class Box(Cell):
    """The cell that stands for a value of a library's mutable type.

    It lives as long as the trace that the value was made under. That of a value which was made
    outside of all traces can be made anew.
    """

    __slots__ = ("_is_open", "_kind", "_thing")

    def __init__(self, thing: Any, kind: Any, level: Trace):
        self.aval = BoxType(kind)  # type: ignore[assignment]
        self._kind, self._thing, self._level = kind, thing, level
        self._frozen, self.is_row = None, False
        self._is_open = False
        self.made_at = current_source()
        _boxes[id(thing)] = self
        level.keep(self)

    @property
    def _value(self) -> Contents:  # type: ignore[override]
        """The arrays that the value holds now."""
        kind = self._kind
        with self._open():
            # Weak types are the arrays' own affair, as in any pytree.
            found = self._thing.cur_qdd().normalize()
            return Contents(kind.read_loval(found, self._thing), found)

    @_value.setter
    def _value(self, value: Contents) -> None:
        with self._open():
            self._kind.update_from_loval(value.state, self._thing, *value.leaves)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Let the type's own functions, which use its operations, come at what it holds."""
        before, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = before

    @property
    def shown(self) -> Any:
        """The library's value."""
        return self._thing

    @classmethod
    def holding(cls, value: Contents, aval: BoxType) -> Box:  # type: ignore[override]
        """The box of a new value of the library's type."""
        thing = aval.kind.new_from_loval(value.state, *value.leaves)
        return cls(thing, type_of_boxed(thing), state.trace)

    @staticmethod
    def parts(value: Contents) -> Sequence[Any]:
        """The arrays that it holds."""
        return value.leaves


def register_box_type(kind: type, type_of: Callable[[Any], Any]) -> None:
    """Declare a class of mutable values; `type_of(x)` has JAX's methods of a mutable type.

    These are `read_loval`, `update_from_loval` and `new_from_loval`; a value has `cur_qdd()`, the
    state that says what its arrays are, and a state has `normalize()`, itself without weak types.
    """
    _box_types[kind] = type_of


def type_of_boxed(x: Any) -> Any:
    """The library's type of a value, if it is of a class that is registered; else None."""
    if not _box_types:
        return None
    for kind in type(x).__mro__:
        type_of = _box_types.get(kind)
        if type_of is not None:
            return type_of(x)
    return None


def cell_of(x: Any) -> Cell | None:
    """The cell that a leaf of a pytree is or stands for; None for one that is no mutable value."""
    if isinstance(x, Cell):
        return x
    kind = type_of_boxed(x)
    if kind is None or not kind.has_qdd:
        return None
    return _boxes.get(id(x)) or Box(x, kind, _outermost())


def _outermost() -> Trace:
    at = state.trace
    while at.parent is not None:
        at = at.parent
    return at


def use_boxes(run: Callable[[], Any], operands: Sequence[Any], what: str) -> Any:
    """`run()`, an operation of a library that reads or writes values of its mutable types."""
    cells = [c for c in map(cell_of, operands) if isinstance(c, Box) and not c._is_open]
    stages = [_reach(cell, what) for cell in cells]
    before = [cell._value for cell in cells]
    out = run()
    for cell, stage, old in zip(cells, stages, before, strict=True):
        new = cell._value
        if not _changed(old, new):
            continue
        try:
            _check_within(cell, new, what)
        except RefError:
            cell._value = old
            raise
        _note_write(cell, stage)
    for made in out if isinstance(out, list | tuple) else [out]:
        kind = type_of_boxed(made)
        if kind is not None and kind.has_qdd and id(made) not in _boxes:
            Box(made, kind, state.trace)
    return out
