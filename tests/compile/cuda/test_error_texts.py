"""What users of GPUs read when something fails: whole texts, in tests/golden/cuda/errors.txt."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
import pytest

import spmd
from spmd import lax
from spmd import numpy as snp
from spmd.base.config import config
from spmd.base.errors import (
    CudaError,
    DeviceError,
    OutOfMemoryError,
    PlatformError,
    ShardingError,
    SpmdError,
)
from spmd.compile.cuda import driver, nvrtc
from spmd.compile.cuda.emulator.driver import EmulatorDriver
from tests.compile.cuda.standin_cupy import DRIVER_MODULE, CUDARuntimeError, Standin

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
CAPACITY = 1 << 20
Case = Callable[[pytest.MonkeyPatch], object]


def with_standin(patch: pytest.MonkeyPatch, **replaced: Callable[[], int]) -> Standin:
    """CuPy's driver over the stand-in, some of whose functions are replaced."""
    made = Standin(EmulatorDriver(1, capacity=CAPACITY))
    runtime = made.modules["cupy_backends.cuda.api.runtime"]
    for name, function in replaced.items():
        patch.setattr(runtime, name, function)
    made.install(patch.setattr, patch.setitem)
    return made


@contextmanager
def platform(patch: pytest.MonkeyPatch, made: driver.Driver, name: str):
    """Programs run on a driver."""
    patch.setitem(driver.makers, name, lambda: made)
    with config.override("cuda_driver", name), config.override("platform", "cuda"):
        yield
    spmd.clear_caches()


