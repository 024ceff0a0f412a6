"""Linear equations with sparse matrices."""

from __future__ import annotations

from typing import Any

import spmd.numpy as snp
from spmd.experimental.sparse.matrices import CSR


def spsolve(
    data: Any, indices: Any, indptr: Any, b: Any, tol: float = 1e-6, reorder: int = 1
) -> Any:
    """Solve A x = `b` for a square matrix in the parts of a `CSR`, by a factorization.

    The matrix is factorized as a dense one. `tol` and `reorder` have no effect.

    >>> from spmd.experimental.sparse import linalg, CSR
    >>> m = CSR.fromdense(np.diag([2.0, 4.0]))
    >>> linalg.spsolve(m.data, m.indices, m.indptr, np.ones(2)).tolist()
    [0.5, 0.25]
    """
    del tol, reorder
    size = snp.shape(b)[0]
    dense = CSR((data, indices, indptr), shape=(size, size)).todense()
    return snp.linalg.solve(dense, snp.asarray(b))


__all__ = ["spsolve"]
