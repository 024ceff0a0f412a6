"""The memory of an emulated device: addresses that no host has, what is allocated, poison.

The addresses of device k begin at `FIRST + k * APART`, where no process ever has memory: a host
that follows one ends at once. The bytes lie in a mapping of the host's, `delta` away.
Allocations are 256 bytes apart at least, and a freed range is taken again as late as possible. New
and freed memory is filled with ones: floats read NaN, integers -1.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right, insort

import numpy as np

from spmd.base.amounts import size_text
from spmd.base.errors import CudaError, OutOfMemoryError
from spmd.compile.cuda.emulator.layout import GRANULE

# Not canonical on x86-64 and out of the range that any system gives to processes on ARM.
FIRST = 0x4000_0000_0000_0000
APART = 1 << 44
CAPACITY = 8 << 30
ALIGNMENT = 256
POISON = 0xFF
# Memory that is only there where it is touched.
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)


class DeviceMemory:
    """The memory of one device. Not for several threads at once."""

    def __init__(self, device: int, capacity: int = CAPACITY):
        self.device = device
        self.base = FIRST + device * APART
        self.capacity = capacity
        self._memory = _mapped(capacity)
        # Of each granule, how many bytes are allocated.
        self.granules = _mapped(capacity // GRANULE)
        # Of each granule, how kernels touched it since somebody looked, see `races.py`.
        self.accessed = _mapped(capacity // GRANULE)
        self.delta = self._memory.ctypes.data - self.base
        self.used = self.peak = 0
        self._allocated: dict[int, int] = {}
        self._starts: list[int] = []
        # Free ranges, sorted, and where the next search begins.
        self._free: list[tuple[int, int]] = [(0, capacity)]
        self._next = 0

    def allocate(self, nbytes: int) -> int:
        """A new range: its first address, a multiple of 256. No bytes take some all the same."""
        taken = _rounded(max(nbytes, 1)) + ALIGNMENT
        start = self._find(taken)
        if start is None:
            raise OutOfMemoryError(
                f"CUDA device {self.device} (emulated): {size_text(nbytes)} asked, "
                f"{size_text(self.capacity - self.used)} of {size_text(self.capacity)} free"
            )
        self._next = start + taken
        self._mark(start, nbytes)
        self._memory[start : start + nbytes] = POISON
        address = self.base + start
        self._allocated[address] = nbytes
        insort(self._starts, address)
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return address

    def free(self, address: int) -> None:
        """Give a range back."""
        nbytes = self.size_of(address)
        del self._allocated[address]
        del self._starts[bisect_right(self._starts, address) - 1]
        start = address - self.base
        self.granules[start // GRANULE : -(-(start + nbytes) // GRANULE)] = 0
        self._memory[start : start + nbytes] = POISON
        self.used -= nbytes
        self._give_back(start, start + _rounded(max(nbytes, 1)) + ALIGNMENT)

    def size_of(self, address: int) -> int:
        """The bytes of the allocation that begins at an address."""
        nbytes = self._allocated.get(address)
        if nbytes is None:
            raise CudaError(f"free: {self._described(address, 'the start of an allocation')}")
        return nbytes

    def start_of(self, address: int) -> int:
        """The start of the allocation that an address may lie in; 0 before the first."""
        k = bisect_right(self._starts, address) - 1
        return self._starts[k] if k >= 0 else 0

    def has(self, address: int) -> bool:
        """Whether an address is in an allocation."""
        start = self.start_of(address)
        return start > 0 and address < start + max(self._allocated[start], 1)

    def view(self, address: int, nbytes: int, what: str) -> np.ndarray:
        """The host's view of bytes of one allocation; `what` begins the error."""
        k = bisect_right(self._starts, address) - 1
        if k < 0 or address + nbytes > self._starts[k] + self._allocated[self._starts[k]]:
            raise CudaError(
                f"{what}: {self._described(address, f'{nbytes} bytes of one allocation')}"
            )
        start = address - self.base
        return self._memory[start : start + nbytes]

    def _described(self, address: int, needed: str) -> str:
        return f"{address:#x} is not {needed} on CUDA device {self.device}"

    def _mark(self, start: int, nbytes: int) -> None:
        whole, rest = divmod(nbytes, GRANULE)
        first = start // GRANULE
        self.granules[first : first + whole] = GRANULE
        if rest:
            self.granules[first + whole] = rest

    def _find(self, nbytes: int) -> int | None:
        """Take a range from the free ones, the first behind the last that was taken."""
        for lowest in (self._next, 0):
            for k, (begin, end) in enumerate(self._free):
                start = max(begin, lowest)
                if end - start >= nbytes:
                    rest = [(begin, start), (start + nbytes, end)]
                    self._free[k : k + 1] = [each for each in rest if each[0] < each[1]]
                    return start
        return None

    def _give_back(self, start: int, end: int) -> None:
        k = bisect_right(self._free, (start, end))
        if k < len(self._free) and self._free[k][0] == end:
            end = self._free.pop(k)[1]
        if k and self._free[k - 1][1] == start:
            k -= 1
            start = self._free.pop(k)[0]
        self._free.insert(k, (start, end))


def device_of(address: int) -> int | None:
    """The number of the device that an address belongs to; None for the host's."""
    return (address - FIRST) // APART if address >= FIRST else None


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _mapped(nbytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=_FLAGS), np.uint8)
