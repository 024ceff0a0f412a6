"""The command line of spmdrun, as one frozen record."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass


class UsageError(Exception):
    """The command line or the machine does not allow the job; the message has the advice."""


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options. `command` is complete: it starts with an executable."""

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
    only_ranks: tuple[int, ...] | None = None
    collapse: bool = False
    grace: float = 1.5
    stall_timeout: float | None = None
    inject: tuple[str, ...] = ()
    max_restarts: int = 0
    elastic: int | None = None
    selftest: bool = False
    doctor: bool = False
    gpu: bool = False
    share_gpus: bool = False
    links: bool = False
    stdin: int = 0

    @property
    def supervised(self) -> bool:
        """Whether even a single rank needs a supervisor."""
        wanted = self.timeout, self.log_dir, self.only_ranks, self.elastic
        return any(w is not None for w in wanted) or bool(self.inject or self.max_restarts)


# Larger numbers are taken for typing errors.
MOST = 65536
MOST_SECONDS = 1e9


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text) if re.fullmatch(r"[+-]?\d{1,9}", text.strip()) else -1
        if not least <= value <= MOST:
            raise argparse.ArgumentTypeError(
                f"{text!r} can't be meant; give a whole number from {least} to {MOST}"
            )
        return value

    return read


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} can't be meant; give a number of seconds from 0 to {MOST_SECONDS:.0f}"
        )
    return value


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("'' is empty; write a value, or leave the option out")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spmdrun",
        usage="spmdrun [-n N] [options] (script.py | -m module | executable) [arguments]",
        description="Run a program on several ranks with the MPI that mpi4py uses.",
    )
    _add_ranks(parser.add_argument_group("ranks").add_argument)
    _add_ends(parser.add_argument_group("ends and failures").add_argument)
    _add_output(parser.add_argument_group("output and input").add_argument)
    _add_checks(parser.add_argument_group("instead of a program").add_argument)
    return parser


def _add_ranks(add: Callable[..., object]) -> None:
    add("-n", "--ranks", type=_whole(1), metavar="N", help="number of ranks; default: one per core")
    # As mpirun has it.
    add("-np", "--n", "--np", dest="ranks", type=_whole(1), help=argparse.SUPPRESS)
    add("--devices-per-rank", type=_whole(1), metavar="D", help="virtual CPU devices in each rank")
    hosts = "hosts to run on, one a line: `name slots=4`"
    add("--hostfile", type=_text, metavar="FILE", help=hosts)
    add("--as-jax", action="store_true", help="a program that imports jax: run it on spmd")
    add("--no-bind", dest="bind", action="store_false", help="bind ranks to no cores and GPUs")
    add("--share-gpus", action="store_true", help="let ranks share GPUs if there are too few")
    mpirun = "use this mpirun instead of the one that is found"
    add("--mpirun", type=_text, metavar="PATH", help=mpirun)


def _add_ends(add: Callable[..., object]) -> None:
    add("--timeout", type=_seconds, metavar="S", help="end the job after S seconds (exit code 124)")
    stall = "end it when it hangs for S (600; 0: never)"
    add("--stall-timeout", type=_seconds, metavar="S", help=stall)
    grace = "from asking ranks to end to killing them (1.5)"
    add("--grace", type=_seconds, metavar="S", help=grace)
    again = "start again after a failure, N times at most"
    add("--max-restarts", type=_whole(0), metavar="N", help=again)
    elastic = "go on, or restart, without ranks that died; MIN must be left"
    add("--elastic", type=_whole(1), metavar="MIN", help=elastic)
    fault = "make a fault: kill:rank=1,op=5 ('help')"
    add("--inject", action="append", type=_text, metavar="FAULT", help=fault)


def _add_output(add: Callable[..., object]) -> None:
    logs = "also write each rank's output to DIR/rank-N.log"
    add("--log-dir", type=_text, metavar="DIR", help=logs)
    only = "show only these ranks' output: 0,2-3"
    add("--only-rank", dest="only_ranks", metavar="LIST", help=only)
    add("--collapse", action="store_true", help="print a line that all ranks say once: `r0-3 | `")
    add("--no-prefix", dest="prefix", action="store_false", help="print lines without `r2 | `")
    add("-v", "--verbose", action="store_true", help="show the command and what mpirun prints")
    reads = "which rank reads the standard input; default: 0"
    add("--stdin", type=_whole(0), metavar="RANK", help=reads)


def _add_checks(add: Callable[..., object]) -> None:
    add("--selftest", action="store_true", help="test this machine: correctness, speed")
    add("--doctor", action="store_true", help="say what was detected, and why")
    add("--gpu", action="store_true", help="with --doctor: what programs on GPUs lack")
    add("--links", action="store_true", help="measure the link between each two ranks")


