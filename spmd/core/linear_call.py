"""`linear_call`: a linear function together with the function that is its transpose.

Both are held as jaxprs in one primitive, whose transpose is the same primitive with the two
exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.errors import PytreeError, ShapeError
from spmd.base.source import current_source
from spmd.base.tree import TreeDef, tree_flatten, tree_unflatten
from spmd.base.util import api_boundary, function_name, split_list
from spmd.core.aval import ShapedArray, typeof
from spmd.core.call import impl_jaxpr, jaxpr_axes, nonzero
from spmd.core.custom_vjp import match_vma
from spmd.core.ir import ClosedJaxpr
from spmd.core.jvp import instantiate, jvp_flat
from spmd.core.primitive import Linear, Primitive, Refused, Zero
from spmd.core.rewrite import close, eval_closed, hoist_tracers
from spmd.core.structural import add_any
from spmd.core.vmap import BatchAxis, batch_jaxpr, to_front


@api_boundary
def linear_call(
    fun: Callable[[Any, Any], Any],
    fun_transpose: Callable[[Any, Any], Any],
    residual_args: Any,
    linear_args: Any,
) -> Any:
    """Call a function that is linear in its second argument, with a transpose of one's own.

    The result is `fun(residual_args, linear_args)`. Where it is transposed, as in reverse mode,
    `fun_transpose(residual_args, cotangents)` is called instead, and must return cotangents in the
    structure, shapes and dtypes of `linear_args`; the transpose of that is `fun` again. Neither is
    checked to be linear.

    >>> def halve(x):
    ...     return linear_call(lambda r, x: x / r, lambda r, ct: ct / r, 2.0, x)
    >>> spmd.grad(halve)(6.0)
    Array(0.5, dtype=float32, weak_type=True)
    """
    residuals, res_tree = tree_flatten(residual_args)
    linear, lin_tree = tree_flatten(linear_args)
    name = function_name(fun)
    trees: list[TreeDef] = []

    def forward(*flat: Any) -> list[Any]:
        r, x = split_list(flat, [len(residuals)])
        outs, tree = tree_flatten(fun(tree_unflatten(res_tree, r), tree_unflatten(lin_tree, x)))
        trees[:] = [tree]
        return outs

    def backward(*flat: Any) -> list[Any]:
        r, cts = split_list(flat, [len(residuals)])
        found = fun_transpose(tree_unflatten(res_tree, r), tree_unflatten(trees[0], cts))
        leaves, tree = tree_flatten(found)
        if tree != lin_tree:
            raise PytreeError(
                f"{current_source()}: linear_call({name}): fun_transpose must return the structure "
                f"of linear_args, {lin_tree}, got {tree}"
            )
        return leaves

    avals = [typeof(x) for x in residuals]
    lin_avals = [typeof(x) for x in linear]
    there, consts = hoist_tracers(close(forward, [*avals, *lin_avals], name))
    ct_avals = [a.tangent() for a in there.out_avals]
    back, more = hoist_tracers(close(backward, [*avals, *ct_avals], f"transpose_{name}"))
    _check_types(name, lin_avals, back.out_avals)
    counts = (len(consts), len(more))
    outs = linear_call_p.bind(
        *consts,
        *more,
        *residuals,
        *linear,
        jaxpr=_with_residuals(there, counts, 0, [typeof(x) for x in more]),
        backward=_with_residuals(back, counts, 1, [typeof(x) for x in consts]),
        num_res=len(consts) + len(more) + len(residuals),
        name=name,
    )
    return tree_unflatten(trees[0], outs)


def _check_types(name: str, want: Sequence[ShapedArray], got: Sequence[ShapedArray]) -> None:
    for k, (x, ct) in enumerate(zip(want, got, strict=True)):
        if (x.shape, x.tangent().dtype) != (ct.shape, ct.dtype):
            raise ShapeError(
                f"{current_source()}: linear_call({name}): fun_transpose returned {ct} as the "
                f"cotangent of linear argument {k}, which is {x}: shape and dtype must be the same"
            )


def _with_residuals(
    closed: ClosedJaxpr, counts: tuple[int, int], own: int, others: Sequence[ShapedArray]
) -> ClosedJaxpr:
    """The jaxpr with the other function's closed-over values as inputs, which it ignores."""
    if not others:
        return closed
    mine, rest = split_list(closed.in_avals, [counts[own]])
    groups = [mine, list(others)] if own == 0 else [list(others), mine]

    def f(*args: Any) -> list[Any]:
        *held, rest = split_list(args, list(counts))
        return eval_closed(closed, *held[own], *rest)

    return close(f, [*groups[0], *groups[1], *rest], closed.jaxpr.name)


# ---- rules -------------------------------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    num_res = params["num_res"]
    outs = linear_call_p.bind(*primals, **params)
    moved = [Zero(typeof(x).tangent()) for x in outs]
    residuals, linear = split_list(primals, [num_res])
    res_dots, lin_dots = split_list(tangents, [num_res])
    if any(nonzero(lin_dots)):
        given = [instantiate(t) for t in lin_dots]
        moved = linear_call_p.bind(*residuals, *given, **params)
    if any(nonzero(res_dots)):
        along = lambda *r: eval_closed(params["jaxpr"], *r, *linear)  # noqa: E731
        _, more = jvp_flat(along, residuals, res_dots)
        moved = [_sum(a, b) for a, b in zip(moved, more, strict=True)]
    return outs, moved


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, Zero) or isinstance(b, Zero):
        return b if isinstance(a, Zero) else a
    return add_any(a, b)


def _transpose(cts: Any, *operands: Any, **params: Any) -> list[Any]:
    num_res = params["num_res"]
    residuals, linear = split_list(operands, [num_res])
    changes = {"jaxpr": params["backward"], "backward": params["jaxpr"]}
    given = [instantiate(ct) for ct in cts]
    found = linear_call_p.bind(*residuals, *given, **(params | changes))
    return [
        *[None] * num_res,
        *(
            match_vma(ct, x.aval) if isinstance(x, Linear) else None
            for ct, x in zip(found, linear, strict=True)
        ),
    ]


def _batch(axis: BatchAxis, operands: Any, at: Any, **params: Any) -> Any:
    """All linear operands and results are batched, so that each function fits the other."""
    num_res = params["num_res"]
    flags = [d is not None for d in at[:num_res]]
    linear = [True] * (len(at) - num_res)
    outs = [True] * len(params["jaxpr"].out_avals)
    there, _ = batch_jaxpr(params["jaxpr"], axis, [*flags, *linear], force_out=True)
    back, _ = batch_jaxpr(params["backward"], axis, [*flags, *outs], force_out=True)
    moved = [
        x if k < num_res and d is None else to_front(x, d, axis.size)
        for k, (x, d) in enumerate(zip(operands, at, strict=True))
    ]
    found = linear_call_p.bind(*moved, **(params | {"jaxpr": there, "backward": back}))
    return found, [0] * len(found)


linear_call_p = Primitive(
    "linear_call",
    abstract=lambda *avals, jaxpr, **_: jaxpr.out_avals,
    impl=lambda xp, *args, jaxpr, **_: impl_jaxpr(xp, jaxpr, *args),
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    dims=Refused("a call is expanded before it is partitioned"),
    multiple=True,
    vma="given",
    axes=jaxpr_axes,
    effects=lambda params: params["jaxpr"].effects,
    expand=lambda avals, params: params["jaxpr"],  # not inline: its transpose needs it whole
)
