"""`BCSR`: the elements row after row, batched; its operations are `BCOO`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import spmd.numpy as snp
from spmd.base.errors import ShapeError
from spmd.base.tree import register_pytree_node_class
from spmd.experimental.sparse.base import JAXSparse, over_batches, refuse_sharding, with_batches
from spmd.experimental.sparse.bcoo import (
    BCOO,
    bcoo_eliminate_zeros,
    bcoo_extract,
    bcoo_fromdense,
    bcoo_sum_duplicates,
    full_buffers,
    in_bounds,
)
from spmd.experimental.sparse.products import bcoo_dot_general
from spmd.experimental.sparse.shapes import bcoo_broadcast_in_dim, bcoo_concatenate


@register_pytree_node_class
class BCSR(JAXSparse):
    """A sparse array of rows: `data`, the column `indices`, and `indptr`, where each row begins.

    >>> m = BCSR.fromdense(np.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> m, m.indptr.tolist(), (m @ np.ones(2)).tolist()
    (BCSR(float32[2, 2], nse=2), [0, 1, 2], [2.0, 3.0])
    """

    def __init__(
        self,
        args: tuple[Any, Any, Any],
        *,
        shape: Sequence[int],
        indices_sorted: bool = False,
        unique_indices: bool = False,
    ):
        self.data, self.indices, self.indptr = map(snp.asarray, args)
        self.indices_sorted, self.unique_indices = indices_sorted, unique_indices
        shape = tuple(map(int, shape))
        n = self.n_batch
        self._sparse_shape = shape[n : n + 2]
        rows = self.indptr.shape[-1] - 1
        fits = (
            self.data.shape[n : n + 1] == self.indices.shape[-1:]
            and self.indptr.ndim == n + 1
            and len(self._sparse_shape) == 2
            and rows == self._sparse_shape[0]
            and self.data.shape[n + 1 :] == shape[n + 2 :]
        )
        if not fits:
            raise ShapeError(
                f"BCSR: data {self.data.shape}, indices {self.indices.shape} and indptr "
                f"{self.indptr.shape} are none of an array of shape {shape}: they are "
                "(*batch, nse, *dense), (*batch, nse) and (*batch, rows + 1)"
            )

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The shape of the dense array."""
        n = self.n_batch
        batches = (x.shape[:n] for x in (self.data, self.indices, self.indptr))
        return (*np.broadcast_shapes(*batches), *self._sparse_shape, *self.data.shape[n + 1 :])

    @property
    def nse(self) -> int:
        """How many elements are stored for each batch."""
        return self.indices.shape[-1]

    @property
    def n_batch(self) -> int:
        """The number of batch dims."""
        return self.indices.ndim - 1

    @property
    def n_sparse(self) -> int:
        """The number of sparse dims, which is 2."""
        return 2

    @property
    def n_dense(self) -> int:
        """The number of dense dims."""
        return self.data.ndim - 1 - self.n_batch

    def tree_flatten(self) -> tuple[Any, Any]:
        kept = self._sparse_shape, self.indices_sorted, self.unique_indices
        return (self.data, self.indices, self.indptr), kept

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Any) -> BCSR:
        new = object.__new__(cls)
        new.data, new.indices, new.indptr = children
        new._sparse_shape, new.indices_sorted, new.unique_indices = aux_data
        return new

    @classmethod
    def fromdense(
        cls,
        mat: Any,
        *,
        nse: int | None = None,
        index_dtype: Any = np.int32,
        n_dense: int = 0,
        n_batch: int = 0,
    ) -> BCSR:
        """The sparse array of what is not zero in a dense one."""
        return bcsr_fromdense(
            mat, nse=nse, index_dtype=index_dtype, n_dense=n_dense, n_batch=n_batch
        )

    @classmethod
    def from_scipy_sparse(
        cls, mat: Any, *, index_dtype: Any = None, n_dense: int = 0, n_batch: int = 0
    ) -> BCSR:
        """The sparse array of an array of `scipy.sparse`."""
        if n_dense or n_batch:
            raise NotImplementedError("BCSR.from_scipy_sparse with n_batch or n_dense")
        csr = mat.tocsr()
        kind = index_dtype or np.int32
        parts = csr.data, csr.indices.astype(kind), csr.indptr.astype(kind)
        return cls(parts, shape=mat.shape)

    @classmethod
    def from_bcoo(cls, arr: BCOO) -> BCSR:
        """The same array with its elements in the order of rows."""
        if arr.n_sparse != 2:
            raise ShapeError(f"BCSR.from_bcoo: two sparse dims are needed, got {arr}")
        arr = arr if arr.indices_sorted else arr.sort_indices()
        data, indices = full_buffers(arr)
        rows, _ = arr._sparse_shape

        def begins(indices: Any) -> Any:
            row = snp.where(in_bounds(indices, arr._sparse_shape), indices[:, 0], rows)
            counts = snp.zeros(rows + 1, indices.dtype).at[row + 1].add(1, mode="drop")
            return snp.cumsum(counts, dtype=indices.dtype)

        parts = data, indices[..., 1], over_batches(begins, arr.n_batch)(indices)
        return cls.tree_unflatten((arr._sparse_shape, True, arr.unique_indices), parts)

    def to_bcoo(self) -> BCOO:
        """The same array with both indices of each element."""
        n, batch = self.n_batch, self.shape[: self.n_batch]
        buffers = self.data, self.indices, self.indptr
        data, indices, indptr = (with_batches(x, batch, n) for x in buffers)
        nse, (rows, width) = self.nse, self._sparse_shape

        def both(indices: Any, indptr: Any) -> Any:
            marks = snp.zeros(nse, indices.dtype).at[indptr[1:]].add(1, mode="drop")
            row = snp.cumsum(marks, dtype=indices.dtype)
            column = snp.where(row < rows, indices, width)  # past the last row is padding
            return snp.stack([row, column], axis=-1)

        found = over_batches(both, n)(indices, indptr)
        aux = self._sparse_shape, self.indices_sorted, self.unique_indices
        return BCOO.tree_unflatten(aux, (data, found))

    def todense(self) -> Any:
        """The dense array."""
        return self.to_bcoo().todense()

    def sum_duplicates(self, nse: int | None = None, remove_zeros: bool = True) -> BCSR:
        """The same array with each index once."""
        return BCSR.from_bcoo(self.to_bcoo().sum_duplicates(nse, remove_zeros))

    @classmethod
    def _empty(cls, shape: Sequence[int], **options: Any) -> BCSR:
        return cls.from_bcoo(BCOO._empty(shape, **options))


