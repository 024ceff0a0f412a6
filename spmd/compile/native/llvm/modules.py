"""Units: groups of texts that make one module, and the threads that compile modules.

LLVM takes 1.5 to 2 ms for a module before it looks at any function, so texts are compiled a few to
a module: a unit. The contents of a unit follow from the texts and their order alone, never from how
fast anything is. LLVM needs no lock of Python's: units are compiled while Python writes the texts
of others.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeAlias

from spmd.base.background import start_thread
from spmd.base.config import config
from spmd.base.fork import after_fork_in_child, enter_before_forks
from spmd.compile.native.llvm.shared_functions import SHARED

# A text, and whether it needs the few passes.
Source: TypeAlias = tuple[str, bool]

# The first line of a text that only controls others: walks over blocks, calls functions.
# Such a text runs rarely and has no vectors, so it is translated instruction by instruction, in a
# tenth of the time (product's walker: 1.9 ms instead of 16; products of 8 x 8 show no difference).
CONTROL = "; control"
# The first line of a text that is assembly already: it goes with those, as LLVM decides nothing.
ASSEMBLY = "; assembly"

# LLVM's microseconds for a line, a block of code, a character, and each register beyond the first
# that a vector fills: fitted to the 77 texts of 13 programs of `benchmarks.compile_time`. Half of
# them take within 14 % of that, nine of ten within 44 %. (By characters alone: 25 % and 53 %.)
_US_PER_LINE, _US_PER_BLOCK, _US_PER_CHARACTER, _US_PER_REGISTER = 9, 300, 0.23, 15
_WIDE = (("<32 x ", 1), ("<64 x ", 3), ("<128 x ", 7))
# The work of a text for control, per character, and how much of it is worth another unit.
_US_OF_CONTROL = 0.15
_CONTROL_UNIT = 5000
# Units per thread: enough that all threads end at about the same time, whatever a text takes. They
# are fewer where they would be less work than this: a unit itself takes 1500.
UNITS_PER_WORKER = 3
LEAST_UNIT = 5000
# Texts of so much work are a unit as soon as they are there; later units of a program may be so
# much longer, up to a limit: the first is to be there soon, and a unit costs something.
FIRST_UNIT = 3500
_GROWTH = 1.5
_LONGEST_UNIT = 24_000

# Under `log_compiles`, a waiting thread reports this often.
SECONDS_BETWEEN_REPORTS = 1.0
# While units are compiled beside Python, a thread that runs Python waits no longer than this for
# its lock: LLVM's threads take it for a moment between two calls.
SWITCH_SECONDS = 0.0002

# ---- texts -------------------------------------------------------------------------------------

# Functions and variables that others may look up: all definitions that are not private to the text.
# Both begin with letters that are searched for as they are, ten times as fast as by lines.
_FUNCTION = re.compile(r"\ndefine (?!internal |private )[^@\n]*@([\w.$]+)")
_VARIABLE = re.compile(r"\n@([\w.$]+) = (?:global|constant) ")
_ASSEMBLED = re.compile(r'\nmodule asm "\.globl ([\w.$]+)"')


@lru_cache(1024)
def symbols_of(text: str) -> tuple[str, ...]:
    """The symbols that a text defines for others."""
    lines = "\n" + text
    if text.startswith(ASSEMBLY):
        return tuple(_ASSEMBLED.findall(lines))
    return (*_FUNCTION.findall(lines), *_VARIABLE.findall(lines))


def is_control(source: Source) -> bool:
    """Whether a text only controls others, or is assembly."""
    return source[0].startswith((CONTROL, ASSEMBLY))


@lru_cache(1024)
def work_of(source: Source) -> float:
    """About how many microseconds LLVM takes for a text, without its time for a module."""
    text = source[0]
    if is_control(source):
        return len(text) * _US_OF_CONTROL
    registers = sum(more * text.count(vector) for vector, more in _WIDE)
    lines, blocks = text.count("\n"), text.count(":\n")
    return (
        lines * _US_PER_LINE
        + blocks * _US_PER_BLOCK
        + len(text) * _US_PER_CHARACTER
        + registers * _US_PER_REGISTER
    )


# ---- units -------------------------------------------------------------------------------------


def into_units(texts: Sequence[Source], cores: int) -> list[list[Source]]:
    """Texts in groups of about the same work, the longest group first, for so many cores.

    No group has two texts that define one symbol, or some for control and others. Shared functions
    are by themselves: a program that needs one does not read others that another program needed.
    """
    control = [t for t in texts if is_control(t)]
    shared = [t for t in texts if t[0].startswith(SHARED)]
    others = [t for t in texts if not is_control(t) and not t[0].startswith(SHARED)]
    work = sum(map(work_of, others))
    most = max(min(int(work / LEAST_UNIT), UNITS_PER_WORKER * cores), cores)
    # Control is mostly one group: a fraction of any other.
    walks = max(min(int(sum(map(work_of, control)) / _CONTROL_UNIT), cores), 1)
    groups = [*_balanced(others, most), *_balanced(control, walks), *([t] for t in shared)]
    return sorted(groups, key=lambda group: -sum(map(work_of, group)))


def _balanced(texts: Sequence[Source], most: int) -> list[list[Source]]:
    """Texts in at most so many groups, or more where they define one symbol."""
    groups: list[list[Source]] = [[] for _ in range(min(most, len(texts)))]
    defined: list[set[str]] = [set() for _ in groups]
    sizes = [0.0] * len(groups)
    for source in sorted(texts, key=work_of, reverse=True):
        symbols = symbols_of(source[0])
        fitting = [k for k in range(len(groups)) if defined[k].isdisjoint(symbols)]
        if not fitting:
            groups.append([])
            defined.append(set())
            sizes.append(0)
            fitting = [len(groups) - 1]
        k = min(fitting, key=sizes.__getitem__)
        groups[k].append(source)
        defined[k].update(symbols)
        sizes[k] += work_of(source)
    return groups


class Stream:
    """Makes units of texts as they come: the call that adds the last text of one gets it."""

    def __init__(self) -> None:
        self.open: list[Source] = []  # in no unit yet
        self.closed = 0
        self._symbols: set[str] = set()
        self._work = 0.0
        self._enough = float(FIRST_UNIT)

    def add(self, source: Source) -> list[Source] | None:
        """The unit that is whole now, if one is."""
        if is_control(source):  # all of them together: a fraction of any unit
            self.open.append(source)
            return None
        work = work_of(source)
        if work >= self._enough or source[0].startswith(SHARED):
            # By itself: the open texts are left for a thread that is idle in the end.
            return self._closed([source])
        symbols = symbols_of(source[0])
        unit = None if self._symbols.isdisjoint(symbols) else self._close()
        self.open.append(source)
        self._symbols.update(symbols)
        self._work += work
        if unit is None and self._work >= self._enough:
            unit = self._close()
        return unit

    def _close(self) -> list[Source]:
        unit = [t for t in self.open if not is_control(t)]
        self.open = [t for t in self.open if is_control(t)]
        self._symbols, self._work = set(), 0.0
        return self._closed(unit)

    def _closed(self, unit: list[Source]) -> list[Source]:
        self._enough = min(self._enough * _GROWTH, _LONGEST_UNIT)
        self.closed += 1
        return unit


# ---- threads -----------------------------------------------------------------------------------


class Team:
    """Compiles units on as many threads as there are cores; the one that finishes works too.

    `emit` makes the code of a unit. Helping threads are there while there are units: nothing waits
    for a team that is dropped.
    """

    def __init__(self, emit: Callable[[Sequence[Source]], bytes], cores: int):
        self._emit = emit
        self._most = cores - 1
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Sequence[Source]]] = deque()
        self._made: dict[int, bytes] = {}
        self._helpers: list[threading.Thread] = []
        self._working = 0
        self._count = 0
        self._failure: BaseException | None = None
        self._progress = _Progress()

    @property
    def has_helpers(self) -> bool:
        """Whether units are compiled before `finish`."""
        return self._most > 0

    def put(self, unit: Sequence[Source]) -> None:
        """Begin with a unit, on another thread."""
        self._add(unit)
        self._help(len(self._waiting))

    def finish(self, units: Sequence[Sequence[Source]]) -> list[bytes]:
        """The code of all units that were put, and of these, when it is made."""
        for unit in units:
            self._add(unit)
        self._longest_first()
        self._help(len(self._waiting) - 1)
        # This thread works too: it takes the longest, in memory that it has used before.
        self._work()
        for helper in self._helpers:
            helper.join()
        if self._failure is not None:
            raise self._failure
        return [self._made[number] for number in range(self._count)]

    def drop(self) -> None:
        """Compile nothing more."""
        with self._lock:
            self._waiting.clear()

    def _add(self, unit: Sequence[Source]) -> None:
        with self._lock:
            self._waiting.append((self._count, unit))
            self._count += 1
            self._progress.count += len(unit)

    def _longest_first(self) -> None:
        """Order units that have not begun by length, so that all threads end together."""
        with self._lock:
            waiting = sorted(self._waiting, key=lambda unit: -sum(map(work_of, unit[1])))
            self._waiting = deque(waiting)

    def _help(self, wanted: int) -> None:
        """Start threads for so many units that no thread is at."""
        with self._lock:
            new = min(wanted, self._most - self._working)
            self._working += max(new, 0)
        for _ in range(new):
            helper = start_thread(self._helping, "spmd-compile")
            if helper is not None:
                self._helpers.append(helper)
            else:
                with self._lock:  # its units are left to the other threads
                    self._working -= 1

    def _helping(self) -> None:
        with EMISSIONS.helping():
            self._work(helps=True)

    def _work(self, helps: bool = False) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._working -= helps
                    return
                number, unit = self._waiting.popleft()
            try:
                with EMISSIONS.one():
                    self._made[number] = self._emit(unit)
            except BaseException as error:
                self._failure = self._failure or error
                self.drop()
            self._progress.more(unit)


class _Emissions:
    """The units that LLVM compiles in this process; forks wait until there are none.

    While other threads than the one that finishes compile, Python's lock is handed on soon.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: list[int] = []
        # The interval that each helping thread found, or would have.
        self._intervals: list[float] = []
        enter_before_forks("units", self._hold, self._changed.release)
        after_fork_in_child(self._forget)

    @contextmanager
    def one(self) -> Iterator[None]:
        """While this runs, LLVM is at a unit."""
        thread = threading.get_ident()
        with self._changed:
            self._threads.append(thread)
        try:
            yield
        finally:
            with self._changed:
                self._threads.remove(thread)
                self._changed.notify_all()

    @contextmanager
    def helping(self) -> Iterator[None]:
        """While this runs, this thread compiles beside others."""
        found = self._intervals
        with self._changed:
            found.append(found[0] if found else sys.getswitchinterval())
            sys.setswitchinterval(min(SWITCH_SECONDS, found[0]))
        try:
            yield
        finally:
            with self._changed:
                before = found.pop()
                if not found:
                    sys.setswitchinterval(before)

    def _hold(self) -> None:
        self._changed.acquire()
        here = threading.get_ident()
        while any(thread != here for thread in self._threads):
            self._changed.wait()

    def _forget(self) -> None:
        """In a forked child no thread helps."""
        if self._intervals:
            sys.setswitchinterval(self._intervals[0])
            self._intervals.clear()


EMISSIONS = _Emissions()


class _Progress:
    """Says on stderr, once a second under `log_compiles`, how many texts are compiled."""

    def __init__(self) -> None:
        self.count = 0
        self._done = 0
        self._started = self._told = time.perf_counter()

    def more(self, sources: Sequence[Source]) -> None:
        """Note that texts are compiled."""
        self._done += len(sources)
        now = time.perf_counter()
        if config.log_compiles and now - self._told >= SECONDS_BETWEEN_REPORTS:
            self._told = now
            symbol = next(iter(symbols_of(sources[-1][0])), "a text")
            print(
                f"spmd: compiled {self._done} of {self.count} kernels in "
                f"{now - self._started:.1f} s, the last was {symbol}",
                file=sys.stderr,
            )
