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

    The step is that of `spmd.testing`, which fits the dtype; JAX's default of `eps` stands for it.
    """
    step = None if eps == 1e-4 else eps
    testing.check_jvp(f, f_jvp, args, atol, rtol, step, err_msg or "jvp")


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

    The step is that of `spmd.testing`, which fits the dtype; JAX's default of `eps` stands for it.
    """
    step = None if eps == 1e-4 else eps
    testing.check_vjp(f, f_vjp, args, atol, rtol, step, err_msg or "vjp")
