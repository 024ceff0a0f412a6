"""The CUDA driver in use: CuPy's, on GPUs, or the emulator's, anywhere.

`config.cuda_driver` names it (`SPMD_CUDA_DRIVER`). `driver_protocol.py` is the protocol.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from spmd.base.config import config
from spmd.base.errors import CudaError, PlatformError
from spmd.compile.cuda.driver_protocol import DeviceFacts, Driver, Entries
from spmd.compile.lazy import cuda_cupy, cuda_emulator

__all__ = ["CudaError", "DeviceFacts", "Driver", "Entries", "driver", "makers"]


def _by_cupy() -> Driver:
    try:
        return cuda_cupy.CupyDriver()
    except ImportError as error:
        raise PlatformError(
            f"Unknown backend: platform 'cuda' is not available here: CuPy is missing ({error}); "
            "pip install spmd[cuda]. SPMD_CUDA_DRIVER=emulator runs programs on emulated GPUs, "
            "slowly"
        ) from None


# By name, a function that makes it.
makers: dict[str, Callable[[], Driver]] = {
    "cupy": _by_cupy,
    "emulator": lambda: cuda_emulator.EmulatorDriver(
        config.num_cuda_devices, config.cuda_emulator, config.cuda_emulator_seed
    ),
}


@functools.cache
def _made(name: str) -> Driver:
    maker = makers.get(name)
    if maker is None:
        known = ", ".join(sorted(makers))
        raise PlatformError(
            f"SPMD_CUDA_DRIVER={name}: there is no such driver here; known: {known}"
        )
    return maker()


def driver() -> Driver:
    """The driver that `config.cuda_driver` names; it is made when it is first asked for."""
    return _made(config.cuda_driver)
