"""The timeline of a job: the traces of all ranks on one clock, and the ranks' waits for each other.

The clocks of hosts differ. A collective that needs all ranks (a barrier, a psum) cannot end on one
rank before another has come to it, so each such meeting bounds the difference of two clocks from
both sides, as a ping does; the tightest bounds of many meetings, at the start and at the end of the
job, give offset and drift. Ranks that share a clock need no correction.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from .file import Flight, FlightFileError, Record, parse_trace

FOLDER = "SPMD_TRACE"
MERGED = "trace.json"
# Barriers at the start of a traced job, of which nothing is wanted but that all are there.
CLOCK = "clock"
# Collectives that no rank can leave before all have come.
MEETINGS = frozenset(
    "clock psum pmax pmin all_gather reduce_scatter all_to_all "
    "all_reduce barrier all_gather_object split".split()
)
# So many meetings at each end of the job are compared to set the clocks.
CLOCK_SAMPLES = 64


class TraceError(ValueError):
    """A folder holds no traces; the message says which."""


@dataclass(frozen=True, slots=True)
class Clock:
    """How a rank's clock becomes the first rank's: `t - offset`, the offset on a straight line."""

    first: tuple[float, float] = (0.0, 0.0)  # time, offset
    last: tuple[float, float] = (0.0, 0.0)
    error: float = 0.0  # how wrong the offsets may be

    def __call__(self, t: int) -> float:
        (t0, offset0), (t1, offset1) = self.first, self.last
        slope = (offset1 - offset0) / (t1 - t0) if t1 > t0 else 0.0
        return t - (offset0 + slope * (t - t0))


@dataclass(slots=True)
class Meeting:
    """One collective on all ranks that took part: when each came and when it left, in ns."""

    group: int
    call: int
    record: Record
    came: dict[int, float] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)  # without those that never did
    members: int = 0

    @property
    def last(self) -> int:
        """The rank that came last."""
        return max(self.came, key=lambda rank: (self.came[rank], rank))

    @property
    def waits(self) -> dict[int, float]:
        """How long each rank waited for the last one."""
        latest = self.came[self.last]
        return {rank: latest - t for rank, t in self.came.items()}

    @property
    def lateness(self) -> float:
        """By how much the last rank came after the one in the middle of the others."""
        others = sorted(t for rank, t in self.came.items() if rank != self.last)
        return self.came[self.last] - others[len(others) // 2] if others else 0.0


@dataclass(slots=True)
class Timeline:
    """The actions of all ranks, on the clock of the first rank, in nanoseconds since the start."""

    ranks: list[Flight]
    clocks: dict[int, Clock]
    start: float
    meetings: list[Meeting]
    lost: int = 0

    def at(self, rank: int, t: int) -> float:
        """A moment of a rank's clock on the common one."""
        return self.clocks[rank](t) - self.start

    @property
    def seconds(self) -> float:
        """From the first to the last thing that was recorded."""
        ends = [
            self.at(f.rank, max(r.enqueued, r.entered, r.completed))
            for f in self.ranks
            for r in f.records
        ]
        return max(ends, default=0.0) / 1e9


def load(folder: str | Path) -> Timeline:
    """Read the traces of a folder; a `TraceError` if there are none."""
    ranks: list[Flight] = []
    lost = 0
    for path in sorted(Path(folder).glob("rank-*.trace")):
        try:
            flight, missed = parse_trace(path.read_bytes(), str(path))
        except FlightFileError as error:
            raise TraceError(str(error)) from None
        ranks.append(flight)
        lost += missed
    if not ranks:
        raise TraceError(f"no traces (rank-N.trace) in {folder}; run the job with SPMD_TRACE=DIR")
    ranks.sort(key=lambda flight: flight.rank)
    return build(ranks, lost)