def bcsr_fromdense(
    mat: Any,
    *,
    nse: int | None = None,
    n_batch: int = 0,
    n_dense: int = 0,
    index_dtype: Any = np.int32,
) -> BCSR:
    """The rows of what is not zero in a dense array; the arguments are `bcoo_fromdense`'s."""
    return BCSR.from_bcoo(
        bcoo_fromdense(mat, nse=nse, n_batch=n_batch, n_dense=n_dense, index_dtype=index_dtype)
    )


def bcsr_todense(mat: BCSR) -> Any:
    """The dense array of a sparse one."""
    return mat.todense()


def bcsr_dot_general(
    lhs: Any,
    rhs: Any,
    *,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Any:
    """The product of arrays of which at least one is a `BCSR`, as of `bcoo_dot_general`."""
    refuse_sharding("bcsr_dot_general", out_sharding)
    both = (x.to_bcoo() if isinstance(x, BCSR) else x for x in (lhs, rhs))
    out = bcoo_dot_general(
        *both,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    fits = isinstance(out, BCOO) and out.n_sparse == 2
    return BCSR.from_bcoo(out) if fits else out


def bcsr_extract(indices: Any, indptr: Any, mat: Any) -> Any:
    """The elements of the dense `mat` at the places that `indices` and `indptr` say.

    `indices` are the columns, of shape (*batch, nse), and `indptr` says for each row of the matrix
    where its columns begin, (*batch, rows + 1). The elements have the shape (*batch, nse, *dense).

    >>> bcsr_extract(np.array([0, 1]), np.array([0, 1, 2]), np.diag([5.0, 7.0]))
    Array([5., 7.], dtype=float32)
    """
    mat, indices, indptr = (snp.asarray(x) for x in (mat, indices, indptr))
    n = indices.ndim - 1
    shape = mat.shape[n : n + 2]
    empty = snp.zeros((*indices.shape, *mat.shape[n + 2 :]), mat.dtype)
    places = BCSR.tree_unflatten((shape, False, True), (empty, indices, indptr))
    return bcoo_extract(places.to_bcoo(), mat, assume_unique=True).data


def bcsr_sum_duplicates(mat: BCSR, nse: int | None = None) -> BCSR:
    """The same array with each index once; elements of one index are added."""
    return BCSR.from_bcoo(bcoo_sum_duplicates(mat.to_bcoo(), nse))


def bcsr_eliminate_zeros(mat: BCSR, nse: int | None = None) -> BCSR:
    """The same array with padding in the place of stored zeros."""
    return BCSR.from_bcoo(bcoo_eliminate_zeros(mat.to_bcoo(), nse))


def bcsr_concatenate(operands: Sequence[BCSR], *, dimension: int) -> BCSR:
    """Arrays of one layout joined along a batch or a sparse dim."""
    found = bcoo_concatenate([x.to_bcoo() for x in operands], dimension=dimension)
    return BCSR.from_bcoo(found)


def bcsr_broadcast_in_dim(
    mat: BCSR,
    *,
    shape: Sequence[int],
    broadcast_dimensions: Sequence[int],
    sharding: Any = None,
) -> BCSR:
    """The array in a larger shape, as of `bcoo_broadcast_in_dim`."""
    refuse_sharding("bcsr_broadcast_in_dim", sharding)
    found = bcoo_broadcast_in_dim(
        mat.to_bcoo(), shape=shape, broadcast_dimensions=broadcast_dimensions
    )
    return BCSR.from_bcoo(found)
