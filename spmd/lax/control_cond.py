"""`cond` and `switch`: one of several branches runs, chosen by a traced index.

All branches are jaxprs over the same operands. Under vmap with a batched index every branch runs
and the results are selected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.errors import (
    ArgumentError,
    DtypeError,
    PytreeError,
    ShapeError,
    VaryingTypeError,
)
from spmd.base.source import current_source, is_called_by_user
from spmd.base.tree import tree_flatten, tree_unflatten
from spmd.base.util import api_boundary, split_list
from spmd.core.aval import ShapedArray, typeof
from spmd.core.axis import cast_to_vma
from spmd.core.call import impl_jaxpr, nonzero, refuse_io, spread
from spmd.core.check import check_operands
from spmd.core.explicit import joined_sharding
from spmd.core.ir import ClosedJaxpr, Var
from spmd.core.jvp import jvp_jaxpr
from spmd.core.linearize import Linearized, LinearizeTrace, linearize_jaxpr
from spmd.core.mutable.control_flow import switch_with_cells
from spmd.core.primitive import Linear, Primitive, Refused, Zero
from spmd.core.rewrite import close, dce, eval_closed, known_part
from spmd.core.structural import broadcast_in_dim, to_front, zeros_like_aval
from spmd.core.trace import Tracer
from spmd.core.transpose import transpose_jaxpr
from spmd.core.vmap import batch_jaxpr, fronts
from spmd.lax.control import (
    Staged,
    inner_axes,
    inner_effects,
    is_concrete,
    join_avals,
    leaf_paths,
    retype_outputs,
    same_type,
)
from spmd.lax.control_dce import cond_dce
from spmd.lax.convert import convert_element_type, stop_gradient
from spmd.lax.logic import clamp, eq, select_n

# Tells `operand=None`, one operand that is an empty pytree, from no `operand` at all.
_ABSENT: Any = object()

# ---- public functions --------------------------------------------------------------------------


@api_boundary
def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    operand: Any = _ABSENT,
) -> Any:
    """Run `true_fun(*operands)` if `pred` holds and `false_fun(*operands)` otherwise.

    `pred` is a boolean or numeric scalar, and may be traced: then only the chosen function runs.
    Under `vmap` with a batched `pred`, **both run** and the results are selected. `operands` are
    arrays or pytrees; `operand=x` is JAX's older way to give one. Both functions return the same
    structure, shapes and dtypes.

    Raises `ShapeError` if `pred` is no scalar or if the results' shapes or dtypes differ,
    `DtypeError` if `pred` is complex, `PytreeError` if the structures differ, and `ArgumentError`
    if a branch is no function.

    >>> f = lambda x: lax.cond(x > 0, lambda x: x, lambda x: -x, x)
    >>> spmd.jit(f)(-3.0)
    Array(3., dtype=float32, weak_type=True)
    """
    if operand is not _ABSENT:
        operands = (operand,)
    if len(operands) == 2 and not callable(true_fun) and callable(false_fun):
        # cond(pred, true_operand, true_fun, false_operand, false_fun), JAX's oldest way.
        if callable(operands[1]):
            first, second = false_fun, operands[1]
            given, other = true_fun, operands[0]
            return cond(pred, lambda: first(given), lambda: second(other))
    if not (callable(true_fun) and callable(false_fun)):
        raise ArgumentError(
            f"{current_source()}: lax.cond: true_fun and false_fun must be functions; "
            "write cond(pred, true_fun, false_fun, *operands)"
        )
    aval = typeof(pred)
    if aval.shape:
        raise ShapeError(
            f"{current_source()}: lax.cond: pred must be a scalar, got shape {aval.shape}; "
            "use spmd.numpy.where to choose element by element"
        )
    if aval.dtype not in dtypes.ORDERED:
        raise DtypeError(f"{current_source()}: lax.cond: pred must be a bool, got {aval.dtype}")
    if config.disable_jit and is_concrete(pred):
        return true_fun(*operands) if pred else false_fun(*operands)
    if not dtypes.is_bool(aval.dtype):
        pred = convert_element_type(pred, np.bool_)
    index = convert_element_type(pred, np.int32)
    return named_switch(
        "lax.cond", index, (false_fun, true_fun), operands, ("false_fun", "true_fun")
    )


@api_boundary
def switch(
    index: Any, branches: Sequence[Callable[..., Any]], *operands: Any, operand: Any = _ABSENT
) -> Any:
    """Run `branches[index](*operands)`; an index out of range is clamped into it.

    `index` is an integer scalar and may be traced: then only the chosen branch runs. Under `vmap`
    with a batched `index`, **all branches run** and the results are selected. `branches` is a
    sequence of functions that return the same structure, shapes and dtypes. `operands` are arrays
    or pytrees; `operand=x` is JAX's older way to give one.

    Raises `DtypeError` if `index` is no integer scalar, `ArgumentError` without a branch, and
    `ShapeError` or `PytreeError` if the results differ in type.

    >>> branches = [lambda x: x, lambda x: 10 * x, lambda x: 100 * x]
    >>> [lax.switch(k, branches, 1.0).item() for k in (0, 1, 7)]
    [1.0, 10.0, 100.0]
    """
    if operand is not _ABSENT:
        operands = (operand,)
    branches = tuple(branches)
    if not branches:
        raise ArgumentError(f"{current_source()}: lax.switch: there must be at least one branch")
    aval = typeof(index)
    if aval.shape or not dtypes.is_integer(aval.dtype):
        raise DtypeError(
            f"{current_source()}: lax.switch: index must be an integer scalar, got {aval}"
        )
    if len(branches) == 1:
        return branches[0](*operands)
    if config.disable_jit and is_concrete(index):
        return branches[min(max(int(index), 0), len(branches) - 1)](*operands)
    index = convert_element_type(index, np.int32)
    index = clamp(np.int32(0), index, np.int32(len(branches) - 1))
    names = [f"branch {k}" for k in range(len(branches))]
    return named_switch("lax.switch", index, branches, operands, names)


def named_switch(
    what: str,
    index: Any,
    functions: Sequence[Callable[..., Any]],
    operands: Sequence[Any],
    names: Sequence[str],
) -> Any:
    """`switch` for a function that errors call `what`, and its branches `names`."""

    def run(functions: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
        return _bind_switch(what, index, functions, operands, names)

    return switch_with_cells(run, functions, operands)


def _bind_switch(
    what: str,
    index: Any,
    functions: Sequence[Callable[..., Any]],
    operands: Sequence[Any],
    names: Sequence[str],
) -> Any:
    """Stage all branches on the operands and bind `cond_p`; captured values become operands."""
    flat, in_tree = tree_flatten(tuple(operands))
    # Devices that disagree about the branch must not meet in a collective inside it, and the
    # transpose of a cast there would be one; so values are cast before the branches begin.
    index_vma = typeof(index).vma
    flat_given, flat = flat, [_varying(x, index_vma) for x in flat]
    avals = [typeof(x) for x in flat]
    # A function that is several of the branches is traced once.
    made: dict[int, Staged] = {}
    for f in functions:
        if id(f) not in made:
            made[id(f)] = Staged(f, in_tree, avals, what)
    staged = [made[id(f)] for f in functions]
    values = (*flat_given, *[c for s in staged for c in s.consts])
    as_given = all(index_vma <= typeof(x).vma for x in values)
    for s, name in zip(staged[1:], names[1:], strict=True):
        _check_branch(what, staged[0], s, names[0], name)
        if as_given:
            _check_varies(what, staged[0], s, names[0], name)
    consts = [_varying(c, index_vma) for s in staged for c in s.consts]
    branches = _join_consts(staged, [typeof(c) for c in consts], avals)
    branches = _same_outputs(branches, index)
    found = cond_p.bind(index, *consts, *flat, branches=branches)
    return tree_unflatten(staged[0].out_tree, found)  # type: ignore[arg-type]


def _varying(x: Any, vma: frozenset[Any]) -> Any:
    have = typeof(x).vma
    return cast_to_vma(x, have | vma, have)


def _check_branch(what: str, a: Staged, b: Staged, a_name: str, b_name: str) -> None:
    if a.out_tree != b.out_tree:
        raise PytreeError(
            f"{current_source()}: {what} branch outputs must have the same pytree structure: "
            f"{a_name} returns {a.out_tree}, {b_name} returns {b.out_tree}"
        )
    tree = a.out_tree
    assert tree is not None
    paths = leaf_paths(tree_unflatten(tree, list(range(tree.num_leaves))))
    wrong = [
        f"  output{path}: {a_name} returns {x.dtype}{list(x.shape)}, "
        f"{b_name} returns {y.dtype}{list(y.shape)}"
        for path, x, y in zip(paths, a.out_avals, b.out_avals, strict=True)
        if not same_type(x, y)
    ]
    if wrong:
        raise ShapeError(
            f"{current_source()}: {what}: the branches must return the same shapes and dtypes:\n"
            + "\n".join(wrong)
            + "\nConvert the results, e.g. with .astype(...)."
        )


def _check_varies(what: str, a: Staged, b: Staged, a_name: str, b_name: str) -> None:
    """Raise if branches of a user's conditional lie or, in a `shard_map`, vary differently."""
    pairs = list(zip(a.out_avals, b.out_avals, strict=True))
    if all(x.is_plain and y.is_plain for x, y in pairs) or not is_called_by_user():
        return
    assert a.out_tree is not None
    paths = leaf_paths(tree_unflatten(a.out_tree, list(range(len(pairs)))))
    lines = [
        f"  output{path}: {a_name} returns {x.short()}, {b_name} returns {y.short()}"
        for path, (x, y) in zip(paths, pairs, strict=True)
        if x.explicit is not None and y.explicit is not None and joined_sharding([x, y]) is None
    ]
    if lines:
        raise VaryingTypeError(
            f"{current_source()}: {what}: the branches must return values that lie alike:\n"
            + "\n".join(lines)
            + "\nLay the result of one branch out with reshard."
        )
    if all(x.vma == y.vma for x, y in pairs):
        return
    for path, (x, y) in zip(paths, pairs, strict=True):
        lacks = [(a_name, y.vma - x.vma), (b_name, x.vma - y.vma)]
        advice = [
            f"lax.pcast(result, {tuple(sorted(axes, key=str))!r}, to='varying') in {name}"
            for name, axes in lacks
            if axes
        ]
        if advice:
            types = f"{a_name} returns {x.short()}, {b_name} returns {y.short()}"
            lines.append(f"  output{path}: {types}; use {' and '.join(advice)}")
    raise VaryingTypeError(
        f"{current_source()}: {what}: the branches must return values that vary over the same axes "
        "of the shard_map:\n" + "\n".join(lines)
    )


