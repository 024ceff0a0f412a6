"""Factorizations with SciPy's parameters, and the systems that are solved with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import lax
from spmd.base.errors import ArgumentError, RefusedError, ShapeError
from spmd.core.aval import typeof
from spmd.core.custom import custom_jvp
from spmd.lax.linalg import family
from spmd.lax.linalg.family import adjoint, lower_part, matmul, upper_part
from spmd.numpy import factorizations, products
from spmd.numpy.creation import asarray
from spmd.numpy.factorizations import inexact_matrix, same_stack
from spmd.numpy.functional import vectorize
from spmd.numpy.grids import eye
from spmd.numpy.promotion import (
    as_array,
    check_arraylike,
    plain,
    promote_dtypes_inexact,
    promotes_inside,
)
from spmd.numpy.searching import where

if TYPE_CHECKING:
    from spmd.sharding.array import Array

_L = lax.linalg


def det(a: Any, overwrite_a: bool = False, check_finite: bool = True) -> Array:
    """Compute the determinants of the square matrices `a` (..., n, n).

    The result has shape (...). Integers become float32. `overwrite_a` and `check_finite` are
    accepted for SciPy's sake. Raises `ShapeError` if the matrices are not square, and
    `ArgumentError` if `a` is no array.

    >>> spmd.scipy.linalg.det(np.array([[2.0, 0.0], [1.0, 3.0]]))
    Array(6., dtype=float32)
    """
    return factorizations.det(a)


def inv(a: Any, overwrite_a: bool = False, check_finite: bool = True) -> Array:
    """Compute the inverses of the square matrices `a` (..., n, n).

    The shape stays. Integers become float32. `overwrite_a` and `check_finite` are accepted for
    SciPy's sake. Raises `ShapeError` if the matrices are not square, and `ArgumentError` if `a` is
    no array.

    >>> spmd.scipy.linalg.inv(np.array([[2.0, 0.0], [0.0, 4.0]]))
    Array([[0.5 , 0.  ],
           [0.  , 0.25]], dtype=float32)
    """
    return factorizations.inv(a)


def svd(
    a: Any,
    full_matrices: bool = True,
    compute_uv: bool = True,
    overwrite_a: bool = False,
    check_finite: bool = True,
    lapack_driver: str = "gesdd",
) -> Any:
    """Compute the singular value decomposition of `a` (..., m, n): U, s and Vh.

    U is (..., m, m) and Vh (..., n, n), or (..., m, k) and (..., k, n) with k = min(m, n) if
    `full_matrices` is False; s, descending, is (..., k). Without `compute_uv` the result is s
    alone. Integers become float32. `overwrite_a`, `check_finite` and `lapack_driver` are accepted
    for SciPy's sake. Raises `ShapeError` for less than two dims, and `ArgumentError` if `a` is no
    array.

    >>> spmd.scipy.linalg.svd(np.diag([3.0, 4.0]), compute_uv=False)
    Array([4., 3.], dtype=float32)
    """
    a = inexact_matrix("svd", a)
    return _L.svd(a, full_matrices=full_matrices, compute_uv=compute_uv)


# ---- cholesky ----------------------------------------------------------------------------------


def cholesky(
    a: Any, lower: bool = False, overwrite_a: bool = False, check_finite: bool = True
) -> Array:
    """Compute the Cholesky factor of the Hermitian positive definite matrices `a` (..., n, n).

    It is the upper factor R with `a == adjoint(R) @ R`, or with `lower` the lower factor L with `a
    == L @ adjoint(L)`; only the triangle of `a` of that name is read. The shape stays. The result
    is NaN where `a` is not positive definite. Integers become float32. `overwrite_a` and
    `check_finite` are accepted for SciPy's sake. Raises `ShapeError` if the matrices are not
    square, and `ArgumentError` if `a` is no array.

    >>> spmd.scipy.linalg.cholesky(np.array([[4.0, 2.0], [2.0, 5.0]]), lower=True)
    Array([[2., 0.],
           [1., 2.]], dtype=float32)
    """
    a = inexact_matrix("cholesky", a, square=True)
    factor = _L.cholesky(a if lower else adjoint(a), symmetrize_input=False)
    return factor if lower else adjoint(factor)


def cho_factor(
    a: Any, lower: bool = False, overwrite_a: bool = False, check_finite: bool = True
) -> tuple[Array, bool]:
    """Compute the Cholesky factor and whether it is the lower one, as `cho_solve` takes them.

    `a` (..., n, n), `lower`, `overwrite_a`, `check_finite`, the shape, the dtype rule and the
    errors are those of `cholesky`: `ShapeError` and `ArgumentError`.

    >>> factor = spmd.scipy.linalg.cho_factor(np.array([[4.0, 2.0], [2.0, 5.0]]))
    >>> spmd.scipy.linalg.cho_solve(factor, np.array([8.0, 12.0]))
    Array([1., 2.], dtype=float32)
    """
    return cholesky(a, lower), lower


def cho_solve(
    c_and_lower: tuple[Any, bool], b: Any, overwrite_b: bool = False, check_finite: bool = True
) -> Array:
    """Solve `a @ x == b` with the Cholesky factor of `a` that `cho_factor` made.

    `c_and_lower` is that pair; `b` is (n,) or (..., n, k), which is also the shape of the result.
    The dtypes are promoted to one float or complex dtype. `overwrite_b` and `check_finite` are
    accepted for SciPy's sake. Raises `ShapeError` if sizes do not fit, and `ArgumentError` if an
    operand is no array.

    >>> factor = spmd.scipy.linalg.cho_factor(np.diag([4.0, 16.0]))
    >>> spmd.scipy.linalg.cho_solve(factor, np.array([4.0, 8.0]))
    Array([1. , 0.5], dtype=float32)
    """
    c, lower = c_and_lower
    first, second = (0, 2) if lower else (2, 0)
    return solve_triangular(c, solve_triangular(c, b, first, lower), second, lower)


# ---- systems -----------------------------------------------------------------------------------

_TRANS = {0: (False, False), 1: (True, False), 2: (True, True)}
_TRANS |= {"N": _TRANS[0], "T": _TRANS[1], "C": _TRANS[2]}  # pyright: ignore


def _system(name: str, a: Any, b: Any) -> tuple[Any, Any, bool]:
    """A matrix and right-hand sides of one dtype and one stack; whether b was one vector."""
    check_arraylike(name, a, b)
    a, b = (as_array(x) for x in promote_dtypes_inexact(plain(a), plain(b)))
    a = inexact_matrix(name, a, square=True)
    vector = typeof(b).ndim == 1
    b = lax.expand_dims(b, (1,)) if vector else b
    if typeof(b).ndim < 2 or typeof(b).shape[-2] != typeof(a).shape[-1]:
        raise ShapeError(
            f"{name}: b must be (n,) or (..., n, k) with n = {typeof(a).shape[-1]} for a of shape "
            f"{typeof(a).shape}, got shape {typeof(b).shape}"
        )
    a, b = same_stack(a, b)
    return a, b, vector


def _result(x: Any, vector: bool) -> Any:
    return lax.squeeze(x, (typeof(x).ndim - 1,)) if vector else x


def solve_triangular(
    a: Any,
    b: Any,
    trans: int | str = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    overwrite_b: bool = False,
    debug: Any = None,
    check_finite: bool = True,
) -> Array:
    """Solve `a @ x == b` for triangular `a`, or with its transpose or adjoint.

    `a` is (..., n, n), upper triangular unless `lower`; `b` is (n,) or (..., n, k), which is also
    the shape of the result. `trans` is 0 or "N" for `a`, 1 or "T" for its transpose, 2 or "C" for
    its adjoint; another raises `ArgumentError`. With `unit_diagonal` the diagonal counts as ones.
    The dtypes are promoted to one float or complex dtype. `overwrite_b`, `debug` and `check_finite`
    are accepted for SciPy's sake. Raises `ShapeError` if sizes do not fit, and `ArgumentError` if
    an operand is no array.

    >>> a = np.array([[2.0, 0.0], [1.0, 4.0]])
    >>> spmd.scipy.linalg.solve_triangular(a, np.array([2.0, 5.0]), lower=True)
    Array([1., 1.], dtype=float32)
    """
    if trans not in _TRANS:
        raise ArgumentError(f'solve_triangular: trans={trans!r} must be 0, 1, 2, "N", "T" or "C"')
    a, b, vector = _system("solve_triangular", a, b)
    transposed, conjugated = _TRANS[trans]  # pyright: ignore
    x = _L.triangular_solve(
        a,
        b,
        left_side=True,
        lower=lower,
        transpose_a=transposed,
        conjugate_a=conjugated,
        unit_diagonal=unit_diagonal,
    )
    return _result(x, vector)


def solve(
    a: Any,
    b: Any,
    lower: bool = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    debug: bool = False,
    check_finite: bool = True,
    assume_a: str = "gen",
) -> Array:
    """Solve `a @ x == b` for square matrices `a` (..., n, n).

    `b` is (n,) or (..., n, k), which is also the shape of the result. `assume_a` is "gen", "sym",
    "her" or "pos"; another raises `ArgumentError`. For "pos" it solves by Cholesky, and reads the
    upper triangle (the lower one if `lower`), for the others by LU. The dtypes are promoted to one
    float or complex dtype. `overwrite_a`, `overwrite_b`, `debug` and `check_finite` are accepted
    for SciPy's sake. Raises `ShapeError` if sizes do not fit, and `ArgumentError` if an operand is
    no array.

    >>> spmd.scipy.linalg.solve(np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([4.0, 7.0]))
    Array([1., 2.], dtype=float32)
    """
    if assume_a not in ("gen", "sym", "her", "pos"):
        raise ArgumentError(f'solve: assume_a={assume_a!r} must be "gen", "sym", "her" or "pos"')
    if assume_a != "pos":
        return factorizations.solve(a, b)
    a, b, vector = _system("solve", a, b)
    return _result(cho_solve(cho_factor(a, lower), b), vector)


# ---- lu ----------------------------------------------------------------------------------------


def lu_factor(a: Any, overwrite_a: bool = False, check_finite: bool = True) -> tuple[Array, Array]:
    """Compute the LU factors of `a` (..., m, n) in one array, and the int32 pivots.

    This is the pair that `lu_solve` takes; the pivots are (..., min(m, n)). Integers become
    float32. `overwrite_a` and `check_finite` are accepted for SciPy's sake. Raises `ShapeError` for
    less than two dims, and `ArgumentError` if `a` is no array.

    >>> spmd.scipy.linalg.lu_factor(np.array([[1.0, 2.0], [4.0, 4.0]]))
    (Array([[4.  , 4.  ],
           [0.25, 1.  ]], dtype=float32), Array([1, 1], dtype=int32))
    """
    return _L.lu(inexact_matrix("lu_factor", a))[:2]


def lu_solve(
    lu_and_piv: tuple[Any, Any],
    b: Any,
    trans: int = 0,
    overwrite_b: bool = False,
    check_finite: bool = True,
) -> Array:
    """Solve `a @ x == b` with the factors of `a` that `lu_factor` made.

    `lu_and_piv` is that pair; `b` is (n,) or (..., n, k), which is also the shape of the result.
    `trans` is 0 for `a`, 1 for its transpose, 2 for its adjoint; another raises `ArgumentError`.
    The dtypes are promoted to one float or complex dtype. `overwrite_b` and `check_finite` are
    accepted for SciPy's sake. Raises `ShapeError` if sizes do not fit, and `ArgumentError` if an
    operand is no array.

    >>> factors = spmd.scipy.linalg.lu_factor(np.array([[1.0, 2.0], [4.0, 4.0]]))
    >>> spmd.scipy.linalg.lu_solve(factors, np.array([3.0, 8.0]))
    Array([1., 1.], dtype=float32)
    """
    if trans not in (0, 1, 2):
        raise ArgumentError(f"lu_solve: trans={trans!r} must be 0, 1 or 2")
    factors, pivots = lu_and_piv
    factors, b, vector = _system("lu_solve", factors, b)
    order = _L.lu_pivots_to_permutation(as_array(pivots), typeof(factors).shape[-1])
    order = lax.broadcast_in_dim(
        order,
        typeof(factors).shape[:-1],
        tuple(range(typeof(factors).ndim - 1 - typeof(order).ndim, typeof(factors).ndim - 1)),
    )
    if trans == 0:
        b = family.take_rows(b, order)
        b = solve_triangular(factors, b, lower=True, unit_diagonal=True)
        return _result(solve_triangular(factors, b), vector)
    b = solve_triangular(factors, b, trans)
    b = solve_triangular(factors, b, trans, lower=True, unit_diagonal=True)
    return _result(family.take_rows(b, lax.argsort(order)), vector)


def lu(
    a: Any, permute_l: bool = False, overwrite_a: bool = False, check_finite: bool = True
) -> tuple[Array, ...]:
    """Compute P, L and U with `a == P @ L @ U`, for `a` (..., m, n).

    P is a permutation (..., m, m), L (..., m, k) has ones on its diagonal, and U (..., k, n) is
    upper triangular, with k = min(m, n). With `permute_l` the result is the pair of `P @ L` and U.
    Integers become float32. `overwrite_a` and `check_finite` are accepted for SciPy's sake. Raises
    `ShapeError` for less than two dims, and `ArgumentError` if `a` is no array.

    >>> p, l, u = spmd.scipy.linalg.lu(np.array([[1.0, 2.0], [4.0, 4.0]]))
    >>> l, u
    (Array([[1.  , 0.  ],
           [0.25, 1.  ]], dtype=float32), Array([[4., 4.],
           [0., 1.]], dtype=float32))
    """
    factors, _, order = _L.lu(inexact_matrix("lu", a))
    dtype, (m, n) = typeof(factors).dtype, typeof(factors).shape[-2:]
    k = min(m, n)
    left = as_array(factors)[..., :, :k]
    lower = lower_part(left, strict=True) + eye(m, k, dtype=dtype)
    upper = upper_part(as_array(factors)[..., :k, :])
    real = np.finfo(dtype).dtype
    rows = lax.broadcasted_iota(np.int32, (*typeof(order).shape[:-1], m, m), typeof(order).ndim - 1)
    p = (as_array(order)[..., None, :] == rows).astype(real)
    if permute_l:
        return matmul(p.astype(dtype), lower), upper
    return p, lower, upper


# ---- qr ----------------------------------------------------------------------------------------


def qr(
    a: Any,
    overwrite_a: bool = False,
    lwork: Any = None,
    mode: str = "full",
    pivoting: bool = False,
    check_finite: bool = True,
) -> tuple[Array, ...]:
    """Compute Q and R with `a == Q @ R`, for `a` (..., m, n).

    For `mode="full"` Q is (..., m, m) and R (..., m, n); for "economic", which has derivatives for
    tall matrices, Q is (..., m, k) and R (..., k, n) with k = min(m, n); for "r" the result is
    (R,); another raises `ArgumentError`. With `pivoting` the permutation of columns comes third.
    Integers become float32. `overwrite_a`, `lwork` and `check_finite` are accepted for SciPy's
    sake. Raises `ShapeError` for less than two dims, and `ArgumentError` if `a` is no array.

    >>> q, r = spmd.scipy.linalg.qr(np.array([[3.0], [4.0]]), mode="economic")
    >>> abs(q), abs(r)
    (Array([[0.6],
           [0.8]], dtype=float32), Array([[5.]], dtype=float32))
    """
    if mode not in ("full", "economic", "r"):
        raise ArgumentError(f'qr: mode={mode!r} must be "full", "economic" or "r"')
    full = mode != "economic"
    outs = _L.qr(inexact_matrix("qr", a), pivoting=pivoting, full_matrices=full)
    return outs[1:] if mode == "r" else outs


def qr_multiply(
    a: Any,
    c: Any,
    mode: str = "right",
    pivoting: bool = False,
    conjugate: bool = False,
    overwrite_a: bool = False,
    overwrite_c: bool = False,
) -> tuple[Array, ...]:
    """Compute `(c @ Q, R)`, or `(Q @ c, R)` for mode "left", of the QR factors of `a`.

    For `a` of shape (..., m, n) Q has min(m, n) columns. A vector `c` is a row, or a column for
    `mode="left"`. With `conjugate` it is the complex conjugate of Q; with `pivoting` the
    permutation of columns comes third. The dtypes are promoted to one float or complex dtype.
    `overwrite_a` and `overwrite_c` are accepted for SciPy's sake. Raises `ShapeError` if sizes do
    not fit, and `ArgumentError` for another mode or if one is no array.

    >>> product, r = spmd.scipy.linalg.qr_multiply(np.eye(2), np.array([1.0, 2.0]))
    >>> snp.abs(product)
    Array([1., 2.], dtype=float32)
    """
    if mode not in ("left", "right"):
        raise ArgumentError(f'qr_multiply: mode={mode!r} must be "left" or "right"')
    a, c = promote_dtypes_inexact(as_array(a), as_array(c))
    m, n = typeof(inexact_matrix("qr_multiply", a)).shape[-2:]
    k, is_left = min(m, n), mode == "left"
    is_vector = typeof(c).ndim == 1
    if is_vector:
        c = c[:, None] if is_left else c[None, :]
    side, wanted = (-2, k) if is_left else (-1, m)
    if typeof(c).shape[side] != wanted:
        raise ShapeError(
            f"qr_multiply: Q of {typeof(a)} is {m} x {k}, so c needs {wanted} "
            f"{'rows' if is_left else 'columns'}, got {typeof(c)}"
        )
    q, r, *rest = _L.qr(a, pivoting=pivoting, full_matrices=False)
    q = family.conjugate(q) if conjugate else q
    pair = (q, c) if is_left else (c, q)
    product = products.matmul(*pair, precision=lax.Precision.HIGHEST)
    return (lax.reshape(product, (typeof(product).size,)) if is_vector else product, r, *rest)


# ---- eigenvalues and Schur form ----------------------------------------------------------------


def eigh(
    a: Any,
    b: Any = None,
    lower: bool = True,
    eigvals_only: bool = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    turbo: bool = True,
    eigvals: None = None,
    type: int = 1,
    check_finite: bool = True,
) -> Any:
    """Compute the eigenvalues, ascending, and eigenvectors of Hermitian matrices `a` (..., n, n).

    The result is (w, v) with w of shape (..., n) and the vectors in the columns of v (..., n, n),
    or w alone if `eigvals_only`. `lower` changes nothing: both triangles are averaged, as in JAX.
    `b`, `eigvals` and a `type` other than 1 raise `ArgumentError`, as they are not supported in JAX
    either. Integers become float32. `overwrite_a`, `overwrite_b`, `turbo` and `check_finite` are
    accepted for SciPy's sake. Raises `ShapeError` if the matrices are not square, and
    `ArgumentError` if `a` is no array.

    >>> w, v = spmd.scipy.linalg.eigh(np.array([[2.0, 1.0], [1.0, 2.0]]))
    >>> w.round(5)
    Array([1., 3.], dtype=float32)
    """
    if b is not None or type != 1 or eigvals is not None:
        raise RefusedError("eigh: b, type and eigvals are not supported; transform a first")
    v, w = _L.eigh(inexact_matrix("eigh", a, square=True), lower=lower)
    return w if eigvals_only else (w, v)


def eigh_tridiagonal(
    d: Any,
    e: Any,
    *,
    eigvals_only: bool = False,
    select: str = "a",
    select_range: tuple[int, int] | None = None,
    tol: float | None = None,
    key: Any = None,
) -> Any:
    """Compute the eigenvalues, ascending, and eigenvectors of a tridiagonal matrix.

    Its diagonal `d` has shape (n,) and the one beside it, `e`, (n - 1,); both are promoted to one
    float or complex dtype. The result is (w, v), or w alone if `eigvals_only`. `select="i"` keeps
    those from `select_range[0]` to `select_range[1]`, both included; "a" keeps all. `tol` and `key`
    are accepted; the result is exact without. Raises `ArgumentError` for another `select` or if one
    is no array.

    >>> w, v = spmd.scipy.linalg.eigh_tridiagonal(np.array([1.0, 2.0]), np.array([0.0]))
    >>> w
    Array([1., 2.], dtype=float32)
    """
    check_arraylike("eigh_tridiagonal", d, e)
    d, e = (as_array(x) for x in promote_dtypes_inexact(plain(d), plain(e)))
    n = typeof(d).shape[0]
    if select not in ("a", "i") or (select == "i" and select_range is None):
        raise RefusedError('eigh_tridiagonal: select must be "a", or "i" with a select_range')
    places = np.arange(n)
    below = lax.full((n, n), 0, typeof(e).dtype)
    below = as_array(below).at[places[1:], places[:-1]].set(family.conjugate(e))
    matrix = below.at[places, places].set(d)
    first, last = (0, n - 1) if select == "a" else select_range  # pyright: ignore
    v, w = _L.eigh(matrix, symmetrize_input=False, subset_by_index=(first, last + 1))
    return w if eigvals_only else (w, v)


def schur(a: Any, output: str = "real") -> tuple[Array, Array]:
    """Compute the Schur form T and the unitary Z, `a == Z @ T @ adjoint(Z)`.

    `a` has shape (..., n, n), and so have both. `output` is "real" or "complex"; of real matrices
    the latter gives complex factors. Integers become float32. Raises `ShapeError` if the matrices
    are not square, and `ArgumentError` for another `output` or if `a` is no array.

    >>> t, z = spmd.scipy.linalg.schur(np.array([[1.0, 2.0], [0.0, 3.0]]))
    >>> t
    Array([[1., 2.],
           [0., 3.]], dtype=float32)
    """
    if output not in ("real", "complex"):
        raise ArgumentError(f'schur: output={output!r} must be "real" or "complex"')
    a = inexact_matrix("schur", a, square=True)
    if output == "complex":
        a = lax.convert_element_type(a, complex_of(a))
    t, z = _L.schur(a)
    return t, z


def complex_of(x: Any) -> np.dtype:
    """The complex dtype that holds an array's numbers."""
    return np.result_type(typeof(x).dtype, np.complex64)


