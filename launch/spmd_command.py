"""The command `spmd`: merges and explains the records of ranks, and prepares a machine.

spmd flight                    # of the jobs that run on this host
spmd flight --job PID          # of the job that spmdrun (or mpirun) with this number runs
spmd flight DIR | FILES...     # of a job that has ended, or of any folder
spmd prepare                   # compile what belongs to this processor, before any program
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .flight.diagnosis import duration, explain, table
from .flight.file import Flight, find, read_all
from .flight.html_report import page
from .flight.stats import collect
from .flight.timeline import MERGED, TraceError, load, write_trace
from .pipes import with_output

FOLDER = "SPMD_FLIGHT_DIR"
# The folder in which the ranks of a host write for spmdrun.
SHARED = Path("/dev/shm")
OF_SPMDRUN = "spmdrun-flight-*"


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="spmd",
        description="Look at jobs: what ranks wrote down, merged and explained. Prepare machines.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    flight = commands.add_parser(
        "flight",
        help="who waits where, who is missing: of a running job, or of what one left behind",
        description="Merge the flight records of a job's ranks and explain them.",
    )
    flight.add_argument("places", nargs="*", metavar="DIR|FILE", help="flight files, or folders")
    flight.add_argument("--job", type=int, metavar="PID", help="a running spmdrun, mpirun or rank")
    flight.add_argument("--last", type=int, default=0, metavar="N", help="also each rank's last N")
    flight.add_argument("--json", action="store_true", help="as JSON")
    flight.set_defaults(run=run_flight)
    stats = commands.add_parser(
        "stats",
        help="who was late, how often, at which line: of a job that ran with SPMD_TRACE=DIR",
        description="Say where the time of a traced job went, and who made whom wait.",
    )
    stats.add_argument("folder", metavar="DIR", help="the folder that SPMD_TRACE named")
    stats.add_argument("--html", metavar="FILE", help="write a page with timeline and tables")
    stats.add_argument("--json", action="store_true", help="as JSON")
    stats.add_argument("--rows", type=int, default=20, metavar="N", help="rows of a table (20)")
    stats.set_defaults(run=run_stats)
    trace = commands.add_parser(
        "trace",
        help="merge the traces of all ranks to one file for Perfetto or chrome://tracing",
        description="Merge the traces of a job's ranks: one clock, one file.",
    )
    trace.add_argument("folder", metavar="DIR", help="the folder that SPMD_TRACE named")
    trace.add_argument("-o", "--output", metavar="FILE", help="default: DIR/trace.json")
    trace.add_argument("--quiet", action="store_true", help="say nothing when all is well")
    trace.set_defaults(run=run_trace)
    prepare = commands.add_parser(
        "prepare",
        add_help=False,  # the library has it
        help="compile what belongs to this processor into the compile cache, before any program",
    )
    prepare.set_defaults(run=run_prepare)
    options, rest = parser.parse_known_args(argv)
    if options.run is run_prepare:
        return run_prepare(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return with_output(lambda: options.run(options))
    except TraceError as error:
        return _fail(str(error))


def run_flight(options: argparse.Namespace) -> int:
    """`spmd flight`: one job after the other."""
    jobs = [options.places] if options.places else list(_running(options.job))
    if not jobs:
        who = f"process {options.job}" if options.job else "a job on this host"
        return _fail(
            f"no flight files of {who} found. spmdrun keeps them while a job runs; under a plain "
            f"mpirun set {FOLDER}, and name that folder: spmd flight DIR"
        )
    code = 0
    for places in jobs:
        if not find(places):
            code = _fail(f"no flight files (rank-N.flight) in {' '.join(map(str, places))}")
            continue
        code = _show_job(places, options) or code
    return code


def _show_job(places: Sequence[str | Path], options: argparse.Namespace) -> int:
    flights, problems = read_all(places)
    for problem in problems:
        sys.stderr.write(f"spmd flight: {problem}\n")
    if not flights:
        return 1
    verdict = explain(flights)
    if options.json:
        last = {str(f.rank): list(_rows(f, options.last)) for f in flights} if options.last else {}
        print(json.dumps(verdict.as_dict() | ({"last": last} if last else {}), indent=1))
        return 0
    print("\n".join(verdict.lines()))
    for flight in flights if options.last else ():
        rows = [("call", "group", "collective", "bytes", "began", "waited and ran")]
        for row in _rows(flight, options.last):
            took = row["seconds"]
            said = "still in it" if took is None else duration(took)
            began = f"{row['began']:.6f}"
            group, nbytes = str(row["group"]), str(row["bytes"])
            rows.append((str(row["call"]), group, row["name"], nbytes, began, said))
        print(f"\nrank {flight.rank}, its last {len(rows) - 1} collectives:")
        print("\n".join(table(rows, right=(0, 3, 4))))
    return 0


def _rows(flight: Flight, count: int) -> Iterator[dict]:
    """The last records of a rank; times in seconds since the rank joined."""
    start = flight.clock[0]
    for record in flight.collectives()[-count:]:
        group = flight.groups.get(record.group)
        yield {
            "call": record.call,
            "group": group.name if group else record.group,
            "name": record.name,
            "bytes": record.nbytes,
            "began": (record.began - start) / 1e9,
            "seconds": (record.completed - record.began) / 1e9 if record.completed else None,
        }


def run_stats(options: argparse.Namespace) -> int:
    """`spmd stats`: tables, JSON, or a page."""
    timeline = load(options.folder)
    stats = collect(timeline)
    if options.html:
        Path(options.html).write_text(page(timeline, stats), encoding="utf-8")
        print(f"{stats.headline}\nwrote {options.html}")
    elif options.json:
        print(json.dumps(stats.as_dict(), indent=1))
    else:
        print("\n".join(stats.lines(options.rows)))
    return 0


def run_trace(options: argparse.Namespace) -> int:
    """`spmd trace`: the merged file."""
    timeline = load(options.folder)
    path = options.output or Path(options.folder, MERGED)
    write_trace(timeline, path)
    if not options.quiet:
        print(f"wrote {path}; open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


def run_prepare(arguments: Sequence[str]) -> int:
    """`spmd prepare`: work of the library, which this command does not import."""
    done = subprocess.run([sys.executable, "-m", "spmd", "prepare", *arguments])
    return done.returncode


# ---- running jobs ------------------------------------------------------------------------------


def _running(job: int | None) -> Iterator[list[Path]]:
    """The folders of flight files of running jobs: of all of spmdrun's, or of one process."""
    if job is not None:
        yield from ([folder] for folder in folders_of(job))
        return
    given = os.environ.get(FOLDER)
    for folder in [Path(given)] if given else sorted(SHARED.glob(OF_SPMDRUN)):
        if find([folder]):
            yield [folder]


def folders_of(job: int) -> list[Path]:
    """The folders that a process and those that it started write their flight files to."""
    family = {job}
    parents = {int(p.name): _parent(p) for p in Path("/proc").glob("[0-9]*")}
    for process in parents:
        chain = [process]
        while (above := parents.get(chain[-1])) and above not in chain:
            chain.append(above)
        if family & set(chain):
            family.update(chain[: chain.index(next(p for p in chain if p in family))])
    found: dict[Path, None] = {}
    for process in sorted(family):
        try:
            environ = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for entry in environ:
            name, _, value = entry.decode(errors="replace").partition("=")
            if name == FOLDER and value and find([value]):
                found[Path(value)] = None
    return list(found)


def _parent(process: Path) -> int | None:
    try:
        # The parent follows the state, which follows the name in parentheses.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _fail(text: str) -> int:
    sys.stderr.write(f"spmd: {text}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
