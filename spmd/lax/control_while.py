"""`while_loop` and `fori_loop`: repeat until a traced condition fails.

A `while_loop` can be differentiated forwards only: in reverse, an unknown number of residuals would
have to be kept. A `fori_loop` of known length is a `scan`, which can.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.context import current_trace
from spmd.base.errors import ArgumentError, DtypeError, ShapeError
from spmd.base.source import current_source
from spmd.base.tree import tree_flatten, tree_map, tree_structure, tree_unflatten
from spmd.base.util import api_boundary, split_list
from spmd.core.aval import ShapedArray, typeof
from spmd.core.call import impl_jaxpr, nonzero, refuse_io, spread
from spmd.core.check import check_operands
from spmd.core.ir import ClosedJaxpr
from spmd.core.jvp import instantiate, jvp_jaxpr
from spmd.core.linearize import LinearizeTrace
from spmd.core.mutable.control_flow import while_with_cells
from spmd.core.primitive import Primitive, Refused, Zero
from spmd.core.rewrite import close, dce, drop_inputs, eval_closed
from spmd.core.structural import broadcast_in_dim, to_front
from spmd.core.trace import Tracer
from spmd.core.vmap import batch_jaxpr, fronts
from spmd.lax.arithmetic import add
from spmd.lax.control import (
    Staged,
    inner_axes,
    inner_effects,
    is_concrete,
    retype_outputs,
    settle_carry,
    widen,
    with_weak_types,
)
from spmd.lax.control_dce import while_dce
from spmd.lax.control_known import known_loop
from spmd.lax.control_scan import named_scan
from spmd.lax.convert import convert_element_type, convert_element_type_p
from spmd.lax.logic import lt, select
from spmd.lax.reduce import reduce_or

# ---- public functions --------------------------------------------------------------------------


@api_boundary
def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any
) -> Any:
    """Apply `body_fun` to the carry as long as `cond_fun(carry)` holds.

    `init_val` is the first carry, an array or a pytree, and the result is the last one. `body_fun`
    keeps its structure, shapes and dtypes; a Python number in `init_val` takes the dtype that
    `body_fun` returns. `cond_fun` returns one boolean scalar. The loop is differentiable in forward
    mode only, because the number of steps is unknown; use `scan` or `fori_loop` for reverse mode.
    Under `vmap` the loop runs until all examples are done.

    Raises `ShapeError` if the carry changes its shape or dtype (the message names the leaf) or if
    `cond_fun` returns no scalar, `DtypeError` if it returns no bool, and `PytreeError` if the
    structure changes.

    >>> lax.while_loop(lambda x: x < 100, lambda x: 2 * x, 3)
    Array(192, dtype=int32, weak_type=True)
    """
    return named_while("lax.while_loop", None, cond_fun, body_fun, init_val)


def named_while(
    what: str,
    inside: int | None,
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
) -> Any:
    """`while_loop` for a function that errors call `what`, its user's carry at `inside` of ours."""

    def run(cond_fun: Any, body_fun: Any, init: Any, inside: int | None) -> Any:
        return _bind_while(what, inside, cond_fun, body_fun, init)

    return while_with_cells(run, cond_fun, body_fun, init_val, inside)


def _bind_while(
    what: str,
    inside: int | None,
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
) -> Any:
    flat, tree = tree_flatten(init_val)
    if config.disable_jit and all(is_concrete(x) for x in flat):
        value, going = _python_loop(cond_fun, body_fun, init_val)
        if is_concrete(going):
            return value
    in_tree = tree_flatten((init_val,))[1]
    flat, body, weak = settle_carry(
        what, tree, flat, lambda avals: _stage(body_fun, in_tree, avals), inside
    )
    avals = [typeof(x) for x in flat]
    test = Staged(cond_fun, in_tree, avals)
    _check_test(test)
    outs = while_p.bind(
        *test.consts,
        *body.consts,
        *flat,
        cond_jaxpr=test.closed,
        cond_nconsts=len(test.consts),
        body_jaxpr=retype_outputs(body.closed, avals),
        body_nconsts=len(body.consts),
    )
    return tree_unflatten(tree, with_weak_types(outs, weak))


def _python_loop(cond_fun: Any, body_fun: Any, init_val: Any) -> tuple[Any, Any]:
    """Run a while loop in Python, as `disable_jit` does; return its value and its last condition.

    The condition is a tracer without a value if examples may disagree: the loop is staged.
    """
    value = tree_map(_as_array, init_val)
    going = cond_fun(value)
    while is_concrete(going) and going:
        value = tree_map(_as_array, body_fun(value))
        going = cond_fun(value)
    return value, going


