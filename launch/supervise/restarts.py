"""Starts a job again after a failure: `--max-restarts`, and on fewer ranks `--elastic`.

Where MPI has ULFM and the program calls `spmd.distributed.recover`, `--elastic` needs no restart:
the ranks that are left go on by themselves. Otherwise all ranks start anew; where they go on is the
program's business, from its last checkpoint (`spmd.checkpoints`). `SPMD_RESTART` tells it how often
it was started again.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ..options import Options, UsageError
from . import mpirun_command as commands
from .find_mpi import Mpi, has_ulfm
from .report import Ending
from .supervisor import Supervisor

# A job that fails at once must not fill the screen at once.
SECONDS_BETWEEN_STARTS = 0.5


def run(options: Options, mpi: Mpi | None) -> int:
    """Run a job, again where it fails and that is allowed; returns the last exit code."""
    survives = options.elastic is not None and mpi is not None and has_ulfm(mpi)
    if options.elastic is not None and not (survives or options.max_restarts):
        raise UsageError(
            f"--elastic {options.elastic}: ranks can't go on without others here, which takes "
            "Open MPI with ULFM; add --max-restarts N, to start again without them"
        )
    with tempfile.TemporaryDirectory(prefix="spmdrun-hosts-") as folder:
        attempt = 0
        while True:
            job = Supervisor(options, mpi, attempt, survives)
            code = job.run()
            if code == 0 or attempt == options.max_restarts or not job.may_restart:
                return code
            attempt += 1
            fewer = without_the_lost(options, job.endings, Path(folder))
            if fewer is None:
                sys.stderr.write(
                    f"spmdrun: not started again: fewer than --elastic {options.elastic} ranks "
                    f"would be left\n"
                )
                return code
            options = fewer
            sys.stderr.write(
                f"spmdrun: restart {attempt} of {options.max_restarts}, on {options.ranks} ranks\n"
            )
            sys.stderr.flush()
            time.sleep(SECONDS_BETWEEN_STARTS)


def without_the_lost(options: Options, endings: Sequence[Ending], folder: Path) -> Options | None:
    """The same job without the ranks that were killed or vanished; None if too few are left.

    A host all of whose ranks were lost is left out of the hostfile.
    """
    if options.elastic is None:
        return options
    lost = [ending for ending in endings if ending.died]
    ranks = options.ranks - len(lost)
    if ranks < options.elastic:
        return None
    changes: dict = {"ranks": ranks}
    if options.only_ranks is not None:
        changes["only_ranks"] = tuple(r for r in options.only_ranks if r < ranks)
    if options.hostfile and lost:
        alive = {e.host for e in endings if not e.died}
        hosts = [
            host
            for host in commands.read_hostfile(options.hostfile)
            if host.name in alive or host.name not in {e.host for e in lost}
        ]
        path = folder / f"hosts-{ranks}"
        path.write_text("".join(f"{host.name} slots={host.slots}\n" for host in hosts))
        changes["hostfile"] = str(path)
    return dataclasses.replace(options, **changes)
