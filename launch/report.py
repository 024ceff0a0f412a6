"""What is said about a job that failed: who was first, and what became of the others.

The cause of a failure is not who ended first: a rank that was waiting may see the failure and end
before the one that caused it has printed its traceback. So causes come before victims, then time.
The traceback of the cause stands near the end, and the last line says it all.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .places import rank_text
from .stall import Call, Verdict, waiting_text

TAIL_SHOWN = 25
MESSAGE_SHOWN = 160


@dataclass(slots=True)
class Ending:
    """How one rank ended. `code` is as in subprocess: negative for a signal, None if unknown."""

    rank: int
    code: int | None = None
    stopped: bool = False  # asked to end by spmdrun or mpirun
    at: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    why: str = ""  # what the kernel says about a kill
    step: int = -1  # the user's step, if the program said it
    last: Call | None = None  # the last collective it came to
    host: str = ""
    device: str = ""

    @property
    def where(self) -> str:
        """`host, cpu:1`, or nothing if the rank's guard never came."""
        return f"{self.host}, {self.device}" if self.host else ""

    @property
    def failed(self) -> bool:
        """Whether the rank ended badly, for whatever reason."""
        return self.code != 0

    @property
    def lost(self) -> bool:
        """Whether the rank was killed or vanished, rather than ended by its own program."""
        return self.blame == 0 and not self.report and (self.code is None or self.code < 0)

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
        """What happened to the rank, as the end of `rank 1 ...`."""
        step = f" in step {self.step}" if self.step >= 0 else ""
        if self.report:
            first = (self.report["message"].splitlines() or [""])[0][:MESSAGE_SHOWN]
            line = f" at {self.report['line']}" if self.report.get("line") else ""
            return f"raised {self.report['exception']}{line}{step}{': ' + first if first else ''}"
        after = f" after {self.last.place}" if self.last is not None and self.last.place else ""
        if self.code is None:
            return f"ended without a word{after}{step}"
        if self.code < 0:
            why = f" ({self.why})" if self.why else ""
            return f"was killed by {_signal_name(-self.code)}{why}{after}{step}"
        return f"ended with exit code {self.code}{after}{step}"

    def fate(self) -> str:
        """What became of a rank that was not the first to fail."""
        if self.code == 0:
            return "finished"
        if self.report.get("secondary"):
            return "stopped by that failure"
        return self.cause() if self.blame == 0 else "ended with the job"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The rank that brought the job down."""
    failed = [ending for ending in endings if ending.failed]
    return min(failed, key=lambda e: (e.blame, e.report.get("time", e.at), e.rank), default=None)


def lines(endings: Sequence[Ending], tail: Sequence[str], mark: str) -> list[str]:
    """The final report: the others, a line each; the first failure's traceback; the whole line."""
    first = first_failure(endings)
    if first is None:
        return []
    others: dict[str, list[int]] = {}
    for ending in endings:
        if ending is not first:
            others.setdefault(ending.fate(), []).append(ending.rank)
    said = [f"spmdrun: {rank_text(ranks)}: {what}" for what, ranks in others.items()]
    trace = first.report.get("traceback")
    body = trace.splitlines() if trace else traceback_in(tail)
    said += [f"{mark}{line}" for line in body]
    return [*said, f"spmdrun: {summary(first, endings)}"]


def summary(first: Ending, endings: Sequence[Ending]) -> str:
    """One line: who, where, what, when; and in which collective the others were waiting."""
    alike = [e.rank for e in endings if e.report and _said(e) == _said(first)]
    if len(alike) > 1:
        return f"{rank_text(alike)} {first.cause()}"
    where = f" ({first.where})" if first.where else ""
    victims = [e for e in endings if e is not first and e.code != 0]
    return "; ".join([f"rank {first.rank}{where} {first.cause()}", *waiting_in(victims)])


def stall_summary(verdict: Verdict, marks: Mapping[int, str]) -> str:
    """The same line for a job that was ended because nothing moved."""
    culprits = [f"{marks.get(f.rank, f'rank {f.rank}')} {f.text}" for f in verdict.findings]
    return "; ".join([*culprits, verdict.ending()])


def _said(ending: Ending) -> tuple:
    report = ending.report
    return report.get("secondary"), report.get("exception"), report.get("message")


def waiting_in(victims: Sequence[Ending]) -> list[str]:
    """`ranks 0, 2 were waiting in psum train.py:88`, one text a place."""
    groups: dict[object, tuple[Call | str, list[int]]] = {}
    for ending in victims:
        call = ending.last
        if call is not None and not call.done:
            groups.setdefault(call.key, (call, []))[1].append(ending.rank)
        elif ending.report.get("secondary") and ending.report.get("line"):
            line = ending.report["line"]  # it recorded nothing, but its error says where it was
            groups.setdefault(line, (line, []))[1].append(ending.rank)
    return [
        f"{rank_text(ranks)} {'was' if len(ranks) == 1 else 'were'} waiting at {call}"
        if isinstance(call, str)
        else waiting_text(call, ranks, "was", "were")
        for call, ranks in groups.values()
    ]


def traceback_in(tail: Sequence[str]) -> Sequence[str]:
    """The last traceback in what a rank wrote to stderr, or the last lines if there is none."""
    starts = [at for at, line in enumerate(tail) if line.startswith("Traceback (most recent")]
    return tail[starts[-1] :] if starts else tail[-TAIL_SHOWN:]
