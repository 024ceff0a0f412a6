"""Operations on `BCOO` arrays that move elements: transposes, slices, reshapes, concatenations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import spmd.lax as lax
import spmd.numpy as snp
from spmd.base.errors import ArgumentError, RefusedError, ShapeError
from spmd.experimental.sparse.base import refuse_sharding
from spmd.experimental.sparse.bcoo import (
    BCOO,
    bcoo_sum_duplicates,
    bcoo_update_layout,
    columns,
    full_buffers,
    size_of,
)


def _blocks(mat: BCOO, dims: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Dims as batch, sparse and dense dims, each counted from the first of its kind."""
    first, last = mat.n_batch, mat.n_batch + mat.n_sparse
    batch = [d for d in dims if d < first]
    sparse = [d - first for d in dims if first <= d < last]
    return batch, sparse, [d - last for d in dims if d >= last]


def _made(sparse: Sequence[int], buffers: tuple[Any, Any], sorted_: bool, unique: bool) -> BCOO:
    return BCOO.tree_unflatten((tuple(sparse), sorted_, unique), buffers)


def bcoo_transpose(mat: BCOO, *, permutation: Sequence[int]) -> BCOO:
    """The array with its dims in another order; batch, sparse and dense dims stay what they are.

    >>> from spmd.experimental import sparse
    >>> sparse.bcoo_transpose(sparse.eye(2, 3), permutation=(1, 0)).shape
    (3, 2)
    """
    permutation = [int(p) for p in permutation]
    if sorted(permutation) != list(range(mat.ndim)):
        raise ArgumentError(f"bcoo_transpose: {permutation=} is no permutation of {mat.ndim} dims")
    n, m = mat.n_batch, mat.n_sparse
    batch, sparse, dense = permutation[:n], permutation[n : n + m], permutation[n + m :]
    if sorted(batch) != list(range(n)) or sorted(sparse) != list(range(n, n + m)):
        raise RefusedError(
            f"bcoo_transpose: permutation={tuple(permutation)} mixes batch, sparse and dense dims "
            f"of {mat}; change them with update_layout first"
        )
    own = [d - n for d in sparse]
    data = mat.data.transpose([*batch, n, *(d - m + 1 for d in dense)])
    indices = mat.indices[..., np.asarray(own, np.int32)] if m else mat.indices
    indices = indices.transpose([*batch, n, n + 1])
    shape = [mat._sparse_shape[d] for d in own]
    return _made(shape, (data, indices), mat.indices_sorted and own == sorted(own),
                 mat.unique_indices)  # fmt: skip


def bcoo_squeeze(arr: BCOO, *, dimensions: Sequence[int]) -> BCOO:
    """The array without these dims, which have size 1."""
    dims = [d % arr.ndim for d in dimensions]
    if any(arr.shape[d] != 1 for d in dims):
        raise ShapeError(f"bcoo_squeeze: {dimensions=} of shape {arr.shape} are not of size 1")
    data, indices = full_buffers(arr)
    batch, sparse, dense = _blocks(arr, dims)
    # Padding stays padding: an index that is out of bounds along one dim must be so in the result.
    kept = [d for d in range(arr.n_sparse) if d not in sparse]
    if sparse and kept:
        valid = snp.all(indices[..., np.asarray(sparse)] == 0, axis=-1)
        fill = snp.asarray([arr._sparse_shape[d] for d in kept], indices.dtype)
        indices = snp.where(valid[..., None], indices[..., np.asarray(kept)], fill)
    elif sparse:
        valid = snp.all(indices == 0, axis=-1).reshape(indices.shape[:-1] + (1,) * arr.n_dense)
        data = snp.where(valid, data, snp.zeros((), data.dtype))
        indices = indices[..., :0]
    data = snp.squeeze(data, (*batch, *(d + arr.n_batch + 1 for d in dense)))
    indices = snp.squeeze(indices, tuple(batch))
    shape = [arr._sparse_shape[d] for d in kept]
    return _made(shape, (data, indices), arr.indices_sorted, arr.unique_indices)


