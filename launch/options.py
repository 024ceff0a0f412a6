"""The command line of spmdrun, as one frozen record."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path


class UsageError(Exception):
    """The command line or the machine does not allow the job; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. `command` is complete: it starts with an executable."""

    command: tuple[str, ...]
    ranks: int
    devices_per_rank: int | None = None
    hostfile: str | None = None
    timeout: float | None = None
    log_dir: str | None = None
    prefix: bool = True
    bind: bool = True
    verbose: bool = False
    mpirun: str | None = None
    selftest: bool = False
    doctor: bool = False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spmdrun",
        usage="spmdrun [-n N] [options] (script.py | -m module | executable) [arguments]",
        description="Run a program on several ranks with the MPI that mpi4py uses.",
    )
    add = parser.add_argument
    add("-n", "--ranks", type=int, metavar="N", help="number of ranks; default: one per core")
    add("--devices-per-rank", type=int, metavar="D", help="virtual CPU devices in each rank")
    add("--hostfile", metavar="FILE", help="hosts to run on, one a line: `name slots=4`")
    add("--timeout", type=float, metavar="S", help="end the job after S seconds (exit code 124)")
    add("--log-dir", metavar="DIR", help="also write each rank's output to DIR/rank-N.log")
    add("--no-prefix", dest="prefix", action="store_false", help="print lines without `r2 | `")
    add("--no-bind", dest="bind", action="store_false", help="do not bind ranks to cores")
    add("--mpirun", metavar="PATH", help="use this mpirun instead of the one that is found")
    add("-v", "--verbose", action="store_true", help="show the command and what mpirun prints")
    add("--selftest", action="store_true", help="test this machine: correctness, speed")
    add("--doctor", action="store_true", help="say what was detected, and why")
    return parser


def parse(argv: list[str]) -> Options:
    """Read the command line; everything from the program on belongs to the program."""
    parser = _parser()
    at = _program_at(argv, parser)
    given = vars(parser.parse_args(argv[:at]))
    rest = argv[at:]
    standalone = given["selftest"] or given["doctor"]
    if not rest and not standalone:
        parser.error("which program? spmdrun -n 4 train.py")
    if given["ranks"] is None:
        given["ranks"] = 2 if given["selftest"] else len(os.sched_getaffinity(0))
    if given["ranks"] < 1:
        parser.error(f"-n {given['ranks']}: a job has at least one rank")
    return Options(command=() if standalone else _command(rest), **given)


def _program_at(argv: list[str], parser: argparse.ArgumentParser) -> int:
    """Where the program begins: at the first word that is neither an option nor its value."""
    takes_value = {
        flag for action in parser._actions if action.nargs is None for flag in action.option_strings
    }
    at = 0
    while at < len(argv):
        word = argv[at]
        if word in ("-m", "-c", "--") or not word.startswith("-"):
            return at
        at += 2 if word in takes_value else 1
    return len(argv)


def _command(words: list[str]) -> tuple[str, ...]:
    if words[0] == "--":
        words = words[1:]
    if not words:
        raise UsageError("nothing follows `--`; which program?")
    if words[0] in ("-m", "-c"):
        return (sys.executable, *words)
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise UsageError(f"there is no file {words[0]} (looked in {os.getcwd()})")
        return (sys.executable, *words)
    found = shutil.which(words[0])
    if found is None:
        raise UsageError(f"{words[0]!r} is neither a Python script (.py) nor an executable on PATH")
    return (found, *words[1:])
