"""`checkpoint`: recompute in the backward pass instead of keeping residuals.

The linear part of a checkpointed call holds its *inputs* (and what the policy saves) as residuals,
and the recomputation itself as ordinary non-linear equations, which `transpose` runs first. An
`optimization_barrier` keeps the compiler from merging the recomputation with the forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from spmd.core.aval import ShapedArray, typeof
from spmd.core.call import derived, impl_jaxpr, jaxpr_axes, nonzero, spread
from spmd.core.ir import ClosedJaxpr, Eqn, Var
from spmd.core.jvp import jvp_jaxpr
from spmd.core.linearize import Linearized, LinearizeTrace, linearize_jaxpr
from spmd.core.primitive import Linear, Primitive, Refused, Zero, linear
from spmd.core.rewrite import close, eval_closed, hoist_tracers
from spmd.core.stage import Debug, trace_to_jaxpr
from spmd.core.transpose import transpose_jaxpr
from spmd.core.tree import tree_flatten, tree_unflatten
from spmd.core.util import function_name, split_list
from spmd.core.vmap import batch_jaxpr, fronts

Policy = Callable[..., bool]

# ---- policies ----------------------------------------------------------------------------------


class checkpoint_policies:
    """Which intermediate values `checkpoint` keeps: `policy(prim, *avals, **params) -> bool`."""

    @staticmethod
    def everything_saveable(prim: Primitive, *_: Any, **__: Any) -> bool:
        return True

    @staticmethod
    def nothing_saveable(prim: Primitive, *_: Any, **__: Any) -> bool:
        return False

    @staticmethod
    def dots_saveable(prim: Primitive, *_: Any, **__: Any) -> bool:
        return prim.name == "dot_general"

    checkpoint_dots = dots_saveable

    @staticmethod
    def dots_with_no_batch_dims_saveable(prim: Primitive, *_: Any, **params: Any) -> bool:
        return prim.name == "dot_general" and not params["dimension_numbers"][1][0]

    checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable

    @staticmethod
    def save_only_these_names(*names: str) -> Policy:
        wanted = frozenset(names)

        def policy(prim: Primitive, *_: Any, **params: Any) -> bool:
            return prim.name == "name" and params["name"] in wanted

        return policy

    @staticmethod
    def save_any_names_but_these(*names: str) -> Policy:
        unwanted = frozenset(names)

        def policy(prim: Primitive, *_: Any, **params: Any) -> bool:
            return prim.name == "name" and params["name"] not in unwanted

        return policy

    @staticmethod
    def save_from_both_policies(first: Policy, second: Policy) -> Policy:
        return lambda prim, *avals, **params: (
            first(prim, *avals, **params) or second(prim, *avals, **params)
        )


# ---- the public function -----------------------------------------------------------------------


def checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    prevent_cse: bool = True,
    policy: Policy | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Make a function recompute its intermediate values when it is differentiated in reverse.

    >>> f = checkpoint(lambda x: x * x)
    >>> f(3.0)
    Array(9., dtype=float32, weak_type=True)
    """
    if fun is None:
        return functools.partial(
            checkpoint, prevent_cse=prevent_cse, policy=policy, static_argnums=static_argnums
        )
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    name = function_name(fun)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        fixed = {i % len(args) for i in static}
        dynamic = [x for i, x in enumerate(args) if i not in fixed]
        flat, in_tree = tree_flatten((dynamic, kwargs))
        trees = []

        def run(*xs: Any) -> list[Any]:
            given, keywords = tree_unflatten(in_tree, xs)
            rest = iter(given)
            full = [x if i in fixed else next(rest) for i, x in enumerate(args)]
            leaves, tree = tree_flatten(fun(*full, **keywords))
            trees.append(tree)
            return leaves

        closed = trace_to_jaxpr(run, [typeof(x) for x in flat], Debug(name))
        closed, consts = hoist_tracers(closed)
        outs = checkpoint_p.bind(*consts, *flat, jaxpr=closed, policy=policy, name=name)
        return tree_unflatten(trees[0], outs)

    return wrapped


# ---- rules -------------------------------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, *, jaxpr: ClosedJaxpr, policy: Any, name: str) -> Any:
    flags = nonzero(tangents)
    jvp, out_flags = derived(jaxpr, ("jvp", tuple(flags)), lambda: jvp_jaxpr(jaxpr, flags))
    given = [t for t in tangents if not isinstance(t, Zero)]
    outs = checkpoint_p.bind(*primals, *given, jaxpr=jvp, policy=policy, name=f"jvp_{name}")
    outs, out_tangents = split_list(outs, [len(jaxpr.out_avals)])
    return outs, spread(out_flags, out_tangents, [a.tangent() for a in jaxpr.out_avals])


def _linearize(
    trace: LinearizeTrace,
    primals: Any,
    tangents: Any,
    *,
    jaxpr: ClosedJaxpr,
    policy: Any,
    name: str,
) -> Any:
    cut = linearize_jaxpr(jaxpr, nonzero(tangents))
    saved = _saved_vars(cut, policy)
    n = len(jaxpr.out_avals)
    forward = cut.primal.jaxpr.replace(outvars=[*cut.primal.jaxpr.outvars[:n], *saved])
    closed = ClosedJaxpr(forward, cut.primal.consts)
    outs = checkpoint_p.bind(*primals, jaxpr=closed, policy=policy, name=name)
    outs, kept = split_list(outs, [n])
    given = [t for t in tangents if not isinstance(t, Zero)]
    backward = _recompute(cut, saved, [typeof(t) for t in given], f"remat_{name}")
    params = {"jaxpr": backward, "policy": policy, "name": f"linear_{name}"}
    out_tangents = trace.bind_linear(checkpoint_p, [*primals, *kept, *given], params)
    return outs, spread(cut.out_nonzero, out_tangents, [a.tangent() for a in jaxpr.out_avals])


