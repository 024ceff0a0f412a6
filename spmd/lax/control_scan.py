"""`scan`: a loop of known length that carries a value and maps slices to stacked results.

Everything is expressed on the body's jaxpr: (consts, carry, x) -> (carry, y). Linearizing splits
the body in two; residuals that vary are stacked like any other output, those that don't are
computed once and passed on as constants. Transposing runs the linear body in the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.base.config import config
from spmd.base.context import current_trace
from spmd.base.dtypes import is_inexact
from spmd.base.errors import ArgumentError, GradError, PytreeError, ShapeError, ShardingTypeError
from spmd.base.source import current_source
from spmd.base.tree import tree_flatten, tree_map, tree_unflatten
from spmd.base.util import api_boundary, merge_lists, partition_list, split_list
from spmd.core.aval import ShapedArray, typeof
from spmd.core.call import impl_jaxpr, nonzero, spread
from spmd.core.check import check_operands
from spmd.core.explicit import sliced_aval, stacked_aval
from spmd.core.ir import ClosedJaxpr
from spmd.core.jvp import instantiate, jvp_jaxpr
from spmd.core.linearize import Linearized, LinearizeTrace, linearize_jaxpr
from spmd.core.mutable.cells import Cell, held, put_back, values_of, with_cells
from spmd.core.mutable.control_flow import scan_with_cells
from spmd.core.primitive import Linear, Primitive, Refused, Zero
from spmd.core.rewrite import close, dce, dependents, eval_closed
from spmd.core.structural import add_any, move_dim, to_front, zeros_like_aval
from spmd.core.transpose import backward_pass
from spmd.core.vmap import batch_jaxpr
from spmd.lax.array import expand_dims
from spmd.lax.concatenate import concatenate
from spmd.lax.control import (
    Staged,
    inner_axes,
    inner_effects,
    is_concrete,
    leaf_paths,
    retype_outputs,
    settle_carry,
    widen,
    with_weak_types,
)
from spmd.lax.control_dce import scan_dce
from spmd.lax.control_known import known_loop, open_calls, split_known
from spmd.lax.slicing import index_in_dim

# ---- scan --------------------------------------------------------------------------------------


@api_boundary
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
) -> tuple[Any, Any]:
    """Loop over the leading dim of `xs` with a carry: `carry, y = f(carry, x)`.

    `init` is the first carry; the result is the last carry and the ys, stacked along a new leading
    dim. `xs` is a pytree of arrays of shape (n, ...), and `f` gets slices of shape (...). `length`
    is n, and needed if `xs` is None. The carry keeps its structure, shapes and dtypes; a Python
    number in `init` takes the dtype that `f` returns. With `reverse=True` the loop starts at the
    last slice, and ys keep their places. `unroll` is recorded in the jaxpr, and changes nothing
    else. The loop is differentiable in forward and reverse mode.

    Raises `ShapeError` if the carry changes its shape or dtype or if leading dims disagree,
    `PytreeError` if `f` returns no pair or another structure, and `ArgumentError` if `f` is no
    function, if `unroll` is negative or if no length is known.

    >>> def add_up(total, x):
    ...     return total + x, total
    >>> lax.scan(add_up, np.float32(0), np.array([1.0, 2.0, 3.0]))
    (Array(6., dtype=float32), Array([0., 1., 3.], dtype=float32))
    """
    if not callable(f):
        raise ArgumentError(f"{current_source()}: lax.scan: f must be a function, got {f!r}")
    return named_scan("lax.scan", None, f, init, xs, length, reverse=reverse, unroll=unroll)


def named_scan(
    what: str,
    inside: int | None,
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    length: int | None,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """`scan` for a function that errors call `what`, whose user's carry is at `inside` of ours."""

    def run(f: Any, init: Any, xs: Any, inside: int | None) -> tuple[Any, Any]:
        return _bind_scan(what, inside, f, init, xs, length, reverse, unroll)

    return scan_with_cells(run, f, init, xs, inside)


