"""Moments of the streams of GPUs: events behind calls, for which readers of their results wait.

The one idea: a stream has a ring of events, and each call records the next. An array notes the
event of the call that made it, and a reader waits for that event only, not for later calls. An
event that was recorded again meanwhile belongs to a later call of the same stream: its reader waits
longer than it must, and reads what is there.
"""

from __future__ import annotations

from itertools import cycle

from spmd.compile.cuda.driver import Driver

# So many calls may follow before a reader waits for later ones.
EVENTS = 32


class Moments:
    """The ring of events of a stream; `newest` was recorded last, 0 if none was."""

    __slots__ = ("device", "gpu", "newest", "next", "stream")

    def __init__(self, gpu: Driver, device: int, stream: int):
        self.gpu, self.device, self.stream = gpu, device, stream
        self.next = cycle([gpu.new_event(device) for _ in range(EVENTS)]).__next__
        self.newest = 0

    def note(self) -> int:
        """The event that happens when the work that is in the stream now has ended."""
        self.newest = event = self.next()
        self.gpu.record_event(self.device, event, self.stream)
        return event


# By driver, device and stream; the events live as long as the process.
_moments: dict[tuple[Driver, int, int], Moments] = {}


def computed(gpu: Driver, device: int) -> Moments:
    """The moments of the device's stream for programs."""
    return _of(gpu, device, gpu.stream(device))


def uploaded(gpu: Driver, device: int) -> Moments:
    """The moments of the device's stream for copies to its memory."""
    return _of(gpu, device, gpu.upload_stream(device))


def _of(gpu: Driver, device: int, stream: int) -> Moments:
    found = _moments.get((gpu, device, stream))
    if found is None:
        found = _moments[gpu, device, stream] = Moments(gpu, device, stream)
    return found
