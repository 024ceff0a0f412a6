"""A stand-in for CuPy over the emulator: the names, signatures and exceptions that the driver uses.

It has no name that the real wheel lacks (`test_driver_cupy.py` compares), and refuses arguments of
other types than the wheel's signatures say.
"""

from __future__ import annotations

import ctypes
import importlib
import operator
import re
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from spmd.base.errors import CudaError
from spmd.base.errors import OutOfMemoryError as EmulatorOutOfMemory
from spmd.compile.cuda import program
from spmd.compile.cuda.driver import makers
from spmd.compile.cuda.emulator.driver import EmulatorDriver
from spmd.compile.cuda.launch import Compiled

DRIVER_MODULE = "spmd.compile.cuda.driver_cupy"

# As the docstrings of the wheel have them.
RUNTIME = (
    "getDeviceCount() -> int",
    "getDeviceProperties(int device)",
    "deviceGetPCIBusId(int device) -> str",
    "free(intptr_t ptr)",
    "pointerGetAttributes(intptr_t ptr) -> PointerAttributes",
    "driverGetVersion() -> int",
    "runtimeGetVersion() -> int",
    "memGetInfo()",
    "eventCreateWithFlags(unsigned int flags) -> intptr_t",
    "eventRecord(intptr_t event, intptr_t stream)",
    "streamWaitEvent(intptr_t stream, intptr_t event, unsigned int flags=0)",
    "eventQuery(intptr_t event)",
    "eventSynchronize(intptr_t event)",
    "eventDestroy(intptr_t event)",
    "streamCreateWithFlags(unsigned int flags) -> intptr_t",
    "streamDestroy(intptr_t stream)",
    "streamBeginCapture(intptr_t stream, int mode=streamCaptureModeRelaxed)",
    "streamEndCapture(intptr_t stream) -> intptr_t",
    "graphInstantiate(intptr_t graph) -> intptr_t",
    "graphDestroy(intptr_t graph)",
    "graphLaunch(intptr_t graphExec, intptr_t stream)",
    "graphExecDestroy(intptr_t graphExec)",
    "memcpyAsync(intptr_t dst, intptr_t src, size_t size, int kind, intptr_t stream)",
    "memcpy2DAsync(intptr_t dst, size_t dpitch, intptr_t src, size_t spitch, size_t width, "
    "size_t height, MemoryKind kind, intptr_t stream)",
    "memsetAsync(intptr_t ptr, int value, size_t size, intptr_t stream)",
)
DRIVER = (
    "ctxGetCurrent() -> intptr_t",
    "funcSetAttribute(intptr_t f, int attribute, int value)",
)


class CUDARuntimeError(RuntimeError):
    """A failed call of the runtime."""


class CUDADriverError(RuntimeError):
    """A failed call of the driver; made from its code."""

    texts: Callable[[int], str]

    def __init__(self, code: int):
        super().__init__(CUDADriverError.texts(code))


class OutOfMemoryError(MemoryError):
    """No memory is left in a pool."""


