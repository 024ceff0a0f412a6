"""Run under mpirun: the case table over the world that `bootstrap` finds."""

from __future__ import annotations

from spmd.collectives.transport import bootstrap
from tests.collectives.transport.cases import check_all

comm = bootstrap.world()
count = check_all(comm)
if comm.rank == 0:
    print(f"{count} cases on {comm.size} ranks through {type(comm).__name__}: all right")
