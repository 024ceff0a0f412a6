"""The last collective that a rank came to, and the step it was in, from its flight file."""

from __future__ import annotations

from pathlib import Path

from ..flight.file import COLLECTIVE, FlightFileError, operand, read
from .stall import Call


def last_call(path: str | Path) -> tuple[Call | None, int]:
    """Read a copy of the file; (None, -1) where the rank left none, or came to no collective."""
    try:
        flight = read(path, look=False)
    except (OSError, FlightFileError):
        return None, -1
    collectives = flight.collectives()
    if not collectives:
        return None, flight.step
    last = flight.open or collectives[-1]
    # An exchange in flight delays no rank before the program waits for it.
    flies = last.is_overlapped and flight.phase != COLLECTIVE
    group = flight.groups.get(last.group)
    call = Call(
        last.label.get("kind", "a collective"),
        last.label.get("source", ""),
        last.group,
        last.call,
        group.ranks if group else tuple(range(flight.size)),
        operand(last.label),
        bool(last.completed) or flies,
    )
    return call, flight.step
