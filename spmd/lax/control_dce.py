"""Dead code elimination in loops and branches: the `dce` rules of `scan`, `while` and `cond`.

A carried value is needed if the loop's result for it is, or if the next iteration computes
something needed from it; a scan stops counting up a number that is never read. The
compiler drops dead values; reverse mode drops values that no cotangent reaches, where a derivative
that is NaN would make NaN of a cotangent of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from spmd.core.call import derived
from spmd.core.ir import ClosedJaxpr
from spmd.core.rewrite import dce, prune_consts

# Flags of the operands and of the results that stay, and the parameters that go with them.
Kept = tuple[list[bool], list[bool], dict[str, Any]]


def _cut(closed: ClosedJaxpr, outs: Sequence[bool], ins: Sequence[bool]) -> ClosedJaxpr:
    """A jaxpr with some outputs and inputs only."""

    def make() -> ClosedJaxpr:
        smaller, _ = dce(closed.jaxpr, outs)
        invars = tuple(compress(smaller.invars, ins))
        return prune_consts(ClosedJaxpr(smaller.replace(invars=invars), closed.consts))

    return derived(closed, ("dce", tuple(outs), tuple(ins)), make)


def _grow(
    carry: list[bool], reads: Callable[[list[bool]], Sequence[bool]]
) -> tuple[list[bool], list[bool]]:
    """The carried values that are needed, and which inputs the body then reads.

    `reads(carry)` says, for all inputs of the body, which it reads if these are needed; the last
    part of its answer are the carried values.
    """
    while True:
        inputs = list(reads(carry))
        start = len(inputs) - len(carry)
        grown = [a or b for a, b in zip(carry, inputs[start:], strict=True)]
        if grown == carry:
            return carry, inputs
        carry = grown


def scan_dce(used: Sequence[bool], p: dict[str, Any]) -> Kept:
    """A scan with some of its carry and its ys."""
    body: ClosedJaxpr = p["jaxpr"]
    consts, count = p["num_consts"], p["num_carry"]
    stacked = used[count:]

    def reads(carry: list[bool]) -> list[bool]:
        return dce(body.jaxpr, [*carry, *stacked])[1][: consts + count]

    carry, _ = _grow(list(used[:count]), reads)
    inputs = dce(body.jaxpr, [*carry, *stacked])[1]
    kept = [*inputs[:consts], *carry, *inputs[consts + count :]]
    outs = [*carry, *stacked]
    if all(kept) and all(outs):
        return kept, outs, p
    counts = {"num_consts": sum(kept[:consts]), "num_carry": sum(carry)}
    return kept, outs, p | {"jaxpr": _cut(body, outs, kept)} | counts


def while_dce(used: Sequence[bool], p: dict[str, Any]) -> Kept:
    """A while loop with some of its carry: operands of the test stay."""
    test, body = p["cond_jaxpr"], p["body_jaxpr"]
    nt, nb = p["cond_nconsts"], p["body_nconsts"]
    tested = dce(test.jaxpr, [True])[1]
    start = [a or b for a, b in zip(used, tested[nt:], strict=True)]
    carry, inputs = _grow(start, lambda carry: dce(body.jaxpr, carry)[1])
    test_consts, body_consts = tested[:nt], inputs[:nb]
    kept = [*test_consts, *body_consts, *carry]
    if all(kept):
        return kept, carry, p
    changes = {
        "cond_jaxpr": _cut(test, [True], [*test_consts, *carry]),
        "body_jaxpr": _cut(body, carry, [*body_consts, *carry]),
        "cond_nconsts": sum(test_consts),
        "body_nconsts": sum(body_consts),
    }
    return kept, carry, p | changes


def cond_dce(used: Sequence[bool], p: dict[str, Any]) -> Kept:
    """A cond whose branches give some of their results."""
    branches: tuple[ClosedJaxpr, ...] = p["branches"]
    reads = [dce(b.jaxpr, used)[1] for b in branches]
    kept = [any(column) for column in zip(*reads, strict=True)]
    if not (all(kept) and all(used)):
        p = p | {"branches": tuple(_cut(b, used, kept) for b in branches)}
    return [True, *kept], list(used), p
