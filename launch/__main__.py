"""The command `spmdrun`, also as `python -m spmd_launch`."""

from __future__ import annotations

import dataclasses
import os
import sys

from . import fault_options as faults
from .check.doctor import doctor
from .options import Options, UsageError, parse
from .pipes import with_output
from .supervise.find_mpi import find_mpi
from .supervise.mpirun_command import read_hostfile
from .supervise.restarts import run


def main(argv: list[str] | None = None) -> int:
    """Run a job; returns its exit code."""
    try:
        return with_output(lambda: _run(sys.argv[1:] if argv is None else argv))
    except UsageError as error:
        sys.stderr.write(f"spmdrun: {error}\n")
        return 2
    except OSError as error:  # of this machine: no space left, no process left
        sys.stderr.write(f"spmdrun: {error}\n")
        return 1


def _run(argv: list[str]) -> int:
    options = parse(argv)
    if "help" in options.inject:
        return faults.show_help()
    if options.doctor:
        return doctor(options)
    for name in ("selftest", "links"):
        if getattr(options, name):
            command = (sys.executable, "-m", f"{__package__}.check.{name}")
            options = dataclasses.replace(options, command=command, prefix=False)
    return launch(options)


def launch(options: Options) -> int:
    """Start the ranks and watch over them; a single rank needs neither MPI nor watching."""
    faults.check(options.inject, options.ranks)
    if options.hostfile is not None:
        read_hostfile(options.hostfile)  # before anything starts
    if options.ranks > 1:
        return run(options, find_mpi(options.mpirun))
    if options.supervised:
        return run(options, None)
    if options.devices_per_rank is not None:
        os.environ["SPMD_NUM_CPU_DEVICES"] = str(options.devices_per_rank)
    sys.stdout.flush()
    try:
        os.execv(options.command[0], options.command)
    except OSError as error:
        raise UsageError(
            f"{options.command[0]} can't be run: {error.strerror}; the name of a Python script "
            "ends in .py, and another script begins with a line such as #!/bin/sh"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