def _as_array(x: Any) -> Any:
    """Numbers as arrays, which compute otherwise than Python does: `~True` is -2."""
    aval = typeof(x)
    if isinstance(x, Tracer) or not isinstance(x, (bool, int, float, complex, np.generic)):
        return x
    return convert_element_type_p.bind(x, new_dtype=aval.dtype, weak_type=aval.weak_type)


def _stage(f: Any, in_tree: Any, avals: list[ShapedArray]) -> Any:
    """The traced body, and the structure and avals of the carry it returns."""
    staged = Staged(f, in_tree, avals, carried=len(avals))
    return staged, staged.out_tree, staged.out_avals


def _check_test(test: Staged) -> None:
    avals = test.out_avals
    if test.out_tree != tree_structure(0) or avals[0].shape:
        got = ", ".join(map(str, avals))
        raise ShapeError(
            f"{current_source()}: lax.while_loop: cond_fun must return one boolean scalar, "
            f"got {got}"
        )
    if not dtypes.is_bool(avals[0].dtype):
        raise DtypeError(
            f"{current_source()}: lax.while_loop: cond_fun must return a bool, got {avals[0]}; "
            "compare explicitly, e.g. x != 0"
        )


@api_boundary
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """Run `val = body_fun(i, val)` for i in `range(lower, upper)`, and return the last value.

    `init_val` is the first value, an array or a pytree whose structure, shapes and dtypes stay.
    With `lower` and `upper` known while tracing, the loop is a `scan`: it is differentiable in
    reverse mode, and the index is of a weak type as a Python number is, so `x + i` has the dtype of
    `x`. With traced bounds it is a `while_loop`. `unroll` is accepted for JAX's sake, and changes
    nothing.

    Raises `DtypeError` if a bound is no integer, and `ShapeError` or `PytreeError` if `body_fun`
    changes the value's type.

    >>> lax.fori_loop(0, 4, lambda i, total: total + i * i, 0)
    Array(14, dtype=int32, weak_type=True)
    >>> spmd.grad(lambda x: lax.fori_loop(0, 3, lambda i, y: y * x, 1.0))(2.0)
    Array(12., dtype=float32, weak_type=True)
    """
    known = is_concrete(lower) and is_concrete(upper)
    if config.disable_jit and known:
        value = init_val
        for i in range(int(lower), int(upper)):
            value = body_fun(i, value)
        return value
    bounds = [typeof(x) for x in (lower, upper)]
    dtype, _ = dtypes.promote(tuple((a.dtype, a.weak_type) for a in bounds))
    numbers = any(a.weak_type for a in bounds) and all(dtypes.is_integer(a.dtype) for a in bounds)
    if bounds[0].dtype != bounds[1].dtype and not numbers:
        raise DtypeError(
            f"{current_source()}: lax.fori_loop: lower and upper must be integers of one dtype, "
            f"got {bounds[0]} and {bounds[1]}; convert one of them with .astype"
        )
    if known and dtypes.is_float(dtype) and all(float(x).is_integer() for x in (lower, upper)):
        lower, upper, dtype = int(lower), int(upper), dtypes.canonical(int)
    if not dtypes.is_integer(dtype):
        raise DtypeError(
            f"{current_source()}: lax.fori_loop: lower and upper must be integers, "
            f"got {bounds[0]} and {bounds[1]}"
        )
    if known:
        start, stop = operator.index(lower), operator.index(upper)

        def step(carry: Any, _: Any) -> Any:
            i, value = carry
            return (add(i, 1), body_fun(i, value)), None

        step.stands_for = body_fun, "fori_loop"  # type: ignore[attr-defined]
        length = max(stop - start, 0)
        (_, out), _ = named_scan(
            "lax.fori_loop", 1, step, (start, init_val), None, length, unroll=unroll or 1
        )
        return out
    if unroll is not None and int(unroll) > 1:
        raise ArgumentError(
            f"{current_source()}: lax.fori_loop: unroll={unroll} needs bounds that are known while "
            "tracing; make them static, or leave unroll out"
        )
    weak = bounds[0].weak_type and bounds[0].dtype == dtype
    limits = (convert_element_type(lower, dtype, weak), convert_element_type(upper, dtype))

    def advance(c: Any) -> Any:
        return add(c[0], 1), c[1], body_fun(c[0], c[2])

    advance.stands_for = body_fun, "fori_loop to a traced bound"  # type: ignore[attr-defined]
    _, _, out = named_while("lax.fori_loop", 2, _is_below, advance, (*limits, init_val))
    return out


def _is_below(carry: Any) -> Any:
    return lt(carry[0], carry[1])


# ---- rules -------------------------------------------------------------------------------------