@promotes_inside(2)
def rsf2csf(T: Any, Z: Any, check_finite: bool = True) -> tuple[Array, Array]:
    """Convert a real Schur form to a complex one, with an upper triangular T.

    `Z @ T @ adjoint(Z)` stays what it is. `T` and `Z` have one shape (..., n, n); the results are
    complex. Blocks are treated from below, as SciPy does, so that the phases are SciPy's too.
    `check_finite` is accepted for SciPy's sake. Raises `ShapeError` if the shapes differ or are not
    square.

    >>> t, z = spmd.scipy.linalg.rsf2csf(np.array([[1.0, 2.0], [0.0, 3.0]]), np.eye(2))
    >>> t.real
    Array([[1., 2.],
           [0., 3.]], dtype=float32)
    """
    T, Z = promote_dtypes_inexact(plain(T), plain(Z))
    T, Z = (inexact_matrix("rsf2csf", x, square=True) for x in (T, Z))
    if typeof(T).shape[-1] != typeof(Z).shape[-1]:
        raise ShapeError(
            f"rsf2csf: T and Z must be of one size, got {typeof(T).shape} and {typeof(Z).shape}"
        )
    T, Z = (lax.convert_element_type(x, complex_of(x)) for x in (T, Z))
    return vectorize(_complex_blocks, signature="(n,n),(n,n)->(n,n),(n,n)")(T, Z)


