"""Factorizations and systems of equations, under the names of `jax.lax.linalg`.

This file only lists the public names, file by file.
"""

# ruff: noqa: F401

from spmd.lax.linalg.cholesky import (
    cholesky,
    cholesky_p,
    cholesky_update,
    cholesky_update_p,
    symmetric_product,
)
from spmd.lax.linalg.eigen import EighImplementation, EigImplementation, eig, eig_p, eigh, eigh_p
from spmd.lax.linalg.lu import (
    lu,
    lu_p,
    lu_pivots_to_permutation,
    lu_pivots_to_permutation_p,
    solve,
    solve_p,
)
from spmd.lax.linalg.polar import qdwh
from spmd.lax.linalg.qr import (
    geqrf,
    geqrf_p,
    householder_product,
    householder_product_p,
    ormqr,
    ormqr_p,
    qr,
    qr_p,
)
from spmd.lax.linalg.schur import (
    hessenberg,
    hessenberg_p,
    schur,
    schur_p,
    tridiagonal,
    tridiagonal_p,
)
from spmd.lax.linalg.svd import SvdAlgorithm, svd, svd_p
from spmd.lax.linalg.sylvester import sqrtm, sqrtm_p, sylvester, sylvester_p
from spmd.lax.linalg.triangular import triangular_solve, triangular_solve_p
from spmd.lax.linalg.tridiagonal_systems import tridiagonal_solve, tridiagonal_solve_p
