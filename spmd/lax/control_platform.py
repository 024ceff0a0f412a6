"""`platform_dependent`: another function on each platform; `composite`: one with a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.base.config import config
from spmd.base.device import canonicalize_platform
from spmd.base.errors import ArgumentError


def platform_dependent(
    *args: Any, default: Callable[..., Any] | None = None, **per_platform: Callable[..., Any]
) -> Any:
    """Call the function given for the platform that programs run on, else `default`.

    `per_platform` holds a function for each platform's name ("cpu", "cuda"), and `args` are its
    arguments. A program is traced for the platform that it runs on, so only that function is
    traced. All must return the same structure, shapes and dtypes, which is not checked for those
    not called. Raises `ArgumentError` if there is neither a function for the platform nor a
    `default`, for what is no function, and for "gpu", the name of several platforms.

    >>> lax.platform_dependent(2.0, cpu=lambda x: x + 1, cuda=lambda x: x + 2)
    3.0
    """
    for name, function in (*per_platform.items(), ("default", default)):
        if not callable(function) and (name, function) != ("default", None):
            raise ArgumentError(f"platform_dependent: {name}= must be a function, got {function!r}")
    if "gpu" in per_platform:
        raise ArgumentError(
            "platform_dependent: gpu= is the name of several platforms; use cuda= (or rocm=)"
        )
    used = canonicalize_platform(config.platform)
    chosen = per_platform.get(used, default)
    if chosen is None:
        raise ArgumentError(
            f"platform_dependent: nothing is given for {used!r}, only for "
            f"{', '.join(per_platform) or 'no platform'}; give default="
        )
    return chosen(*args)


def composite(decomposition: Callable[..., Any], name: str, version: int = 0) -> Callable[..., Any]:
    """Make a function that computes `decomposition`, to which a compiler may have its own answer.

    `name` has a namespace ("my.softmax") and `version` is a number; here they name the function,
    and the operations of `decomposition` are compiled as they are. Arguments, shapes and dtypes are
    those of `decomposition`. Raises `ArgumentError` if
    `decomposition` is no function or `name` no text.

    >>> lax.composite(lambda x: x * 2, name="my.double")(3.0)
    6.0
    """
    if not callable(decomposition) or not isinstance(name, str):
        raise ArgumentError(
            f"composite: needs a function and a name, got {decomposition!r} and {name!r}"
        )

    def call(*args: Any, **attributes: Any) -> Any:
        return decomposition(*args, **attributes)

    call.__name__ = call.__qualname__ = name
    return call
