"""The command and the environment with which mpirun starts the guards of a job."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..options import Options, UsageError
from .cleanup import FLIGHTS
from .find_mpi import Mpi
from .rank import CHANNEL, SETTINGS, TOKEN

STALL_SECONDS = 600.0
COLLECTIVE_TIMEOUT = "SPMD_COLLECTIVE_TIMEOUT"
GUARD = str(Path(__file__).parents[1] / "guard.py")

# Variables that a former launcher set for *its* job must not reach the new one.
FORMER_JOB = re.compile(
    r"(OMPI_COMM_WORLD_|PMIX_|PMI_|PMI\d?_|MPI_LOCAL|SPMD_(RANK_PROCESS|STACKS|RESTART)$)"
)

# Set where the user has not. The first two let a container's root start a job.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "^ofi",  # probing for fabrics takes a second
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# Between hosts a death is noticed by heartbeats, from a thread of their own: a rank that computes
# for longer than the limit would else be taken for dead.
FAILURE_DETECTOR = [
    *("--mca", "mpi_ft_detector", "1", "--mca", "mpi_ft_detector_thread", "1"),
    *("--mca", "mpi_ft_detector_timeout", "1", "--mca", "mpi_ft_detector_period", "0.3"),
]
# With the detector's thread MPI_Finalize never returns (`transport/mpi/communicator.py`); mpi4py
# must not call it.
NO_FINALIZE = "MPI4PY_RC_FINALIZE"
_PASSED_ON = re.compile(
    r"(SPMD|PYTHON|MPI4PY_|OMP_|OPENBLAS_|MKL_|VIRTUAL_ENV$|LD_LIBRARY_PATH$|PATH$)"
)


@dataclass(frozen=True, slots=True)
class Host:
    """A line of a hostfile."""

    name: str
    slots: int


def read_hostfile(path: str) -> list[Host]:
    """Hosts of a file with lines `name`, `name slots=4` or `name:4`, and comments after #."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is no text"
        raise UsageError(
            f"--hostfile {path}: {why}; name a file with a host on each line: `name slots=4`"
        ) from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = re.fullmatch(r"([^\s:]+)(?:\s+slots\s*=\s*(\d+)|:(\d+))?", words)
        if match is None:
            raise UsageError(
                f"{path}:{number}: {words!r} is not a host; write `name`, `name slots=4`, `name:4`"
            )
        hosts.append(Host(match[1], int(match[2] or match[3] or 1)))
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host; write one on each line: `name slots=4`")
    return hosts


def flight_folder(folder: str) -> str:
    """The folder of the ranks' flight files, on every host: in memory, where there is a place."""
    if not os.access("/dev/shm", os.W_OK):
        return os.path.join(folder, "flight")
    return f"/dev/shm/{FLIGHTS}{os.getpid()}-{os.path.basename(folder)}"


def stall_timeout(options: Options) -> float:
    """After how many seconds a job that hangs is ended; 0 for never."""
    if options.stall_timeout is not None:
        return options.stall_timeout
    try:
        return float(os.environ.get(COLLECTIVE_TIMEOUT, STALL_SECONDS))
    except ValueError:
        return STALL_SECONDS  # the ranks will report the error


def device(options: Options, rank: int) -> str:
    """The devices of a rank: `cpu:1`, or `cpu:2-3`."""
    platform = os.environ.get("SPMD_PLATFORM", "cpu")
    said = os.environ.get("SPMD_NUM_CPU_DEVICES", "")
    # The ranks will report a number that is none.
    count = options.devices_per_rank or (int(said) if said.isdecimal() else 1) or 1
    if platform != "cpu" or count == 1:
        return f"{platform}:{rank}"
    return f"{platform}:{rank * count}-{(rank + 1) * count - 1}"


def environment(
    options: Options,
    channel: str,
    token: str,
    folder: str,
    base: Mapping[str, str] = os.environ,
    flight: str = "",
    attempt: int = 0,
    survives: bool = False,
) -> dict[str, str]:
    """The environment of mpirun, which the guards inherit."""
    environ = {name: value for name, value in base.items() if not FORMER_JOB.match(name)}
    for name, value in OPEN_MPI.items():
        environ.setdefault(name, value)
    if options.devices_per_rank is not None:
        environ["SPMD_NUM_CPU_DEVICES"] = str(options.devices_per_rank)
    if options.hostfile and survives:
        environ[NO_FINALIZE] = "0"
    if FLIGHTS in environ.get("SPMD_FLIGHT_DIR", ""):
        del environ["SPMD_FLIGHT_DIR"]
    if options.inject:
        environ["SPMD_INJECT"] = ";".join(options.inject)
    if options.max_restarts:
        environ["SPMD_RESTART"] = str(attempt)
    limit = stall_timeout(options)
    if limit and COLLECTIVE_TIMEOUT not in environ:
        # The ranks' own limit comes later: spmdrun sees more, and excuses a rank that compiles.
        environ[COLLECTIVE_TIMEOUT] = f"{6 * limit:g}"
    settings = {
        "bind": options.bind,
        "folder": folder,
        "flight": flight or flight_folder(folder),
        "grace": options.grace,
        "ranks": options.ranks,
        "stdin": options.stdin,
        "share_gpus": options.share_gpus,
        "survives": survives,
    }
    return environ | {CHANNEL: channel, TOKEN: token, SETTINGS: json.dumps(settings)}


def command(
    options: Options,
    mpi: Mpi | None,
    environ: Mapping[str, str],
    folder: str,
    survives: bool = False,
) -> list[str]:
    """The whole command line; without an MPI (one rank) it is the guard itself."""
    # Isolated: the program's PYTHONPATH and site packages are none of the guard's business.
    guard = [sys.executable, "-I", "-S", GUARD, *options.command]
    if mpi is None:
        return guard
    hosts = read_hostfile(options.hostfile) if options.hostfile else []
    ranks = ["-n", str(options.ranks)]
    if mpi.is_open_mpi:
        # The guards bind, for every MPI alike; mpirun would leave shared cores unbound.
        flags = ["--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
        if survives:
            flags += ["--with-ft", "ulfm"]
        if hosts and survives:
            flags += FAILURE_DETECTOR
        if hosts:
            lines = [f"{host.name} slots={host.slots}" for host in hosts]
            flags += ["--hostfile", _write(folder, lines)]
            for name in sorted(environ):
                if _PASSED_ON.match(name):
                    flags += ["-x", name]
        return [mpi.mpirun, *ranks, *flags, *guard]
    flags = ["-f", _write(folder, [f"{h.name}:{h.slots}" for h in hosts])] if hosts else []
    return [mpi.mpirun, *ranks, *flags, *guard]


def _write(folder: str, lines: list[str]) -> str:
    path = Path(folder, "hosts")
    path.write_text("\n".join(lines) + "\n")
    return str(path)
