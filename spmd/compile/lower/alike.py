"""Which groups of equations are alike: the same operations on the same types, other variables.

A deep network repeats its layers, so most of a program's groups are a rare few. What is derived
from a group alone (its kernel) is derived once for all that are alike.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from spmd.core.ir import Atom, ClosedJaxpr, Literal, Var


def form(group: ClosedJaxpr) -> Hashable | None:
    """What two groups have in common if and only if they are alike; None if that is not known."""
    jaxpr = group.jaxpr
    if jaxpr.constvars:
        return None
    numbers: dict[Var, int] = {}

    def atom(x: Atom) -> Hashable:
        if isinstance(x, Literal):
            return np.asarray(x.val).tobytes(), x.aval
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
                    tuple([(name, _exactly(value)) for name, value in eqn.params.items()]),
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


def _exactly(value: Any) -> Hashable:
    """A parameter's value such that only the very same is equal: 1 is not True, nor 0.0 -0.0."""
    return type(value), repr(value) if isinstance(value, float | complex) else value
