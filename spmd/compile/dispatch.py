"""Eager evaluation: what an operation outside any transformation does.

`evaluate` is the hook of `core/trace.py`. Calls of jaxprs run compiled; everything else runs the
primitive's `impl` over NumPy, or, where the operands are large enough for it to pay, a compiled
program of that one equation.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.compile.executable import Executable
from spmd.compile.multidevice import mesh_executable
from spmd.compile.pipeline import compile_jaxpr
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import ClosedJaxpr, Eqn, Jaxpr, Var
from spmd.core.primitive import Primitive
from spmd.core.trace import set_eager, to_numpy
from spmd.sharding.array import Array, from_numpy
from spmd.sharding.shard_map import shard_map_p

# From this many elements (of the largest operand) a compiled kernel beats NumPy, counting what the
# first use costs to compile; measured on elementwise chains and sums.
COMPILE_FROM_ELEMENTS = 1 << 16

# Where a slice starts is a parameter: `x[k : k + n]` in a loop would compile a program for every k,
# for what NumPy does by copying a view.
NEVER_COMPILED = frozenset({"slice"})

_calls: weakref.WeakKeyDictionary[ClosedJaxpr, Executable] = weakref.WeakKeyDictionary()
_single: dict[Any, Executable] = {}


def evaluate(prim: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Apply a primitive to concrete operands."""
    if prim is shard_map_p:
        return mesh_executable(**params)(operands)
    if prim.inline is not None:
        return run_closed(prim.inline(params), operands)
    avals = [typeof(x) for x in operands]
    large = any(a.size >= COMPILE_FROM_ELEMENTS for a in avals)
    if large and prim.name not in NEVER_COMPILED and not prim.effects(params):
        outs = _one_equation(prim, avals, params)(operands)
    else:
        outs = _by_impl(prim, operands, avals, params)
    return outs if prim.multiple else outs[0]


def run_closed(closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Run a closed jaxpr compiled, remembering the executable with the jaxpr."""
    executable = _calls.get(closed)
    if executable is None:
        executable = _calls[closed] = compile_jaxpr(closed)
    return executable(operands)


def _by_impl(
    prim: Primitive, operands: Sequence[Any], avals: list[ShapedArray], params: dict[str, Any]
) -> list[Array]:
    expected = prim.rule("abstract")(*avals, **params)
    with np.errstate(all="ignore"):
        found = prim.rule("impl")(np, *[to_numpy(x) for x in operands], **params)
    if not prim.multiple:
        expected, found = [expected], [found]
    return [from_numpy(x, a) for x, a in zip(found, expected, strict=True)]


def _one_equation(prim: Primitive, avals: list[ShapedArray], params: dict[str, Any]) -> Executable:
    """The executable of a program that is one equation."""
    key = (prim, tuple(avals), tuple(sorted(params.items())))
    found = _single.get(key)
    if found is None:
        invars = [Var(a) for a in avals]
        expected = prim.rule("abstract")(*avals, **params)
        outvars = [Var(a) for a in (expected if prim.multiple else [expected])]
        eqn = Eqn(prim, tuple(invars), tuple(outvars), params)
        closed = ClosedJaxpr(Jaxpr((), invars, [eqn], outvars, prim.name))
        found = _single[key] = compile_jaxpr(closed)
    return found


set_eager(evaluate)