def bcoo_rev(operand: BCOO, dimensions: Sequence[int]) -> BCOO:
    """The array with these dims reversed."""
    batch, sparse, dense = _blocks(operand, [d % operand.ndim for d in dimensions])
    data, indices = full_buffers(operand)
    data = lax.rev(data, [*batch, *(d + operand.n_batch + 1 for d in dense)])
    indices = lax.rev(indices, batch)
    parts = list(columns(indices))
    for d in sparse:
        size = operand._sparse_shape[d]
        parts[d] = snp.where(parts[d] < size, size - 1 - parts[d], parts[d])
    indices = snp.stack(parts, axis=-1) if parts else indices
    return _made(operand._sparse_shape, (data, indices), operand.indices_sorted and not sparse,
                 operand.unique_indices)  # fmt: skip


def bcoo_slice(
    mat: BCOO,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None = None,
) -> BCOO:
    """The part between static indices, as of `lax.slice`."""
    strides = [1] * mat.ndim if strides is None else list(strides)
    every = list(zip(start_indices, limit_indices, strides, strict=True))
    if len(every) != mat.ndim:
        raise ArgumentError(f"bcoo_slice: {len(every)} indices for {mat.ndim} dims")
    n, m = mat.n_batch, mat.n_sparse
    data, indices = full_buffers(mat)
    cut = [slice(*part) for part in every]
    data = data[(*cut[:n], slice(None), *cut[n + m :])]
    indices = indices[tuple(cut[:n])]
    starts, ends, steps = (list(x) for x in zip(*every[n : n + m], strict=True)) if m else ([],) * 3
    shape = [
        len(range(*slice(a, b, c).indices(size)))
        for (a, b, c), size in zip(every[n : n + m], mat._sparse_shape, strict=True)
    ]
    return _windowed(mat, data, indices, starts, ends, steps, shape)


