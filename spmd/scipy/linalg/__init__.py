"""Linear algebra with SciPy's names and parameters, as `jax.scipy.linalg` has them.

This file only lists the public names, file by file.
"""

# ruff: noqa: F401

from spmd.scipy.linalg.factors import (
    cho_factor,
    cho_solve,
    cholesky,
    det,
    eigh,
    eigh_tridiagonal,
    hessenberg,
    inv,
    lu,
    lu_factor,
    lu_solve,
    polar,
    qr,
    qr_multiply,
    rsf2csf,
    schur,
    solve,
    solve_sylvester,
    solve_triangular,
    svd,
)
from spmd.scipy.linalg.functions import expm, expm_frechet, funm, sqrtm
from spmd.scipy.linalg.matrices import (
    block_diag,
    circulant,
    companion,
    convolution_matrix,
    dft,
    fiedler,
    fiedler_companion,
    hadamard,
    hankel,
    helmert,
    hilbert,
    invhilbert,
    invpascal,
    leslie,
    pascal,
    toeplitz,
)
