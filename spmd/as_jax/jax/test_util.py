"""`jax.test_util`: derivatives against finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import spmd.testing as testing
from spmd.as_jax.refuse import missing
from spmd.testing import check_grads

__all__ = ["check_grads", "check_jvp", "check_vjp"]
__getattr__ = missing("jax.test_util")


def check_jvp(
    f: Callable[..., Any],
    f_jvp: Callable[..., Any],
    args: Sequence[Any],
    atol: float | None = None,
    rtol: float | None = None,
    eps: float | None = 1e-4,
    err_msg: str = "",
) -> None:
    """Check `f_jvp(primals, tangents) -> (out, tangent)` against finite differences of `f`.

    JAX's default of `eps` stands for the step of `spmd.testing`, which fits the dtype.
    """
    testing.check_jvp(f, f_jvp, args, atol, rtol, _step(eps), err_msg or "jvp")


def check_vjp(
    f: Callable[..., Any],
    f_vjp: Callable[..., Any],
    args: Sequence[Any],
    atol: float | None = None,
    rtol: float | None = None,
    eps: float | None = 1e-4,
    err_msg: str = "",
) -> None:
    """Check `f_vjp(*primals) -> (out, pullback)` against finite differences of `f`.

    JAX's default of `eps` stands for the step of `spmd.testing`, which fits the dtype.
    """
    testing.check_vjp(f, f_vjp, args, atol, rtol, _step(eps), err_msg or "vjp")


def _step(eps: float | None) -> float | None:
    """The step asked for; None, which fits the dtype, for JAX's default."""
    return None if eps == 1e-4 else eps
