"""Notes of the user's loop in the flight recorder: its step, and its waits for data."""

from __future__ import annotations

from contextlib import AbstractContextManager

from spmd.base.errors import ArgumentError
from spmd.transport.flight_recorder import DATA, FLIGHT


def step(number: int) -> None:
    """Note the step that this rank's loop is in, for reports: `raised KeyError in step 118`.

    It costs a tenth of a microsecond, changes nothing in the program, and is not for traced code:
    call it in the loop around the compiled step. Raises `ArgumentError` for a negative number.

    >>> import spmd
    >>> for k in range(3):
    ...     spmd.debug.step(k)
    """
    if number < 0:
        raise ArgumentError(f"debug.step: number={number} must be at least 0")
    FLIGHT.set_step(number)


def loading() -> AbstractContextManager[None]:
    """Say that this rank waits for data within a `with` block, so that reports can.

    A rank that others wait for is then `waiting for data`, instead of `in host code`.

    >>> import spmd
    >>> batches = iter([1, 2])
    >>> with spmd.debug.loading():
    ...     batch = next(batches)
    """
    return FLIGHT.phase(DATA, "data" if FLIGHT.keeps_programs else "")
