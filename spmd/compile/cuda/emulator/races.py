"""Races between streams: work that touches the same memory, one of them to write, in no order.

The one idea: each 16 bytes of device memory know which work wrote them last, and which work of each
stream read them last. Work may touch them if all that comes before it (`Work.comes_before`), in
whatever order the streams were late. Memory is as if its device's stream for programs had written
it when it was allocated: what it held before may still be in use there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from spmd.base.errors import CudaError
from spmd.compile.cuda.emulator.device_memory import DeviceMemory
from spmd.compile.cuda.emulator.layout import GRANULE
from spmd.compile.cuda.emulator.streams import Work

# How kernels and copies touched a granule.
READ, WRITTEN = 1, 2
# A work as one number: its stream, and its index in so many bits.
_INDEX_BITS = 40


class _Shadow:
    """The last writer and the last readers of the granules of an allocation."""

    def __init__(self, granules: int, owner: tuple[int, int]):
        stream, index = owner
        self.writer = np.full(granules, (stream << _INDEX_BITS) | index, np.int64)
        self.streams = {stream}  # that touched it
        self.readers: dict[int, np.ndarray] = {}  # by stream, the index of its last reader


class Races:
    """The work that touched the memory of one device, from when a second stream is used."""

    def __init__(self, memory: DeviceMemory):
        self.memory = memory
        self.is_on = False
        self._shadows: dict[int, _Shadow] = {}
        # By allocation, the last work of its device's stream when it was made.
        self._owners: dict[int, tuple[int, int]] = {}

    def allocated(self, start: int, stream: int, last: int) -> None:
        """Note a new allocation, and the newest work of the stream that it was made for."""
        self._owners[start] = stream, last
        self._shadows.pop(start, None)

    def freed(self, start: int) -> None:
        """Forget an allocation."""
        self._owners.pop(start, None)
        self._shadows.pop(start, None)

    def touch_kernel(self, work: Work, name: str, addresses: list[int]) -> None:
        """A kernel with these arguments has run: see what it touched."""
        for start in {self.memory.start_of(a) for a in addresses if self.memory.has(a)}:
            first = (start - self.memory.base) // GRANULE
            count = self._granules(start)
            flags = self.memory.accessed[first : first + count]
            if flags.any():
                found = flags.copy()
                flags[:] = 0
                if self.is_on:
                    self._touch(work, name, start, 0, found)

    def touch(self, work: Work, name: str, address: int, nbytes: int, how: int) -> None:
        """Some bytes of one allocation are read or written."""
        if not self.is_on or not nbytes:
            return
        start = self.memory.start_of(address)
        first = (address - start) // GRANULE
        count = (address - start + nbytes - 1) // GRANULE + 1 - first
        self._touch(work, name, start, first, np.full(count, how, np.uint8))

    def _granules(self, start: int) -> int:
        return max(1, -(-self.memory.size_of(start) // GRANULE))

    def _touch(self, work: Work, name: str, start: int, first: int, how: np.ndarray) -> None:
        shadow = self._shadows.get(start)
        if shadow is None:
            owner = self._owners.get(start, (work.stream, 0))
            shadow = self._shadows[start] = _Shadow(self._granules(start), owner)
        there = slice(first, first + len(how))
        writes, reads = how & WRITTEN != 0, how & READ != 0
        writer, stream = shadow.writer[there], work.stream
        if shadow.streams == {stream}:  # in order
            if stream in shadow.readers:
                shadow.readers[stream][there][reads] = work.index
            else:
                shadow.readers[stream] = np.zeros(len(shadow.writer), np.int64)
                shadow.readers[stream][there] = np.where(reads, work.index, 0)
            writer[writes] = (stream << _INDEX_BITS) | work.index
            return
        shadow.streams.add(stream)
        late = _later(writer, work.seen, stream)
        for other, readers in shadow.readers.items():
            if other != stream:
                late |= writes & (readers[there] > work.seen.get(other, 0))
        if stream not in shadow.readers:
            shadow.readers[stream] = np.zeros(len(shadow.writer), np.int64)
        shadow.readers[stream][there][reads] = work.index
        conflicts = np.flatnonzero(late & (how != 0))
        writer[writes] = (stream << _INDEX_BITS) | work.index
        if len(conflicts):
            address = start + (first + int(conflicts[0])) * GRANULE
            verb = "writes" if writes[conflicts[0]] else "reads"
            raise CudaError(
                f"{name} {verb} {address:#x} of CUDA device {self.memory.device} in a stream that "
                "did not wait for what another stream does there: an event is missing"
            )


def _later(writer: np.ndarray, seen: Mapping[int, int], stream: int) -> np.ndarray:
    """Whether the last writer of each granule is of another stream, and does not come before."""
    streams, index = writer >> _INDEX_BITS, writer & ((1 << _INDEX_BITS) - 1)
    late = np.zeros(len(writer), bool)
    for other in np.unique(streams).tolist():
        if other != stream:
            late |= (streams == other) & (index > seen.get(other, 0))
    return late
