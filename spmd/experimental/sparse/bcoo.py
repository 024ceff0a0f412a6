"""`BCOO`: elements with their indices, batched; conversions, sorting, and sums of duplicates.

The dims of an array are batch dims, sparse dims and dense dims, in this order. `indices` has the
shape (*batch, nse, n_sparse), `data` (*batch, nse, *dense). An index at or past the end of its dim
is padding: its element counts for nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

import spmd.lax as lax
import spmd.numpy as snp
from spmd.base.errors import ArgumentError, ConcretizationError, ShapeError
from spmd.base.tree import register_pytree_node_class
from spmd.core.trace import Tracer
from spmd.experimental.sparse.base import (
    JAXSparse,
    SparseEfficiencyError,
    SparseEfficiencyWarning,
    over_batches,
    with_batches,
)


@register_pytree_node_class
class BCOO(JAXSparse):
    """A sparse array as `data` and the `indices` of its elements, with batch and dense dims.

    It is a pytree of both, so all transformations take it: `jit`, `vmap` over a batch dim, `scan`.

    >>> m = BCOO.fromdense(np.diag([1.0, 0.0, 2.0]))
    >>> m, (m @ np.ones(3)).tolist()
    (BCOO(float32[3, 3], nse=2), [1.0, 0.0, 2.0])
    """

    def __init__(
        self,
        args: tuple[Any, Any],
        *,
        shape: Sequence[int],
        indices_sorted: bool = False,
        unique_indices: bool = False,
    ):
        self.data, self.indices = map(snp.asarray, args)
        self.indices_sorted, self.unique_indices = indices_sorted, unique_indices
        shape = tuple(map(int, shape))
        self._sparse_shape = shape[self.n_batch : self.n_batch + self.n_sparse]
        _validate(self.data, self.indices, shape)
        batch = shape[: self.n_batch]
        if self.shape != shape:  # both buffers have size 1 along a batch dim
            self.data = with_batches(self.data, batch, self.n_batch)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The shape of the dense array; batch dims go with the buffers, under vmap too."""
        n = self.n_batch
        batch = np.broadcast_shapes(self.data.shape[:n], self.indices.shape[:n])
        return (*batch, *self._sparse_shape, *self.data.shape[n + 1 :])

    @property
    def nse(self) -> int:
        """How many elements are stored for each batch."""
        return self.indices.shape[-2]

    @property
    def n_batch(self) -> int:
        """The number of batch dims."""
        return self.indices.ndim - 2

    @property
    def n_sparse(self) -> int:
        """The number of sparse dims."""
        return self.indices.shape[-1]

    @property
    def n_dense(self) -> int:
        """The number of dense dims."""
        return self.data.ndim - 1 - self.n_batch

    def _details(self) -> str:
        more = [f"{n}={getattr(self, n)}" for n in ("n_batch", "n_dense") if getattr(self, n)]
        return ", ".join([f"nse={self.nse}", *more])

    def tree_flatten(self) -> tuple[Any, Any]:
        kept = self._sparse_shape, self.indices_sorted, self.unique_indices
        return (self.data, self.indices), kept

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Any) -> BCOO:
        new = object.__new__(cls)
        new.data, new.indices = children
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
    ) -> BCOO:
        """The sparse array of what is not zero in a dense one."""
        return bcoo_fromdense(
            mat, nse=nse, index_dtype=index_dtype, n_dense=n_dense, n_batch=n_batch
        )

    @classmethod
    def from_scipy_sparse(
        cls, mat: Any, *, index_dtype: Any = None, n_dense: int = 0, n_batch: int = 0
    ) -> BCOO:
        """The sparse array of an array of `scipy.sparse`."""
        if n_dense or n_batch:
            raise NotImplementedError("BCOO.from_scipy_sparse with n_batch or n_dense")
        coo = mat.tocoo()
        indices = np.stack([coo.row, coo.col], axis=1).astype(index_dtype or np.int32)
        return cls((coo.data, indices), shape=mat.shape)

    def todense(self) -> Any:
        """The dense array."""
        return bcoo_todense(self)

    def sort_indices(self) -> BCOO:
        """The same array with its indices in order."""
        return bcoo_sort_indices(self)

    def sum_duplicates(self, nse: int | None = None, remove_zeros: bool = True) -> BCOO:
        """The same array with each index once, sorted; see `bcoo_sum_duplicates`."""
        mat = bcoo_eliminate_zeros(self, nse) if remove_zeros else self
        return bcoo_sum_duplicates(mat, nse)

    def update_layout(
        self,
        *,
        n_batch: int | None = None,
        n_dense: int | None = None,
        on_inefficient: str | None = "error",
    ) -> BCOO:
        """The same array with other numbers of batch and dense dims."""
        return bcoo_update_layout(
            self, n_batch=n_batch, n_dense=n_dense, on_inefficient=on_inefficient
        )

    def astype(self, *args: Any, **kwargs: Any) -> BCOO:
        """The same array with elements of another dtype; the arguments are `Array.astype`'s."""
        return like(self, self.data.astype(*args, **kwargs), self.indices)

    @classmethod
    def _empty(
        cls,
        shape: Sequence[int],
        *,
        dtype: Any = None,
        index_dtype: Any = "int32",
        n_dense: int = 0,
        n_batch: int = 0,
        nse: int = 0,
    ) -> BCOO:
        shape = tuple(shape)
        n_sparse = len(shape) - n_batch - n_dense
        if n_sparse < 0 or n_batch < 0 or n_dense < 0:
            raise ArgumentError(f"BCOO of {shape=} can't have {n_batch=} and {n_dense=}")
        batch, sparse = shape[:n_batch], shape[n_batch : n_batch + n_sparse]
        data = snp.zeros((*batch, nse, *shape[n_batch + n_sparse :]), dtype)
        indices = snp.full((*batch, nse, n_sparse), snp.asarray(sparse), index_dtype)
        return cls((data, indices), shape=shape, indices_sorted=True, unique_indices=True)


