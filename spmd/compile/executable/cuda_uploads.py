"""Values of the host for repeated calls: one copy a call, beside the work of the calls before it.

The one idea: a call has memory on the device and pinned memory of the host for its values, which it
gives back. Two of these alternate: while a call computes with one, the next call's values are
copied to the other, in the stream for copies. Events say when the host may write to the pinned
memory again, and when the copy may write to the device's.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque

from spmd.compile.cuda.driver import Driver
from spmd.compile.executable.cuda_backend import CudaMemory

# So many are made before one is used again that a call still computes with,
_ALTERNATING = 2
# and so many where the host is ahead of the copies; then calls take the general path.
_MOST = 8


class Upload:
    """Memory for the values of one call at a time; `view` is that of the host."""

    __slots__ = ("address", "copied", "memory", "pinned", "used", "view")

    def __init__(self, gpu: Driver, device: int, nbytes: int):
        self.memory, self.pinned = CudaMemory(gpu, device, nbytes), gpu.allocate_pinned(nbytes)
        self.address = self.memory.address
        self.view = memoryview((ctypes.c_char * nbytes).from_address(self.pinned)).cast("B")
        # The copy has ended; the last call that read it has.
        self.copied, self.used = gpu.new_event(device), gpu.new_event(device)
        gpu.record_event(device, self.used)  # what was in this memory before

    def __del__(self) -> None:
        used = getattr(self, "used", 0)
        if used and sys is not None and not sys.is_finalizing():
            gpu, device = self.memory.driver, self.memory.device
            gpu.free_pinned(device, self.pinned)
            gpu.free_event(device, self.copied)
            gpu.free_event(device, used)


class Uploads:
    """The memory for values of the host that the calls of a program have in turns."""

    def __init__(self, gpu: Driver, device: int, nbytes: int):
        self.gpu, self.device, self.nbytes = gpu, device, nbytes
        self._free: deque[Upload] = deque()  # the one that was used longest ago first
        self._count = 0

    def begin(self) -> Upload | None:
        """Memory to write to; None if there is none that the host may write to now."""
        gpu, device = self.gpu, self.device
        try:
            found = self._free.popleft()
        except IndexError:
            found = None
        if found is not None:
            event = found.used if self._count < _ALTERNATING else found.copied
            if gpu.has_happened(device, event):
                return found
            self._free.appendleft(found)
        if self._count >= _MOST:
            return None
        try:
            made = Upload(gpu, device, self.nbytes)
        except MemoryError:
            return None
        self._count += 1
        return made

    def send(self, upload: Upload) -> None:
        """Copy the values to the device, whose next work waits for them."""
        address, pinned = upload.address, upload.pinned
        used, copied = upload.used, upload.copied
        self.gpu.upload(self.device, address, pinned, self.nbytes, used, copied)

    def give_back(self, upload: Upload) -> None:
        """Let a later call have the memory, when the work that is enqueued now has ended."""
        self.gpu.record_event(self.device, upload.used)
        self._free.append(upload)
