"""Functions of many operations, run as one compiled program when they are called on values.

Called op by op, a function pays for each operation's dispatch. Inside a transformation there is
nothing to gain: there the operations become equations of the surrounding program, so that jaxprs
stay flat and readable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import spmd.base.context as context
from spmd.api.compiled import jit
from spmd.core.trace import EVAL

Function = TypeVar("Function", bound=Callable[..., Any])


def one_program(*static: str) -> Callable[[Function], Function]:
    """Decorate a function; the parameters named in `static` are hashable constants."""

    def decorate(f: Function) -> Function:
        compiled = jit(f, static_argnames=static)

        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (compiled if context.state.trace is EVAL else f)(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
