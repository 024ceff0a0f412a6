"""Forward mode in mutable arrays: their values are primals, and so are the last ones results.

The tangent of a mutable array is a mutable array, which is left with the tangent of the last value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base import dtypes
from spmd.base.errors import RefError
from spmd.base.source import current_source
from spmd.base.tree import TreeDef, tree_flatten, tree_unflatten
from spmd.core.mutable.cells import Cell, cell_of, put_back, put_cells, take_cells, values_of


class CellArguments:
    """The mutable arrays among the positional arguments of a call, and the other leaves."""

    def __init__(self, what: str, fun: Callable[..., Any], args: Sequence[Any], has_aux: bool):
        leaves, self.tree = tree_flatten(tuple(args))
        self.what, self.fun, self.has_aux = what, fun, has_aux
        self.cells, self.others = take_cells(leaves)

    @property
    def primals(self) -> tuple[list[Any], list[Any]]:
        """The arguments of `pure`."""
        return values_of([*self.cells.values()]), self.others

    def pure(self, values: Sequence[Any], others: Sequence[Any]) -> Any:
        """The function of values in place of the mutable arrays: its result, and the last ones."""
        pairs = zip(self.cells.values(), values, strict=True)
        inner = [type(cell).holding(value, cell.aval) for cell, value in pairs]
        shown = dict(zip(self.cells, [cell.shown for cell in inner], strict=True))
        out = self.fun(*tree_unflatten(self.tree, put_cells(shown, others)))
        if self.has_aux:
            out, aux = out
            return (out, values_of(inner)), aux
        return out, values_of(inner)

    def write(self, values: Sequence[Any]) -> None:
        """Write the last values into the mutable arrays."""
        put_back([*self.cells.values()], values)

    def tangents(self, given: Sequence[Any]) -> tuple[list[Cell], list[Any]]:
        """The mutable arrays that are tangents of those among the arguments, and the others."""
        leaves, tree = tree_flatten(tuple(given))
        cells, others = take_cells(leaves)
        if tree != self.tree or [*cells] != [*self.cells]:
            raise RefError(
                f"{current_source()}: {self.what}: the tangent of a mutable array is a mutable "
                f"array: the primals are {_shown(self.tree, self.cells)}, and the tangents "
                f"{_shown(tree, cells)}; make tangents with new_ref"
            )
        return [*cells.values()], others


def _shown(tree: TreeDef, cells: dict[int, Cell]) -> Any:
    return tree_unflatten(tree, [cells[k] if k in cells else "*" for k in range(tree.num_leaves)])


def write_tangents(cells: Sequence[Cell], values: Sequence[Any]) -> None:
    """Write tangents into mutable arrays; those of integers are no values."""
    moved = [
        (cell, x)
        for cell, x in zip(cells, values, strict=True)
        if getattr(x, "dtype", None) != dtypes.float0
    ]
    put_back([cell for cell, _ in moved], [x for _, x in moved])


def has_cells(tree: Any) -> bool:
    """Whether there are mutable arrays among the leaves."""
    return any(cell_of(x) is not None for x in tree_flatten(tree)[0])