def build(ranks: Sequence[Flight], lost: int = 0) -> Timeline:
    """Put the records of some ranks on one clock."""
    clocks = set_clocks(ranks)
    began = [clocks[f.rank](f.records[0].enqueued) for f in ranks if f.records]
    timeline = Timeline(list(ranks), clocks, min(began, default=0.0), [], lost)
    found: dict[tuple[int, int], Meeting] = {}
    for flight in ranks:
        for record in flight.collectives():
            key = record.group, record.call
            meeting = found.setdefault(key, Meeting(*key, record))
            meeting.came[flight.rank] = timeline.at(flight.rank, record.began)
            if record.completed:
                meeting.left[flight.rank] = timeline.at(flight.rank, record.completed)
            group = flight.groups.get(record.group)
            meeting.members = len(group.ranks) if group else flight.size
    timeline.meetings = sorted(found.values(), key=lambda m: min(m.came.values()))
    return timeline


# ---- clocks ------------------------------------------------------------------------------------


def set_clocks(ranks: Sequence[Flight]) -> dict[int, Clock]:
    """The clock of each rank, compared with that of the first."""
    reference = ranks[0]
    clocks = {}
    for flight in ranks:
        same = clock_of(flight) and clock_of(flight) == clock_of(reference)
        clocks[flight.rank] = Clock() if same else compare(reference, flight)
    return clocks


def clock_of(flight: Flight) -> str:
    """The name of a rank's clock; ranks that share a clock share the name."""
    own = (label for label in flight.labels.values() if label.get("kind") == "rank")
    return next(own, {}).get("clock_of", "")


def compare(reference: Flight, flight: Flight) -> Clock:
    """Offset and drift of a rank's clock, from the meetings of the two."""
    pairs = [
        (record, other)
        for record in flight.collectives()
        if record.completed and record.label.get("kind") in MEETINGS
        if (other := reference.call(record.group, record.call)) is not None and other.completed
    ]
    pairs.sort(key=lambda pair: pair[0].began)
    if not pairs:
        # Nothing but the hosts' own times.
        mine, theirs = flight.clock, reference.clock
        offset = float((mine[0] - mine[1]) - (theirs[0] - theirs[1]))
        return Clock((0.0, offset), (0.0, offset), float("inf"))
    ends = pairs[:CLOCK_SAMPLES], pairs[-CLOCK_SAMPLES:]
    (first, error), (last, other_error) = (_bounds(samples) for samples in ends)
    return Clock(first, last, max(error, other_error))


def _bounds(pairs: Iterable[tuple[Record, Record]]) -> tuple[tuple[float, float], float]:
    """A time, the offset there, and its error: the middle of the tightest bounds.

    `mine.completed - offset` comes after `theirs.began`, and `mine.began - offset` comes before
    `theirs.completed`.
    """
    pairs = list(pairs)
    most = min(mine.completed - theirs.began for mine, theirs in pairs)
    least = max(mine.began - theirs.completed for mine, theirs in pairs)
    when = sum(mine.began for mine, _ in pairs) / len(pairs)
    return (when, (most + least) / 2), abs(most - least) / 2


# ---- the trace for Perfetto and chrome://tracing -------------------------------------------------