def _complex_blocks(t: Any, z: Any) -> tuple[Any, Any]:
    """Each block of two rows becomes triangular, the last one first."""
    n, eps = typeof(t).shape[0], float(np.finfo(typeof(t).dtype).eps)
    if n < 2:
        return t, z

    def step(i: Any, form: Any) -> Any:
        t, z = form
        m = n - 2 - i
        block = lax.dynamic_slice(t, (m, m), (2, 2))
        (a, b), (c, d) = block
        half = (a - d) / 2
        first = half + lax.sqrt(half * half + b * c)
        length = lax.sqrt(lax.square(lax.abs(first)) + lax.square(lax.abs(c)))
        coupled = lax.abs(c) > eps * (lax.abs(a) + lax.abs(d))
        cos, sin = first / length, c / length
        turn = asarray([[cos.conj(), sin], [-sin, cos]])
        turn = where(coupled, turn, lax.convert_element_type(np.eye(2), typeof(t).dtype))
        rows = matmul(turn, lax.dynamic_slice(t, (m, 0), (2, n)))
        t = lax.dynamic_update_slice(t, rows, (m, 0))
        columns = matmul(lax.dynamic_slice(t, (0, m), (n, 2)), adjoint(turn))
        t = lax.dynamic_update_slice(t, columns, (0, m)).at[m + 1, m].set(0)
        columns = matmul(lax.dynamic_slice(z, (0, m), (n, 2)), adjoint(turn))
        return t, lax.dynamic_update_slice(z, columns, (0, m))

    return lax.fori_loop(0, n - 1, step, (t, z))


