"""Products with `BCOO` arrays: matrix products, elementwise ones, and samples of dense products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import spmd.lax as lax
import spmd.numpy as snp
from spmd.api.vectorize import vmap
from spmd.base.errors import RefusedError, ShapeError
from spmd.experimental.sparse.base import over_batches
from spmd.experimental.sparse.bcoo import (
    BCOO,
    bcoo_sum_duplicates,
    bcoo_todense,
    columns,
    extract,
    full_buffers,
    in_bounds,
    like,
    size_of,
)
from spmd.experimental.sparse.shapes import bcoo_broadcast_in_dim

Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def _swapped(numbers: Numbers) -> Numbers:
    (left, right), (left_batch, right_batch) = numbers
    return (right, left), (right_batch, left_batch)


def _check(lhs: Any, rhs: Any, numbers: Numbers) -> None:
    for left, right in numbers:
        a, b = [lhs.shape[d] for d in left], [rhs.shape[d] for d in right]
        if a != b:
            raise ShapeError(
                f"bcoo_dot_general: dims {tuple(left)} of {lhs.shape} and {tuple(right)} of "
                f"{rhs.shape} must have the same sizes, got {a} and {b}"
            )


def bcoo_dot_general(
    lhs: Any,
    rhs: Any,
    *,
    dimension_numbers: Numbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Any:
    """The product of arrays of which at least one is sparse, as of `lax.dot_general`.

    A product of a sparse array and a dense one is dense; of two sparse arrays it is sparse.

    >>> from spmd.experimental import sparse
    >>> contract = (((1,), (0,)), ((), ()))
    >>> sparse.bcoo_dot_general(sparse.eye(2), np.ones(2), dimension_numbers=contract).tolist()
    [1.0, 1.0]
    """
    del precision, out_sharding
    numbers: Any = tuple(
        (tuple(map(int, left)), tuple(map(int, right))) for left, right in dimension_numbers
    )
    _check(lhs, rhs, numbers)
    if isinstance(lhs, BCOO) and isinstance(rhs, BCOO):
        out: Any = _sparse_product(lhs, rhs, numbers)
    elif isinstance(lhs, BCOO):
        out = _dense_product(lhs, snp.asarray(rhs), numbers)
    elif isinstance(rhs, BCOO):
        lhs = snp.asarray(lhs)
        out = _dense_product(rhs, lhs, _swapped(numbers))
        batch = len(numbers[1][0])
        free = out.ndim - (lhs.ndim - batch - len(numbers[0][0]))  # where lhs's own dims begin
        order = [*range(batch), *range(free, out.ndim), *range(batch, free)]
        out = out.transpose(order)
    else:
        out = lax.dot_general(lhs, rhs, numbers)
    return out if preferred_element_type is None else out.astype(preferred_element_type)


def _dense_product(mat: BCOO, dense: Any, numbers: Numbers) -> Any:
    """The dense product: gather rows of the dense array, multiply, add to the kept indices."""
    (left, right), (left_batch, right_batch) = numbers
    n, m = mat.n_batch, mat.n_sparse
    dtype = snp.promote_types(mat.dtype, dense.dtype)
    if mat.n_dense or any(d < n for d in left) or any(d >= n for d in left_batch):
        both = bcoo_todense(mat).astype(dtype), dense.astype(dtype)
        return lax.dot_general(*both, numbers)
    free = [d for d in range(dense.ndim) if d not in (*right, *right_batch)]
    # The dense array has the batch dims in the order of the sparse one, then what is summed over.
    ordered = sorted(zip(left_batch, right_batch, strict=True))
    dense = dense.transpose([*(r for _, r in ordered), *right, *free]).astype(dtype)
    summed = [d - n for d in left]
    kept = [d for d in range(m) if d not in summed]
    shape = [mat._sparse_shape[d] for d in kept]

    def product(data: Any, indices: Any, dense: Any) -> Any:
        parts = columns(indices)
        if summed:
            at = tuple(parts[d] for d in summed)
            rows = dense.at[at].get(mode="fill", fill_value=0)
        else:
            rows = dense[None]
        terms = data.astype(dtype).reshape((-1, *(1,) * len(free))) * rows
        if not kept:
            return terms.sum(0).astype(dtype)
        zeros = snp.zeros((*shape, *terms.shape[1:]), dtype)
        return zeros.at[tuple(parts[d] for d in kept)].add(terms, mode="drop")

    f: Any = product
    shared = {d for d, _ in ordered}
    for d in reversed(range(n)):
        f = vmap(f, in_axes=(0, 0, 0 if d in shared else None))
    out = f(*full_buffers(mat), dense)
    others = [d for d in range(n) if d not in shared]
    rest = range(n, out.ndim)
    return out.transpose([*left_batch, *others, *rest])


def _sparse_product(lhs: BCOO, rhs: BCOO, numbers: Numbers) -> BCOO:
    """The sparse product: all pairs of stored elements whose summed indices are equal."""
    (left, right), (left_batch, right_batch) = numbers
    n = lhs.n_batch
    aligned = list(left_batch) == list(range(n)) and list(right_batch) == list(range(rhs.n_batch))
    if lhs.n_dense or rhs.n_dense or not aligned:
        raise RefusedError(
            "bcoo_dot_general: two sparse arrays need the same batch dims, in order, and no dense "
            f"ones, got {lhs} and {rhs} with dimension_numbers={numbers}; change them with "
            "update_layout, or make one dense"
        )
    mine, yours = [d - n for d in left], [d - n for d in right]
    kept_mine = [d for d in range(lhs.n_sparse) if d not in mine]
    kept_yours = [d for d in range(rhs.n_sparse) if d not in yours]
    shape = (
        *(lhs._sparse_shape[d] for d in kept_mine),
        *(rhs._sparse_shape[d] for d in kept_yours),
    )
    dtype = snp.promote_types(lhs.dtype, rhs.dtype)

    def pairs(a: Any, ia: Any, b: Any, ib: Any) -> tuple[Any, Any]:
        meet = in_bounds(ia, lhs._sparse_shape)[:, None] & in_bounds(ib, rhs._sparse_shape)
        for x, y in zip(mine, yours, strict=True):
            meet = meet & (ia[:, x][:, None] == ib[:, y])
        data = snp.where(meet, a.astype(dtype)[:, None] * b.astype(dtype), snp.zeros((), dtype))
        every = (*meet.shape,)
        parts = [snp.broadcast_to(ia[:, d][:, None], every) for d in kept_mine]
        parts += [snp.broadcast_to(ib[:, d], every) for d in kept_yours]
        if not parts:
            return data.ravel(), snp.zeros((math.prod(every), 0), ia.dtype)
        indices = snp.stack([p.astype(ia.dtype) for p in parts], axis=-1)
        indices = snp.where(meet[..., None], indices, snp.asarray(shape, ia.dtype))
        return data.ravel(), indices.reshape((-1, len(parts)))

    found = over_batches(pairs, n)(*full_buffers(lhs), *full_buffers(rhs))
    out = BCOO.tree_unflatten((shape, False, False), found)
    return bcoo_sum_duplicates(out, nse=min(out.nse, size_of(shape)))


def bcoo_dot_general_sampled(A: Any, B: Any, indices: Any, *, dimension_numbers: Numbers) -> Any:
    """The elements of the dense product of dense arrays at sparse `indices`."""
    A, B, indices = map(snp.asarray, (A, B, indices))
    (left, right), (left_batch, _) = dimension_numbers
    matrices = A.ndim == B.ndim == 2 and not left_batch and indices.shape[1:] == (2,)
    if matrices and len(left) == 1 and indices.ndim == 2:
        rows = A.take(indices[:, 0], axis=1 - left[0], mode="fill", fill_value=0)
        cols = B.take(indices[:, 1], axis=1 - right[0], mode="fill", fill_value=0)
        rows = rows if left[0] == 1 else rows.T
        cols = cols if right[0] == 1 else cols.T
        return snp.sum(rows * cols, axis=1)
    product = lax.dot_general(A, B, dimension_numbers, lax.Precision.HIGHEST)
    n_sparse, n_batch = indices.shape[-1], indices.ndim - 2
    sparse = product.shape[n_batch : n_batch + n_sparse]
    data = snp.zeros((*indices.shape[:-1], *product.shape[n_batch + n_sparse :]), product.dtype)
    return extract(BCOO.tree_unflatten((sparse, False, False), (data, indices)), product)


def bcoo_multiply_dense(sp_mat: BCOO, v: Any) -> Any:
    """The `data` of the elementwise product with a dense array that broadcasts."""
    v = snp.asarray(v)
    if not v.ndim:
        return sp_mat.data * v
    if v.ndim > sp_mat.ndim:
        raise ShapeError(f"bcoo_multiply_dense: {sp_mat.shape} and {v.shape} have other ranks")
    v = v.reshape((1,) * (sp_mat.ndim - v.ndim) + v.shape)
    if any(k not in (1, size) for k, size in zip(v.shape, sp_mat.shape, strict=True)):
        raise ShapeError(f"bcoo_multiply_dense: {v.shape} does not broadcast to {sp_mat.shape}")
    n, m = sp_mat.n_batch, sp_mat.n_sparse
    data, indices = full_buffers(sp_mat)
    v = snp.broadcast_to(v, (*data.shape[:n], *v.shape[n:]))

    def scaled(data: Any, indices: Any, v: Any) -> Any:
        parts = columns(indices)
        # A dim of size 1 has one value for all indices, that of padding too.
        at = tuple(snp.zeros_like(p) if v.shape[k] == 1 else p for k, p in enumerate(parts))
        factors = v.at[at].get(mode="fill", fill_value=0) if m else v[None]
        return data * factors

    return over_batches(scaled, n)(data, indices, v)


def bcoo_multiply_sparse(lhs: BCOO, rhs: BCOO) -> BCOO:
    """The elementwise product of two sparse arrays of one layout, as a sparse array."""
    if (lhs.n_batch, lhs.n_dense) != (rhs.n_batch, rhs.n_dense) or lhs.ndim != rhs.ndim:
        raise RefusedError(
            f"bcoo_multiply_sparse: {lhs} and {rhs} need one layout; use update_layout first"
        )
    shape = np.broadcast_shapes(lhs._sparse_shape, rhs._sparse_shape)
    same = lhs._sparse_shape == rhs._sparse_shape

    def pairs(a: Any, ia: Any, b: Any, ib: Any) -> tuple[Any, Any]:
        meet = in_bounds(ia, lhs._sparse_shape)[:, None] & in_bounds(ib, rhs._sparse_shape)
        parts = []
        for d in range(len(shape)):
            x, y = ia[:, d][:, None], ib[:, d]
            if lhs._sparse_shape[d] == rhs._sparse_shape[d]:
                meet = meet & (x == y)
            parts.append(x if lhs._sparse_shape[d] == shape[d] else y)
        shown = meet.reshape(meet.shape + (1,) * lhs.n_dense)
        if same:  # the indices of one of them are enough
            data = a * snp.sum(snp.where(shown, b, snp.zeros((), b.dtype)), axis=1)
            return data, ia
        data = snp.where(shown, a[:, None] * b, 0)
        wide = [snp.broadcast_to(p, meet.shape) for p in parts]
        indices = snp.stack([p.astype(ia.dtype) for p in wide], axis=-1)
        indices = snp.where(meet[..., None], indices, snp.asarray(shape, ia.dtype))
        return data.reshape((-1, *data.shape[2:])), indices.reshape((-1, len(shape)))

    if same and lhs.nse > rhs.nse:
        return bcoo_multiply_sparse(rhs, lhs)
    if not shape:
        total = rhs.data.sum(rhs.n_batch, keepdims=True)
        return like(lhs, lhs.data * total, lhs.indices)
    found = over_batches(pairs, lhs.n_batch)(*full_buffers(lhs), *full_buffers(rhs))
    if same:
        return like(lhs, *found)
    return BCOO.tree_unflatten((shape, False, lhs.unique_indices and rhs.unique_indices), found)


def broadcast_to_rank(mat: BCOO, ndim: int) -> BCOO:
    """The array with new dims of size 1 in front."""
    if mat.ndim == ndim:
        return mat
    new = ndim - mat.ndim
    return bcoo_broadcast_in_dim(
        mat, shape=(*(1,) * new, *mat.shape), broadcast_dimensions=tuple(range(new, ndim))
    )