def _join_consts(
    staged: Sequence[Staged], const_avals: list[ShapedArray], avals: list[ShapedArray]
) -> tuple[ClosedJaxpr, ...]:
    """Branches that all take the captured values of every branch, then the operands."""
    out = []
    start = 0
    for s in staged:
        n = len(s.consts)

        def branch(*args: Any, s: Staged = s, at: int = start, n: int = n) -> list[Any]:
            return eval_closed(s.closed, *args[at : at + n], *args[len(const_avals) :])

        start += n
        needs = bool(const_avals)
        out.append(close(branch, [*const_avals, *avals], s.name) if needs else s.closed)
    return tuple(out)


# ---- rules -------------------------------------------------------------------------------------


def _abstract(
    index: ShapedArray, *avals: ShapedArray, branches: tuple[ClosedJaxpr, ...]
) -> list[ShapedArray]:
    for k, branch in enumerate(branches):
        check_operands(branch.in_avals, avals, f"branch {k} of cond")
        check_operands(branches[0].out_avals, branch.out_avals, f"the results of branch {k}")
    return branches[0].out_avals


def _impl(xp: Any, index: Any, *operands: Any, branches: Any) -> Any:
    return impl_jaxpr(xp, branches[min(max(int(index), 0), len(branches) - 1)], *operands)


