"""The command `spmdrun`, also as `python -m spmd_launch`."""

from __future__ import annotations

import dataclasses
import os
import sys

from .doctor import doctor
from .find_mpi import find_mpi
from .options import Options, UsageError, parse
from .supervisor import Supervisor


def main(argv: list[str] | None = None) -> int:
    """Run a job; returns its exit code."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        if options.doctor:
            return doctor(options)
        if options.selftest:
            command = (sys.executable, "-m", f"{__package__}.selftest")
            options = dataclasses.replace(options, command=command, prefix=False)
        return launch(options)
    except UsageError as error:
        sys.stderr.write(f"spmdrun: {error}\n")
        return 2


def launch(options: Options) -> int:
    """Start the ranks and watch over them; a single rank needs neither MPI nor watching."""
    if options.ranks > 1:
        return Supervisor(options, find_mpi(options.mpirun)).run()
    if options.timeout is not None or options.log_dir is not None:
        return Supervisor(options, None).run()
    if options.devices_per_rank is not None:
        os.environ["SPMD_NUM_CPU_DEVICES"] = str(options.devices_per_rank)
    sys.stdout.flush()
    os.execv(options.command[0], options.command)


if __name__ == "__main__":
    sys.exit(main())