def _validate(data: Any, indices: Any, shape: tuple[int, ...]) -> None:
    n_batch = indices.ndim - 2
    if n_batch < 0 or not snp.issubdtype(indices.dtype, snp.integer):
        raise ShapeError(
            f"BCOO: indices must be integers of shape (*batch, nse, n_sparse), got "
            f"{indices.dtype}{list(indices.shape)}"
        )
    n_sparse = indices.shape[-1]
    n_dense = data.ndim - 1 - n_batch
    fits = (
        n_dense >= 0
        and n_batch + n_sparse + n_dense == len(shape)
        and data.shape[n_batch] == indices.shape[n_batch]
        and data.shape[n_batch + 1 :] == shape[n_batch + n_sparse :]
        and all(
            n in (1, size)
            for x in (data, indices)
            for n, size in zip(x.shape[:n_batch], shape[:n_batch], strict=True)
        )
    )
    if not fits:
        raise ShapeError(
            f"BCOO: data of shape {data.shape} and indices of shape {indices.shape} are none of an "
            f"array of shape {shape}: data is (*batch, nse, *dense), indices (*batch, nse, "
            "n_sparse), and the dims of the shape are (*batch, *sparse, *dense)"
        )


def like(mat: BCOO, data: Any, indices: Any, *, ordered: bool = True) -> BCOO:
    """An array of the same sparse dims with other buffers; `ordered`: its indices are as before."""
    flags = ordered and mat.indices_sorted, ordered and mat.unique_indices
    return BCOO.tree_unflatten((mat._sparse_shape, *flags), (data, indices))


def full_buffers(mat: BCOO) -> tuple[Any, Any]:
    """The buffers with batch dims of their full sizes."""
    batch = mat.shape[: mat.n_batch]
    return with_batches(mat.data, batch, mat.n_batch), with_batches(mat.indices, batch, mat.n_batch)


def columns(indices: Any) -> tuple[Any, ...]:
    """The indices of each sparse dim."""
    return tuple(indices[..., k] for k in range(indices.shape[-1]))


def in_bounds(indices: Any, sparse: Sequence[int]) -> Any:
    """The mask of the elements that are not padding."""
    return snp.all(indices < snp.asarray(sparse, indices.dtype), axis=-1)


# ---- to and from dense arrays ------------------------------------------------------------------


