"""Goes on without ranks that died, where MPI can: with the ULFM that is part of Open MPI.

ULFM ("user level failure mitigation") gives three calls: `Get_failed` (the ranks that died, as far
as this rank knows), `Revoke` (every call of any rank on a communicator raises from now on) and
`Shrink` (a new communicator of the ranks that are left, made by all of them together). Everything
is made anew on top of that communicator, as at the start: shared memory, notices, groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import Any

from spmd.base.config import config
from spmd.base.source import current_source
from spmd.transport import world as bootstrap
from spmd.transport.call_signature import ranks_text
from spmd.transport.checked import OPEN_GROUPS, CheckedCommunicator
from spmd.transport.failure_message import say
from spmd.transport.flight_recorder import COLLECTIVE, FLIGHT, LOST, source_text
from spmd.transport.mpi.failure_notices import dead_ranks, is_death
from spmd.transport.world import inject, mpi_transport

# How long to wait for MPI to hear of a death that a collective has noticed. Open MPI takes less
# than 0.1 s on one host, and its detector about a second between hosts.
SECONDS_TO_BE_SURE = 3.0
# A split has a number from 1; this is what a group of survivors has in its place.
_SURVIVORS = -1


def recover() -> bool:
    """Go on without the ranks that died; every rank that is left calls it after a `PeerError`.

    Returns True when the job goes on: `process_index`, `process_count` and `devices` then count
    only the ranks that are left, in their old order. Programs and meshes made before are no more:
    make meshes anew, and take arrays from a checkpoint (`spmd.checkpoints.restore`) or from host
    memory. Waits for ranks that still compute, until their next collective.

    Returns False if no rank died (a rank raised: then the job ends), and if the job was not
    started for this: it needs Open MPI with ULFM, and `spmdrun --elastic MIN` or
    `mpirun --with-ft ulfm`.

    >>> recover()  # a process that is alone has lost no rank
    False
    """
    before = bootstrap.job()
    base = before.base
    if base is None or not is_possible():
        return False
    mpi = mpi_transport.load_mpi()
    label = FLIGHT.label("recover", source=source_text(current_source()))
    place = FLIGHT.begin(label, 0)
    phase = FLIGHT.set_phase(COLLECTIVE)
    try:
        if not _somebody_died(mpi, base):
            return False
        _wake_the_others(mpi, before)
        left, world = _connect_those_left(mpi, base)
    finally:
        FLIGHT.completed(place)
        FLIGHT.set_phase(phase)
    _take_over(mpi, before, left, world)
    return True


def is_possible() -> bool:
    """Whether this job was started so that ranks may die without the others."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"


def _somebody_died(mpi: Any, base: Any) -> bool:
    deadline = time.monotonic() + SECONDS_TO_BE_SURE
    while True:
        try:
            base.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG)  # lets MPI take in the news
        except mpi.Exception as error:
            if not is_death(mpi, error, base):
                raise
        if base.Is_revoked() or dead_ranks(mpi, base):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)


def _wake_the_others(mpi: Any, before: bootstrap.Job) -> None:
    """Ranks may wait for this one in a group without dead ranks: they must come as well."""
    text = f"rank {before.world.rank} goes on without the ranks that died"
    for group in OPEN_GROUPS:
        group.announce_failure(text)
        with contextlib.suppress(mpi.Exception):  # revoked by another rank
            group.revoke()
    before.base.Revoke()
    OPEN_GROUPS.clear()


def _connect_those_left(mpi: Any, base: Any) -> tuple[Any, CheckedCommunicator]:
    """The communicators of the ranks that are left; more may die meanwhile."""
    while True:
        base = base.Shrink()
        try:
            return base, mpi_transport.connect_world(mpi, base, config.shared_memory)
        except mpi.Exception as error:
            if not is_death(mpi, error, base):
                raise
            OPEN_GROUPS.clear()
            base.Revoke()


def _take_over(mpi: Any, before: bootstrap.Job, left: Any, world: CheckedCommunicator) -> None:
    """Make the ranks that are left this process's job."""
    old, size = before.world, left.Get_size()
    members = left.Get_group().Translate_ranks(list(range(size)), before.base.Get_group())
    numbers = old.log.ranks if old.log is not None else tuple(range(old.size))
    if old.log is not None:
        # The recorder's files, and spmdrun, go on counting ranks as at the start.
        world.log = old.log.part(_SURVIVORS, "world", members)
    mpi_transport.leave_with(left)
    if before.hooks is not None:
        before.hooks.follow(world)
    place = mpi_transport.local_ranks(mpi, left)
    now = inject.again(world, old)
    made = dataclasses.replace(
        before, world=now, base=left, local_rank=place[0], local_size=place[1]
    )
    bootstrap.replace_job(made)
    lost = [numbers[r] for r in range(old.size) if r not in members]
    FLIGHT.words[LOST] += len(lost)
    say(numbers[old.rank], f"goes on as rank {world.rank} of {size}, without {ranks_text(lost)}")