HOST_ROW, PROGRAM_ROW, QUEUE_ROW, FLIGHT_ROW = 0, 1, 2, 3
# A rank's actions beside the programs, which may overlap in time with them.
HOST_KINDS = frozenset(("trace", "compile", "annotation", "step", "data"))


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The events of a Chrome trace: a process a rank, times in microseconds."""
    meetings = {(m.group, m.call): m for m in timeline.meetings}
    for flight in timeline.ranks:
        yield _name("process_name", flight.rank, 0, f"rank {flight.rank} ({flight.host})")
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": flight.rank,
            "tid": 0,
            "args": {"sort_index": flight.rank},
        }
        yield _name("thread_name", flight.rank, HOST_ROW, "host")
        yield _name("thread_name", flight.rank, PROGRAM_ROW, "programs and collectives")
        if any(record.label.get("queued") for record in flight.records):
            yield _name("thread_name", flight.rank, QUEUE_ROW, "programs beside Python")
        if any(record.is_overlapped for record in flight.records):
            yield _name("thread_name", flight.rank, FLIGHT_ROW, "collectives in flight")
        for record in flight.records:
            if record.is_collective:
                meeting = meetings[record.group, record.call]
                yield from _collective(timeline, flight.rank, record, meeting)
            else:
                yield _span(timeline, flight.rank, record)


def _name(kind: str, rank: int, row: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": text}}


def _event(
    timeline: Timeline, rank: int, row: int, name: str, begin: float, end: float, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": rank,
        "tid": row,
        "ts": round(begin / 1e3, 3),
        "dur": round(max(end - begin, 0.0) / 1e3, 3),
        "args": {k: v for k, v in args.items() if v not in ("", None)},
    }


def _span(timeline: Timeline, rank: int, record: Record) -> dict[str, Any]:
    kind = record.label.get("kind", "")
    begin = timeline.at(rank, record.began)
    end = timeline.at(rank, record.completed) if record.completed else timeline.seconds * 1e9
    row = HOST_ROW if kind in HOST_KINDS else PROGRAM_ROW
    if record.label.get("queued"):  # its time and that of other programs may overlap
        row = QUEUE_ROW
    name = span_name(record.label)
    unfinished = None if record.completed else "still open at the end"
    event = _event(
        timeline, rank, row, name, begin, end, line=record.label.get("source", ""), note=unfinished
    )
    return event | {"cat": kind}


def span_name(label: Mapping[str, Any]) -> str:
    """`compile step`, `step` of a program, or the user's name."""
    kind, program = label.get("kind", ""), label.get("program", "")
    return f"{kind} {program}" if kind in ("trace", "compile") else str(program or kind)


def _collective(
    timeline: Timeline, rank: int, record: Record, meeting: Meeting
) -> Iterator[dict[str, Any]]:
    """A collective, and inside it how long this rank waited for the last one."""
    came = meeting.came[rank]
    begin = min(timeline.at(rank, record.enqueued), came)
    row = PROGRAM_ROW
    if record.is_overlapped:  # one at a time is under way: it begins when the one before has ended
        row, begin = FLIGHT_ROW, came
    end = meeting.left.get(rank, timeline.seconds * 1e9)
    wait, last = meeting.waits[rank], meeting.last
    missing = meeting.members - len(meeting.came)
    args = {
        "line": record.label.get("source", ""),
        "program": record.label.get("program", ""),
        "bytes": record.nbytes,
        "call": record.call,
        "last to come": f"rank {last}",
        "waited_us": round(wait / 1e3, 3),
        "note": f"{missing} ranks never came" if missing else "",
    }
    yield _event(timeline, rank, row, record.name, begin, end, **args) | {"cat": "collective"}
    if rank != last and wait > 0 and min(came + wait, end) > came:
        yield _event(timeline, rank, row, f"wait for rank {last}", came, min(came + wait, end)) | {
            "cat": "wait"
        }


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a Chrome trace as JSON; a reader finds the whole file or none."""
    temporary = Path(f"{path}.{os.getpid()}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        _write(timeline, file)
    temporary.replace(path)


def merge_if_wanted(environ: Mapping[str, str]) -> None:
    """After a job that had a timeline and no time to merge it: write the traces that exist."""
    folder = environ.get(FOLDER)
    if folder and not Path(folder, MERGED).exists():
        with contextlib.suppress(OSError, TraceError):  # no rank came so far
            write_trace(load(folder), Path(folder, MERGED))


def _write(timeline: Timeline, file: TextIO) -> None:
    clocks = {
        str(rank): {"offset_us": clock.first[1] / 1e3, "error_us": _finite(clock.error / 1e3)}
        for rank, clock in timeline.clocks.items()
    }
    about = {"ranks": len(timeline.ranks), "clocks": clocks, "records_lost": timeline.lost}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
    separator = ""
    for event in events(timeline):
        file.write(separator + json.dumps(event))
        separator = ",\n"
    file.write("\n]}\n")


def _finite(number: float) -> float | None:
    return number if number < float("inf") else None