def bcoo_todense(mat: BCOO) -> Any:
    """The dense array of a sparse one: elements of one index are added."""
    sparse = mat._sparse_shape

    def dense(data: Any, indices: Any) -> Any:
        if not sparse:
            return data.sum(0).astype(data.dtype)
        zeros = snp.zeros((*sparse, *data.shape[1:]), data.dtype)
        place = zeros.at[columns(indices)]
        return (place.max if data.dtype == np.bool_ else place.add)(data, mode="drop")

    return over_batches(dense, mat.n_batch)(*full_buffers(mat))


def bcoo_fromdense(
    mat: Any,
    *,
    nse: int | None = None,
    n_batch: int = 0,
    n_dense: int = 0,
    index_dtype: Any = np.int32,
) -> BCOO:
    """The sparse array of what is not zero in a dense one.

    `nse` is the number of stored elements (for each batch): it must be given where the array is
    traced. Elements after the first `nse` are left out, and missing ones are padding.

    >>> bcoo_fromdense(np.array([[0.0, 2.0], [3.0, 0.0]])).indices.tolist()
    [[0, 1], [1, 0]]
    """
    mat = snp.asarray(mat)
    n_sparse = mat.ndim - n_batch - n_dense
    if n_sparse < 0 or n_batch < 0 or n_dense < 0:
        raise ArgumentError(
            f"bcoo_fromdense: an array of {mat.ndim} dims can't have {n_batch=} and {n_dense=}"
        )
    mask = mat != 0
    if n_dense:
        mask = snp.any(mask, axis=tuple(range(mat.ndim - n_dense, mat.ndim)))
    if nse is None:
        if isinstance(mat, Tracer):
            raise ConcretizationError(
                "bcoo_fromdense: the number of elements of a traced array is not known; give nse, "
                "an upper bound"
            )
        counts = snp.sum(mask, axis=tuple(range(n_batch, n_batch + n_sparse)))
        nse = int(snp.max(counts)) if counts.size else 0
    count = int(nse)
    sparse = mat.shape[n_batch : n_batch + n_sparse]

    def pick(mat: Any, mask: Any) -> tuple[Any, Any]:
        if not sparse:
            full = snp.zeros((count, *mat.shape), mat.dtype)
            return full.at[:1].set(mat), snp.zeros((count, 0), index_dtype)
        found = snp.nonzero(mask, size=count, fill_value=sparse)
        indices = snp.stack(found, axis=-1).astype(index_dtype)
        return _taken(mat, indices), indices

    data, indices = over_batches(pick, n_batch)(mat, mask)
    return BCOO((data, indices), shape=mat.shape, indices_sorted=True, unique_indices=True)


def _taken(dense: Any, indices: Any) -> Any:
    """The elements of an unbatched dense array at indices; zero where they are padding."""
    return dense.at[columns(indices)].get(mode="fill", fill_value=0)


def extract(mat: BCOO, dense: Any) -> Any:
    """The elements of a dense array at the indices of a sparse one, as its `data`."""

    def take(dense: Any, indices: Any) -> Any:
        if not mat.n_sparse:
            return snp.broadcast_to(dense, (mat.nse, *dense.shape))
        return _taken(dense, indices)

    return over_batches(take, mat.n_batch)(dense, full_buffers(mat)[1])


def bcoo_extract(sparr: BCOO, arr: Any, *, assume_unique: bool | None = None) -> BCOO:
    """The sparse array with the indices of `sparr` and the elements of the dense `arr` there.

    Of elements with one index the first gets the value and the others zero, unless the indices are
    unique, or `assume_unique` says so.
    """
    arr = snp.asarray(arr)
    if arr.shape != sparr.shape:
        raise ShapeError(f"bcoo_extract: shapes differ: {sparr.shape} and {arr.shape}")
    data = extract(sparr, arr)
    unique = sparr.unique_indices if assume_unique is None else assume_unique
    if not unique:
        first = over_batches(_is_first, sparr.n_batch)(full_buffers(sparr)[1])
        first = first.reshape(first.shape + (1,) * sparr.n_dense)
        data = snp.where(first, data, snp.zeros((), data.dtype))
    return like(sparr, data, sparr.indices)


