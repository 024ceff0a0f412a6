"""Jacobians and Hessians: forward or reverse mode, vectorised over a basis of unit vectors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.api.flat import normal_argnums, partial_of
from spmd.api.forward import jvp
from spmd.api.reverse import check_differentiable, vjp_flat
from spmd.api.vectorize import vmap
from spmd.core.aval import ShapedArray, typeof
from spmd.core.tree import (
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from spmd.sharding.array import from_numpy


def _basis(leaves: Sequence[Any]) -> list[Any]:
    """For leaves of n elements in all: for each leaf, the n unit tangents' parts, stacked first."""
    avals = [typeof(x) for x in leaves]
    total = sum(a.size for a in avals)
    out = []
    start = 0
    for a in avals:
        part = np.eye(total, a.size, -start, dtype=a.dtype)
        shape = (total, *a.shape)
        out.append(from_numpy(part.reshape(shape), ShapedArray(shape, a.dtype, a.weak_type)))
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


def jacfwd(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """The Jacobian, column by column in forward mode: best for few inputs.

    For an output of shape `S` and an argument of shape `T` it has shape `S + T`.
    """

    @functools.wraps(fun)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        nums = normal_argnums(fun, argnums, len(args))
        check_differentiable(fun, nums, args, holomorphic, False)
        some = tuple(args[k] for k in nums)
        f = partial_of(fun, nums, args, kwargs)
        leaves, tree = tree_flatten(some)
        aux: list[Any] = []

        def push(*tangents: Any) -> Any:
            out = jvp(f, some, tree_unflatten(tree, tangents), has_aux)
            aux[:] = [out[2]] if has_aux else []
            return (out[1], out[2]) if has_aux else out[1]

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
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """The Jacobian, row by row in reverse mode: best for few outputs.

    For an output of shape `S` and an argument of shape `T` it has shape `S + T`.
    """

    @functools.wraps(fun)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        nums = normal_argnums(fun, argnums, len(args))
        check_differentiable(fun, nums, args, holomorphic, allow_int)
        some = tuple(args[k] for k in nums)
        outs, flat_f, pullback = vjp_flat(partial_of(fun, nums, args, kwargs), some, has_aux)
        leaves = outs[: flat_f.num_out]
        rows = vmap(lambda *cts: pullback.flat(cts))(*_basis(leaves))

        # rows[k] stacks, for argument leaf k, one row for each element of the outputs.
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
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """The matrix of second derivatives, forward over reverse.

    >>> hessian(lambda x: x * x * x)(2.0)
    Array(12., dtype=float32, weak_type=True)
    """
    inner = jacrev(fun, argnums, has_aux=has_aux, holomorphic=holomorphic)
    return jacfwd(inner, argnums, has_aux=has_aux, holomorphic=holomorphic)