def hessenberg(
    a: Any, *, calc_q: bool = False, overwrite_a: bool = False, check_finite: bool = True
) -> Any:
    """Compute the Hessenberg form H, with `calc_q` also the unitary Q of `a == Q @ H @ adjoint(Q)`.

    `a` has shape (..., n, n), and so have both. Integers become float32. `overwrite_a` and
    `check_finite` are accepted for SciPy's sake. Raises `ShapeError` if the matrices are not
    square, and `ArgumentError` if `a` is no array.

    >>> h = spmd.scipy.linalg.hessenberg(np.arange(9.0).reshape(3, 3))
    >>> float(h[2, 0])
    0.0
    """
    a = inexact_matrix("hessenberg", a, square=True)
    packed, taus = _L.hessenberg(a)
    row, column = family._places(packed)
    form = family.zero_unless(lax.le(row, column + 1), packed)
    if not calc_q:
        return form
    n, dtype = typeof(a).shape[-1], typeof(a).dtype
    if n < 2:
        return form, lax.broadcast_in_dim(
            eye(n, dtype=dtype), typeof(a).shape, (typeof(a).ndim - 2, typeof(a).ndim - 1)
        )
    inner = _L.householder_product(as_array(packed)[..., 1:, :-1], taus)
    edge = [(0, 0, 0)] * (typeof(a).ndim - 2) + [(1, 0, 0)] * 2
    corner = np.zeros((n, n), dtype)
    corner[0, 0] = 1
    return form, lax.pad(inner, np.zeros((), dtype), edge) + corner


