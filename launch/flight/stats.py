"""Late ranks and their cost: the meetings of a timeline by collective, by rank, by line.

The rank that comes last makes all others wait. The reason given is its recorded work since its
meeting before (a compile, waiting for data, a part the user named).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .diagnosis import duration, ranks_text, table
from .file import Flight, Record, label_name, operand
from .timeline import CLOCK, MEETINGS, Meeting, Timeline, span_name

# Below this no rank is called late: it is the skew of ranks that do the same.
LATE_NS = 20_000.0
# The part of the time before a late arrival that a record must explain to be its reason.
EXPLAINS = 0.5


def hidden_part(flown: float, stood: float) -> float:
    """The part of the time in flight that programs did not wait for."""
    return max(0.0, 1.0 - stood / flown)


@dataclass(slots=True)
class CollectiveStats:
    """All meetings of one collective of the program: times in seconds, over all ranks."""

    name: str
    operand: str
    source: str
    calls: int = 0
    nbytes: int = 0
    waited: float = 0.0
    moved: float = 0.0  # from the coming of the last rank to the end
    worst: float = 0.0
    unfinished: int = 0
    flown: float = 0.0  # while programs went on: from the begin to the end, over all ranks
    stood: float = 0.0  # of that, the waits of programs

    @property
    def hidden(self) -> float | None:
        """The part of the time in flight that programs did not wait for; None if none flew."""
        return hidden_part(self.flown, self.stood) if self.flown else None


@dataclass(slots=True)
class Late:
    """A rank that was the last to come to a collective: how often, and the cost for the others."""

    rank: int
    name: str
    source: str
    times: int = 0
    of: int = 0
    late: float = 0.0  # in all, after the rank in the middle of the others
    worst: float = 0.0
    cost: float = 0.0  # the others' waits, added up
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Its most frequent activity meanwhile."""
        return max(self.reasons, key=lambda name: (self.reasons[name], name), default="")


@dataclass(slots=True)
class RankStats:
    """The use of one rank's time, in seconds."""

    rank: int
    host: str
    seconds: float = 0.0
    programs: float = 0.0  # without collectives
    compiling: float = 0.0
    waiting: float = 0.0
    moving: float = 0.0

    @property
    def rest(self) -> float:
        """Host code: the rest of the time."""
        known = self.programs + self.compiling + self.waiting + self.moving
        return max(self.seconds - known, 0.0)


