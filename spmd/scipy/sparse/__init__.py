"""`spmd.scipy.sparse`: solvers that know a matrix only by its products."""

# ruff: noqa: F401

from spmd.scipy.sparse import linalg
