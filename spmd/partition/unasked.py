"""Moves that no sharding asks for: `config.unasked_gathers` warns of them, or refuses them.

A user asks for a move by a constraint, a type, the specs of a map or a partition of his own: each
says how a value is to be split. An equation may need more, as a dim that must be whole or an axis
on another dim. That is the partitioner's choice, and this module tells of it.
"""

from __future__ import annotations

import linecache
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from spmd.base import dtypes
from spmd.base.amounts import size_text
from spmd.base.config import config
from spmd.base.context import state
from spmd.base.errors import CollectiveWarning, ShardingError
from spmd.base.record import record
from spmd.base.source import UNKNOWN, Source, current_source
from spmd.collectives.volume import KINDS, received
from spmd.core.aval import typeof
from spmd.core.ir import Eqn
from spmd.partition.moves import combined, moved
from spmd.partition.propagate import Cell, Split

# A message names so many moves.
_MOST_NAMED = 5


@record
class Move:
    """A move that no sharding asks for."""

    source: Source  # the line that needs it
    reader: str  # the primitive that needs it, or "the result"
    name: str  # the argument that is moved; empty for other values
    made: Source  # the line that makes it
    type: str
    by: str  # the origin of its split, in words
    want: str  # the spec that is needed
    is_typed: bool
    received: int

    def __str__(self) -> str:
        code = linecache.getline(self.made.file, self.made.line).strip()
        where = f"the value of {self.made.short}" + (f" ({code})" if code else "")
        if self.made in (self.source, UNKNOWN):
            where = "a value of this line"
        value = self.name or where
        split = f", split by {self.by}" if self.by not in ("", self.name) else ""
        name = self.name or "x"
        layout = (
            f"spmd.reshard({name}, P({self.want}))"
            if self.is_typed
            else f"lax.with_sharding_constraint({name}, NamedSharding(mesh, P({self.want})))"
        )
        return (
            f"{self.source}: {self.reader} wants {value} ({self.type}{split}) laid out by "
            f"P({self.want}); each device receives {size_text(self.received)}. If that is meant, "
            f"ask for it: {name} = {layout}"
        )


class Watch:
    """Looks at the moves of one program while it is written."""

    def __init__(self, program: str, names: dict[int, str]):
        self.program = program
        self.names = names  # of arguments, by the identity of their cells
        self.eqn: Eqn | None = None
        self.moves: dict[Any, Move] = {}

    def moved(self, value: Any, x: Any, have: Split, want: Split, sizes: Mapping[Any, int]) -> Any:
        """The result of `moves.moved`; the move is noted unless a sharding asks for it."""
        cell, eqns = value.cell, state.trace.eqns
        before = len(eqns)
        out = moved(x, cell.shape, have, want, sizes)
        count = sum(received(e, sizes) for e in eqns[before:] if e.prim.name in KINDS)
        if count > config.unasked_gathers_from and not _is_asked(cell, have, want):
            self._note(value, typeof(x).dtype, have, want, count)
        return out

    def combined(
        self, value: Any, x: Any, form: Any, want: Split, sizes: Mapping[Any, int]
    ) -> tuple[Any, Split]:
        """The result of `moves.combined`: a sum is made because somebody asks for it."""
        split, over, how = form
        return combined(x, split, over, how, want, sizes)

    def _note(self, value: Any, dtype: Any, have: Split, want: Split, count: int) -> None:
        cell = value.cell
        changed = [d for d, (own, to) in enumerate(zip(have, want, strict=True)) if own != to]
        by = dict.fromkeys(cell.by[d] for d in changed if cell.by[d])
        move = Move(
            source=current_source(),
            reader="the result" if self.eqn is None else self.eqn.prim.name,
            name=self.names.get(id(cell), ""),
            made=value.source or UNKNOWN,
            type=type_text(dtypes.short_name(dtype), cell.shape, have),
            by=" and ".join(by),
            want=", ".join(_entry(axes) for axes in _trimmed(want)),
            is_typed=bool(cell.barred),
            received=count,
        )
        self.moves.setdefault((move.source, move.reader, move.name, move.type, move.want), move)

    def report(self) -> None:
        """Warn of what was noted, or raise, as the setting says."""
        if not self.moves:
            return
        found = sorted(self.moves.values(), key=lambda move: -move.received)
        more = len(found) - _MOST_NAMED
        count = "a move" if len(found) == 1 else f"{len(found)} moves"
        text = (
            f"{self.program}: {count} between devices for which no sharding asks "
            f"(config.unasked_gathers={config.unasked_gathers!r}, from "
            f"{size_text(config.unasked_gathers_from)} a device):"
        )
        text += "".join(f"\n  {move}" for move in found[:_MOST_NAMED])
        text += f"\n  and {more} smaller ones" if more > 0 else ""
        tell(text, found[0].source)


def tell(text: str, source: Source) -> None:
    """Warn with a text, or raise, as the setting says."""
    if config.unasked_gathers == "raise":
        raise ShardingError(text)
    warnings.warn_explicit(text, CollectiveWarning, source.file, source.line)


def _is_asked(cell: Cell, have: Split, want: Split) -> bool:
    """Whether all dims that change become what a user's sharding of this value says."""
    rows = zip(have, want, cell.axes, cell.closed, strict=True)
    return all(own == to or (to == said and closed) for own, to, said, closed in rows)


def _trimmed(split: Split) -> Sequence[Any]:
    last = max((d + 1 for d, axes in enumerate(split) if axes), default=0)
    return split[:last]


def _entry(axes: Sequence[Any]) -> str:
    return "None" if not axes else repr(axes[0] if len(axes) == 1 else tuple(axes))


def type_text(dtype: str, shape: Sequence[int], split: Sequence[Sequence[Any]]) -> str:
    """A type as explicit mode writes it, `f32[8@x,4]`."""
    dims = []
    for size, axes in zip(shape, split, strict=True):
        dims.append(f"{size}@{'+'.join(map(str, axes))}" if axes else str(size))
    return f"{dtype}[{','.join(dims)}]"


# ---- the watch of a thread -----------------------------------------------------------------------


class _Here(threading.local):
    """The watch of the program that this thread writes; None if there is none."""

    def __init__(self) -> None:
        self.watch: Watch | None = None


here = _Here()


@contextmanager
def watching(watch: Watch | None) -> Iterator[None]:
    """Let a watch look at the moves that are made in a `with` block; None is no watch."""
    before, here.watch = here.watch, watch
    try:
        yield
    finally:
        here.watch = before


def asked() -> Any:
    """A `with` block in which moves are what the user asks for."""
    return watching(None)
