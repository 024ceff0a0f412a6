"""Times a case on all its sides in alternating blocks and checks that they computed the same.

Blocks alternate (spmd, jax, numpy, spmd, ...) so that a machine that slows down slows all of them.
All sides make the same number of calls; the number is chosen from the slowest side's time. A side
that raises, or computes something else, gets no time and is named in the table.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from types import MappingProxyType
from typing import Any

import numpy

from benchmarks.cases import Case

BLOCKS = 5
QUICK_BLOCKS = 2
QUICK_SIDES = ("spmd", "jax", "limit")
# A sample shorter than this measures the clock; a block longer than this lets the machine drift.
SAMPLE_SECONDS = 100e-6
BLOCK_SECONDS = 0.05
WIDE_VECTORS = "--xla_cpu_prefer_vector_width=512"
ROOT = Path(__file__).resolve().parent.parent


SECONDS, BYTES = "s", "B"


@dataclass(frozen=True)
class Result:
    """Seconds per call of one case on one side: the median and the quartiles around it.

    Of what is counted instead of timed (bytes), all three are the figure.
    """

    case: str
    side: str
    median: float
    low: float
    high: float
    samples: int
    calls: int
    unit: str = SECONDS

    @classmethod
    def of(cls, case: str, side: str, seconds: list[float], inner: int) -> Result:
        """Condense samples, each an average over `inner` calls."""
        low, middle, high = quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        del middle
        return cls(case, side, median(seconds), low, high, len(seconds), len(seconds) * inner)


@dataclass(frozen=True)
class Failure:
    """A side that has no time for a case, and why."""

    case: str
    side: str
    reason: str


class WorkerError(RuntimeError):
    """A worker answered with an exception, or ended."""


class Worker:
    """A side's process; `ask` sends one command and waits for its answer."""

    def __init__(self, side: str, devices: int, x64: bool, more: Mapping[str, str]):
        self.side = side
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(side, devices, x64), **more},
            cwd=ROOT,
        )

    def ask(self, **command: object) -> Any:
        """Send a command; the answer's seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        if not answer:
            raise WorkerError(f"the process of {self.side} ended; see its output above")
        reply = json.loads(answer)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["seconds"]

    @property
    def lives(self) -> bool:
        """Whether the process still answers."""
        return self.process.poll() is None

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            self.process.wait(timeout=30)
        self.process.kill()


def is_installed(side: str) -> bool:
    """Whether a side can be had; PyTorch is large and may be left out."""
    return side != "torch" or importlib.util.find_spec("torch") is not None


def environment(side: str, devices: int = 1, x64: bool = False) -> dict[str, str]:
    """The environment that a side's process runs in."""
    flags = [os.environ.get("XLA_FLAGS", "")]
    if devices > 1 or "device_count" in flags[0]:  # the last one counts
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    if side == "jax512":
        flags.append(WIDE_VECTORS)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SPMD_NUM_CPU_DEVICES": str(devices),
        "SPMD_ENABLE_X64": str(int(x64)),
        "JAX_ENABLE_X64": str(int(x64)),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags).strip(),
    }


class Team:
    """The processes of all sides for one kind of case; a process that ended is started anew.

    `more` is what their environment has besides.
    """

    def __init__(
        self, devices: int = 1, x64: bool = False, more: Mapping[str, str] = MappingProxyType({})
    ):
        self._settings = (devices, x64, dict(more))
        self._workers: dict[str, Worker] = {}

    def __getitem__(self, side: str) -> Worker:
        worker = self._workers.get(side)
        if worker is None or not worker.lives:
            worker = self._workers[side] = Worker(side, *self._settings)
        return worker

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()


def measure(
    case: Case, team: Team, blocks: int = BLOCKS, only: Sequence[str] = ()
) -> list[Result | Failure]:
    """Check and time one case on each of its sides, or on those among them that are named."""
    sides = [s for s in case.all_sides if (not only or s in only) and is_installed(s)]
    failures: list[Result | Failure] = []
    calls: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {side: str(Path(folder, f"{side}.npz")) for side in sides}
        for side in sides:
            try:
                calls[side] = team[side].ask(prepare=case.name, save=files[side])
            except WorkerError as error:
                failures.append(Failure(case.name, side, str(error)))
        for side, reason in differences(case, {s: files[s] for s in calls if s != "limit"}).items():
            failures.append(Failure(case.name, side, reason))
            del calls[side]
    timed = {side: t for side, t in calls.items() if side != "limit"}
    if not timed:
        return failures
    inner = max(1, math.ceil(SAMPLE_SECONDS / max(min(timed.values()), 1e-9)))
    count = int(min(100, max(2, BLOCK_SECONDS / (max(timed.values()) * inner))))
    seconds: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range(blocks):
        for side in calls:
            seconds[side] += team[side].ask(samples=min(count, 3) if side == "limit" else count,
                                            inner=inner)  # fmt: skip
    if "limit" in seconds:  # what the machine can do is what it did at best
        seconds["limit"] = [min(seconds["limit"])]
    return [Result.of(case.name, side, seconds[side], inner) for side in calls] + failures


def differences(case: Case, files: dict[str, str]) -> dict[str, str]:
    """The sides that computed something else than JAX did; a wrong result has no speed.

    PyTorch gives only the last result (the loss) of a program with many.
    """
    values = {side: list(numpy.load(path).values()) for side, path in files.items()}
    truth = next((side for side in ("jax", *values) if side in values), None)
    wrong = {}
    for side, found in values.items():
        if side == truth:
            continue
        expected = values[truth or ""]
        expected = expected[-len(found) :] if side == "torch" else expected
        try:
            assert len(expected) == len(found), f"{len(found)} results, not {len(expected)}"
            for one, two in zip(found, expected, strict=True):
                scale = max(1.0, float(numpy.max(numpy.abs(two), initial=0.0)))
                numpy.testing.assert_allclose(one, two, case.tolerance, case.tolerance * scale)
        except AssertionError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            wrong[side] = f"differs from {truth}: " + "; ".join(lines[1:5] or lines)
    return wrong