def _union(rows: Sequence[Sequence[bool]]) -> list[bool]:
    return [any(column) for column in zip(*rows, strict=True)]


def _jvp(primals: Any, tangents: Any, *, branches: Any) -> Any:
    flags = nonzero(tangents[1:])
    force = _union([jvp_jaxpr(b, flags)[1] for b in branches])
    jvps = _same_outputs([jvp_jaxpr(b, flags, force)[0] for b in branches], primals[0])
    given = [t for t in tangents[1:] if not isinstance(t, Zero)]
    outs = cond_p.bind(*primals, *given, branches=jvps)
    avals = branches[0].out_avals
    outs, out_tangents = split_list(outs, [len(avals)])
    return outs, spread(force, out_tangents, [a.tangent() for a in avals])


def _linearize(trace: LinearizeTrace, primals: Any, tangents: Any, *, branches: Any) -> Any:
    flags = nonzero(tangents[1:])
    force = _union([linearize_jaxpr(b, flags).out_nonzero for b in branches])
    cuts = [linearize_jaxpr(b, flags, force) for b in branches]
    slots, places = _share_slots(cuts)
    index = primals[0]
    pairs = list(zip(cuts, places, strict=True))
    primal = _same_outputs([_with_slots(cut, slots, place) for cut, place in pairs], index)
    linear = _same_outputs([_from_slots(cut, slots, place) for cut, place in pairs], index)
    outs = cond_p.bind(index, *primals[1:], branches=primal)
    avals = branches[0].out_avals
    outs, residuals = split_list(outs, [len(avals)])
    given = [t for t in tangents[1:] if not isinstance(t, Zero)]
    out_tangents = trace.bind_linear(cond_p, [index, *residuals, *given], {"branches": linear})
    return outs, spread(force, out_tangents, [a.tangent() for a in avals])


