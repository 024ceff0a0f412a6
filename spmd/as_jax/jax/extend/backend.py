"""`jax.extend.backend`: the platforms of this process."""

from __future__ import annotations

from typing import Any

from spmd.as_jax.refuse import missing
from spmd.base.device import canonicalize_platform, default_backend, devices
from spmd.compile.dispatch.jit import clear_caches

__all__ = [
    "backends",
    "clear_backends",
    "clear_in_memory_compilation_cache",
    "get_backend",
    "get_default_device",
]
__getattr__ = missing("jax.extend.backend")

clear_backends = clear_in_memory_compilation_cache = clear_caches


def get_default_device() -> Any:
    """The device of values that nothing else places."""
    return devices()[0]


def get_backend(platform: str | None = None) -> Any:
    """The platform of a name, or the default one."""
    return devices(platform or default_backend())[0].client


def backends() -> dict[str, Any]:
    """The platforms that can be used, by name."""
    used = canonicalize_platform(default_backend())
    return {name: get_backend(name) for name in dict.fromkeys((used, "cpu"))}
