"""`expect_collectives`: a test's statement of what the calls in a block move."""

from __future__ import annotations

from collections import Counter
from typing import Any

from spmd.base.amounts import UNITS, bytes_of_text, size_text
from spmd.base.config import config
from spmd.base.errors import ArgumentError, ExpectationError
from spmd.base.source import current_source
from spmd.collectives.volume import KINDS
from spmd.compile.executable import mesh_executable
from spmd.debug.communication import Collective, by_line, moves_of


class CollectivesExpected:
    """The result of `expect_collectives`: `collectives` has those that ran so far."""

    def __init__(self, at_most: int | str | None, counts: dict[str, int]):
        self.collectives: list[Collective] = []
        self._counts = counts
        self._at_most = None if at_most is None else _bytes(at_most)
        unknown = sorted(counts.keys() - set(KINDS.values()))
        if unknown:
            known = ", ".join(sorted(set(KINDS.values())))
            raise ArgumentError(
                f"expect_collectives: there is no kind {unknown[0]!r}; the kinds are {known}"
            )

    @property
    def received(self) -> int:
        """The bytes that a device has received."""
        return sum(c.received * c.times for c in self.collectives)

    def __enter__(self) -> CollectivesExpected:
        mesh_executable.listeners.append(self._note)
        config.notify_program_update()  # calls go the general way, which tells its listeners
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        mesh_executable.listeners.remove(self._note)
        if kind is None:
            self._check()

    def _note(self, executable: Any, params: dict[str, Any]) -> None:
        self.collectives += moves_of(params["jaxpr"], executable.mesh.shape)

    def _check(self) -> None:
        found = Counter[str]()
        for c in self.collectives:
            found[c.kind] += c.times
        wrong = [
            f"{found[kind]} {kind}, expected {self._counts.get(kind, 0)}"
            for kind in sorted({*found, *self._counts})
            if found[kind] != self._counts.get(kind, 0)
        ]
        if not self._counts and self._at_most is not None:
            wrong = []  # the bytes alone are limited
        if self._at_most is not None and self.received > self._at_most:
            wrong.append(
                f"{size_text(self.received)} received, expected at most {size_text(self._at_most)}"
            )
        if wrong:
            raise ExpectationError(
                f"{current_source()}: expect_collectives: {'; '.join(wrong)}"
                + "".join(f"\n{line}" for line in by_line(self.collectives))
            )


def _bytes(given: int | str) -> int:
    """A number of bytes, as a number or as text like "8 MB"."""
    if isinstance(given, int):
        return given
    try:
        return bytes_of_text(given)
    except ValueError:
        raise ArgumentError(
            f"expect_collectives: at_most={given!r} must be a number of bytes, or text like '8 MB' "
            f"with one of {', '.join(UNITS)}"
        ) from None
