"""`compute_on`, which places operations: devices and their host are one place here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from spmd.api.compiled import jit
from spmd.base.errors import ArgumentError
from spmd.base.source import current_source

__all__ = ["compute_on", "compute_on2"]


@contextlib.contextmanager
def compute_on(compute_type: str) -> Iterator[None]:
    """Run operations on the host ("device_host") or the device ("device"), a context or decorator.

    Devices are cores of the host here, so both are one place. Raises `ArgumentError` for any other
    type: there are no sparse cores and no streams.

    >>> with compute_on("device_host"):
    ...     print(snp.arange(3) + 1)
    [1 2 3]
    """
    _check("compute_on", compute_type)
    yield


def compute_on2(
    f: Callable[..., Any] | None = None,
    *,
    compute_type: str,
    out_memory_spaces: Any,
    compiler_options: Any = None,
) -> Any:
    """Make a function that runs on the host ("device_host") or the device ("device").

    Without `f` this is a decorator. There is one kind of memory, so `out_memory_spaces` changes
    nothing, and neither do `compiler_options`. Raises `ArgumentError` for any other type.

    >>> double = compute_on2(lambda x: 2 * x, compute_type="device_host", out_memory_spaces=None)
    >>> double(snp.arange(3))
    Array([0, 2, 4], dtype=int32)
    """
    _check("compute_on2", compute_type)
    return jit if f is None else jit(f)


def _check(name: str, compute_type: str) -> None:
    if compute_type not in ("device_host", "device"):
        raise ArgumentError(
            f"{current_source()}: {name}: compute_type={compute_type!r} must be 'device_host' "
            "or 'device'; there are no sparse cores and no streams of a GPU"
        )
