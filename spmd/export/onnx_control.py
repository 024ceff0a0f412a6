"""Branches and loops: `cond` is ONNX's `If`, `while` and `scan` are its `Loop`.

A branch or body is a graph that sees the values around it, so constants of a loop are not passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.util import split_list
from spmd.core.ir import Atom, Eqn
from spmd.export.onnx_graph import Graph, rule, write_program
from spmd.export.onnx_rules import reversed_along

# The dtypes of ONNX's arguments to every loop body: the step's number, and whether to go on.
_STEP, _GOES_ON = "int64", "bool"


def _names(atoms: Sequence[Atom]) -> list[str]:
    return [dtypes.long_name(a.aval.dtype) for a in atoms]


def _body(
    g: Graph, outputs: list[str], results: list[str], inputs: Sequence[str], types: Sequence[str]
) -> dict[str, Any]:
    """A finished inner graph with the dtypes of its inputs and results, which are new values."""
    own = [g.op("Identity", x) for x in outputs]
    return {
        "graph": {
            "nodes": g.nodes,
            "inputs": list(inputs),
            "types": list(types),
            "outputs": own,
            "results": results,
        }
    }


@rule("cond")
def _cond(g: Graph, eqn: Eqn, xs: list[str]) -> list[str]:
    index, *operands = xs
    results = _names(eqn.outvars)

    def one_of(g: Graph, at: int) -> list[str]:
        """The branch of number `index`, if that is `at` or more; the last for larger numbers."""
        branches = eqn.params["branches"]
        if at == len(branches) - 1:
            return write_program(g, branches[at], operands)
        here = g.op("LessOrEqual", index, g.scalar(at, np.int32))
        this, later = g.inner(), g.inner()
        then = _body(this, write_program(this, branches[at], operands), results, [], [])
        other = _body(later, one_of(later, at + 1), results, [], [])
        return g.several("If", [here], len(results), then_branch=then, else_branch=other)

    return one_of(g, 0)


@rule("while")
def _while(g: Graph, eqn: Eqn, xs: list[str]) -> list[str]:
    p = eqn.params
    for_cond, for_body, carry = split_list(xs, [p["cond_nconsts"], p["body_nconsts"]])
    (first,) = write_program(g, p["cond_jaxpr"], [*for_cond, *carry])
    inner = g.inner()
    inputs = [inner.name() for _ in range(2 + len(carry))]
    new = write_program(inner, p["body_jaxpr"], [*for_body, *inputs[2:]])
    (again,) = write_program(inner, p["cond_jaxpr"], [*for_cond, *new])
    results = [_GOES_ON, *_names(eqn.outvars)]
    body = _body(inner, [again, *new], results, inputs, [_STEP, *results])
    return g.several("Loop", ["", first, *carry], len(carry), body=body)


@rule("scan")
def _scan(g: Graph, eqn: Eqn, xs: list[str]) -> list[str]:
    p = eqn.params
    consts, carry, rows = split_list(xs, [p["num_consts"], p["num_carry"]])
    inner = g.inner()
    inputs = [inner.name() for _ in range(2 + len(carry))]
    step = inputs[0]
    if p["reverse"]:
        step = inner.op("Sub", inner.size(p["length"] - 1), step)
    slices = [inner.op("Gather", x, step, axis=0) for x in rows]
    outs = write_program(inner, p["jaxpr"], [*consts, *inputs[2:], *slices])
    results = [_GOES_ON, *_names(eqn.outvars)]
    types = [_STEP, *results[: 1 + len(carry)]]
    body = _body(inner, [inner.scalar(True, np.bool_), *outs], results, inputs, types)
    count = g.size(p["length"])
    found = g.several("Loop", [count, "", *carry], len(eqn.outvars), body=body)
    carried, stacked = split_list(found, [len(carry)])
    if p["reverse"]:
        stacked = [reversed_along(g, y, (0,)) for y in stacked]
    return [*carried, *stacked]
