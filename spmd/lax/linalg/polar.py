"""Polar decomposition by the dynamically weighted Halley iteration, with QR factors only."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.base import dtypes
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.core.structural import broadcast_in_dim, reduce_sum
from spmd.lax.arithmetic import abs as _abs
from spmd.lax.arithmetic import add, cbrt, div, mul, sqrt, square, sub
from spmd.lax.concatenate import concatenate
from spmd.lax.control_while import while_loop
from spmd.lax.convert import convert_element_type
from spmd.lax.families import const
from spmd.lax.linalg.family import adjoint, eye_like, matmul, symmetrize
from spmd.lax.linalg.qr import qr
from spmd.lax.logic import bitwise_and, bitwise_not, bitwise_or, gt, lt
from spmd.lax.reduce import reduce_max
from spmd.lax.slicing import slice_in_dim

if TYPE_CHECKING:
    from spmd.sharding.array import Array


def qdwh(
    x: Any,
    *,
    is_hermitian: bool = False,
    max_iterations: int | None = None,
    eps: float | None = None,
    dynamic_shape: tuple[int, int] | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Compute the polar factors of a matrix of full rank: `(u, h, steps, converged)`.

    `x` has shape (m, n) with m >= n and a float or complex dtype; `x == u @ h`, u with orthonormal
    columns and h Hermitian and positive. An iteration ends when two iterates differ by less than
    `(4 * eps) ** (1 / 3)` times their size, or after `max_iterations` (10). `is_hermitian` makes no
    difference; `dynamic_shape` is not supported. The method is that of Nakatsukasa, Bai and Gygi
    (2010); for derivatives use `scipy.linalg.polar`. Raises `ShapeError` for other shapes, and
    `ArgumentError` for a `dynamic_shape`.

    >>> u, h, steps, converged = lax.linalg.qdwh(np.array([[2.0, 0.0], [0.0, -3.0]], np.float32))
    >>> bool(converged), u.shape
    (True, (2, 2))
    """
    del is_hermitian
    if dynamic_shape is not None:
        raise ArgumentError("qdwh: dynamic_shape is not supported; cut the padding off before")
    aval = typeof(x)
    if aval.ndim != 2 or aval.shape[0] < aval.shape[1]:
        raise ShapeError(f"qdwh: x must be (m, n) with m >= n, got {aval}")
    dtype = dtypes.real_of(aval.dtype)
    rounding = float(dtypes.finfo(dtype).eps) if eps is None else float(eps)
    most = 10 if max_iterations is None else operator.index(max_iterations)
    number = lambda value: np.asarray(value, dtype)  # noqa: E731
    close_bound, close_step = number(5 * rounding), number(np.cbrt(5 * rounding))

    def is_open(bound: Any, change: Any) -> Any:
        return bitwise_or(gt(change, close_step), gt(_abs(sub(bound, number(1))), close_bound))

    def unfinished(state: Any) -> Any:
        _, bound, step, change = state
        return bitwise_and(lt(step, np.int32(most)), is_open(bound, change))

    def halley(state: Any) -> Any:
        u, bound, step, _ = state
        a, b, c, bound = _weights(bound)
        new = _by_qr(u, a, b, c)
        change = div(_norm(sub(new, u)), _norm(new))
        return new, bound, add(step, np.int32(1)), change

    scale = sqrt(mul(_sums(x, 0), _sums(x, 1)))
    start = div(x, _like(scale, x))
    state = (start, number(rounding), np.int32(0), number(np.inf))
    u, bound, steps, change = while_loop(unfinished, halley, state)
    # One step of Newton and Schulz removes the rounding error.
    defect = matmul(u, matmul(adjoint(u), u))
    u = sub(mul(const(u, 1.5), u), mul(const(u, 0.5), defect))
    h = symmetrize(matmul(adjoint(u), x))
    return u, h, steps, bitwise_not(is_open(bound, change))


def _sums(x: Any, dim: int) -> Any:
    """The largest sum of sizes along a dim: the norms 1 and infinity."""
    return reduce_max(reduce_sum(_abs(x), (dim,)), (0,))


def _norm(x: Any) -> Any:
    return sqrt(reduce_sum(square(_abs(x)), (0, 1)))


def _like(number: Any, x: Any) -> Any:
    """A real number in the dtype of a matrix and in every place of it."""
    aval = typeof(x)
    return broadcast_in_dim(convert_element_type(number, aval.dtype), aval.shape, ())


def _weights(bound: Any) -> tuple[Any, Any, Any, Any]:
    """Halley's weights for singular values in [bound, 1], and the bound that then holds."""
    one, two, four = (const(bound, value) for value in (1, 2, 4))
    squared = square(bound)
    d = cbrt(div(mul(four, sub(one, squared)), square(squared)))
    root = sqrt(add(one, d))
    inner = add(sub(two, d), div(mul(two, sub(two, squared)), mul(squared, root)))
    a = add(root, sqrt(mul(const(bound, 1), inner)))
    b = div(square(sub(a, one)), four)
    c = sub(add(a, b), one)
    new = div(mul(bound, add(a, mul(b, squared))), add(one, mul(c, squared)))
    return a, b, c, new


def _by_qr(u: Any, a: Any, b: Any, c: Any) -> Any:
    """One step: `b / c u + (a - b / c) / sqrt(c) q1 q2^H`, where [sqrt(c) u; 1] = [q1; q2] r."""
    m = typeof(u).shape[0]
    root = sqrt(c)
    tall = concatenate([mul(_like(root, u), u), eye_like(matmul(adjoint(u), u))], 0)
    q, _ = qr(tall, full_matrices=False)
    upper, lower = slice_in_dim(q, 0, m), slice_in_dim(q, m, None)
    ratio = div(b, c)
    kept = mul(_like(ratio, u), u)
    return add(kept, mul(_like(div(sub(a, ratio), root), u), matmul(upper, adjoint(lower))))