# ---- polar -------------------------------------------------------------------------------------


def polar(
    a: Any,
    side: str = "right",
    *,
    method: str = "qdwh",
    eps: float | None = None,
    max_iterations: int | None = None,
) -> tuple[Array, Array]:
    """Compute U with orthonormal columns (or rows) and Hermitian P, `a == U @ P`.

    For `side="left"` it is `a == P @ U`. `a` has shape (..., m, n), and so has U; P is square.
    Integers become float32. It goes by singular values, whichever `method` ("qdwh" or "svd") is
    named; `eps` and `max_iterations` change nothing. Where `a` is of full rank it has derivatives,
    also where singular values are equal. Raises `ArgumentError` for another side or method or if
    `a` is no array, and `ShapeError` for less than two dims.

    >>> u, p = spmd.scipy.linalg.polar(np.diag([2.0, -3.0]))
    >>> abs(u).round(5)
    Array([[1., 0.],
           [0., 1.]], dtype=float32)
    """
    if side not in ("right", "left") or method not in ("qdwh", "svd"):
        raise ArgumentError(
            f'polar: side={side!r} must be "right" or "left", method={method!r} "qdwh" or "svd"'
        )
    a = inexact_matrix("polar", a)
    *_, m, n = typeof(a).shape
    u = _unitary(a) if m >= n else adjoint(_unitary(adjoint(a)))
    p = matmul(adjoint(u), a) if side == "right" else matmul(a, adjoint(u))
    return u, family.symmetrize(p)


