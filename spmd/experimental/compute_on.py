"""`compute_on`, which places operations: devices and their host are one place here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from spmd.base.errors import ArgumentError
from spmd.base.source import current_source

__all__ = ["compute_on"]


@contextlib.contextmanager
def compute_on(compute_type: str) -> Iterator[None]:
    """Run operations on the host ("device_host") or the device ("device"), a context or decorator.

    Devices are cores of the host here, so both are one place. Raises `ArgumentError` for any other
    type: there are no sparse cores and no streams.

    >>> with compute_on("device_host"):
    ...     print(snp.arange(3) + 1)
    [1 2 3]
    """
    if compute_type not in ("device_host", "device"):
        raise ArgumentError(
            f"{current_source()}: compute_on: compute_type={compute_type!r} must be 'device_host' "
            "or 'device'; there are no sparse cores and no streams of a GPU"
        )
    yield
