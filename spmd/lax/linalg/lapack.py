"""NumPy's LAPACK: in the operands' own precision, and with the routines that NumPy does not offer.

The one idea: `numpy.linalg` computes in float64 whatever it is given, which takes twice the time
for float32 and gives digits that are rounded off. The generalised ufuncs under it exist in all four
precisions, and fill the results of a matrix on which LAPACK fails with NaN, the others not. The
library that they are linked with has factors and triangular solutions too. Both are looked for by
name: without them a caller does with what `numpy.linalg` has.

The library's threads wait for each other with the core that another process, or spmd's own threads,
may need: on two busy cores `eigh` of 64 x 64 took 108 ms instead of 0.18. So it has one, but for
large matrices.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

# Of a dtype's character, the letter in the names of LAPACK's routines; a dtype's name takes 3 us.
_LETTERS = {"f": "s", "d": "d", "F": "c", "D": "z"}

# Columns that LAPACK's routines take at once, for the size of the memory that they work in.
_WORK = 64

# Matrices of fewer rows have one thread anyway, and matrices of more have several: alone on two
# cores `inv` of 200 x 200 takes 0.65 ms with one and 0.45 with two, with a neighbour 2.1 and 6.6.
_LEAST_THREADED, _MOST_ALONE = 24, 512

# How libraries with integers of 64 bits call a routine; names without a mark do not say their size.
_NAMES = ("scipy_{}_64_", "{}_64_")
_SET_THREADS = "openblas_set_num_threads_local"
_IN_CODE = rb"\0(\w+_64_|openblas_set_num_threads_local)(?=\0)"


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
def library() -> Any:
    """The library behind NumPy, whose functions are found by the module that is linked with it."""
    try:
        return ctypes.CDLL(_module().__file__)
    except (OSError, AttributeError):
        return None


@cache
def _routine(name: str, dtype: str) -> Callable[..., Any] | None:
    """A routine of the library behind NumPy, which takes addresses."""
    for pattern in _NAMES:
        found = getattr(library(), pattern.format(_LETTERS[dtype] + name), None)
        if found is not None:
            found.restype = None
            found.argtypes = [ctypes.c_void_p] * _ARGUMENTS[name]
            return found
    return None


def exported(name: str, dtype: str) -> str | None:
    """The symbol of a routine of the library behind NumPy, for native code; None: has none.

    `dtype` is its character. Elsewhere than on Linux objects spell symbols otherwise.
    """
    if sys.platform != "linux":
        return None
    for pattern in _NAMES:
        symbol = pattern.format(_LETTERS[dtype] + name)
        if hasattr(library(), symbol):
            return symbol
    return None


def threads_symbol() -> str | None:
    """The symbol of the function that sets the number of the library's threads; None: has none."""
    return _SET_THREADS if hasattr(library(), _SET_THREADS) else None


def addresses(code: bytes) -> dict[str, Any]:
    """The addresses of the library's functions that object code names.

    Linkers do not see the library: if all of the process saw it, others with its names, as SciPy's
    with integers of 32 bits, would call its functions in the place of their own.
    """
    names = {found.decode() for found in re.findall(_IN_CODE, code)}
    there = [name for name in sorted(names) if hasattr(library(), name)]
    return {name: ctypes.cast(getattr(library(), name), ctypes.c_void_p).value for name in there}


def room_for_svd(dtype: str, job: bytes, m: int, n: int) -> int:
    """The elements of memory for work with which singular values are found quickest."""
    routine = getattr(library(), exported("gesdd", dtype) or "")
    found, info = np.zeros(1, dtype), np.zeros(1, np.int64)
    rows, columns, one, asks = (ctypes.c_void_p(_number(x)) for x in (m, n, max(m, n), -1))
    none, best, status = None, *(ctypes.c_void_p(_address(x)) for x in (found, info))
    real = () if found.dtype.kind == "f" else (none,)
    places = (none, one, none, none, one, none, one, best, asks, *real, none, status)
    routine(ctypes.c_char_p(job), rows, columns, *places)
    return int(found[0].real)


# A routine's arguments, all of which are addresses.
_ARGUMENTS = {"getrf": 6, "trsm": 11, "geqrf": 8, "orgqr": 9, "ungqr": 9}


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


# Numbers that routines read, which are kept, and their addresses.
_KEPT: dict[tuple[str, int], tuple[np.ndarray, int]] = {}