def _bind_scan(
    what: str,
    inside: int | None,
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    length: int | None,
    reverse: bool,
    unroll: int | bool,
) -> tuple[Any, Any]:
    """Stage the body, settle the type of its carry, and bind `scan_p`."""
    xs_flat, xs_tree = tree_flatten(xs)
    n = _length(xs, xs_flat, length)
    init_flat, init_tree = tree_flatten(init)
    if config.disable_jit and all(is_concrete(x) for x in (*init_flat, *xs_flat)):
        return _python_scan(f, init, (xs_flat, xs_tree), n, reverse)
    _, in_tree = tree_flatten((init, xs))
    _check_not_split(what, xs, xs_flat)
    x_avals = [sliced_aval(typeof(x), 0) for x in xs_flat]
    init_flat, body, weak = settle_carry(
        what, init_tree, init_flat, lambda avals: _stage(f, in_tree, [*avals, *x_avals]), inside
    )
    outs = scan_p.bind(
        *body.consts,
        *init_flat,
        *xs_flat,
        jaxpr=_retype_carry(body.closed, [typeof(x) for x in init_flat], weak),
        length=n,
        reverse=bool(reverse),
        num_consts=len(body.consts),
        num_carry=len(init_flat),
        unroll=_unroll(unroll, n),
    )
    out_tree = body.out_tree
    assert out_tree is not None
    return tree_unflatten(out_tree, with_weak_types(outs, weak))


def _unroll(unroll: int | bool, length: int) -> int:
    if isinstance(unroll, bool):
        return max(length, 1) if unroll else 1
    if unroll < 0:
        raise ArgumentError(f"{current_source()}: lax.scan: unroll={unroll} must not be negative")
    return unroll or 1


def _length(xs: Any, xs_flat: Sequence[Any], length: int | None) -> int:
    shapes = [typeof(x).shape for x in xs_flat]
    firsts = {shape[:1] for shape in shapes}
    if len(firsts) == 1 and shapes[0] and length in (None, shapes[0][0]):
        return shapes[0][0]
    sizes: dict[int, str] = {}
    for path, x in zip(leaf_paths(xs), xs_flat, strict=True):
        shape = typeof(x).shape
        if not shape:
            raise ShapeError(
                f"{current_source()}: lax.scan: xs{path} is a scalar; every leaf of xs needs a "
                "leading dim to loop over"
            )
        sizes.setdefault(shape[0], f"xs{path} has shape {shape}")
    if length is not None:
        sizes.setdefault(int(length), f"length is {length}")
    if len(sizes) > 1:
        listed = "; ".join(sizes.values())
        raise ShapeError(
            f"{current_source()}: lax.scan: the leading dims of xs (and length) must "
            f"agree: {listed}"
        )
    if not sizes:
        raise ArgumentError(
            f"{current_source()}: lax.scan: xs has no leaves; give length= to say how often"
        )
    return next(iter(sizes))


def _check_not_split(what: str, xs: Any, xs_flat: Sequence[Any]) -> None:
    """Raise if the dim that the loop runs over is split: each device runs all iterations."""
    for k, x in enumerate(xs_flat):
        sharding = typeof(x).explicit
        if sharding is not None and sharding.spec[0] is not None:
            path = leaf_paths(xs)[k]
            raise ShardingTypeError(
                f"{current_source()}: {what}: dim 0 of xs{path} ({typeof(x).short()}), over which "
                f"the loop runs, is split over {sharding.spec[0]!r} and must be whole; reshard it"
            )


