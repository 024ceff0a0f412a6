"""The first thing to run on a machine with a GPU: whether CUDA works there, and how fast it is.

python -m benchmarks.gpu_first_run                      everything; under 8 minutes on one GPU
python -m benchmarks.gpu_first_run bandwidth product    some parts
python -m benchmarks.gpu_first_run --json out.json      keep the record
SPMD_CUDA_DRIVER=emulator python -m benchmarks.gpu_first_run --small     without a GPU

Each part is a process of its own, with a limit of time; one that fails is a line of the table, and
the rest goes on. The exit status is 1 if any part failed. Goals count on a GPU only: the emulator
shows that the parts work.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import Figure
from benchmarks.measure import ROOT
from benchmarks.report import commit, lines

# The seconds that a part may take.
LIMITS = {"tests": 180, "examples": 120}
LIMIT = 60
# The rank that lives ends as soon as it is told; a job that hangs is ended by its limit.
SURVIVOR_SECONDS = 10
EXAMPLES = (
    ("ring_all_reduce.py", "--devices", "1"),
    ("train_digits.py", "--epochs", "1"),
)
STEPS = "mlp", "transformer"
RIVALS = "jax", "torch"

KILLED = """
import os, signal, time
import numpy as np
import spmd
from spmd import lax

total = spmd.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
x = np.ones((spmd.local_device_count(), 4), np.float32)
assert np.asarray(total(x).addressable_data(0)).sum() == 4 * spmd.device_count()
if spmd.process_index() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
try:
    total(x).block_until_ready()
finally:
    print(f"survived {time.monotonic() - start:.3f} s", flush=True)
