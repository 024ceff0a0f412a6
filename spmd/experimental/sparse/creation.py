"""New sparse arrays: empty ones, identities, random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import spmd.numpy as snp
import spmd.random as random
from spmd.base.dtypes import canonical
from spmd.base.errors import ArgumentError
from spmd.experimental.sparse.base import over_batches
from spmd.experimental.sparse.bcoo import BCOO, size_of
from spmd.experimental.sparse.matrices import COO, CSC, CSR
from spmd.experimental.sparse.rows import BCSR

_FORMATS: dict[str, Any] = {"bcoo": BCOO, "bcsr": BCSR, "coo": COO, "csr": CSR, "csc": CSC}


def _format(name: str) -> Any:
    if name not in _FORMATS:
        raise ArgumentError(f"sparse_format={name!r} not recognized; must be one of {[*_FORMATS]}")
    return _FORMATS[name]


def empty(
    shape: Sequence[int],
    dtype: Any = None,
    index_dtype: Any = "int32",
    sparse_format: str = "bcoo",
    **kwds: Any,
) -> Any:
    """A sparse array without elements; `sparse_format` is "bcoo", "bcsr", "coo", "csr" or "csc"."""
    kind = _format(sparse_format)
    if kind in (COO, CSR, CSC) and len(shape) != 2:
        raise ArgumentError(f"{sparse_format} must have two dimensions, got shape={tuple(shape)}")
    return kind._empty(shape, dtype=dtype, index_dtype=index_dtype, **kwds)


def eye(
    N: int,
    M: int | None = None,
    k: int = 0,
    dtype: Any = None,
    index_dtype: Any = "int32",
    sparse_format: str = "bcoo",
    **kwds: Any,
) -> Any:
    """A sparse matrix with ones on a diagonal, the `k`-th above the main one.

    >>> from spmd.experimental import sparse
    >>> sparse.eye(2, 3, 1).todense().tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    kind = _format(sparse_format)
    dense = np.eye(N, M, k, dtype=np.bool_)
    kind_of = snp.result_type(float) if dtype is None else dtype
    found = kind.fromdense(dense, index_dtype=np.dtype(index_dtype), **kwds)
    (data, *rest), aux = found.tree_flatten()
    return kind.tree_unflatten(aux, (data.astype(kind_of), *rest))


def random_bcoo(
    key: Any,
    shape: Sequence[int],
    *,
    dtype: Any = snp.float64,
    indices_dtype: Any = None,
    nse: float = 0.2,
    n_batch: int = 0,
    n_dense: int = 0,
    unique_indices: bool = True,
    sorted_indices: bool = False,
    generator: Callable[..., Any] = random.uniform,
    **kwds: Any,
) -> BCOO:
    """A `BCOO` array with random indices and elements.

    The indices are sorted, whether `sorted_indices` asks for it or not.

    `nse` is the number of elements for each batch, or below 1 the part of all. `generator(key,
    shape=, dtype=)` makes the elements; `kwds` are for it.
    """
    shape, dtype = tuple(shape), canonical(np.dtype(dtype))
    n_sparse = len(shape) - n_batch - n_dense
    if n_sparse < 0 or n_batch < 0 or n_dense < 0:
        raise ArgumentError(f"Invalid {n_batch=}, {n_dense=} for {shape=}")
    batch, sparse = shape[:n_batch], shape[n_batch : n_batch + n_sparse]
    total = size_of(sparse)
    count = int(np.ceil(nse * total)) if 0 < nse < 1 else int(nse)
    if not 0 <= count <= total:
        raise ArgumentError(f"got {nse=}, expected to be between 0 and {total}")
    places, values = random.split(key)

    def pick(key: Any) -> Any:
        if unique_indices:
            flat = random.choice(key, total, (count,), replace=False)
        else:
            flat = random.randint(key, (count,), 0, max(total, 1))
        if not n_sparse:
            return snp.zeros((count, 0), np.int32)
        return snp.stack(snp.unravel_index(flat, sparse), axis=-1)

    indices = over_batches(pick, n_batch)(random.split(places, batch) if batch else places)
    wanted = *batch, count, *shape[n_batch + n_sparse :]
    data = generator(values, shape=wanted, dtype=dtype, **kwds)
    indices = indices.astype(indices_dtype or np.int32)
    made = BCOO((data, indices), shape=shape, unique_indices=unique_indices)
    return made.sort_indices()
