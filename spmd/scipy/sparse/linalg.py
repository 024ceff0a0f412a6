"""`spmd.scipy.sparse.linalg`: Krylov solvers for systems whose matrix is a function of a vector.

Vectors are pytrees. Derivatives do not go through the rounds of a solver: they solve the
transposed system (`lax.custom_linear_solve`). Every solver returns `(x, None)`; SciPy's second
result, whether it converged, would have to be looked at on the host.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from spmd import lax
from spmd import numpy as snp
from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ShapeError
from spmd.base.tree import TreeDef, tree_flatten, tree_leaves, tree_map, tree_structure
from spmd.core.aval import typeof
from spmd.numpy.promotion import as_array, promote_dtypes_inexact

if TYPE_CHECKING:
    from spmd.sharding.array import Array

__all__ = ["bicgstab", "cg", "gmres"]

# A solver's own products are of full precision on all platforms; those of a function are its own.
_matmul, _vdot = (partial(f, precision="highest") for f in (snp.matmul, snp.vdot))

Apply = Callable[[Any], Any]
# One solver on flat vectors: (A, b, x0, least residual, rounds, M) -> x.
Solver = Callable[[Apply, Any, Any, Any, int, Apply], Any]


def cg(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
) -> tuple[Any, None]:
    """Solve `A x = b` for a symmetric (Hermitian) positive definite A by conjugate gradients.

    `A` is a matrix or a function of a pytree like `b`; `M` approximates its inverse, and `x0` is
    the first guess (zeros). The rounds end when the residual is below `max(tol * |b|, atol)`, or
    after `maxiter` (ten times the number of unknowns). The result is (x, None), where x has the
    shape of `b` and the float or complex dtype that `A` and `b` are promoted to. The method is
    algorithm 9.1 of Saad, Iterative Methods for Sparse Linear Systems (2nd ed.). Raises
    `ShapeError` if a matrix `A` is not square or does not fit `b`.

    >>> a = np.array([[4.0, 1.0], [1.0, 3.0]])
    >>> x, _ = spmd.scipy.sparse.linalg.cg(a, np.array([1.0, 2.0]))
    >>> x.round(4)
    Array([0.0909, 0.6364], dtype=float32)
    """
    return _solve("cg", _cg, A, b, x0, tol, atol, maxiter, M, symmetric=True)


def bicgstab(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
) -> tuple[Any, None]:
    """Solve `A x = b` by the stabilised biconjugate gradient method.

    `A`, which need not be symmetric, `b`, `x0`, `tol`, `atol`, `maxiter`, `M`, and the result's
    shape and dtype are those of `cg`. The method is algorithm 7.7 of Saad, with the preconditioner
    from the right. Raises `ShapeError` as `cg` does.

    >>> a = np.array([[4.0, 1.0], [0.0, 3.0]])
    >>> x, _ = spmd.scipy.sparse.linalg.bicgstab(a, np.array([5.0, 3.0]))
    >>> x.round(4)
    Array([1., 1.], dtype=float32)
    """
    return _solve("bicgstab", _bicgstab, A, b, x0, tol, atol, maxiter, M, symmetric=False)


def gmres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    tol: float = 1e-5,
    atol: float = 0.0,
    restart: int = 20,
    maxiter: int | None = None,
    M: Any = None,
    solve_method: str = "batched",
) -> tuple[Any, Array]:
    """Solve `A x = b` by generalised minimal residuals.

    `A`, which need not be symmetric, `b`, `x0`, `tol`, `atol`, `M`, and the result's shape and
    dtype are those of `cg`. Each of `maxiter` rounds searches a space of `restart` dims.
    `solve_method` is "batched" or "incremental": both of JAX's methods find the same minimum, and
    here it is found once a round. The method is algorithm 6.11 of Saad with modified Gram-Schmidt,
    the preconditioner from the right. The second result is -1 if the solution has NaN, else 0.
    Raises `ArgumentError` for another `solve_method` or if `restart` is not positive, and
    `ShapeError` as `cg` does.

    >>> a = np.array([[4.0, 1.0], [0.0, 3.0]])
    >>> x, _ = spmd.scipy.sparse.linalg.gmres(a, np.array([5.0, 3.0]))
    >>> x.round(4)
    Array([1., 1.], dtype=float32)
    """
    if solve_method not in ("batched", "incremental"):
        raise ArgumentError(
            f"gmres: solve_method={solve_method!r} must be 'batched' or 'incremental'"
        )
    restart = operator.index(restart)
    if restart < 1:
        raise ArgumentError(f"gmres: restart={restart} must be at least 1")
    size = sum(typeof(leaf).size for leaf in tree_leaves(b))
    method = _gmres(min(restart, size))
    x, _ = _solve("gmres", method, A, b, x0, tol, atol, maxiter, M, symmetric=False)
    return x, snp.where(snp.isnan(_norm(_ravel(x))), -1, 0)


# ---- pytrees and derivatives -------------------------------------------------------------------


def _solve(
    name: str,
    method: Solver,
    A: Any,
    b: Any,
    x0: Any,
    tol: Any,
    atol: Any,
    maxiter: int | None,
    M: Any,
    *,
    symmetric: bool,
) -> tuple[Any, None]:
    """Check and flatten the system; solve it by a method, as one differentiable linear solve."""
    apply, approximate = _operator(name, "A", A), _operator(name, "M", M)
    b = tree_map(_strong, b)
    start = tree_map(snp.zeros_like, b) if x0 is None else tree_map(as_array, x0)
    _check_like(name, "x0", start, b)
    _check_like(name, "A(x)", apply(start), b)
    size = sum(typeof(leaf).size for leaf in tree_leaves(b))
    rounds = 10 * size if maxiter is None else operator.index(maxiter)

    def solve(matvec: Apply, right: Any) -> Any:
        flat = _ravel(right)
        back = _Back(right)
        begin = _ravel(start).astype(typeof(flat).dtype)
        wanted = snp.maximum(tol * _norm(flat), atol)
        return back(
            method(_flat(matvec, back), flat, begin, wanted, rounds, _flat(approximate, back))
        )

    # The transpose of a Hermitian A is its conjugate: another matrix, unless A is real.
    symmetric = symmetric and not any(dtypes.is_complex(typeof(x).dtype) for x in tree_leaves(b))
    x = lax.custom_linear_solve(apply, b, solve, None if symmetric else solve, symmetric)
    return x, None


def _strong(x: Any) -> Any:
    (x,) = promote_dtypes_inexact(as_array(x))
    return lax.convert_element_type(x, typeof(x).dtype)  # without a weak type


def _ravel(tree: Any) -> Any:
    """All leaves in one vector of their common dtype."""
    leaves = promote_dtypes_inexact(*tree_leaves(tree))
    return snp.concatenate([snp.ravel(leaf) for leaf in leaves])


class _Back:
    """Makes a tree like another one of a vector."""

    def __init__(self, like: Any):
        leaves, tree = tree_flatten(like)
        self.tree: TreeDef = tree
        self.avals = [typeof(leaf) for leaf in leaves]

    def __call__(self, v: Any) -> Any:
        parts, at = [], 0
        for aval in self.avals:
            part = snp.reshape(v[at : at + aval.size], aval.shape)
            parts.append(part.astype(aval.dtype))
            at += aval.size
        return self.tree.unflatten(parts)


def _flat(f: Apply, back: Apply) -> Apply:
    return lambda v: _ravel(f(back(v))).astype(typeof(v).dtype)


def _operator(name: str, which: str, given: Any) -> Apply:
    if given is None:
        return lambda x: x
    if callable(given):
        return given
    shape = typeof(given).shape
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ShapeError(
            f"{name}: {which} must be a square matrix or a function, got shape {shape}"
        )
    return lambda x: _matmul(given, x)


def _check_like(name: str, what: str, x: Any, b: Any) -> None:
    shapes = [[typeof(leaf).shape for leaf in tree_leaves(t)] for t in (x, b)]
    if tree_structure(x) != tree_structure(b) or shapes[0] != shapes[1]:
        raise ShapeError(
            f"{name}: {what} must have the structure and shapes of b, {shapes[1]}, got {shapes[0]}"
        )


def _norm(v: Any) -> Any:
    return snp.sqrt(snp.real(_vdot(v, v)))


# ---- the solvers -------------------------------------------------------------------------------


def _cg(A: Apply, b: Any, x0: Any, least: Any, rounds: int, M: Apply) -> Any:
    r = b - A(x0)
    z = M(r)

    def going(state: Any) -> Any:
        _, r, _, _, k = state
        return (_norm(r) > least) & (k < rounds)

    def step(state: Any) -> Any:
        x, r, p, gamma, k = state
        q = A(p)
        alpha = gamma / snp.real(_vdot(p, q)).astype(typeof(gamma).dtype)
        x, r = x + alpha * p, r - alpha * q
        z = M(r)
        following = _vdot(r, z)
        return x, r, z + following / gamma * p, following, k + 1

    return lax.while_loop(going, step, (x0, r, z, _vdot(r, z), 0))[0]


def _bicgstab(A: Apply, b: Any, x0: Any, least: Any, rounds: int, M: Apply) -> Any:
    shadow = b - A(x0)
    one = snp.ones((), typeof(b).dtype)

    def going(state: Any) -> Any:
        _, r, *_, rho, k = state
        # At a rho of zero the method has broken down, and another iteration would divide by it.
        return (_norm(r) > least) & (k < rounds) & (rho != 0)

    def step(state: Any) -> Any:
        x, r, p, v, alpha, omega, rho, k = state
        following = _vdot(shadow, r)
        beta = following / rho * (alpha / omega)
        p = r + beta * (p - omega * v)
        direct = M(p)
        v = A(direct)
        alpha = following / _vdot(shadow, v)
        half = r - alpha * v
        second = M(half)
        t = A(second)
        size = _vdot(t, t)
        # A half step that is exact leaves nothing to stabilise.
        omega = snp.where(size == 0, 0 * one, _vdot(t, half) / snp.where(size == 0, one, size))
        x = x + alpha * direct + omega * second
        return x, half - omega * t, p, v, alpha, snp.where(omega == 0, one, omega), following, k + 1

    zero = snp.zeros_like(b)
    return lax.while_loop(going, step, (x0, shadow, zero, zero, one, one, one, 0))[0]


def _gmres(space: int) -> Solver:
    """GMRES, restarted after `space` directions."""

    def solver(A: Apply, b: Any, x0: Any, least: Any, rounds: int, M: Apply) -> Any:
        n, dtype = typeof(b).shape[0], typeof(b).dtype

        def going(state: Any) -> Any:
            _, size, k = state
            return (size > least) & (k < rounds)

        def extend(k: Any, state: Any) -> Any:
            """One more direction, orthogonal to those before it."""
            basis, table = state
            w = A(M(basis[k]))
            # Rows beyond k are zero: they take nothing away. Twice, against rounding.
            first = _matmul(snp.conj(basis), w)
            w = w - _matmul(first, basis)
            again = _matmul(snp.conj(basis), w)
            w = w - _matmul(again, basis)
            size = _norm(w)
            enough = size > 10 * snp.finfo(dtype).eps * _norm(first)
            row = snp.where(enough, w / snp.where(enough, size, 1).astype(dtype), 0)
            column = (first + again).at[k + 1].set(snp.where(enough, size, 0).astype(dtype))
            return basis.at[k + 1].set(row.astype(dtype)), table.at[:, k].set(column)

        def step(state: Any) -> Any:
            x, _, k = state
            r = b - A(x)
            length = _norm(r).astype(dtype)
            basis = snp.zeros((space + 1, n), dtype).at[0].set(r / length)
            table = snp.zeros((space + 1, space), dtype)
            basis, table = lax.fori_loop(0, space, extend, (basis, table))
            target = snp.zeros(space + 1, dtype).at[0].set(length)
            y = snp.linalg.lstsq(table, target)[0]
            x = x + M(_matmul(y, basis[:space]))
            return x, _norm(b - A(x)), k + 1

        return lax.while_loop(going, step, (x0, _norm(b - A(x0)), 0))[0]

    return solver
