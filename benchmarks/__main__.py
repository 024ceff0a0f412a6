"""The command line of the benchmarks.

python -m benchmarks                           everything
python -m benchmarks dispatch kernels          some subjects
python -m benchmarks kernels --only softmax    the cases whose name contains a text
python -m benchmarks all --json out.json       keep the record
python -m benchmarks compare old.json new.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.cases import SUBJECTS
from benchmarks.compile_time import measure_compile
from benchmarks.measure import BLOCKS, Result, measure, workers
from benchmarks.ranks import measure_ranks
from benchmarks.report import compare, load, load_average, machine_to_ourselves, record, save, show

EVERYTHING = ("dispatch", "kernels", "mlp", "compile", "psum", "ranks")


def run(subject: str, only: str, blocks: int) -> list[Result]:
    """Measure one subject, saying on standard error how far it is."""
    if subject == "compile":
        _progress("compile: fresh processes")
        return measure_compile(only)
    if subject == "ranks":
        _progress("ranks: fresh jobs")
        return measure_ranks()
    cases = [case for case in SUBJECTS[subject]() if only in case.name]
    results = []
    for devices in sorted({case.devices for case in cases}):
        group = [case for case in cases if case.devices == devices]
        sides = tuple(dict.fromkeys(side for case in group for side in case.sides))
        with workers(sides, devices) as team:
            for case in group:
                _progress(case.name)
                results += measure(case, team, blocks)
    return results


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run subjects, or compare two records."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["compare"]:
        if len(arguments) != 3:
            raise SystemExit("usage: python -m benchmarks compare old.json new.json")
        print(compare(load(Path(arguments[1])), load(Path(arguments[2]))))
        return
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Time spmd beside JAX and NumPy."
    )
    parser.add_argument("subjects", nargs="*", help=f"all, or some of: {', '.join(EVERYTHING)}")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="alternating blocks per side")
    args = parser.parse_args()
    subjects = args.subjects or ["all"]
    if unknown := set(subjects) - {"all", *EVERYTHING}:
        parser.error(f"unknown subjects {sorted(unknown)}; there are all, {', '.join(EVERYTHING)}")
    chosen = EVERYTHING if "all" in subjects else subjects
    with machine_to_ourselves():
        load_before = load_average()
        results = [result for subject in chosen for result in run(subject, args.only, args.blocks)]
    saved = record(results, load_before)
    if args.json:
        save(saved, args.json)
    print(show(saved))


if __name__ == "__main__":
    main()
