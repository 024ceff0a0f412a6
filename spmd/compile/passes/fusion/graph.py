"""Def-use graph: makers and readers of values in a jaxpr, as numbers of equations.

`fuse` and its helpers ask this of every equation several times. Numbers in lists answer
faster than variables in dictionaries, and sets of them are compared as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base.record import record
from spmd.core.ir import Eqn

NO_EQUATION = -1  # makes the values from outside: inputs, constants and literals


@record
class Graph:
    """The equations of a jaxpr and how they depend on each other."""

    eqns: Sequence[Eqn]
    makers: dict[Any, int]  # by variable: the equation that makes it
    sources: list[list[int]]  # by equation: the makers of its operands, in order, or `NO_EQUATION`
    users: list[list[int]]  # by equation: the readers of its results, in order


def graph_of(eqns: Sequence[Eqn]) -> Graph:
    """The dependences of equations, which stand in an order that works."""
    makers: dict[Any, int] = {}
    sources: list[list[int]] = []
    users: list[list[int]] = []
    find = makers.get
    for k, eqn in enumerate(eqns):
        made = [find(atom, NO_EQUATION) for atom in eqn.invars]  # literals are not found either
        for source in made:
            if source >= 0:
                readers = users[source]
                if not readers or readers[-1] != k:
                    readers.append(k)
        sources.append(made)
        users.append([])
        for var in eqn.outvars:
            makers[var] = k
    return Graph(eqns, makers, sources, users)


def with_copies(users: Sequence[list[int]], k: int, copies: set[int]) -> list[int]:
    """An equation, and those of `copies` that read it through copies only."""
    found = [k]
    for read in found:
        found += [user for user in users[read] if user in copies and user not in found]
    return found
