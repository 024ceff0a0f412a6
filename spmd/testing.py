"""Checks for users' own functions and primitives: derivatives against finite differences.

The one idea: one random direction is enough. A derivative that is wrong anywhere is wrong along
almost every direction, and a direction costs two evaluations however large the arrays are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.api.forward import jvp
from spmd.api.reverse import vjp
from spmd.base import dtypes
from spmd.base.errors import ArgumentError
from spmd.base.tree import tree_leaves, tree_map
from spmd.core.aval import typeof

__all__ = ["check_grads", "check_jvp", "check_vjp"]

# Relative and absolute; central differences of float64 are good to about 1e-9.
_TOLERANCE = {
    dtypes.bfloat16: 1e-1,
    np.dtype(np.float16): 1e-1,
    np.dtype(np.float32): 1e-2,
    np.dtype(np.complex64): 1e-2,
    np.dtype(np.float64): 1e-5,
    np.dtype(np.complex128): 1e-5,
}


def check_grads(
    f: Callable[..., Any],
    args: Sequence[Any],
    order: int,
    modes: Sequence[str] = ("fwd", "rev"),
    atol: float | None = None,
    rtol: float | None = None,
    eps: float | None = None,
) -> None:
    """Raise an AssertionError if a derivative of `f` at `args` differs from finite differences.

    `args` are arrays or pytrees of floating or complex dtype. Derivatives are checked up to
    `order`, in each of the modes: forward ("fwd"), reverse ("rev"), and their compositions.
    """
    unknown = set(modes) - {"fwd", "rev"}
    if unknown or not modes:
        raise ArgumentError(f'check_grads: modes={tuple(modes)} must be of "fwd" and "rev"')
    _check(f, tuple(args), order, tuple(modes), (atol, rtol, eps), np.random.default_rng(0), "f")


def _check(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    order: int,
    modes: Sequence[str],
    how: tuple[Any, Any, Any],
    rng: np.random.Generator,
    name: str,
) -> None:
    if "fwd" in modes:
        check_jvp(f, lambda p, t: jvp(f, p, t), args, *how, name=f"jvp({name})")
        if order > 1:
            tangents = _direction(rng, args)

            def forward(*primals: Any) -> Any:
                return jvp(f, primals, tangents)

            _check(forward, args, order - 1, modes, how, rng, f"jvp({name})")
    if "rev" in modes:
        check_vjp(f, lambda *p: vjp(f, *p), args, *how, name=f"vjp({name})")
        if order > 1:
            cotangents = _direction(rng, f(*args))

            def backward(*primals: Any) -> Any:
                out, pullback = vjp(f, *primals)
                return out, pullback(cotangents)

            _check(backward, args, order - 1, modes, how, rng, f"vjp({name})")


def check_jvp(
    f: Callable[..., Any],
    f_jvp: Callable[..., Any],
    args: Sequence[Any],
    atol: float | None = None,
    rtol: float | None = None,
    eps: float | None = None,
    name: str = "jvp",
) -> None:
    """Check `f_jvp(primals, tangents) -> (out, tangent)` against finite differences of `f`."""
    args = tuple(args)
    tangents = _direction(np.random.default_rng(1), args)
    out, tangent = f_jvp(args, tangents)
    _assert_close(out, f(*args), atol, rtol, f"{name}: value")
    wanted = _numerical_jvp(f, args, tangents, eps)
    _assert_close(tangent, wanted, atol, rtol, f"{name}: tangent")


def check_vjp(
    f: Callable[..., Any],
    f_vjp: Callable[..., Any],
    args: Sequence[Any],
    atol: float | None = None,
    rtol: float | None = None,
    eps: float | None = None,
    name: str = "vjp",
) -> None:
    """Check `f_vjp(*primals) -> (out, pullback)` against finite differences of `f`.

    The projections that must agree are that of the cotangent of the arguments on a direction, and
    that of a cotangent of the results on the change in that direction.
    """
    args = tuple(args)
    rng = np.random.default_rng(2)
    out, pullback = f_vjp(*args)
    _assert_close(out, f(*args), atol, rtol, f"{name}: value")
    tangents, cotangents = _direction(rng, args), _direction(rng, out)
    change = _numerical_jvp(f, args, tangents, eps)
    found = pullback(cotangents)
    for arg, ct in zip(tree_leaves(args), tree_leaves(found), strict=True):
        assert typeof(arg).shape == typeof(ct).shape, f"{name}: {typeof(arg)} got {typeof(ct)}"
        assert typeof(arg).dtype == typeof(ct).dtype, f"{name}: {typeof(arg)} got {typeof(ct)}"
    # Without conjugates, as pullbacks transpose; and only the real parts need agree, as functions
    # like conj and real are linear over the real numbers alone.
    _assert_close(
        _inner(found, tangents),
        _inner(cotangents, change),
        atol,
        rtol,
        f"{name}: cotangent",
        # The sum is as exact as what is summed.
        _coarsest([*tree_leaves(found), *tree_leaves(change)]),
    )


# ---- numbers -----------------------------------------------------------------------------------


def _direction(rng: np.random.Generator, like: Any) -> Any:
    """A random tangent (or cotangent) of every leaf; `float0` zeros for integers."""

    def leaf(x: Any) -> Any:
        aval = typeof(x)
        if not dtypes.is_inexact(aval.dtype):
            return np.zeros(aval.shape, dtypes.float0)
        out = rng.normal(size=aval.shape)
        if dtypes.is_complex(aval.dtype):
            out = out + 1j * rng.normal(size=aval.shape)
        return np.asarray(out).astype(aval.dtype)

    return tree_map(leaf, like)


def _default_step(args: Any) -> float:
    """The cube root of the precision balances rounding against the curvature."""
    steps = [float(dtypes.finfo(typeof(x).dtype).eps) ** (1 / 3) for x in tree_leaves(args)]
    return max(steps, default=1e-5)


def _numerical_jvp(f: Callable[..., Any], args: Any, tangents: Any, eps: float | None) -> Any:
    step = _default_step(args) if eps is None else eps

    def moved(by: float) -> Any:
        return tree_map(lambda x, t: _as_numpy(x) + np.asarray(by * t, t.dtype), args, tangents)

    def slope(above: Any, below: Any) -> Any:
        above, below = _as_numpy(above), _as_numpy(below)
        if not dtypes.is_inexact(above.dtype):
            return np.zeros(above.shape, dtypes.float0)
        with np.errstate(invalid="ignore"):
            difference = np.where(above == below, above.dtype.type(0), above - below)
        return (difference / (2 * step)).astype(above.dtype)

    return tree_map(slope, f(*moved(step)), f(*moved(-step)))


def _as_numpy(x: Any) -> np.ndarray:
    return np.asarray(x, typeof(x).dtype)


def _inner(xs: Any, ys: Any) -> np.ndarray:
    total = np.zeros((), np.float64)
    for x, y in zip(tree_leaves(xs), tree_leaves(ys), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if dtypes.is_inexact(x.dtype) and dtypes.is_inexact(y.dtype):
            wide = np.result_type(np.float64, *(d for d in (x.dtype, y.dtype) if d.kind == "c"))
            total = total + np.sum(x.astype(wide) * y.astype(wide)).real
    return np.asarray(total)


def _coarsest(leaves: Sequence[Any]) -> np.dtype | None:
    """The least exact of the dtypes with a tolerance; None if there is none."""
    known = [np.asarray(x).dtype for x in leaves]
    return max((d for d in known if d in _TOLERANCE), key=_TOLERANCE.__getitem__, default=None)


def _assert_close(
    found: Any,
    wanted: Any,
    atol: float | None,
    rtol: float | None,
    what: str,
    dtype: np.dtype | None = None,
) -> None:
    for x, y in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape, f"{what}: shape {x.shape}, not {y.shape}"
        if x.dtype == dtypes.float0 or y.dtype == dtypes.float0:
            continue
        default = _TOLERANCE.get(x.dtype if dtype is None else dtype, 0.0)
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(
            x.astype(wide),
            y.astype(wide),
            atol=default if atol is None else atol,
            rtol=default if rtol is None else rtol,
            err_msg=what,
        )
