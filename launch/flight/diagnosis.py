"""Diagnosis of a job's flight files: waiting ranks, missing ranks, the call where ranks part.

A pure function from the ranks' records to a `Verdict`. The rank that waits is usually the
victim: blame goes to those that the others wait for and that wait for none themselves. Where all
of them wait, they do so in a circle, or in calls that do not belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .file import (
    COLLECTIVE,
    HOST,
    LEFT,
    PHASES,
    PROGRAM,
    RAISED,
    RUNNING,
    Flight,
    Group,
    Record,
    operand,
)

STOPPED = "stopped: "  # how the text of a rank begins that another's failure stopped


@dataclass(frozen=True, slots=True)
class Wait:
    """Ranks that are in the same call of a group, and the members that have not come to it."""

    name: str  # `psum train.py:88`
    operand: str
    source: str
    group: str
    call: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float | None  # of the first that came; None where the clock is not known


@dataclass(frozen=True, slots=True)
class Culprit:
    """A rank that others wait for, or that brought the job down."""

    rank: int
    kind: str  # raised, left, gone, never joined, host, compiling, ..., other collective, order
    text: str


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first call of a group in which ranks did different things."""

    group: str
    call: int
    sides: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, operand, ranks


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank in a few words."""

    rank: int
    host: str
    state: str
    calls: int
    last_completed: str
    step: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The diagnosis. `headline` is the explanation in one line."""

    kind: str  # waiting, mismatch, order, raised, gone, left early, unfinished, running, finished
    headline: str
    waits: tuple[Wait, ...]
    culprits: tuple[Culprit, ...]
    divergence: Divergence | None
    ranks: tuple[RankState, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The same for people: the explanation first, then the evidence."""
        said = [self.headline]
        for culprit in self.culprits:
            said.append(f"  rank {culprit.rank}: {culprit.text}")
        if self.divergence is not None:
            said.append(f"  call {self.divergence.call} of {self.divergence.group} differs:")
            for name, what, ranks in self.divergence.sides:
                said.append(f"    {ranks_text(ranks)}: {name} {what}".rstrip())
        for wait in self.waits:
            since = "" if wait.seconds is None else f" for {duration(wait.seconds)}"
            lacks = f"; not there: {ranks_text(wait.missing)}" if wait.missing else ""
            said.append(
                f"  {ranks_text(wait.ranks)} in {wait.name} {wait.operand}".rstrip()
                + f"{since} (call {wait.call} of {wait.group}){lacks}"
            )
        rows = [("rank", "host", "state", "collectives", "last completed", "step")]
        rows += [
            (str(r.rank), r.host, r.state, str(r.calls), r.last_completed, _number(r.step))
            for r in self.ranks
        ]
        return [*said, "", *table(rows)]


def explain(flights: Sequence[Flight], now: int | None = None) -> Verdict:
    """The diagnosis of the flight files of one job.

    `now` is the time in nanoseconds of the ranks' monotonic clock, if it is known; the moment of
    reading if their processes run.
    """
    known = {flight.rank: flight for flight in flights}
    size = max([flight.size for flight in flights], default=0)
    size = max(size, *(rank + 1 for rank in known)) if known else 0
    if now is None:
        now = max((f.now for f in flights if f.now is not None), default=None)
    job = _Job(known, size, now)
    divergence = job.first_divergence()
    waits = tuple(job.waits())
    states = tuple(job.state(rank) for rank in range(size))
    kind, headline, culprits = job.judge(waits, divergence)
    return Verdict(kind, headline, waits, culprits, divergence, states)


class _Job:
    """The files of a job by rank, and the questions to them."""

    def __init__(self, flights: Mapping[int, Flight], size: int, now: int | None):
        self.flights = flights
        self.size = size
        self.now = now
        self.groups: dict[int, Group] = {0: Group("world", tuple(range(size)))}
        for flight in flights.values():
            self.groups |= {g: group for g, group in flight.groups.items() if group.ranks}

    # ---- evidence ------------------------------------------------------------------------------

    def waits(self) -> list[Wait]:
        """The calls that some ranks are in, those that most ranks are in first."""
        found: dict[tuple, list[Flight]] = {}
        for flight in self.flights.values():
            record = flight.open
            if record is not None and self.waits_in(flight):
                key = (record.group, record.call, record.meaning, record.label.get("source", ""))
                found.setdefault(key, []).append(flight)
        made = []
        for (group, call, _, source), there in found.items():
            record = there[0].open
            assert record is not None
            since = min(f.open.began for f in there if f.open is not None)
            made.append(
                Wait(
                    record.name,
                    operand(record.label),
                    source,
                    self.group_name(group),
                    call,
                    tuple(flight.rank for flight in there),
                    self.missing(group, call),
                    None if self.now is None else (self.now - since) / 1e9,
                )
            )
        return sorted(made, key=lambda wait: (-len(wait.ranks), wait.ranks))

    def waits_in(self, flight: Flight) -> bool:
        """Whether a rank is in its open collective, and not past it by an exception it caught."""
        if flight.open is None or flight.state == LEFT:
            return False
        if flight.state == RAISED:
            return flight.text.startswith(STOPPED)
        return flight.phase == COLLECTIVE

    def missing(self, group: int, call: int) -> tuple[int, ...]:
        """The ranks of a group that have not come to a call."""
        members = self.groups.get(group, Group("", ())).ranks
        return tuple(
            rank
            for rank in members
            if rank not in self.flights or self.flights[rank].last_call(group) < call
        )

    def first_divergence(self) -> Divergence | None:
        """The first call, by time, whose meaning differs between the ranks that came to it."""
        first: tuple[int, int, int] | None = None
        for group, members in self.groups.items():
            there = [self.flights[r] for r in members.ranks if r in self.flights]
            calls = {(r.group, r.call) for f in there for r in f.collectives() if r.group == group}
            for _, call in sorted(calls):
                records = [r for f in there if (r := f.call(group, call)) is not None]
                known = [r for r in records if r.label.get("kind") != UNKNOWN_KIND]
                if len({r.meaning for r in known}) > 1:
                    began = min(r.began for r in known)
                    first = min(first or (began, group, call), (began, group, call))
                    break
        return None if first is None else self._divergence(first[1], first[2])

    def _divergence(self, group: int, call: int) -> Divergence:
        sides: dict[tuple, list[int]] = {}
        records: dict[tuple, Record] = {}
        for rank in self.groups[group].ranks:
            record = self.flights[rank].call(group, call) if rank in self.flights else None
            if record is not None:
                key = (record.meaning, record.label.get("source", ""))
                sides.setdefault(key, []).append(rank)
                records[key] = record
        return Divergence(
            self.group_name(group),
            call,
            tuple(
                (records[key].name, operand(records[key].label), tuple(ranks))
                for key, ranks in sides.items()
            ),
        )

    def group_name(self, group: int) -> str:
        """`world`, or the name with its ranks."""
        found = self.groups.get(group)
        if found is None:
            return "a group that is not in the files"
        return found.name if group == 0 else f"{found.name} ({ranks_text(found.ranks)})"

    def state(self, rank: int) -> RankState:
        """One rank in a few words."""
        flight = self.flights.get(rank)
        if flight is None:
            return RankState(rank, "", "left no flight file", 0, "", -1)
        done = flight.last_completed
        calls = max((r.call for r in flight.collectives()), default=0)
        where = f"{done.name} (call {done.call})" if done is not None else "none"
        return RankState(rank, flight.host, self.doing(flight), calls, where, flight.step)

    def doing(self, flight: Flight) -> str:
        """A rank's present action, or its end."""
        if flight.state == RAISED:
            return f"raised: {flight.text}".replace(f"raised: {STOPPED}", STOPPED)
        if flight.state == LEFT:
            return flight.text or "left the program"
        doing = PHASES[flight.phase]
        if flight.open is not None and self.waits_in(flight):
            doing = f"in {flight.open.name}"
        if self.now is not None and flight.since:
            doing += f" for {duration(max(0.0, (self.now - flight.since) / 1e9))}"
        return f"gone; was {doing}" if flight.alive is False else doing

    # ---- judgement -----------------------------------------------------------------------------

    def judge(
        self, waits: Sequence[Wait], divergence: Divergence | None
    ) -> tuple[str, str, tuple[Culprit, ...]]:
        """The kind of trouble, the line that explains it, and the ranks that caused it."""
        if not self.flights:
            return "empty", "there are no flight files", ()
        culprits = self.culprits(waits)
        raised = [c for c in culprits if c.kind == "raised"]
        if divergence is not None:
            return "mismatch", self._mismatch_line(divergence), culprits
        if raised:
            what = "; ".join(f"rank {c.rank} raised {c.text}" for c in raised)
            return "raised", what + self._waiting_clause(waits), culprits
        if not waits:
            return *self._without_waits(culprits), culprits
        if not culprits:
            return self._all_wait(waits)
        main = max(waits, key=lambda wait: len(wait.missing) > 0)
        named = [c for c in culprits if c.rank in main.missing] or list(culprits)
        said = "; ".join(f"rank {c.rank} {c.text}" for c in named[:3])
        absent = f"{ranks_text(main.missing)} never came to {main.name}"
        kind = "gone" if all(c.kind == "gone" for c in named) else "waiting"
        line = f"{absent}, where {ranks_text(main.ranks)} {_verb(main.ranks)}"
        if main.seconds is not None:
            line = f"{absent}, where {ranks_text(main.ranks)} wait{_s(main.ranks)} for "
            line += f"{duration(main.seconds)}"
        return kind, f"{line}: {said}", culprits

    def culprits(self, waits: Sequence[Wait]) -> tuple[Culprit, ...]:
        """Ranks that are the reason: they raised, or others wait for them and they for none."""
        found = [
            Culprit(f.rank, "raised", _without_rank(f.text) + _in_step(f))
            for f in sorted(self.flights.values(), key=lambda f: f.since)
            if f.state == RAISED and not f.text.startswith(STOPPED)
        ]
        named = {culprit.rank for culprit in found}
        waiting = {rank for wait in waits for rank in wait.ranks}
        awaited = sorted({rank for wait in waits for rank in wait.missing})
        for rank in awaited:
            if rank not in waiting and rank not in named:
                found.append(self._absent(rank))
        return tuple(found)

    def _absent(self, rank: int) -> Culprit:
        flight = self.flights.get(rank)
        if flight is None:
            return Culprit(rank, "never joined", "left no flight file: it never joined the job")
        done = flight.last_completed
        after = f", after {done.name} (call {done.call})" if done is not None else ""
        after += _in_step(flight)
        if flight.state == LEFT:
            return Culprit(rank, "left", flight.text + after)
        phase = PHASES[flight.phase]
        # After a job all ranks are gone: it is a finding only if another rank runs, or said how it
        # ended.
        others = [f for f in self.flights.values() if f.rank != rank]
        outlived = any(f.alive or f.state != RUNNING for f in others)
        if flight.alive is False and outlived:
            return Culprit(rank, "gone", f"ended without a word (killed?) {phase}{after}")
        was = "was" if flight.alive is False else "is"
        since = ""
        if self.now is not None and flight.alive and flight.since:
            since = f" for {duration(max(0.0, (self.now - flight.since) / 1e9))}"
        return Culprit(rank, _KINDS.get(flight.phase, "host"), f"{was} {phase}{since}{after}")

    def _waiting_clause(self, waits: Sequence[Wait]) -> str:
        parts = [f"{ranks_text(w.ranks)} {_verb(w.ranks)} in {w.name}" for w in waits]
        return "; " + "; ".join(parts) if parts else ""

    def _mismatch_line(self, divergence: Divergence) -> str:
        sides = " and ".join(
            f"{ranks_text(ranks)} came to {name} {what}".rstrip()
            for name, what, ranks in divergence.sides[:3]
        )
        return f"call {divergence.call} of {divergence.group} differs: {sides}"

    def _without_waits(self, culprits: Sequence[Culprit]) -> tuple[str, str]:
        flights = list(self.flights.values())
        absent = [rank for rank in range(self.size) if rank not in self.flights]
        if absent and any(f.state == RUNNING and f.alive for f in flights):
            return "running", f"{ranks_text(absent)} left no flight file; nobody waits"
        gone = [f for f in flights if f.state == RUNNING and f.alive is False]
        if gone and len(gone) < len(flights):
            where = "; ".join(f"rank {f.rank} {PHASES[f.phase]}" for f in gone[:3])
            return "gone", f"{ranks_text([f.rank for f in gone])} ended without a word: {where}"
        if gone:
            return "unfinished", f"all {len(gone)} processes are gone; nobody waited for another"
        calls = max((r.call for f in flights for r in f.collectives()), default=0)
        if all(f.state == LEFT for f in flights):
            last = flights[0].last_completed
            after = f", last {last.name}" if last else ""
            return "finished", f"all {len(flights)} ranks left after {calls} collectives{after}"
        doing = "; ".join(f"{ranks_text(r)} {what}" for what, r in self._by_phase(flights))
        return "running", f"nobody waits: {doing}"

    def _by_phase(self, flights: Iterable[Flight]) -> list[tuple[str, list[int]]]:
        found: dict[str, list[int]] = {}
        for flight in flights:
            doing = flight.text if flight.state != RUNNING else PHASES[flight.phase]
            found.setdefault(doing, []).append(flight.rank)
        return list(found.items())

    def _all_wait(self, waits: Sequence[Wait]) -> tuple[str, str, tuple[Culprit, ...]]:
        circle = [wait for wait in waits if wait.missing]
        if circle:
            parts = "; ".join(
                f"{ranks_text(w.ranks)} in {w.name} (call {w.call} of {w.group}) for "
                f"{ranks_text(w.missing)}"
                for w in circle
            )
            culprits = tuple(
                Culprit(rank, "order", f"waits in {w.name} for {ranks_text(w.missing)}")
                for w in circle
                for rank in w.ranks
            )
            return "order", f"ranks wait for each other: {parts}", culprits
        wait = waits[0]
        said = f"all members have come to {wait.name} (call {wait.call} of {wait.group})"
        return "running", f"{said}; {ranks_text(wait.ranks)} {_verb(wait.ranks)} still in it", ()


UNKNOWN_KIND = "an unknown collective"
_KINDS = {HOST: "host", 1: "tracing", 2: "compiling", PROGRAM: "program", 5: "data", 6: "debugger"}


# ---- words -------------------------------------------------------------------------------------


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 2, 3`, shortened where they are many."""
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if ranks[8:] else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def duration(seconds: float) -> str:
    """`12 ms`, `3.4 s`, `5 min 10 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Rows as aligned columns; the columns in `right` are aligned to the right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    numbers = set(right)
    return [
        "  ".join(
            cell.rjust(width) if k in numbers else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _verb(ranks: Sequence[int]) -> str:
    return "was waiting" if len(ranks) == 1 else "were waiting"


def _s(ranks: Sequence[int]) -> str:
    return "s" if len(ranks) == 1 else ""


def _number(step: int) -> str:
    return str(step) if step >= 0 else ""


def _in_step(flight: Flight) -> str:
    return f" in step {flight.step}" if flight.step >= 0 else ""


def _without_rank(text: str) -> str:
    """`rank 1: KeyError at train.py:41` without the rank."""
    head, _, rest = text.partition(": ")
    return rest if head.startswith("rank ") else text
