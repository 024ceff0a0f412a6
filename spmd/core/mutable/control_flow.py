"""Control flow whose functions write to mutable arrays: their values become carries and results.

The functions here run a loop or a branch (`run`) of the user's functions, first as they are. If
that raises `TouchedCells`, the loop carries the values of the cells, and the branches return them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base.errors import RefError
from spmd.base.source import current_source
from spmd.base.tree import tree_flatten, tree_unflatten
from spmd.base.util import wraps
from spmd.core.mutable.cells import (
    Cell,
    RowOfLoop,
    cell_of,
    held,
    put_back,
    read,
    values_of,
    with_cells,
)


def cells_in(leaves: Sequence[Any]) -> list[int]:
    """The positions of mutable arrays among leaves."""
    return [k for k, x in enumerate(leaves) if isinstance(x, Cell)]


def named_as(fun: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    """`made` with the name and the source line of the user's function that it stands for."""
    return wraps(fun)(made)


def _join(carry: Any, values: list[Any], inside: int | None) -> tuple[Any, int]:
    """A carry with the values of cells behind it, and where the user's part is."""
    return ((carry, values), 0) if inside is None else ((*carry, values), inside)


def _part(joined: Any, inside: int | None) -> Any:
    return joined[0] if inside is None else tuple(joined[:-1])


def _check_carry(what: str, init: Any) -> None:
    for x in tree_flatten(init)[0]:
        cell = cell_of(x)
        if cell is not None:
            raise RefError(
                f"{current_source()}: {what}: the carry holds a mutable array "
                f"({cell.aval.short()}, made at {cell.made_at}), which can't be returned. Close "
                "over it instead"
            )


def _check_structure(what: str, cells: Sequence[Cell], before: Sequence[Any]) -> None:
    for cell, old in zip(cells, before, strict=True):
        given, now = tree_flatten(old)[1], tree_flatten(read(cell))[1]
        if given != now:
            raise RefError(
                f"{current_source()}: {what}: an iteration changes which arrays a mutable value "
                f"({cell.aval.short()}, made at {cell.made_at}) holds: from {given} to {now}. "
                "Write arrays of the same shapes and dtypes in the same structure"
            )


# ---- scan --------------------------------------------------------------------------------------


def scan_with_cells(
    run: Callable[..., tuple[Any, Any]], f: Any, init: Any, xs: Any, inside: int | None
) -> tuple[Any, Any]:
    """`run(f, init, xs, inside)` for a body that may write to cells, and for cells in `xs`."""
    leaves, tree = tree_flatten(xs)
    _check_carry("scan", init)
    rows = cells_in(leaves)
    if rows:
        return _scan_over_rows(run, f, init, leaves, tree, rows, inside)

    def attempt(cells: list[Cell]) -> tuple[Any, Any]:
        if not cells:
            return run(f, init, xs, inside)

        def body(joined: Any, x: Any) -> Any:
            with held(cells, joined[-1]):
                carry, y = f(_part(joined, inside), x)
                _check_structure("scan", cells, joined[-1])
                return _join(carry, values_of(cells), inside)[0], y

        first, at = _join(init, values_of(cells), inside)
        last, ys = run(named_as(f, body), first, xs, at)
        put_back(cells, last[-1])
        return _part(last, inside), ys

    return with_cells(attempt)


def _scan_over_rows(
    run: Any, f: Any, init: Any, leaves: list[Any], tree: Any, rows: list[int], inside: int | None
) -> tuple[Any, Any]:
    """A scan over cells: each iteration has one with a row, whose last value is a result."""
    cells = [leaves[k] for k in rows]
    given = [read(x) if isinstance(x, Cell) else x for x in leaves]
    count = cells[0].aval.shape[0] if cells[0].aval.shape else 0

    def body(carry: Any, x: Any) -> Any:
        parts = list(x)
        mine = []
        for k, cell in zip(rows, cells, strict=True):
            parts[k] = type(cell)(parts[k], cell.aval.update(shape=cell.aval.shape[1:]))
            parts[k].is_row = True
            mine.append(parts[k])
        carry, y = f(carry, tree_unflatten(tree, parts))
        return carry, (y, values_of(mine))

    def body_of_views(carry: Any, x: Any) -> Any:
        i, parts = x[0], list(x[1:])
        for k, cell in zip(rows, cells, strict=True):
            parts.insert(k, cell.row(i))
        return f(carry, tree_unflatten(tree, parts))

    try:
        last, (ys, values) = scan_with_cells(run, named_as(f, body), init, given, inside)
    except RowOfLoop:
        others = [x for k, x in enumerate(leaves) if k not in rows]
        numbered = [np.arange(count, dtype=np.int32), *others]
        return scan_with_cells(run, named_as(f, body_of_views), init, numbered, inside)
    put_back(cells, values)
    return last, ys


# ---- while_loop, cond, switch ------------------------------------------------------------------


def while_with_cells(
    run: Callable[..., Any], test: Any, body: Any, init: Any, inside: int | None
) -> Any:
    """`run(test, body, init, inside)` for functions that may write to cells."""
    _check_carry("while_loop", init)

    def attempt(cells: list[Cell]) -> Any:
        if not cells:
            return run(test, body, init, inside)

        def whole_test(joined: Any) -> Any:
            with held(cells, joined[-1]):
                return test(_part(joined, inside))

        def whole_body(joined: Any) -> Any:
            with held(cells, joined[-1]):
                carry = body(_part(joined, inside))
                _check_structure("while_loop", cells, joined[-1])
                return _join(carry, values_of(cells), inside)[0]

        first, at = _join(init, values_of(cells), inside)
        last = run(named_as(test, whole_test), named_as(body, whole_body), first, at)
        put_back(cells, last[-1])
        return _part(last, inside)

    return with_cells(attempt)


def switch_with_cells(
    run: Callable[..., Any], functions: Sequence[Callable[..., Any]], operands: Sequence[Any]
) -> Any:
    """`run(functions, operands)` for branches that may write to cells, given or closed over."""
    leaves, tree = tree_flatten(tuple(operands))
    mutable = [cell_of(x) is not None for x in leaves]
    if any(mutable):
        operands = [x for x, is_cell in zip(leaves, mutable, strict=True) if not is_cell]

        def closed(f: Callable[..., Any]) -> Callable[..., Any]:
            def branch(*others: Any) -> Any:
                rest = iter(others)
                whole = [x if own else next(rest) for x, own in zip(leaves, mutable, strict=True)]
                return f(*tree_unflatten(tree, whole))

            return named_as(f, branch)

        functions = [closed(f) for f in functions]

    def attempt(cells: list[Cell]) -> Any:
        if not cells:
            return run(functions, operands)

        def returning(f: Callable[..., Any]) -> Callable[..., Any]:
            def branch(values: list[Any], *given: Any) -> Any:
                with held(cells, values):
                    return f(*given), values_of(cells)

            return named_as(f, branch)

        result, values = run([returning(f) for f in functions], [values_of(cells), *operands])
        put_back(cells, values)
        return result

    return with_cells(attempt)
