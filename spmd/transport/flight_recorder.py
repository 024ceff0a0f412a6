"""The flight recorder: this rank's actions, in memory that others can read without its help.

The one idea: a rank that hangs or was killed cannot be asked, so it writes each action down
*before* it begins it, in a file that several processes map. `FLIGHT` is this process's record, on
from the start: a page with the rank's state, a ring of the last collectives, a table of labels.
With `SPMD_FLIGHT_DIR` the memory is the file `rank-N.flight` in that folder; without, it is
anonymous. Its address never changes, so native code may write to it too.

    | page of the rank (4096 B) | ring: 4096 records of 64 B | labels: 512 KiB of JSON lines |

All words are little-endian int64. A reader that copies the memory while it is written finds at most
the record that is being replaced torn, the oldest one: it must drop records numbered at most
`word[COUNT] + 1 - RECORDS`. `launch/flight/file.py` is the reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spmd.base.digest import blake2b
from spmd.base.fork import after_fork_in_child
from spmd.base.source import UNKNOWN, Source, current_source
from spmd.transport.call_signature import Call

MAGIC = int.from_bytes(b"SPMDFLT1", "little")
VERSION = 1

# Words of the page.
(
    WORD_MAGIC,
    WORD_VERSION,
    PROCESS,
    RANK,
    SIZE,
    COUNT,  # records begun
    STATE,
    PHASE,
    SINCE,  # when the phase began
    PROGRAMS,  # programs called
    STEP,  # the number that the user gave, or -1
    LABEL_BYTES,  # of the label table that are in use
    LOST,  # ranks that died, and without which this one went on
) = range(13)
RUNNING, RAISED, LEFT = range(3)
HOST, TRACING, COMPILING, PROGRAM, COLLECTIVE, DATA, BREAKPOINT = range(7)

PAGE = 4096
TEXT = 1024
TEXT_BYTES = PAGE - TEXT

# Words of a record. Times are of CLOCK_MONOTONIC, in nanoseconds; 0 is "not yet".
SEQUENCE, LABEL, BYTES, GROUP, ENQUEUED, ENTERED, COMPLETED, CALL = range(8)
RECORDS = 4096
RECORD_WORDS = 8
RING = PAGE
RING_WORD = RING // 8

LABELS = RING + 64 * RECORDS
LABEL_TABLE_BYTES = 512 << 10
FILE_BYTES = LABELS + LABEL_TABLE_BYTES

FOLDER = "SPMD_FLIGHT_DIR"
WORLD = 0  # the group of all ranks
# Records that are no collective: a compile, a program, a part that the user named.
NO_GROUP = -1

_FIELDS = struct.Struct("<7q")
_MAP_FIXED = 0x10


class Flight:
    """The record of one process."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, FILE_BYTES)
        self.bytes = memoryview(self._memory)
        self.words = self.bytes.cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.path: str | None = None
        # Called with whether the rank failed, when it ends.
        self.at_end: list[Callable[[bool], None]] = []
        self.keeps_programs = False  # whether each call of a program has a record, for a timeline
        self._labels: dict[Any, int] = {}
        # The phases that `recorded` is in, of all threads, and the phase before the first of them.
        self._phases: dict[object, int] = {}
        self._outside = HOST
        words = self.words
        words[WORD_MAGIC], words[WORD_VERSION] = MAGIC, VERSION
        words[PROCESS], words[SIZE], words[STEP] = os.getpid(), 1, -1
        words[SINCE] = time.monotonic_ns()

    def join(self, rank: int, size: int, folder: str | None) -> None:
        """Set this process's rank, and move the record to a file in `folder` if one can be made."""
        if folder and self.path is None:
            try:
                self._move_to(folder, rank)
            except OSError as error:
                sys.stderr.write(f"spmd: {FOLDER}={folder}: {error.strerror}; not recorded there\n")
        words = self.words
        words[PROCESS], words[RANK], words[SIZE] = os.getpid(), rank, size
        self.label(
            "rank",
            host=os.uname().nodename,
            program=os.path.basename(sys.argv[0] if sys.argv else ""),
            clock=(time.monotonic_ns(), time.time_ns()),
            clock_of=_clock_of(),
        )

    def _move_to(self, folder: str, rank: int) -> None:
        """Put a file under the memory, with its present contents."""
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"rank-{rank}.flight")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Now, not at the first write: a full tmpfs must not end the rank with SIGBUS.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, FILE_BYTES)
            os.ftruncate(fd, FILE_BYTES)
            os.pwrite(fd, self.bytes, 0)
            self._map(mmap.MAP_SHARED, fd)
        finally:
            os.close(fd)
        self.path = path

    def _map(self, flags: int, fd: int) -> None:
        """Replace the pages behind the memory; its address stays."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        size, offset = ctypes.c_size_t(FILE_BYTES), ctypes.c_long(0)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        place = ctypes.c_void_p(self.address)
        if libc.mmap(place, size, protection, flags | _MAP_FIXED, fd, offset) != self.address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def forget(self) -> None:
        """In a forked child, which is no rank: write to memory that is never read."""
        self.path = None
        self._map(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.words[STEP] = -1

    # ---- labels --------------------------------------------------------------------------------

    def label(self, kind: str, **fields: Any) -> int:
        """The number of a label; the same fields give the same number. 0 if the table is full."""
        key = (kind, *fields.items())
        number = self._labels.get(key)
        if number is None:
            number = self._labels[key] = self._write_label(kind, fields)
        return number

    def _write_label(self, kind: str, fields: dict[str, Any]) -> int:
        number = len(self._labels)
        said = {name: value for name, value in fields.items() if value not in ("", None)}
        members = {"id": number, "kind": kind, **said}.items()
        texts = (f"{_json_text(name)}: {_json_text(value)}" for name, value in members)
        line = f"{{{', '.join(texts)}}}\n".encode()
        used = self.words[LABEL_BYTES]
        if used + len(line) > LABEL_TABLE_BYTES:
            return 0
        self.bytes[LABELS + used : LABELS + used + len(line)] = line
        self.words[LABEL_BYTES] = used + len(line)
        return number

    # ---- records -------------------------------------------------------------------------------

    def begin(
        self, label: int, nbytes: int, group: int = NO_GROUP, call: int = 0, entered: bool = True
    ) -> int:
        """Write a record; gives its place, for `entered` and `completed`."""
        words = self.words
        count = words[COUNT]
        place = RING_WORD + (count % RECORDS) * RECORD_WORDS
        now = time.monotonic_ns()
        words[SINCE] = now
        begun = now if entered else 0
        _FIELDS.pack_into(self.bytes, 8 * place + 8, label, nbytes, group, now, begun, 0, call)
        words[place] = words[COUNT] = count + 1
        return place

    def entered(self, place: int) -> None:
        """Note that this rank has reached the collective and waits for the others."""
        self.words[place + ENTERED] = time.monotonic_ns()

    def completed(self, place: int) -> None:
        """Note the end of a record's action."""
        words = self.words
        words[place + COMPLETED] = words[SINCE] = time.monotonic_ns()

    # ---- the state of the rank -----------------------------------------------------------------

    def set_phase(self, phase: int) -> int:
        """Set the rank's phase; gives the one before."""
        words = self.words
        before = words[PHASE]
        words[PHASE] = phase
        words[SINCE] = time.monotonic_ns()
        return before

    @contextlib.contextmanager
    def phase(self, phase: int, kind: str = "", name: str = "", source: str = "") -> Iterator[None]:
        """The rank does this within a `with` block; with a `kind` there is a record of it too."""
        label = self.label(kind, program=name, source=source) if kind else -1
        with self.recorded(label, phase):
            yield

    @contextlib.contextmanager
    def recorded(self, label: int, phase: int) -> Iterator[None]:
        """The rank does this within a `with` block; a record of it has a label, if that is >= 0.

        Threads may be in blocks that end in any order: the one that began last shows.
        """
        before = self.set_phase(phase)
        if not self._phases:
            self._outside = before
        own = object()
        self._phases[own] = phase
        place = self.begin(label, 0) if label >= 0 else 0
        try:
            yield
        finally:
            if place:
                self.completed(place)
            del self._phases[own]
            self.set_phase([self._outside, *self._phases.values()][-1])

    def set_step(self, number: int) -> None:
        """Note the step that the user's loop is in."""
        self.words[STEP] = number

    def end(self, state: int, text: str = "") -> None:
        """Say how this rank ends."""
        encoded = text.encode()[: TEXT_BYTES - 1]
        self.bytes[TEXT : TEXT + len(encoded) + 1] = encoded + b"\0"
        self.words[SINCE] = time.monotonic_ns()
        self.words[STATE] = state
        for call in self.at_end:
            call(state == RAISED)


