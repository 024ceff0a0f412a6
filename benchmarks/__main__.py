"""The command line of the benchmarks.

python -m benchmarks                           everything
python -m benchmarks dispatch kernels          some subjects
python -m benchmarks kernels --only softmax    the cases whose name contains a text
python -m benchmarks kernels --sides spmd jax  some sides
python -m benchmarks --quick                   fewer samples: for work in progress
python -m benchmarks all --json out.json       keep the record
python -m benchmarks collectives --plot x.svg  collectives of every kind and size, drawn too
python -m benchmarks show out.json ...         print records again, the collectives together
python -m benchmarks profile softmax           where the time of spmd goes, step by step
python -m benchmarks compare old.json new.json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import Case
from benchmarks.cases import SUBJECTS
from benchmarks.collectives import (
    digest,
    measure_collectives,
    measure_over_ranks,
    osu_table,
    plot,
)
from benchmarks.compile_time import measure_compile
from benchmarks.limits import capacities
from benchmarks.measure import BLOCKS, QUICK_BLOCKS, QUICK_SIDES, Failure, Result, Team, measure
from benchmarks.memory import FREED_AT_ONCE, measure_memory
from benchmarks.report import compare, load, load_average, machine_to_ourselves, record, save, show
from benchmarks.sides import load_side

PLANNED = ("kernels", "programs")
# What is between arguments and results shows in gradients and in what is made of several kernels.
PLANNED_KERNELS = ("gradient", "attention", "layer", "cumsum", "random")
COMPILE = ("compile", "cached", "depth")
EVERYTHING = (
    "dispatch", "kernels", "functions", "programs", *COMPILE, "memory", "psum", "collectives",
    "sharding", "sharding-ranks", "libraries",
)  # fmt: skip


def run(
    subject: str, only: str, blocks: int, quick: bool, sides: Sequence[str]
) -> list[Result | Failure]:
    """Measure one subject, saying on standard error how far it is."""
    if subject in COMPILE:
        return measure_compile(subject, only, quick, _progress)
    if subject == "collectives":
        return measure_collectives(only, quick, sides, _progress)
    if subject == "sharding-ranks":
        return measure_over_ranks(only, quick, sides, _progress)
    if subject == "memory":
        planned = [case for name in PLANNED for case in SUBJECTS[name]() if plans(case)]
        with Team(more=FREED_AT_ONCE) as team:
            return measure_memory([c for c in planned if only in c.name], team, _progress)
    cases = [case for case in SUBJECTS[subject]() if only in case.name]
    results: list[Result | Failure] = []
    for settings in sorted({case.settings for case in cases}):
        with Team(*settings) as team:
            for case in cases:
                if case.settings == settings:
                    _progress(case.name)
                    results += measure(case, team, blocks, sides)
    order = {case.name: k for k, case in enumerate(cases)}
    return sorted(results, key=lambda result: order[result.case])


def plans(case: Case) -> bool:
    """Whether a case says something about the planning of memory."""
    return case.name.startswith("programs/") or any(n in case.name for n in PLANNED_KERNELS)


def profile_cases(only: str) -> None:
    """Print the time of each step of the programs of some cases."""
    side = load_side("spmd")

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        jitted = side.jit(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            print(side.top.debug.profile(jitted)(*args, **kwargs), end="\n\n")
            return jitted(*args, **kwargs)

        return call

    for make in SUBJECTS.values():
        for case in make():
            if only in case.name and case.settings == (1, False):
                print(f"## {case.name}\n")
                case.make(dataclasses.replace(side, jit=watched))()


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run subjects, or print or compare records."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["compare"]:
        if len(arguments) != 3:
            raise SystemExit("usage: python -m benchmarks compare old.json new.json")
        print(compare(load(Path(arguments[1])), load(Path(arguments[2]))))
        return
    if arguments[:1] == ["show"]:
        args = _parse(arguments[1:], "records")
        results = []
        for path in args.subjects:
            saved = load(Path(path))
            print(show(saved), end="\n\n")
            results += [Result(**result) for result in saved["results"]]
        show_collectives(results, args.plot)
        return
    if arguments[:1] == ["profile"]:
        if len(arguments) != 2:
            raise SystemExit("usage: python -m benchmarks profile TEXT-IN-THE-NAME")
        profile_cases(arguments[1])
        return
    args = _parse(arguments)
    subjects = args.subjects or ["all"]
    chosen = EVERYTHING if "all" in subjects else [s for s in EVERYTHING if s in subjects]
    blocks = args.blocks or (QUICK_BLOCKS if args.quick else BLOCKS)
    sides = args.sides or (QUICK_SIDES if args.quick and chosen != ["collectives"] else ())
    with machine_to_ourselves():
        load_before = load_average()
        able = capacities() if {"kernels", "programs"} & set(chosen) else []
        results: list[Result | Failure] = []
        for subject in chosen:
            results += run(subject, args.only, blocks, args.quick, sides)
            # What was measured is kept, whatever becomes of the rest.
            if args.json:
                save(record(results, load_before, able), args.json)
    print(show(record(results, load_before, able)))
    show_collectives([r for r in results if isinstance(r, Result)], args.plot)


def show_collectives(results: Sequence[Result], drawing: Path | None) -> None:
    """Print what there is of collectives in their own way, and draw it if that is wished."""
    timed = [r for r in results if r.case.startswith("collectives/")]
    if not timed:
        return
    print(f"\n{osu_table(timed)}\n{digest(timed)}")
    if drawing:
        plot(timed, drawing)


def _parse(arguments: list[str], given: str = "subjects") -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Time spmd beside JAX, NumPy and PyTorch."
    )
    parser.add_argument("subjects", nargs="*", help=f"all, or some of: {', '.join(EVERYTHING)}")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument("--sides", nargs="*", help="only these sides, where a case has them")
    parser.add_argument("--quick", action="store_true", help="few samples, for work in progress")
    parser.add_argument("--plot", type=Path, help="draw the collectives to this file")
    parser.add_argument("--blocks", type=int, help="alternating blocks per side")
    args = parser.parse_args(arguments)
    if given == "subjects" and (unknown := set(args.subjects) - {"all", *EVERYTHING}):
        parser.error(f"unknown subjects {sorted(unknown)}; there are all, {', '.join(EVERYTHING)}")
    return args


if __name__ == "__main__":
    main()