def _windowed(
    mat: BCOO, data: Any, indices: Any, starts: Any, ends: Any, steps: Any, shape: list[int]
) -> BCOO:
    """The elements between indices of the sparse dims; the others become padding."""
    if not mat.n_sparse:
        return _made(shape, (data, indices), mat.indices_sorted, mat.unique_indices)
    first = snp.asarray(starts, indices.dtype)
    step, last = snp.asarray(steps, indices.dtype), snp.asarray(ends, indices.dtype)
    moved = indices - first
    inside = snp.all((moved >= 0) & (indices < last) & (moved % step == 0), axis=-1)
    indices = snp.where(inside[..., None], moved // step, snp.asarray(shape, indices.dtype))
    shown = inside.reshape(inside.shape + (1,) * mat.n_dense)
    data = snp.where(shown, data, snp.zeros((), data.dtype))
    found = _made(shape, (data, indices), False, mat.unique_indices)
    if size_of(shape) < mat.nse:
        found = bcoo_sum_duplicates(found, nse=size_of(shape))
    return found


def bcoo_dynamic_slice(mat: BCOO, start_indices: Sequence[Any], slice_sizes: Sequence[int]) -> BCOO:
    """The window of static sizes that begins at indices that may be traced; it is moved inside."""
    sizes = [int(s) for s in slice_sizes]
    if len(start_indices) != mat.ndim or len(sizes) != mat.ndim:
        raise ArgumentError(f"bcoo_dynamic_slice: {mat.ndim} start indices and sizes are needed")
    n, m = mat.n_batch, mat.n_sparse
    starts = [
        snp.clip(snp.asarray(s), 0, size - k)
        for s, size, k in zip(start_indices, mat.shape, sizes, strict=True)
    ]
    data, indices = full_buffers(mat)
    data_starts = [*starts[:n], 0, *starts[n + m :]]
    data = lax.dynamic_slice(data, data_starts, [*sizes[:n], mat.nse, *sizes[n + m :]])
    indices = lax.dynamic_slice(indices, [*starts[:n], 0, 0], [*sizes[:n], mat.nse, m])
    own, shape = starts[n : n + m], sizes[n : n + m]
    if not m:
        return _made(shape, (data, indices), mat.indices_sorted, mat.unique_indices)
    first = snp.stack([s.astype(indices.dtype) for s in own])
    ends = first + snp.asarray(shape, indices.dtype)
    return _windowed(mat, data, indices, first, ends, [1] * m, shape)


def bcoo_reshape(
    mat: BCOO,
    *,
    new_sizes: Sequence[int],
    dimensions: Sequence[int] | None = None,
    sharding: Any = None,
) -> BCOO:
    """The array in another shape, as of `lax.reshape`; batch and sparse dims are not mixed.

    `sharding` must be None: sparse arrays lie on one device.
    """
    refuse_sharding("bcoo_reshape", sharding)
    if dimensions is not None:
        mat = bcoo_transpose(mat, permutation=dimensions)
    new_sizes = tuple(int(s) for s in new_sizes)
    if math.prod(new_sizes) != mat.size:
        raise ShapeError(f"bcoo_reshape: {mat.shape} has another size than {new_sizes}")
    n, m = mat.n_batch, mat.n_sparse
    if mat.n_dense and new_sizes[len(new_sizes) - mat.n_dense :] != mat.shape[n + m :]:
        raise RefusedError(f"bcoo_reshape: dense dims can't change, as from {mat} to {new_sizes}")
    new_n = next(
        (k for k in range(len(new_sizes) + 1) if math.prod(new_sizes[:k]) ==
         math.prod(mat.shape[:n]) and (k > 0 or n == 0)),
        None,
    )  # fmt: skip
    if n and new_n is None:
        raise RefusedError(f"bcoo_reshape: {new_sizes} mixes batch and sparse dims of {mat}")
    new_n = new_n or 0
    sparse = new_sizes[new_n : len(new_sizes) - mat.n_dense]
    data, indices = full_buffers(mat)
    valid = snp.all(indices < snp.asarray(mat._sparse_shape, indices.dtype), axis=-1)
    flat = snp.zeros(valid.shape, indices.dtype)
    for column, size in zip(columns(indices), mat._sparse_shape, strict=True):
        flat = flat * size + column
    parts = []
    for size in reversed(sparse):
        parts.append(flat % size)
        flat = flat // size
    moved = snp.stack(parts[::-1], axis=-1) if parts else indices[..., :0]
    moved = snp.where(valid[..., None], moved, snp.asarray(sparse, indices.dtype))
    batch = new_sizes[:new_n]
    data = data.reshape((*batch, mat.nse, *data.shape[n + 1 :]))
    moved = moved.reshape((*batch, mat.nse, len(sparse)))
    return _made(sparse, (data, moved), mat.indices_sorted, mat.unique_indices)


def bcoo_broadcast_in_dim(
    mat: BCOO, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], sharding: Any = None
) -> BCOO:
    """The array in a larger shape, as of `lax.broadcast_in_dim`.

    New dims in front of the sparse ones are batch dims; among the sparse dims only those of size 1
    can be added.
    """
    del sharding
    shape, dims = tuple(shape), tuple(broadcast_dimensions)
    n, m = mat.n_batch, mat.n_sparse
    batch, sparse, dense = dims[:n], dims[n : n + m], dims[n + m :]
    if list(dims) != sorted(dims) or len(dims) != mat.ndim:
        raise RefusedError(f"bcoo_broadcast_in_dim: broadcast_dimensions={dims} are out of order")
    new_n = min(dims[n:], default=len(shape))
    new_dense = len(shape) - min(dense) if dense else 0
    new_sparse = shape[new_n : len(shape) - new_dense]
    if size_of(new_sparse) != size_of(mat._sparse_shape):
        raise RefusedError(
            f"bcoo_broadcast_in_dim: from {mat.shape} to {shape} a sparse dim would grow; make it "
            "a batch or dense dim with update_layout first"
        )
    data, indices = full_buffers(mat)
    after = new_n + len(new_sparse)
    data = snp.asarray(lax.broadcast_in_dim(
        data,
        (*shape[:new_n], mat.nse, *shape[after:]),
        (*batch, new_n, *(d - after + new_n + 1 for d in dense)),
    ))  # fmt: skip
    indices = lax.broadcast_in_dim(
        indices, (*shape[:new_n], mat.nse, m), (*batch, new_n, new_n + 1)
    )
    if len(new_sparse) != m:
        places = np.asarray(sparse, np.int32) - new_n
        wide = snp.zeros((*indices.shape[:-1], len(new_sparse)), indices.dtype)
        indices = wide.at[..., places].set(indices) if m else wide
    return _made(new_sparse, (data, indices), mat.indices_sorted, mat.unique_indices)


