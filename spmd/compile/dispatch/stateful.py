"""Calls of jitted functions that use mutable arrays: each is a call of a pure jitted function.

The pure function takes the values of the mutable arrays among the arguments, and of those that the
function closes over, and returns their last values beside the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.errors import RefError
from spmd.base.source import current_source
from spmd.compile.dispatch.signature import Signature, Split
from spmd.core.mutable.cells import Cell, held, put_back, values_of, with_cells


class StatefulCalls:
    """The pure functions of one jitted function, by what they take in place of mutable arrays."""

    def __init__(self, fun: Callable[..., Any], signature: Signature, jit: Callable[..., Any]):
        self.fun, self.signature, self.jit = fun, signature, jit
        self._pure: dict[Any, Callable[..., Any]] = {}
        # Those that calls before had to take as values: the next one begins with them.
        self._closed: list[Cell] = []

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        split = self.signature.split(args, kwargs)
        places = [k for k, x in enumerate(split.leaves) if isinstance(x, Cell)]
        mine = [split.leaves[k] for k in places]
        names = self.signature.leaf_names(args, kwargs)
        self._check_alone(mine, [names[k] for k in places])
        others = [x for x in split.leaves if not isinstance(x, Cell)]

        def call(found: list[Cell]) -> Any:
            closed = [*self._closed, *found]
            self._check_not_closed(mine, [names[k] for k in places], closed)
            pure = self._pure_of(split, places, mine, closed)
            out, mine_after, closed_after = pure(values_of(mine), values_of(closed), others)
            put_back([*mine, *closed], [*mine_after, *closed_after])
            self._closed = closed
            return out

        return with_cells(call)

    def _pure_of(
        self, split: Split, places: Sequence[int], mine: Sequence[Cell], closed: list[Cell]
    ) -> Callable[..., Any]:
        key = (split.tree, tuple(places), split.static_key, tuple(map(id, closed)))
        kinds = tuple((type(c), c.aval) for c in mine)
        found = self._pure.get((key, kinds))
        if found is None:
            run = self._written(split, places, kinds, closed)
            run.__name__ = self.signature.name
            found = self._pure[key, kinds] = self.jit(run)
        return found

    def _written(
        self, split: Split, places: Sequence[int], kinds: Sequence[Any], closed: list[Cell]
    ) -> Callable[..., Any]:
        parts = Split([], split.tree, split.static_args, split.static_kwargs)

        def run(values: list[Any], closed_values: list[Any], others: list[Any]) -> Any:
            inner = [kind(x, aval) for (kind, aval), x in zip(kinds, values, strict=True)]
            leaves = list(others)
            for k, cell in zip(places, inner, strict=True):
                leaves.insert(k, cell)
            args, kwargs = self.signature.join(parts, leaves)
            with held(closed, closed_values):
                out = self.fun(*args, **kwargs)
                return out, values_of(inner), values_of(closed)

        return run

    def _check_alone(self, mine: Sequence[Cell], names: Sequence[str]) -> None:
        first: dict[int, str] = {}
        for cell, name in zip(mine, names, strict=True):
            before = first.setdefault(id(cell), name)
            if before is not name:
                raise RefError(
                    f"{current_source()}: {self.signature.what}: only one reference to a mutable "
                    f"array may be passed, and {cell.aval.short()} (made at {cell.made_at}) is "
                    f"passed as {before} and as {name}"
                )

    def _check_not_closed(
        self, mine: Sequence[Cell], names: Sequence[str], closed: Sequence[Cell]
    ) -> None:
        known = {id(cell) for cell in closed}
        for cell, name in zip(mine, names, strict=True):
            if id(cell) in known:
                raise RefError(
                    f"{current_source()}: {self.signature.what}: the mutable array "
                    f"{cell.aval.short()} (made at {cell.made_at}) is passed as {name}, and the "
                    "function closes over it too; do one of both"
                )
