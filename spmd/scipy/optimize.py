"""`spmd.scipy.optimize`: minimisation of a function of a vector by BFGS.

The one idea: everything is one `while_loop` of arrays, so that `minimize` itself can be compiled
and vectorised. The line search bisects until the weak Wolfe conditions hold, which keep the
approximate inverse Hessian positive definite (A. Lewis and M. Overton, "Nonsmooth optimization via
quasi-Newton methods", 2013, algorithm 2.6); the update is Nocedal and Wright's (6.17).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmd import lax
from spmd import numpy as snp
from spmd.api.reverse import value_and_grad
from spmd.base.errors import ArgumentError, ShapeError
from spmd.core.aval import typeof
from spmd.numpy.promotion import as_array, promote_dtypes_inexact

if TYPE_CHECKING:
    from spmd.sharding.array import Array

__all__ = ["OptimizeResults", "minimize"]

# Its own products are of full precision on all platforms; those of the function are the user's.
_matmul, _vdot = (partial(f, precision="highest") for f in (snp.matmul, snp.vdot))

_SUFFICIENT_DECREASE, _CURVATURE = 1e-4, 0.9
_CONVERGED, _TOO_MANY_STEPS, _LINE_SEARCH_FAILED = 0, 1, 3
_DEFAULTS = {"maxiter": None, "norm": np.inf, "gtol": 1e-5, "line_search_maxiter": 30}


class OptimizeResults(NamedTuple):
    """Result of `minimize`: `status` is 0 if `success`, 1 after maxiter, 3 if a search failed."""

    x: Array
    success: Array
    status: Array
    fun: Array
    jac: Array
    hess_inv: Array
    nfev: Array
    njev: Array
    nit: Array


class _State(NamedTuple):
    x: Any
    f: Any
    g: Any
    inverse: Any
    status: Any
    calls: Any
    steps: Any


class _Point(NamedTuple):
    """A step along the direction, with the objective and its slope there."""

    step: Any
    f: Any
    slope: Any


class _Search(NamedTuple):
    low: _Point
    high: _Point
    step: Any
    f: Any
    g: Any
    done: Any
    calls: Any


def minimize(
    fun: Callable[..., Any],
    x0: Any,
    args: tuple[Any, ...] = (),
    *,
    method: str,
    tol: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> OptimizeResults:
    """Minimise `fun(x, *args)` over vectors x, starting at `x0`.

    `fun` returns a scalar and is differentiable. `x0` has shape (n,) and a float dtype (integers
    become float32). `args` is a tuple of further arguments. `method` is "BFGS". `options` are
    maxiter (200 n by default), gtol and norm (it ends where the norm of the gradient is below gtol,
    1e-5), and line_search_maxiter (30); `tol` is another gtol. The line search finds a step of the
    weak Wolfe conditions by bisection (Lewis and Overton 2013, algorithm 2.6), with cubic steps
    between; the update is Nocedal and Wright's (6.17).

    Raises `ArgumentError` for another method or option or if `args` is no tuple, `ShapeError` if
    `x0` is no vector, and `GradError` if `fun` returns no real scalar.

    >>> fun = lambda x: snp.sum((x - 3.0) ** 2)
    >>> result = spmd.scipy.optimize.minimize(fun, snp.zeros(2), method="BFGS")
    >>> snp.round(result.x, 4), bool(result.success)
    (Array([3., 3.], dtype=float32), True)
    """
    if method.lower() != "bfgs":
        raise ArgumentError(f"minimize: method must be 'BFGS', got {method!r}")
    if not isinstance(args, tuple):
        raise ArgumentError(f"minimize: args must be a tuple, got {args!r}")
    chosen = {**_DEFAULTS, **(options or {})}
    if unknown := set(chosen) - set(_DEFAULTS):
        raise ArgumentError(f"minimize: unknown options {sorted(unknown)}; {list(_DEFAULTS)} exist")
    (x0,) = promote_dtypes_inexact(as_array(x0))
    if typeof(x0).ndim != 1:
        raise ShapeError(f"minimize: x0 must be a vector, got {typeof(x0)}; ravel_pytree makes one")
    objective = value_and_grad(lambda x: fun(x, *args))
    limit = chosen["maxiter"]
    limit = 200 * typeof(x0).size if limit is None else limit
    gtol = chosen["gtol"] if tol is None else tol
    return _bfgs(objective, x0, limit, gtol, chosen["norm"], chosen["line_search_maxiter"])


def _bfgs(
    objective: Callable[[Any], Any], x0: Any, limit: int, gtol: float, norm: Any, tries: int
) -> OptimizeResults:
    """BFGS (Nocedal and Wright, algorithm 6.1) as one loop, until the gradient is small."""
    f, g = objective(x0)
    if typeof(f).shape:
        raise ShapeError(f"minimize: fun must return a scalar, got {typeof(f)}")

    def flat(g: Any) -> Any:
        return snp.linalg.norm(g, ord=norm) < gtol

    def body(s: _State) -> _State:
        direction = -_matmul(s.inverse, s.g)
        # The identity knows no scale: the first step is about as long as x is expected to move.
        shortened = snp.minimum(1.0, 1.01 / snp.linalg.norm(s.g))
        start = snp.where(s.steps == 0, shortened, 1.0).astype(typeof(s.f).dtype)
        found = _line_search(objective, s, direction, start, tries)
        move, turn = found.step * direction, found.g - s.g
        x = snp.where(found.done, s.x + move, s.x)
        f, g = snp.where(found.done, found.f, s.f), snp.where(found.done, found.g, s.g)
        status = snp.where(found.done, snp.where(flat(g), _CONVERGED, -1), _LINE_SEARCH_FAILED)
        steps = s.steps + 1
        status = snp.where((status == -1) & (steps >= limit), _TOO_MANY_STEPS, status)
        before = snp.where(s.steps == 0, _scaled(s.inverse, move, turn), s.inverse)
        inverse = snp.where(found.done, _updated(before, move, turn), s.inverse)
        return _State(x, f, g, inverse, status.astype(np.int32), s.calls + found.calls, steps)

    status = snp.where(flat(g), _CONVERGED, -1 if limit > 0 else _TOO_MANY_STEPS)
    inverse = snp.eye(typeof(x0).size, dtype=typeof(x0).dtype)
    zero = snp.zeros((), np.int32)
    first = _State(x0, f, g, inverse, status.astype(np.int32), zero + 1, zero)
    s = lax.while_loop(lambda s: s.status == -1, body, first)
    success = s.status == _CONVERGED
    return OptimizeResults(s.x, success, s.status, s.f, s.g, s.inverse, s.calls, s.calls, s.steps)


def _line_search(
    objective: Callable[[Any], Any], s: _State, direction: Any, start: Any, tries: int
) -> _Search:
    """A step that decreases enough and past which the slope is less steep.

    `low` decreases enough but is too steep, `high` does not: the wanted point lies between.
    """
    slope = _vdot(s.g, direction)

    def body(c: _Search) -> _Search:
        f, g = objective(s.x + c.step * direction)
        here = _Point(c.step, f, _vdot(g, direction))
        enough = f <= s.f + _SUFFICIENT_DECREASE * c.step * slope
        done = enough & (here.slope >= _CURVATURE * slope)
        low = _Point(*(snp.where(enough, x, y) for x, y in zip(here, c.low, strict=True)))
        high = _Point(*(snp.where(enough, y, x) for x, y in zip(here, c.high, strict=True)))
        between = snp.where(snp.isinf(high.step), 2 * low.step, _between(low, high))
        return _Search(low, high, snp.where(done, c.step, between), f, g, done, c.calls + 1)

    zero = snp.zeros_like(s.f)
    low, high = _Point(zero, s.f, slope), _Point(zero + np.inf, zero, zero)
    calls = snp.zeros((), np.int32)
    first = _Search(low, high, start, s.f, s.g, snp.zeros((), bool), calls)
    return lax.while_loop(lambda c: ~c.done & (c.calls < tries), body, first)


def _between(low: _Point, high: _Point) -> Any:
    """The minimum of the cubic through two points, kept off both ends; else the middle.

    Nocedal and Wright, Numerical Optimization, (3.59), scaled so that squares do not overflow.
    """
    width = high.step - low.step
    d = low.slope + high.slope - 3 * (high.f - low.f) / width
    scale = snp.maximum(snp.abs(d), snp.maximum(snp.abs(low.slope), snp.abs(high.slope)))
    root = scale * snp.sqrt((d / scale) ** 2 - (low.slope / scale) * (high.slope / scale))
    lowest = high.step - width * ((high.slope + root - d) / (high.slope - low.slope + 2 * root))
    kept = snp.clip(lowest, low.step + 0.1 * width, high.step - 0.1 * width)
    return snp.where(snp.isfinite(lowest), kept, low.step + 0.5 * width)


def _scaled(inverse: Any, move: Any, turn: Any) -> Any:
    """The first inverse Hessian in the scale that the first step has shown.

    Without it an update of the identity is lost to rounding where curvatures are far from 1
    (Nocedal and Wright, (6.20)).
    """
    product, square = _vdot(move, turn), _vdot(turn, turn)
    known = (product > 0) & snp.isfinite(square) & (square > 0)
    return inverse * snp.where(known, product / snp.where(known, square, 1.0), 1.0)


def _updated(inverse: Any, move: Any, turn: Any) -> Any:
    """The inverse Hessian after a step `move` over which the gradient changed by `turn`."""
    product = _vdot(move, turn)
    rho = 1 / snp.where(product > 0, product, 1.0)
    left = snp.eye(typeof(move).size, dtype=typeof(move).dtype) - rho * snp.outer(move, turn)
    updated = _matmul(_matmul(left, inverse), left.T) + rho * snp.outer(move, move)
    return snp.where(product > 0, updated, inverse)