def bcoo_concatenate(operands: Sequence[BCOO], *, dimension: int) -> BCOO:
    """Arrays of one layout joined along a batch or a sparse dim."""
    operands = list(operands)
    first = operands[0]
    n, m = first.n_batch, first.n_sparse
    if any((x.n_batch, x.n_sparse, x.n_dense) != (n, m, first.n_dense) for x in operands):
        raise ArgumentError(f"bcoo_concatenate: the layouts of {operands} differ")
    at = dimension % first.ndim
    rest = {x.shape[:at] + x.shape[at + 1 :] for x in operands}
    if len(rest) != 1:
        raise ShapeError(f"bcoo_concatenate: {[x.shape for x in operands]} along {dimension=}")
    if at >= n + m:
        raise RefusedError("bcoo_concatenate: along a dense dim; use update_layout first")
    buffers = [full_buffers(x) for x in operands]
    if at < n:
        most = max(x.nse for x in operands)
        padded = [_padded(x, *b, most) for x, b in zip(operands, buffers, strict=True)]
        data = snp.concatenate([d for d, _ in padded], axis=at)
        indices = snp.concatenate([i for _, i in padded], axis=at)
        return _made(first._sparse_shape, (data, indices), False, False)
    total = sum(x.shape[at] for x in operands)
    moved, offset = [], 0
    for x, (_, indices) in zip(operands, buffers, strict=True):
        size = x.shape[at]
        column = indices[..., at - n]
        shifted = snp.where(column < size, column + offset, total)
        moved.append(indices.at[..., at - n].set(shifted))
        offset += size
    data = snp.concatenate([d for d, _ in buffers], axis=n)
    shape = [*first._sparse_shape]
    shape[at - n] = total
    return _made(shape, (data, snp.concatenate(moved, axis=n)), False, False)


def _padded(mat: BCOO, data: Any, indices: Any, nse: int) -> tuple[Any, Any]:
    """Buffers of that many elements."""
    more, at = nse - mat.nse, mat.n_batch
    if not more:
        return data, indices
    zeros = snp.zeros((*data.shape[:at], more, *data.shape[at + 1 :]), data.dtype)
    fill = snp.asarray(mat._sparse_shape, indices.dtype)
    empty = snp.broadcast_to(fill, (*indices.shape[:at], more, mat.n_sparse))
    return snp.concatenate([data, zeros], axis=at), snp.concatenate([indices, empty], axis=at)


def bcoo_reduce_sum(mat: BCOO, *, axes: Sequence[int]) -> BCOO:
    """The sums over some dims, as a sparse array."""
    axes = sorted({int(a) % mat.ndim for a in axes})
    batch, sparse, dense = _blocks(mat, axes)
    if batch:  # the batch dims that are summed become the first sparse ones
        kept = [d for d in range(mat.n_batch) if d not in batch]
        rest = range(mat.n_batch, mat.ndim)
        mat = bcoo_transpose(mat, permutation=[*kept, *batch, *rest])
        mat = bcoo_update_layout(mat, n_batch=len(kept))
        sparse = [*range(len(batch)), *(d + len(batch) for d in sparse)]
    data, indices = full_buffers(mat)
    if dense:
        data = snp.sum(data, tuple(d + mat.n_batch + 1 for d in dense), dtype=data.dtype)
    if sparse:
        valid = snp.all(indices < snp.asarray(mat._sparse_shape, indices.dtype), axis=-1)
        kept = np.asarray([d for d in range(mat.n_sparse) if d not in sparse], np.int32)
        shape = [mat._sparse_shape[d] for d in kept]
        shown = valid.reshape(valid.shape + (1,) * (data.ndim - valid.ndim))
        data = snp.where(shown, data, snp.zeros((), data.dtype))
        fill = snp.asarray(shape, indices.dtype)
        indices = snp.where(valid[..., None], indices[..., kept], fill)
    else:
        shape = list(mat._sparse_shape)
    unique = mat.unique_indices and not sparse
    return _made(shape, (data, indices), mat.indices_sorted and not sparse, unique)
