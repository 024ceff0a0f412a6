"""The report about a job that failed: its first failure, and the ends of the others.

The rank that ended first need not be the cause of a failure: a rank that was waiting may see the
failure and end before the one that caused it has printed its traceback. So causes come before
victims, then time.
The traceback of the cause stands near the end, and the last line says it all.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .locations import rank_text, user_frame
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
    why: str = ""  # the kernel's reason for a kill
    step: int = -1  # the user's step, if the program said it
    last: Call | None = None  # the last collective it came to
    host: str = ""
    device: str = ""
    left_behind: bool = False  # it died, and the others may go on without it
    lost: int = 0  # ranks without which this one went on

    @property
    def where(self) -> str:
        """`host, cpu:1`, or nothing if the rank's guard never came."""
        return f"{self.host}, {self.device}" if self.host else ""

    @property
    def failed(self) -> bool:
        """Whether the rank ended badly, for whatever reason."""
        return self.code != 0

    @property
    def died(self) -> bool:
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
        if self.stopped or self.code is None:
            return 2
        # In the middle of a collective it is MPI that ends a rank, because it lost another.
        waits = self.last is not None and not self.last.done
        return 1 if waits and self.code > 0 else 0

    def cause(self) -> str:
        """The end of the rank, as the end of `rank 1 ...`."""
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
        """The end of a rank that was not the first to fail."""
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


def survived(endings: Sequence[Ending]) -> str:
    """The text about a job whose ranks went on without some that died; empty for other jobs."""
    dead = [ending for ending in endings if ending.left_behind]
    rest = [ending for ending in endings if not ending.left_behind]
    if not dead or any(e.code != 0 or e.lost < len(dead) for e in rest):
        return ""
    who = "; ".join(f"rank {e.rank}{f' ({e.where})' if e.where else ''} {e.cause()}" for e in dead)
    return f"{who}; {rank_text([e.rank for e in rest])} went on without and finished"


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The rank that brought the job down."""
    failed = [ending for ending in endings if ending.failed]
    return min(failed, key=lambda e: (e.blame, e.report.get("time", e.at), e.rank), default=None)


def lines(
    endings: Sequence[Ending],
    tail: Sequence[str],
    mark: str,
    is_shown: Callable[[Sequence[str]], bool] = lambda _: False,
) -> list[str]:
    """The final report: the others, a line each; the first failure's traceback; the whole line.

    The traceback is left out where `is_shown` says that it stands a few lines above.
    """
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
    said += [] if is_shown(body) else [f"{mark}{line}" for line in body]
    return [*said, f"spmdrun: {summary(first, endings)}"]


def summary(first: Ending, endings: Sequence[Ending]) -> str:
    """One line: rank, place, error, time; and the collective in which the others were waiting."""
    alike = [e.rank for e in endings if e.report and _said(e) == _said(first)]
    if len(alike) > 1:
        return f"{rank_text(alike)} {first.cause()}"
    where = f" ({first.where})" if first.where else ""
    victims = [e for e in endings if e is not first and e.code != 0]
    if left := quitters(endings):
        return "; ".join([_left_text(left), *waiting_in([first, *victims])])
    return "; ".join([f"rank {first.rank}{where} {first.cause()}", *waiting_in(victims)])


def quitters(endings: Sequence[Ending]) -> list[Ending]:
    """Ranks that left in good order, where all that failed did so because they waited for them."""
    failed = [ending for ending in endings if ending.failed]
    if not failed or not all(_failed_waiting(ending) for ending in failed):
        return []
    return [ending for ending in endings if ending.code == 0]


def _failed_waiting(ending: Ending) -> bool:
    if ending.report:
        return bool(ending.report.get("secondary"))
    waits = ending.last is not None and not ending.last.done
    # mpirun ends ranks by SIGTERM, and may reach them before their guards.
    return ending.code is None or (waits and (ending.stopped or ending.code == -signal.SIGTERM))


def _left_text(left: Sequence[Ending]) -> str:
    """`rank 1 (node7, cpu:1) left the program (exit code 0) after psum train.py:88`."""
    first = left[0]
    where = f" ({first.where})" if first.where and len(left) == 1 else ""
    after = f" after {first.last.place}" if first.last is not None and first.last.place else ""
    return f"{rank_text([e.rank for e in left])}{where} left the program (exit code 0){after}"


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


_FRAME = re.compile(r'\s+File "(.+)", line (\d+)(?:, in (.+))?$')
_ERROR = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")


def read_traceback(tail: Sequence[str]) -> dict[str, Any]:
    """A report like those of spmd, of a program that raised before spmd could write one.

    Empty where the last words on stderr are no traceback.
    """
    body = traceback_in(tail)
    frames = [(k, found) for k, line in enumerate(body) if (found := _FRAME.match(line))]
    if not frames:
        return {}
    rest = body[frames[-1][0] + 1 :]
    said = next((found for line in rest if (found := _ERROR.match(line))), None)
    if said is None:
        return {}
    place = user_frame([(m[1], int(m[2]), m[3] or "<module>") for _, m in reversed(frames)])
    return {
        "exception": said[1].rpartition(".")[2],
        "message": said[2] or "",
        "line": f"{os.path.basename(place[0])}:{place[1]}" if place else "",
        "traceback": "\n".join(body),
    }


def traceback_in(tail: Sequence[str]) -> Sequence[str]:
    """The last traceback in a rank's stderr, or the last lines if there is none."""
    starts = [at for at, line in enumerate(tail) if line.startswith("Traceback (most recent")]
    return tail[starts[-1] :] if starts else tail[-TAIL_SHOWN:]
