"""Jacobians and Hessians: forward or reverse mode, vectorised over a basis of unit vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import numpy as np

from spmd.api.flat import check_function, is_float0, normal_argnums, partial_of, plain_argnums
from spmd.api.forward import jvp
from spmd.api.reverse import check_differentiable, check_field, pull_flat, vjp_flat
from spmd.api.vectorize import vmap
from spmd.base import dtypes
from spmd.base.errors import GradError
from spmd.base.source import current_source
from spmd.base.tree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from spmd.base.util import api_boundary, described, function_name
from spmd.core.aval import ShapedArray, typeof
from spmd.core.explicit import match_type, stacked_aval
from spmd.sharding.array import from_numpy

P = ParamSpec("P")


def _basis(leaves: Sequence[Any]) -> list[Any]:
    """For leaves of n elements in all: for each leaf, the n unit tangents' parts, stacked first."""
    avals = [typeof(x) for x in leaves]
    total = sum(a.size for a in avals)
    out = []
    start = 0
    for a in avals:
        part = np.eye(total, a.size, -start, dtype=a.dtype)
        shape = (total, *a.shape)
        unit = from_numpy(part.reshape(shape), ShapedArray(shape, a.dtype, a.weak_type))
        out.append(match_type(unit, stacked_aval(a, total)))
        start += a.size
    return out


def _cut_rows(stacked: Any, leaves: Sequence[Any], dim: int) -> list[Any]:
    """Cut dim `dim` of `stacked` into the shapes of `leaves`."""
    out = []
    start = 0
    shape = typeof(stacked).shape
    for a in (typeof(x) for x in leaves):
        index = (*(slice(None),) * dim, slice(start, start + a.size))
        out.append(stacked[index].reshape((*shape[:dim], *a.shape, *shape[dim + 1 :])))
        start += a.size
    return out


def _zeros_of_integers(derivative: Any, dtype: np.dtype) -> Any:
    """A derivative; that of an integer, which is of float0, as zeros of the integer's dtype."""
    aval = typeof(derivative)
    if not is_float0(aval):
        return derivative
    return from_numpy(np.zeros(aval.shape, dtype), ShapedArray(aval.shape, dtype))


def _name(what: str, fun: Any) -> str:
    return f"{current_source()}: {what}({function_name(fun)})"


def _check_real_arguments(fun: Any, some: Any, holomorphic: bool) -> None:
    """Refuse complex arguments of a function that is not holomorphic: they move in two directions.

    A tangent of one along the real axis alone would say nothing of the other.
    """
    for dtype in [typeof(x).dtype for x in tree_leaves(some)]:
        if dtypes.is_complex(dtype) and not holomorphic:
            raise GradError(
                f"{_name('jacfwd', fun)}: an argument is {dtype}; pass its real and imaginary "
                "parts, or use holomorphic=True, or jacrev"
            )


def _check_outputs(fun: Any, outs: Sequence[Any], holomorphic: bool) -> None:
    """Refuse outputs that have no row of a Jacobian."""
    for dtype in [typeof(x).dtype for x in outs]:
        if not dtypes.is_inexact(dtype):
            raise GradError(
                f"{_name('jacrev', fun)}: the function returned dtype {dtype}, which has no "
                "derivative; return it by has_aux=True, or use vjp, which takes float0 for it"
            )
    check_field(_name("jacrev", fun), outs, holomorphic)


