"""Prune: remove equations that nothing needs, also the unneeded results of loops and branches.

A carried value is needed if the loop's result for it is, or if the next round computes something
needed from it; a scan that only counts up a number that nobody reads stops counting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, TypeAlias

from spmd.base.util import split_list
from spmd.core.ir import ClosedJaxpr, Eqn
from spmd.core.rewrite import dce, prune_consts

Rule: TypeAlias = Callable[[Eqn, list[bool]], Eqn]


def prune(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Drop equations, results and constants that neither outputs nor effects need."""
    jaxpr = closed.jaxpr
    needed: set[Any] = set(jaxpr.outvars)
    kept: list[Eqn] = []
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars) and not eqn.effects:
            continue
        if eqn.prim.name in RULES:
            eqn = RULES[eqn.prim.name](eqn, [v in needed for v in eqn.outvars])
        kept.append(eqn)
        needed.update(eqn.invars)  # literals do no harm
    return prune_consts(ClosedJaxpr(jaxpr.replace(eqns=kept[::-1]), closed.consts))


def _cut(closed: ClosedJaxpr, outs: Sequence[bool], ins: Sequence[bool]) -> ClosedJaxpr:
    """A jaxpr with some outputs and inputs only."""
    smaller, _ = dce(closed.jaxpr, outs)
    invars = tuple(compress(smaller.invars, ins))
    return prune_consts(ClosedJaxpr(smaller.replace(invars=invars), closed.consts))


def _settle(
    carry: list[bool], reads: Callable[[list[bool]], Sequence[bool]]
) -> tuple[list[bool], list[bool]]:
    """The carried values that are needed, and which inputs the body then reads.

    `reads(carry)` says, for all inputs of the body, which it reads if these are needed; the middle
    part of its answer are the carried values.
    """
    while True:
        inputs = list(reads(carry))
        start = len(inputs) - len(carry)
        grown = [a or b for a, b in zip(carry, inputs[start:], strict=True)]
        if grown == carry:
            return carry, inputs
        carry = grown


def _scan(eqn: Eqn, used: list[bool]) -> Eqn:
    p = eqn.params
    body: ClosedJaxpr = p["jaxpr"]
    consts, count = p["num_consts"], p["num_carry"]
    stacked = used[count:]

    def reads(carry: list[bool]) -> list[bool]:
        return dce(body.jaxpr, [*carry, *stacked])[1][: consts + count]

    carry, _ = _settle(used[:count], reads)
    inputs = dce(body.jaxpr, [*carry, *stacked])[1]
    kept = [*inputs[:consts], *carry, *inputs[consts + count :]]
    outs = [*carry, *stacked]
    if all(kept) and all(outs):
        return eqn
    changes = {
        "jaxpr": _cut(body, outs, kept),
        "num_consts": sum(kept[:consts]),
        "num_carry": sum(carry),
    }
    return eqn.replace(
        invars=tuple(compress(eqn.invars, kept)),
        outvars=tuple(compress(eqn.outvars, outs)),
        params=p | changes,
    )


def _while(eqn: Eqn, used: list[bool]) -> Eqn:
    p = eqn.params
    test, body = p["cond_jaxpr"], p["body_jaxpr"]
    nt, nb = p["cond_nconsts"], p["body_nconsts"]
    tested = dce(test.jaxpr, [True])[1]
    start = [a or b for a, b in zip(used, tested[nt:], strict=True)]
    carry, inputs = _settle(start, lambda carry: dce(body.jaxpr, carry)[1])
    test_consts, body_consts = tested[:nt], inputs[:nb]
    if all(carry) and all(test_consts) and all(body_consts):
        return eqn
    changes = {
        "cond_jaxpr": _cut(test, [True], [*test_consts, *carry]),
        "body_jaxpr": _cut(body, carry, [*body_consts, *carry]),
        "cond_nconsts": sum(test_consts),
        "body_nconsts": sum(body_consts),
    }
    parts = split_list(eqn.invars, [nt, nb])
    flags = (test_consts, body_consts, carry)
    kept = [x for f, part in zip(flags, parts, strict=True) for x in compress(part, f)]
    return eqn.replace(
        invars=tuple(kept), outvars=tuple(compress(eqn.outvars, carry)), params=p | changes
    )


def _cond(eqn: Eqn, used: list[bool]) -> Eqn:
    branches: tuple[ClosedJaxpr, ...] = eqn.params["branches"]
    reads = [dce(b.jaxpr, used)[1] for b in branches]
    kept = [any(column) for column in zip(*reads, strict=True)]
    if all(kept) and all(used):
        return eqn
    return eqn.replace(
        invars=(eqn.invars[0], *compress(eqn.invars[1:], kept)),
        outvars=tuple(compress(eqn.outvars, used)),
        params=eqn.params | {"branches": tuple(_cut(b, used, kept) for b in branches)},
    )


RULES: dict[str, Rule] = {"scan": _scan, "while": _while, "cond": _cond}
