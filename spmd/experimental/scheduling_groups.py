"""`scheduling_group`, which asks XLA to run operations together; spmd's compiler orders its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from spmd.base.util import wraps

__all__ = ["scheduling_group", "xla_metadata_call"]

F = TypeVar("F", bound=Callable[..., Any])


def scheduling_group(name: Any) -> Callable[[F], F]:
    """Make a decorator that leaves what a function gives as it is.

    JAX gives the `name` to XLA, which runs the operations of one group together.

    >>> scheduling_group(name="loads")(lambda x: 2 * x)(3)
    6
    """
    return xla_metadata_call(scheduling_group=name)


def xla_metadata_call(f: Callable[..., Any] | None = None, **meta: Any) -> Any:
    """Return a function that gives what `f` gives; without `f`, a decorator that makes one.

    JAX attaches the keyword arguments to a call, for XLA to read.

    >>> xla_metadata_call(lambda x: 2 * x, priority=1)(3)
    6
    """
    if f is None:
        return lambda g: xla_metadata_call(g, **meta)

    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    return call
