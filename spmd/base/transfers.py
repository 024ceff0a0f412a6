"""Guards of moves between host and devices: which moves are logged, and which are errors.

JAX's levels: `log` and `disallow` speak of implicit moves, the levels `log_explicit` and
`disallow_explicit` of those that `device_put` makes too.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from spmd.base.config import TRANSFERS, config
from spmd.base.errors import DeviceError
from spmd.base.source import PACKAGE_DIR, current_source, is_skipped

HOST_TO_DEVICE, DEVICE_TO_DEVICE, _ = TRANSFERS


def report_transfer(direction: str, what: str, advice: str, explicit: bool = False) -> None:
    """Raise a `DeviceError` for a move in a direction, or print it, as its guard says.

    `what` says which value of which call moves; `advice` what to write instead.
    """
    level = getattr(config, direction)
    if level == "allow" or (explicit and not level.endswith("_explicit")):
        return
    name = direction.removeprefix("transfer_guard_").replace("_", "-")
    text = f"{current_source()}: {what}, and {direction} is {level!r}; {advice}"
    if level.startswith("disallow"):
        raise DeviceError(f"Disallowed {name} transfer: {text}")
    print(f"spmd: {name} transfer: {text}", file=sys.stderr)


# Functions that make arrays, between a user and `report_creation`.
_MAKERS = tuple(
    os.path.join(PACKAGE_DIR, *path)
    for path in (("numpy", "creation.py"), ("numpy", "dtype.py"), ("core", "explicit.py"))
)


def report_creation(name: str) -> None:
    """Report the transfer of a host value that user code, not spmd itself, makes an array of."""
    if config.transfer_guard_host_to_device == "allow":
        return
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_MAKERS):
        frame = frame.f_back
    if frame is not None and not is_skipped(frame.f_code.co_filename):
        advice = "make it before, or with device_put"
        report_transfer(HOST_TO_DEVICE, f"{name}: values of the host become an array", advice)
