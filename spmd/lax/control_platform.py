"""`platform_dependent`: another function on each platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.base.device import default_backend
from spmd.base.errors import ArgumentError


def platform_dependent(
    *args: Any, default: Callable[..., Any] | None = None, **per_platform: Callable[..., Any]
) -> Any:
    """Call the function given for the platform that programs run on, else `default`.

    `per_platform` holds a function for each platform's name, and `args` are its arguments. A
    program is traced for the platform that it runs on, so only that function is traced. All must
    return the same structure, shapes and dtypes, which is not checked for those not called. Raises
    `ArgumentError` if there is neither a function for the platform nor a `default`.

    >>> lax.platform_dependent(2.0, cpu=lambda x: x + 1, cuda=lambda x: x + 2)
    3.0
    """
    chosen = per_platform.get(default_backend(), default)
    if chosen is None:
        raise ArgumentError(
            f"platform_dependent: nothing is given for {default_backend()!r}, only for "
            f"{', '.join(per_platform) or 'no platform'}; give default="
        )
    return chosen(*args)