def _share_slots(cuts: Sequence[Linearized]) -> tuple[list[ShapedArray], list[list[int]]]:
    """Residual slots of all branches: branches share slots of equal type."""
    slots: list[ShapedArray] = []
    places = []
    for cut in cuts:
        used: set[int] = set()
        place = []
        for aval in cut.residual_avals:
            free = (k for k, a in enumerate(slots) if a is aval and k not in used)
            k = next(free, len(slots))
            if k == len(slots):
                slots.append(aval)
            used.add(k)
            place.append(k)
        places.append(place)
    return slots, places


def _with_slots(cut: Linearized, slots: list[ShapedArray], place: list[int]) -> ClosedJaxpr:
    """The primal branch with its residuals in their slots and zeros in the others."""

    def branch(*args: Any) -> list[Any]:
        outs = eval_closed(cut.primal, *args)
        n = len(outs) - cut.num_residuals
        filled: list[Any] = [None] * len(slots)
        for k, x in zip(place, outs[n:], strict=True):
            filled[k] = x
        rest = [zeros_like_aval(a) if x is None else x for x, a in zip(filled, slots, strict=True)]
        return [*outs[:n], *rest]

    closed = close(branch, cut.primal.in_avals, cut.primal.jaxpr.name)
    n = len(closed.out_avals) - len(slots)
    return retype_outputs(closed, [*closed.out_avals[:n], *slots])


def _from_slots(cut: Linearized, slots: list[ShapedArray], place: list[int]) -> ClosedJaxpr:
    """The linear branch reading its residuals from their slots."""

    def branch(*args: Any) -> list[Any]:
        return eval_closed(cut.linear, *[args[k] for k in place], *args[len(slots) :])

    tangent_avals = cut.linear.in_avals[cut.num_residuals :]
    return close(branch, [*slots, *tangent_avals], cut.linear.jaxpr.name)


def _transpose(cts: Any, index: Any, *operands: Any, branches: Any) -> Any:
    linear = [isinstance(x, Linear) for x in operands]
    flags = nonzero(cts)
    transposed = [transpose_jaxpr(b, linear, flags, force=True)[0] for b in branches]
    backward = _same_outputs(transposed, index)
    residuals = [x for x in operands if not isinstance(x, Linear)]
    given = [ct for ct in cts if not isinstance(ct, Zero)]
    found = iter(cond_p.bind(index, *residuals, *given, branches=backward))
    return [None, *(next(found) if lin else None for lin in linear)]


def _same_outputs(branches: Sequence[ClosedJaxpr], index: Any) -> tuple[ClosedJaxpr, ...]:
    """The branches with outputs of equal types, which vary over the axes of the index."""
    vma = typeof(index).vma
    outs = [a.update(vma=a.vma | vma) for a in join_avals([b.out_avals for b in branches])]
    return tuple(retype_outputs(b, outs) for b in branches)


