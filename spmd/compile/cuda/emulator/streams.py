"""Streams of emulated GPUs: late work, in an order that is chance, events, and captures.

Work is done only when somebody waits for it, and work of other streams at random moments. Each
piece of work knows what it comes behind: what was before it in its stream, and what that stream or
the host waited for by then. `comes_before` says so, whatever the order in which work was done.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Mapping

from spmd.base.errors import CudaError

# More work than this is not kept waiting.
_LONGEST_QUEUE = 4096
# Between two looks whether work can go on that waits for another process.
_PAUSE_SECONDS = 0.0005

# The result of work that can't go on: it is not done, and begun again later.
WAITS = object()


class Work:
    """A piece of work: the `index`-th of its stream, with those of other streams before it.

    `always` is done even if the work before it failed.
    """

    __slots__ = ("always", "do", "index", "is_done", "seen", "stream")

    def __init__(
        self,
        do: Callable[[], object],
        always: bool,
        stream: int,
        index: int,
        seen: Mapping[int, int],
    ):
        self.do, self.always, self.is_done = do, always, False
        self.stream, self.index, self.seen = stream, index, seen

    def comes_before(self, other: Work) -> bool:
        """Whether this work has ended when the other begins, however late streams are."""
        if self.stream == other.stream:
            return self.index <= other.index
        return self.index <= other.seen.get(self.stream, 0)


class _Stream:
    """The work of a stream that no call waited for yet, and the failures among it.

    While a thread captures it, its work is kept, and never done.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.work: deque[Work] = deque()
        self.failure = ""
        self.last = 0  # the index of its newest work
        self.seen: Mapping[int, int] = {}
        self.captured_by: int | None = None
        self.is_busy = False  # whether its oldest work is being done


