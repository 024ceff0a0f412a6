"""Prints the table: `python -m tests.faults [-j JOBS] [-v] [NAME ...]`."""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import sys

from tests.faults.corpus import KINDS, programs
from tests.faults.runner import Result, run


def main() -> int:
    """Run the programs, print a line for each and the table; 1 if one was not named rightly."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="files or programs: `stuck`, `raising.in_vmap`")
    parser.add_argument("-j", "--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("-v", "--verbose", action="store_true", help="show what was printed")
    parser.add_argument("--ci", action="store_true", help="only the part that CI runs")
    chosen = parser.parse_args()
    wanted = [p for p in programs(chosen.names) if p.ci or not chosen.ci]
    results = []
    with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
        for result in pool.map(run, wanted):
            print(_line(result), flush=True)
            if chosen.verbose or (not result.verdict.is_right and len(wanted) == 1):
                print(result.err)
            results.append(result)
    print("\n" + table(results))
    return 0 if all(result.verdict.is_right for result in results) else 1


def _line(result: Result) -> str:
    program, wrong = result.program, result.verdict.wrong
    seconds = f"{result.seconds:5.1f} s" if result.seconds is not None else " " * 7
    what = "; ".join(wrong) or ("named" if program.is_fault else "left in peace")
    return f"{'ok  ' if not wrong else 'NOT '} {seconds}  {program.name:55} {what}"


def table(results: list[Result]) -> str:
    """By kind of fault: how many programs, how many named, the slowest; then the look-alikes."""
    rows = ["| kind | what is wrong | programs | named | slowest |", "|---|---|---|---|---|"]
    for kind, meaning in KINDS.items():
        of_kind = [r for r in results if r.program.kind == kind]
        if not of_kind:
            continue
        right = sum(r.verdict.is_right for r in of_kind)
        slowest = max((r.seconds for r in of_kind if r.seconds is not None), default=None)
        time = f"{slowest:.1f} s" if slowest is not None else "-"
        rows.append(f"| {kind} | {meaning} | {len(of_kind)} | {right} | {time} |")
    faults = [r for r in results if r.program.is_fault]
    alike = [r for r in results if not r.program.is_fault]
    for what, some in (("faults named", faults), ("look-alikes left in peace", alike)):
        if some:
            right = sum(r.verdict.is_right for r in some)
            rows.append(f"\n{what}: {right} of {len(some)} ({100 * right / len(some):.0f} %)")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
