"""The owner of an array whose values are still being computed.

The one idea: its address is 0. Fast readers of arrays (generated closures, native code) take
an address of 0 for an array that does not fit, and use the general path, which waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


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


class _Asked:
    """Whether it is certain that no array of a pytree is pending; set by compile."""

    is_settled: Callable[[Any], bool] = staticmethod(lambda tree: False)


asked = _Asked()
