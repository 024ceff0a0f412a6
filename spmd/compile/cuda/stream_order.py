"""The order between the streams of a device: which steps wait for which, by the memory they use.

The one idea: two steps in different streams may run side by side, unless they use the same bytes
and one of them writes. Then an event is recorded behind the former, and the stream of the latter
waits for it. A block (of a loop, of a branch) ends when all of its exchanges are done, so that
blocks know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd.base.record import record
from spmd.compile.native.program.steps import Step


@record
class Access:
    """Bytes from `begin` to `end` of a base of the frame; `role` says what the base is."""

    base: int
    role: str
    begin: int
    end: int
    writes: bool

    def conflicts(self, other: Access) -> bool:
        """Whether the two must not run side by side."""
        if not (self.writes or other.writes):
            return False
        if self.base == other.base:
            return self.begin < other.end and other.begin < self.end
        # A result may be written over an argument.
        return {self.role, other.role} == {"input", "output"}


Accesses = Sequence[Access]


class Block:
    """The native steps of a block, in which exchanges run beside the steps that compute.

    `record` and `wait` make the native step that records an event in the stream for computing, and
    that which lets it wait for one.
    """

    def __init__(
        self,
        new_event: Callable[[], int],
        record: Callable[[int], Step],
        wait: Callable[[int], Step],
    ):
        self._new_event, self._record, self._wait = new_event, record, wait
        # Native steps before the first step, then those of each step.
        self._steps: list[list[Step]] = [[]]
        self._computed: list[tuple[int, Accesses]] = []
        # Events by the number of the step behind which they are recorded.
        self._recorded: dict[int, int] = {}
        # Exchanges for which no step waits yet: their events, the oldest first.
        self._pending: list[tuple[int, Accesses]] = []

    def compute(self, accesses: Accesses, steps: Sequence[Step]) -> None:
        """Add steps of the stream for computing."""
        waits = [k for k, (_, each) in enumerate(self._pending) if _conflict(each, accesses)]
        before: list[Step] = []
        if waits:  # exchanges end in order
            before = [self._wait(self._pending[waits[-1]][0])]
            del self._pending[: waits[-1] + 1]
        self._computed.append((len(self._steps), accesses))
        self._steps.append([*before, *steps])

    def ready(self, accesses: Accesses) -> int:
        """The event after which an exchange may begin: the last step that it conflicts with."""
        conflicts = (k for k, each in reversed(self._computed) if _conflict(each, accesses))
        place = next(conflicts, 0)
        if place not in self._recorded:
            event = self._recorded[place] = self._new_event()
            self._steps[place].append(self._record(event))
        return self._recorded[place]

    def exchange(self, accesses: Accesses, steps: Sequence[Step], done: int) -> None:
        """Add an exchange, at whose end an event is recorded."""
        self._steps.append([*steps])
        self._pending.append((done, accesses))

    def steps(self) -> list[Step]:
        """All steps; at their end the exchanges are done."""
        if self._pending:
            self._steps.append([self._wait(self._pending[-1][0])])
            self._pending.clear()
        return [step for steps in self._steps for step in steps]


def _conflict(one: Accesses, other: Accesses) -> bool:
    return any(a.conflicts(b) for a in one for b in other)