def _number(number: int, dtype: str = "q") -> int:
    """The address of a number."""
    found = _KEPT.get((dtype, number))
    if found is None:
        array = np.array(number, dtype)
        found = _KEPT[dtype, number] = array, _address(array)
    return found[1]


class _Alone:
    """A context in which the library has one thread; how many it had counts when all have left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = self._before = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = set_threads()(1)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            # Native code may have set it to one, too, and sets it back itself.
            if not self._inside and self._before > 1:
                set_threads()(self._before)


_ALONE = _Alone()
_AS_IT_IS = contextlib.nullcontext()


@cache
def set_threads() -> Callable[[int], int]:
    """Sets the number of the library's threads, and returns the one before."""
    found = getattr(library(), _SET_THREADS, None)
    if found is None:
        return lambda count: count
    found.restype, found.argtypes = ctypes.c_int, [ctypes.c_int]
    return found


def has_one_thread(rows: int) -> bool:
    """Whether the library should have one thread for matrices of so many rows or columns."""
    return _LEAST_THREADED <= rows <= _MOST_ALONE


def few_threads(rows: int) -> Any:
    """The context for LAPACK's work on matrices of so many rows or columns."""
    return _ALONE if has_one_thread(rows) else _AS_IT_IS


def lu_factors(a: np.ndarray, pivots: np.ndarray) -> bool:
    """Write the factors of matrices (count, m, n) over them, and their pivots; False: cannot.

    A call takes as long as a few operations of NumPy, of which a column needs a dozen: many small
    matrices are left to array code.
    """
    count, m, n = a.shape
    routine = _routine("getrf", a.dtype.char)
    if routine is None or not a.size or count > 2 * min(m, n) or np.isnan(a).any():
        return False
    found = np.empty(min(m, n) + 1, np.int64)
    rows, width = map(_number, (m, n))
    exchanges, info = _address(found), _address(found) + 8 * min(m, n)
    for matrix, exchanged in zip(a, pivots, strict=True):
        columns = matrix.copy("F")
        routine(rows, width, _address(columns), rows, exchanges, info)
        matrix[...] = columns
        np.subtract(found[:-1], 1, exchanged, casting="unsafe")
    return True


def solve_triangular(
    a: np.ndarray, x: np.ndarray, lower: bool, transposed: bool, unit_diagonal: bool
) -> bool:
    """Solve triangular systems in place, for `x` of (..., n, k) in C order; False: cannot.

    `lower` says which triangle of `a` is read, whether it stands for its transpose or not.
    """
    n, k = x.shape[-2:]
    routine = _routine("trsm", a.dtype.char)
    count = x.size // max(n * k, 1)
    if routine is None or not x.size or count > n:
        return False
    # The rows of C order are Fortran's columns: transpose(x) transpose(op(a)) = transpose(b).
    how = (
        b"R",
        b"U" if lower else b"L",
        b"T" if transposed else b"N",
        b"U" if unit_diagonal else b"N",
    )
    width, size = map(_number, (k, n))
    one = _number(1, a.dtype.char)
    given = np.ascontiguousarray(a)
    matrices, sides, apart = _address(given), _address(x), x.itemsize * n
    for each in range(count):
        matrix, side = matrices + each * apart * n, sides + each * apart * k
        routine(*how, width, size, one, matrix, size, side, width)
    return True


def orthogonal_factors(x: np.ndarray, full: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """Q and R of matrices (..., m, n), Q square if it is `full`; None: NumPy should do it.

    For many matrices NumPy's loop is quicker than calls from here, although it is in float64.
    """
    *leading, m, n = x.shape
    k = min(m, n)
    factor = _routine("geqrf", x.dtype.char)
    expand = _routine("ungqr" if x.dtype.kind == "c" else "orgqr", x.dtype.char)
    count = x.size // max(m * n, 1)
    if factor is None or expand is None or not x.size or count > k:
        return None
    width = m if full else k
    q = np.empty((count, m, width), x.dtype)
    r = np.zeros((count, width, n), x.dtype)
    scales = np.empty(k, x.dtype)
    room = np.empty(_WORK * max(m, n), x.dtype)
    status = np.empty((), np.int64)
    info = _address(status)
    rows, columns, order, found, length = map(_number, (m, n, k, width, room.size))
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
