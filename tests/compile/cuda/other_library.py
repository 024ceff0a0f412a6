"""Another library of arrays on GPUs, for tests: it speaks both protocols and has its own stream.

It does what CuPy does: puts copies into its stream, and lets that wait for the streams it is told.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from spmd.base.errors import CudaError
from spmd.compile.cuda import capsules
from spmd.compile.cuda.driver import Driver, driver
from spmd.compile.cuda.emulator.driver import EmulatorDriver


class Memory:
    """Memory of a GPU, which is poisoned when nobody refers to it, and what is copied to it."""

    source: np.ndarray

    def __init__(self, gpu: EmulatorDriver, device: int, nbytes: int, stream: int):
        self.gpu, self.device, self.stream = gpu, device, stream
        self.address = gpu.allocate(device, nbytes, stream)

    def __del__(self) -> None:
        self.gpu.free(self.device, self.address, self.stream)


class Library:
    """A device with the stream of the library; `waits=False` makes it forget to wait."""

    def __init__(self, device: int = 0, waits: bool = True, gpu: Driver | None = None):
        gpu = gpu or driver()
        assert isinstance(gpu, EmulatorDriver)
        self.gpu, self.device, self.waits = gpu, device, waits
        self.stream = gpu.new_stream(device)

    def enqueue_copy(self, target: int, source: int, nbytes: int) -> None:
        """A copy in the library's stream."""
        self._entry("current", 1)(self.gpu.context(self.device))
        assert self._entry("copy", 4)(target, source, nbytes, self.stream) == 0

    def synchronize(self) -> None:
        """Wait for the library's stream."""
        self._entry("current", 1)(self.gpu.context(self.device))
        code = self._entry("wait", 1)(self.stream)
        if code:
            raise CudaError(self.gpu.error(code))

    def _entry(self, name: str, args: int) -> Any:
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * args)
        return kind(getattr(self.gpu.entries, name))

    def array(self, value: np.ndarray, first: int = 0) -> TheirArray:
        """The values on the GPU, later; they begin `first` bytes into the memory."""
        value = np.array(value, order="K")
        memory = Memory(self.gpu, self.device, first + value.nbytes, self.stream)
        self.enqueue_copy(
            memory.address + first, value.__array_interface__["data"][0], value.nbytes
        )
        made = TheirArray(self, memory, memory.address + first, value.shape, value.strides)
        made.dtype, made.source, memory.source = value.dtype, value, value
        return made

    def read(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """What is at an address when the library's stream comes to it."""
        out = np.zeros(shape, dtype)
        self.enqueue_copy(out.ctypes.data, address, out.nbytes)
        self.synchronize()
        return out

    def from_dlpack(self, x: Any, **asked: Any) -> np.ndarray:
        """The values of an array of another library, read in this one's stream."""
        stream = self.stream if self.waits else -1
        lent = capsules.read(x.__dlpack__(stream=stream, max_version=(1, 0), **asked))
        assert lent.strides == capsules.row_major(lent.shape, lent.dtype.itemsize)
        return self.read(lent.address, lent.shape, lent.dtype)

    def from_array_interface(self, x: Any) -> np.ndarray:
        """The same by the other protocol."""
        given = x.__cuda_array_interface__
        assert (given["version"], given["strides"], given["data"][1]) == (3, None, True)
        if self.waits:
            self.gpu.order(self.device, given["stream"], self.stream)
        return self.read(given["data"][0], given["shape"], np.dtype(given["typestr"]))


class TheirArray:
    """An array of the library."""

    dtype: np.dtype
    source: np.ndarray

    def __init__(
        self,
        library: Library,
        memory: Memory,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ):
        self.library, self.memory, self.address = library, memory, address
        self.shape, self.strides = shape, strides

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": self.strides,
            "stream": self.library.stream if self.library.waits else None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return capsules.CUDA, self.library.device

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int] | None = None) -> Any:
        if self.library.waits:
            self.library.gpu.order(self.library.device, self.library.stream, stream)
        versioned = max_version is not None
        device = self.library.device
        return capsules.make(self.address, self.memory, device, self.shape, self.dtype, versioned)
