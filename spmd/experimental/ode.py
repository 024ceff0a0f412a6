"""Ordinary differential equations: `odeint`, with the gradient of the adjoint equation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import spmd.lax as lax
import spmd.numpy as snp
from spmd.api.closure import closure_convert
from spmd.api.reverse import vjp
from spmd.api.vectorize import vmap
from spmd.base import dtypes
from spmd.base.config import config
from spmd.base.errors import ArgumentError, DtypeError
from spmd.base.tree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from spmd.core.aval import is_arraylike
from spmd.core.custom_vjp import custom_vjp
from spmd.flatten_util import ravel_pytree

__all__ = ["odeint"]

# The method of Dormand and Prince of order 5, with the error estimate of order 4.
_NODES = np.array([1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0])
_STAGES = np.array(
    [
        [1 / 5, 0, 0, 0, 0, 0],
        [3 / 40, 9 / 40, 0, 0, 0, 0],
        [44 / 45, -56 / 15, 32 / 9, 0, 0, 0],
        [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729, 0, 0],
        [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656, 0],
        [35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
    ]
)
_SOLUTION = np.array([*_STAGES[-1], 0.0])
_LOWER = [5179 / 57600, 0, 7571 / 16695, 393 / 640, -92097 / 339200, 187 / 2100, 1 / 40]
_ERROR = _SOLUTION - np.array(_LOWER)
# The weights of Shampine (1986) for the solution in the middle of a step.
_MIDDLE = 0.5 * np.array(
    [
        6025192743 / 30085553152,
        0.0,
        51252292925 / 65400821598,
        -2691868925 / 45128329728,
        187940372067 / 1594534317056,
        -1776094331 / 19743644256,
        11237099 / 235043384,
    ]
)
_ORDER = 5


def odeint(
    func: Callable[..., Any],
    y0: Any,
    t: Any,
    *args: Any,
    rtol: float = 1.4e-8,
    atol: float = 1.4e-8,
    mxstep: float = np.inf,
    hmax: float = np.inf,
) -> Any:
    """Solve dy/dt = `func(y, t, *args)` with y(`t[0]`) = `y0`, and give y at each time of `t`.

    `y0` is an array or a pytree of arrays, and `func` returns the same structure; the result has a
    leading dim of `len(t)` in front of each array. `t` increases. The step is chosen so that the
    estimated error stays under `atol + rtol * abs(y)`; it is at most `hmax`, and from one time of
    `t` to the next there are at most `mxstep` steps. The method is that of Dormand and Prince;
    values between steps come from a polynomial of degree 4.

    Reverse mode solves the adjoint equation backwards in time, with the same tolerances, and so
    needs no memory for the steps; derivatives go to `y0`, `t`, `args` and what `func` closes over.
    Raises `ArgumentError` if an argument for `func` is not an array, and `DtypeError`
    if `t` is not of floats.

    >>> import spmd.numpy as snp
    >>> decay = odeint(lambda y, t, rate: -rate * y, snp.float32(1.0), snp.array([0.0, 1.0]), 2.0)
    >>> print(decay.round(3))
    [1.    0.135]
    """
    for leaf in tree_leaves(args):
        if not is_arraylike(leaf):
            raise ArgumentError(
                f"odeint: the arguments of func must be arrays or pytrees of arrays, got {leaf!r} "
                f"of type {type(leaf).__name__}; close over it instead"
            )
    y0 = tree_map(_inexact, y0)
    flat, unravel = ravel_pytree(y0)
    t, args = snp.asarray(t), tree_map(snp.asarray, args)
    if not snp.issubdtype(t.dtype, snp.floating):
        raise DtypeError(
            f"odeint: the times must be floats, got t of dtype {t.dtype}; convert it with "
            "t.astype(float)"
        )

    def flat_func(y: Any, s: Any, *rest: Any) -> Any:
        return ravel_pytree(func(unravel(y), s, *rest))[0].astype(flat.dtype)

    # The estimate of the error tells a step from noise: products of func are exact, as in JAX.
    with config.override("default_matmul_precision", "highest"):
        converted, consts = closure_convert(flat_func, flat, t[0], *args)
        out = _solve(converted, (rtol, atol, mxstep, hmax), flat, t, (args, tuple(consts)))
    return vmap(unravel)(out)


def _inexact(x: Any) -> Any:
    x = snp.asarray(x)
    return x if snp.issubdtype(x.dtype, snp.inexact) else x.astype(snp.result_type(float))


@partial(custom_vjp, nondiff_argnums=(0, 1))
def _solve(func: Callable[..., Any], options: tuple[float, ...], y0: Any, t: Any, rest: Any) -> Any:
    """The solution at the times `t`, one row each."""
    rtol, atol, mxstep, hmax = options
    args, consts = rest

    def slope(y: Any, s: Any) -> Any:
        return func(y, s, *args, *consts)

    def advance(carry: Any, target: Any) -> Any:
        def unfinished(state: Any) -> Any:
            count, _, _, s, dt, _, _ = state
            return (s < target) & (count < mxstep) & (dt > 0)

        def step(state: Any) -> Any:
            count, y, f, s, dt, s_before, coefficients = state
            new_y, new_f, error, stages = _stages(slope, y, f, s, dt)
            ratio = _error_ratio(error, rtol, atol, y, new_y)
            fitted = _polynomial(y, new_y, stages, dt)
            next_dt = snp.clip(_next_step(dt, ratio), 0.0, hmax)
            accepted = [new_y, new_f, s + dt, next_dt, s, fitted]
            rejected = [y, f, s, next_dt, s_before, coefficients]
            kept = [snp.where(ratio <= 1.0, a, b) for a, b in zip(accepted, rejected, strict=True)]
            return [count + 1, *kept]

        _, *carry = lax.while_loop(unfinished, step, [0, *carry])
        _, _, s, _, s_before, coefficients = carry
        where = (target - s_before) / (s - s_before)
        return carry, snp.polyval(coefficients, where.astype(coefficients.dtype))

    f0 = slope(y0, t[0])
    dt = snp.clip(_first_step(slope, t[0], y0, rtol, atol, f0), 0.0, hmax).astype(t.dtype)
    start = [y0, f0, t[0], dt, t[0], snp.stack([y0] * 5)]
    _, ys = lax.scan(advance, start, t[1:])
    return snp.concatenate([y0[None], ys])


def _stages(
    slope: Callable[..., Any], y: Any, f: Any, s: Any, dt: Any
) -> tuple[Any, Any, Any, Any]:
    """One step: the solution, its slope, the estimated error, and the slopes of all stages."""
    real = snp.finfo(y.dtype).dtype
    weights, nodes = _STAGES.astype(real), _NODES.astype(s.dtype)
    step = dt.astype(real)
    slopes = [f]
    for row, node in zip(weights, nodes, strict=True):
        inside = sum((w * k for w, k in zip(row, slopes, strict=False) if w), snp.zeros_like(y))
        slopes.append(slope(y + step * inside, s + dt * node))
    stages = snp.stack(slopes)
    new_y = y + step * (_SOLUTION.astype(real) @ stages)
    return new_y, slopes[-1], step * (_ERROR.astype(real) @ stages), stages


def _polynomial(y: Any, new_y: Any, stages: Any, dt: Any) -> Any:
    """The coefficients of the quartic that has the values and slopes of both ends of a step, and
    the value in its middle."""
    real = snp.finfo(y.dtype).dtype
    step = dt.astype(real)
    middle = y + step * (_MIDDLE.astype(real) @ stages)
    f, g = step * stages[0], step * stages[-1]
    quartic = -2 * f + 2 * g - 8 * y - 8 * new_y + 16 * middle
    cubic = 5 * f - 3 * g + 18 * y + 14 * new_y - 32 * middle
    square = -4 * f + g - 11 * y - 5 * new_y + 16 * middle
    return snp.stack([quartic, cubic, square, f, y])


def _error_ratio(error: Any, rtol: float, atol: float, y: Any, new_y: Any) -> Any:
    allowed = atol + rtol * snp.maximum(snp.abs(y), snp.abs(new_y))
    return snp.sqrt(snp.mean(snp.abs(error / allowed) ** 2))


def _next_step(dt: Any, ratio: Any) -> Any:
    """The step after one with this error: at most 10 times and at least a fifth as long."""
    least = snp.where(ratio < 1, 1.0, 0.2)
    factor = snp.minimum(10.0, snp.maximum(0.9 * ratio ** (-1.0 / _ORDER), least))
    return snp.where(ratio == 0, dt * 10.0, dt * factor.astype(dt.dtype))


def _first_step(slope: Any, t0: Any, y0: Any, rtol: float, atol: float, f0: Any) -> Any:
    """The first step, as in Hairer, Norsett and Wanner, Solving ODEs I, section II.4."""
    scale = atol + snp.abs(y0) * rtol
    size, speed = snp.linalg.norm(y0 / scale), snp.linalg.norm(f0 / scale)
    tiny = (size < 1e-5) | (speed < 1e-5)
    guess = snp.where(tiny, 1e-6, 0.01 * size / snp.where(tiny, 1.0, speed))
    moved = slope(y0 + guess * f0, t0 + guess.astype(t0.dtype))
    bend = snp.linalg.norm((moved - f0) / scale) / guess
    largest = snp.maximum(speed, bend)
    flat = largest <= 1e-15
    power = (0.01 / snp.where(flat, 1.0, largest)) ** (1.0 / _ORDER)
    second = snp.where(flat, snp.maximum(1e-6, guess * 1e-3), power)
    return snp.minimum(100.0 * guess, second)


def _solve_fwd(func: Any, options: Any, y0: Any, t: Any, rest: Any) -> Any:
    ys = _solve(func, options, y0, t, rest)
    return ys, (ys, t, rest)


def _solve_bwd(func: Any, options: Any, kept: Any, ct: Any) -> Any:
    """The adjoint equation, from the last time to the first, with the solution run backwards."""
    ys, t, (args, consts) = kept
    rtol, atol, mxstep, hmax = options

    flat_args, args_tree = tree_flatten((args, consts))
    moving = [k for k, x in enumerate(flat_args) if snp.issubdtype(x.dtype, snp.inexact)]

    # The state is y, the cotangents of y and of time, and those of what moves among the rest.
    def along(state: Any, minus_s: Any, *leaves: Any) -> Any:
        y, y_bar, _, _ = state

        def at(y: Any, s: Any, *moved: Any) -> Any:
            full = list(leaves)
            for k, x in zip(moving, moved, strict=True):
                full[k] = x
            inner_args, inner_consts = tree_unflatten(args_tree, full)
            return func(y, s, *inner_args, *inner_consts)

        value, pull = vjp(at, y, -minus_s, *[leaves[k] for k in moving])
        y_dot, t_dot, *rest = pull(y_bar)
        return (-value, y_dot, t_dot, tuple(rest))

    def segment(carry: Any, k: Any) -> Any:
        y_bar, t0_bar, rest_bar = carry
        slope = func(ys[k], t[k], *args, *consts)
        t_bar = snp.sum(slope * ct[k]).real.astype(t.dtype)
        start = (ys[k], y_bar, t0_bar - t_bar, rest_bar)
        times = snp.stack([-t[k], -t[k - 1]])
        found = odeint(
            along, start, times, *flat_args, rtol=rtol, atol=atol, mxstep=mxstep, hmax=hmax
        )
        _, y_bar, t0_bar, rest_bar = tree_map(lambda x: x[1], found)
        return (y_bar + ct[k - 1], t0_bar, rest_bar), t_bar

    zeros = tuple(snp.zeros_like(flat_args[k]) for k in moving)
    start = (ct[-1], snp.zeros((), t.dtype), zeros)
    order = snp.arange(len(t) - 1, 0, -1)
    (y_bar, t0_bar, rest_bar), t_bars = lax.scan(segment, start, order)
    t_bar = snp.concatenate([t0_bar[None], t_bars[::-1]])
    found = [np.zeros(x.shape, dtypes.float0) for x in flat_args]
    for k, x in zip(moving, rest_bar, strict=True):
        found[k] = x
    return y_bar, t_bar, tree_unflatten(args_tree, found)


_solve.defvjp(_solve_fwd, _solve_bwd)
