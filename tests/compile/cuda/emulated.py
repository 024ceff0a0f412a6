"""Run rendered kernels on an emulated GPU: copy arrays to it, launch, copy back."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from spmd.compile.cuda.emulator.code import load
from spmd.compile.cuda.emulator.gpu import Gpu
from spmd.compile.cuda.emulator.layout import Mode
from spmd.compile.cuda.emulator.traffic import Traffic
from spmd.compile.cuda.kernel import module_text
from spmd.compile.cuda.launch import Function, Rendered
from spmd.compile.cuda.nvrtc import compile_ptx
from spmd.compile.kernel.dtypes import DTYPES

CAPACITY = 256 << 20


@functools.cache
def gpu() -> Gpu:
    """The device of all tests; each frees what it allocates."""
    return Gpu(device=2, capacity=CAPACITY)


class Emulator:
    """Some functions as native code; `run` launches those of a rendered kernel.

    `source` stands for the text of their module, which it may be with a mistake.
    """

    def __init__(
        self,
        functions: Iterable[Function],
        source: str | None = None,
        mode: Mode = "checked",
        device: Gpu | None = None,
    ):
        distinct = {function.symbol: function for function in functions}
        text = module_text(distinct.values()) if source is None else source
        self.gpu = device or gpu()
        ptx = compile_ptx(text, "sm_90")
        self.kernels = load(ptx, list(distinct), mode, text)

    def run(self, rendered: Rendered, arrays: Sequence[np.ndarray]) -> list[Traffic | None]:
        """Launch all functions on flat arrays, the kernel's arguments in order, in place."""
        scratch = [
            elements * DTYPES[dtype].numpy.itemsize for dtype, elements in rendered.temporaries
        ]
        with self._on_device([*(array.nbytes for array in arrays), *scratch]) as addresses:
            for array, address in zip(arrays, addresses, strict=False):
                view = self.gpu.memory.view(address, array.nbytes, "to the device")
                view[:] = np.frombuffer(array.tobytes(), np.uint8)
            traffic = [
                self.gpu.launch(
                    self.kernels[function.symbol],
                    function.launch,
                    [addresses[number] for number in function.arguments],
                )
                for function in rendered.functions
            ]
            for array, address in zip(arrays, addresses, strict=False):
                view = self.gpu.memory.view(address, array.nbytes, "to the host")
                array[...] = view.view(array.dtype)
        return traffic

    @contextmanager
    def _on_device(self, sizes: Iterable[int]) -> Iterator[list[int]]:
        memory = self.gpu.memory
        addresses = [memory.allocate(nbytes) for nbytes in sizes]
        try:
            yield addresses
        finally:
            for address in addresses:
                memory.free(address)
