"""Forward mode for users: `jvp` and `linearize`, over pytrees, with checks and clear errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

from spmd.api.flat import FlatFunction, Residual, as_array, as_derivative, check_varies
from spmd.api.mutable_arguments import CellArguments, has_cells, write_tangents
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, GradError, PytreeError, ShapeError
from spmd.base.source import current_source
from spmd.base.tree import (
    tree_flatten,
)
from spmd.base.util import api_boundary, function_name
from spmd.core.argument_names import (
    check_arrays,
    leaf_names,
)
from spmd.core.aval import ShapedArray, typeof
from spmd.core.axis import cast_to_vma
from spmd.core.ir import ClosedJaxpr
from spmd.core.jvp import jvp_flat
from spmd.core.linearize import linearize_flat
from spmd.core.mutable.cells import values_of
from spmd.core.primitive import Zero
from spmd.core.rewrite import eval_closed

R = TypeVar("R")


@overload
def jvp(
    fun: Callable[..., R],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: Literal[False] = False,
) -> tuple[R, R]: ...


@overload
def jvp(
    fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool
) -> tuple[Any, ...]: ...


@api_boundary
def jvp(
    fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> Any:
    """Push tangents forward: compute `fun(*primals)` and its derivative along `tangents`.

    The result is the pair (value, tangent), of equal structure, shapes and dtypes; with
    `has_aux=True`, `fun` returns (value, aux) and the result is (value, tangent, aux). `primals`
    and `tangents` are tuples of equal structure, and each tangent has the shape and dtype of its
    primal (float0 for an integer or boolean one). Those of mutable arrays are mutable arrays, which
    are left with the tangent of the last value.

    Raises `ArgumentError` if they are no tuples, `PytreeError` or `ShapeError` if they do not
    match, and `GradError` if an integer has a tangent of another dtype than float0.

    >>> spmd.jvp(lambda x: x * x, (3.0,), (1.0,))
    (Array(9., dtype=float32, weak_type=True), Array(6., dtype=float32, weak_type=True))
    """
    if type(primals) is not type(tangents) or not isinstance(primals, (tuple, list)):
        raise ArgumentError(
            f"{current_source()}: jvp({function_name(fun)}): primals and tangents must be tuples, "
            f"got {type(primals).__name__} and {type(tangents).__name__}"
        )
    if has_cells(primals):
        return _jvp_with_cells(fun, primals, tangents, has_aux)
    flat, in_tree = tree_flatten((tuple(primals), {}))
    flat_tangents, tangent_tree = tree_flatten((tuple(tangents), {}))
    if in_tree != tangent_tree:
        raise PytreeError(
            f"{current_source()}: jvp({function_name(fun)}): primals and tangents must have the "
            f"same structure, got {in_tree} and {tangent_tree}"
        )
    names = leaf_names(fun, primals)
    check_arrays(f"jvp({function_name(fun)})", names, flat)
    pushed = [
        _check_tangent(fun, n, typeof(x), t, casts=True)
        for n, x, t in zip(names, flat, flat_tangents, strict=True)
    ]
    flat_f = FlatFunction(fun, in_tree, has_aux)
    outs, out_tangents = jvp_flat(flat_f, flat, pushed)
    outs = [as_array(x) for x in outs]
    moved = [as_derivative(t) for t in out_tangents]
    value, tangent = flat_f.value(outs), flat_f.value(moved)
    return (value, tangent, flat_f.aux(outs)) if has_aux else (value, tangent)


def _jvp_with_cells(
    fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool
) -> Any:
    call = CellArguments(f"jvp({function_name(fun)})", fun, primals, has_aux)
    moving, others = call.tangents(tangents)
    found = jvp(call.pure, call.primals, (values_of(moving), others), has_aux)
    (out, after), (tangent, tangents_after) = found[:2]
    call.write(after)
    write_tangents(moving, tangents_after)
    return out, tangent, *found[2:]


def _check_tangent(fun: Any, name: str, aval: ShapedArray, t: Any, casts: bool = False) -> Any:
    want, got = aval.tangent(), typeof(t)
    if want.dtype == dtypes.float0:
        if got.dtype != dtypes.float0:
            raise GradError(
                f"{current_source()}: jvp({function_name(fun)}): {name} has dtype "
                f"{aval.dtype}, so its tangent must have dtype float0, got {got}"
            )
        if want.shape != got.shape:
            raise ShapeError(
                f"{current_source()}: jvp({function_name(fun)}): {name} has shape {want.shape}, "
                f"so its tangent must have it too, got float0{list(got.shape)}"
            )
        return Zero(want)
    if want.shape != got.shape or want.dtype != got.dtype:
        raise ShapeError(
            f"{current_source()}: jvp({function_name(fun)}): the tangent of {name} must be "
            f"{want.dtype}{list(want.shape)} like its primal, got {got.dtype}{list(got.shape)}"
        )
    if casts:
        t = cast_to_vma(t, want.vma, got.vma)
    check_varies(f"jvp({function_name(fun)}): the tangent of {name}", want, typeof(t))
    return t


@overload
def linearize(
    fun: Callable[..., R], *primals: Any, has_aux: Literal[False] = False
) -> tuple[R, Callable[..., R]]: ...


@overload
def linearize(
    fun: Callable[..., Any], *primals: Any, has_aux: Literal[True]
) -> tuple[Any, Callable[..., Any], Any]: ...


@api_boundary
def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Evaluate `fun` and return the linear function that maps tangents in to tangents out.

    The result is the pair (value, pushforward); with `has_aux=True`, `fun` returns (value, aux) and
    the result is (value, pushforward, aux). `pushforward` takes one tangent for each of `primals`,
    of its shape and dtype. It holds what `fun` computed, so each call of it does the linear work
    only; it is a pytree of that, which jitted functions may return and take. It raises
    `PytreeError` or `ShapeError` for tangents that do not match.

    >>> y, f_jvp = spmd.linearize(lambda x: x * x, 3.0)
    >>> f_jvp(1.0), f_jvp(10.0)
    (Array(6., dtype=float32, weak_type=True), Array(60., dtype=float32, weak_type=True))
    """
    if has_cells(primals):
        return _linearize_with_cells(fun, primals, has_aux)
    flat, in_tree = tree_flatten((primals, {}))
    names = leaf_names(fun, primals)
    check_arrays(f"linearize({function_name(fun)})", names, flat)
    flat_f = FlatFunction(fun, in_tree, has_aux)
    nonzero = [dtypes.is_inexact(typeof(x).dtype) for x in flat]
    # Kept values must not change when the caller writes to a NumPy array later.
    flat = [as_array(x) if nz else x for x, nz in zip(flat, nonzero, strict=True)]
    outs, linear, out_nonzero = linearize_flat(flat_f, flat, nonzero)
    outs = [as_array(x) for x in outs]

    avals, out_avals = [typeof(x) for x in flat], [typeof(x).tangent() for x in outs]

    def push(linear: ClosedJaxpr, *tangents: Any) -> Any:
        given, tree = tree_flatten((tangents, {}))
        if tree != in_tree:
            raise PytreeError(
                f"{current_source()}: the linearized {function_name(fun)} takes tangents of "
                f"structure {in_tree}, got {tree}"
            )
        moved = [_check_tangent(fun, n, a, t) for n, a, t in zip(names, avals, given, strict=True)]
        found = iter(eval_closed(linear, *[t for t, nz in zip(moved, nonzero, strict=True) if nz]))
        full = [
            next(found) if nz else Zero(a) for nz, a in zip(out_nonzero, out_avals, strict=True)
        ]
        return flat_f.value([as_derivative(t) for t in full])

    value, pushforward = flat_f.value(outs), Residual(push, linear)
    return (value, pushforward, flat_f.aux(outs)) if has_aux else (value, pushforward)


def _linearize_with_cells(fun: Callable[..., Any], primals: Sequence[Any], has_aux: bool) -> Any:
    call = CellArguments(f"the linearized {function_name(fun)}", fun, primals, has_aux)
    split: Any = linearize  # whose overloads take literals only
    (out, after), pushforward, *aux = split(call.pure, *call.primals, has_aux=has_aux)
    call.write(after)

    def push(*tangents: Any) -> Any:
        moving, others = call.tangents(tangents)
        tangent, tangents_after = pushforward(values_of(moving), others)
        write_tangents(moving, tangents_after)
        return tangent

    return out, push, *aux
