"""`spmdrun --doctor --gpu`: what programs on GPUs need, and what of it is missing here."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

from ..supervise.find_mpi import Mpi
from ..supervise.gpus import NVIDIA, Gpu, of_host, visible

# The oldest driver for CUDA 13, for which the wheels are.
LEAST_DRIVER = 580
WHEELS = {
    "cupy-cuda13x": "memory, streams and launches",
    "nvidia-cuda-nvrtc": "compiling kernels",
}
NCCL = "nvidia-nccl-cu13"

# Asked in processes of their own: a library may crash, and CUDA must not start in this one.
_PEERS = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count, found, a, b = (ctypes.c_int() for _ in range(4))
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for one in range(count.value):
    for other in range(count.value):
        cuda.cuDeviceGet(ctypes.byref(a), one)
        cuda.cuDeviceGet(ctypes.byref(b), other)
        if one != other:
            cuda.cuDeviceCanAccessPeer(ctypes.byref(found), a, b)
            print("yes" if found.value else "no", one, other)
"""
_AWARE = """
import ctypes, sys
mpi = ctypes.CDLL(sys.argv[1])
print("aware" if mpi.MPIX_Query_cuda_support() else "not")
"""


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _asked(text: str, *args: str) -> str:
    """The output of a Python program; "" if it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", text, *args], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def findings(
    environ: Mapping[str, str],
    mpi: Mpi | None,
    nvidia: str = NVIDIA,
    installed: Callable[[str], str | None] = _installed,
    asked: Callable[..., str] = _asked,
    loads: Callable[[str], bool] = _loads,
) -> Iterator[tuple[str, str, bool]]:
    """Name, one sentence, and whether programs on GPUs can run without it."""
    here = of_host(nvidia)
    works, text = _driver(nvidia, here, loads)
    yield "driver", text, works
    if here:
        yield "GPUs", _shown(here, visible(environ, here)), bool(visible(environ, here))
    for wheel, purpose in WHEELS.items():
        version = installed(wheel)
        missing = f"{wheel} is missing, for {purpose}: pip install spmd[cuda]"
        yield "wheel", missing if version is None else f"{wheel} {version}", version is not None
    version = installed(NCCL)
    yield (
        "NCCL",
        f"{NCCL} {version}"
        if version
        else f"{NCCL} is missing: pip install spmd[cuda-mesh]; without it, collectives go through "
        "the host's memory",
        True,
    )
    yield "peers", _peers(asked(_PEERS)) if works else "peer access: unknown without a driver", True
    yield "MPI", _aware(mpi, asked), True


def _driver(nvidia: str, here: list[Gpu], loads: Callable[[str], bool]) -> tuple[bool, str]:
    try:
        with open(f"{nvidia}/version", encoding="utf-8") as file:
            said = file.read()
    except OSError:
        return False, (
            f"there is no NVIDIA driver: install version {LEAST_DRIVER} or newer, which is for "
            "CUDA 13; SPMD_CUDA_DRIVER=emulator runs programs without one, slowly"
        )
    match = re.search(r"\s(\d+)\.[\d.]+", said)
    version = match[0].strip() if match else "of unknown version"
    if match and int(match[1]) < LEAST_DRIVER:
        return False, (
            f"the NVIDIA driver {version} is older than CUDA 13: install version {LEAST_DRIVER} or "
            "newer"
        )
    if not loads("libcuda.so.1"):
        return False, (
            f"the kernel has NVIDIA's driver {version}, and libcuda.so.1 can't be loaded: install "
            "the driver's libraries, or start the container with --gpus all"
        )
    if not here:
        return False, f"the NVIDIA driver {version} lists no GPU: look at the output of nvidia-smi"
    return True, f"NVIDIA driver {version}"


def _shown(here: list[Gpu], seen: list[Gpu]) -> str:
    if not seen:
        return (
            f"CUDA_VISIBLE_DEVICES shows none of {len(here)}: unset it, or name GPUs as nvidia-smi "
            "-L does"
        )
    models = ", ".join(dict.fromkeys(gpu.model for gpu in seen if gpu.model))
    return f"{len(seen)} of {len(here)} visible: {models or 'of unknown model'}"


def _peers(said: str) -> str:
    pairs = [line.split() for line in said.splitlines()]
    lacking = [f"{one}-{other}" for answer, one, other in pairs if answer == "no"]
    if not pairs:
        return "peer access: there is one GPU, or CUDA does not start; see the driver's line"
    if not lacking:
        return "peer access between all GPUs"
    return (
        f"no peer access for {', '.join(lacking)}: copies between them go through the host; "
        "nvidia-smi topo -m shows how they are connected, and IOMMU or ACS may have to be off"
    )


def _aware(mpi: Mpi | None, asked: Callable[..., str]) -> str:
    if mpi is None:
        return "no MPI was found: pip install spmd[mpi]"
    if asked(_AWARE, mpi.library).strip() == "aware":
        return "this MPI takes memory of GPUs; spmd gives it the host's"
    return (
        "this MPI takes no memory of GPUs, and spmd gives it the host's only; nothing has to be "
        "installed for that"
    )