class Streams:
    """All streams of some devices, by number; each device's first one has the device's number.

    While no work can go on, other threads have the lock of `pause`.
    """

    def __init__(self, devices: int, seed: int, pause: threading.Condition):
        self._pause = pause
        self._streams = [_Stream(k) for k in range(devices)]
        self._random = random.Random(seed)
        # Of each stream, the newest work for which the host waited.
        self._host: Mapping[int, int] = {}
        # The work that is being done: what was freed behind it is still there.
        self.running: Work | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def new(self, device: int) -> int:
        """The number of another stream of a device."""
        self._streams.append(_Stream(device))
        return len(self._streams) - 1

    def last(self, number: int) -> int:
        """The index of the newest work of a stream."""
        return self._streams[number].last

    def device_of(self, number: int) -> int:
        """The device that a stream is on."""
        return self._streams[number].device

    # -- work --

    def put(self, number: int, do: Callable[[], object], always: bool = False) -> Work:
        """Put work into a stream."""
        stream = self._streams[number]
        stream.last += 1
        stream.seen = _merged(stream.seen, self._host)
        work = Work(do, always, number, stream.last, stream.seen)
        stream.work.append(work)
        if len(stream.work) > _LONGEST_QUEUE:
            self.step(number)
        return work

    def step(self, number: int) -> bool:
        """Begin the oldest work of a stream, which may be a wait; whether anything was done."""
        stream = self._streams[number]
        if not stream.work or stream.is_busy or stream.captured_by is not None:
            return False
        work = stream.work.popleft()
        before, self.running = self.running, work
        stream.is_busy, given = True, None
        try:
            given = work.do()
        except CudaError as error:
            stream.failure = stream.failure or error.text
            stream.work = deque(each for each in stream.work if each.always)
        finally:
            stream.is_busy, self.running = False, before
            work.is_done = given is not WAITS
        if given is WAITS:
            stream.work.appendleft(work)
        return work.is_done

    def run(self, number: int) -> None:
        """Do all work of a stream, and of others as much as chance wants."""
        stream = self._streams[number]
        if stream.captured_by is not None:
            raise CudaError("a wait for a stream that is captured")
        while stream.work:
            if not self.step(self._random.choice([number, *self._with_work()])):
                self._pause.wait(_PAUSE_SECONDS)
        self._note_ended(number, stream.last, stream.seen)

    def wait(self, number: int) -> None:
        """Do the work of a stream; raises a `CudaError` if any of its device's failed."""
        self.run(number)
        self._tell(self._streams[number].device)

    def wait_until(self, mark: Work) -> None:
        """Do the work before an event; raises a `CudaError` if any of its device's failed."""
        while not mark.is_done:
            if not self.step(self._random.choice([mark.stream, *self._with_work()])):
                self._pause.wait(_PAUSE_SECONDS)
        self._note_ended(mark.stream, mark.index, mark.seen)
        self._tell(self._streams[mark.stream].device)

    def _tell(self, device: int) -> None:
        """Raise a `CudaError` if work of a device failed since the host was last told."""
        failures = ""
        for stream in self._streams:
            if stream.device == device:
                failures, stream.failure = failures or stream.failure, ""
        if failures:
            raise CudaError(failures)

    def is_idle(self, number: int) -> bool:
        """Whether a stream has no work left; repeated queries let its work proceed."""
        self.step(number)
        stream = self._streams[number]
        if stream.work or stream.is_busy:
            return False
        self._note_ended(number, stream.last, stream.seen)
        return True

    def _with_work(self) -> list[int]:
        streams = enumerate(self._streams)
        return [k for k, each in streams if each.work and each.captured_by is None]

    def _note_ended(self, number: int, last: int, seen: Mapping[int, int]) -> None:
        """The host waited for the work of a stream, and so for all that this waited for."""
        self._host = _merged(_merged(self._host, seen), {number: last})

    # -- events --

    def mark(self, number: int) -> Work:
        """Work that does nothing: an event, which has happened when it is done."""
        return self.put(number, lambda: None, always=True)

    def has_happened(self, mark: Work) -> bool:
        """Whether an event has happened; repeated queries let its stream proceed."""
        self.step(mark.stream)
        if mark.is_done:
            self._note_ended(mark.stream, mark.index, mark.seen)
        return mark.is_done

    def is_behind(self, number: int, mark: Work) -> bool:
        """Whether work that comes into a stream now is behind an event without a wait for it."""
        seen = max(self._streams[number].seen.get(mark.stream, 0), self._host.get(mark.stream, 0))
        return mark.stream == number or mark.index <= seen

    def wait_for(self, number: int, mark: Work) -> None:
        """Let work that comes into a stream from now on wait for an event."""
        if self.is_behind(number, mark):
            return

        def wait() -> object:
            while not mark.is_done:
                if not self.step(mark.stream):
                    return WAITS
            return None

        self.put(number, wait, always=True)
        stream = self._streams[number]
        stream.seen = _merged(_merged(stream.seen, mark.seen), {mark.stream: mark.index})

    # -- captures --

    def capture(self, number: int) -> None:
        """Keep the work of a stream from now on, which this thread gives it, for `end_capture`."""
        self._streams[number].captured_by = threading.get_native_id()

    def end_capture(self, number: int) -> list[Work]:
        """The work of a stream since its capture began; none of it was done."""
        stream = self._streams[number]
        if stream.captured_by is None:
            raise CudaError("the end of a capture that did not begin")
        work = list(stream.work)
        stream.work.clear()
        stream.captured_by = None
        return work

    def check_no_capture(self, what: str) -> None:
        """Refuse what a thread may not do while it captures a stream."""
        if any(s.captured_by == threading.get_native_id() for s in self._streams):
            raise CudaError(f"{what} while a stream is captured")

    def replay(self, number: int, works: list[Work]) -> None:
        """Put captured work into a stream, as one piece."""
        self.put(number, lambda: [work.do() for work in works])


def _merged(one: Mapping[int, int], other: Mapping[int, int]) -> Mapping[int, int]:
    """For each stream the later of two pieces of work; one of the two if that is enough."""
    if one is other or all(one.get(k, 0) >= n for k, n in other.items()):
        return one
    return {k: max(one.get(k, 0), other.get(k, 0)) for k in {**one, **other}}
