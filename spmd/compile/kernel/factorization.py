"""Factorizations of stacks of matrices: which routine, the sizes, and how matrices lie.

The one idea: LAPACK reads columns, arrays have rows. Operands and results that are named `columns`
here lie column by column; transposing them is the work of other kernels. Where a transpose only
changes which triangle is read, or which side a factor stands on, there is none.
"""

from __future__ import annotations

from spmd.base.record import record

CHOLESKY, TRIANGULAR, SOLVE, LU = "cholesky", "triangular_solve", "solve", "lu"
QR, UPPER = "qr", "upper"
EIGH, EIGENVALUES, SVD, SINGULAR_VALUES = "eigh", "eigenvalues", "svd", "singular_values"

# The layouts that each reads and writes. Where a call serves both, the rows are LAPACK's columns.
READS = {
    CHOLESKY: ("rows",),
    TRIANGULAR: ("rows", "rows"),
    SOLVE: ("rows", "columns"),
    LU: ("columns",),
    QR: ("columns",),
    UPPER: ("columns",),
    EIGH: ("columns",),
    EIGENVALUES: ("columns",),
    SVD: ("columns",),
    SINGULAR_VALUES: ("rows",),
}
WRITES = {
    CHOLESKY: ("rows",),
    TRIANGULAR: ("rows",),
    SOLVE: ("columns",),
    LU: ("columns", "pivots", "permutation"),
    QR: ("columns", "rows"),
    UPPER: ("rows",),
    EIGH: ("columns", "values"),
    EIGENVALUES: ("values",),
    SVD: ("columns", "values", "columns"),
    SINGULAR_VALUES: ("values",),
}


@record
class Factorization:
    """`count` factorizations of matrices (m, n), or solutions of such systems with k right sides.

    `dtype` is f32, f64, c64 or c128. `letters` are LAPACK's, in the routine's order: side,
    triangle, whether the transpose is meant, and the like. `work` is the number of elements of
    memory for work, where it is not a formula. QR and SVD write k columns of the first
    factor, and UPPER k rows of the second.
    """

    kind: str
    dtype: str
    count: int
    m: int
    n: int
    k: int = 0
    letters: str = ""
    work: int = 0

    @property
    def flops(self) -> float:
        """Multiplications and additions of one, within a factor of two."""
        m, n, least = self.m, self.n, min(self.m, self.n)
        return {
            CHOLESKY: n**3 / 3,
            TRIANGULAR: n * n * self.k,
            SOLVE: n**3 * 2 / 3 + 2 * n * n * self.k,
            LU: m * n * least * 2 / 3,
            QR: 4.0 * m * n * least,
            UPPER: 2.0 * m * n * least,
            EIGH: 9.0 * n**3,
            EIGENVALUES: 4.0 * n**3 / 3,
            SVD: 20.0 * m * n * least,
            SINGULAR_VALUES: 4.0 * m * n * least,
        }[self.kind]