def parse(argv: list[str]) -> Options:
    """Read the command line; everything from the program on belongs to the program."""
    parser = _parser()
    at = _program_at(argv, parser)
    given = vars(parser.parse_args(argv[:at]))
    rest = argv[at:]
    standalone = given["selftest"] or given["doctor"] or given["links"]
    standalone = standalone or "help" in (given["inject"] or ())
    if not rest and not standalone:
        parser.error("which program? spmdrun -n 4 train.py")
    if rest and standalone:
        option = next((f"--{o}" for o in ("selftest", "doctor", "links") if given[o]), "--inject")
        parser.error(f"{option} runs no program; leave {rest[0]!r} out")
    if given["ranks"] is None:
        given["ranks"] = 2 if given["selftest"] else len(os.sched_getaffinity(0))
    given = {name: value for name, value in given.items() if value is not None}
    _check(given, parser)
    as_jax = given.pop("as_jax")
    if standalone:
        return Options(command=(), **given)
    return Options(command=(_as_jax if as_jax else _command)(rest), **given)


def _check(given: dict, parser: argparse.ArgumentParser) -> None:
    """Refuse values that do not fit each other, and read lists."""
    ranks, least = given["ranks"], given.get("elastic")
    if not 0 <= given.get("stdin", 0) < ranks:
        parser.error(f"--stdin {given['stdin']}: the job has ranks 0 to {ranks - 1}")
    if given.get("gpu") and not given.get("doctor"):
        parser.error("--gpu: write spmdrun --doctor --gpu")
    if least is not None and not 1 <= least <= ranks:
        parser.error(f"--elastic {least}: the job starts with {ranks} ranks; give 1 to {ranks}")
    if "only_ranks" in given:
        given["only_ranks"] = rank_list(given["only_ranks"], ranks, parser)
    if "inject" in given:
        given["inject"] = tuple(given["inject"])


def rank_list(text: str, ranks: int, parser: argparse.ArgumentParser) -> tuple[int, ...]:
    """The ranks of a list such as `0,2-3`."""
    found: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word.strip())
        if match is None:
            parser.error(f"--only-rank {text}: {word!r} is no rank; write 0 or 0,2-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= ranks or first > last:
            parser.error(f"--only-rank {text}: {word} is not among ranks 0 to {ranks - 1}")
        found.extend(range(first, last + 1))
    return tuple(found)


def _program_at(argv: list[str], parser: argparse.ArgumentParser) -> int:
    """The index of the program: the first word that is neither an option nor its value."""
    actions = parser._option_string_actions
    at = 0
    while at < len(argv):
        word = argv[at]
        if word in ("-m", "-c", "--") or not word.startswith("-"):
            return at
        # As argparse has it: an option, or the only ones that begin like this.
        meant = [word] if word in actions else [o for o in actions if o.startswith(word)]
        at += 2 if meant and all(actions[o].nargs is None for o in meant) else 1
    return len(argv)


def _command(words: list[str]) -> tuple[str, ...]:
    if words[0] == "--":
        words = words[1:]
    if not words:
        raise UsageError("nothing follows `--`; which program?")
    if words[0] in ("-m", "-c"):
        if not words[1:]:
            what = "module: spmdrun -m package.train" if words[0] == "-m" else "program text"
            raise UsageError(f"{words[0]}: nothing follows it; write a {what}")
        return (sys.executable, *words)
    if words[0].endswith(".py"):
        return (sys.executable, _script(words[0]), *words[1:])
    found = shutil.which(words[0])
    if found is None:
        raise UsageError(
            f"{words[0]!r} is neither a Python script (.py) nor an executable on PATH; to have "
            f"Python run it, write: spmdrun python {words[0]}"
        )
    return (found, *words[1:])


def _as_jax(words: list[str]) -> tuple[str, ...]:
    """The command that runs a Python program with spmd in the place of JAX."""
    command = _command(words)
    if command[0] != sys.executable:
        raise UsageError(f"--as-jax runs Python programs: a script.py or -m module, not {words[0]}")
    return (sys.executable, "-m", "spmd.as_jax", *command[1:])


def _script(name: str) -> str:
    if os.path.isdir(name):
        raise UsageError(f"{name} is a folder; name a script in it")
    if not os.path.isfile(name):
        raise UsageError(f"there is no file {name} (looked in {os.path.abspath('.')})")
    if not os.access(name, os.R_OK):
        raise UsageError(f"{name} can't be read: Permission denied; chmod +r {name}")
    return name