@dataclass(frozen=True, slots=True)
class Stats:
    """The tables of a timeline."""

    seconds: float
    collectives: tuple[CollectiveStats, ...]
    late: tuple[Late, ...]
    ranks: tuple[RankStats, ...]
    headline: str
    lost: int

    def hidden_lines(self) -> list[str]:
        """`psum: 91 % of 1.2 s in flight hidden behind programs`, for each kind that flew."""
        kinds: dict[str, list[CollectiveStats]] = {}
        for entry in self.collectives:
            if entry.flown:
                kinds.setdefault(entry.name.split()[0], []).append(entry)
        lines = []
        for kind, entries in sorted(kinds.items()):
            flown = sum(entry.flown for entry in entries)
            hidden = hidden_part(flown, sum(entry.stood for entry in entries))
            calls = sum(entry.calls for entry in entries)
            lines.append(
                f"{kind}: {calls} exchanges while programs computed, "
                f"{hidden:.0%} of their {duration(flown)} hidden"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return asdict(self)

    def lines(self, most: int = 20) -> list[str]:
        """The same as tables; no more than `most` rows each."""
        said = [self.headline]
        if self.lost:
            said.append(f"({self.lost} records came too fast to be kept; times are of the others)")
        said += ["", "where the time of each rank went:"]
        said += table(rank_rows(self), right=range(2, 8))
        said += ["", "collectives, by the time that ranks waited in them:"]
        said += table(collective_rows(self, most), right=range(2, 9))
        said += self.hidden_lines()
        if len(self.late) > 0:
            said += ["", "who was late:"]
            said += table(late_rows(self, most), right=(2, 3, 4, 5))
        return said


def collective_rows(stats: Stats, most: int) -> list[tuple[str, ...]]:
    """The table of collectives, with its head."""
    head = ("collective", "of", "calls", "bytes", "waited", "worst", "moved", "GB/s", "hidden")
    rows: list[tuple[str, ...]] = [head]
    for c in stats.collectives[:most]:
        times = map(duration, (c.waited, c.worst, c.moved))
        rate = f"{c.nbytes / c.moved / 1e9:.3g}" if c.moved else ""
        hidden = "" if c.hidden is None else f"{c.hidden:.0%}"
        rows.append((c.name, c.operand, str(c.calls), amount(c.nbytes), *times, rate, hidden))
    return rows


def late_rows(stats: Stats, most: int) -> list[tuple[str, ...]]:
    """The table of stragglers, with its head."""
    head = ("rank", "collective", "late", "on average", "worst", "cost others", "instead it was")
    rows: list[tuple[str, ...]] = [head]
    for late in stats.late[:most]:
        times = (late.late / late.times, late.worst, late.cost)
        often = f"{late.times} of {late.of}"
        rows.append((str(late.rank), late.name, often, *map(duration, times), late.reason))
    return rows


def rank_rows(stats: Stats) -> list[tuple[str, ...]]:
    """The table of ranks, with its head."""
    head = ("rank", "host", "time", "programs", "collectives", "waiting", "compiling", "host code")
    rows: list[tuple[str, ...]] = [head]
    for r in stats.ranks:
        times = (r.seconds, r.programs, r.moving, r.waiting, r.compiling, r.rest)
        rows.append((str(r.rank), r.host, *map(duration, times)))
    return rows


def collect(timeline: Timeline) -> Stats:
    """The tables of a timeline."""
    collectives: dict[tuple, CollectiveStats] = {}
    late: dict[tuple, Late] = {}
    before = _Before(timeline)
    for meeting in timeline.meetings:
        if meeting.record.label.get("kind") == CLOCK:
            continue
        name, said = meeting.record.name, operand(meeting.record.label)
        source = str(meeting.record.label.get("source", ""))
        entry = collectives.setdefault((name, said), CollectiveStats(name, said, source))
        _add(entry, meeting)
        if is_late(meeting):
            key = meeting.last, name, source
            found = late.setdefault(key, Late(meeting.last, name, source))
            found.times += 1
            found.late += meeting.lateness / 1e9
            found.worst = max(found.worst, meeting.lateness / 1e9)
            found.cost += sum(meeting.waits.values()) / 1e9
            reason = before.reason(meeting)
            found.reasons[reason] = found.reasons.get(reason, 0) + 1
    _add_flights(timeline, collectives)
    for found in late.values():
        same = (c for c in collectives.values() if (c.name, c.source) == (found.name, found.source))
        found.of = sum(c.calls for c in same)
    worst = tuple(sorted(late.values(), key=lambda late: -late.cost))
    return Stats(
        timeline.seconds,
        tuple(sorted(collectives.values(), key=lambda c: -c.waited)),
        worst,
        tuple(_rank(timeline, flight) for flight in timeline.ranks),
        _headline(timeline, worst),
        timeline.lost,
    )


def is_late(meeting: Meeting) -> bool:
    """Whether the last rank made the others wait longer than ranks that do the same wait."""
    kind = meeting.record.label.get("kind")
    return kind in MEETINGS and len(meeting.came) > 1 and meeting.lateness > LATE_NS


def _add(entry: CollectiveStats, meeting: Meeting) -> None:
    entry.calls += 1
    entry.nbytes += meeting.record.nbytes
    waits = meeting.waits
    entry.waited += sum(waits.values()) / 1e9
    entry.worst = max(entry.worst, max(waits.values()) / 1e9)
    if len(meeting.left) < meeting.members:
        entry.unfinished += 1
    if meeting.left:
        entry.moved += max(max(meeting.left.values()) - meeting.came[meeting.last], 0.0) / 1e9


def _add_flights(timeline: Timeline, collectives: dict[tuple, CollectiveStats]) -> None:
    """Note the exchanges in flight, and the programs' waits for them.

    One exchange is under way at a time, so times add up; a program that waits for one may wait for
    those before it too, and all of that counts as waiting for the last.
    """
    for flight in timeline.ranks:
        for record in flight.records:
            flies = record.is_collective and record.is_overlapped
            if not record.completed or not (flies or record.is_wait):
                continue
            label = record.label if flies else flight.labels.get(record.label["of"], {})
            entry = collectives.get((label_name(label), operand(label)))
            if entry is None:
                continue
            took = (record.completed - record.began) / 1e9
            if flies:
                entry.flown += took
            else:
                entry.stood += took


def _rank(timeline: Timeline, flight: Flight) -> RankStats:
    found = RankStats(flight.rank, flight.host)
    spans = [r for r in flight.records if r.completed]
    if not spans:
        return found
    found.seconds = (max(r.completed for r in spans) - min(r.enqueued for r in spans)) / 1e9
    ends: dict[str, int] = {}
    for record in spans:
        kind = record.label.get("kind", "")
        if record.is_collective or kind not in ("compile", "trace", "program"):
            continue
        # Programs call programs, and compiles contain compiles: the outermost counts.
        row = "program" if kind == "program" else "compile"
        if record.began >= ends.get(row, 0):
            ends[row] = record.completed
            took = (record.completed - record.began) / 1e9
            if row == "compile":
                found.compiling += took
            else:
                found.programs += took
    programs = sorted(
        (r.began, r.completed)
        for r in spans
        if not r.is_collective and r.label.get("kind") == "program"
    )
    inside = found.waiting = sum(r.completed - r.began for r in spans if r.is_wait) / 1e9
    for meeting in timeline.meetings:
        if flight.rank not in meeting.left or meeting.record.is_overlapped:
            continue
        took = (meeting.left[flight.rank] - meeting.came[flight.rank]) / 1e9
        waited = min(meeting.waits[flight.rank] / 1e9, max(took, 0.0))
        found.waiting += waited
        found.moving += max(took - waited, 0.0)
        own = flight.call(meeting.group, meeting.call)
        if own is not None and _is_inside(own, programs):
            inside += took
    found.programs = max(found.programs - inside, 0.0)
    return found


def _is_inside(record: Record, spans: list[tuple[int, int]]) -> bool:
    begun = bisect_right(spans, record.enqueued, key=lambda span: span[0])
    return any(end >= record.completed for _, end in spans[max(begun - 3, 0) : begun])


class _Before:
    """The activity of each rank before it came to a collective."""

    def __init__(self, timeline: Timeline):
        self.timeline = timeline
        self.done: dict[int, float] = {}
        self.spans: dict[int, list[tuple[float, float, str]]] = {}
        for flight in timeline.ranks:
            made = [
                (timeline.at(flight.rank, r.began), timeline.at(flight.rank, r.completed), r)
                for r in flight.records
                if not r.is_collective and r.completed and r.label.get("kind") != "step"
            ]
            named = ((begin, end, reason_name(r)) for begin, end, r in made)
            self.spans[flight.rank] = sorted(named, key=lambda span: span[0])
        self.at = dict.fromkeys(self.spans, 0)
        self.last_left: dict[tuple[int, int, int], float] = {}
        for flight in timeline.ranks:
            end = timeline.start
            for record in flight.collectives():
                self.last_left[flight.rank, record.group, record.call] = end
                if record.completed:
                    end = timeline.at(flight.rank, record.completed)

    def reason(self, meeting: Meeting) -> str:
        """The activity of the last rank for most of the time by which it was late."""
        rank = meeting.last
        came = meeting.came[rank]
        since = max(self.last_left[rank, meeting.group, meeting.call], came - meeting.lateness)
        spent: dict[str, tuple[float, float]] = {}  # by name: before the meeting, and in all
        for begin, end, name in self._near(rank, since, came):
            before, whole = spent.get(name, (0.0, 0.0))
            overlap = max(min(end, came) - max(begin, since), 0.0)
            spent[name] = before + overlap, whole + end - begin
        enough = [(w, n) for n, (b, w) in spent.items() if b > EXPLAINS * (came - since)]
        # Of parts inside each other the innermost says most.
        return min(enough)[1] if enough else "in host code"

    def _near(self, rank: int, since: float, came: float) -> Iterable[tuple[float, float, str]]:
        spans = self.spans[rank]
        at = self.at[rank]
        while at < len(spans) and spans[at][0] < came:
            at += 1
        self.at[rank] = at
        # Meetings are looked at in order: records that ended long before are not met again.
        return [span for span in spans[max(0, at - 256) : at] if span[1] > since]


def reason_name(record: Record) -> str:
    """`compiling step`, `waiting for data`, `running step`, or the user's name."""
    kind, program = record.label.get("kind", ""), record.label.get("program", "")
    words = {"compile": "compiling", "trace": "tracing", "program": "running"}
    if kind == "data":
        return "waiting for data"
    return f"{words[kind]} {program}".strip() if kind in words else span_name(record.label)


def _headline(timeline: Timeline, late: tuple[Late, ...]) -> str:
    ranks = len(timeline.ranks)
    meetings = sum(m.record.label.get("kind") != CLOCK for m in timeline.meetings)
    said = f"{ranks} rank{'s' * (ranks > 1)}, {duration(timeline.seconds)}, {meetings} collectives"
    by_rank: dict[int, float] = {}
    for entry in late:
        by_rank[entry.rank] = by_rank.get(entry.rank, 0.0) + entry.cost
    total = sum(by_rank.values())
    if not total:
        return f"{said}; nobody was late"
    worst = max(by_rank, key=lambda rank: by_rank[rank])
    first = next(entry for entry in late if entry.rank == worst)
    share = f"{by_rank[worst] / total:.0%} of {duration(total)} that ranks waited for late ones"
    return (
        f"{said}; {ranks_text([worst])} caused {share}, most of it in {first.name} ({first.reason})"
    )


def amount(nbytes: float) -> str:
    """`64 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"