def _stage(f: Any, in_tree: Any, avals: list[ShapedArray]) -> tuple[Staged, Any, list[ShapedArray]]:
    """The traced body, and the structure and avals of the carry it returns."""
    staged = Staged(f, in_tree, avals, carried=in_tree.parts[0].num_leaves)
    tree = staged.out_tree
    assert tree is not None
    if tree.kind not in (tuple, list) or len(tree.parts) != 2:
        raise PytreeError(
            f"{current_source()}: lax.scan: the body must return a pair (carry, y), got {tree}"
        )
    carry_tree = tree.parts[0]
    return staged, carry_tree, staged.out_avals[: carry_tree.num_leaves]


def _retype_carry(
    closed: ClosedJaxpr, carry: list[ShapedArray], weak: list[bool] | None = None
) -> ClosedJaxpr:
    ys = closed.out_avals[len(carry) :]
    if weak is not None:
        flags = weak[len(carry) :]
        ys = [a.update(weak_type=w) for a, w in zip(ys, flags, strict=True)]
    return retype_outputs(closed, [*carry, *ys])


def _python_scan(f: Any, init: Any, xs: Any, n: int, reverse: bool) -> tuple[Any, Any]:
    """The definition of scan, as a Python loop, for `disable_jit`."""
    xs_flat, xs_tree = xs
    carry, ys = init, []
    for k in reversed(range(n)) if reverse else range(n):
        x = tree_unflatten(xs_tree, [index_in_dim(x, k, keepdims=False) for x in xs_flat])
        carry, y = f(carry, x)
        ys.append(y)
    if reverse:
        ys.reverse()
    if not ys:
        raise ArgumentError(
            f"{current_source()}: lax.scan of length 0 has no results to stack under disable_jit"
        )
    stacked = tree_map(lambda *rows: concatenate([expand_dims(r, (0,)) for r in rows], 0), *ys)
    return carry, stacked


# ---- rules -------------------------------------------------------------------------------------


def _abstract(*avals: ShapedArray, **params: Any) -> list[ShapedArray]:
    jaxpr, num_carry = params["jaxpr"], params["num_carry"]
    fixed, xs = split_list(avals, [params["num_consts"] + num_carry])
    slices = [sliced_aval(x, 0) for x in xs]
    check_operands(jaxpr.in_avals, [*fixed, *slices], "the body of scan")
    carry = fixed[params["num_consts"] :]
    check_operands(carry, jaxpr.out_avals[:num_carry], "the carry that scan's body returns")
    return _results(**params)


def _results(*, jaxpr: ClosedJaxpr, length: int, num_carry: int, **_: Any) -> list[ShapedArray]:
    carry, ys = split_list(jaxpr.out_avals, [num_carry])
    return [*carry, *(stacked_aval(a, length) for a in ys)]


def _impl(
    xp: Any,
    *operands: Any,
    jaxpr: ClosedJaxpr,
    length: int,
    reverse: bool,
    num_consts: int,
    num_carry: int,
    unroll: int,
) -> Any:
    consts, carry, xs = split_list(operands, [num_consts, num_carry])
    y_avals = jaxpr.out_avals[num_carry:]
    ys = [xp.empty((length, *a.shape), a.dtype) for a in y_avals]
    for k in reversed(range(length)) if reverse else range(length):
        outs = impl_jaxpr(xp, jaxpr, *consts, *carry, *(x[k] for x in xs))
        carry = outs[:num_carry]
        for stacked, y in zip(ys, outs[num_carry:], strict=True):
            stacked[k] = y
    return [*carry, *ys]


