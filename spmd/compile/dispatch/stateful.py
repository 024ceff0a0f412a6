"""Calls of jitted functions that use mutable arrays: each is a call of a pure jitted function.

The pure function takes the values of the mutable arrays among the arguments, and of those that the
function closes over, and returns their last values beside the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.errors import RefError
from spmd.base.source import current_source
from spmd.base.tree import TreeDef, tree_flatten
from spmd.base.util import api_boundary
from spmd.compile.dispatch.signature import Signature, Split
from spmd.compile.dispatch.stages import other_arguments
from spmd.core.mutable.cells import (
    Cell,
    Kinds,
    call_on_values,
    cell_of,
    kinds_of,
    put_back,
    put_cells,
    read,
    take_cells,
    values_of,
    with_cells,
)


class StatefulCalls:
    """The pure functions of one jitted function, by what they take in place of mutable arrays."""

    def __init__(self, fun: Callable[..., Any], signature: Signature, jit: Callable[..., Any]):
        self.fun, self.signature, self.jit = fun, signature, jit
        self._pure: dict[Any, Callable[..., Any]] = {}
        # The cells that earlier calls took as values: the next call begins with them.
        self._closed: list[Cell] = []

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call(pure: Any, mine: list[Cell], closed: list[Cell], others: list[Any]) -> Any:
            out, mine_after, closed_after = pure(values_of(mine), values_of(closed), others)
            put_back([*mine, *closed], [*mine_after, *closed_after])
            return out

        return self._with_pure(self.signature.split(args, kwargs), args, kwargs, call)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StatefulStage:
        """The first stage of a call."""
        split = self.signature.split(args, kwargs)

        def trace(pure: Any, mine: list[Cell], closed: list[Cell], others: list[Any]) -> Any:
            stage = pure.trace(values_of(mine), values_of(closed), others)
            return StatefulStage(self.signature, split, closed, stage)

        return self._with_pure(split, args, kwargs, trace)

    def _with_pure(
        self,
        split: Split,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        use: Callable[[Any, list[Cell], list[Cell], list[Any]], Any],
    ) -> Any:
        """`use(pure, mine, closed, others)`: a pure function, and what it is called with."""
        cells, others = take_cells(split.leaves)
        kinds, mine = kinds_of(cells), [*cells.values()]
        leaf_names = self.signature.leaf_names(args, kwargs)
        names = [leaf_names[k] for k in cells]
        self._check_alone(mine, names)

        def attempt(found: list[Cell]) -> Any:
            closed = [*self._closed, *found]
            self._check_not_closed(mine, names, closed)
            out = use(self._pure_of(split, kinds, closed), mine, closed, others)
            self._closed = closed
            return out

        return with_cells(attempt)

    def _pure_of(self, split: Split, kinds: Kinds, closed: list[Cell]) -> Callable[..., Any]:
        key = (split.tree, tuple(kinds.items()), split.static_key, tuple(map(id, closed)))
        found = self._pure.get(key)
        if found is None:
            run = self._written(split, kinds, closed)
            run.__name__ = self.signature.name
            found = self._pure[key] = self.jit(run)
        return found

    def _written(self, split: Split, kinds: Kinds, closed: list[Cell]) -> Callable[..., Any]:
        parts = Split([], split.tree, split.static_args, split.static_kwargs)

        def call(leaves: list[Any]) -> Any:
            args, kwargs = self.signature.join(parts, leaves)
            return self.fun(*args, **kwargs)

        def run(values: list[Any], closed_values: list[Any], others: list[Any]) -> Any:
            return call_on_values(call, kinds, values, others, closed, closed_values)

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


class StatefulStage:
    """A stage of a call that uses mutable arrays: that of the pure function, in the user's terms.

    What this class does not define is the pure stage's, as its `jaxpr` and its texts.
    """

    def __init__(self, signature: Signature, split: Split, closed: list[Cell], stage: Any):
        self._signature, self._split, self._closed, self._stage = signature, split, closed, stage
        self._places = take_cells(split.leaves)[0]  # positions of mutable arrays among arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def __repr__(self) -> str:
        return repr(self._stage)

    def lower(self, **options: Any) -> StatefulStage:
        """Run the compiler's passes, as `Traced.lower`."""
        return self._next(self._stage.lower(**options))

    def compile(self, compiler_options: dict[str, Any] | None = None) -> StatefulStage:
        """Make machine code, as `Lowered.compile`."""
        return self._next(self._stage.compile(compiler_options))

    def _next(self, stage: Any) -> StatefulStage:
        return StatefulStage(self._signature, self._split, self._closed, stage)

    # ---- arguments and results, in the user's structures ----

    @property
    def in_tree(self) -> TreeDef:
        """The structure of the arguments."""
        return self._split.tree

    @property
    def out_tree(self) -> TreeDef:
        """The structure of the results."""
        return self._stage.out_tree.parts[0]

    def _of_arguments(self, found: tuple[Any, dict[str, Any]]) -> Any:
        """The pure stage's description of its arguments, in the user's structure."""
        (mine, _, others), _ = found
        return self.in_tree.unflatten(put_cells(dict(zip(self._places, mine, strict=True)), others))

    in_avals = property(lambda self: self._of_arguments(self._stage.in_avals))
    args_info = property(lambda self: self._of_arguments(self._stage.args_info))
    input_shardings = property(lambda self: self._of_arguments(self._stage.input_shardings))
    input_formats = property(lambda self: self._of_arguments(self._stage.input_formats))
    out_avals = property(lambda self: self._stage.out_avals[0])
    out_info = property(lambda self: self._stage.out_info[0])
    output_shardings = property(lambda self: self._stage.output_shardings[0])
    output_formats = property(lambda self: self._stage.output_formats[0])

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function; mutable arrays and arrays may stand for each other."""
        leaves, tree = tree_flatten((args, kwargs))
        if tree != self.in_tree:
            raise other_arguments(self._signature.what, self._split, tree)
        places = self._places
        cells = [cell_of(x) for x in leaves]
        values = [x if c is None else read(c) for x, c in zip(leaves, cells, strict=True)]
        mine = [values[k] for k in places]
        others = [x for k, x in enumerate(values) if k not in places]
        out, mine_after, closed_after = self._stage(mine, values_of(self._closed), others)
        for k, value in zip(places, mine_after, strict=True):
            cell = cells[k]
            if cell is not None:
                put_back([cell], [value])
        put_back(self._closed, closed_after)
        return out
