"""Loops of which only a part is linear: find the known part of the carry, and cut the body there.

A linear loop may carry a counter, or another value that depends on no linear input. To run
it backwards, that part runs forwards first and leaves residuals for the rest, one an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base.util import partition_list, split_list
from spmd.core.ir import ClosedJaxpr, Eqn
from spmd.core.rewrite import dce, dependents, inline_calls, known_part, opens, plain_call


def known_carry(
    body: ClosedJaxpr, c_lin: Sequence[bool], i_lin: Sequence[bool], x_lin: Sequence[bool]
) -> tuple[list[bool], set[Any]]:
    """Flags of the carry's parts that never depend on a linear input; the variables that do."""
    jaxpr = body.jaxpr
    known = [not lin for lin in i_lin]
    while True:
        linear = [*c_lin, *(not k for k in known), *x_lin]
        sources = [v for v, lin in zip(jaxpr.invars, linear, strict=True) if lin]
        found = dependents(jaxpr, sources)
        carry = jaxpr.outvars[: len(known)]
        still = [k and v not in found for k, v in zip(known, carry, strict=True)]
        if still == known:
            return known, found
        known = still


def known_loop(
    body: ClosedJaxpr, c: Sequence[bool], i: Sequence[bool], x: Sequence[bool]
) -> tuple[ClosedJaxpr, list[bool], list[bool]]:
    """The part of a loop's body that depends on no const, carry or x marked unknown.

    Returns it, which of the body's inputs it has, and which of the body's outputs.
    """
    while True:
        part, found = known_part(body, [*c, *i, *x])
        wider = [u or not k for u, k in zip(i, found, strict=False)]
        if wider == list(i):
            return part, [not u for u in (*c, *i, *x)], found
        i = wider


def open_calls(
    body: ClosedJaxpr, c_lin: Sequence[bool], i_lin: Sequence[bool], x_lin: Sequence[bool]
) -> tuple[ClosedJaxpr, list[bool]]:
    """The body without the calls that may hide a known carry, and which parts of it are known.

    A function with custom rules is opened only where something linear reaches it: transposing would
    open it there as well. The others are differentiated again with their own rules.
    """
    body = inline_calls(body, plain_call)
    while True:
        known, moved = known_carry(body, c_lin, i_lin, x_lin)

        def reached(eqn: Eqn, moved: set[Any] = moved) -> bool:
            return opens(eqn.prim) and any(v in moved for v in eqn.invars)

        opened = inline_calls(body, reached)
        if opened is body:
            return body, known
        body = inline_calls(opened, plain_call)


def split_known(
    body: ClosedJaxpr, known: Sequence[bool], linear: Sequence[bool], num_consts: int
) -> tuple[ClosedJaxpr, ClosedJaxpr, int]:
    """Cut a loop's body at its known carry: the part to run ahead, the rest, how many residuals.

    `linear` marks the linear inputs. The part ahead has the body's inputs without those, and
    returns (known carry, residuals). The rest maps (consts, other carry, residuals and xs) to
    (other carry, ys).
    """
    jaxpr = body.jaxpr
    consts, carry, xs = split_list(jaxpr.invars, [num_consts, len(known)])
    moving, fixed = partition_list(known, carry)
    outs, ys = split_list(jaxpr.outvars, [len(known)])
    moving_outs, fixed_outs = partition_list(known, outs)
    given, moved = partition_list(linear, jaxpr.invars)
    # Values that follow from the known carry alone are handed on, not computed again in the rest.
    ahead = dependents(jaxpr, fixed) - dependents(jaxpr, moved)
    rest_eqns = [e for e in jaxpr.eqns if not ahead.issuperset(e.outvars)]
    reads = [v for e in rest_eqns for v in e.invars] + [*moving_outs, *ys]
    residuals = list(dict.fromkeys(v for v in reads if v in ahead))
    first = jaxpr.replace(invars=given, outvars=[*fixed_outs, *residuals])
    first, _ = dce(first, [True] * len(first.outvars))
    rest = jaxpr.replace(
        invars=[*consts, *moving, *residuals, *xs], eqns=rest_eqns, outvars=[*moving_outs, *ys]
    )
    return ClosedJaxpr(first, body.consts), ClosedJaxpr(rest, body.consts), len(residuals)