def _batch(axis: Any, operands: Any, at: Any, *, branches: Any) -> Any:
    index, *args = operands
    flags = [d is not None for d in at[1:]]
    if at[0] is not None:
        return _batched_index(axis, index, at[0], fronts(axis, args, at[1:]), flags, branches)
    force = _union([batch_jaxpr(b, axis, flags)[1] for b in branches])
    batched = _same_outputs([batch_jaxpr(b, axis, flags, force)[0] for b in branches], index)
    outs = cond_p.bind(index, *fronts(axis, args, at[1:]), branches=batched)
    return outs, [0 if b else None for b in force]


def _batched_index(
    axis: Any, index: Any, dim: int, args: list[Any], flags: list[bool], branches: Any
) -> Any:
    """Run every branch and select: examples may choose differently."""
    fix = "every branch runs for all examples; use lax.map"
    refuse_io("a cond whose predicate differs under vmap", fix, *branches)
    index = to_front(index, dim, axis.size)
    pairs, shared = list(zip(args, flags, strict=True)), args
    # A value that all examples share becomes one of each: its cotangents are summed afterwards.
    apart = [is_batched or _differentiable(x) for x, is_batched in pairs]
    args = [
        to_front(x, None, axis.size) if own and not is_batched else x
        for (x, is_batched), own in zip(pairs, apart, strict=True)
    ]
    rows = []
    for k, branch in enumerate(branches):
        batched, _ = batch_jaxpr(branch, axis, apart, force_out=True)
        rows.append(eval_closed(batched, *(_where_chosen(index, k, x) for x in args)))
    outs: list[Any] = []
    dims: list[int | None] = []
    for column, passed in zip(zip(*rows, strict=True), _passed_on(branches), strict=True):
        if passed is not None and not flags[passed]:  # all examples get the one that they share
            outs.append(shared[passed])
            dims.append(None)
            continue
        dims.append(0)
        shape = typeof(column[0]).shape
        which = broadcast_in_dim(index, shape, (0,))
        if len(column) == 2:
            out = select_n(eq(which, broadcast_in_dim(np.int32(1), shape, ())), *column)
        else:
            out = select_n(which, *column)
        outs.append(out)
    return outs, dims


def _passed_on(branches: Sequence[ClosedJaxpr]) -> list[int | None]:
    """For each result the operand that all branches return as it is; None if there is none."""
    places = []
    for branch in branches:
        at = {var: k for k, var in enumerate(branch.jaxpr.invars)}
        outs = branch.jaxpr.outvars
        places.append([at.get(x) if isinstance(x, Var) else None for x in outs])
    return [column[0] if len(set(column)) == 1 else None for column in zip(*places, strict=True)]


def _known(unknown: Sequence[bool], params: dict[str, Any]) -> Any:
    """The results that depend on nothing unknown, whichever branch runs."""
    branches = params["branches"]
    if unknown[0]:
        return [False] * len(unknown), [False] * len(branches[0].out_avals), params
    parts = [known_part(branch, unknown[1:]) for branch in branches]
    flags = [all(column) for column in zip(*(own for _, own in parts), strict=True)]
    smaller = []
    for part, own in parts:
        kept, _ = dce(part.jaxpr, [f for f, k in zip(flags, own, strict=True) if k])
        smaller.append(ClosedJaxpr(kept, part.consts))
    return [not u for u in unknown], flags, {"branches": tuple(smaller)}


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tracer) and dtypes.is_inexact(typeof(x).dtype)


def _where_chosen(index: Any, k: int, x: Any) -> Any:
    """`x`, whose examples that do not run branch `k` are constant for differentiation.

    In reverse such an example has a cotangent of zero, and where the branch has an infinite slope
    their product is NaN, which must not be added to the other branches' cotangents.
    """
    if not _differentiable(x):
        return x
    chosen = broadcast_in_dim(eq(index, np.int32(k)), typeof(x).shape, (0,))
    return select_n(chosen, stop_gradient(x), x)


cond_p = Primitive(
    "cond",
    abstract=_abstract,
    impl=_impl,
    jvp=_jvp,
    linearize=_linearize,
    transpose=_transpose,
    batch=_batch,
    known=_known,
    dce=cond_dce,
    dims=Refused("the branches of a cond are partitioned one by one"),
    multiple=True,
    vma="given",
    axes=inner_axes("branches"),
    effects=inner_effects("branches"),
)