def _is_first(indices: Any) -> Any:
    """The mask of the unbatched indices to which no earlier one is equal."""
    nse, n_sparse = indices.shape
    if not n_sparse:
        return snp.arange(nse) == 0
    order = snp.lexsort(tuple(reversed(columns(indices))))  # stable
    ordered = indices[order]
    new = snp.any(ordered[1:] != ordered[:-1], axis=-1)
    return snp.ones(nse, bool).at[order[1:]].set(new)


# ---- order, and duplicates ---------------------------------------------------------------------


def bcoo_sort_indices(mat: BCOO) -> BCOO:
    """The same array with the indices of each batch in lexical order."""

    def ordered(data: Any, indices: Any) -> tuple[Any, Any]:
        if not mat.n_sparse:
            return data, indices
        order = snp.lexsort(tuple(reversed(columns(indices))))
        return data[order], indices[order]

    data, indices = over_batches(ordered, mat.n_batch)(*full_buffers(mat))
    flags = True, mat.unique_indices
    return BCOO.tree_unflatten((mat._sparse_shape, *flags), (data, indices))


def bcoo_sum_duplicates(mat: BCOO, nse: int | None = None) -> BCOO:
    """The same array with each index once, in order; elements of one index are added.

    `nse` is the number of elements that it stores: by default the number of different indices, or,
    inside of a trace, where that is not known, the number stored so far.
    """
    sparse = mat._sparse_shape
    data, indices = full_buffers(bcoo_sort_indices(mat))

    def numbered(indices: Any) -> tuple[Any, Any]:
        """The place of each element among the different indices, and how many there are."""
        if not sparse:
            zero = snp.zeros(indices.shape[0], np.int32)
            return zero, snp.asarray(min(1, indices.shape[0]), np.int32)
        new = snp.any(indices[1:] != indices[:-1], axis=-1)
        place = snp.concatenate([snp.zeros(1, np.int32), snp.cumsum(new, dtype=np.int32)])
        valid = in_bounds(indices, sparse)
        count = snp.max(snp.where(valid, place + 1, 0), initial=0)
        return snp.where(valid, place[: indices.shape[0]], indices.shape[0]), count

    places, counts = over_batches(numbered, mat.n_batch)(indices)
    if nse is None:
        known = not isinstance(counts, Tracer)
        nse = (int(snp.max(counts)) if counts.size else 0) if known else mat.nse
    count = int(nse)

    def added(data: Any, indices: Any, places: Any) -> tuple[Any, Any]:
        place = snp.zeros((count, *data.shape[1:]), data.dtype).at[places]
        total = (place.max if data.dtype == np.bool_ else place.add)(data, mode="drop")
        fill = snp.full((count, len(sparse)), snp.asarray(sparse, indices.dtype), indices.dtype)
        return total, fill.at[places].set(indices, mode="drop")

    found = over_batches(added, mat.n_batch)(data, indices, places)
    return BCOO.tree_unflatten((sparse, True, True), found)


def bcoo_eliminate_zeros(mat: BCOO, nse: int | None = None) -> BCOO:
    """The same array with padding in the place of stored zeros."""
    data, indices = full_buffers(mat)
    zero = data == 0
    if mat.n_dense:
        zero = snp.all(zero, axis=tuple(range(mat.n_batch + 1, data.ndim)))
    fill = snp.asarray(mat._sparse_shape, indices.dtype)
    moved = snp.where(zero[..., None], fill, indices)
    return like(mat, data, moved, ordered=False) if mat.n_sparse else mat


# ---- other layouts -----------------------------------------------------------------------------


