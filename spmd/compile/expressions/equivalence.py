"""Equivalence of equations, and of groups of them: the same operations on the same types.

A deep network repeats its layers, so most of a program's groups are copies of a few. Facts that
follow from a group alone (its growth, its kernel) are derived once for all that are alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from spmd.core.ir import Atom, ClosedJaxpr, Eqn, Literal, Var

# Floats that are equal may differ in the sign of a zero, and some are not equal to themselves.
_NUMBERS = frozenset((float, complex, np.float64, np.complex128))


def kinds_of(eqns: Sequence[Eqn]) -> tuple[list[int], list[Eqn]]:
    """A number for each equation, equal for those that do the same to operands of the same types.

    With them comes the first equation of each kind. Equations with effects, or with parameters that
    cannot be compared, are like no other.
    """
    numbers: dict[Any, int] = {}
    kinds: list[int] = []
    first: list[Eqn] = []
    for eqn in eqns:
        kind = count = len(first)
        if not eqn.effects:
            ins = [v.aval if type(v) is Var else (v.aval,) for v in eqn.invars]
            key: Any = (eqn.prim, len(ins), *ins, *[v.aval for v in eqn.outvars])
            if eqn.params:
                key += _exactly(eqn.params)
            try:
                kind = numbers.setdefault(key, count)
            except TypeError:
                pass
        if kind == count:
            first.append(eqn)
        kinds.append(kind)
    return kinds, first


def _exactly(params: dict[str, Any]) -> tuple[Any, ...]:
    """Parameters as keys that only identical values share; see `exactly`."""
    values = params.values()
    types = tuple(map(type, values))
    if _NUMBERS.isdisjoint(types):
        return (*params, *values, types)
    return tuple([(name, exactly(value)) for name, value in params.items()])


def pattern(
    members: Iterable[tuple[int, Eqn]], outs: Sequence[Var]
) -> tuple[Hashable, tuple[Var, ...]]:
    """The key that groups of equations share if they are alike; equations come with their kinds.

    With it come the variables that the group reads, in order of appearance.
    """
    numbers: dict[Any, int] = {}
    reads: list[Var] = []
    row: list[Any] = []
    for kind, eqn in members:
        row.append(kind)
        for atom in eqn.invars:
            if type(atom) is Literal:
                row.append(literal_key(atom))
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
    """The key that two groups share if and only if they are alike; None if that is not known."""
    jaxpr = group.jaxpr
    if jaxpr.constvars:
        return None
    numbers: dict[Var, int] = {}

    def atom(x: Atom) -> Hashable:
        if isinstance(x, Literal):
            return literal_key(x)
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


def literal_key(atom: Literal) -> Hashable:
    """Equal for literals that are the same, to the bit."""
    return np.asarray(atom.val).tobytes(), atom.aval


def exactly(value: Any) -> Hashable:
    """A parameter's value as a key, which tells 1 from True and 0.0 from -0.0."""
    return type(value), repr(value) if isinstance(value, float | complex) else value
