"""Taylor mode through control flow: loops and branches of whole series.

A series through a loop is a loop that carries the series. Inputs and outputs are interleaved, each
value followed by its terms, so that constants, carries and slices stay in their groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base.util import split_list
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import ClosedJaxpr
from spmd.core.jet import Terms, interleave, is_constant, jet_jaxpr, rules, separate
from spmd.core.primitive import Primitive
from spmd.core.rewrite import close, eval_closed
from spmd.lax.control import join_avals, retype_outputs, widen
from spmd.lax.control_cond import cond_p
from spmd.lax.control_scan import scan_p
from spmd.lax.control_while import while_p


def _moving(series: Sequence[Terms]) -> list[bool]:
    return [not is_constant(terms) for terms in series]


def _vma(values: Sequence[Any]) -> frozenset[Any]:
    """All the axes over which any of the values varies: a carried term may come to vary over it."""
    return frozenset().union(*(typeof(x).vma for x in values))


def _carried(
    jaxpr: ClosedJaxpr, fixed: list[bool], carry: list[bool], rest: list[bool], ys: int, how: Any
) -> tuple[ClosedJaxpr, list[bool], list[bool]]:
    """The body over series, which values of the carry have terms, and which other results."""
    while True:
        force = [*carry, *[False] * ys]
        body, out = jet_jaxpr(jaxpr, [*fixed, *carry, *rest], how[0], force, how[1])
        if out[: len(carry)] == carry:
            return body, carry, out[len(carry) :]
        carry = [c or o for c, o in zip(carry, out, strict=False)]


def _fit(values: Sequence[Any], avals: Sequence[ShapedArray]) -> list[Any]:
    return [widen(x, a) for x, a in zip(values, avals, strict=True)]


def _scan(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Any]:
    jaxpr, order = params["jaxpr"], len(series[0])
    sizes = [params["num_consts"], params["num_carry"]]
    how = (order, _vma(primals))
    consts, init, xs = split_list(_moving(series), sizes)
    ys = len(jaxpr.out_avals) - len(init)
    body, carry, y_moves = _carried(jaxpr, consts, init, xs, ys, how)
    moves = (consts, carry, xs)
    parts = zip(split_list(primals, sizes), split_list(series, sizes), moves, strict=True)
    groups = [interleave(*part) for part in parts]
    num_consts, num_carry = len(groups[0]), len(groups[1])
    avals = body.in_avals
    carry_avals = avals[num_consts : num_consts + num_carry]
    body = retype_outputs(body, [*carry_avals, *body.out_avals[num_carry:]])
    groups[0] = _fit(groups[0], avals[:num_consts])
    groups[1] = _fit(groups[1], carry_avals)
    slices = avals[num_consts + num_carry :]
    rows = [a.update(shape=typeof(x).shape) for x, a in zip(groups[2], slices, strict=True)]
    groups[2] = _fit(groups[2], rows)
    changes = {"jaxpr": body, "num_consts": num_consts, "num_carry": num_carry}
    outs = scan_p.bind(*(x for group in groups for x in group), **(params | changes))
    return separate(outs, [*carry, *y_moves], order)


def _while(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Any]:
    order = len(series[0])
    sizes = [params["cond_nconsts"], params["body_nconsts"]]
    _, consts, init = split_list(_moving(series), sizes)
    how = (order, _vma(primals))
    body, carry, _ = _carried(params["body_jaxpr"], consts, init, [], 0, how)
    tests, *groups = split_list(primals, sizes)
    _, *terms = split_list(series, sizes)
    b = interleave(groups[0], terms[0], consts)
    c = interleave(groups[1], terms[1], carry)
    avals = body.in_avals
    body = retype_outputs(body, avals[len(b) :])
    outs = while_p.bind(
        *tests,
        *_fit(b, avals[: len(b)]),
        *_fit(c, avals[len(b) :]),
        cond_jaxpr=_of_primals(params["cond_jaxpr"], len(tests), carry, order, avals[len(b) :]),
        cond_nconsts=len(tests),
        body_jaxpr=body,
        body_nconsts=len(b),
    )
    return separate(outs, carry, order)


def _of_primals(
    test: ClosedJaxpr, num_consts: int, carry: list[bool], order: int, avals: list[ShapedArray]
) -> ClosedJaxpr:
    """A loop's condition, which looks at the values and not at their terms."""

    def f(*args: Any) -> list[Any]:
        primals, _ = separate(args[num_consts:], carry, order)
        return eval_closed(test, *args[:num_consts], *primals)

    return close(f, [*test.in_avals[:num_consts], *avals], test.jaxpr.name)


def _cond(prim: Primitive, primals: Any, series: Any, params: Any) -> tuple[Any, Any]:
    """Every branch has terms for an output if one has."""
    order, index = len(series[0]), primals[0]
    moves = _moving(series[1:])
    branches = params["branches"]
    found = [jet_jaxpr(b, moves, order)[1] for b in branches]
    force = [any(column) for column in zip(*found, strict=True)]
    jets = [jet_jaxpr(b, moves, order, force)[0] for b in branches]
    vma = typeof(index).vma
    outs = [x.update(vma=x.vma | vma) for x in join_avals([j.out_avals for j in jets])]
    given = interleave(primals[1:], series[1:], moves)
    given = _fit(given, jets[0].in_avals)
    retyped = tuple(retype_outputs(j, outs) for j in jets)
    return separate(cond_p.bind(index, *given, branches=retyped), force, order)


rules[scan_p] = _scan
rules[while_p] = _while
rules[cond_p] = _cond