@custom_jvp
def _unitary(a: Any) -> Any:
    u, _, vh = _L.svd(a, full_matrices=False)
    return matmul(u, vh)


@_unitary.defjvp
def _unitary_jvp(primals: Any, tangents: Any) -> Any:
    """dU = U W + (dA - U U^H dA) inv(P), where P W + W P = U^H dA - dA^H U.

    Differentiate A = U P and take away what is Hermitian; W = U^H dU is skew (Higham, "Functions of
    matrices", 2008, section 8.2).
    """
    (a,), (da,) = primals, tangents
    u = _unitary(a)
    p = family.symmetrize(matmul(adjoint(u), a))
    inner = matmul(adjoint(u), da)
    turn = _L.sylvester(p, p, inner - adjoint(inner))
    outside = da - matmul(u, inner)
    return u, matmul(u, turn) + adjoint(_L.solve(p, adjoint(outside)))


def solve_sylvester(A: Any, B: Any, C: Any, *, method: str = "schur", tol: float = 1e-8) -> Array:
    """Solve `A @ X + X @ B == C`.

    `A` is (..., m, m), `B` (..., n, n) and `C` (..., m, n), which is also the shape of the result;
    the dtypes are promoted to one float or complex dtype. `method` is "schur" or "eigen" and
    changes nothing, as little as `tol`. Raises `ShapeError` if sizes do not fit, and
    `ArgumentError` for another method or if an argument is no array.

    >>> spmd.scipy.linalg.solve_sylvester(np.eye(2), np.eye(2), np.ones((2, 2)))
    Array([[0.5, 0.5],
           [0.5, 0.5]], dtype=float32)
    """
    if method not in ("schur", "eigen"):
        raise ArgumentError(f'solve_sylvester: method={method!r} must be "schur" or "eigen"')
    check_arraylike("solve_sylvester", A, B, C)
    return _L.sylvester(*same_stack(*promote_dtypes_inexact(plain(A), plain(B), plain(C))))
