"""Axis names in scope: those of `vmap(axis_name=...)`, `pmap` and `shard_map`.

A frame is a *vmap* axis (collectives over it become reductions over a batched dim), a *manual* mesh
axis of `shard_map` (collectives over it become communication, and types say which values vary over
it), or a *pmap* axis (communication, without such types, as in JAX).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spmd.base.context import busy, state
from spmd.base.errors import AxisError
from spmd.base.record import record
from spmd.base.util import closest


@record
class AxisFrame:
    """One axis name in scope. `kind` is "vmap", "manual" or "pmap"."""

    name: Any
    size: int
    kind: str


@contextmanager
def extend_axes(frames: Sequence[AxisFrame]) -> Iterator[None]:
    """Bring axis names into scope for the length of a `with` block."""
    before = state.axes
    state.axes = (*before, *frames)
    busy.append(None)
    try:
        yield
    finally:
        state.axes = before
        busy.pop()


@contextmanager
def replace_axes(frames: Sequence[AxisFrame]) -> Iterator[None]:
    """Make `frames` the only axis names in scope: used when a stored jaxpr is traced again."""
    before = state.axes
    state.axes = tuple(frames)
    busy.append(None)
    try:
        yield
    finally:
        state.axes = before
        busy.pop()


def axis_frame(name: Any) -> AxisFrame:
    """The innermost frame called `name`; an AxisError says which names there are."""
    for frame in reversed(state.axes):
        if frame.name == name:
            return frame
    bound = ", ".join(repr(f.name) for f in state.axes) or "none"
    meant = closest(str(name), [str(f.name) for f in state.axes])
    guess = f"Did you mean {meant!r}? " if meant else ""
    raise AxisError(
        f"unbound axis name {name!r}. {guess}Axis names in scope here: {bound}. "
        f"Call this inside pmap(..., axis_name={name!r}), vmap(..., axis_name={name!r}) "
        f"or a shard_map over a mesh that has this axis."
    )


def axis_names(name: Any) -> tuple[Any, ...]:
    """One axis name or a sequence of them, as a tuple; each must be in scope."""
    names = tuple(name) if isinstance(name, (tuple, list)) else (name,)
    for n in names:
        axis_frame(n)
    return names


def size_of(name: Any) -> int:
    """The size of an axis, or the product of the sizes of several."""
    return math.prod(axis_frame(n).size for n in axis_names(name))


def manual_axes() -> tuple[Any, ...]:
    """The manual mesh axes in scope, outermost first."""
    return tuple(f.name for f in state.axes if f.kind == "manual")


class VmaHooks:
    """How a value's set of varying axes is changed; `collectives` sets both functions.

    `cast(x, axes)` lets an unvarying value vary (`pvary`); `total(x, axes)` is its transpose, the
    sum over the axes (`psum`).
    """

    cast: Callable[[Any, tuple[Any, ...]], Any]
    total: Callable[[Any, tuple[Any, ...]], Any]


vma_hooks = VmaHooks()


def cast_to_vma(x: Any, vma: frozenset[Any], have: frozenset[Any]) -> Any:
    """`x`, which varies over `have`, cast to vary over `vma` as well."""
    missing = tuple(sorted(vma - have, key=str))
    return vma_hooks.cast(x, missing) if missing else x
