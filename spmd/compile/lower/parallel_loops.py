"""Loops without a carry: their iterations do not depend on each other and may run at the same time.

An iteration writes its rows of the stacked results and nothing else that another one sees. Its
intermediate values lie in temporaries that the loop owns: each thread gets its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.compile.lower.steps import (
    TEMP,
    Exchange,
    Host,
    Loop,
    Parallel,
    RankExchange,
    Step,
    accesses_inside,
    walk,
)

# A loop of fewer iterations has nothing to share.
_LEAST_TRIPS = 2


def can_be_parallel(steps: Sequence[Step]) -> bool:
    """Whether the iterations of a body without a carry may run on several threads."""
    return not any(isinstance(step, Host | Exchange | RankExchange) for step in walk(steps))


def parallel(length: int, body: tuple[Step, ...], before: int, number: int) -> Step:
    """The loop `number` over a body whose temporaries have the number `before` and higher.

    Loops that are nested with nothing between become one loop over several dims.
    """
    if length < _LEAST_TRIPS:
        return Loop(length, body)
    if len(body) == 1 and isinstance(body[0], Parallel):
        return Parallel((length, *body[0].trips), body[0].body, body[0].number)
    _own(body, before, number)
    return Parallel((length,), body, number)


def _own(steps: Sequence[Step], before: int, number: int) -> None:
    """Give the loop the temporaries of its body that no loop inside of it owns."""
    for ref, _ in accesses_inside(steps):
        buffer = ref.buffer
        if buffer.kind == TEMP and buffer.number >= before and buffer.owner is None:
            buffer.owner = number
