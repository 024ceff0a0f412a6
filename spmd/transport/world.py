"""The world of this process: determined once, at the first use.

`world()` is the communicator of all ranks of the job. A process that was started alone gets a world
of one without mpi4py being imported; one that was started as a rank gets MPI's, with hooks that end
the job when it fails (`process_exit`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from spmd.base.config import config
from spmd.base.errors import LaunchError
from spmd.base.lazy_import import Deferred
from spmd.base.record import record, replace
from spmd.base.source import current_source
from spmd.transport.checked import CheckedCommunicator
from spmd.transport.environment import FAULTS, OWNER, Environment, detect, started_mpi
from spmd.transport.flight_recorder import (
    COLLECTIVE,
    FLIGHT,
    FOLDER,
    STEP,
    WORLD,
    GroupLog,
    source_text,
)
from spmd.transport.single import SingleCommunicator

# Only a job of several ranks needs these modules. `compile/lazy.py` is on a higher floor.
exits = Deferred("spmd.transport.process_exit")
forks = Deferred("spmd.transport.fork_guard")
inject = Deferred("spmd.transport.fault_injection")
mpi_transport = Deferred("spmd.transport.mpi.communicator")
key_value = Deferred("spmd.transport.key_value")
tracing = Deferred("spmd.transport.trace_export")
shm_segment = Deferred("spmd.transport.shm.segment")

# At the start of a job whose timeline is kept.
CLOCK_MEETINGS = 16


@record
class Job:
    """This process's place in its job."""

    environment: Environment
    world: CheckedCommunicator
    local_rank: int
    local_size: int
    base: Any = None  # MPI's communicator of the ranks, which is never used for data
    hooks: Any = None  # the `ExitHooks` of a job of several ranks


class _CurrentJob:
    """The one job of this process, and the lock under which it is made."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.job: Job | None = None
        self.shares_values = False
        self.client: Any = None  # the `KeyValueClient` of this rank


_current = _CurrentJob()


def job() -> Job:
    """This process's job, joined at the first call."""
    return _current.job or initialize()


def world() -> CheckedCommunicator:
    """The communicator of all ranks of this job."""
    return job().world


def process_index() -> int:
    """This process's rank."""
    return job().world.rank


def process_count() -> int:
    """The number of ranks the job has."""
    return job().world.size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return job().local_rank


def local_size() -> int:
    """The number of ranks of the job on this host."""
    return job().local_size


def is_initialized() -> bool:
    """Whether this process has joined its job."""
    return _current.job is not None


def initialize(process_index: int | None = None, process_count: int | None = None) -> Job:
    """Join the job. Without arguments it is found in the environment, as `environment` describes.

    The arguments are the caller's expectations; MPI connects the ranks in any case. Calling again
    is fine, and changes nothing.
    """
    with _current.lock:
        if _current.job is None:
            found = detect(os.environ, process_index, process_count)
            made = _join(found)
            _record(made.world)
            if os.environ.get(FAULTS):
                world = inject.wrapped(made.world, lambda: FLIGHT.words[STEP])
                made = replace(made, world=world)
            _current.job = made
            _share_values()
        joined = _current.job
    if process_count not in (None, joined.world.size) or process_index not in (
        None,
        joined.world.rank,
    ):
        raise LaunchError(
            f"initialize(process_index={process_index}, process_count={process_count}): this "
            f"process is rank {joined.world.rank} of {joined.world.size} already "
            f"(from {joined.environment.source})"
        )
    return joined


def _join(found: Environment) -> Job:
    if found.is_single and (found.source != "single" or not started_mpi()):
        if found.note:
            sys.stderr.write(f"spmd: running as a single process: {found.note}\n")
        return Job(found, SingleCommunicator(), 0, 1)
    with _waiting_for_the_others(found):
        mpi = mpi_transport.load_mpi()
        rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        _check_agreement(found, rank, size, mpi.Get_library_version())
        if size == 1:
            return Job(found, SingleCommunicator(), 0, 1)
        if rank == 0:
            shm_segment.sweep()
        comm = mpi_transport.connect_world(mpi, mpi.COMM_WORLD, config.shared_memory)
    hooks = exits.ExitHooks(comm, mpi.COMM_WORLD.Abort)
    hooks.install()
    forks.disarm_children()
    os.environ[OWNER] = str(os.getpid())
    local, of_host = mpi_transport.local_ranks(mpi, mpi.COMM_WORLD)
    return Job(found, comm, local, of_host, mpi.COMM_WORLD, hooks)


