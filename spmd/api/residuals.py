"""The values that a backward pass keeps of the forward pass: `print_saved_residuals`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base import dtypes
from spmd.base.tree import tree_flatten, tree_unflatten
from spmd.base.util import function_name
from spmd.core.argument_names import check_arrays, debug_info, leaf_names
from spmd.core.aval import ShapedArray, typeof
from spmd.core.ir import Eqn, Jaxpr, Literal
from spmd.core.linearize import linearize_jaxpr
from spmd.core.remat import checkpoint_p
from spmd.core.stage import trace_to_jaxpr


def saved_residuals(
    f: Callable[..., Any], *args: Any, **kwargs: Any
) -> list[tuple[ShapedArray, str]]:
    """The values that `vjp(f, ...)` keeps for its backward pass: types and origins."""
    flat, tree = tree_flatten((args, kwargs))
    names = leaf_names(f, args, kwargs)
    check_arrays(f"saved_residuals({function_name(f)})", names, flat)

    def run(*leaves: Any) -> list[Any]:
        given, named = tree_unflatten(tree, leaves)
        return tree_flatten(f(*given, **named))[0]

    avals = [typeof(x) for x in flat]
    closed = trace_to_jaxpr(run, avals, debug_info(f, args, kwargs))
    cut = linearize_jaxpr(closed, [dtypes.is_inexact(a.dtype) for a in avals])
    jaxpr = cut.primal.jaxpr
    kept = jaxpr.outvars[len(jaxpr.outvars) - cut.num_residuals :]
    origins = _origins(jaxpr, names)
    found = {v: (v.aval, origins[v]) for v in kept if not isinstance(v, Literal)}
    literals = [(v.aval, "from a literal") for v in kept if isinstance(v, Literal)]
    return [*literals, *found.values()]


def _origins(jaxpr: Jaxpr, names: Sequence[str]) -> dict[Any, str]:
    """The origin of each variable."""
    found = dict.fromkeys(jaxpr.constvars, "from a constant")
    for v, name in zip(jaxpr.invars, names, strict=True):
        found[v] = f"from the argument {name}"
    for eqn in jaxpr.eqns:
        told = _made_inside(eqn) if eqn.prim is checkpoint_p else {}
        for k, v in enumerate(eqn.outvars):
            found[v] = told.get(k) or f"{_made_by(eqn)} from {eqn.source}"
    return found


def _made_inside(eqn: Eqn) -> dict[int, str]:
    """The operations in a checkpointed function that made its outputs."""
    body: Jaxpr = eqn.params["jaxpr"].jaxpr
    origins = _origins(body, [""] * len(body.invars))
    made = {v for inner in body.eqns for v in inner.outvars}
    return {k: origins[v] for k, v in enumerate(body.outvars) if v in made}


def _made_by(eqn: Eqn) -> str:
    if eqn.prim.name == "name":
        return f"named {eqn.params['name']!r}"
    if eqn.prim.name == "jit":
        return f"output of jitted function {eqn.params['name']!r}"
    return f"output of {eqn.prim.name}"


def print_saved_residuals(f: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Print what the backward pass of `f` keeps of its forward pass, a line for each array.

    It is what `grad` of a jitted `f` would keep; `checkpoint` and its policies change it.

    >>> print_saved_residuals(lambda x: snp.sin(snp.sin(x)), snp.ones(3))
    f32[3] output of cos from ...
    f32[3] output of cos from ...
    """
    for aval, origin in saved_residuals(f, *args, **kwargs):
        print(f"{aval.short()} {origin}")
