"""Named scopes: the user's names for parts of a program, told with every line that they made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from spmd.base.context import state
from spmd.base.errors import ArgumentError
from spmd.base.util import function_name, wraps

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def named_scope(name: str) -> Iterator[None]:
    """Name the operations made in a `with` block (or, as a decorator, by a function).

    Scopes nest: with the `name` "attention" inside the scope "encoder", operations are in
    `encoder/attention`. Errors, `debug.show` and `debug.profile` tell the scope with the line that
    an operation comes from. A jitted function keeps the scope of its first trace. Raises
    `ArgumentError` if `name` is no string.

    >>> def f(x):
    ...     with spmd.named_scope("encoder"):
    ...         return snp.sin(x)
    >>> spmd.make_jaxpr(f)(1.0).eqns[0].source.scope
    'encoder'
    """
    if not isinstance(name, str):
        raise ArgumentError(f"named_scope: the name must be a string, got {name!r}")
    before = state.scope, state.name_stack, state.scope_trace
    scope, names, trace = before
    shown = _under_transformations(name, state.trace, trace)
    state.scope = f"{scope}/{name}" if scope else name
    state.name_stack = f"{names}/{shown}" if names else shown
    state.scope_trace = state.trace
    try:
        yield
    finally:
        state.scope, state.name_stack, state.scope_trace = before


def _under_transformations(name: str, trace: Any, outside: Any) -> str:
    """`vmap(jvp(name))`, of the transformations that began inside of the scope around."""
    while trace is not None and trace is not outside and not trace.stages:
        name = f"{trace.transform}({name})" if trace.transform else name
        trace = trace.parent
    return name


def named_call(fun: Callable[P, R], *, name: str | None = None) -> Callable[P, R]:
    """Make the function whose operations, those of `fun`, are in a `named_scope`.

    `name` is by default the name of `fun`.

    >>> layer = spmd.named_call(lambda x: snp.sin(x), name="layer")
    >>> spmd.make_jaxpr(layer)(1.0).eqns[0].source.scope
    'layer'
    """
    scope = name or function_name(fun)

    @wraps(fun)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        with named_scope(scope):
            return fun(*args, **kwargs)

    return named
