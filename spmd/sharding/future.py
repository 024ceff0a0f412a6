"""The owners of arrays whose values are still being computed, or lie in a device's memory.

The one idea: the address of such an array is 0. Fast readers of arrays (generated closures, native
code) take an address of 0 for an array that does not fit, and use the general path, which waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from spmd.core.aval import ShapedArray


class Work(Protocol):
    """A program that was begun or will be."""

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def wait(self) -> None:
        """Return when it has ended well; raise its error."""
        ...


class Future:
    """The owner of an array that `work` makes; afterwards its memory is `block`, from `address`."""

    __slots__ = ("address", "block", "work")

    def __init__(self, work: Work, block: Any, address: int):
        self.work = work
        self.block = block
        self.address = address


class DeviceMemory:
    """The owner of an array whose values lie in a device's memory, which the host cannot read."""

    __slots__ = ("__weakref__", "address")

    address: int

    def read(self, aval: ShapedArray) -> np.ndarray:
        """A copy of the values for the host, when the work before it has ended."""
        raise NotImplementedError

    def fetch(self) -> None:
        """Begin to copy the values to the host, which will read them."""
        raise NotImplementedError

    def defer(self, check: Callable[[], None]) -> None:
        """Call a function before the host next gets values of the device, which may raise."""
        raise NotImplementedError

    def is_done(self) -> bool:
        """Whether the work that makes the values has ended."""
        raise NotImplementedError

    def wait(self) -> None:
        """Return when that work has ended; raise its error."""
        raise NotImplementedError


class _SettledCheck:
    """Whether it is certain that no array of a pytree is pending; set by compile."""

    is_settled: Callable[[Any], bool] = staticmethod(lambda tree: False)


settled_check = _SettledCheck()
