"""Watches for ranks that wait too long: a warning first, and the end of the job if it goes on.

The knob is one time, `--stall-timeout`; the warning comes at a twentieth of it (30 s of 10 min), no
later than 30 s. Ranks that only compile, make progress, or are held by a person in a debugger are
named, and left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..flight.file import BREAKPOINT, COLLECTIVE, COMPILING, PROGRAM, TRACING
from .stall import Verdict, View, explain

LONGEST_BEFORE_WARNING = 30.0
# Seconds in which the guards look closer: by a signal and its answer, or by py-spy.
SECONDS_TO_LOOK = 4.0


class Job(Protocol):
    """The interface of a running job for the watch."""

    def views(self, now: float) -> list[View]: ...

    def look_closer(self) -> None:
        """Ask all guards for a closer look; the answers come later."""
        ...

    def have_looked(self) -> bool:
        """Whether all have answered."""
        ...

    def note(self, text: str) -> None: ...

    def marks(self) -> dict[int, str]: ...

    def stalled(self, verdict: Verdict) -> None:
        """End the job."""
        ...


class Watch:
    """Decides, a few times a second, whether a job stands still."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.warn_after = min(LONGEST_BEFORE_WARNING, timeout / 2)
        self.asked_at: float | None = None
        self.told: tuple | None = None  # the last warning, so that it is not given twice
        self.again_at = 0.0
        # Whether the last closer look excused a rank, and when an excuse last held.
        self.excuses = False
        self.excused_at = float("-inf")
        self.was_busy = False

    def tick(self, job: Job, now: float) -> None:
        """Look at the job; `now` is of the monotonic clock."""
        if not self.timeout:
            return
        views = job.views(now)
        busy = any(v.phase in (TRACING, COMPILING, BREAKPOINT) for v in views if not v.ended)
        # A finished compilation is progress, even if no sample saw CPU time.
        if (busy and self.excuses) or (self.was_busy and not busy):
            self.excused_at = now
        self.was_busy = busy
        waited = self._waited(views)
        if waited < self.warn_after:
            self._goes_on(job)
            return
        if self.asked_at is None:
            if now >= self.again_at:
                self.asked_at = now
                job.look_closer()
            return
        if job.have_looked() or now > self.asked_at + SECONDS_TO_LOOK:
            self.asked_at = None
            self._judge(job, now, waited)

    def _waited(self, views: Sequence[View]) -> float:
        """How long the rank that has waited longest has."""
        could_wait = [v for v in views if v.page and not v.ended and not v.page.get("state")]
        return max((v.idle for v in could_wait if v.phase in (COLLECTIVE, PROGRAM)), default=0.0)

    def _judge(self, job: Job, now: float, waited: float) -> None:
        verdict = explain(job.views(now), soon=min(5.0, self.warn_after / 2))
        # Soon enough to end the job on time, and not often where a person debugs it.
        self.again_at = now + max(self.warn_after / 2, min(self.timeout - waited, 60.0))
        self.excuses = verdict is not None and verdict.excused
        if verdict is None or (waited < self.timeout and verdict.only_compiles):
            return
        # A rank whose excuse has just ended needs a moment to come.
        comes = now - self.excused_at < self.warn_after
        over = waited >= self.timeout and not verdict.excused and not comes
        told = tuple((finding.rank, finding.kind) for finding in verdict.findings)
        if told != self.told:
            self.told = told
            for line in verdict.lines(waited, job.marks()):
                job.note(f"spmdrun: {line}")
            if verdict.excused:
                job.note("spmdrun: that is no reason to end the job")
            elif not over:
                left = self.timeout - waited
                job.note(f"spmdrun: if nothing moves, it ends in {left:.0f} s (--stall-timeout)")
        if over:
            job.stalled(verdict)

    def _goes_on(self, job: Job) -> None:
        if self.told is not None:
            job.note("spmdrun: the job goes on")
        self.told = self.asked_at = None
        self.again_at, self.excuses = 0.0, False