def _abstract(
    *avals: ShapedArray,
    cond_jaxpr: ClosedJaxpr,
    cond_nconsts: int,
    body_jaxpr: ClosedJaxpr,
    body_nconsts: int,
) -> list[ShapedArray]:
    c, b, carry = split_list(avals, [cond_nconsts, body_nconsts])
    check_operands(cond_jaxpr.in_avals, [*c, *carry], "the condition of while")
    check_operands(body_jaxpr.in_avals, [*b, *carry], "the body of while")
    check_operands(carry, body_jaxpr.out_avals, "the carry that while's body returns")
    return body_jaxpr.out_avals


def _impl(
    xp: Any,
    *operands: Any,
    cond_jaxpr: ClosedJaxpr,
    cond_nconsts: int,
    body_jaxpr: ClosedJaxpr,
    body_nconsts: int,
) -> Any:
    c, b, carry = split_list(operands, [cond_nconsts, body_nconsts])
    while bool(impl_jaxpr(xp, cond_jaxpr, *c, *carry)[0]):
        carry = impl_jaxpr(xp, body_jaxpr, *b, *carry)
    return carry


def _jvp(
    primals: Any,
    tangents: Any,
    *,
    cond_jaxpr: ClosedJaxpr,
    cond_nconsts: int,
    body_jaxpr: ClosedJaxpr,
    body_nconsts: int,
) -> Any:
    """The loop on primals and tangents; which parts of the carry have one is a fixed point."""
    c, b, init = split_list(primals, [cond_nconsts, body_nconsts])
    _, b_dot, init_dot = split_list(tangents, [cond_nconsts, body_nconsts])
    const_flags = nonzero(b_dot)
    flags = nonzero(init_dot)
    while True:
        body, out = jvp_jaxpr(body_jaxpr, [*const_flags, *flags], flags)
        if out == flags:
            break
        flags = [a or o for a, o in zip(flags, out, strict=True)]
    moving = [instantiate(t) for t, f in zip(init_dot, flags, strict=True) if f]
    const_dots = [t for t in b_dot if not isinstance(t, Zero)]
    body = _reorder(body, len(b), len(init), len(const_dots), len(moving))
    test = _ignore_tangents(cond_jaxpr, cond_nconsts, [typeof(t) for t in moving])
    n = len(init)
    outs = while_p.bind(
        *c,
        *b,
        *const_dots,
        *(widen(x, a) for x, a in zip(init, body_jaxpr.out_avals, strict=True)),
        *(_match(t, a) for t, a in zip(moving, body.out_avals[n:], strict=True)),
        cond_jaxpr=test,
        cond_nconsts=cond_nconsts,
        body_jaxpr=body,
        body_nconsts=body_nconsts + len(const_dots),
    )
    outs, out_dots = split_list(outs, [n])
    return outs, spread(flags, out_dots, [a.tangent() for a in body_jaxpr.out_avals])


def _match(x: Any, aval: ShapedArray) -> Any:
    return widen(x, aval.update(weak_type=typeof(x).weak_type and aval.weak_type))


def _reorder(body: ClosedJaxpr, nb: int, nc: int, nbt: int, nct: int) -> ClosedJaxpr:
    """From (consts, carry, const tangents, carry tangents) to consts first, then carries."""
    b, c, bt, ct = split_list(body.in_avals, [nb, nc, nbt])

    def f(*args: Any) -> list[Any]:
        b, bt, c, ct = split_list(args, [nb, nbt, nc])
        return eval_closed(body, *b, *c, *bt, *ct)

    return close(f, [*b, *bt, *c, *ct], body.jaxpr.name)


def _ignore_tangents(test: ClosedJaxpr, nconsts: int, extra: list[ShapedArray]) -> ClosedJaxpr:
    n = len(test.in_avals)
    return close(lambda *args: eval_closed(test, *args[:n]), [*test.in_avals, *extra], "cond")


def _linearize(trace: LinearizeTrace, primals: Any, tangents: Any, **params: Any) -> Any:
    """The linear part is the whole differentiated loop, run again on the primal inputs."""
    outs = while_p.bind(*primals, **params)
    with current_trace(trace.tangent_trace):
        _, out_tangents = _jvp(primals, tangents, **params)
    return outs, out_tangents


