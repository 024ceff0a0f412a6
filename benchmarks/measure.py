"""Times a case on all its sides in alternating blocks and checks that they computed the same.

Blocks alternate (spmd, jax, numpy, spmd, ...) so that a machine that slows down slows all of them.
All sides make the same number of calls; the number is chosen from the slowest side's time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import numpy

from benchmarks.cases import Case

BLOCKS = 7
# A sample shorter than this measures the clock; a block longer than this lets the machine drift.
SAMPLE_SECONDS = 200e-6
BLOCK_SECONDS = 0.15
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Result:
    """Seconds per call of one case on one side: the median and the quartiles around it."""

    case: str
    side: str
    median: float
    low: float
    high: float
    samples: int
    calls: int

    @classmethod
    def of(cls, case: str, side: str, seconds: list[float], inner: int) -> Result:
        """Condense samples, each an average over `inner` calls."""
        low, middle, high = quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        del middle
        return cls(case, side, median(seconds), low, high, len(seconds), len(seconds) * inner)


class Worker:
    """A side's process; `ask` sends one command and waits for its answer."""

    def __init__(self, side: str, devices: int):
        flags = os.environ.get("XLA_FLAGS", "")
        if devices > 1:
            flags = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "SPMD_NUM_CPU_DEVICES": str(devices),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
        }
        self.side = side
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def ask(self, **command: object) -> list[float] | float:
        """Send a command; the answer's seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"the worker of {self.side} ended at {command}; see its output above"
            )
        return json.loads(answer)["seconds"]

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


@contextlib.contextmanager
def workers(sides: tuple[str, ...], devices: int) -> Iterator[dict[str, Worker]]:
    """One process per side, ended in any case."""
    started = {side: Worker(side, devices) for side in sides}
    try:
        yield started
    finally:
        for worker in started.values():
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                worker.close()
            worker.process.kill()


def measure(case: Case, team: dict[str, Worker], blocks: int = BLOCKS) -> list[Result]:
    """Check and time one case on each of its sides."""
    with tempfile.TemporaryDirectory() as folder:
        files = {side: str(Path(folder, f"{side}.npz")) for side in case.sides}
        calls = [team[side].ask(prepare=case.name, save=files[side]) for side in case.sides]
        check_equal(case, files)
    slowest, fastest = max(calls), min(calls)
    inner = max(1, math.ceil(SAMPLE_SECONDS / max(fastest, 1e-9)))
    count = int(min(100, max(2, BLOCK_SECONDS / (slowest * inner))))
    seconds: dict[str, list[float]] = {side: [] for side in case.sides}
    for _ in range(blocks):
        for side in case.sides:
            seconds[side] += team[side].ask(samples=count, inner=inner)
    return [Result.of(case.name, side, seconds[side], inner) for side in case.sides]


def check_equal(case: Case, files: dict[str, str]) -> None:
    """All sides must have computed what the first one did; a wrong result has no speed."""
    values = {side: list(numpy.load(path).values()) for side, path in files.items()}
    first, *others = case.sides
    for other in others:
        for one, two in zip(values[first], values[other], strict=True):
            numpy.testing.assert_allclose(
                one,
                two,
                rtol=case.tolerance,
                atol=case.tolerance * max(1.0, float(numpy.max(numpy.abs(two), initial=0.0))),
                err_msg=f"{case.name}: {first} and {other} differ",
            )
