"""Sparse arrays: `BCOO` and `BCSR` with batch and dense dims, `COO`, `CSR` and `CSC` matrices.

>>> from spmd.experimental import sparse
>>> m = sparse.BCOO.fromdense(np.array([[1.0, 0.0], [0.0, 2.0]]))
>>> spmd.jit(lambda m, v: m @ v)(m, np.array([1.0, 3.0])).tolist()
[1.0, 6.0]

They are pytrees, so that `jit`, `vmap` (over batch dims), `scan` and the others take them. An
operation on one is the jaxpr of the dense one, evaluated with sparse values (`sparsify`); `grad`
and the Jacobians of this module differentiate by the stored elements.
"""

# ruff: noqa: F401

from spmd.experimental.sparse import linalg
from spmd.experimental.sparse.ad import grad, jacfwd, jacobian, jacrev, value_and_grad
from spmd.experimental.sparse.base import (
    JAXSparse,
    SparseEfficiencyError,
    SparseEfficiencyWarning,
)
from spmd.experimental.sparse.bcoo import (
    BCOO,
    bcoo_eliminate_zeros,
    bcoo_extract,
    bcoo_fromdense,
    bcoo_sort_indices,
    bcoo_sum_duplicates,
    bcoo_todense,
    bcoo_update_layout,
)
from spmd.experimental.sparse.creation import empty, eye, random_bcoo
from spmd.experimental.sparse.matrices import (
    COO,
    CSC,
    CSR,
    coo_fromdense,
    coo_matmat,
    coo_matvec,
    coo_todense,
    csr_fromdense,
    csr_matmat,
    csr_matvec,
    csr_todense,
)
from spmd.experimental.sparse.products import (
    bcoo_dot_general,
    bcoo_dot_general_sampled,
    bcoo_multiply_dense,
    bcoo_multiply_sparse,
)
from spmd.experimental.sparse.rows import (
    BCSR,
    bcsr_broadcast_in_dim,
    bcsr_concatenate,
    bcsr_dot_general,
    bcsr_eliminate_zeros,
    bcsr_extract,
    bcsr_fromdense,
    bcsr_sum_duplicates,
    bcsr_todense,
)
from spmd.experimental.sparse.shapes import (
    bcoo_broadcast_in_dim,
    bcoo_concatenate,
    bcoo_dynamic_slice,
    bcoo_reduce_sum,
    bcoo_reshape,
    bcoo_rev,
    bcoo_slice,
    bcoo_squeeze,
    bcoo_transpose,
)
from spmd.experimental.sparse.transform import sparsify, todense
from spmd.experimental.sparse.windows import bcoo_conv_general_dilated, bcoo_gather
