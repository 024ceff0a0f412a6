"""The platforms: virtual CPU devices and GPUs of this process, and those of all other ranks."""

from __future__ import annotations

from spmd.base.config import config
from spmd.base.device import Platform, register_platform
from spmd.base.errors import PlatformError
from spmd.compile.lazy import cuda_driver
from spmd.transport import world


def _process() -> tuple[int, int]:
    return world.process_index(), world.process_count()


def _gpus() -> int:
    gpu = cuda_driver.driver()
    count = gpu.device_count()
    if not count:
        raise PlatformError(
            f"Unknown backend: platform 'cuda' is not available here: {gpu.missing()}. "
            "SPMD_CUDA_DRIVER=emulator runs programs on emulated GPUs, slowly"
        )
    return count


def _memory_stats(device: int) -> dict[str, int]:
    gpu = cuda_driver.driver()
    in_use, most = gpu.memory_in_use(device)
    limit = gpu.facts(device).memory
    return {"bytes_in_use": in_use, "peak_bytes_in_use": most, "bytes_limit": limit}


def _gpu_name(device: int) -> str:
    return cuda_driver.driver().facts(device).name


register_platform(Platform("cpu", lambda: config.num_cpu_devices, _process, lambda device: "cpu"))
register_platform(Platform("cuda", _gpus, _process, _gpu_name, "gpu", _memory_stats))
