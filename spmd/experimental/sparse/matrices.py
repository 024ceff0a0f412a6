"""`COO`, `CSR` and `CSC`: sparse matrices without batch dims, and their products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import spmd.numpy as snp
from spmd.base.errors import RefusedError, ShapeError
from spmd.base.tree import register_pytree_node_class
from spmd.experimental.sparse.base import JAXSparse
from spmd.experimental.sparse.bcoo import BCOO, bcoo_fromdense
from spmd.experimental.sparse.products import bcoo_dot_general
from spmd.experimental.sparse.rows import BCSR


class _Matrix(JAXSparse):
    """The base of the three: the `BCOO` of one, its dense array, and products."""

    shape: tuple[int, int]

    def _as_bcoo(self) -> BCOO:
        raise NotImplementedError

    def todense(self) -> Any:
        """The dense array."""
        return self._as_bcoo().todense()

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, JAXSparse):
            raise RefusedError("matmul between two sparse objects.")
        other = snp.asarray(other)
        if other.ndim not in (1, 2):
            raise RefusedError(f"matmul with object of shape {other.shape}")
        return bcoo_dot_general(self._as_bcoo(), other, dimension_numbers=(((1,), (0,)), ((), ())))

    def __rmatmul__(self, other: Any) -> Any:
        return (self.T @ snp.asarray(other).T).T

    def _all_axes(self, axes: Any) -> None:
        if axes is not None and tuple(axes) != (1, 0):
            raise RefusedError(f"transpose of a matrix with axes={axes}: only (1, 0)")


@register_pytree_node_class
class COO(_Matrix):
    """A matrix as `data` and the `row` and `col` of each element.

    >>> (COO.fromdense(np.diag([1.0, 2.0])) @ np.ones(2)).tolist()
    [1.0, 2.0]
    """

    def __init__(
        self,
        args: tuple[Any, Any, Any],
        *,
        shape: Sequence[int],
        rows_sorted: bool = False,
        cols_sorted: bool = False,
    ):
        self.data, self.row, self.col = map(snp.asarray, args)
        self.shape = tuple(shape)  # type: ignore[assignment]
        self._rows_sorted, self._cols_sorted = rows_sorted, cols_sorted
        if not self.data.shape == self.row.shape == self.col.shape or self.data.ndim != 1:
            raise ShapeError("COO: data, row and col must be vectors of one length")

    @property
    def nse(self) -> int:
        """How many elements are stored."""
        return self.data.shape[0]

    def tree_flatten(self) -> tuple[Any, Any]:
        kept = self.shape, self._rows_sorted, self._cols_sorted
        return (self.data, self.row, self.col), kept

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Any) -> COO:
        new = object.__new__(cls)
        new.data, new.row, new.col = children
        new.shape, new._rows_sorted, new._cols_sorted = aux_data
        return new

    @classmethod
    def fromdense(cls, mat: Any, *, nse: int | None = None, index_dtype: Any = np.int32) -> COO:
        """The matrix of what is not zero in a dense one."""
        found = bcoo_fromdense(mat, nse=nse, index_dtype=index_dtype)
        parts = found.data, found.indices[:, 0], found.indices[:, 1]
        return cls(parts, shape=found.shape, rows_sorted=True)

    def _as_bcoo(self) -> BCOO:
        indices = snp.stack([self.row, self.col], axis=1)
        return BCOO.tree_unflatten((self.shape, False, False), (self.data, indices))

    def transpose(self, axes: Any = None) -> COO:
        """The transposed matrix."""
        self._all_axes(axes)
        aux = self.shape[::-1], self._cols_sorted, self._rows_sorted
        return COO.tree_unflatten(aux, (self.data, self.col, self.row))

    @classmethod
    def _empty(cls, shape: Sequence[int], *, dtype: Any = None, index_dtype: Any = "int32") -> COO:
        none = snp.zeros(0, index_dtype)
        return cls((snp.zeros(0, dtype), none, none), shape=shape, rows_sorted=True)


@register_pytree_node_class
class CSR(_Matrix):
    """A matrix as the elements of its rows: `data`, their columns `indices`, and `indptr`.

    >>> (CSR.fromdense(np.diag([1.0, 2.0])) @ np.ones(2)).tolist()
    [1.0, 2.0]
    """

    def __init__(self, args: tuple[Any, Any, Any], *, shape: Sequence[int]):
        self.data, self.indices, self.indptr = map(snp.asarray, args)
        self.shape = tuple(shape)  # type: ignore[assignment]
        if self.data.shape != self.indices.shape or self.indptr.shape != (self._lines + 1,):
            raise ShapeError(
                f"{type(self).__name__}: data {self.data.shape}, indices {self.indices.shape} and "
                f"indptr {self.indptr.shape} are none of a matrix of shape {self.shape}"
            )

    @property
    def _lines(self) -> int:
        return self.shape[0]

    @property
    def nse(self) -> int:
        """How many elements are stored."""
        return self.data.shape[0]

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.data, self.indices, self.indptr), self.shape

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Any) -> Any:
        new = object.__new__(cls)
        new.data, new.indices, new.indptr = children
        new.shape = aux_data
        return new

    @classmethod
    def fromdense(cls, mat: Any, *, nse: int | None = None, index_dtype: Any = np.int32) -> Any:
        """The matrix of what is not zero in a dense one."""
        found = BCSR.fromdense(mat, nse=nse, index_dtype=index_dtype)
        return cls((found.data, found.indices, found.indptr), shape=found.shape)

    def _as_bcoo(self) -> BCOO:
        parts = self.data, self.indices, self.indptr
        return BCSR.tree_unflatten((self.shape, False, False), parts).to_bcoo()

    def transpose(self, axes: Any = None) -> Any:
        """The transposed matrix, which is a `CSC`."""
        self._all_axes(axes)
        parts = self.data, self.indices, self.indptr
        return CSC.tree_unflatten(self.shape[::-1], parts)

    @classmethod
    def _empty(cls, shape: Sequence[int], *, dtype: Any = None, index_dtype: Any = "int32") -> Any:
        lines = shape[1] if cls is CSC else shape[0]
        parts = snp.zeros(0, dtype), snp.zeros(0, index_dtype), snp.zeros(lines + 1, index_dtype)
        return cls(parts, shape=shape)


@register_pytree_node_class
class CSC(CSR):
    """A matrix as the elements of its columns: `data`, their rows `indices`, and `indptr`.

    >>> (CSC.fromdense(np.diag([1.0, 2.0])) @ np.ones(2)).tolist()
    [1.0, 2.0]
    """

    @property
    def _lines(self) -> int:
        return self.shape[1]

    @classmethod
    def fromdense(cls, mat: Any, *, nse: int | None = None, index_dtype: Any = np.int32) -> CSC:
        """The matrix of what is not zero in a dense one."""
        rows = CSR.fromdense(snp.asarray(mat).T, nse=nse, index_dtype=index_dtype)
        return rows.transpose()

    def _as_bcoo(self) -> BCOO:
        return self.transpose()._as_bcoo().transpose()

    def transpose(self, axes: Any = None) -> CSR:
        """The transposed matrix, which is a `CSR`."""
        self._all_axes(axes)
        parts = self.data, self.indices, self.indptr
        return CSR.tree_unflatten(self.shape[::-1], parts)


def coo_fromdense(mat: Any, *, nse: int | None = None, index_dtype: Any = np.int32) -> COO:
    """The `COO` matrix of what is not zero in a dense one."""
    return COO.fromdense(mat, nse=nse, index_dtype=index_dtype)


def coo_todense(mat: COO) -> Any:
    """The dense array of a matrix."""
    return mat.todense()


def csr_fromdense(mat: Any, *, nse: int | None = None, index_dtype: Any = np.int32) -> CSR:
    """The `CSR` matrix of what is not zero in a dense one."""
    return CSR.fromdense(mat, nse=nse, index_dtype=index_dtype)


def csr_todense(mat: CSR) -> Any:
    """The dense array of a matrix."""
    return mat.todense()


def coo_matvec(mat: COO, v: Any, transpose: bool = False) -> Any:
    """The product of a matrix, or of its transpose, and a vector."""
    return (mat.T if transpose else mat) @ v


def coo_matmat(mat: COO, B: Any, *, transpose: bool = False) -> Any:
    """The product of a matrix, or of its transpose, and a dense matrix."""
    return (mat.T if transpose else mat) @ B


def csr_matvec(mat: CSR, v: Any, transpose: bool = False) -> Any:
    """The product of a matrix, or of its transpose, and a vector."""
    return (mat.T if transpose else mat) @ v


def csr_matmat(mat: CSR, B: Any, *, transpose: bool = False) -> Any:
    """The product of a matrix, or of its transpose, and a dense matrix."""
    return (mat.T if transpose else mat) @ B