def raised(kind: type[SpmdError], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return caught.value.text


# ---- memory ------------------------------------------------------------------------------------


def step(w, x):
    return snp.tanh(w) + x.sum(), w * 2


def no_memory_for_a_result(patch):
    with platform(patch, EmulatorDriver(1, capacity=CAPACITY), "small"):
        w, *others = [spmd.device_put(np.full((50, 1000), k, np.float32)) * 2 for k in range(3)]
        x = snp.asarray(X) + 1
        text = raised(OutOfMemoryError, lambda: spmd.jit(step)(w, x))
        del others
        spmd.block_until_ready(spmd.jit(step)(w, x))  # now there is room
        return text


def no_memory_for_work(patch):
    def loss(x):
        return lax.cumsum(snp.sort(x * 2)).max()

    with platform(patch, EmulatorDriver(1, capacity=CAPACITY), "small work"):
        x = spmd.device_put(np.arange(150_000, dtype=np.float32))
        return raised(OutOfMemoryError, lambda: spmd.jit(loss)(x))


def no_memory_on_a_gpu(patch):
    made = with_standin(patch)
    made.others = 200_000
    with platform(patch, made.driver, "standin full"):
        w = spmd.device_put(np.ones((100, 1000), np.float32))
        return raised(OutOfMemoryError, lambda: spmd.jit(step)(w, snp.asarray(X)))


# ---- kernels that fail -------------------------------------------------------------------------


def failed_kernel() -> str:
    """A kernel reads where there is no memory; another program is enqueued before."""
    x = snp.asarray(X) + 0
    x.block_until_ready()
    y = spmd.jit(step)(x, x)
    place = x.owner.address
    x.owner.address = place + (1 << 19)

    def normalise(x):
        return x / snp.sqrt((x * x).sum(-1, keepdims=True))

    z = spmd.jit(normalise)(x)
    x.owner.address = place
    text = raised(CudaError, z.block_until_ready)
    del y
    return text


def a_kernel_that_fails(patch):
    with platform(patch, EmulatorDriver(1, capacity=CAPACITY), "failing"):
        return failed_kernel()


def a_kernel_that_fails_on_a_gpu(patch):
    with platform(patch, with_standin(patch).driver, "standin failing"):
        return failed_kernel()


# ---- what is missing ---------------------------------------------------------------------------


def no_devices(patch, error: str, have: int) -> str:
    def count() -> int:
        raise CUDARuntimeError(error)

    made = with_standin(patch, getDeviceCount=count, driverGetVersion=lambda: have)
    with platform(patch, made.driver, f"standin without {error} {have}"):
        return raised(PlatformError, lambda: spmd.devices("cuda"))


def no_gpu(patch):
    return no_devices(patch, "cudaErrorNoDevice: no CUDA-capable device is detected", 13020)


def no_driver(patch):
    return no_devices(patch, "cudaErrorInsufficientDriver: insufficient", 0)


def an_old_driver(patch):
    return no_devices(patch, "cudaErrorInsufficientDriver: insufficient", 12040)


def no_cupy(patch):
    patch.setitem(sys.modules, "cupy", None)
    patch.delitem(sys.modules, DRIVER_MODULE, raising=False)
    with config.override("cuda_driver", "cupy"):
        return raised(PlatformError, lambda: spmd.devices("cuda"))


def an_unknown_driver(patch):
    with config.override("cuda_driver", "opencl"):
        return raised(PlatformError, lambda: spmd.devices("cuda"))


def no_nvrtc(patch):
    patch.setattr(nvrtc, "NVRTC_WHEEL", "nvidia-cuda-nvrtc-that-is-not-there")
    nvrtc.library.cache_clear()
    try:
        return raised(nvrtc.NvrtcError, lambda: nvrtc.compile_cubin("", "sm_90"))
    finally:
        nvrtc.library.cache_clear()


def a_gpu_that_is_too_old(patch):
    return raised(nvrtc.NvrtcError, lambda: nvrtc.compile_cubin("", "sm_61"))


def a_gpu_that_is_too_new(patch):
    return raised(nvrtc.NvrtcError, lambda: nvrtc.compile_cubin("", "sm_990"))


# ---- operands apart ----------------------------------------------------------------------------


def operands_on_two_gpus(patch):
    with platform(patch, EmulatorDriver(2), "two"):
        x, y = (spmd.device_put(X, d) for d in spmd.devices())
        return raised(DeviceError, lambda: x + y)


def operands_on_two_platforms(patch):
    with platform(patch, EmulatorDriver(1), "one"):
        x, y = spmd.device_put(X, spmd.devices()[0]), spmd.device_put(X, spmd.devices("cpu")[0])
        return raised(DeviceError, lambda: spmd.jit(step)(x, y))


def a_mesh_of_two_platforms(patch):
    with platform(patch, EmulatorDriver(1), "one of two"):
        both = [spmd.devices()[0], spmd.devices("cpu")[0]]
        return raised(ShardingError, lambda: spmd.Mesh(np.array(both), ("i",)))


def a_loop_that_is_not_captured(patch):
    def refused(device, stream):
        raise CudaError("the capture was invalidated")

    gpu = EmulatorDriver(1)
    patch.setattr(gpu, "end_capture", refused)
    with platform(patch, gpu, "without captures"):
        double = spmd.jit(lambda x: lax.while_loop(lambda x: x.sum() < 1e9, lambda x: x * 2 + 1, x))
        return raised(CudaError, lambda: double(X))


CASES: tuple[Case, ...] = (
    no_memory_for_a_result,
    no_memory_for_work,
    no_memory_on_a_gpu,
    a_kernel_that_fails,
    a_kernel_that_fails_on_a_gpu,
    no_gpu,
    no_driver,
    an_old_driver,
    no_cupy,
    an_unknown_driver,
    no_nvrtc,
    a_gpu_that_is_too_old,
    a_gpu_that_is_too_new,
    operands_on_two_gpus,
    operands_on_two_platforms,
    a_mesh_of_two_platforms,
    a_loop_that_is_not_captured,
)


def plain(text: str) -> str:
    """A text without what differs from run to run: places of files, addresses, names by hash."""
    text = re.sub(r"\S*/(\w+\.py):\d+", r"\1:N", text)
    text = re.sub(r"kernels\.cu:\d+: [^;]*;", "kernels.cu:N: ...;", text)
    text = re.sub(r"\b0x[0-9a-f]+", "0x...", text)
    text = re.sub(r"NVRTC \d+\.\d+ compiles for sm_\d+ to sm_\d+", "NVRTC V compiles for ...", text)
    return re.sub(r"\bkernel_[0-9a-f]+", "kernel_...", text)


def test_texts(golden):
    texts = []
    for case in CASES:
        with pytest.MonkeyPatch.context() as patch:
            texts.append(f"{case.__name__}:\n{plain(str(case(patch)))}\n")
        sys.modules.pop(DRIVER_MODULE, None)
    golden("cuda/errors.txt", "\n".join(texts))


def test_a_success_forgets_what_may_have_failed():
    with pytest.MonkeyPatch.context() as patch:
        with platform(patch, EmulatorDriver(1, capacity=CAPACITY), "twice"):
            assert "step: " in failed_kernel()
            (snp.asarray(X) * 3).block_until_ready()
            text = failed_kernel()
    assert text.count("\n  ") == 2 and "multiply" not in text