def jacfwd(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[P, Any]:
    """Make the function that computes the Jacobian of `fun` in forward mode, column by column.

    For an output of shape `S` and an argument of shape `T` the Jacobian has shape `S + T` and the
    output's dtype; that of an integer output is zeros. Forward mode is best for few inputs.
    `argnums` and `has_aux` are those of `grad`. Complex arguments need `holomorphic=True`. Raises
    `GradError` for them otherwise, and for arguments that are not of a floating dtype.

    >>> spmd.jacfwd(lambda x: x**2)(np.array([1.0, 2.0]))
    Array([[2., 0.],
           [0., 4.]], dtype=float32)
    """

    check_function("jacfwd", fun)
    argnums = plain_argnums(argnums)

    @api_boundary
    @described(fun, "The Jacobian of {0} with respect to argument(s) {1}.", argnums)
    def jacobian(*args: P.args, **kwargs: P.kwargs) -> Any:
        nums = normal_argnums(fun, argnums, len(args))
        check_differentiable(fun, nums, args, holomorphic, False, "jacfwd")
        some = tuple(args[k] for k in nums)
        _check_real_arguments(fun, some, holomorphic)
        f = partial_of(fun, nums, args, kwargs)
        leaves, tree = tree_flatten(some)

        def push(*tangents: Any) -> Any:
            out = jvp(f, some, tree_unflatten(tree, tangents), has_aux)
            if holomorphic:
                check_field(_name("jacfwd", fun), tree_leaves(out[0]), holomorphic)
            tangents = tree_map(lambda y, t: _zeros_of_integers(t, typeof(y).dtype), *out[:2])
            return (tangents, out[2]) if has_aux else tangents

        out_axes: Any = (-1, None) if has_aux else -1
        moved = vmap(push, out_axes=out_axes)(*_basis(leaves))
        columns, extra = moved if has_aux else (moved, None)

        def cut(y: Any) -> Any:
            parts = _cut_rows(y, leaves, typeof(y).ndim - 1)
            found = tree_unflatten(tree, parts)
            return found[0] if isinstance(argnums, int) else found

        out = tree_map(cut, columns)
        return (out, extra) if has_aux else out

    return jacobian


def jacrev(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]:
    """Make the function that computes the Jacobian of `fun` in reverse mode, row by row.

    For an output of shape `S` and an argument of shape `T` the Jacobian has shape `S + T` and the
    argument's dtype. Reverse mode is best for few outputs. `argnums`, `has_aux` and `allow_int` are
    those of `grad`; the Jacobian with respect to an integer is zeros of its dtype. Raises
    `GradError` if an output is not real and floating (complex, with
    `holomorphic=True`), or if an argument is not of a floating dtype.

    >>> spmd.jacrev(lambda x: x.sum() * x)(np.array([1.0, 2.0]))
    Array([[4., 1.],
           [2., 5.]], dtype=float32)
    """

    check_function("jacrev", fun)
    argnums = plain_argnums(argnums)

    @api_boundary
    @described(fun, "The Jacobian of {0} with respect to argument(s) {1}.", argnums)
    def jacobian(*args: P.args, **kwargs: P.kwargs) -> Any:
        nums = normal_argnums(fun, argnums, len(args))
        check_differentiable(fun, nums, args, holomorphic, allow_int, "jacrev")
        some = tuple(args[k] for k in nums)
        outs, flat_f, pullback = vjp_flat(partial_of(fun, nums, args, kwargs), some, has_aux)
        leaves = outs[: flat_f.num_out]
        _check_outputs(fun, leaves, holomorphic)
        rows = vmap(lambda *cts: pull_flat(pullback, cts))(*_basis(leaves))

        # rows[k] stacks, for argument leaf k, one row for each element of the outputs.
        kinds = [typeof(x).dtype for x in tree_leaves(some)]
        rows = [_zeros_of_integers(row, d) for row, d in zip(rows, kinds, strict=True)]
        cut = [_cut_rows(row, leaves, 0) for row in rows]
        found = []
        for j in range(len(leaves)):
            args_j, _ = tree_unflatten(flat_f.in_tree, [parts[j] for parts in cut])
            found.append(args_j[0] if isinstance(argnums, int) else tuple(args_j))
        out = tree_unflatten(flat_f.out_tree, found)  # type: ignore[arg-type]
        return (out, flat_f.aux(outs)) if has_aux else out

    return jacobian


jacobian = jacrev


def hessian(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[P, Any]:
    """Make the function that computes the second derivatives of `fun`, forward over reverse.

    For an output of shape `S` and an argument of shape `T` the result has shape `S + T + T`.
    `argnums`, `has_aux` and `holomorphic` are those of `jacrev`, and so are the errors: `GradError`
    if an argument or an output is not of a floating dtype.

    >>> spmd.hessian(lambda x: x * x * x)(2.0)
    Array(12., dtype=float32, weak_type=True)
    >>> spmd.hessian(lambda x: x[0] ** 2 * x[1])(np.array([3.0, 5.0]))
    Array([[10.,  6.],
           [ 6.,  0.]], dtype=float32)
    """
    inner = jacrev(fun, argnums, has_aux=has_aux, holomorphic=holomorphic)
    return jacfwd(inner, argnums, has_aux=has_aux, holomorphic=holomorphic)
