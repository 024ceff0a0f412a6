"""Guards of moves between host and devices: which moves are logged, and which are errors.

JAX's levels: `log` and `disallow` speak of implicit moves, the levels `log_explicit` and
`disallow_explicit` of those that `device_put` and `asarray` make too.
"""

from __future__ import annotations

import sys

from spmd.base.config import TRANSFERS, config
from spmd.base.errors import DeviceError
from spmd.base.source import current_source

HOST_TO_DEVICE, DEVICE_TO_DEVICE, _ = TRANSFERS


def tell_of_move(direction: str, what: str, advice: str, explicit: bool = False) -> None:
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
