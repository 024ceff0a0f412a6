"""Reads the flight file of a rank, as `spmd/transport/flight_recorder.py` writes it.

The rank may be writing while we read, or may have been killed in the middle of a word: a record
that is torn is left out, a label that is missing is named so. Standard library only.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAGIC = int.from_bytes(b"SPMDFLT1", "little")
VERSION = 1
PAGE = 4096
TEXT = 1024
RECORDS = 4096
RECORD = struct.Struct("<8q")
LABELS = PAGE + RECORD.size * RECORDS
_PAGE_WORDS = struct.Struct("<12q")
LABEL_TABLE_BYTES = 512 << 10
# A trace has the table right behind the page, and then all records in the order of their ends.
TRACE_RECORDS = PAGE + LABEL_TABLE_BYTES
_LOST_AT = 8 * 12
SUFFIX = ".flight"

RUNNING, RAISED, LEFT = range(3)
HOST, TRACING, COMPILING, PROGRAM, COLLECTIVE, DATA, BREAKPOINT = range(7)
PHASES = (
    "in host code",
    "tracing a function",
    "compiling a program",
    "running a program",
    "in a collective",
    "waiting for data",
    "in a breakpoint",
)
# Records of this group are no collectives: a compile, a program, a part that the user named.
NO_GROUP = -1

UNKNOWN = {"kind": "an unknown collective"}

_ReadRecords = Callable[[bytes, int, Mapping[int, Mapping[str, Any]]], Iterable["Record"]]


class FlightFileError(ValueError):
    """A file is not a flight file; the message says why."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that meet in collectives, by their number in the job."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One collective of one rank. Times in nanoseconds of the rank's monotonic clock, 0: not yet.

    `call` is its number among the calls of its group, from 1: the same on all ranks.
    """

    sequence: int
    label: Mapping[str, Any]
    nbytes: int
    group: int
    enqueued: int
    entered: int
    completed: int
    call: int

    @property
    def began(self) -> int:
        """The time at which the rank came to it."""
        return self.entered or self.enqueued

    @property
    def is_collective(self) -> bool:
        """Whether other ranks take part."""
        return self.group != NO_GROUP

    @property
    def is_overlapped(self) -> bool:
        """Whether the program went on meanwhile."""
        return bool(self.label.get("overlapped"))

    @property
    def is_wait(self) -> bool:
        """Whether the program waited for a collective in flight."""
        return self.label.get("kind") == "wait" and "of" in self.label

    @property
    def name(self) -> str:
        """`psum train.py:88`."""
        return label_name(self.label)

    @property
    def meaning(self) -> tuple[Any, ...]:
        """The fields that must be equal on all ranks of the group."""
        names = ("kind", "op", "dtype", "shape", "axes", "detail")
        return tuple(_hashable(self.label.get(name, "")) for name in names)


@dataclass(slots=True)
class Flight:
    """The records of one rank."""

    path: str
    process: int
    rank: int
    size: int
    count: int
    state: int
    phase: int
    since: int
    programs: int
    step: int
    text: str
    labels: dict[int, Mapping[str, Any]]
    groups: dict[int, Group]
    records: list[Record]  # in order, the oldest first
    alive: bool | None = None  # None: cannot be known from here
    now: int | None = None  # the monotonic clock when it was read, on the rank's own host
    _by_call: dict[tuple[int, int], Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_call = {(r.group, r.call): r for r in self.records if r.is_collective}

    @property
    def host(self) -> str:
        """The host that the rank runs on."""
        return self._own().get("host", "")

    @property
    def clock(self) -> tuple[int, int]:
        """The same moment in monotonic and in wall-clock nanoseconds."""
        first, second = self._own().get("clock", (0, 0))
        return first, second

    def _own(self) -> Mapping[str, Any]:
        return next((v for v in self.labels.values() if v.get("kind") == "rank"), {})

    def collectives(self) -> list[Record]:
        """The records of collectives, the oldest first."""
        return [record for record in self.records if record.is_collective]

    def call(self, group: int, number: int) -> Record | None:
        """The record of one call of a group, if the ring still has it."""
        return self._by_call.get((group, number))

    def last_call(self, group: int) -> int:
        """The number of the last call of a group that the rank has come to, or 0."""
        return max((number for g, number in self._by_call if g == group), default=0)

    @property
    def last_completed(self) -> Record | None:
        """The last collective that came to its end."""
        done = [record for record in self.collectives() if record.completed]
        return done[-1] if done else None

    @property
    def open(self) -> Record | None:
        """The collective that the rank is in; of several in flight the first, which comes first."""
        found = None
        for record in reversed(self.collectives()):
            if record.completed:
                break
            found = record
        return found

    @property
    def ended(self) -> bool:
        """Whether the rank makes no more calls: it raised, left, or its process is gone."""
        return self.state != RUNNING or self.alive is False


def label_name(label: Mapping[str, Any]) -> str:
    """`psum train.py:88`: the operation, and the user's line without folders."""
    place = short(label.get("source", ""))
    return f"{label.get('kind', '?')}{' ' + place if place else ''}"


def short(source: str) -> str:
    """`/home/me/train.py:88` as `train.py:88`."""
    return os.path.basename(source)


def operand(label: Mapping[str, Any]) -> str:
    """`float32[4] of grads['w'] over i`: the operand of a collective, as far as its label says."""
    shape = ",".join(map(str, label.get("shape", ())))
    said = f"{label['dtype']}[{shape}]" if label.get("dtype") else ""
    axes = ", ".join(label.get("axes", ()))
    path = f"of {label['path']}" if label.get("path") else ""
    over = f"over {axes}" if axes else ""
    parts = (said, path, over, label.get("op", ""), label.get("detail", ""))
    return " ".join(part for part in parts if part)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