def _saved_vars(cut: Linearized, policy: Policy | None) -> list[Var]:
    """The intermediate variables of the primal jaxpr that the policy keeps."""
    if policy is None:
        return []
    saved: list[Var] = []
    for eqn in cut.primal.jaxpr.eqns:
        if policy(eqn.prim, *[v.aval for v in eqn.invars], **eqn.params):
            saved.extend(eqn.outvars)
    return saved


def _recompute(
    cut: Linearized, saved: list[Var], tangent_avals: list[ShapedArray], name: str
) -> ClosedJaxpr:
    """The jaxpr of (primals, saved values, tangents) -> out tangents that recomputes residuals."""
    primal = cut.primal.jaxpr
    num_in = len(primal.invars)
    residuals = primal.outvars[len(primal.outvars) - cut.num_residuals :]
    given = set(saved)
    eqns: list[Eqn] = [e for e in primal.eqns if not given.intersection(e.outvars)]
    again = primal.replace(invars=(*primal.invars, *saved), eqns=eqns, outvars=residuals)
    closed = ClosedJaxpr(again, cut.primal.consts)

    def f(*args: Any) -> list[Any]:
        known = args[: num_in + len(saved)]
        values = optimization_barrier(*known) if known else []
        return eval_closed(cut.linear, *eval_closed(closed, *values), *args[len(known) :])

    avals = [*primal.in_avals, *(v.aval for v in saved), *tangent_avals]
    return close(f, avals, name)


def _transpose(cts: Any, *operands: Any, jaxpr: ClosedJaxpr, policy: Any, name: str) -> Any:
    flags, lin = nonzero(cts), [isinstance(x, Linear) for x in operands]
    make = lambda: transpose_jaxpr(jaxpr, lin, flags)  # noqa: E731
    backward, in_flags = derived(jaxpr, ("transpose", tuple(lin), tuple(flags)), make)
    residuals = [x for x in operands if not isinstance(x, Linear)]
    given = [ct for ct in cts if not isinstance(ct, Zero)]
    name = f"transpose_{name}"
    outs = checkpoint_p.bind(*residuals, *given, jaxpr=backward, policy=policy, name=name)
    found = iter(spread(in_flags, outs, [x.aval for x in operands if isinstance(x, Linear)]))
    return [next(found) if is_lin else None for is_lin in lin]


def _batch(axis: Any, operands: Any, at: Any, *, jaxpr: ClosedJaxpr, policy: Any, name: str) -> Any:
    flags = [d is not None for d in at]
    make = lambda: batch_jaxpr(jaxpr, axis, flags)  # noqa: E731
    batched, out_flags = derived(jaxpr, ("batch", axis, tuple(flags)), make)
    args = fronts(axis, operands, at)
    outs = checkpoint_p.bind(*args, jaxpr=batched, policy=policy, name=name)
    return outs, [0 if b else None for b in out_flags]


checkpoint_p = Primitive(
    "checkpoint",
    abstract=lambda *avals, jaxpr, **_: jaxpr.out_avals,
    impl=lambda xp, *args, jaxpr, **_: impl_jaxpr(xp, jaxpr, *args),
    jvp=_jvp,
    linearize=_linearize,
    transpose=_transpose,
    batch=_batch,
    dims=Refused("a call is inlined before it is partitioned"),
    multiple=True,
    vma="given",
    axes=jaxpr_axes,
    effects=lambda params: params["jaxpr"].effects,
    inline=lambda params: params["jaxpr"],
)

# ---- optimization_barrier, name ----------------------------------------------------------------


def optimization_barrier(*operands: Any) -> list[Any]:
    """The operands, computed anew as far as the compiler is concerned: no pass looks across."""
    return optimization_barrier_p.bind(*operands)


def _barrier_jvp(primals: Any, tangents: Any) -> Any:
    flags = nonzero(tangents)
    given = optimization_barrier(*[t for t in tangents if not isinstance(t, Zero)])
    avals = [typeof(x).tangent() for x in primals]
    return optimization_barrier(*primals), spread(flags, given, avals)


optimization_barrier_p = Primitive(
    "optimization_barrier",
    abstract=lambda *avals: list(avals),
    impl=lambda xp, *args: list(args),
    jvp=_barrier_jvp,
    transpose=lambda cts, *operands: list(cts),
    batch=lambda axis, operands, at: (optimization_barrier(*operands), list(at)),
    dims=Refused("a barrier is removed before partitioning"),
    multiple=True,
    vma="given",
)


def checkpoint_name(x: Any, name: str) -> Any:
    """Give a value a name that checkpoint policies can save it by."""
    return name_p.bind(x, name=name)


name_p = Primitive(
    "name",
    abstract=lambda x, *, name: x,
    impl=lambda xp, x, *, name: x,
    jvp=linear,
    transpose=lambda ct, x, *, name: [ct],
    batch=lambda axis, operands, at, *, name: (checkpoint_name(operands[0], name), at[0]),
    dims=Refused("a name is removed before partitioning"),
)