def bcoo_update_layout(
    mat: BCOO,
    *,
    n_batch: int | None = None,
    n_dense: int | None = None,
    on_inefficient: str | None = "error",
) -> BCOO:
    """The same array with other numbers of batch and dense dims.

    A sparse dim that becomes a dense or a batch one multiplies the stored elements;
    `on_inefficient` says whether that is an "error" (`SparseEfficiencyError`), a "warn"ing, or
    nothing (None).
    """
    n_batch = mat.n_batch if n_batch is None else n_batch
    n_dense = mat.n_dense if n_dense is None else n_dense
    if n_batch < 0 or n_dense < 0 or n_batch + n_dense > mat.ndim:
        raise ArgumentError(f"bcoo_update_layout: {mat} can't have {n_batch=} and {n_dense=}")
    if on_inefficient not in ("error", "warn", None):
        raise ArgumentError(f"bcoo_update_layout: on_inefficient={on_inefficient!r} is not known")
    if n_batch > mat.n_batch or n_dense > mat.n_dense:
        text = f"bcoo_update_layout: {mat} with {n_batch=} and {n_dense=} stores zeros"
        if on_inefficient == "error":
            raise SparseEfficiencyError(f"{text}; say on_inefficient=None if that is meant")
        if on_inefficient == "warn":
            warnings.warn(text, SparseEfficiencyWarning, stacklevel=2)
    while mat.n_batch > n_batch:
        mat = _batch_to_sparse(mat)
    while mat.n_dense > n_dense:
        mat = _dense_to_sparse(mat)
    while mat.n_dense < n_dense:
        mat = _sparse_to_dense(mat)
    while mat.n_batch < n_batch:
        mat = _sparse_to_batch(mat)
    return mat


def _batch_to_sparse(mat: BCOO) -> BCOO:
    """The last batch dim becomes the first sparse one."""
    data, indices = full_buffers(mat)
    at, size = mat.n_batch - 1, mat.shape[mat.n_batch - 1]
    number = lax.broadcasted_iota(indices.dtype, (*indices.shape[:-1], 1), at)
    indices = snp.concatenate([number, indices], axis=-1)
    flat = (*data.shape[:at], size * mat.nse)
    buffers = data.reshape((*flat, *data.shape[at + 2 :])), indices.reshape((*flat, -1))
    return BCOO.tree_unflatten(
        ((size, *mat._sparse_shape), mat.indices_sorted, mat.unique_indices), buffers
    )


def _dense_to_sparse(mat: BCOO) -> BCOO:
    """The first dense dim becomes the last sparse one."""
    data, indices = full_buffers(mat)
    at = mat.n_batch
    size, nse = data.shape[at + 1], mat.nse
    wide = (*indices.shape[: at + 1], size)
    number = lax.broadcasted_iota(indices.dtype, (*wide, 1), at + 1)
    kept = snp.broadcast_to(indices[..., None, :], (*wide, indices.shape[-1]))
    both = snp.concatenate([kept, number], axis=-1)
    flat = (*data.shape[:at], nse * size)
    buffers = data.reshape((*flat, *data.shape[at + 2 :])), both.reshape((*flat, -1))
    return BCOO.tree_unflatten(
        ((*mat._sparse_shape, size), mat.indices_sorted, mat.unique_indices), buffers
    )


def _sparse_to_dense(mat: BCOO) -> BCOO:
    """The last sparse dim becomes the first dense one."""
    data, indices = full_buffers(mat)
    size, at = mat._sparse_shape[-1], mat.n_batch
    here = indices[..., -1:] == snp.arange(size, dtype=indices.dtype)
    here = here.reshape((*here.shape, *(1,) * mat.n_dense))
    spread = snp.where(here, snp.expand_dims(data, at + 1), snp.zeros((), data.dtype))
    kept = mat._sparse_shape[:-1], mat.indices_sorted, False
    return BCOO.tree_unflatten(kept, (spread, indices[..., :-1]))


def _sparse_to_batch(mat: BCOO) -> BCOO:
    """The first sparse dim becomes the last batch one: each has all indices, or padding."""
    data, indices = full_buffers(mat)
    size, at = mat._sparse_shape[0], mat.n_batch
    rest = mat._sparse_shape[1:]
    here = snp.expand_dims(indices[..., 0], at) == snp.arange(size, dtype=indices.dtype)[:, None]
    fill = snp.asarray(rest, indices.dtype)
    moved = snp.where(here[..., None], snp.expand_dims(indices[..., 1:], at), fill)
    shown = here.reshape((*here.shape, *(1,) * mat.n_dense))
    spread = snp.where(shown, snp.expand_dims(data, at), snp.zeros((), data.dtype))
    return BCOO.tree_unflatten((rest, False, mat.unique_indices), (spread, moved))


def size_of(sparse: Sequence[int]) -> int:
    """How many different indices there are."""
    return math.prod(sparse)
