"""`checkpoint`: recompute in the backward pass instead of keeping residuals.

The linear part of a checkpointed call holds its *inputs* (and what the policy saves) as residuals,
and the recomputation itself as ordinary non-linear equations, which `transpose` runs first. An
`optimization_barrier` keeps the compiler from merging the recomputation with the forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

from spmd.base.config import config
from spmd.base.context import state
from spmd.base.errors import ArgumentError, RefusedError
from spmd.base.source import current_source
from spmd.base.tree import tree_flatten, tree_map, tree_unflatten
from spmd.base.util import api_boundary, function_name, split_list, wraps
from spmd.core.argument_names import check_arrays, function_source
from spmd.core.aval import ShapedArray, typeof
from spmd.core.call import (
    batch_call,
    call_primitive,
    derived,
    nonzero,
    refuse_io,
    spread,
    transpose_call,
)
from spmd.core.custom_common import nondiff_positions, signature_of
from spmd.core.ir import ClosedJaxpr, Var
from spmd.core.jvp import jvp_jaxpr
from spmd.core.linearize import LinearizeTrace, linearize_jaxpr
from spmd.core.mutable.cells import (
    Cell,
    held,
    put_back,
    put_cells,
    take_cells,
    values_of,
    with_cells,
)
from spmd.core.primitive import Primitive, Refused, Zero, linear
from spmd.core.rewrite import close, dce, eval_closed, hoist_tracers, inline_calls, plain_call
from spmd.core.stage import Debug
from spmd.core.trace import EVAL, unchanged
from spmd.core.trace_once import trace_once

Policy = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")

# ---- policies ----------------------------------------------------------------------------------


class Choice:
    """A result of a policy beside True and False: `Saveable` and `Recompute` are the two."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


Saveable = Choice("Saveable")
Recompute = Choice("Recompute")


class Offloadable(NamedTuple):
    """A policy's choice to keep a value in memory of another kind, which a CPU has no second of."""

    src: str
    dst: str


def _keeps(policy: Policy, choice: Any) -> bool:
    """Whether a policy's choice for an equation is to keep its results."""
    if isinstance(choice, bool):
        return choice
    if choice in (Saveable, Recompute) or isinstance(choice, Offloadable):
        return choice is not Recompute
    raise ArgumentError(
        f"{current_source()}: checkpoint: the policy {function_name(policy)} returned {choice!r}; "
        "it must return a bool, or Saveable, Recompute or Offloadable(src, dst) of ad_checkpoint"
    )


class checkpoint_policies:
    """The values that `checkpoint` keeps: `policy(prim, *avals, **params) -> bool`."""

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
    def save_anything_except_these_names(*names: str) -> Policy:
        unwanted = frozenset(names)

        def policy(prim: Primitive, *_: Any, **params: Any) -> bool:
            return prim.name != "name" or params["name"] not in unwanted

        return policy

    @staticmethod
    def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Policy:
        """Keep products; all memory kinds of a CPU are one memory, so nothing moves."""
        del offload_src, offload_dst
        return checkpoint_policies.dots_with_no_batch_dims_saveable

    @staticmethod
    def save_and_offload_only_these_names(
        *,
        names_which_can_be_saved: Sequence[str],
        names_which_can_be_offloaded: Sequence[str],
        offload_src: str,
        offload_dst: str,
    ) -> Policy:
        """Keep values of these names; those to be offloaded stay, where host memory is the one."""
        del offload_src, offload_dst
        both = set(names_which_can_be_saved) & set(names_which_can_be_offloaded)
        if both:
            raise ArgumentError(
                f"{current_source()}: save_and_offload_only_these_names: the names "
                f"{sorted(both)} are to be saved and to be offloaded; leave them out of one list"
            )
        return checkpoint_policies.save_only_these_names(
            *names_which_can_be_saved, *names_which_can_be_offloaded
        )

    @staticmethod
    def save_from_both_policies(first: Policy, second: Policy) -> Policy:
        return lambda prim, *avals, **params: (
            _keeps(first, first(prim, *avals, **params))
            or _keeps(second, second(prim, *avals, **params))
        )