# ---- reading -----------------------------------------------------------------------------------


def read(path: str | Path, look: bool = True) -> Flight:
    """Read one file; a `FlightFileError` if it is none. `look` says whether its process runs.

    The page is read before and after the ring: records replaced in between are left out.
    """
    with open(path, "rb") as file:
        head = file.read(PAGE)
        body = file.read()
        file.seek(0)
        head = file.read(PAGE) if len(head) == PAGE else head
    flight = parse(head + body, str(path))
    if look:
        flight.alive = _is_mapped_by(path, flight.process)
        flight.now = time.monotonic_ns() if flight.alive else None
    return flight


def parse(data: bytes, path: str = "") -> Flight:
    """Read the contents of a flight file."""
    return _parse(data, path, LABELS, _records)


def parse_trace(data: bytes, path: str = "") -> tuple[Flight, int]:
    """Read the contents of a trace: the rank with all its records, and how many were lost."""
    flight = _parse(data, path, PAGE, _trace_records)
    return flight, struct.unpack_from("<q", data, _LOST_AT)[0]


def _parse(data: bytes, path: str, labels_at: int, read_records: _ReadRecords) -> Flight:
    if len(data) < PAGE:
        raise FlightFileError(f"{path}: {len(data)} bytes are no flight file (a page has {PAGE})")
    words = _PAGE_WORDS.unpack_from(data)
    magic, version, process, rank, size, count, state, phase, since, programs, step, used = words
    if magic != MAGIC:
        raise FlightFileError(f"{path}: this is no flight file (it does not begin with SPMDFLT1)")
    if version != VERSION:
        raise FlightFileError(f"{path}: of version {version}; this reader knows {VERSION}")
    text = data[TEXT:PAGE].split(b"\0", 1)[0].decode(errors="replace")
    labels = dict(_labels(data[labels_at : labels_at + max(used, 0)]))
    groups = {
        label["group"]: Group(label.get("name", ""), _members(label.get("ranks", ())))
        for label in labels.values()
        if label.get("kind") == "group"
    }
    records = sorted(read_records(data, count, labels), key=lambda record: record.sequence)
    return Flight(
        path,
        process,
        rank,
        size,
        count,
        state if state in (RUNNING, RAISED, LEFT) else RUNNING,
        phase if 0 <= phase < len(PHASES) else HOST,
        since,
        programs,
        step,
        text,
        labels,
        groups,
        records,
    )


def _labels(table: bytes) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line in table.split(b"\n"):
        try:
            label = json.loads(line)
            yield label["id"], label
        except (ValueError, KeyError, TypeError):
            continue  # the last one, of a rank that was killed while it wrote it


def _members(ranks: str | Sequence[int]) -> tuple[int, ...]:
    """`[0, 2]` or `0-1023` as numbers."""
    if isinstance(ranks, str):
        first, _, last = ranks.partition("-")
        return tuple(range(int(first), int(last) + 1))
    return tuple(ranks)


def _records(data: bytes, count: int, labels: Mapping[int, Mapping[str, Any]]) -> Iterator[Record]:
    end = min(LABELS, len(data) - RECORD.size + 1)
    for place, at in enumerate(range(PAGE, end, RECORD.size)):
        number, label, *fields, call = RECORD.unpack_from(data, at)
        # The oldest one may be half replaced; one with the number of another place is torn.
        is_young = max(0, count + 1 - RECORDS) < number <= count + 1
        if is_young and (number - 1) % RECORDS == place:
            yield _record(number, label, fields, call, labels)


def _trace_records(
    data: bytes, count: int, labels: Mapping[int, Mapping[str, Any]]
) -> Iterator[Record]:
    whole = (len(data) - TRACE_RECORDS) // RECORD.size * RECORD.size
    for words in RECORD.iter_unpack(data[TRACE_RECORDS : TRACE_RECORDS + max(whole, 0)]):
        number, label, *fields, call = words
        if number > 0:
            yield _record(number, label, fields, call, labels)


def _record(
    number: int,
    label: int,
    fields: Sequence[int],
    call: int,
    labels: Mapping[int, Mapping[str, Any]],
) -> Record:
    known = labels.get(label, UNKNOWN)
    if known.get("kind") in ("rank", "group"):
        known = UNKNOWN  # label 0 also stands for those that found no room
    nbytes, group, enqueued, entered, completed = fields
    return Record(number, known, nbytes, group, enqueued, entered, completed, call)


def _is_mapped_by(path: str | Path, process: int) -> bool | None:
    """Whether the process that wrote a file still has it in its memory.

    Its number alone says little: it may have been given to another process since.
    """
    try:
        maps = Path(f"/proc/{process}/maps").read_text()
    except FileNotFoundError:
        return False if os.path.isdir("/proc/self") else None
    except OSError:
        return None
    inode = str(os.stat(path).st_ino)
    return any(inode == line.split()[4] for line in maps.splitlines() if len(line.split()) > 5)


def find(places: Iterable[str | Path]) -> list[Path]:
    """The flight files among files and folders; of a folder, those right inside it."""
    found: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            found += sorted(place.glob(f"*{SUFFIX}"))
        elif place.exists():
            found.append(place)
    return found


def read_all(places: Iterable[str | Path]) -> tuple[list[Flight], list[str]]:
    """Read the files in some places, by rank; and the errors of those that cannot be read."""
    flights: dict[int, Flight] = {}
    problems: list[str] = []
    for path in find(places):
        try:
            flight = read(path)
        except (OSError, FlightFileError) as error:
            problems.append(str(error))
            continue
        other = flights.get(flight.rank)
        if other is None or flight.clock[1] > other.clock[1]:  # a restarted job: the newest
            flights[flight.rank] = flight
    return [flights[rank] for rank in sorted(flights)], problems
