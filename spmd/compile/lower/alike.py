"""Which equations, and groups of them, are alike: the same operations on the same types.

A deep network repeats its layers, so most of a program's groups are a rare few. What is derived
from a group alone (how it grows, its kernel) is derived once for all that are alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Literal, Var


def kinds_of(eqns: Sequence[Eqn]) -> list[int]:
    """A number for each equation, equal for those that do the same to operands of the same types.

    Equations with effects, or with parameters that cannot be compared, are like no other.
    """
    numbers: dict[Any, int] = {}
    found = []
    for k, eqn in enumerate(eqns):
        key: Any = -1 - k
        if not eqn.effects:
            ins = tuple([v.aval if type(v) is Var else (v.aval,) for v in eqn.invars])
            outs = tuple([v.aval for v in eqn.outvars])
            params = eqn.params
            key = (
                (eqn.prim, ins, outs, *[(n, exactly(v)) for n, v in params.items()])
                if params
                else (eqn.prim, ins, outs)
            )
        try:
            found.append(numbers.setdefault(key, len(numbers)))
        except TypeError:
            found.append(numbers.setdefault(-1 - k, len(numbers)))
    return found


def pattern(
    members: Iterable[tuple[int, Eqn]], outs: Sequence[Var]
) -> tuple[Hashable, tuple[Var, ...]]:
    """What groups of equations, given with their kinds, have in common if they are alike.

    With it come the variables that the group reads, in order of appearance.
    """
    numbers: dict[Any, int] = {}
    reads: list[Var] = []
    row: list[Any] = []
    for kind, eqn in members:
        row.append(kind)
        for atom in eqn.invars:
            if type(atom) is Literal:
                row.append(_literal(atom))
                continue
            number = numbers.get(atom)
            if number is None:
                number = numbers[atom] = len(numbers)
                reads.append(atom)  # type: ignore[arg-type]
            row.append(number)
        for var in eqn.outvars:
            numbers[var] = len(numbers)
    return (tuple(row), tuple([numbers[v] for v in outs])), tuple(reads)


def form(group: ClosedJaxpr) -> Hashable | None:
    """What two groups have in common if and only if they are alike; None if that is not known."""
    jaxpr = group.jaxpr
    if jaxpr.constvars:
        return None
    numbers: dict[Var, int] = {}

    def atom(x: Atom) -> Hashable:
        if isinstance(x, Literal):
            return _literal(x)
        return numbers[x]

    def made(v: Var) -> Hashable:
        numbers[v] = len(numbers)
        return v.aval

    found = (
        tuple([made(v) for v in jaxpr.invars]),
        tuple(
            [
                (
                    eqn.prim,
                    tuple([atom(x) for x in eqn.invars]),
                    tuple([made(v) for v in eqn.outvars]),
                    tuple([(name, exactly(value)) for name, value in eqn.params.items()]),
                )
                for eqn in jaxpr.eqns
            ]
        ),
        tuple([atom(x) for x in jaxpr.outvars]),
    )
    try:
        hash(found)
    except TypeError:
        return None
    return found


def _literal(atom: Literal) -> Hashable:
    return np.asarray(atom.val).tobytes(), atom.aval


def exactly(value: Any) -> Hashable:
    """A parameter's value such that only the very same is equal: 1 is not True, nor 0.0 -0.0."""
    return type(value), repr(value) if isinstance(value, float | complex) else value