def _batch(
    axis: Any,
    operands: Any,
    at: Any,
    *,
    cond_jaxpr: ClosedJaxpr,
    cond_nconsts: int,
    body_jaxpr: ClosedJaxpr,
    body_nconsts: int,
) -> Any:
    """The batched loop; which parts of the carry are batched is a fixed point.

    If examples end at different times, the loop runs until all have, and keeps the carry of those
    that have ended.
    """
    flags = [d is not None for d in at]
    c_flags, b_flags, flags = split_list(flags, [cond_nconsts, body_nconsts])
    inner = body_jaxpr.jaxpr
    # A part of the carry that the body passes on is one for all examples, whenever they are done.
    passed_on = [x is y for x, y in zip(inner.invars[body_nconsts:], inner.outvars, strict=True)]
    while True:
        body, out = batch_jaxpr(body_jaxpr, axis, [*b_flags, *flags], flags)
        _, (test_batched,) = batch_jaxpr(cond_jaxpr, axis, [*c_flags, *flags])
        wanted = [
            a or o or (test_batched and not passed)
            for a, o, passed in zip(flags, out, passed_on, strict=True)
        ]
        if wanted == flags:
            break
        flags = wanted
    test, _ = batch_jaxpr(cond_jaxpr, axis, [*c_flags, *flags])
    c, b, init = split_list(fronts(axis, operands, at), [cond_nconsts, body_nconsts])
    init = [
        to_front(x, None, axis.size) if f and at[k + cond_nconsts + body_nconsts] is None else x
        for k, (x, f) in enumerate(zip(init, flags, strict=True))
    ]
    if test_batched:
        fix = "some examples are done before others, and the body runs for all; use lax.map"
        refuse_io("a while_loop whose condition differs under vmap", fix, cond_jaxpr, body_jaxpr)
        body = _stop_finished(test, body, len(c), len(b), flags)
        b = [*c, *b]
        test = _any(test)
    avals = [typeof(x) for x in init]
    body = retype_outputs(body, avals) if _same_shapes(body, avals) else body
    outs = while_p.bind(
        *c,
        *b,
        *init,
        cond_jaxpr=test,
        cond_nconsts=len(c),
        body_jaxpr=body,
        body_nconsts=len(b),
    )
    return outs, [0 if f else None for f in flags]


def _same_shapes(body: ClosedJaxpr, avals: list[ShapedArray]) -> bool:
    return all(a.shape == b.shape for a, b in zip(body.out_avals, avals, strict=True))


def _any(test: ClosedJaxpr) -> ClosedJaxpr:
    """Go on as long as one example wants to."""

    def f(*args: Any) -> list[Any]:
        (going,) = eval_closed(test, *args)
        return [reduce_or(going, (0,))]

    return close(f, test.in_avals, "any")


def _stop_finished(
    test: ClosedJaxpr, body: ClosedJaxpr, nc: int, nb: int, flags: Sequence[bool]
) -> ClosedJaxpr:
    """Keep the carry of examples whose condition has failed."""
    c_avals = test.in_avals[:nc]
    b_avals, carry_avals = body.in_avals[:nb], body.in_avals[nb:]

    def f(*args: Any) -> list[Any]:
        c, b, carry = split_list(args, [nc, nb])
        (going,) = eval_closed(test, *c, *carry)
        new = eval_closed(body, *b, *carry)
        shapes = [typeof(x).shape for x in new]
        return [
            select(broadcast_in_dim(going, s, (0,)), x, old) if is_batched else old
            for s, x, old, is_batched in zip(shapes, new, carry, flags, strict=True)
        ]

    return close(f, [*c_avals, *b_avals, *carry_avals], body.jaxpr.name)


def _known(unknown: Sequence[bool], params: dict[str, Any]) -> Any:
    """A loop of the carry that depends on nothing unknown, if how often it runs does not."""
    nc, nb = params["cond_nconsts"], params["body_nconsts"]
    test = params["cond_jaxpr"]
    c, b, carry = split_list(unknown, [nc, nb])
    body, given, found = known_loop(params["body_jaxpr"], b, carry, [])
    needed, reads = dce(test.jaxpr, [True])
    keep = [*(not u for u in c), *given[nb:]]
    if any(r and not k for r, k in zip(reads, keep, strict=True)):
        return [False] * len(unknown), [False] * len(found), params
    test = drop_inputs(ClosedJaxpr(needed, test.consts), keep)
    changes = {"cond_jaxpr": test, "cond_nconsts": sum(keep[:nc])}
    changes |= {"body_jaxpr": body, "body_nconsts": sum(given[:nb])}
    return [*keep[:nc], *given], found, changes


while_p = Primitive(
    "while",
    abstract=_abstract,
    impl=_impl,
    jvp=_jvp,
    linearize=_linearize,
    transpose=Refused(
        "reverse-mode differentiation does not work for lax.while_loop, or for lax.fori_loop with "
        "bounds that are not known while tracing: the number of values to keep is unknown. Use "
        "lax.scan, a fori_loop with static bounds, or forward mode (jvp, jacfwd)"
    ),
    batch=_batch,
    known=_known,
    dce=while_dce,
    dims=Refused("the body of a while loop is partitioned by itself"),
    multiple=True,
    vma="given",
    axes=inner_axes("cond_jaxpr", "body_jaxpr"),
    effects=inner_effects("cond_jaxpr", "body_jaxpr"),
)