def replace_job(made: Job) -> None:
    """Replace this process's job by that of the ranks left."""
    with _current.lock:
        _current.job = made
        _share_values()
    for call in _forget:
        call()


_forget: list[Callable[[], None]] = []


def after_recovery(call: Callable[[], None]) -> Callable[[], None]:
    """Register a function to call when the job goes on with fewer ranks."""
    _forget.append(call)
    return call


def share_values() -> None:
    """Give the ranks a key-value store, when this process joins its job, now if it has.

    **Every rank must make the call**: JAX's libraries need the store, and as_jax asks for it.
    """
    with _current.lock:
        _current.shares_values = True
        if _current.job is not None:
            _share_values()


def key_value_client() -> Any:
    """The `KeyValueClient` of this rank; None in a job of one, or of ranks that share no values."""
    return _current.client


def _share_values() -> None:
    joined = _current.job
    if joined is not None and _current.shares_values:
        _current.client = key_value.start(joined) if joined.world.size > 1 else None


@contextlib.contextmanager
def _waiting_for_the_others(found: Environment) -> Iterator[None]:
    """Tell spmdrun that this rank is at the start, where all ranks wait for a missing one."""
    folder = os.environ.get(FOLDER)
    if not folder or not found.size:
        yield
        return
    FLIGHT.join(found.rank, found.size, folder)
    label = FLIGHT.label("start-up", source=source_text(current_source()))
    place = FLIGHT.begin(label, 0, WORLD, 0, entered=True)
    before = FLIGHT.set_phase(COLLECTIVE)
    yield
    FLIGHT.completed(place)
    FLIGHT.set_phase(before)


def _record(world: CheckedCommunicator) -> None:
    """Begin the flight record of this rank; one that is alone records only if asked for a file."""
    if world.size > 1 or os.environ.get(FOLDER) or config.trace:
        record_rank(world)
    if config.trace:
        tracing.start_with_the_job(config.trace)
        set_clocks(world)


def record_rank(world: CheckedCommunicator) -> None:
    """Record the calls of a world, if that is not done yet."""
    if world.log is None:
        FLIGHT.join(world.rank, world.size, os.environ.get(FOLDER))
        world.log = GroupLog(WORLD, world.name, range(world.size))


def set_clocks(world: CheckedCommunicator) -> None:
    """Let ranks meet a few times: the same moment on their clocks, by which timelines align."""
    log = world.log
    if log is None or world.size == 1:
        return
    for _ in range(CLOCK_MEETINGS):
        place = log.begin(FLIGHT.label("clock"), 0)
        world.barrier()
        log.completed(place)


def _check_agreement(found: Environment, rank: int, size: int, library: str) -> None:
    if found.source == "single" or found.size in (None, size):
        if found.source == "arguments" and found.rank != rank:
            raise LaunchError(f"initialize(process_index={found.rank}): MPI says rank {rank}")
        return
    library = library.splitlines()[0].split(", package")[0].strip("\0 ")
    if size == 1:
        raise LaunchError(
            f"the environment says rank {found.rank} of {found.size} ({found.source}), and MPI "
            f"says that this process is alone.\nThe mpirun that started it and mpi4py belong to "
            f"different MPIs; mpi4py uses {library}. Start with that one's mpirun: spmdrun finds "
            f"it by itself.\nUnder Slurm, srun needs a plug-in that this MPI knows: "
            f"srun --mpi=pmix (see srun --mpi=list)."
        )
    raise LaunchError(
        f"the environment says {found.size} ranks ({found.source}), and MPI says {size} "
        f"({library}). Unset the variables that a former launcher left, or set "
        f"SPMD_PROCESS_COUNT={size} and SPMD_PROCESS_INDEX={rank}."
    )