def _bind(
    jaxpr: ClosedJaxpr, consts: Any, carry: Any, xs: Any, params: dict[str, Any], **changes: Any
) -> list[Any]:
    return scan_p.bind(
        *consts,
        *carry,
        *xs,
        **(params | {"jaxpr": jaxpr, "num_consts": len(consts), "num_carry": len(carry)} | changes),
    )


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    jaxpr, sizes = params["jaxpr"], [params["num_consts"], params["num_carry"]]
    consts, init, xs = split_list(primals, sizes)
    parts = split_list(tangents, sizes)
    const_flags, flags, x_flags = (nonzero(p) for p in parts)
    ys = [False] * (len(jaxpr.out_avals) - len(init))
    while True:
        body, out = jvp_jaxpr(jaxpr, [*const_flags, *flags, *x_flags], [*flags, *ys])
        if out[: len(flags)] == flags:
            break
        flags = [a or o for a, o in zip(flags, out, strict=False)]
    y_flags = out[len(flags) :]
    c_dot = [t for t in parts[0] if not isinstance(t, Zero)]
    i_dot = [instantiate(t) for t, f in zip(parts[1], flags, strict=True) if f]
    x_dot = [t for t in parts[2] if not isinstance(t, Zero)]
    counts = [len(consts), len(init), len(xs), len(c_dot), len(i_dot)]
    body = _group_tangents(body, counts, len(jaxpr.out_avals))
    n_in = len(consts) + len(c_dot)
    moving = [_match(t, a) for t, a in zip(i_dot, body.in_avals[n_in + len(init) :], strict=False)]
    outs = _bind(body, [*consts, *c_dot], [*init, *moving], [*xs, *x_dot], params)
    carry, carry_dot, ys_out, ys_dot = split_list(outs, [len(init), len(moving), len(ys)])
    avals = [a.tangent() for a in _results(**params)]
    return [*carry, *ys_out], spread([*flags, *y_flags], [*carry_dot, *ys_dot], avals)


def _match(x: Any, aval: ShapedArray) -> Any:
    return widen(x, aval.update(weak_type=typeof(x).weak_type and aval.weak_type))


def _group_tangents(body: ClosedJaxpr, counts: list[int], num_out: int) -> ClosedJaxpr:
    """From (consts, carry, xs, their tangents) to consts with tangents, then carries, then xs."""
    nc, ni, nx, nct, nit = counts
    c, i, x, ct, it, xt = split_list(body.in_avals, [nc, ni, nx, nct, nit])

    def f(*args: Any) -> list[Any]:
        c, ct, i, it, x, xt = split_list(args, [nc, nct, ni, nit, nx])
        outs = eval_closed(body, *c, *i, *x, *ct, *it, *xt)
        carry, ys, carry_dot, ys_dot = split_list(outs, [ni, num_out - ni, nit])
        carry_dot = [widen(t, a) for t, a in zip(carry_dot, it_avals, strict=True)]
        return [*carry, *carry_dot, *ys, *ys_dot]

    out_dots = body.out_avals[num_out : num_out + nit]
    it_avals = [
        a.update(weak_type=a.weak_type and o.weak_type, vma=a.vma | o.vma)
        for a, o in zip(it, out_dots, strict=True)
    ]
    return close(f, [*c, *ct, *i, *it_avals, *x, *xt], body.jaxpr.name)


def _linearize(trace: LinearizeTrace, primals: Any, tangents: Any, **params: Any) -> Any:
    """A primal scan that stacks residuals, and a linear scan that reads them.

    A fixed point tells which parts of the carry have a tangent: those that the body makes of such a
    part have one too.
    """
    jaxpr, sizes = params["jaxpr"], [params["num_consts"], params["num_carry"]]
    consts, init, xs = split_list(primals, sizes)
    parts = split_list(tangents, sizes)
    const_flags, flags, x_flags = (nonzero(p) for p in parts)
    ys = [False] * (len(jaxpr.out_avals) - len(init))
    while True:
        cut = linearize_jaxpr(jaxpr, [*const_flags, *flags, *x_flags], [*flags, *ys])
        if cut.out_nonzero[: len(flags)] == flags:
            break
        flags = [a or o for a, o in zip(flags, cut.out_nonzero, strict=False)]
    primal, linear, once = _hoist_invariant(cut, len(consts), len(jaxpr.out_avals))
    fixed = eval_closed(once, *consts)
    outs = _bind(primal, consts, init, xs, params)
    outs, stacked = split_list(outs, [len(jaxpr.out_avals)])
    c_dot = [t for t in parts[0] if not isinstance(t, Zero)]
    x_dot = [t for t in parts[2] if not isinstance(t, Zero)]
    moving = [t for t, f in zip(parts[1], flags, strict=True) if f]
    body = _linear_body(linear, len(fixed), len(stacked), len(c_dot), len(moving))
    with current_trace(trace.tangent_trace):
        carry_avals = body.in_avals[len(fixed) + len(c_dot) :]
        moving = [_match(instantiate(t), a) for t, a in zip(moving, carry_avals, strict=False)]
    operands = [*fixed, *c_dot, *moving, *stacked, *x_dot]
    changes = {
        "jaxpr": body,
        "num_consts": len(fixed) + len(c_dot),
        "num_carry": len(moving),
    }
    out_dots = trace.bind_linear(scan_p, operands, params | changes)
    avals = [a.tangent() for a in _results(**params)]
    return outs, spread(cut.out_nonzero, out_dots, avals)


