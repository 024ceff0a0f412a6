"""NumPy's LAPACK: in the operands' own precision, and with the routines that NumPy does not offer.

The one idea: `numpy.linalg` computes in float64 whatever it is given, which takes twice the time
for float32 and gives digits that are rounded off. The generalised ufuncs under it exist in all four
precisions, and fill the results of a matrix on which LAPACK fails with NaN, the others not. The
library that they are linked with has factors and triangular solutions too. Both are looked for by
name: without them a caller does with what `numpy.linalg` has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

# Of a dtype, the letter in the names of LAPACK's routines.
_LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}

# Columns that LAPACK's routines take at once, for the size of the memory that they work in.
_WORK = 64

# How libraries with integers of 64 bits call a routine; names without a mark do not say their size.
_NAMES = ("scipy_{}_64_", "{}_64_")


@cache
def _module() -> Any:
    try:
        from numpy.linalg import _umath_linalg
    except ImportError:
        return None
    return _umath_linalg


def in_own_precision(name: str, *arrays: Any) -> Any:
    """The generalised ufunc `name` of stacks of matrices, or None where there is none."""
    found = getattr(_module(), name, None)
    if found is None or any(a.size == 0 for a in arrays):
        return None
    with np.errstate(all="ignore"):
        return found(*arrays)


@cache
def _routine(name: str, dtype: str) -> Callable[..., Any] | None:
    """A routine of the library behind NumPy, which takes addresses."""
    module = _module()
    if module is None:
        return None
    try:
        library = ctypes.CDLL(module.__file__)
    except (OSError, AttributeError):
        return None
    for pattern in _NAMES:
        found = getattr(library, pattern.format(_LETTERS[dtype] + name), None)
        if found is not None:
            found.restype = None
            return found
    return None


def _words(*numbers: int) -> list[Any]:
    return [ctypes.byref(ctypes.c_int64(number)) for number in numbers]


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def lu_factors(a: np.ndarray, pivots: np.ndarray) -> bool:
    """Write the factors of matrices (count, m, n) over them, and their pivots; False: cannot.

    A call takes as long as a few operations of NumPy, of which a column needs a dozen: many small
    matrices are left to array code.
    """
    count, m, n = a.shape
    routine = _routine("getrf", a.dtype.name)
    if routine is None or not a.size or count > 2 * min(m, n) or np.isnan(a).any():
        return False
    found = np.empty(min(m, n), np.int64)
    info = ctypes.c_int64()
    for matrix, exchanged in zip(a, pivots, strict=True):
        columns = matrix.copy("F")
        rows, width, apart = _words(m, n, m)
        routine(rows, width, _address(columns), apart, _address(found), ctypes.byref(info))
        matrix[...] = columns
        exchanged[...] = found - 1
    return True


def solve_triangular(
    a: np.ndarray, x: np.ndarray, lower: bool, transposed: bool, unit_diagonal: bool
) -> bool:
    """Solve triangular systems in place, for `x` of (..., n, k) in C order; False: cannot.

    `lower` says which triangle of `a` is read, whether it stands for its transpose or not.
    """
    n, k = x.shape[-2:]
    routine = _routine("trsm", a.dtype.name)
    count = x.size // max(n * k, 1)
    if routine is None or not x.size or count > n:
        return False
    # The rows of C order are Fortran's columns: transpose(x) transpose(op(a)) = transpose(b).
    triangle, operation = b"U" if lower else b"L", b"T" if transposed else b"N"
    diagonal = b"U" if unit_diagonal else b"N"
    one = np.ones((), a.dtype)
    width, size = _words(k, n)
    given = np.ascontiguousarray(a).reshape((-1, n, n))
    for matrix, sides in zip(given, x.reshape((-1, n, k)), strict=True):
        places = _address(one), _address(matrix), size, _address(sides), width
        routine(b"R", triangle, operation, diagonal, width, size, *places)
    return True


def orthogonal_factors(x: np.ndarray, full: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """Q and R of matrices (..., m, n), Q square if it is `full`; None: NumPy should do it.

    For many matrices NumPy's loop is quicker than calls from here, although it is in float64.
    """
    *leading, m, n = x.shape
    k = min(m, n)
    factor = _routine("geqrf", x.dtype.name)
    expand = _routine("ungqr" if x.dtype.kind == "c" else "orgqr", x.dtype.name)
    count = x.size // max(m * n, 1)
    if factor is None or expand is None or not x.size or count > k:
        return None
    width = m if full else k
    q = np.empty((count, m, width), x.dtype)
    r = np.zeros((count, width, n), x.dtype)
    scales = np.empty(k, x.dtype)
    room = np.empty(_WORK * max(m, n), x.dtype)
    info = ctypes.byref(ctypes.c_int64())
    rows, columns, order, found, length = _words(m, n, k, width, room.size)
    places = _address(scales), _address(room), length, info
    for matrix, orthogonal, upper in zip(x.reshape((-1, m, n)), q, r, strict=True):
        packed = matrix.copy("F")
        factor(rows, columns, _address(packed), rows, *places)
        upper[:k] = np.triu(packed[:k])
        reflections = np.zeros((m, width), x.dtype, "F")
        reflections[:, :k] = packed[:, :k]
        expand(rows, found, order, _address(reflections), rows, *places)
        orthogonal[...] = reflections
    return q.reshape((*leading, m, width)), r.reshape((*leading, width, n))