# ---- the public function -----------------------------------------------------------------------


@overload
def checkpoint(
    fun: Callable[P, R],
    *,
    prevent_cse: bool = True,
    policy: Policy | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[P, R]: ...


@overload
def checkpoint(
    fun: None = None,
    *,
    prevent_cse: bool = True,
    policy: Policy | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    prevent_cse: bool = True,
    policy: Policy | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    concrete: bool = False,
) -> Callable[..., Any]:
    """Make `fun` recompute its intermediate values when it is differentiated in reverse.

    The result takes the arguments of `fun` and returns the same values, shapes and dtypes: only
    memory and work change. `policy` names values to keep all the same (`checkpoint_policies`).
    Without `prevent_cse` the compiler may undo the recomputation; inside a `scan` it cannot, and
    the barrier is not needed. Arguments named in `static_argnums` or `static_argnames` stay what
    they are: no arrays. Without `fun` this is a decorator with options. `fun` is traced: it can't
    branch on the values of its arguments. `concrete=True`, JAX's old way to do so, is refused.

    Raises `RefusedError` for `concrete=True`, `ArgumentError` if `static_argnums` names an argument
    that a call lacks or if `fun` returns what is no array.

    >>> spmd.grad(spmd.checkpoint(lambda x: x * x))(3.0)
    Array(6., dtype=float32, weak_type=True)
    >>> keep_products = spmd.checkpoint_policies.dots_saveable
    >>> layer = spmd.checkpoint(lambda w, x: snp.sin(w @ x).sum(), policy=keep_products)
    >>> spmd.grad(layer)(np.zeros((2, 3)), np.arange(3.0))
    Array([[0., 1., 2.],
           [0., 1., 2.]], dtype=float32)
    """
    if concrete:
        raise RefusedError(
            f"{current_source()}: checkpoint: concrete=True is not supported; make the arguments "
            "whose values Python needs static, by static_argnums"
        )
    if fun is None:
        return functools.partial(
            checkpoint,
            prevent_cse=prevent_cse,
            policy=policy,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if names:
        static = (*static, *nondiff_positions(fun, signature_of(fun), (), names))
    name = function_name(fun)

    @api_boundary
    @wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        outside = [i for i in static if not -len(args) <= i < len(args)]
        if outside and not names:
            raise ArgumentError(
                f"{current_source()}: checkpoint({name}): static_argnums={static_argnums} names "
                f"positional argument {outside[0]}, but the call has {len(args)}"
            )
        fixed = {i % len(args) if i < 0 else i for i in static}
        kept = {key: value for key, value in kwargs.items() if key in names}
        moving = {key: value for key, value in kwargs.items() if key not in names}
        if state.trace is EVAL and config.disable_jit:
            # Traced, the function sees arrays and gives arrays: so it does here.
            given = [x if i in fixed else tree_map(unchanged, x) for i, x in enumerate(args)]
            return tree_map(unchanged, fun(*given, **tree_map(unchanged, moving), **kept))
        dynamic = [x for i, x in enumerate(args) if i not in fixed]
        flat, in_tree = tree_flatten((dynamic, moving))
        mine, flat = take_cells(flat)
        stays = [(i, type(x), x) for i, x in enumerate(args) if i in fixed]
        key = "checkpoint", in_tree, len(args), *stays, *sorted(kept.items())

        def run(*xs: Any) -> tuple[list[Any], Any]:
            given, keywords = tree_unflatten(in_tree, put_cells(mine, xs))
            rest = iter(given)
            full = [x if i in fixed else next(rest) for i, x in enumerate(args)]
            leaves, tree = tree_flatten(fun(*full, **keywords, **kept))
            check_arrays(f"checkpoint({name})", [f"output {k}" for k in range(len(leaves))], leaves)
            return leaves, tree

        debug = Debug(name, (), function_source(fun))
        how = {"policy": policy, "prevent_cse": prevent_cse, "name": name}
        return _bind(run, None if mine else fun, key, flat, debug, how)

    return wrapped


def _bind(
    run: Callable[..., tuple[list[Any], Any]],
    owner: Any,
    key: Any,
    flat: Sequence[Any],
    debug: Debug,
    how: dict[str, Any],
) -> Any:
    """`run(*flat)` as one equation; mutable arrays that it closes over are operands and results.

    The traced jaxpr is kept under `key` for the function `owner`, if there is one.
    """

    def bind(cells: list[Cell]) -> Any:
        count = len(cells)

        def whole(*xs: Any) -> tuple[list[Any], Any]:
            with held(cells, xs[:count]):
                outs, tree = run(*xs[count:])
                return [*outs, *values_of(cells)], tree

        given = [*values_of(cells), *flat]
        avals = [typeof(x) for x in given]
        # A jaxpr does not say which cells it is for.
        closed, tree = trace_once(None if cells else owner, key, whole, avals, debug)
        closed, consts = hoist_tracers(closed)
        outs = checkpoint_p.bind(*consts, *given, jaxpr=closed, **how)
        results, values = split_list(outs, [len(outs) - count])
        put_back(cells, values)
        return tree_unflatten(tree, results)

    return with_cells(bind)


# ---- rules -------------------------------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, *, jaxpr: ClosedJaxpr, name: str, **how: Any) -> Any:
    flags = nonzero(tangents)
    jvp, out_flags = derived(jaxpr, ("jvp", tuple(flags)), lambda: jvp_jaxpr(jaxpr, flags))
    given = [t for t in tangents if not isinstance(t, Zero)]
    outs = checkpoint_p.bind(*primals, *given, jaxpr=jvp, name=f"jvp_{name}", **how)
    outs, out_tangents = split_list(outs, [len(jaxpr.out_avals)])
    return outs, spread(out_flags, out_tangents, [a.tangent() for a in jaxpr.out_avals])


def _linearize(
    trace: LinearizeTrace, primals: Any, tangents: Any, *, jaxpr: ClosedJaxpr, name: str, **how: Any
) -> Any:
    fix = "its call would be repeated by the backward pass; take it out of the checkpoint"
    refuse_io(f"checkpoint({name}) that is differentiated", fix, jaxpr)
    policy, prevent_cse = how["policy"], how["prevent_cse"]
    cut = linearize_jaxpr(jaxpr, nonzero(tangents))
    # Values that a policy names or that need not be computed again may be inside calls.
    whole = inline_calls(cut.primal, plain_call)
    saved = _saved_vars(whole, policy)
    n = len(jaxpr.out_avals)
    kept_outs = [*whole.jaxpr.outvars[:n], *saved]
    forward, _ = dce(whole.jaxpr.replace(outvars=kept_outs), [True] * len(kept_outs))
    outs = checkpoint_p.bind(*primals, jaxpr=ClosedJaxpr(forward, whole.consts), name=name, **how)
    outs, kept = split_list(outs, [n])
    given = [t for t in tangents if not isinstance(t, Zero)]
    again = _residuals_from(whole, saved, n)
    tangent_avals = [typeof(t) for t in given]
    backward = _recompute(again, cut.linear, tangent_avals, prevent_cse, f"remat_{name}")
    params = {"jaxpr": backward, "name": f"linear_{name}", **how, "_differentiated": True}
    out_tangents = trace.bind_linear(checkpoint_p, [*primals, *kept, *given], params)
    return outs, spread(cut.out_nonzero, out_tangents, [a.tangent() for a in jaxpr.out_avals])


def _saved_vars(primal: ClosedJaxpr, policy: Policy | None) -> list[Var]:
    """The intermediate variables of the primal jaxpr that the policy keeps."""
    if policy is None:
        return []
    saved: list[Var] = []
    for eqn in primal.eqns:
        if _keeps(policy, policy(eqn.prim, *[v.aval for v in eqn.invars], **eqn.params)):
            saved.extend(eqn.outvars)
    return saved


def _residuals_from(primal: ClosedJaxpr, saved: list[Var], num_out: int) -> ClosedJaxpr:
    """The jaxpr of (primals, saved values) -> residuals, with only the work that this needs."""
    jaxpr = primal.jaxpr
    given = set(saved)
    again = jaxpr.replace(
        invars=(*jaxpr.invars, *saved),
        eqns=[e for e in jaxpr.eqns if not given.intersection(e.outvars)],
        outvars=jaxpr.outvars[num_out:],
    )
    needed, _ = dce(again, [True] * len(again.outvars))
    return ClosedJaxpr(needed, primal.consts)


def _recompute(
    again: ClosedJaxpr,
    linear: ClosedJaxpr,
    tangent_avals: list[ShapedArray],
    prevent_cse: bool,
    name: str,
) -> ClosedJaxpr:
    """The jaxpr of (primals, saved values, tangents) -> out tangents: residuals, then `linear`."""
    num_known = len(again.in_avals)

    def f(*args: Any) -> list[Any]:
        known = list(args[:num_known])
        if prevent_cse and known:
            known = optimization_barrier_p.bind(*known)
        return eval_closed(linear, *eval_closed(again, *known), *args[num_known:])

    return close(f, [*again.in_avals, *tangent_avals], name)


def _text(eqn: Any, names: Any) -> tuple[str, dict[str, Any]]:
    params = eqn.params
    shown = {"differentiated": params.get("_differentiated", False)}
    return "remat2", shown | {k: params[k] for k in ("jaxpr", "policy", "prevent_cse")}


checkpoint_p = call_primitive(
    "checkpoint",
    text=_text,
    jvp=_jvp,
    linearize=_linearize,
    transpose=lambda cts, *operands, **params: transpose_call(checkpoint_p, cts, operands, params),
    batch=lambda axis, operands, at, **params: batch_call(checkpoint_p, axis, operands, at, params),
)

# ---- optimization_barrier, name ----------------------------------------------------------------


def optimization_barrier(operand: Any) -> Any:
    """Return the pytree `operand`, computed anew as far as the compiler is concerned.

    No pass looks across the barrier. The shape, the dtype and the derivative of each leaf stay.

    >>> lax.optimization_barrier(np.arange(3))
    Array([0, 1, 2], dtype=int32)
    """
    leaves, tree = tree_flatten(operand)
    return tree_unflatten(tree, optimization_barrier_p.bind(*leaves)) if leaves else operand


def _barrier_jvp(primals: Any, tangents: Any) -> Any:
    flags = nonzero(tangents)
    given = optimization_barrier([t for t in tangents if not isinstance(t, Zero)])
    avals = [typeof(x).tangent() for x in primals]
    return optimization_barrier(list(primals)), spread(flags, given, avals)


optimization_barrier_p = Primitive(
    "optimization_barrier",
    abstract=lambda *avals: list(avals),
    impl=lambda xp, *args: list(args),
    jvp=_barrier_jvp,
    transpose=lambda cts, *operands: list(cts),
    batch=lambda axis, operands, at: (optimization_barrier(list(operands)), list(at)),
    dims=Refused("a barrier is removed before partitioning"),
    multiple=True,
    vma="given",
)


def checkpoint_name(x: Any, name: str) -> Any:
    """Give each array of the pytree `x` a name that checkpoint policies can save it by."""
    return tree_map(lambda leaf: name_p.bind(leaf, name=name), x)


name_p = Primitive(
    "name",
    abstract=lambda x, *, name: x,
    impl=lambda xp, x, *, name: x,
    jvp=linear,
    transpose=lambda ct, x, *, name: [ct],
    batch=lambda axis, operands, at, *, name: (checkpoint_name(operands[0], name), at[0]),
    dims=Refused("a name is removed before partitioning"),
)