def _hoist_invariant(
    cut: Linearized, num_consts: int, num_out: int
) -> tuple[ClosedJaxpr, ClosedJaxpr, ClosedJaxpr]:
    """Don't stack residuals that are the same in every iteration.

    Returns the primal body without them, the linear body with them first, and the jaxpr that
    computes them from the loop's constants.
    """
    primal = cut.primal.jaxpr
    varying = dependents(primal, primal.invars[num_consts:])
    for eqn in primal.eqns:
        if eqn.effects:
            varying.update(eqn.outvars)
    residuals = primal.outvars[num_out:]
    is_fixed = [v not in varying for v in residuals]
    moving, fixed = partition_list(is_fixed, residuals)
    # Equations with effects stay in the loop; no invariant value depends on them.
    without = [eqn for eqn in primal.eqns if not eqn.effects]
    before = primal.replace(invars=primal.invars[:num_consts], eqns=without, outvars=fixed)
    once, _ = dce(before, [True] * len(fixed))
    outs = [*primal.outvars[:num_out], *moving]
    smaller, _ = dce(primal.replace(outvars=outs), [True] * len(outs))
    linear = cut.linear.jaxpr
    ins, rest = linear.invars[: len(residuals)], linear.invars[len(residuals) :]
    moving_ins, fixed_ins = partition_list(is_fixed, ins)
    reordered = linear.replace(invars=[*fixed_ins, *moving_ins, *rest])
    return (
        ClosedJaxpr(smaller, cut.primal.consts),
        ClosedJaxpr(reordered, cut.linear.consts),
        ClosedJaxpr(once, cut.primal.consts),
    )


def _linear_body(linear: ClosedJaxpr, nf: int, ns: int, nct: int, nit: int) -> ClosedJaxpr:
    """From (fixed, stacked residuals, const, carry, x tangents) to scan's order of inputs."""
    f, s, ct, it, xt = split_list(linear.in_avals, [nf, ns, nct, nit])

    def body(*args: Any) -> list[Any]:
        f, ct, it, s, xt = split_list(args, [nf, nct, nit, ns])
        outs = eval_closed(linear, *f, *s, *ct, *it, *xt)
        return [*(widen(x, typeof(a)) for x, a in zip(outs[:nit], it, strict=True)), *outs[nit:]]

    return close(body, [*f, *ct, *it, *s, *xt], linear.jaxpr.name)


