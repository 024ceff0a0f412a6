"""Derivatives with respect to sparse arrays: those of the stored elements, at their indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import spmd.numpy as snp
from spmd.api import jacobian, reverse
from spmd.base.tree import tree_flatten, tree_map, tree_unflatten
from spmd.base.util import wraps
from spmd.experimental.sparse.base import JAXSparse
from spmd.experimental.sparse.bcoo import BCOO, full_buffers
from spmd.experimental.sparse.rows import BCSR


def _is_sparse(x: Any) -> bool:
    return isinstance(x, JAXSparse)


def _stored(tree: Any) -> Any:
    """A pytree with the stored elements in the place of sparse arrays."""
    return tree_map(lambda x: x.data if _is_sparse(x) else x, tree, is_leaf=_is_sparse)


def _with_data(x: JAXSparse, data: Any) -> Any:
    (_, *rest), aux = x.tree_flatten()  # type: ignore[attr-defined]
    return type(x).tree_unflatten(aux, (data, *rest))  # type: ignore[attr-defined]


def _restored(tree: Any, values: Any) -> Any:
    """A pytree of stored elements with the indices of the sparse arrays of another."""
    leaves, structure = tree_flatten(tree, is_leaf=_is_sparse)
    data = tree_flatten(values)[0]
    found = [_with_data(x, d) if _is_sparse(x) else d for x, d in zip(leaves, data, strict=True)]
    return tree_unflatten(structure, found)


def _on_data(fun: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    @wraps(fun)
    def inner(*stored: Any, **kwargs: Any) -> Any:
        full = [_restored(x, data) for x, data in zip(args, stored, strict=True)]
        return fun(*full, **kwargs)

    return inner


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """As `spmd.value_and_grad`, for sparse arrays too: their gradient has their indices."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        f = reverse.value_and_grad(_on_data(fun, args), argnums, has_aux, **options)
        value, found = f(*map(_stored, args), **kwargs)
        if isinstance(argnums, int):
            return value, _restored(args[argnums], found)
        return value, tuple(_restored(args[k], g) for k, g in zip(argnums, found, strict=True))

    return wrapped


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """As `spmd.grad`, for arguments with sparse arrays: the gradient has their indices.

    >>> from spmd.experimental import sparse
    >>> sparse.grad(lambda m: (m @ snp.ones(2)).sum())(sparse.eye(2)).data.tolist()
    [1.0, 1.0]
    """
    both = value_and_grad(fun, argnums, has_aux, **options)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, found = both(*args, **kwargs)
        return (found, value[1]) if has_aux else found

    return wrapped


def _jacobian(of: Callable[..., Any]) -> Callable[..., Any]:
    def transform(
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        **options: Any,
    ) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            f = of(_on_data(fun, args), argnums, has_aux=has_aux, **options)
            found = f(*map(_stored, args), **kwargs)
            found, aux = found if has_aux else (found, None)
            if isinstance(argnums, int):
                out = _rows(args[argnums], found)
            else:
                out = tuple(_rows(args[k], g) for k, g in zip(argnums, found, strict=True))
            return (out, aux) if has_aux else out

        return wrapped

    return transform


def _rows(x: Any, jacobian: Any) -> Any:
    """A Jacobian with respect to a sparse array: batch dims of the result, then its own dims."""
    if not isinstance(x, (BCOO, BCSR)):
        return jacobian
    mat = x.to_bcoo() if isinstance(x, BCSR) else x
    data, indices = full_buffers(mat)
    lead = jacobian.shape[: jacobian.ndim - data.ndim]
    wide = snp.broadcast_to(indices, (*lead, *indices.shape))
    return BCOO.tree_unflatten(
        (mat._sparse_shape, mat.indices_sorted, mat.unique_indices), (jacobian, wide)
    )


jacfwd = _jacobian(jacobian.jacfwd)
jacrev = _jacobian(jacobian.jacrev)
jacobian = jacrev
