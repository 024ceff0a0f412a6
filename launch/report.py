"""What is said about a job that failed: who was first, and what became of the others.

The cause of a failure is not who ended first: a rank that was waiting may see the failure and end
before the one that caused it has printed its traceback. So causes come before victims, then time.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TAIL_SHOWN = 25


@dataclass(slots=True)
class Ending:
    """How one rank ended. `code` is as in subprocess: negative for a signal, None if unknown."""

    rank: int
    code: int | None = None
    stopped: bool = False  # asked to end by spmdrun or mpirun
    at: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether the rank ended badly, for whatever reason."""
        return self.code != 0

    @property
    def exit_code(self) -> int:
        """The code as a shell would show it."""
        if self.code is None:
            return 1
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def blame(self) -> int:
        """0 for a cause, 1 for a rank that saw another fail, 2 for one that was ended."""
        if self.report:
            return 1 if self.report.get("secondary") else 0
        return 2 if self.stopped or self.code is None else 0

    def cause(self) -> str:
        """What a failed rank failed of."""
        if self.report:
            first = (self.report["message"].splitlines() or [""])[0]
            line = f" at {self.report['line']}" if self.report.get("line") else ""
            return f"{self.report['exception']}{line}{': ' + first if first else ''}"
        if self.code is None:
            return "ended without a word"
        return (
            f"killed by {_signal_name(-self.code)}" if self.code < 0 else f"exit code {self.code}"
        )

    def fate(self) -> str:
        """What became of a rank that was not the first to fail."""
        if self.code == 0:
            return "finished"
        if self.report.get("secondary"):
            return "stopped by that failure"
        return self.cause() if self.blame == 0 else "ended with the job"


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    if name == "SIGKILL":
        return "SIGKILL (by someone, or by the kernel when memory ran out)"
    return name


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The rank that brought the job down."""
    failed = [ending for ending in endings if ending.failed]
    return min(failed, key=lambda e: (e.blame, e.report.get("time", e.at), e.rank), default=None)


def lines(endings: Sequence[Ending], tail: Sequence[str], mark: str) -> list[str]:
    """The final report: the others, one line each, then the first failure with its traceback."""
    first = first_failure(endings)
    if first is None:
        return []
    others: dict[str, list[int]] = {}
    for ending in endings:
        if ending is not first:
            others.setdefault(ending.fate(), []).append(ending.rank)
    said = [f"spmdrun: {_ranks(ranks)}: {what}" for what, ranks in others.items()]
    said.append(f"spmdrun: rank {first.rank} failed first: {first.cause()}")
    trace = first.report.get("traceback")
    body = trace.splitlines() if trace else traceback_in(tail)
    return said + [f"{mark}{line}" for line in body]


def traceback_in(tail: Sequence[str]) -> Sequence[str]:
    """The last traceback in what a rank wrote to stderr, or the last lines if there is none."""
    starts = [at for at, line in enumerate(tail) if line.startswith("Traceback (most recent")]
    return tail[starts[-1] :] if starts else tail[-TAIL_SHOWN:]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:12])) + (", ..." if ranks[12:] else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
