"""Run under mpirun: the case table over the world that `world` finds."""

from __future__ import annotations

from spmd.transport import world
from tests.transport.cases import check_all

comm = world.world()
count = check_all(comm)
if comm.rank == 0:
    print(f"{count} cases on {comm.size} ranks through {type(comm).__name__}: all right")
