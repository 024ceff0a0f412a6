"""Tables of definitions, and the pass that writes those of one.

A definition is a function of traced operands and the primitive's parameters, which returns its
result, or a list of them. It is traced once for each kind of operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.source import Source
from spmd.core.aval import ShapedArray
from spmd.core.ir import Atom, ClosedJaxpr, Eqn
from spmd.core.rewriting.equations import Walk, finish, map_subjaxprs, start
from spmd.core.stage import trace_to_jaxpr

Definition: TypeAlias = Callable[..., Any]
Condition: TypeAlias = Callable[[Sequence[ShapedArray]], bool]

Table: TypeAlias = dict[str, tuple[Definition, Condition]]

# The definitions of platforms on which the host can't help.
TABLE: Table = {}


def always(avals: Sequence[ShapedArray]) -> bool:
    """A definition of all kinds of operands."""
    return True


def is_complex(avals: Sequence[ShapedArray]) -> bool:
    """A definition for complex numbers; real ones have kernels."""
    return dtypes.is_complex(avals[0].dtype)


def is_bool(avals: Sequence[ShapedArray]) -> bool:
    """A definition for booleans; numbers have kernels."""
    return dtypes.is_bool(avals[0].dtype)


def defines(
    *names: str, when: Condition = always, table: Table = TABLE
) -> Callable[[Definition], Definition]:
    """A decorator: the definition of the primitives of these names, for such operands."""

    def declare(function: Definition) -> Definition:
        table.update(dict.fromkeys(names, (function, when)))
        return function

    return declare


def write_definitions(
    closed: ClosedJaxpr,
    chosen: Callable[[Eqn], bool] = lambda eqn: True,
    table: Table = TABLE,
) -> ClosedJaxpr:
    """Write definitions in the place of equations that have one, in calls and loops too.

    Equations that are not `chosen` stay.
    """
    if table.keys().isdisjoint(closed.jaxpr.primitives):
        return closed
    writer = start(closed)
    _Writer(writer, chosen, table).run(closed.jaxpr)
    return finish(writer, closed)


class _Writer(Walk):
    def __init__(self, writer: Any, chosen: Callable[[Eqn], bool], table: Table):
        super().__init__(writer)
        self.chosen, self.table = chosen, table

    def replaces(self, eqn: Eqn, ins: tuple[Atom, ...], source: Source) -> bool:
        """Write the definition of an equation."""
        body = definition_of(eqn, self.table) if self.chosen(eqn) else None
        if body is not None:
            self.call(body, eqn, ins, source)
        return body is not None

    def params_of(self, eqn: Eqn) -> dict[str, Any]:
        def write(inner: ClosedJaxpr) -> ClosedJaxpr:
            return write_definitions(inner, self.chosen, self.table)

        return map_subjaxprs(eqn, write)


def definition_of(eqn: Eqn, table: Table = TABLE) -> ClosedJaxpr | None:
    """The jaxpr that defines an equation; None if there is none for its operands."""
    found = table.get(eqn.prim.name)
    avals = tuple([atom.aval for atom in eqn.invars])
    if found is None or not found[1](avals):
        return None
    if any(a.size == 0 for a in (*avals, *(v.aval for v in eqn.outvars))):
        return None
    return _traced(found[0], avals, tuple(eqn.params.items()))


@functools.lru_cache(maxsize=256)
def _traced(
    function: Definition, avals: tuple[ShapedArray, ...], params: tuple[tuple[str, Any], ...]
) -> ClosedJaxpr:
    def flat(*operands: Any) -> Sequence[Any]:
        found = function(*operands, **dict(params))
        return found if isinstance(found, (list, tuple)) else [found]

    flat.__name__ = function.__name__
    # A definition may need wider numbers than its user's program.
    with config.override("enable_x64", True):
        return trace_to_jaxpr(flat, avals)