class Standin:
    """The modules, over an emulator; `images` are modules by their machine code."""

    def __init__(self, gpu: EmulatorDriver):
        self.gpu, self.images = gpu, dict[bytes, Compiled]()
        self.here = threading.local()
        CUDADriverError.texts = gpu.error
        self.driver: Any = None  # the driver over it
        self.streams = dict[int, int]()  # how many a device has
        self.others = 0  # bytes of other processes
        runtime = _module("cupy_backends.cuda.api.runtime", RUNTIME, self)
        driver = _module("cupy_backends.cuda.api.driver", DRIVER, self)
        runtime.CUDARuntimeError = CUDARuntimeError
        driver.CUDADriverError = CUDADriverError
        api = _plain("cupy_backends.cuda.api", runtime=runtime, driver=driver)
        cupy = _plain("cupy", cuda=self.cuda())
        self.modules = {
            "cupy": cupy,
            "cupy_backends": _plain("cupy_backends"),
            "cupy_backends.cuda": _plain("cupy_backends.cuda"),
            "cupy_backends.cuda.api": api,
            "cupy_backends.cuda.api.runtime": runtime,
            "cupy_backends.cuda.api.driver": driver,
        }

    def install(
        self,
        set_attribute: Callable[[Any, str, Any], None] = setattr,
        set_item: Callable[[Any, str, Any], None] = operator.setitem,
    ) -> None:
        """Be CuPy, and under the name `standin` the driver over it."""
        for name, module in self.modules.items():
            set_item(sys.modules, name, module)
        sys.modules.pop(DRIVER_MODULE, None)
        module = importlib.import_module(DRIVER_MODULE)
        set_attribute(module, "library", self.library)
        load = program.loaded

        def loaded(device: int, image: Compiled) -> int:
            self.images[image.cubin] = image
            return load(device, image)

        set_attribute(program, "loaded", loaded)
        self.driver = module.CupyDriver()
        set_item(makers, "standin", lambda: self.driver)

    def cuda(self) -> Any:
        """The namespace `cupy.cuda`."""
        standin, gpu = self, self.gpu

        class Device:
            def __init__(self, device: int):
                self.id = device

            def __enter__(self) -> Device:
                self.before = standin.device()
                standin.here.device = self.id
                return self

            def __exit__(self, *error: object) -> None:
                standin.here.device = self.before

        class Stream:
            def __init__(self, null: bool = False, non_blocking: bool = False):
                self.device = device = standin.device()
                made = standin.streams[device] = standin.streams.get(device, -1) + 1
                made_by = gpu.stream, gpu.exchange_stream, gpu.upload_stream, gpu.download_stream
                self.ptr = made_by[made](device)

            def __enter__(self) -> Stream:
                assert standin.device() == self.device, "a stream of another device"
                self.before = getattr(standin.here, "stream", None)
                standin.here.stream = self.ptr
                return self

            def __exit__(self, *error: object) -> None:
                standin.here.stream = self.before

            def synchronize(self) -> None:
                _as_cupy(gpu.synchronize, self.device, self.ptr)

            @property
            def done(self) -> bool:
                return gpu.is_idle(self.device)

        class Event:
            def __init__(self, block: bool = False, disable_timing: bool = False):
                assert disable_timing

            def record(self, stream: Stream) -> None:
                self.happened = gpu.mark(stream.device, stream.ptr)

            @property
            def done(self) -> bool:
                return self.happened()

        class Memory:
            def __init__(self, free: Callable[[], None], ptr: int):
                self.free, self.ptr = free, ptr

            def __del__(self) -> None:
                self.free()

        class MemoryPool:
            def malloc(self, size: int) -> Memory:
                device, stream = standin.device(), standin.here.stream
                try:
                    ptr = gpu.allocate(device, size, stream)
                except EmulatorOutOfMemory as error:
                    raise OutOfMemoryError(str(error)) from None
                return Memory(lambda: gpu.free(device, ptr, stream), ptr)

            def used_bytes(self) -> int:
                return gpu.memory_in_use(standin.device())[0]

            def total_bytes(self) -> int:
                return self.used_bytes()

            def free_bytes(self) -> int:
                return 0

        class PinnedMemoryPool:
            def malloc(self, size: int) -> Memory:
                ptr = gpu.allocate_pinned(size)
                return Memory(lambda: gpu.release_pinned(ptr), ptr)

        class Function:
            def __init__(self, module: Module, symbol: str):
                self.ptr = gpu.function(module.device, module.ptr, symbol, 0)
                standin.functions[self.ptr] = (module, symbol)

        class Module:
            def load(self, cubin: bytes) -> None:
                assert type(cubin) is bytes
                self.device = standin.device()
                self.ptr = gpu.load(self.device, standin.images[cubin])

            def get_function(self, name: str) -> Function:
                assert standin.device() == self.device, "a module of another device"
                return _as_cupy(Function, self, name)

        self.functions: dict[int, tuple[Module, str]] = {}
        return SimpleNamespace(
            Device=Device,
            Event=Event,
            Stream=Stream,
            MemoryPool=MemoryPool,
            PinnedMemoryPool=PinnedMemoryPool,
            function=SimpleNamespace(Module=Module),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        )

    def device(self) -> int:
        """The number of this thread's current device."""
        return getattr(self.here, "device", 0)

    # -- functions of `runtime` and `driver` --

    def getDeviceCount(self) -> int:
        return self.gpu.device_count()

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        facts = self.gpu.facts(device)
        major, minor = facts.arch.removeprefix("sm_")[:-1], facts.arch[-1]
        name = facts.name.encode()
        return {"name": name, "major": major, "minor": minor, "totalGlobalMem": facts.memory}

    def driverGetVersion(self) -> int:
        return 0

    def runtimeGetVersion(self) -> int:
        return 13020

    def memGetInfo(self) -> tuple[int, int]:
        total = self.gpu.facts(self.device()).memory
        return total - self.gpu.memory_in_use(self.device())[0] - self.others, total

    def free(self, ptr: int) -> None:
        assert ptr == 0

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        assert kind == 4
        _as_cupy(self.gpu.copy, self.device(), dst, src, size, stream)

    def memcpy2DAsync(
        self,
        dst: int,
        dpitch: int,
        src: int,
        spitch: int,
        width: int,
        height: int,
        kind: int,
        stream: int,
    ) -> None:
        assert kind == 4
        given = dst, dpitch, src, spitch, width, height, stream
        _as_cupy(self.gpu.copy_rows, self.device(), *given)

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        assert value == 0
        _as_cupy(self.gpu.clear, self.device(), ptr, size, stream)

    def deviceGetPCIBusId(self, device: int) -> str:
        return self.gpu.bus_id(device)

    def pointerGetAttributes(self, ptr: int) -> Any:
        device = self.gpu.device_of(ptr)
        return SimpleNamespace(device=device or 0, type=0 if device is None else 2)

    def eventCreateWithFlags(self, flags: int) -> int:
        assert flags == 2
        return self.gpu.new_event(self.device())

    def eventRecord(self, event: int, stream: int) -> None:
        self.gpu.record_event(self.device(), event, stream)

    def streamWaitEvent(self, stream: int, event: int) -> None:
        self.gpu.wait_event(self.device(), stream, event)

    def eventQuery(self, event: int) -> int:
        return 0 if self.gpu.has_happened(self.device(), event) else 600

    def eventSynchronize(self, event: int) -> None:
        _as_cupy(self.gpu.synchronize_event, self.device(), event)

    def eventDestroy(self, event: int) -> None:
        self.gpu.free_event(self.device(), event)

    def streamCreateWithFlags(self, flags: int) -> int:
        assert flags == 1
        return self.gpu.new_stream(self.device())

    def streamDestroy(self, stream: int) -> None:
        pass

    def streamBeginCapture(self, stream: int, mode: int) -> None:
        assert mode == 1
        _as_cupy(self.gpu.capture, self.device(), stream)

    def streamEndCapture(self, stream: int) -> int:
        return _as_cupy(self.gpu.end_capture, self.device(), stream)

    def graphInstantiate(self, graph: int) -> int:
        return graph

    def graphDestroy(self, graph: int) -> None:
        pass

    def graphLaunch(self, graphExec: int, stream: int) -> None:
        assert stream == self.gpu.stream(self.device())
        _as_cupy(self.gpu.replay, self.device(), graphExec)

    def graphExecDestroy(self, graphExec: int) -> None:
        self.gpu.free_graph(self.device(), graphExec)

    def ctxGetCurrent(self) -> int:
        return self.gpu.context(self.device())

    def funcSetAttribute(self, f: int, attribute: int, value: int) -> None:
        raise AssertionError("no kernel of the tests asks for so much shared memory")

    def library(self) -> Any:
        """The functions of `libcuda`."""
        entries, kind = self.gpu.entries, ctypes.CFUNCTYPE(ctypes.c_int)
        return SimpleNamespace(
            cuCtxSetCurrent=kind(entries.current),
            cuLaunchKernel=kind(entries.launch),
            cuMemcpyAsync=kind(entries.copy),
            cuStreamSynchronize=kind(entries.wait),
            cuEventRecord=kind(entries.record),
            cuStreamWaitEvent=kind(entries.wait_event),
            cuGraphLaunch=kind(entries.graph),
        )


def _as_cupy(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except CudaError as error:
        raise CUDARuntimeError(f"cudaErrorIllegalAddress: {error.text}") from None


def _plain(name: str, **contents: Any) -> Any:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def _module(name: str, signatures: tuple[str, ...], standin: Standin) -> Any:
    """A module of functions that take just what their signatures say."""
    return _plain(name, **{s.split("(")[0]: _strict(s, standin) for s in signatures})


def _strict(signature: str, standin: Standin) -> Callable[..., Any]:
    name, given = re.match(r"(\w+)\((.*)\)", signature).groups()  # type: ignore[union-attr]
    kinds = [part.split()[0] for part in given.split(", ") if part]
    required = len(kinds) - given.count("=")

    def call(*args: Any) -> Any:
        if not required <= len(args) <= len(kinds) or any(type(x) is not int for x in args):
            raise TypeError(f"{signature} was given {args}")
        if any(x < 0 for x, kind in zip(args, kinds, strict=False) if kind == "size_t"):
            raise OverflowError(f"{signature} was given {args}")
        return getattr(standin, name)(*args)

    call.__doc__ = signature
    return call