def _transpose(cts: Any, *operands: Any, **params: Any) -> Any:
    """Run the linear body the other way: its carry is (cotangents of consts, of the carry)."""
    jaxpr, sizes = params["jaxpr"], [params["num_consts"], params["num_carry"]]
    consts, init, xs = split_list(operands, sizes)
    c_lin, i_lin, x_lin = ([isinstance(x, Linear) for x in p] for p in (consts, init, xs))
    if not all(i_lin):
        jaxpr, known = open_calls(jaxpr, c_lin, i_lin, x_lin)
        if any(known):
            return _transpose_rest(known, cts, operands, params | {"jaxpr": jaxpr})
    # A given initial value of a carry that becomes linear is an instantiated zero tangent: its
    # cotangent is computed like the others' and dropped.
    if not all(lin or is_inexact(typeof(x).dtype) for lin, x in zip(i_lin, init, strict=True)):
        raise GradError(
            f"{current_source()}: lax.scan: cannot transpose a scan whose integer carry depends on "
            "a value that is being transposed"
        )
    known_c, lin_c = partition_list(c_lin, consts)
    known_x, _ = partition_list(x_lin, xs)
    ct_carry, ct_ys = split_list([instantiate(ct) for ct in cts], [params["num_carry"]])
    which = c_lin, [True] * len(init), x_lin

    def bind(cells: list[Cell]) -> list[Any]:
        # Arrays that rules of the user write to are carried, before the cotangents.
        body = _backward_body(jaxpr, which, [typeof(ct) for ct in ct_ys], cells)
        carry_avals = body.in_avals[len(known_c) + len(cells) :]
        sums = [zeros_like_aval(a) for a in carry_avals[: len(lin_c)]]
        start = [_match(x, a) for x, a in zip([*sums, *ct_carry], carry_avals, strict=False)]
        start = [*values_of(cells), *start]
        rows = [*known_x, *ct_ys]
        outs = _bind(body, known_c, start, rows, params, reverse=not params["reverse"])
        put_back(cells, outs[: len(cells)])
        return outs[len(cells) :]

    ct_consts, ct_init, ct_xs = split_list(with_cells(bind), [len(lin_c), len(init)])
    return [
        *merge_lists(c_lin, [None] * len(known_c), ct_consts),
        *(ct if lin else None for ct, lin in zip(ct_init, i_lin, strict=True)),
        *merge_lists(x_lin, [None] * len(known_x), ct_xs),
    ]


def _transpose_rest(
    known: list[bool], cts: Any, operands: Any, params: dict[str, Any]
) -> list[Any]:
    """Run the known part of the carry (a counter, say) forward first, then transpose the rest."""
    nc, ni = params["num_consts"], params["num_carry"]
    consts, init, xs = split_list(operands, [nc, ni])
    linear = [isinstance(x, Linear) for x in operands]
    linear[nc : nc + ni] = [not k for k in known]
    ahead, rest, num_residuals = split_known(params["jaxpr"], known, linear, nc)
    given = [[x for x in part if not isinstance(x, Linear)] for part in (consts, xs)]
    moving, fixed = partition_list(known, init)
    found = _bind(ahead, given[0], fixed, given[1], params)
    residuals = found[len(fixed) :]
    ct_carry, ct_ys = split_list(cts, [ni])
    ct_moving = [ct for ct, k in zip(ct_carry, known, strict=True) if not k]
    changes = {"jaxpr": rest, "num_carry": len(moving)}
    outs = _transpose([*ct_moving, *ct_ys], *consts, *moving, *residuals, *xs, **(params | changes))
    ct_consts, ct_init, _, ct_xs = split_list(outs, [nc, len(moving), num_residuals])
    return [*ct_consts, *merge_lists(known, ct_init, [None] * len(fixed)), *ct_xs]