FLIGHT = Flight()
after_fork_in_child(FLIGHT.forget)


class GroupLog:
    """Records the collectives of one communicator.

    `group` is the same number on all ranks of the group and differs from that of other groups;
    `ranks` are its members by their number in the job.
    """

    def __init__(self, group: int, name: str, ranks: Sequence[int]):
        self.group = group
        self.ranks = tuple(ranks)
        # A cell of memory: native code counts its calls here too.
        self._memory = bytearray(8)
        self.calls = memoryview(self._memory).cast("q")
        self.calls_address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._open = 0  # the record of a program's collective, which is one or more calls here
        self._is_apart = False  # whether another thread makes that one
        self._before = HOST
        self._splits = 0
        self._labels: dict[tuple[int, str, int], int] = {}
        FLIGHT.label("group", group=group, name=name, ranks=_shortened(self.ranks))

    def split(self) -> int:
        """Number a split of the group."""
        self._splits += 1
        return self._splits

    def part(self, split: int, name: str, members: Sequence[int]) -> GroupLog:
        """The log of a group that a split made, with `members` as this group numbers them."""
        ranks = [self.ranks[r] for r in members]
        text = f"{self.group} {split} {ranks}".encode()
        digest = blake2b(text, digest_size=8).digest()
        return GroupLog(int.from_bytes(digest, "little") >> 2 | 1, name, ranks)

    # ---- calls of the communicator -------------------------------------------------------------

    def enter(self, call: Call, nbytes: int) -> int:
        """A call begins; gives its record, or 0 where it is part of a program's collective."""
        if self._open:
            if not FLIGHT.words[self._open + ENTERED]:
                FLIGHT.entered(self._open)
            return 0
        return self.begin(self._label(call, current_source()), nbytes, entered=True)

    def _label(self, call: Call, source: Source) -> int:
        key = call.digest, source.file, source.line
        number = self._labels.get(key)
        if number is None:
            number = self._labels[key] = FLIGHT.label(
                call.kind.name.lower(),
                op=call.op.value if call.op else "",
                dtype=call.dtype,
                shape=(call.count,) if call.dtype else "",
                detail=call.detail[:200],
                source=source_text(source),
            )
        return number

    def leave(self, place: int) -> None:
        """A call ends."""
        if place:
            self.completed(place)

    # ---- collectives of a program --------------------------------------------------------------

    def begin(self, label: int, nbytes: int, entered: bool = False) -> int:
        """A collective begins; the calls until it is `completed` are part of it."""
        call = self.calls[0] = self.calls[0] + 1
        words = FLIGHT.words
        self._before, words[PHASE] = words[PHASE], COLLECTIVE
        place = self._open = FLIGHT.begin(label, nbytes, self.group, call, entered)
        return place

    def completed(self, place: int) -> None:
        """A collective has ended."""
        FLIGHT.completed(place)
        FLIGHT.words[PHASE] = self._before
        self._open = 0

    # ---- collectives in flight, which another thread makes while the rank does something else ----

    def enqueue(self, label: int, nbytes: int) -> int:
        """A collective is handed over; gives its record."""
        call = self.calls[0] = self.calls[0] + 1
        return FLIGHT.begin(label, nbytes, self.group, call, entered=False)

    def take_up(self, place: int) -> None:
        """It begins now: the calls until it has `landed` are part of it."""
        self._open, self._is_apart = place, True

    def landed(self, place: int, succeeded: bool) -> None:
        """It has ended; the record of one that raised stays open."""
        self._open, self._is_apart = 0, False
        if succeeded:
            FLIGHT.completed(place)

    def stopped(self) -> None:
        """A collective raised: its record stays open, and the rank is where it was before."""
        if self._open and not self._is_apart:
            self._open = 0
            FLIGHT.set_phase(self._before)


def _json_text(value: Any) -> str:
    """The value as JSON, as `json.dumps` writes it."""
    if type(value) is str:
        if value.isascii() and value.isprintable() and '"' not in value and "\\" not in value:
            return f'"{value}"'
    elif type(value) is int:
        return str(value)
    elif isinstance(value, tuple | list):
        return f"[{', '.join(map(_json_text, value))}]"
    import json  # takes long, and every first call writes a label

    return json.dumps(value)


def _clock_of() -> str:
    """An id of the monotonic clock: equal in processes of one host since its boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return os.uname().nodename


def source_text(source: Source) -> str:
    """`file:line` with the folders, or nothing."""
    return f"{source.file}:{source.line}" if source is not UNKNOWN and source.line else ""


def _shortened(ranks: tuple[int, ...]) -> tuple[int, ...] | str:
    """Ranks as a list, or as `0-1023` where they follow each other."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ranks