"""


@dataclass(frozen=True)
class Line:
    """A line of the table: a figure of a part, or why it has none.

    `verdict` is "ok", "missed" (a goal), "failed", or "not there" of what can't be compared with.
    """

    part: str
    what: str
    verdict: str
    value: float | None = None
    unit: str = ""
    goal: float | None = None
    reason: str = ""


class PartError(RuntimeError):
    """A part ended with an error or took too long."""


@dataclass(frozen=True)
class Run:
    """The driver, the size, and how processes of parts are started."""

    driver: str
    size: str
    limit: float | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment of parts on a GPU."""
        platforms = "cuda" if self.driver == "cupy" else "cpu"  # where JAX computes
        return {
            **os.environ,
            "SPMD_PLATFORM": "cuda",
            "SPMD_CUDA_DRIVER": self.driver,
            "JAX_PLATFORMS": platforms,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }

    def output(self, part: str, words: Sequence[str], **more: str) -> str:
        """What a process printed; raises a `PartError` if it failed."""
        limit = self.limit or LIMITS.get(part, LIMIT)
        done = self.process(words, limit, more)
        if done.returncode:
            raise PartError(f"exit status {done.returncode}: {_end(done.stderr or done.stdout)}")
        return done.stdout

    def process(
        self, words: Sequence[str], limit: float, more: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with some words."""
        try:
            return subprocess.run(
                [sys.executable, *words],
                capture_output=True,
                text=True,
                timeout=limit,
                cwd=ROOT,
                env={**self.environment, **more},
            )
        except subprocess.TimeoutExpired:
            raise PartError(f"took longer than {limit:g} s") from None

    def figures(self, part: str, *side: str) -> list[Figure]:
        """The figures of a part of `gpu_parts`."""
        said = self.output(part, ["-m", "benchmarks.gpu_parts", part, self.size, *side])
        return [Figure(**each) for each in json.loads(said.splitlines()[-1])]

    def line(self, part: str, figure: Figure) -> Line:
        """A figure with its verdict; goals are for GPUs."""
        missed = figure.goal is not None and figure.value < figure.goal and self.driver == "cupy"
        verdict = "missed" if missed else "ok"
        return Line(part, figure.what, verdict, figure.value, figure.unit, figure.goal)


def _end(text: str) -> str:
    kept = [line for line in text.strip().splitlines() if line.strip()]
    return kept[-1] if kept else "no output"


# ---- parts -------------------------------------------------------------------------------------


def _tests(run: Run) -> Iterator[Line]:
    """Op records and programs, as the test suite compares them with the CPU."""
    chosen = ["-k", "control_flow"] if run.size == "small" else []
    words = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *chosen]
    said = run.output("tests", [*words, "tests/compile/cuda"])
    count = next((int(w) for w, v in zip(said.split(), said.split()[1:], strict=False)
                  if v.startswith("passed")), 0)  # fmt: skip
    if not count:
        raise PartError(f"no test ran: {_end(said)}")
    yield Line("tests", "tests that passed", "ok", count)


def _examples(run: Run) -> Iterator[Line]:
    chosen = EXAMPLES[:1] if run.size == "small" else EXAMPLES
    for name, *words in chosen:
        yield from _tried("examples", name, lambda n=name, w=words: _example(run, n, w))


def _example(run: Run, name: str, words: Sequence[str]) -> Iterator[Line]:
    start = time.monotonic()
    run.output("examples", [f"examples/{name}", *words])
    yield Line("examples", name, "ok", time.monotonic() - start, "s")


def _figures(part: str) -> Callable[[Run], Iterator[Line]]:
    def lines_of(run: Run) -> Iterator[Line]:
        for figure in run.figures(part):
            yield run.line(part, figure)

    return lines_of


def _steps(run: Run) -> Iterator[Line]:
    """Training steps, beside JAX and PyTorch where they are installed."""
    for name in STEPS:
        yield from _tried("steps", name, lambda name=name: _step(run, name))


def _step(run: Run, name: str) -> Iterator[Line]:
    ours, loss = run.figures(name, "spmd")
    yield run.line("steps", ours)
    for rival in RIVALS:
        if importlib.util.find_spec(rival) is None:
            reason = f"{rival} is not installed"
            yield Line("steps", f"{name}, {rival}", "not there", reason=reason)
            continue
        if rival == "torch" and run.driver != "cupy":
            reason = "PyTorch is compared with on a GPU only"
            yield Line("steps", f"{name}, {rival}", "not there", reason=reason)
            continue
        try:
            theirs, its_loss = run.figures(name, rival)
        except PartError as error:  # that it does not run here is not our failure
            yield Line("steps", f"{name}, {rival}", "not there", reason=str(error))
            continue
        if abs(its_loss.value - loss.value) > 2e-2 * abs(its_loss.value):
            raise PartError(f"the third loss is {loss.value:g}, that of {rival} {its_loss.value:g}")
        yield run.line("steps", theirs)
        ratio = Figure(f"{name}, {rival} / spmd", theirs.value / ours.value, "", 1.0)
        yield run.line("steps", ratio)


def _ranks(run: Run) -> Iterator[Line]:
    """Two ranks on one GPU: their exchange, through the host's memory."""
    start = time.monotonic()
    words = ["-m", "launch", "-n", "2", "examples/ring_all_reduce.py"]
    run.output("ranks", words, SPMD_NUM_CUDA_DEVICES="1")
    yield Line("ranks", "two ranks on one GPU", "ok", time.monotonic() - start, "s")


def _killed(run: Run) -> Iterator[Line]:
    """A rank is killed; the other must say so and end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "killed.py")
        path.write_text(KILLED, encoding="utf-8")
        words = ["-m", "launch", "-n", "2", str(path)]
        done = run.process(words, run.limit or LIMIT, {"SPMD_NUM_CUDA_DEVICES": "1"})
    said = done.stdout + done.stderr
    if not done.returncode or "rank 1" not in said:
        raise PartError(f"exit status {done.returncode}, and nothing of rank 1: {_end(said)}")
    _, found, after = said.partition("survived ")
    took = float(after.split()[0]) if found else 0.0  # 0: it was ended while it waited
    if took > SURVIVOR_SECONDS:
        raise PartError(f"the other rank noticed after {took:g} s")
    yield Line("killed", "a rank is killed, the other ends", "ok", took, "s")


PARTS: dict[str, Callable[[Run], Iterator[Line]]] = {
    "tests": _tests,
    "examples": _examples,
    "bandwidth": _figures("bandwidth"),
    "product": _figures("product"),
    "launches": _figures("launches"),
    "steps": _steps,
    "ranks": _ranks,
    "killed": _killed,
}


def _tried(part: str, what: str, lines_of: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    """The lines of a part; an error is its last one."""
    try:
        yield from lines_of()
    except Exception as error:  # whatever it was, the other parts go on
        yield Line(part, what, "failed", reason=f"{type(error).__name__}: {error}")


def measure(run: Run, parts: Sequence[str]) -> dict[str, Any]:
    """Run parts, in order, and return the record."""
    found: list[Line] = []
    device: dict[str, Any] = {}
    start = time.monotonic()
    try:
        said = run.output("device", ["-m", "benchmarks.gpu_parts", "device", run.size])
        device = json.loads(said.splitlines()[-1])
    except PartError as error:
        found.append(Line("device", "what the machine has", "failed", reason=str(error)))
    for part in parts:
        print(f"{part} ...", file=sys.stderr, flush=True)
        found += _tried(part, part, lambda part=part: PARTS[part](run))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "size": run.size,
        "device": device,
        "seconds": round(time.monotonic() - start, 1),
        "lines": [asdict(line) for line in found],
    }


def table(record: Mapping[str, Any]) -> str:
    """The record as Markdown."""
    device = ", ".join(f"{name} {value}" for name, value in record["device"].items())
    rows = [["part", "what", "figure", "goal", "verdict"], ["---", "---", "---:", "---:", "---"]]
    for each in record["lines"]:
        line = Line(**each)
        value = "" if line.value is None else f"{line.value:.3g} {line.unit}".strip()
        goal = "" if line.goal is None else f"{line.goal:g}"
        verdict = f"{line.verdict}: {line.reason}" if line.reason else line.verdict
        rows.append([line.part, line.what, value, goal, verdict])
    head = f"{device or 'no device'}; commit {record['commit']}, {record['date']}"
    note = "" if record["device"].get("driver") == "cupy" else "\nNot on a GPU: no goal counts.\n"
    return f"{head}; {record['seconds']:g} s\n{note}\n{lines(rows)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for; 1 if any failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_first_run", description="Run and time spmd on a GPU."
    )
    parser.add_argument("parts", nargs="*", help=f"all, or some of: {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--small", action="store_true", help="small sizes, for the emulator")
    parser.add_argument("--limit", type=float, help="the seconds that a part may take")
    args = parser.parse_args(arguments)
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}")
    driver = os.environ.get("SPMD_CUDA_DRIVER", "cupy")
    run = Run(driver, "small" if args.small else "full", args.limit)
    record = measure(run, [p for p in PARTS if not args.parts or p in args.parts])
    if args.json:
        args.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(table(record))
    return int(any(line["verdict"] == "failed" for line in record["lines"]))


if __name__ == "__main__":
    sys.exit(main())