def _backward_body(
    jaxpr: ClosedJaxpr, which: Any, ct_y_avals: list[ShapedArray], cells: Sequence[Cell]
) -> ClosedJaxpr:
    """The body of the transposed scan: sums and cotangents of carry and ys, one step back."""
    c_lin, i_lin, x_lin = which
    c, i, x = split_list(jaxpr.in_avals, [len(c_lin), len(i_lin)])
    known_c, lin_c = partition_list(c_lin, c)
    known_x, _ = partition_list(x_lin, x)
    y_avals = [sliced_aval(a, 0) for a in ct_y_avals]
    counts = [len(known_c), len(cells), len(lin_c), len(i), len(known_x)]

    def body(*args: Any) -> list[Any]:
        cs, values, sums, ct_carry, x_known, ct_ys = split_list(args, counts)
        operands = [
            *merge_lists(c_lin, cs, [Linear(a) for a in lin_c]),
            *(Linear(a) for a in i),
            *merge_lists(x_lin, x_known, [Linear(a) for a in partition_list(x_lin, x)[1]]),
        ]
        with held(cells, values):
            found = backward_pass(jaxpr.jaxpr, jaxpr.consts, operands, [*ct_carry, *ct_ys])
            after = values_of(cells)
        found = [instantiate(ct) for ct in found if ct is not None]
        ct_c, ct_i, ct_x = split_list(found, [len(lin_c), len(i)])
        return [
            *after,
            *(_strong(add_any(s, ct), a) for s, ct, a in zip(sums, ct_c, lin_c, strict=True)),
            *(_strong(ct, a) for ct, a in zip(ct_i, i, strict=True)),
            *ct_x,
        ]

    def strong(avals: list[ShapedArray]) -> list[ShapedArray]:
        return [a.strip_weak() for a in avals]

    held_avals = [cell.aval for cell in cells]
    ins = [*known_c, *held_avals, *strong(lin_c), *strong(i), *known_x, *y_avals]
    return close(body, ins, f"transpose_{jaxpr.jaxpr.name}")


def _strong(x: Any, aval: ShapedArray) -> Any:
    return widen(x, aval.strip_weak())


def _batch(axis: Any, operands: Any, at: Any, **params: Any) -> Any:
    jaxpr, sizes = params["jaxpr"], [params["num_consts"], params["num_carry"]]
    consts, init, xs = split_list(operands, sizes)
    c_at, i_at, x_at = split_list(at, sizes)
    c_flags, flags, x_flags = ([d is not None for d in part] for part in (c_at, i_at, x_at))
    ys = [False] * (len(jaxpr.out_avals) - len(init))
    while True:
        body, out = batch_jaxpr(jaxpr, axis, [*c_flags, *flags, *x_flags], [*flags, *ys])
        if out[: len(flags)] == flags:
            break
        flags = [a or o for a, o in zip(flags, out, strict=False)]
    consts = [x if d is None else move_dim(x, d, 0) for x, d in zip(consts, c_at, strict=True)]
    init = [
        to_front(x, d, axis.size) if f else x for x, d, f in zip(init, i_at, flags, strict=True)
    ]
    # The loop runs over dim 0 of xs, so the batched dim comes second there.
    xs = [x if d is None else move_dim(x, d, 1) for x, d in zip(xs, x_at, strict=True)]
    n = len(consts)
    init = [_match(x, a) for x, a in zip(init, body.in_avals[n:], strict=False)]
    outs = _bind(_retype_carry(body, [typeof(x) for x in init]), consts, init, xs, params)
    y_flags = out[len(flags) :]
    return outs, [*(0 if f else None for f in flags), *(1 if f else None for f in y_flags)]


def _known(unknown: Sequence[bool], params: dict[str, Any]) -> Any:
    """A shorter scan, of the carry and the ys that depend on nothing unknown."""
    nc, ni = params["num_consts"], params["num_carry"]
    body, given, found = known_loop(params["jaxpr"], *split_list(unknown, [nc, ni]))
    counts = {"num_consts": sum(given[:nc]), "num_carry": sum(given[nc : nc + ni])}
    return given, found, params | {"jaxpr": body} | counts


scan_p = Primitive(
    "scan",
    abstract=_abstract,
    impl=_impl,
    jvp=_jvp,
    linearize=_linearize,
    transpose=_transpose,
    batch=_batch,
    known=_known,
    dce=scan_dce,
    dims=Refused("the body of a scan is partitioned by itself"),
    multiple=True,
    vma="given",
    axes=inner_axes("jaxpr"),
    effects=inner_effects("jaxpr"),
)
