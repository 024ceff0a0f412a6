"""This process's rank and the number of ranks, from the variables that launchers set.

First match wins:

1. arguments of `initialize(process_index=..., process_count=...)`
2. `SPMD_PROCESS_INDEX`, `SPMD_PROCESS_COUNT` (a count of 1 alone: run by yourself, whatever else)
3. Open MPI and PRRTE: `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE`
4. PMIx: `PMIX_RANK`, its size from the Slurm step if there is one, else from MPI
5. PMI (MPICH, Intel MPI, Cray): `PMI_RANK`, `PMI_SIZE`
6. Slurm: `SLURM_PROCID`, inside a job step whose number of tasks agrees with `SLURM_NTASKS`
7. a single process

These variables also reach processes that are no ranks: a shell inside an allocation, a subprocess
of a rank. If a set is incomplete or contradicts itself, the process runs alone, with a note.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from spmd.base.record import record

# Set by a rank for its child processes, which inherit the launcher's variables but are no ranks.
OWNER = "SPMD_RANK_PROCESS"
# Fault injection: see `fault_injection`.
FAULTS = "SPMD_INJECT"


@record
class Environment:
    """The job as the environment describes it. `size` is None where only MPI knows it."""

    source: str
    rank: int = 0
    size: int | None = 1
    local_rank: int | None = None
    local_size: int | None = None
    note: str = ""

    @property
    def is_single(self) -> bool:
        """Whether this process certainly runs alone."""
        return self.size == 1


def started_mpi() -> bool:
    """Whether the program itself has started MPI through mpi4py."""
    return "mpi4py.MPI" in sys.modules


def detect(
    environ: Mapping[str, str] = os.environ,
    process_index: int | None = None,
    process_count: int | None = None,
) -> Environment:
    """Apply the precedence of this module's docstring."""
    if process_count is not None:
        rank = detect(environ).rank if process_index is None else process_index
        return Environment("arguments", rank, process_count)
    owner = environ.get(OWNER)
    if owner is not None and owner != str(os.getpid()):
        return Environment(
            "single", note=f"process {owner}, a rank, started this process; it runs by itself"
        )
    notes: list[str] = []
    for look in (_own, _open_mpi, _pmix, _pmi, _slurm):
        found = look(environ)
        if isinstance(found, Environment):
            return found
        if found:
            notes.append(found)
    return Environment("single", note="; ".join(notes))


Found = Environment | str | None  # a rank, a note on why not, or nothing to see


def _pair(
    environ: Mapping[str, str], source: str, rank: str, size: str, local: tuple[str, str]
) -> Found:
    index, count = _int(environ.get(rank)), _int(environ.get(size))
    if index is None and count is None:
        return None
    if index is None:
        return f"{size} is set without {rank}"
    if count is None:
        return f"{rank} is set without {size}"
    if not 0 <= index < count:
        return f"{rank}={index} is not below {size}={count}"
    local_rank, local_size = (_int(environ.get(name)) for name in local)
    return Environment(source, index, count, local_rank, local_size)


def _own(environ: Mapping[str, str]) -> Found:
    if environ.get("SPMD_PROCESS_COUNT") == "1":
        return Environment("SPMD_PROCESS_COUNT")
    return _pair(
        environ,
        "SPMD_PROCESS_*",
        "SPMD_PROCESS_INDEX",
        "SPMD_PROCESS_COUNT",
        ("SPMD_LOCAL_PROCESS_INDEX", "SPMD_LOCAL_PROCESS_COUNT"),
    )


def _open_mpi(environ: Mapping[str, str]) -> Found:
    return _pair(
        environ,
        "OMPI_COMM_WORLD_*",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    )


def _pmix(environ: Mapping[str, str]) -> Found:
    rank = _int(environ.get("PMIX_RANK"))
    if rank is None:
        return None
    if "PMIX_NAMESPACE" not in environ:
        return "PMIX_RANK is set without PMIX_NAMESPACE"
    return Environment("PMIX_*", rank, _int(environ.get("SLURM_STEP_NUM_TASKS")))


def _pmi(environ: Mapping[str, str]) -> Found:
    return _pair(environ, "PMI_*", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _slurm(environ: Mapping[str, str]) -> Found:
    rank = _int(environ.get("SLURM_PROCID"))
    if rank is None:
        return None
    tasks, step_tasks = (_int(environ.get(f"SLURM_{n}")) for n in ("NTASKS", "STEP_NUM_TASKS"))
    # A batch script and a shell on a node of an allocation see SLURM_PROCID=0 and NTASKS too.
    if step_tasks is None or "SLURM_STEP_ID" not in environ:
        return "inside a Slurm allocation, but not in a job step (start ranks with srun or spmdrun)"
    if tasks is not None and tasks != step_tasks:
        return f"SLURM_NTASKS={tasks}, but this job step has {step_tasks} tasks"
    if not 0 <= rank < step_tasks:
        return f"SLURM_PROCID={rank} is not below SLURM_STEP_NUM_TASKS={step_tasks}"
    return Environment("SLURM_*", rank, step_tasks, _int(environ.get("SLURM_LOCALID")))


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None
