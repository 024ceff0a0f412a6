"""`jit` as users call it: a function, a decorator, or a decorator with options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spmd.compile.dispatch.jit import JitFunction


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    inline: bool = False,
) -> Any:
    """Trace a function once for each signature of its arguments, and run it compiled.

    A signature is the arguments' structure, shapes, dtypes and weak types, and the values of the
    static arguments, which must be hashable. Donated arguments may be overwritten by the results
    and cannot be used afterwards. Python side effects happen only while tracing. Raises an
    `ArgumentError` that names a non-static argument which is no array.

    >>> jit(lambda x: x * 2 + 1)(3.0)
    Array(7., dtype=float32, weak_type=True)
    """
    options = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "device": device,
        "inline": inline,
    }
    if fun is None:
        return functools.partial(jit, **options)
    return JitFunction(fun, **options)
